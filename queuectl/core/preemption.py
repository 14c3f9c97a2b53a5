"""Who gives way: the victims that make room for a gang which does not fit.

Take candidates in order until the gang fits, then give back, from the last but one backwards, every one without
whom it still fits. Whom a queue may take, and in which order, follows Kueue's rules (KEP-1337 preemption within
cohorts, KEP-79, KEP-1714 fair sharing); the searches here are of one gang against one tree, and change nothing.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from queuectl.core.tree import Node, Share, Tree
from queuectl.model.plan import Placement
from queuectl.model.policy import Amounts, Cause, Cell, FairRule, Preemption, Reclaim, Within


@dataclass(frozen=True, slots=True)
class Running:
    """A gang that holds room, as a candidate."""

    uid: str
    queue: str
    priority: int
    submitted_at: float
    admitted_at: float
    usage: Amounts = field(compare=False)
    placements: tuple[Placement, ...] = field(default=(), compare=False)
    evicting: bool = False  # on its way out already, still holding
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """The gang that does not fit. ``contested``: where it lacks quota or nodes."""

    queue: str
    priority: int
    submitted_at: float
    usage: Amounts
    contested: frozenset[Cell]


@dataclass(frozen=True, slots=True)
class Victim:
    """A gang to be evicted, and why it may be."""

    gang: Running
    cause: Cause


@dataclass(frozen=True)
class Field:
    """All that a search looks at; usage in ``tree`` includes that of every running gang."""

    tree: Tree
    running: Mapping[str, Sequence[Running]]  # by queue
    rules: Mapping[str, Preemption]  # by queue
    fair: tuple[FairRule, ...] = ()  # none: fair sharing is off
    taken: Collection[str] = ()  # uids of those who are on their way out for somebody else
    fits_beside: Callable[[Sequence[Running]], bool] = lambda _: True  # what else must hold with these gangs gone

    def candidates(self, queue: str, ask: "Ask", rule: Within | Reclaim) -> list[Running]:
        """Return who of a queue may be taken by the rule and uses what is contested."""
        if rule in {Within.NEVER, Reclaim.NEVER}:
            return []
        return [
            gang
            for gang in self.running.get(queue, ())
            if gang.uid not in self.taken and _uses(gang, ask.contested) and _may_take(rule, gang, ask)
        ]

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


def find_victims(world: Field, ask: Ask) -> list[Victim]:
    """Return a set of victims none of whom is needless, or none when no allowed set makes the gang fit."""
    return _by_share(world, ask) if world.fair else _by_priority(world, ask)


def victim_order(gang: Running, queue: str) -> tuple[bool, bool, int, float, str]:
    """Order of taking: 1. evicting already 2. other queues 3. lower priority 4. admitted later 5. uid."""
    return (not gang.evicting, gang.queue == queue, gang.priority, -gang.admitted_at, gang.uid)


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
    if (not advantage and not others) or (not rules.borrow and not under):
        searches = [True]
    elif not rules.borrow and not advantage:
        searches = [False, True]
    else:
        searches = [True, False]
    for borrowing in searches:
        victims = _search(world, ask, candidates, borrowing=borrowing)
        if victims:
            return victims
    return []


def _search(world: Field, ask: Ask, candidates: Sequence[_Candidate], *, borrowing: bool) -> list[Victim]:
    taken: list[Victim] = []
    tree = world.tree
    try:
        for candidate in candidates:
            if not _still_allowed(tree, ask, candidate, borrowing=borrowing):
                continue
            taken.append(Victim(candidate.gang, candidate.cause))
            tree.remove(candidate.gang.queue, candidate.gang.usage)
            if _fits(world, ask, taken, borrowing=borrowing):
                return _give_back(world, ask, taken, borrowing=borrowing)
        return []
    finally:
        for victim in taken:
            tree.add(victim.gang.queue, victim.gang.usage)


def _give_back(world: Field, ask: Ask, taken: list[Victim], *, borrowing: bool) -> list[Victim]:
    """Return the victims that are needed; the tree is left as it was found, without all that were taken."""
    needed = list(taken)
    back: list[Victim] = []
    for victim in reversed(taken[:-1]):
        world.tree.add(victim.gang.queue, victim.gang.usage)
        needed.remove(victim)
        if _fits(world, ask, needed, borrowing=borrowing):
            back.append(victim)
        else:
            needed.append(victim)
            world.tree.remove(victim.gang.queue, victim.gang.usage)
    for victim in back:
        world.tree.remove(victim.gang.queue, victim.gang.usage)
    return [victim for victim in taken if victim in needed]


def _fits(world: Field, ask: Ask, taken: Sequence[Victim], *, borrowing: bool) -> bool:
    node = world.tree.nodes[ask.queue]
    for cell, amount in ask.usage.items():
        if amount > node.available(cell) or (not borrowing and node.borrows_with(cell, amount)):
            return False
    return world.fits_beside([victim.gang for victim in taken])


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
    tree = world.tree
    candidates = {ask.queue: _own(world, ask)}
    rule = world.rules[ask.queue].reclaim
    if rule is not Reclaim.NEVER:
        root = tree.nodes[ask.queue].root
        for name in world.running:
            node = tree.nodes[name]
            if name != ask.queue and node.root is root and not node.within(ask.contested):
                candidates[name] = world.candidates(name, ask, rule)
    waiting = {
        name: sorted(gangs, key=lambda g: victim_order(g, ask.queue)) for name, gangs in candidates.items() if gangs
    }
    tree.add(ask.queue, ask.usage)  # shares are those with the newcomer running
    taken: list[Victim] = []
    try:
        fits = _FairSearch(world, ask, waiting, taken).run()
    finally:
        tree.remove(ask.queue, ask.usage)
    try:
        return _give_back(world, ask, taken, borrowing=True) if fits else []
    finally:
        for victim in taken:
            tree.add(victim.gang.queue, victim.gang.usage)


class _FairSearch:
    """Takes from the least fair queue first, as long as its rules allow; victims go to ``taken``."""

    def __init__(self, world: Field, ask: Ask, waiting: dict[str, list[Running]], taken: list[Victim]) -> None:
        self.world = world
        self.ask = ask
        self.home = world.tree.nodes[ask.queue]
        self.path = set(self.home.ancestors())
        self.waiting = waiting
        self.taken = taken
        self.done: set[Node] = set()  # nodes that have no more candidates

    def run(self) -> bool:
        first, *more = self.world.fair
        entitled = self.home.within(self.ask.contested)
        refused: dict[str, list[Running]] = {}
        for node in self._targets():
            gangs = self.waiting[node.name]
            if node is self.home or entitled:
                if self._take(gangs.pop(0), Cause.QUEUE if node is self.home else Cause.RECLAIM):
                    return True
                continue
            mine, theirs = self._shares(node)
            while gangs:
                gang = gangs.pop(0)
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
            if mine.key < theirs.key and self._take(gang, Cause.FAIR_SHARE):
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
                useless = (not share.borrowing and child is not self.home) or not self.waiting.get(child.name)
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
        tree, ask = self.world.tree, self.ask
        tree.remove(gang.queue, gang.usage)
        self.taken.append(Victim(gang, cause))
        tree.remove(ask.queue, ask.usage)
        fits = _fits(self.world, ask, self.taken, borrowing=True)
        tree.add(ask.queue, ask.usage)
        return fits


def _below(node: Node, meet: Node) -> Node:
    """Return the node on the way up from ``node`` whose parent is ``meet``."""
    while node.parent is not meet:
        if node.parent is None:
            raise LookupError(f"{meet.name} is not above {node.name}")
        node = node.parent
    return node
