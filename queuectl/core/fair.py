"""Who gives way with fair sharing: from the least fair queue first, as long as shares allow (KEP-1714)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from queuectl.core.least_lost import cheapest, pieces
from queuectl.core.preemption import Ask, Field, Running, Trial, Victim, victim_order
from queuectl.core.tree import Node, Share
from queuectl.model.policy import Cause, FairRule, Reclaim


def by_share(world: Field, ask: Ask) -> list[Victim]:
    """Return the victims, or none."""
    tree, rules = world.tree, world.rules[ask.queue]
    candidates = {ask.queue: world.candidates(ask.queue, ask, rules.within_queue)}
    home = tree.nodes[ask.queue]
    line = {*home.subtrees(), *home.ancestors()}  # nobody reclaims from those above or below
    if rules.reclaim is not Reclaim.NEVER:
        for node in home.root.subtrees():
            if node not in line and not node.within(ask.contested):
                candidates[node.name] = world.candidates(node.name, ask, rules.reclaim)
    everybody = [gang for gangs in candidates.values() for gang in gangs]
    if not _FairSearch(world, ask, {}, heed=False).anybody_first(candidates):
        return []

    known: dict[tuple[tuple[str, ...], ...], list[Victim]] = {}

    def search(order: Sequence[Running]) -> list[Victim]:
        waiting: dict[str, list[Running]] = {name: [] for name in candidates}
        for gang in order:
            waiting[gang.queue].append(gang)
        turns = tuple(tuple(gang.uid for gang in gangs) for gangs in waiting.values())
        if turns not in known:  # only the order within each queue matters
            known[turns] = _search(world, ask, waiting)
        return known[turns]

    def in_order(gangs: Iterable[Running]) -> list[Victim]:
        return search(sorted(gangs, key=lambda gang: victim_order(gang, ask.queue)))

    return cheapest(world, ask, everybody, peers=in_order, search=search, borrowing=True)


def _search(world: Field, ask: Ask, waiting: Mapping[str, Sequence[Running]]) -> list[Victim]:
    """Take each queue's gangs in the given order; if disruption budgets keep some out in vain, beyond these for a moment."""
    for heed in (True, False):
        in_turn = {name: list(gangs) for name, gangs in waiting.items() if gangs}
        found = (one := _FairSearch(world, ask, in_turn, heed=heed)).run()
        if found or not one.trial.passed_over:
            return found
    return []


class _FairSearch:
    """Takes from the least fair queue first, as long as its rules allow, and of a queue in the given order."""

    def __init__(self, world: Field, ask: Ask, waiting: dict[str, list[Running]], *, heed: bool) -> None:
        self.world = world
        self.ask = ask
        self.home = world.tree.nodes[ask.queue]
        self.path = set(self.home.ancestors())
        self.waiting = waiting
        self.trial = Trial(world, ask, borrowing=True, counted=True, heed=heed)
        self.done: set[Node] = set()  # nodes that have no more candidates

    def run(self) -> list[Victim]:
        """Return the victims, or none; the last are given back first, for the first were the least fair's."""
        with self._counted():
            try:
                return self.trial.give_back(list(self.trial.taken.values())[-2::-1]) if self._first() else []
            finally:
                self.trial.close()

    def anybody_first(self, candidates: Mapping[str, Sequence[Running]]) -> bool:
        """Tell whether anybody may be taken while nobody is; else no order of taking finds anything."""
        first, *more = self.world.fair
        with self._counted():
            entitled = self._entitled
            for name, gangs in candidates.items():
                node = self.world.tree.nodes[name]
                if gangs and (node is self.home or entitled):
                    return True
                if not gangs:
                    continue
                mine, theirs = self._shares(node)
                if (more and mine.key < theirs.key) or any(
                    self._allows(first, mine, theirs, node, part) for gang in gangs for part in (gang, *pieces(gang))
                ):
                    return True
        return False

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Have shares be those with the newcomer running, for the time of the block."""
        tree, ask = self.world.tree, self.ask
        tree.add(ask.queue, ask.usage)
        try:
            yield
        finally:
            tree.remove(ask.queue, ask.usage)

    @property
    def _entitled(self) -> bool:
        """Tell whether the newcomer's queue uses no more than its own of what is contested, the newcomer counted."""
        return self.home.within(self.ask.contested)

    def _first(self) -> bool:
        first, *more = self.world.fair
        entitled = self._entitled
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
            above = bool(child.children) and child is not self.home  # home counts with all that is below it
            if above:
                useless = not share.borrowing and child not in self.path
            else:
                within = not share.borrowing or child.within(self.ask.contested)
                useless = (within and child is not self.home) or not self.waiting.get(child.name)
            if useless:
                self.done.add(child)
            else:
                (cohorts if above else queues).append((share, child))
        # A cohort wins a tie against a queue: the least fair can then be found within it.
        cohort = max(cohorts, key=lambda c: c[0].key, default=None)
        queue = min(queues, key=self._by_least_fair, default=None)
        if cohort is None and queue is None:
            if self.waiting.get(top.name) and top not in self.done and not top.within(self.ask.contested):
                return top  # its own gangs go after those of the queues below
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
