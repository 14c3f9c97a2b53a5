"""What active attempts hold, on nodes and of quotas: now, and as it will be once all victims are gone."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from queuectl.core.claims import Idle
from queuectl.core.fleet import Fleet
from queuectl.core.preemption import Running
from queuectl.core.takeback import given_up
from queuectl.core.tree import Tree
from queuectl.model.lifecycle import LEAVING, Attempt, AttemptState, Outcome, Workload
from queuectl.model.objects import Queue
from queuectl.model.plan import Placement, Portion, gpus_of
from queuectl.model.policy import Amounts, Cell
from queuectl.model.reasons import Reason

_STAYS_OUT = {Reason.QUOTA_TAKEN_BACK, Reason.QUEUE_DRAINED, Reason.MISCONFIGURED}  # for as long as nobody edits it


class Holdings:
    """Counts each attempt among what is there, what will be there, or both, as the ledger does."""

    def __init__(self, fleet: Fleet) -> None:
        """Start with nothing held."""
        self.now = Tree(())
        self.later = Tree(())
        self._fleet = fleet
        self.claims: set[str] = set()  # workloads whose room is only promised to them
        self._held: dict[str, tuple[str, Attempt]] = {}  # workload uid → queue, attempt
        self._on: dict[str, set[str]] = {}  # node → workloads with room there, or to which it is promised
        self._sizes: dict[str, tuple[int, int]] = {}  # workload uid → GPUs, pods
        self._idle: dict[str, Idle] = {}  # what of their room is free for the claims already
        self._departing: dict[str, None] = {}  # workloads that leave for others, or a part of which does
        self._candidates: dict[str, Running] = {}  # attempts as they were last looked at, by workload uid
        self._of_queue: dict[str, dict[str, None]] = {}  # queue → workloads whose attempts count there
        self._takeable: dict[str, list[Running]] = {}  # queue → who may be taken, as last looked at
        self._other: set[str] = set()  # queues where these may be others now
        self.versions: dict[str, int] = {}  # changes of what queues hold, by the root of their tree

    def plant(self, queues: Mapping[str, Queue], broken: Collection[str]) -> None:
        """Build the trees anew, for queues have changed. A queue that is gone keeps what its attempts hold."""
        gone = {queue for queue, _ in self._held.values() if queue not in queues}
        self.now = Tree.of((*queues.values(), *(Queue(name) for name in sorted(gone))), broken)
        self.later = self.now.copy()
        for queue, attempt in self._held.values():
            self._count(queue, attempt.quota, +1, now=attempt.holds, later=not attempt.claimed)
            if attempt.leaving:
                self._count(queue, attempt.leaving.quota, +1, now=True, later=False)
        for uid, idle in self._idle.items():
            self._count(self._held[uid][0], idle.quota, +1, now=True, later=False)

    def add(self, workload: Workload, attempt: Attempt) -> None:
        """Count a new attempt."""
        self._held[attempt.uid] = (workload.queue, attempt)
        self._of_queue.setdefault(workload.queue, {})[attempt.uid] = None
        self._other.add(workload.queue)
        self._sizes[attempt.uid] = _size(attempt)
        self._seat((), attempt.held, attempt.uid)
        self._note_departure(attempt)
        self._change(workload.queue, attempt.whole, +1, now=attempt.holds, later=not attempt.claimed)
        if attempt.leaving:
            self._change(workload.queue, attempt.leaving, +1, now=True, later=False)
        if not attempt.holds and not attempt.claimed:
            self.claims.add(attempt.uid)
            self._set_idle(attempt.uid)
        self._set_idle_of_claimers(attempt)  # when a ledger is loaded, a claim may come before its victims

    def update(self, attempt: Attempt) -> None:
        """Count an attempt as it is now.

        A claim has become a reservation or waits for fewer; somebody has claimed its room or a part, or that is gone;
        some of its pods are done or replaced; it grows.
        """
        queue, before = self._held[attempt.uid]
        self._held[attempt.uid] = (queue, attempt)
        self._changed(attempt.uid)
        self._seat(before.held, attempt.held, attempt.uid)
        self._note_departure(attempt)
        if attempt.holds and not before.holds:
            self._drop_idle(attempt.uid)
            self._change(queue, attempt.whole, +1, now=True, later=False)
        elif attempt.victims != before.victims:
            self._set_idle(attempt.uid)
        if attempt.claimed and not before.claimed:
            if attempt.uid in self.claims:
                self._drop_idle(attempt.uid)
            self._change(queue, attempt.whole, -1, now=False, later=True)
        if attempt.leaving and not before.leaving:
            self._change(queue, attempt.leaving, -1, now=False, later=True)
            self._sizes[attempt.uid] = _size(attempt)
        if before.leaving and not attempt.leaving:
            self._change(queue, before.leaving, -1, now=True, later=False)
        if attempt.coming and not before.coming:
            self._change(queue, attempt.whole.without(before.whole), +1, now=True, later=True)
            self._sizes[attempt.uid] = _size(attempt)
        if attempt.done != before.done:
            self._change(queue, before.whole.without(attempt.whole), -1, now=True, later=True)
            self._sizes[attempt.uid] = _size(attempt)

    def remove(self, uid: str) -> None:
        """Stop counting an attempt that has ended."""
        if uid in self.claims:
            self._drop_idle(uid)
        self._changed(uid)
        queue, attempt = self._held.pop(uid)
        del self._of_queue[queue][uid], self._sizes[uid]
        self._seat(attempt.held, (), uid)
        self._departing.pop(uid, None)
        self._change(queue, attempt.whole, -1, now=attempt.holds, later=not attempt.claimed)
        if attempt.leaving:
            self._change(queue, attempt.leaving, -1, now=True, later=False)
        self._set_idle_of_claimers(attempt)

    def on(self, node: str) -> AbstractSet[str]:
        """Return the workloads whose pods may be on a node, or are to be."""
        return self._on.get(node, frozenset())

    def keeps(self, uid: str, workloads: Mapping[str, Workload]) -> bool:
        """Tell whether quotas will hold what is promised to a workload's attempt, once all victims are gone."""
        queue, attempt = self._held[uid]
        if self.later.covers(queue, attempt.quota):
            return True
        return uid not in given_up(self.later, (self._running(claim, workloads) for claim in self.claims))

    def running(
        self,
        workloads: Mapping[str, Workload],
        preemptible: Callable[[Attempt], bool],
        covered: Callable[[Attempt, Sequence[Placement]], tuple[tuple[str, int], ...]],
        elastic: Callable[[Attempt], Portion | None],
    ) -> dict[str, list[Running]]:
        """Return who may be taken, by queue: whoever holds room that nobody has claimed yet, and claims themselves.

        Who gives up a part, is repaired or grows is left out until that is over.

        ``covered``: disruption budgets, and how many of these pods of the attempt each covers. ``elastic``: the pods
        that it can give up and run on.
        """
        other, self._other = self._other, {self._held[uid][0] for uid in self.claims}  # these wait for ever fewer
        for queue in other | self._other:
            self._takeable[queue] = list(self._running_in(queue, workloads, preemptible, covered, elastic))
        return {queue: gangs for queue, gangs in self._takeable.items() if gangs}

    def _running_in(
        self,
        queue: str,
        workloads: Mapping[str, Workload],
        preemptible: Callable[[Attempt], bool],
        covered: Callable[[Attempt, Sequence[Placement]], tuple[tuple[str, int], ...]],
        elastic: Callable[[Attempt], Portion | None],
    ) -> Iterator[Running]:
        for uid in self._of_queue.get(queue, ()):
            attempt = self._held[uid][1]
            if attempt.claimed or attempt.leaving or attempt.coming:
                continue
            candidate = self._candidates.get(uid)
            if candidate is None:
                part = elastic(attempt)
                candidate = replace(
                    self._running(uid, workloads),
                    preemptible=preemptible(attempt),
                    covered=covered(attempt, attempt.placements),
                    elastic=part,
                    elastic_covered=covered(attempt, part.placements) if part else (),
                )
            if attempt.holds:
                self._candidates[uid] = candidate
            elif attempt.state is AttemptState.CLAIMED:
                # Made anew each time: its victims go one by one.
                free = candidate.preemptible and not self._waits_for_parts(uid)
                candidate = replace(candidate, preemptible=free, instead=self._instead(candidate, workloads))
            else:
                continue
            yield candidate

    def departing(self, workloads: Mapping[str, Workload]) -> list[Running]:
        """Return who leaves for others, with what goes of it."""
        gone = [(self._running(uid, workloads), self._held[uid][1].leaving) for uid in self._departing]
        return [replace(gang, usage=p.quota, placements=p.placements) if p else gang for gang, p in gone]

    def _seat(self, before: Iterable[Placement], now: Iterable[Placement], uid: str) -> None:
        """Take in where a workload has room now, and had it before."""
        nodes, left = {p.node for p in now}, {p.node for p in before}
        for node in left - nodes:
            self._on[node].discard(uid)
            if not self._on[node]:
                del self._on[node]
        for node in nodes - left:
            self._on.setdefault(node, set()).add(uid)

    def _note_departure(self, attempt: Attempt) -> None:
        if attempt.holds and (attempt.claimed or attempt.leaving):
            self._departing[attempt.uid] = None
        else:
            self._departing.pop(attempt.uid, None)

    def look_again(self, uids: Iterable[str] | None = None) -> None:
        """Take in that other attempts, of these workloads or of all, may be preemptible or covered by budgets."""
        for uid in list(self._held) if uids is None else uids:
            self._changed(uid)

    def _changed(self, uid: str) -> None:
        self._candidates.pop(uid, None)
        if uid in self._held:
            self._other.add(self._held[uid][0])
            self._moved(self._held[uid][0])

    def root(self, queue: str) -> str:
        """Return the root of a queue's tree; of one that is in none, the queue itself."""
        return self.later.tops.get(queue, queue)

    def _moved(self, queue: str) -> None:
        if queue in self.later.nodes:
            root = self.root(queue)
            self.versions[root] = self.versions.get(root, 0) + 1

    def used(self, queue: str, cell: Cell) -> int:
        """Return what is in use of a queue's quota now, by itself and what its children borrow of it."""
        node = self.now.nodes.get(queue)
        return node.usage.get(cell, 0) if node else 0

    def limits(self, queues: Iterable[str]) -> dict[str, dict[Cell, int]]:
        """Return what each of the queues, and every queue of its tree, may use at most, for the ledger."""
        roots = {self.now.nodes[name].root for name in queues if name in self.now.nodes}
        result = {}
        for node in self.now.nodes.values():
            if node.root in roots:
                result[node.name] = {cell: node.most(cell) for cell in node.root.subtree}
        return result

    def ancestors(self, queues: Iterable[str]) -> dict[str, list[str]]:
        """Return the ancestors of each queue that has any, nearest first."""
        nodes = [self.now.nodes[name] for name in queues if name in self.now.nodes]
        return {node.name: [above.name for above in node.ancestors()] for node in nodes if node.parent}

    def _running(self, uid: str, workloads: Mapping[str, Workload]) -> Running:
        workload, (queue, attempt), (gpus, pods) = workloads[uid], self._held[uid], self._sizes[uid]
        first = workload.first_admitted_at
        return Running(
            uid=uid,
            queue=queue,
            priority=workload.priority,
            submitted_at=workload.submitted_at,
            admitted_at=attempt.admitted_at if first is None else first,
            usage=attempt.quota,
            placements=attempt.placements,
            evicting=attempt.state in LEAVING | {AttemptState.CLAIMED},
            attempt=attempt.number,
            name=f"{workload.namespace}/{workload.name}",
            gpus=gpus,
            pods=pods,
            ready_at=attempt.running_at,
            saved_at=attempt.saved_at,
            preemptions=workload.preemptions,
            returns=_returns(attempt),
        )

    def _instead(self, claim: Running, workloads: Mapping[str, Workload]) -> tuple[Running, ...]:
        """Return who is there in a claim's room: its victims and, without a uid, what is kept free for it."""
        victims = [self._running(uid, workloads) for uid in self._victims_there(claim.uid)]
        idle = self._idle[claim.uid]
        places = tuple(Placement("", "", node, 1, requests) for node, requests in idle.nodes.items())
        return (*victims, replace(claim, uid="", usage=idle.quota, placements=places))

    def _victims_there(self, uid: str) -> list[str]:
        return [
            victim
            for victim, number in self._held[uid][1].victims
            if victim in self._held and self._held[victim][1].number == number
        ]

    def _waits_for_parts(self, uid: str) -> bool:
        """Tell whether a claim waits for a gang that shrinks; until that is over nobody takes the claim over."""
        return any(self._held[victim][1].leaving for victim in self._victims_there(uid))

    def _set_idle_of_claimers(self, victim: Attempt) -> None:
        for uid in self.claims:
            if (victim.uid, victim.number) in self._held[uid][1].victims:
                self._set_idle(uid)

    def _set_idle(self, uid: str) -> None:
        """Count what is free for a claim already as if the claim were there."""
        queue, attempt = self._held[uid]
        victims = [self._held[victim][1] for victim in self._victims_there(uid)]
        there = [victim.leaving or victim.whole for victim in victims]
        self._count_idle(queue, self._idle.pop(uid, Idle()), -1)
        self._idle[uid] = Idle.of(attempt.whole, there)
        self._count_idle(queue, self._idle[uid], +1)

    def _drop_idle(self, uid: str) -> None:
        self.claims.remove(uid)
        self._count_idle(self._held[uid][0], self._idle.pop(uid), -1)

    def _count_idle(self, queue: str, idle: Idle, sign: int) -> None:
        for node, requests in idle.nodes.items():
            self._fleet.reserve(node, requests, sign, later=False)
        self._count(queue, idle.quota, sign, now=True, later=False)

    def _change(self, queue: str, part: Portion, sign: int, *, now: bool, later: bool) -> None:
        for p in part.placements:
            self._fleet.reserve(p.node, p.requests, sign * p.pods, now=now, later=later)
        self._count(queue, part.quota, sign, now=now, later=later)

    def _count(self, queue: str, amounts: Amounts, sign: int, *, now: bool, later: bool) -> None:
        for tree, counts in ((self.now, now), (self.later, later)):
            if not counts:
                continue
            if queue not in tree.nodes:
                tree.grow(queue)
            (tree.add if sign > 0 else tree.remove)(queue, amounts)
        self._moved(queue)


def _returns(attempt: Attempt) -> bool:
    """Tell whether one that is on its way out may soon have the same room again, as far as it goes by that."""
    end = attempt.end
    return end is not None and end.outcome is Outcome.REQUEUE and end.why.reason not in _STAYS_OUT


def _size(attempt: Attempt) -> tuple[int, int]:
    """Return the GPUs of an attempt, parts of them rounded up to whole ones, and its pods."""
    return gpus_of(attempt.placements), attempt.whole.pods
