"""Who gives way: the victims that make room for a gang which does not fit.

Take candidates in order until the gang fits, then give back every one without whom it still fits. Whom a queue may
take follows Kueue's rules (KEP-1337 preemption within cohorts, KEP-79, KEP-1714 fair sharing), as does the order of
LOWEST_PRIORITY. LEAST_WORK_LOST tries several orders, keeps what costs least, and never loses more than that one
(greedy weighted set cover with reverse deletion: Chvatal 1979, Williamson and Shmoys 2011, 1.2 and 7.1).

The searches are of one gang against one tree, and leave it as they found it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Protocol

from queuectl.core.elastic import fewest
from queuectl.core.tree import Node, Share, Tree
from queuectl.model.plan import Placement, Portion
from queuectl.model.policy import Amounts, Cause, Cell, FairRule, Preemption, Reclaim, VictimChoice, Within
from queuectl.model.work import NO_WORK, RESTART_SECONDS, Work

SWAPS = 3  # of the dearest victims, whom it is tried to do without
ROUNDS = 4  # of such tries, at most
ENOUGH = 5_000  # candidates looked at in all searches; after that only the first orders are tried


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

    def cheapest_first(self, gangs: Sequence[Running], price: Callable[[Running], Work]) -> list[Running]:
        """Order gangs by what it costs to make a place, those together that make one."""


class _Nothing:
    def take(self, gang: Running) -> None:
        pass

    def put_back(self, gang: Running) -> None:
        pass

    def fits(self) -> bool:
        return True

    def cheapest_first(self, gangs: Sequence[Running], price: Callable[[Running], Work]) -> list[Running]:
        return sorted(gangs, key=price)


@dataclass(frozen=True)
class Field:
    """All that a search looks at; usage in ``tree`` includes that of every running gang."""

    tree: Tree
    running: Mapping[str, Sequence[Running]]  # by queue
    rules: Mapping[str, Preemption]  # by queue
    fair: tuple[FairRule, ...] = ()  # none: fair sharing is off
    taken: Collection[str] = ()  # uids of those who are on their way out for somebody else
    beside: Beside = field(default_factory=_Nothing)
    now: float = 0.0
    budgets: Mapping[str, int] = field(default_factory=dict)  # disruption budget → pods that may be evicted
    quick: bool = False  # whoever gives way; the cheapest need not be looked for
    blind: bool = False  # look at neither shields nor patience: who could give way at another time?
    shielded: dict[str, Running] = field(default_factory=dict)  # who was passed over for a shield, filled in

    def candidates(self, queue: str, ask: "Ask", rule: Within | Reclaim) -> list[Running]:
        """Return who of a queue may be taken by the rule and uses what is contested."""
        if rule in {Within.NEVER, Reclaim.NEVER}:
            return []
        return [
            gang
            for gang in self.running.get(queue, ())
            if gang.uid not in self.taken
            and _uses(gang, ask.contested)
            and _may_take(rule, gang, ask)
            and self._is_open(gang, ask)
        ]

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


def find_victims(world: Field, ask: Ask) -> list[Victim]:
    """Return a set of victims none of whom is needless, or none when no allowed set makes the gang fit."""
    return _by_share(world, ask) if world.fair else _by_priority(world, ask)


def victim_order(gang: Running, queue: str) -> tuple[bool, bool, int, float, str]:
    """Order of taking: 1. evicting already 2. other queues 3. lower priority 4. admitted later 5. uid."""
    return (not gang.evicting, gang.queue == queue, gang.priority, -gang.admitted_at, gang.uid)


class _Trial:
    """Gangs taken out of the field for the time of a search."""

    def __init__(self, world: Field, ask: Ask, *, borrowing: bool, counted: bool = False) -> None:
        self._world = world
        self._ask = ask
        self._home = world.tree.nodes[ask.queue]
        self._borrowing = borrowing and ask.borrows
        self.counted = counted  # the newcomer is counted in the tree
        self._left = {} if world.blind else dict(world.budgets)
        self.taken: dict[str, Victim] = {}

    def within_budgets(self, gang: Running) -> bool:
        """Tell whether disruption budgets allow to take the gang as well."""
        if gang.evicting or self._world.blind or all(self._left.get(key, 0) >= pods for key, pods in gang.covered):
            return True
        self._world.shielded[gang.uid] = gang
        return False

    def take(self, victim: Victim) -> None:
        self.taken[victim.gang.uid] = victim
        self._change(victim.gang, -1)

    def put_back(self, victim: Victim) -> None:
        del self.taken[victim.gang.uid]
        self._change(victim.gang, +1)

    def close(self) -> None:
        for victim in reversed(list(self.taken.values())):
            self.put_back(victim)

    def fits_quota(self) -> bool:
        tree, ask = self._world.tree, self._ask
        if self.counted:
            tree.remove(ask.queue, ask.usage)
        fits = all(
            amount <= self._home.available(cell) and (self._borrowing or not self._home.borrows_with(cell, amount))
            for cell, amount in ask.usage.items()
        )
        if self.counted:
            tree.add(ask.queue, ask.usage)
        return fits

    def fits(self) -> bool:
        return self.fits_quota() and self._world.beside.fits()

    def give_back(self, order: Sequence[Victim]) -> list[Victim]:
        """Give back, in this order, everybody without whom it fits, several at once where that goes well.

        Return who is needed, in the order of taking.
        """
        all_taken = list(self.taken)
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
        return [self.taken[uid] for uid in all_taken if uid in self.taken]

    def _change(self, gang: Running, sign: int) -> None:
        world = self._world
        (world.tree.add if sign > 0 else world.tree.remove)(gang.queue, gang.usage)
        (world.beside.put_back if sign > 0 else world.beside.take)(gang)
        if not gang.evicting:
            for key, pods in gang.covered:
                self._left[key] = self._left.get(key, 0) + sign * pods


# The least work lost


def _least_lost(
    world: Field,
    ask: Ask,
    peers: list[Victim],
    everybody: Sequence[Running],
    search: Callable[[Sequence[Running]], list[Victim]],
) -> list[Victim]:
    """Return the cheapest set that searches find, at most as dear in real work as that of the peers' order.

    ``search`` takes gangs in the order that it is given.
    """
    most = world.lost(peers)
    best, best_key = peers, _cost(world, ask, peers, everybody)
    looked_at = 0

    def improved(order: Sequence[Running]) -> bool:
        nonlocal best, best_key
        nonlocal looked_at
        looked_at += len(order)
        found = search(order)
        if not found or world.lost(found) > most:
            return False
        if reduce(Work.plus, (world.price(victim.gang) for victim in found), NO_WORK) > best_key[0]:
            return False
        key = _cost(world, ask, found, everybody)
        if key >= best_key:
            return False
        best, best_key = found, key
        return True

    orders = _orders(world, ask, everybody)
    for order in orders:
        improved(order)
    for _ in range(ROUNDS):
        dearest = sorted(best, key=lambda v: (world.price(v.gang), v.gang.uid), reverse=True)[:SWAPS]
        if not any(
            improved([gang for gang in order if gang.uid != victim.gang.uid])
            for victim in dearest
            if world.price(victim.gang) > NO_WORK
            for order in orders
            if looked_at < ENOUGH
        ):
            break
    return best


def _orders(world: Field, ask: Ask, gangs: Sequence[Running]) -> list[list[Running]]:
    """Return orders in which gangs may be taken: cheapest, cheapest for what they leave, and so by nodes."""

    def portion(gang: Running) -> float:
        """How much of what is contested the gang would leave."""
        parts = (min(1.0, gang.usage.get(cell, 0) / amount) for cell, amount in ask.usage.items() if amount > 0)
        return max(sum(parts), 1e-9)

    def price(gang: Running) -> tuple[bool, Work, bool, str]:
        return (not gang.evicting, world.price(gang), not gang.gives_up, gang.uid)

    def rate(gang: Running) -> tuple[bool, float, float, bool, float, str]:
        cost, part = world.price(gang), portion(gang)
        work = (cost.gpu_seconds / part, cost.pod_seconds / part)
        return (not gang.evicting, *work, not gang.gives_up, -part, gang.uid)

    by_rate = sorted(gangs, key=rate)
    return [by_rate, world.beside.cheapest_first(by_rate, world.price), sorted(gangs, key=price)]


def _cost(world: Field, ask: Ask, victims: Sequence[Victim], everybody: Sequence[Running]) -> tuple[Work, int, int]:
    """Return what a set of victims counts for, with those whom they take in turn when they come back.

    Then the number of all these gangs, and of those that go at once; who only gives up a piece is in neither.

    Else a victim of high priority that loses little would be taken instead of one of low priority, and then take
    that one too. Looked at roughly: by the amounts that spared gangs of the victim's queue hold which rank lower, and
    what its quota has left then.
    """
    gone = {victim.gang.uid: victim.gang for victim in victims}
    with world.without(gone.values()):
        world.tree.add(ask.queue, ask.usage)
        left = {
            queue: {cell: world.tree.nodes[queue].available(cell) for cell in ask.contested}
            for queue in {gang.queue for gang in gone.values()}
        }
        world.tree.remove(ask.queue, ask.usage)
    spared: dict[str, list[Running]] = {}
    for gang in everybody:
        if gang.uid not in gone and not gang.evicting:
            spared.setdefault(gang.queue, []).append(gang)
    for gangs in spared.values():
        gangs.sort(key=lambda gang: victim_order(gang, ask.queue), reverse=True)  # the lowest are popped first
    counted = list(gone.values())
    for again in sorted(gone.values(), key=lambda gang: (-gang.priority, gang.submitted_at, gang.uid)):
        if not (again.evicting or again.gives_up):
            counted += _taken_in_turn(world, ask, again, left[again.queue], spared.get(again.queue, []))
    price = reduce(Work.plus, map(world.price, counted), NO_WORK)
    return price, sum(not gang.gives_up for gang in counted), sum(not gang.gives_up for gang in gone.values())


def _taken_in_turn(world: Field, ask: Ask, again: Running, left: Amounts, spared: list[Running]) -> list[Running]:
    """Take out of ``spared``, the last first, those whom a victim takes when it comes back, if they suffice.

    ``left``: what its queue may still use. If that is all that it needs, it is nodes that it lacks.
    """
    rules = world.rules.get(again.queue)
    if rules is None or rules.within_queue is Within.NEVER or not spared:
        return []
    back = Ask(again.queue, again.priority, again.submitted_at, again.usage, ask.contested)
    needed = {cell: amount for cell, amount in again.usage.items() if amount > 0 and cell in ask.contested}
    missing = {cell: amount - left[cell] for cell, amount in needed.items() if amount > left[cell]} or needed
    lower: list[int] = []
    for index in range(len(spared) - 1, -1, -1):
        if not missing or spared[index].priority > again.priority:
            break
        if _may_take(rules.within_queue, spared[index], back):
            lower.append(index)
            usage = spared[index].usage
            missing = {cell: amount - usage.get(cell, 0) for cell, amount in missing.items()}
            missing = {cell: amount for cell, amount in missing.items() if amount > 0}
        elif rules.within_queue is Within.LOWER_PRIORITY:
            break
    return [] if missing else [spared.pop(index) for index in lower]


def _dearest_first(world: Field, taken: Iterable[Victim]) -> list[Victim]:
    return sorted(taken, key=lambda victim: (world.price(victim.gang), victim.gang.uid), reverse=True)


# Gangs that give up some of their pods


def _pieces(gang: Running) -> list[Running]:
    """Return an elastic gang in two: the pods that it can give up, and those that it can't run without."""
    part = gang.elastic
    if part is None:
        return [gang]
    stays = Portion(gang.placements, gang.usage).without(part)
    covered = dict(gang.elastic_covered)
    left = tuple((key, pods - covered.get(key, 0)) for key, pods in gang.covered)
    rest = replace(
        gang,
        uid=f"{gang.uid}/rest",
        of=gang,
        usage=stays.quota,
        placements=stays.placements,
        covered=left,
        elastic=None,
    )
    return [giving_up(gang, part), rest]


def giving_up(gang: Running, part: Portion) -> Running:
    """Return the piece of an elastic gang that it gives up."""
    return replace(
        gang, uid=f"{gang.uid}/{part.pods}", of=gang, gives_up=True, usage=part.quota, placements=part.placements,
        covered=gang.elastic_covered, elastic=None,
    )  # fmt: skip


def _in_pieces(victims: Iterable[Victim]) -> list[Victim]:
    return [
        victim if victim.gang.of else Victim(piece, victim.cause)
        for victim in victims
        for piece in ([victim.gang] if victim.gang.of else _pieces(victim.gang))
    ]


def _joined(world: Field, ask: Ask, pieces: Sequence[Victim], *, borrowing: bool) -> list[Victim]:
    """Return victims under their own uids. Who can't keep what it needs goes whole, and no pod is taken in vain."""
    whole = {v.gang.of.uid for v in pieces if v.gang.of and not v.gang.gives_up}
    trial = _Trial(world, ask, borrowing=borrowing)
    try:
        for victim in pieces:
            if victim.gang.of is None or victim.gang.of.uid not in whole:
                trial.take(victim)
            elif not victim.gang.gives_up:
                trial.take(Victim(victim.gang.of, victim.cause))
        for victim in [victim for victim in trial.taken.values() if victim.gang.gives_up]:
            _take_less(trial, victim)
        return [
            Victim(replace(v.gang, uid=v.gang.of.uid), v.cause) if v.gang.of else v
            for v in trial.taken.values()
            if v.gang.placements or not v.gang.gives_up
        ]
    finally:
        trial.close()


def _take_less(trial: _Trial, victim: Victim) -> None:
    """Take the fewest pods of a gang with which it still fits, of each of its roles as it can spare them."""
    gang = victim.gang.of or victim.gang

    def fits(part: Portion) -> bool:
        less = Victim(giving_up(gang, part), victim.cause)
        trial.take(less)
        fits = trial.fits()
        trial.put_back(less)
        return fits

    trial.put_back(victim)
    part = fewest(Portion(victim.gang.placements, victim.gang.usage), fits)
    trial.take(Victim(giving_up(gang, part), victim.cause))


# Without fair sharing


@dataclass(frozen=True, slots=True)
class _Candidate:
    gang: Running
    cause: Cause
    only_at_home: bool = False  # may be taken only if the newcomer ends within its own quota
    meet: Node | None = None  # the lowest subtree that holds both queues


def _by_priority(world: Field, ask: Ask) -> list[Victim]:
    node, rules = world.tree.nodes[ask.queue], world.rules[ask.queue]
    own = [_Candidate(gang, Cause.QUEUE) for gang in _own(world, ask)]
    advantage, others = _others(world, ask)
    own, advantage, others = (
        sorted(group, key=lambda c: victim_order(c.gang, ask.queue)) for group in (own, advantage, others)
    )
    groups = (advantage, others, own)
    candidates = [c for group in groups for c in group if c.gang.evicting]
    candidates += [c for group in groups for c in group if not c.gang.evicting]
    under = all(node.usage.get(cell, 0) < node.quota(cell).nominal for cell in ask.contested)
    if not ask.borrows:
        searches = [False]
    elif (not advantage and not others) or (not rules.borrow and not under):
        searches = [True]
    elif not rules.borrow and not advantage:
        searches = [False, True]
    else:
        searches = [True, False]
    for borrowing in searches:
        victims = _search(world, ask, candidates, borrowing=borrowing)
        if rules.victims is VictimChoice.LEAST_WORK_LOST:
            victims = _in_the_cheapest_way(world, ask, candidates, victims, borrowing=borrowing)
        if victims:
            return victims
    return []


def _in_the_cheapest_way(
    world: Field, ask: Ask, candidates: Sequence[_Candidate], peers: list[Victim], *, borrowing: bool
) -> list[Victim]:
    """Return the victims that cost least; ``peers``: those that the peers' order finds."""
    pieces = [replace(c, gang=piece) for c in candidates for piece in _pieces(c.gang)]
    if not peers and len(pieces) > len(candidates):
        peers = _search(world, ask, pieces, borrowing=borrowing)
    if world.quick:
        return peers
    search = partial(_search_in_order, world, ask, {c.gang.uid: c for c in pieces}, borrowing)
    peers = peers or _in_other_orders(world, ask, [piece.gang for piece in pieces], search)
    if not peers:
        return []
    best = _least_lost(world, ask, _in_pieces(peers), [piece.gang for piece in pieces], search)
    return _joined(world, ask, best, borrowing=borrowing)


def _in_other_orders(
    world: Field, ask: Ask, gangs: Sequence[Running], search: Callable[[Sequence[Running]], list[Victim]]
) -> list[Victim]:
    """Return what is found where the usual order finds nothing.

    It may have taken some on nodes where that is of no use, until nobody more of their queue might be taken.
    """
    if not gangs or len(gangs) > ENOUGH:
        return []
    return next((found for order in _orders(world, ask, gangs) if (found := search(order))), [])


def _search_in_order(
    world: Field,
    ask: Ask,
    of: Mapping[str, _Candidate],
    borrowing: bool,  # noqa: FBT001 - for partial
    order: Sequence[Running],
) -> list[Victim]:
    return _search(world, ask, [of[gang.uid] for gang in order], borrowing=borrowing, dearest_back=True)


def _search(
    world: Field, ask: Ask, candidates: Sequence[_Candidate], *, borrowing: bool, dearest_back: bool = False
) -> list[Victim]:
    """Take candidates in order until it fits, and give back the last, or the dearest, first."""
    trial = _Trial(world, ask, borrowing=borrowing)
    untried, step = 0, 1
    try:
        for candidate in candidates:
            if not _still_allowed(world.tree, ask, candidate, borrowing=borrowing):
                continue
            if not trial.within_budgets(candidate.gang):
                continue
            trial.take(Victim(candidate.gang, candidate.cause))
            untried += 1
            if untried < step or not trial.fits_quota():
                continue
            if world.beside.fits():
                break
            # Who is taken too many is given back, so that it need not be looked at after each of them.
            untried, step = 0, 2 * step if dearest_back else 1
        else:
            if not untried or not trial.fits():
                return []
        taken = list(trial.taken.values())
        return trial.give_back(_dearest_first(world, taken) if dearest_back else taken[-2::-1])
    finally:
        trial.close()


def _still_allowed(tree: Tree, ask: Ask, candidate: _Candidate, *, borrowing: bool) -> bool:
    """Tell whether the candidate may be taken now that others are gone."""
    if candidate.gang.queue == ask.queue:
        return True
    if borrowing and candidate.only_at_home:
        return False
    node: Node | None = tree.nodes[candidate.gang.queue]
    while node is not None and node is not candidate.meet:
        if node.within(ask.contested):
            return False
        node = node.parent
    return True


def _others(world: Field, ask: Ask) -> tuple[list[_Candidate], list[_Candidate]]:
    """Return candidates of other queues: those over whom the newcomer's subtree has the older right, and the rest."""
    advantage: list[_Candidate] = []
    rest: list[_Candidate] = []
    home, rules = world.tree.nodes[ask.queue], world.rules[ask.queue]
    if rules.reclaim is Reclaim.NEVER:
        return advantage, rest
    has_right, left = _holds(home, ask.usage)
    seen: Node = home
    for subtree in home.ancestors():
        for node in _borrowers(subtree, seen, ask.contested):
            for gang in world.candidates(node.name, ask, rules.reclaim):
                if has_right:
                    advantage.append(_Candidate(gang, Cause.RECLAIM, meet=subtree))
                elif not _may_borrow_over(rules, gang, ask):
                    rest.append(_Candidate(gang, Cause.RECLAIM, only_at_home=True, meet=subtree))
                else:
                    rest.append(_Candidate(gang, Cause.RECLAIM_WHILE_BORROWING, meet=subtree))
        holds, left = _holds(subtree, left)
        has_right = has_right or holds
        seen = subtree
    return advantage, rest


def _borrowers(top: Node, seen: Node, contested: frozenset[Cell]) -> Iterator[Node]:
    """Yield the nodes below ``top``, and not below ``seen``, that use more than their own, as do all above them."""
    for child in top.children:
        if child is not seen and not child.within(contested):
            yield child
            yield from _borrowers(child, seen, contested)


def _holds(node: Node, amounts: Amounts) -> tuple[bool, dict[Cell, int]]:
    """Tell whether the subtree's own quota holds that much more, and return what has to come from above."""
    fits = not any(node.borrows_with(cell, amount) for cell, amount in amounts.items())
    return fits, {cell: max(0, amount - node.kept_free(cell)) for cell, amount in amounts.items()}


def _own(world: Field, ask: Ask) -> list[Running]:
    return world.candidates(ask.queue, ask, world.rules[ask.queue].within_queue)


def _uses(gang: Running, contested: frozenset[Cell]) -> bool:
    return any(cell in contested and amount > 0 for cell, amount in gang.usage.items())


def _may_take(rule: Within | Reclaim, gang: Running, ask: Ask) -> bool:
    match rule:
        case Reclaim.ANY:
            return True
        case Within.LOWER_PRIORITY | Reclaim.LOWER_PRIORITY:
            return gang.priority < ask.priority
        case Within.LOWER_OR_NEWER_EQUAL_PRIORITY:
            return (gang.priority, -gang.submitted_at) < (ask.priority, -ask.submitted_at)
    return False


def _may_borrow_over(rules: Preemption, gang: Running, ask: Ask) -> bool:
    limit = rules.borrow_max_priority
    return rules.borrow and gang.priority < ask.priority and (limit is None or gang.priority <= limit)


# With fair sharing


def _by_share(world: Field, ask: Ask) -> list[Victim]:
    tree, rules = world.tree, world.rules[ask.queue]
    candidates = {ask.queue: _own(world, ask)}
    if rules.reclaim is not Reclaim.NEVER:
        root = tree.nodes[ask.queue].root
        for name in world.running:
            node = tree.nodes[name]
            if name != ask.queue and node.root is root and not node.within(ask.contested):
                candidates[name] = world.candidates(name, ask, rules.reclaim)
    everybody = [gang for gangs in candidates.values() for gang in gangs]

    def search(order: Sequence[Running]) -> list[Victim]:
        waiting: dict[str, list[Running]] = {}
        for gang in order:
            waiting.setdefault(gang.queue, []).append(gang)
        return _FairSearch(world, ask, {name: waiting[name] for name in candidates if name in waiting}).run()

    def in_order(gangs: Iterable[Running]) -> list[Victim]:
        return search(sorted(gangs, key=lambda gang: victim_order(gang, ask.queue)))

    victims = in_order(everybody)
    if rules.victims is VictimChoice.LOWEST_PRIORITY:
        return victims
    pieces = [piece for gang in everybody for piece in _pieces(gang)]
    if not victims and len(pieces) > len(everybody):
        victims = in_order(pieces)
    if world.quick:
        return victims
    victims = victims or _in_other_orders(world, ask, pieces, search)
    least = _least_lost(world, ask, _in_pieces(victims), pieces, search) if victims else []
    return _joined(world, ask, least, borrowing=True)


class _FairSearch:
    """Takes from the least fair queue first, as long as its rules allow, and of a queue in the given order."""

    def __init__(self, world: Field, ask: Ask, waiting: dict[str, list[Running]]) -> None:
        self.world = world
        self.ask = ask
        self.home = world.tree.nodes[ask.queue]
        self.path = set(self.home.ancestors())
        self.waiting = waiting
        self.trial = _Trial(world, ask, borrowing=True, counted=True)
        self.done: set[Node] = set()  # nodes that have no more candidates

    def run(self) -> list[Victim]:
        """Return the victims, or none; the last are given back first, for the first were the least fair's."""
        tree, ask = self.world.tree, self.ask
        tree.add(ask.queue, ask.usage)  # shares are those with the newcomer running
        try:
            return self.trial.give_back(list(self.trial.taken.values())[-2::-1]) if self._first() else []
        finally:
            self.trial.close()
            tree.remove(ask.queue, ask.usage)

    def _first(self) -> bool:
        first, *more = self.world.fair
        entitled = self.home.within(self.ask.contested)
        refused: dict[str, list[Running]] = {}
        for node in self._targets():
            gangs = self.waiting[node.name]
            if not self.trial.within_budgets(gangs[0]):
                gangs.pop(0)
                continue
            if node is self.home or entitled:
                if self._take(gangs.pop(0), Cause.QUEUE if node is self.home else Cause.RECLAIM):
                    return True
                continue
            mine, theirs = self._shares(node)
            while gangs:
                gang = gangs.pop(0)
                if not self.trial.within_budgets(gang):
                    continue
                if self._allows(first, mine, theirs, node, gang):
                    if self._take(gang, Cause.FAIR_SHARE):
                        return True
                    break  # shares have changed: another queue may be the least fair one now
                refused.setdefault(node.name, []).append(gang)
        return bool(more) and self._second(refused)

    def _second(self, refused: dict[str, list[Running]]) -> bool:
        """Try once more, one gang a queue, by the shares before."""
        self.waiting, self.done = refused, set()
        for node in self._targets():
            mine, theirs = self._shares(node)
            gang = self.waiting[node.name].pop(0)
            if mine.key < theirs.key and self.trial.within_budgets(gang) and self._take(gang, Cause.FAIR_SHARE):
                return True
            self.done.add(node)
        return False

    def _targets(self) -> Iterator[Node]:
        """Yield the queue to take from next, from the top down the child with the largest share."""
        if self.home.parent is None:
            while self.waiting.get(self.home.name) and self.home not in self.done:
                yield self.home
            return
        root = self.home.root
        while root not in self.done:
            node = self._least_fair(root)
            if node is not None:
                yield node

    def _least_fair(self, top: Node) -> Node | None:
        queues: list[tuple[Share, Node]] = []
        cohorts: list[tuple[Share, Node]] = []
        for child in top.children:
            if child in self.done:
                continue
            share = child.share()
            if child.children:
                useless = not share.borrowing and child not in self.path
            else:
                within = not share.borrowing or child.within(self.ask.contested)
                useless = (within and child is not self.home) or not self.waiting.get(child.name)
            if useless:
                self.done.add(child)
            else:
                (cohorts if child.children else queues).append((share, child))
        # A cohort wins a tie against a queue: the least fair can then be found within it.
        cohort = max(cohorts, key=lambda c: c[0].key, default=None)
        queue = min(queues, key=self._by_least_fair, default=None)
        if cohort is None and queue is None:
            self.done.add(top)
            return None
        if cohort is not None and (queue is None or cohort[0].key >= queue[0].key):
            return self._least_fair(cohort[1])
        return queue[1] if queue else None

    def _by_least_fair(self, entry: tuple[Share, Node]) -> tuple[object, ...]:
        share, node = entry
        infinite, value = share.key
        return (not infinite, -value, victim_order(self.waiting[node.name][0], self.ask.queue))

    def _shares(self, node: Node) -> tuple[Share, Share]:
        """Return the shares of the newcomer's and the victim's sides, just below where they meet."""
        meet = next(ancestor for ancestor in node.ancestors() if ancestor in self.path)
        return _below(self.home, meet).share(), _below(node, meet).share()

    def _allows(self, rule: FairRule, mine: Share, theirs: Share, node: Node, gang: Running) -> bool:
        if rule is FairRule.INITIAL:
            return mine.key < theirs.key
        with self.world.without([gang]):
            return mine.key <= self._shares(node)[1].key

    def _take(self, gang: Running, cause: Cause) -> bool:
        self.trial.take(Victim(gang, cause))
        return self.trial.fits()


def _below(node: Node, meet: Node) -> Node:
    """Return the node on the way up from ``node`` whose parent is ``meet``."""
    while node.parent is not meet:
        if node.parent is None:
            raise LookupError(f"{meet.name} is not above {node.name}")
        node = node.parent
    return node
