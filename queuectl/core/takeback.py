"""Who goes back to its queue for nobody's sake: what a drained queue runs, and what a lowered quota no longer covers.

A gang is taken back only where the quota of its own queue, or of one above it, is used beyond its bound; what a queue
borrows within bounds it keeps. Whoever is on the way out anyway is counted as gone, and nobody is told to go twice.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from queuectl.core.limits import stopped_by
from queuectl.core.preemption import Running, victim_order
from queuectl.core.snapshot import Snapshot
from queuectl.core.tree import Node, Tree
from queuectl.model.policy import Cell, OverQuota, StopPolicy, VictimChoice, Within
from queuectl.model.reasons import Reason, Why, why
from queuectl.model.resources import format_quantity
from queuectl.model.work import NO_WORK

MAX_EVICTIONS = 500  # in one cycle; the next one goes on when they have left
_DRAINING = (StopPolicy.HOLD_AND_DRAIN,)


def evictions(snapshot: Snapshot, now: float) -> dict[str, Why]:
    """Return the workloads that go back to their queues now, and why. The snapshot is left as it is.

    A drained queue sends back all that it has, of whatever kind. A lowered quota leaves those who are not
    preemptible. Disruption budgets are kept to by both: who is covered by a spent one goes in a later cycle.
    """
    budgets = dict(snapshot.budgets)
    drained = {
        gang.uid: why(Reason.QUEUE_DRAINED, queue=by.name)
        for queue, gangs in _everybody(snapshot).items()
        for by in [stopped_by(snapshot.queues, queue, _DRAINING)]
        for gang in gangs
        if by and not _leaves(gang) and _spend(budgets, gang)
    }
    if not any(queue.over_quota is OverQuota.TAKE_BACK for queue in snapshot.queues.values()):
        return dict(islice(drained.items(), MAX_EVICTIONS))
    tree = snapshot.later.copy()
    # A promise that quotas no longer cover is given up by itself, before anybody has to go for it.
    claims = [gang for gangs in snapshot.running.values() for gang in gangs if gang.instead is not None]
    lost = given_up(tree, claims)
    leaving = lost | drained.keys()
    for gangs in _everybody(snapshot).values():
        for gang in gangs:
            if _leaves(gang) or gang.uid in leaving:
                leaving.add(gang.uid)
                tree.remove(gang.queue, gang.usage)
    found = drained | _Search(tree, snapshot, leaving, budgets, now).run()
    return dict(islice(found.items(), MAX_EVICTIONS))


def given_up(later: Tree, claims: Iterable[Running]) -> set[str]:
    """Return the claims that quotas no longer cover, so that they do again: the lowest, and none that need not go.

    ``later`` counts what will be there once all victims are gone, the claims among it; it is left as it is.
    """
    tree = later.copy()
    lost: list[Running] = []
    for claim in sorted(claims, key=lambda claim: victim_order(claim, claim.queue)):
        if not tree.covers(claim.queue, claim.usage):
            tree.remove(claim.queue, claim.usage)
            lost.append(claim)
    for claim in reversed(lost[:]):
        if tree.fits(claim.queue, claim.usage):
            tree.add(claim.queue, claim.usage)
            lost.remove(claim)
    return {claim.uid for claim in lost}


def _everybody(snapshot: Snapshot) -> dict[str, list[Running]]:
    """Return by queue who holds room and who has the promise of some, without any pod yet."""
    return {
        queue: [gang if gang.instead is None else replace(gang, covered=()) for gang in gangs]
        for queue, gangs in snapshot.running.items()
    }


def _leaves(gang: Running) -> bool:
    """Tell whether a gang is on its way out; a claim, with which nothing would be lost either, is not."""
    return gang.evicting and gang.instead is None


def _spend(budgets: dict[str, int], gang: Running) -> bool:
    """Take the gang's pods from the disruption budgets that cover them; False when one of them has too little."""
    if not _allow(budgets, gang):
        return False
    for key, pods in gang.covered:
        budgets[key] -= pods
    return True


def _allow(budgets: Mapping[str, int], gang: Running) -> bool:
    return all(budgets.get(key, 0) >= pods for key, pods in gang.covered)


@dataclass
class _Search:
    tree: Tree  # without those who are leaving
    snapshot: Snapshot
    leaving: set[str]  # and who is taken
    budgets: dict[str, int]
    now: float
    taken: list[tuple[Running, Why]] = field(default_factory=list)
    lines: dict[tuple[str, Cell], list[Running]] = field(default_factory=dict)  # by queue: who may go, in order

    def run(self) -> dict[str, Why]:
        for node in _leaves_first(self.tree):
            if node.name in self.snapshot.broken_queues:
                continue  # its parents may be there again in a moment
            for cell in sorted(node.usage):
                self._take_back(node, cell)
        return {gang.uid: cause for gang, cause in self._needed()}

    def _take_back(self, node: Node, cell: Cell) -> None:
        flavor, resource = cell
        if not node.over(cell):
            return
        facts = {"used": node.usage[cell], "allowed": node.bound(cell) or 0}
        cause = why(
            Reason.QUOTA_TAKEN_BACK, queue=node.name, flavor=flavor, resource=resource,
            **{name: format_quantity(resource, amount) for name, amount in facts.items()},
        )  # fmt: skip
        while excess := node.over(cell):
            gang = self._next(node, cell, excess)
            if gang is None or len(self.taken) >= MAX_EVICTIONS:
                return  # the others may not be taken; the queue starts nothing until they have ended
            _spend(self.budgets, gang)
            self.tree.remove(gang.queue, gang.usage)
            self.leaving.add(gang.uid)
            self.taken.append((gang, cause))

    def _next(self, top: Node, cell: Cell, excess: int) -> Running | None:
        """Return the next to go of those who use more than their own, in the least entitled queue that has any.

        From the top down, the children that borrow go by their shares, the largest first; then the queue itself.
        """
        borrowers = [child for child in top.children if child.borrows_with(cell)]
        for child in sorted(borrowers, key=lambda child: (child.share().key, child.name), reverse=True):
            found = self._next(child, cell, excess)
            if found is not None:
                return found
        if top.direct(cell) <= top.quota(cell).nominal:
            return None
        line = self._line(top.name, cell)
        open_to = (gang for gang in line if gang.uid not in self.leaving and _allow(self.budgets, gang))
        first = next(open_to, None)
        if first is None or first.usage[cell] <= excess:
            return first
        # Not all that it has is of use: others may cost less for what is.
        return min((first, *open_to), key=lambda gang: self._order(gang, min(excess, gang.usage[cell])))

    def _line(self, name: str, cell: Cell) -> list[Running]:
        """Return who may go of a queue, the first to go first if all that they have is of use."""
        if (name, cell) not in self.lines:
            queue = self.snapshot.queues.get(name)
            gives = queue is not None and queue.over_quota is OverQuota.TAKE_BACK
            running = self.snapshot.running.get(name, ()) if gives else ()
            users = [g for g in running if g.preemptible and g.instead is None and g.usage.get(cell, 0) > 0]
            self.lines[name, cell] = sorted(users, key=lambda gang: self._order(gang, gang.usage[cell]))
        return self.lines[name, cell]

    def _order(self, gang: Running, useful: int) -> tuple[object, ...]:
        """Order of going: 1. lower priority 2. newer, where the older could at once take its room back.

        3. Unless the queue has it otherwise: less work lost for each unit of what is needed (the greedy weighted
        set cover of Chvatal 1979), then the order of taking.
        """
        rules = self.snapshot.rules[gang.queue]
        newest = rules.within_queue is Within.LOWER_OR_NEWER_EQUAL_PRIORITY
        price = gang.price(self.now) if rules.victims is VictimChoice.LEAST_WORK_LOST else NO_WORK
        return (
            gang.priority,
            -gang.submitted_at if newest else 0.0,
            *((amount << 20) // useful for amount in price),
            victim_order(gang, gang.queue),
        )

    def _needed(self) -> Sequence[tuple[Running, Why]]:
        """Give back, the last taken first, whoever makes nothing exceed its bound by more."""
        needed = list(self.taken)
        for gang, cause in reversed(self.taken):
            node = self.tree.nodes[gang.queue]
            line = (node, *node.ancestors())
            before = [above.over(cell) for above in line for cell in gang.usage]
            self.tree.add(gang.queue, gang.usage)
            if [above.over(cell) for above in line for cell in gang.usage] == before:
                needed.remove((gang, cause))
            else:
                self.tree.remove(gang.queue, gang.usage)
        return needed


def _leaves_first(tree: Tree) -> Iterator[Node]:
    def walk(node: Node) -> Iterator[Node]:
        for child in node.children:
            yield from walk(child)
        yield node

    for node in tree.nodes.values():
        if node.parent is None:
            yield from walk(node)
