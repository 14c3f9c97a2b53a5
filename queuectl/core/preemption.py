"""Who may give way, and what a search for victims looks at and takes away for its time.

Whom a queue may take follows Kueue's rules (KEP-1337 preemption within cohorts, KEP-79, KEP-1714 fair sharing).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Protocol

from queuectl.core.tree import Tree
from queuectl.model.plan import Placement, Portion
from queuectl.model.policy import Amounts, Cause, Cell, FairRule, Preemption, Reclaim, Within
from queuectl.model.work import NO_WORK, RESTART_SECONDS, Work


@dataclass(frozen=True, slots=True)
class Running:
    """A gang that holds room, or is promised that of its victims, as a candidate. Times are Unix seconds."""

    uid: str
    queue: str
    priority: int
    submitted_at: float
    admitted_at: float  # for the first time
    usage: Amounts = field(compare=False)
    placements: tuple[Placement, ...] = field(default=(), compare=False)
    evicting: bool = False  # nothing is lost with it: on its way out already, or not there yet
    attempt: int = 0
    name: str = ""  # namespace/name
    gpus: int = 0
    pods: int = 1
    ready_at: float | None = None  # when all of its pods were; None: they have not been yet
    saved_at: float | None = None  # of its last checkpoint, if one is known
    preemptions: int = 0  # attempts of it that ended for somebody else
    preemptible: bool = True
    covered: tuple[tuple[str, int], ...] = ()  # disruption budget, how many of its pods it covers
    elastic: Portion | None = field(default=None, compare=False)  # the pods that it can give up and run on
    elastic_covered: tuple[tuple[str, int], ...] = ()
    of: "Running | None" = field(default=None, compare=False)  # the gang of which this is a piece, for a search
    gives_up: bool = False  # the piece that it can give up: its work goes on without it
    # Of one that is only promised its room: who is there in its stead, its victims and what is kept free for it.
    instead: "tuple[Running, ...] | None" = field(default=None, compare=False)
    returns: bool = False  # once it is gone it stands in line again

    @property
    def goes(self) -> bool:
        """Tell whether it is on its way out, and nobody has claimed its room."""
        return self.evicting and self.instead is None

    @property
    def works_since(self) -> float | None:
        """From when on its work would be lost; None: nothing would."""
        if self.evicting or self.gives_up or self.ready_at is None:
            return None
        return max(self.ready_at, self.saved_at or 0.0)

    def lost(self, now: float) -> Work:
        """Return the work that an eviction would lose."""
        since = self.works_since
        return NO_WORK if since is None else Work.of(self.gpus, self.pods, max(0, int(now - since)))

    def price(self, now: float) -> Work:
        """Return what an eviction counts for: what it loses, and a restart for each time it has given way before."""
        if self.evicting or self.gives_up:
            return NO_WORK
        return self.lost(now).plus(Work.of(self.gpus, self.pods, RESTART_SECONDS * self.preemptions))


def giving_up(gang: Running, part: Portion) -> Running:
    """Return the piece of an elastic gang that it gives up."""
    return replace(
        gang, uid=f"{gang.uid}/{part.pods}", of=gang, gives_up=True, usage=part.quota, placements=part.placements,
        covered=gang.elastic_covered, elastic=None,
    )  # fmt: skip


def there(gangs: Iterable[Running]) -> list[Running]:
    """Return who has the room of these gangs now."""
    return [one for gang in gangs for one in (gang.instead if gang.instead is not None else (gang,))]


@dataclass(frozen=True, slots=True)
class Ask:
    """The gang that does not fit. ``contested``: where it lacks quota or nodes."""

    queue: str
    priority: int
    submitted_at: float
    usage: Amounts
    contested: frozenset[Cell]
    borrows: bool = True  # False: it must end within its queue's own quota
    preempts: bool = True  # False: it may only have the room of those who are on their way out


@dataclass(frozen=True, slots=True)
class Victim:
    """A gang to be evicted, or the piece of one that it gives up, and why it may be."""

    gang: Running
    cause: Cause


class Beside(Protocol):
    """What must hold beside quotas with some gangs gone. All are there again at the end of a search."""

    def take(self, gang: Running) -> None:
        """Take a gang away."""

    def put_back(self, gang: Running) -> None:
        """Have it there again."""

    def fits(self) -> bool:
        """Tell whether it holds."""

    def cheapest(self, gangs: Sequence[Running], price: Callable[[Running], Work]) -> list[Running]:
        """Return those who leave what is missing at a low price, in order."""


class _Nothing:
    def take(self, gang: Running) -> None:
        pass

    def put_back(self, gang: Running) -> None:
        pass

    def fits(self) -> bool:
        return True

    def cheapest(self, gangs: Sequence[Running], price: Callable[[Running], Work]) -> list[Running]:
        return sorted(gangs, key=price)


_NEVER, _LOWER = (Within.NEVER, Reclaim.NEVER), (Within.LOWER_PRIORITY, Reclaim.LOWER_PRIORITY)


@dataclass(frozen=True)
class Field:
    """All that a search looks at; usage in ``tree`` includes that of every running gang."""

    tree: Tree
    running: Mapping[str, Sequence[Running]]  # by queue
    rules: Mapping[str, Preemption]  # by queue
    fair: tuple[FairRule, ...] = ()  # none: fair sharing is off
    going: Sequence[Running] = ()  # those of the running who go anyway
    taken: Collection[str] = ()  # uids of those who are on their way out for somebody else
    beside: Beside = field(default_factory=_Nothing)
    now: float = 0.0
    budgets: Mapping[str, int] = field(default_factory=dict)  # disruption budget → pods that may be evicted
    quick: bool = False  # whoever gives way; the cheapest need not be looked for
    blind: bool = False  # look at neither shields nor patience: who could give way at another time?
    shielded: dict[str, Running] = field(default_factory=dict)  # who was passed over for a shield, filled in

    def waited_for(self, ask: Ask) -> list[Victim]:
        """Return who goes anyway and uses what is contested: no rule has to allow that their room is taken then."""
        return [
            Victim(gang, Cause.QUEUE if gang.queue == ask.queue else Cause.RECLAIM)
            for gang in self.going
            if gang.uid not in self.taken and _uses(gang, ask.contested) and _leaves_it_to(gang, ask)
        ]

    def candidates(self, queue: str, ask: Ask, rule: Within | Reclaim) -> list[Running]:
        """Return who of a queue may be taken by the rule, does not go anyway and uses what is contested."""
        if rule in _NEVER:
            return []
        there = self.running.get(queue, ())
        if rule in _LOWER:  # once more, since most are out by that
            there = [gang for gang in there if gang.priority < ask.priority]
        return [
            gang
            for gang in there
            if not (gang.evicting and gang.goes and _leaves_it_to(gang, ask))
            and may_take(rule, gang, ask)
            and gang.uid not in self.taken
            and _uses(gang, ask.contested)
            and self._is_open(gang, ask)
        ]

    def has_candidates(self, ask: Ask) -> bool:
        """Tell whether anybody in the tree of queues uses what is contested and may be taken, or is shielded."""
        rules = self.rules[ask.queue]
        for node in self.tree.nodes[ask.queue].root.subtrees():
            rule = rules.within_queue if node.name == ask.queue else rules.reclaim
            if self.candidates(node.name, ask, rule) or self.shielded:
                return True
        return False

    def protected_until(self, gang: Running) -> float | None:
        """Return until when its queue lets the gang run at least; None when it has.

        A gang that is still starting is protected as if it ran from now on; its start has a deadline.
        """
        rules = self.rules.get(gang.queue)
        if rules is None or not rules.min_run_seconds or gang.evicting:
            return None
        until = (self.now if gang.ready_at is None else gang.ready_at) + rules.min_run_seconds
        return until if until > self.now else None

    def lost(self, victims: Iterable[Victim]) -> Work:
        """Return what all of them lose."""
        return reduce(Work.plus, (victim.gang.lost(self.now) for victim in victims), NO_WORK)

    def price(self, gang: Running) -> Work:
        """Return what an eviction of the gang counts for."""
        return gang.price(self.now)

    def dearest_first(self, victims: Iterable[Victim]) -> list[Victim]:
        """Order victims by that, the dearest first."""
        return sorted(victims, key=lambda victim: (self.price(victim.gang), victim.gang.uid), reverse=True)

    @contextmanager
    def without(self, gangs: Iterable[Running]) -> Iterator[None]:
        """Take gangs out of the tree for the time of the block."""
        taken = list(gangs)
        for gang in taken:
            self.tree.remove(gang.queue, gang.usage)
        try:
            yield
        finally:
            for gang in reversed(taken):
                self.tree.add(gang.queue, gang.usage)

    def _is_open(self, gang: Running, ask: Ask) -> bool:
        """Tell whether nothing shields the gang; budgets are looked at when it is taken, for they count together."""
        if gang.instead is not None:  # without the priority, two could take over from each other for ever
            return gang.preemptible and ask.preempts and gang.priority < ask.priority
        if gang.evicting or self.blind:
            return gang.preemptible or gang.evicting
        if not gang.preemptible or not ask.preempts:
            return False
        if self.protected_until(gang) is not None:
            self.shielded[gang.uid] = gang
            return False
        return True


def victim_order(gang: Running, queue: str) -> tuple[bool, bool, int, float, str]:
    """Order of taking: 1. evicting already 2. other queues 3. lower priority 4. admitted later 5. uid."""
    return (not gang.evicting, gang.queue == queue, gang.priority, -gang.admitted_at, gang.uid)


class Trial:
    """Gangs taken out of the field for the time of a search."""

    def __init__(self, world: Field, ask: Ask, *, borrowing: bool, counted: bool = False, heed: bool = True) -> None:
        """Start with nobody gone. ``borrowing``: whether the newcomer may borrow in the end.

        ``heed``: nobody is taken beyond disruption budgets, also for a moment.
        """
        self._world = world
        self._ask = ask
        self._home = world.tree.nodes[ask.queue]
        self._borrowing = borrowing and ask.borrows
        self.counted = counted  # the newcomer is counted in the tree
        self._heed = heed and not world.blind
        self._left = dict(world.budgets)
        self.passed_over = False  # whether anybody was, for a disruption budget
        self.taken: dict[str, Victim] = {}

    def within_budgets(self, gang: Running) -> bool:
        """Tell whether disruption budgets allow to take the gang as well."""
        if gang.evicting or not self._heed or all(self._left.get(key, 0) >= pods for key, pods in gang.covered):
            return True
        self._world.shielded[gang.uid] = gang
        self.passed_over = True
        return False

    def take(self, victim: Victim) -> None:
        """Take a gang away."""
        self.taken[victim.gang.uid] = victim
        self._change(victim.gang, -1)

    def put_back(self, victim: Victim) -> None:
        """Have it there again."""
        del self.taken[victim.gang.uid]
        self._change(victim.gang, +1)

    def close(self) -> None:
        """Have everybody there again."""
        for victim in reversed(list(self.taken.values())):
            self.put_back(victim)

    def fits_quota(self) -> bool:
        """Tell whether quotas hold the newcomer."""
        tree, ask = self._world.tree, self._ask
        if self.counted:
            tree.remove(ask.queue, ask.usage)
        fits = all(
            amount <= self._home.available(cell)
            and (self._borrowing or not self._home.borrows_with(cell, amount))
            and (ask.borrows or not self._home.exceeds_own(cell, amount))
            for cell, amount in ask.usage.items()
        )
        if self.counted:
            tree.add(ask.queue, ask.usage)
        return fits

    def fits(self) -> bool:
        """Tell whether quotas hold the newcomer, and what else must hold does."""
        return self.fits_quota() and self._world.beside.fits()

    def give_back(self, order: Sequence[Victim]) -> list[Victim]:
        """Give back, in this order, everybody without whom it fits, several at once where that goes well.

        Those go back first who are too many for a disruption budget. Return who is needed, in the order of taking, or
        none if these are too many still.
        """
        all_taken = list(self.taken)
        order = sorted(order, key=lambda victim: not self._too_many(victim.gang))
        at, size = 0, 1
        while at < len(order):
            some = order[at : at + size]
            for victim in some:
                self.put_back(victim)
            if self.fits():
                at, size = at + len(some), 2 * size
                continue
            for victim in some:
                self.take(victim)
            at, size = (at + 1, 1) if len(some) == 1 else (at, len(some) // 2)
        needed = [self.taken[uid] for uid in all_taken if uid in self.taken]
        return [] if any(self._too_many(victim.gang) for victim in needed) else needed

    def _too_many(self, gang: Running) -> bool:
        """Tell whether a disruption budget that covers a gang does not allow all that are taken."""
        if gang.evicting or self._world.blind:
            return False
        return any(self._left.get(key, 0) < 0 for key, _ in gang.covered)

    def _change(self, gang: Running, sign: int) -> None:
        world = self._world
        (world.tree.add if sign > 0 else world.tree.remove)(gang.queue, gang.usage)
        (world.beside.put_back if sign > 0 else world.beside.take)(gang)
        if not gang.evicting:
            for key, pods in gang.covered:
                self._left[key] = self._left.get(key, 0) + sign * pods


def _leaves_it_to(gang: Running, ask: Ask) -> bool:
    """Tell whether one that goes does not want its room again, or stands behind the newcomer in line then."""
    return not gang.returns or (-gang.priority, gang.submitted_at) > (-ask.priority, ask.submitted_at)


def may_take(rule: Within | Reclaim, gang: Running, ask: Ask) -> bool:
    """Tell whether a rule lets the newcomer take a gang."""
    match rule:
        case Reclaim.ANY:
            return True
        case Within.LOWER_PRIORITY | Reclaim.LOWER_PRIORITY:
            return gang.priority < ask.priority
        case Within.LOWER_OR_NEWER_EQUAL_PRIORITY:
            return (gang.priority, -gang.submitted_at) < (ask.priority, -ask.submitted_at)
    return False


def _uses(gang: Running, contested: frozenset[Cell]) -> bool:
    usage = gang.usage
    for cell in contested:  # noqa: SIM110 - a loop, since it runs so often
        if usage.get(cell, 0) > 0:
            return True
    return False
