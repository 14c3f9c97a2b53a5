"""Who goes back to its queue for nobody's sake: what a drained queue runs, and what a lowered quota no longer covers.

A gang is taken back only where the quota of its own queue, or of one above it, is used beyond its bound; what a queue
borrows within bounds it keeps. Whoever is on the way out anyway is counted as gone, and nobody is told to go twice.
Elastic gangs first give up pods that they can do without.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from queuectl.core.elastic import fewest
from queuectl.core.limits import stopped_by
from queuectl.core.preemption import Running, giving_up, victim_order
from queuectl.core.snapshot import Snapshot
from queuectl.core.tree import Node, Tree
from queuectl.model.objects import Queue
from queuectl.model.plan import Portion, TakeBack
from queuectl.model.policy import Cell, OverQuota, StopPolicy, VictimChoice, Within
from queuectl.model.reasons import Reason, Why, listed, why
from queuectl.model.resources import format_quantity
from queuectl.model.work import NO_WORK

MAX_EVICTIONS = 500  # in one cycle; the next one goes on when they have left
_DRAINING = (StopPolicy.HOLD_AND_DRAIN,)


def evictions(snapshot: Snapshot, now: float, blocked: dict[str, Why] | None = None) -> dict[str, TakeBack]:
    """Return the workloads that go back to their queues now or give up a part. The snapshot is left as it is.

    A drained queue sends back all that it has, of whatever kind. A lowered quota leaves those who are not
    preemptible. Disruption budgets are kept to by both: who is covered by a spent one goes in a later cycle.
    ``blocked`` is filled with the queues that can't send back all that should go, and who stays for what.
    """
    blocked = {} if blocked is None else blocked
    budgets = dict(snapshot.budgets)
    drained = _drained(snapshot, budgets, blocked)
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
    found = drained | _Search(tree, snapshot, leaving, budgets, now, blocked).run()
    return dict(islice(found.items(), MAX_EVICTIONS))


def _drained(snapshot: Snapshot, budgets: dict[str, int], blocked: dict[str, Why]) -> dict[str, TakeBack]:
    """Return whom drained queues send back."""
    drained: dict[str, TakeBack] = {}
    if not any(queue.stop in _DRAINING for queue in snapshot.queues.values()):
        return drained
    for queue, gangs in _everybody(snapshot).items():
        by = stopped_by(snapshot.queues, queue, _DRAINING)
        if by is None:
            continue
        told, stay = TakeBack(why(Reason.QUEUE_DRAINED, queue=by.name)), []
        for gang in gangs:
            if not _leaves(gang) and _spend(budgets, gang):
                drained[gang.uid] = told
            elif not _leaves(gang):
                stay.append(f"{gang.name} ({_budget(budgets, gang)})")
        if stay:
            blocked[queue] = why(Reason.DRAIN_BLOCKED, queue=queue, count=len(stay), jobs=listed(stay))
    return drained


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
    if any(budgets.get(key, 0) < pods for key, pods in gang.covered):
        return False
    for key, pods in gang.covered:
        budgets[key] -= pods
    return True


def _budget(budgets: Mapping[str, int], gang: Running) -> str:
    """Say which disruption budget keeps a gang."""
    return next((f"PodDisruptionBudget {key}" for key, pods in gang.covered if budgets.get(key, 0) < pods), "")


@dataclass
class _Search:
    tree: Tree  # without those who are leaving
    snapshot: Snapshot
    leaving: set[str]
    budgets: dict[str, int]
    now: float
    blocked: dict[str, Why]
    taken: dict[str, tuple[Running, Why]] = field(default_factory=dict)  # by uid: gangs, or pieces that they give up
    lines: dict[tuple[str, Cell], list[Running]] = field(default_factory=dict)  # by queue: who may go, in order

    def run(self) -> dict[str, TakeBack]:
        for node in _leaves_first(self.tree):
            if node.name in self.snapshot.broken_queues:
                continue  # its parents may be there again in a moment
            for cell in sorted(node.usage):
                self._take_back(node, cell)
        self._give_back()
        return {uid: _told(gang, cause) for uid, (gang, cause) in self.taken.items()}

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
                if gang is None:
                    self._tell_who_stays(node, cell, cause)
                return  # the queue starts nothing until they have ended
            self._take(gang, cause)

    def _take(self, gang: Running, cause: Why) -> None:
        """Take a gang or a piece of it. Who goes whole after its piece takes that along."""
        if gang.uid in self.taken:
            self._put_back(gang.uid)
        _spend(self.budgets, gang)
        self.tree.remove(gang.queue, gang.usage)
        self.taken[gang.uid] = (gang, cause)

    def _put_back(self, uid: str) -> None:
        gang, _ = self.taken.pop(uid)
        self.tree.add(gang.queue, gang.usage)
        for key, pods in gang.covered:
            self.budgets[key] += pods

    def _tell_who_stays(self, node: Node, cell: Cell, cause: Why) -> None:
        stay = [
            f"{gang.name} ({'preemptible: false' if not gang.preemptible else _budget(self.budgets, gang)})"
            for queue in _below_first(node)
            if queue.direct(cell) > queue.quota(cell).nominal and self._takes_back(queue.name)
            for gang in self.snapshot.running.get(queue.name, ())
            if gang.uid not in self.leaving | self.taken.keys() and gang.instead is None and gang.usage.get(cell, 0) > 0
        ]
        if stay:
            facts = {**cause.facts, "count": len(stay), "jobs": listed(stay)}
            self.blocked.setdefault(node.name, why(Reason.TAKE_BACK_BLOCKED, **facts))

    def _takes_back(self, name: str) -> bool:
        queue = self.snapshot.queues.get(name)
        return queue is not None and queue.over_quota is OverQuota.TAKE_BACK

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
        open_to = (gang for gang in self._line(top.name, cell) if self._is_open(gang, cell))
        first = next(open_to, None)
        if first is None or self._frees(first, cell) <= excess:
            return first
        # Not all that it has is of use: others may cost less for what is.
        return min((first, *open_to), key=lambda gang: self._order(gang, min(excess, self._frees(gang, cell))))

    def _is_open(self, gang: Running, cell: Cell) -> bool:
        if gang.uid in self.leaving or self._frees(gang, cell) <= 0:
            return False
        kept = dict(self.taken[gang.uid][0].covered) if gang.uid in self.taken else {}
        return all(self.budgets.get(key, 0) + kept.get(key, 0) >= pods for key, pods in gang.covered)

    def _frees(self, gang: Running, cell: Cell) -> int:
        """Return how much more would be free if the gang, or the piece, went too."""
        taken = self.taken[gang.uid][0].usage.get(cell, 0) if gang.uid in self.taken else 0
        return gang.usage.get(cell, 0) - taken

    def _line(self, name: str, cell: Cell) -> list[Running]:
        """Return who may go of a queue, the first to go first if all that they have is of use."""
        if (name, cell) not in self.lines:
            queue = self.snapshot.queues.get(name)
            running = self.snapshot.running.get(name, ()) if self._takes_back(name) else ()
            whole = [g for g in running if g.preemptible and g.instead is None]
            pieces = [_piece(g, g.elastic) for g in whole if g.elastic and _in_pieces(queue)]
            users = [g for g in (*whole, *pieces) if g.usage.get(cell, 0) > 0]
            self.lines[name, cell] = sorted(users, key=lambda gang: self._order(gang, gang.usage[cell]))
        return self.lines[name, cell]

    def _order(self, gang: Running, useful: int) -> tuple[object, ...]:
        """Order of going: 1. who only gives up a piece 2. lower priority 3. newer, where the older could take it back.

        4. Unless the queue has it otherwise: less work lost for each unit of what is needed (the greedy weighted
        set cover of Chvatal 1979), then the order of taking.
        """
        rules = self.snapshot.rules[gang.queue]
        newest = rules.within_queue is Within.LOWER_OR_NEWER_EQUAL_PRIORITY
        price = gang.price(self.now) if rules.victims is VictimChoice.LEAST_WORK_LOST else NO_WORK
        return (
            not gang.gives_up,
            gang.priority,
            -gang.submitted_at if newest else 0.0,
            *((amount << 20) // useful for amount in price),
            victim_order(gang, gang.queue),
        )

    def _give_back(self) -> None:
        """Give back, the last taken first, whoever makes nothing exceed its bound by more; and so with pods of pieces."""
        for uid in reversed(list(self.taken)):
            gang, cause = self.taken[uid]
            left = self._excess(gang)
            self._put_back(uid)
            if self._excess(gang) != left:
                self._take(self._fewest(gang, left) if gang.gives_up else gang, cause)

    def _fewest(self, piece: Running, left: Sequence[int]) -> Running:
        """Return the fewest pods of a piece without which no more than this is exceeded."""

        def are_enough(part: Portion) -> bool:
            self.tree.remove(piece.queue, part.quota)
            enough = self._excess(piece) == left
            self.tree.add(piece.queue, part.quota)
            return enough

        return _piece(piece, fewest(Portion(piece.placements, piece.usage), are_enough))

    def _excess(self, gang: Running) -> list[int]:
        """Return by how much each quota that the gang counts in is exceeded."""
        node = self.tree.nodes[gang.queue]
        return [above.over(cell) for above in (node, *node.ancestors()) for cell in sorted(gang.usage)]


def _in_pieces(queue: Queue | None) -> bool:
    """Tell whether elastic gangs of the queue may give up pods; in the peers' order they go whole."""
    return queue is not None and queue.preemption.victims is not VictimChoice.LOWEST_PRIORITY


def _piece(gang: Running, part: Portion) -> Running:
    """Return what a gang gives up, under the gang's own uid."""
    return replace(giving_up(gang, part), uid=gang.uid)


def _told(gang: Running, cause: Why) -> TakeBack:
    if not gang.gives_up:
        return TakeBack(cause)
    part = Portion(gang.placements, gang.usage)
    pods = {"gone": part.pods, "before": gang.pods, "after": gang.pods - part.pods}
    return TakeBack(why(Reason.SHRUNK_FOR_QUOTA, **pods, **cause.facts), part)


def _leaves_first(tree: Tree) -> Iterator[Node]:
    for node in tree.nodes.values():
        if node.parent is None:
            yield from _below_first(node)


def _below_first(node: Node) -> Iterator[Node]:
    for child in node.children:
        yield from _below_first(child)
    yield node
