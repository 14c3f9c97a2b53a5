"""START HERE: one admission cycle, from a snapshot to a plan."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from queuectl.core.backlog import Group, Line, PendingKey, Positions, Quiet, Tried, Waits, Walk, pending_key
from queuectl.core.defrag import Relocation, keep
from queuectl.core.fit import still
from queuectl.core.flavors import Mode
from queuectl.core.growth import growths
from queuectl.core.limits import OVER_A_LIMIT, not_for, particular, stopped
from queuectl.core.moves import MAX_MOVES, proposal_for
from queuectl.core.nominate import Entry, be_patient, clock, entry_key, nominate, patient_until
from queuectl.core.preemption import Field, Running, Victim, there
from queuectl.core.replacement import repairs
from queuectl.core.snapshot import MoveOrder, Moving, Snapshot
from queuectl.core.takeback import evictions
from queuectl.core.tree import Node, Share, Tree
from queuectl.core.usage import nested
from queuectl.model.objects import Gang, MoveRequest, QueueOrder
from queuectl.model.plan import Admission, Eviction, Plan, Portion, Preempt
from queuectl.model.policy import Cause, Reclaim
from queuectl.model.reasons import Reason, Why, why

MAX_ADMISSIONS = 500  # of one transaction
MAX_PLACEMENTS = 10_000  # of one transaction; a single gang may have more

# The first gang of a StrictFIFO queue holds up the others, unless only an admin or its user could ever start it, or it
# waits for others of its own user. Nodes come and go by themselves, so one too big for today's nodes keeps its place.
_PASSED = {Reason.NO_MATCHING_FLAVOR, Reason.EXCEEDS_MAX_QUOTA, Reason.EXCEEDS_OWN_QUOTA, *OVER_A_LIMIT}


def plan(snapshot: Snapshot, now: float) -> Plan:
    """Decide one cycle: which waiting gangs start where, who gives way, and why each other gang waits.

    1. Gangs that a lowered quota no longer covers, or whose queue is drained, go back to their queues, or give up a
    part. Their room is free once they are gone, for whoever comes first. 2. Pods that running gangs have lost are
    replaced. Moves that were asked for are made or refused, and who has left to move starts again. 3. Each queue's
    gangs stand in line. 4. The first of each line is nominated: flavors, nodes and, if it needs any, victims. 5. The
    best of these heads is settled: it is admitted, is promised its victims' room, or is told why it waits. 6. The next
    in its line becomes a head, until all lines are through. 7. Elastic gangs that run
    get pods that they lack, of what is left and nobody waits for.

    Pure: the same snapshot gives the same plan. ``now`` is in Unix seconds.
    """
    blocked: dict[str, Why] = {}
    leaving = evictions(snapshot, now, blocked)
    broken = {one.gang.uid: one for one in snapshot.broken if one.gang.uid not in leaving}
    cycle = _Cycle(snapshot.leaving(leaving).without(broken), now)
    cycle.keep_rooms()
    repaired, irreparable = repairs(cycle.snapshot, broken.values(), cycle.room)
    cycle.room -= sum(len(repair.found) for repair in repaired.values())
    decided = cycle.run()
    busy = cycle.taken | leaving.keys() | broken.keys()
    stay = [one for one in snapshot.elastic if one.gang.uid not in busy]
    grown = growths(cycle.snapshot, decided.waits, stay, cycle.room)
    return replace(
        decided,
        evictions=tuple(leaving.items()),
        blocked=blocked,
        growths=grown,
        repairs=repaired,
        irreparable=irreparable,
    )


@dataclass(frozen=True, slots=True)
class _Head:
    """The first of a queue's gangs that can be had, with what it would get."""

    entry: Entry
    group: Group
    settled: int  # how many had been settled in the cycle when it was nominated


@dataclass
class _Cycle:
    snapshot: Snapshot
    now: float
    admissions: list[Admission] = field(default_factory=list)
    preemptions: list[Preempt] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)  # workloads that give way in this cycle
    told: dict[str, Why] = field(default_factory=dict)  # why a gang waits
    failed: dict[tuple[Group, bool], Why] = field(default_factory=dict)  # by shape, and whether it may preempt yet
    behind: dict[str, tuple[PendingKey, Why]] = field(default_factory=dict)  # StrictFIFO queue → its head
    wakes: list[float] = field(default_factory=list)  # when time limits end that keep somebody waiting
    refusals: dict[MoveRequest, Why] = field(default_factory=dict)
    places: dict[str, tuple[MoveRequest, Relocation]] = field(default_factory=dict)  # where those go who move
    early: set[str] = field(default_factory=set)  # workloads that were settled before all others
    walks: dict[str, Walk] = field(default_factory=dict)
    quiet: dict[str, dict[Group, Why]] = field(default_factory=dict)  # queue → why its gangs, by shape, wait as before
    moved: set[str] = field(default_factory=set)  # tops of trees in which something was settled
    heads: "_Heads" = field(init=False)
    room: int = field(default_factory=lambda: MAX_PLACEMENTS)

    def run(self) -> Plan:
        backlog = self.snapshot.waiting
        backlog.wake(self.now)
        self.snapshot.tell_apart()
        self.heads = _FairHeads(self.snapshot) if self.snapshot.policy.fair_sharing else _Heads()
        self._move()
        for queue, line in backlog.lines.items():
            if not self._repeated(queue, line) and self._closed(queue) is None:
                self.walks[queue] = line.walk()
                self._advance(queue)
        while self.heads:
            head = self._look_again(self.heads.pop())
            if head is None:
                continue
            self._settle(head)
            if not self.snapshot.policy.one_head:
                self._advance(head.entry.gang.queue)
        for queue in self.walks:
            self._keep(queue, backlog.lines[queue])
        started = {admission.uid for admission in self.admissions}
        return Plan(
            tuple(self.admissions),
            tuple(self.preemptions),
            Waits(backlog, started, self._not_yet, self.told, self.behind, self._failed),
            Positions(backlog, started),
            min((at for at in (backlog.wake_at(), *self.wakes) if at is not None), default=None),
            refusals=self.refusals,
        )

    def keep_rooms(self) -> None:
        """Have nobody else take what is kept for those who have left to move."""
        for one in self.snapshot.moving.values():
            keep(self.snapshot, one)
            self.wakes.append(one.until)

    def _move(self) -> None:
        """Make the moves that were asked for, and have those start again who have left to move.

        What is kept for these counts as theirs, unless they could not start with it.
        """
        for number, order in enumerate(self.snapshot.orders):
            if self.preemptions or number == MAX_MOVES:
                self.wakes.append(self.now)  # the next cycle sees those on their way who move in this one
                break
            if order.whole or order.request.until <= self.now:
                self._make_moves(order)
            else:
                self.wakes.append(order.request.until)
        for uid, one in self.snapshot.moving.items():
            gang = self.snapshot.waiting.get(uid)
            if gang is not None:
                keep(self.snapshot, one, -1)
                self._start_again(gang)

    def _make_moves(self, order: MoveOrder) -> None:
        found = proposal_for(self.snapshot, order, self.now)
        if isinstance(found, Why):
            self.refusals[order.request] = found
            return
        self.places |= {move.gang.uid: (order.request, move) for move in found.moves}
        movers = tuple(Victim(move.gang, Cause.DEFRAGMENTATION) for move in found.moves)
        self.early.add(found.gang.uid)
        self._settle(_Head(replace(found.entry, victims=movers + found.entry.victims), Group(), self._settled))
        for move in found.moves:
            keep(self.snapshot, Moving(move.gang.queue, Portion(move.to, move.gang.usage), self.now))

    def _start_again(self, gang: Gang) -> None:
        entry = nominate(self.snapshot, self.taken, gang, self.now) if self._not_yet(gang) is None else None
        if entry is not None and entry.fits:
            self.early.add(gang.uid)
            self._settle(_Head(entry, Group(), self._settled))

    def _advance(self, queue: str) -> None:
        """Make the next gang of a queue that can be had the queue's head."""
        walk = self.walks[queue]
        for gang, group in walk:
            if queue in self.behind or len(self.admissions) + len(self.preemptions) >= MAX_ADMISSIONS or self.room <= 0:
                return  # when the cycle is full, they are tried first in the next
            if self._foreign(gang) is not None:
                walk.drop(group)
                continue
            if gang.uid in self.early:
                continue
            if (group, True) in self.failed and self._is_patient(gang):
                self.wakes.append(patient_until(gang, self.snapshot.queues[queue]))
                continue
            state = self._state(queue)
            known = self._known(group.known(gang, state))
            if known is not None:
                self._fail(gang, group, known)
                continue
            entry = nominate(self.snapshot, self.taken, gang, self.now)
            if entry.wait is None or self.snapshot.policy.one_head:
                self.heads.push(_Head(entry, group, self._settled))
                return
            lasts = entry.by_quota or entry.short is not None
            group.tried = Tried(gang.uid, state, entry.wait, entry.short) if lasts else None
            self._fail(gang, group, entry.wait, entry.wake_at)

    def _known(self, tried: Tried | None) -> Why | None:
        """Return why one that was tried in an earlier cycle, in the same state of things, waits yet, if it needs no more."""
        if tried is None or tried.short is None:
            return tried.wait if tried else None
        now = still(self.snapshot.fleet, tried.short) if self.snapshot.fleet else None
        return now.because(Reason.WAITING_FOR_NODES) if now else None

    def _repeated(self, queue: str, line: Line) -> bool:
        """Tell a whole line what it was told in an earlier cycle, if that holds yet."""
        if line.known is None or queue not in self.snapshot.queues or line.known.state != self._state(queue):
            return False
        self.quiet[queue] = line.known.waits
        return True

    def _keep(self, queue: str, line: Line) -> None:
        """Keep what a line was told, if it holds for all of it until its tree of queues or of nodes' sizes change."""
        of, state = self.snapshot.queues[queue], self._state(queue)
        line.known = None
        if state is None or particular(of) or of.order is QueueOrder.STRICT_FIFO or of.preemption.wait_seconds:
            return
        tried = {group: group.known(group.gangs[0], state) for group in line.groups.values()}
        waits = {group: one.wait for group, one in tried.items() if one and not one.short}
        if len(waits) == len(tried):
            line.known = Quiet(state, waits)

    @property
    def _settled(self) -> int:
        return len(self.admissions) + len(self.preemptions)

    def _state(self, queue: str) -> object:
        """Return what tells a state of the queue's tree from others; None in the middle of a change."""
        root, versions = self.snapshot.later.tops[queue], self.snapshot.versions
        return None if versions is None or root in self.moved else (self.snapshot.version, root, versions.get(root, 0))

    def _is_patient(self, gang: Gang) -> bool:
        return patient_until(gang, self.snapshot.queues[gang.queue]) > self.now

    def _failed(self, gang: Gang, group: Group) -> Why | None:
        """Return why the gang waits if one of its kind has been tried in vain."""
        patient = self._is_patient(gang)
        wait = (patient and self.failed.get((group, True))) or self.failed.get((group, False))
        wait = wait or self.quiet.get(gang.queue, {}).get(group)
        if wait is not None and wait.reason is Reason.WAITING_BEFORE_PREEMPTION:
            return be_patient(gang, self.snapshot.queues[gang.queue])
        return wait

    def _fail(self, gang: Gang, group: Group, wait: Why, wake_at: float | None = None) -> None:
        patient = self._is_patient(gang)
        self.failed[group, patient] = wait
        if not patient:  # those behind it can do no more than it
            self.walks[gang.queue].drop(group)
        if wake_at is not None:
            self.wakes.append(wake_at)
        self._tell(gang, wait)

    def _look_again(self, head: _Head) -> _Head | None:
        """Return the head as it can be had now; None for one whose turn that changes, and that stands in line again."""
        entry = head.entry
        # Who may be taken, and who is needed, is another matter once others have been settled.
        stale = head.settled != self._settled and entry.wait is None and (entry.victims or not self._still(entry))
        if not stale or self.snapshot.policy.one_head:
            return head
        now = nominate(self.snapshot, self.taken, entry.gang, self.now)
        again = _Head(now, head.group, self._settled)
        alike = (entry_key(now), now.assignment.usage) == (entry_key(entry), entry.assignment.usage)
        if now.wait is not None or alike:
            return again
        self.heads.push(again)
        return None

    def _settle(self, head: _Head) -> None:
        entry, gang = head.entry, head.entry.gang
        if self.snapshot.policy.one_head and entry.wait is None and not self._still(entry):
            self._tell(gang, why(Reason.PENDING))
            return
        if entry.wait is not None:
            self._fail(gang, head.group, entry.wait, entry.wake_at)
            self._keep_for(entry)
            return
        if len(entry.placements) > self.room and self.admissions:
            self.room = 0
            self._tell(gang, why(Reason.PENDING))
            return
        self.room -= len(entry.placements)
        admission = entry.admission()
        victims = [victim.gang for victim in entry.victims]
        inherited = self._inherited(entry)
        self.snapshot.assume(gang, admission, victims, [victim.gang for victim in inherited])
        self.moved |= {self.snapshot.later.tops[queue] for queue in (gang.queue, *(v.queue for v in victims))}
        if not victims:
            self.admissions.append(admission)
            return
        self.taken |= {victim.uid for victim in victims}
        evictions = tuple(self._eviction(victim) for victim in (*entry.victims, *inherited))
        preempt = Preempt(admission, evictions)
        self.preemptions.append(preempt)
        self._tell(gang, preempt.why)

    def _eviction(self, victim: Victim) -> Eviction:
        gang = victim.gang
        part = Portion(gang.placements, gang.usage) if gang.gives_up else None
        request, move = self.places.get(gang.uid, (None, None))
        return Eviction(
            gang.uid, victim.cause, gang.name, gang.queue, gang.priority, gang.lost(self.now), gang.works_since, part,
            overtaken=gang.instead is not None, to=move.to if move else (), asked_by=request.by if request else "",
        )  # fmt: skip

    def _still(self, entry: Entry) -> bool:
        """Tell whether the entry can still be had after what was settled since it was nominated."""
        snapshot, usage = self.snapshot, entry.assignment.usage
        victims = [victim.gang for victim in entry.victims]
        if any(victim.uid in self.taken for victim in victims) or not self._quota_holds(entry, there(victims)):
            return False
        with Field(snapshot.later, {}, {}).without(victims):
            if not snapshot.fits_later(entry.gang, usage):
                return False
        return snapshot.fleet is None or snapshot.fleet.has_room(
            [(p.node, p.requests, p.pods) for p in entry.placements],
            [(p.node, p.requests, p.pods) for victim in victims for p in victim.placements],
        )

    def _quota_holds(self, entry: Entry, gone: Sequence[Running]) -> bool:
        """Tell whether quotas hold the entry beside all that are there but these."""
        with Field(self.snapshot.tree, {}, {}).without(gone):
            return self.snapshot.tree.fits(entry.gang.queue, entry.assignment.usage)

    def _inherited(self, entry: Entry) -> list[Victim]:
        """Return for whom the gang must wait in the stead of those whose claims it takes over: who is in its way.

        That is: on its nodes, or in quotas that it needs.
        """
        nodes = {placement.node for placement in entry.placements}
        gone = there(victim.gang for victim in entry.victims)
        inherited = []
        for claim in entry.victims:
            for one in claim.gang.instead or ():
                without = [other for other in gone if other.uid != one.uid]
                if not one.uid:
                    continue
                if nodes.isdisjoint(p.node for p in one.placements) and self._quota_holds(entry, without):
                    gone = without
                else:
                    inherited.append(Victim(one, claim.cause))
        return inherited

    def _keep_for(self, entry: Entry) -> None:
        """Let nobody borrow away in this cycle what a head that found no victims could have of its own."""
        rules = self.snapshot.queues[entry.gang.queue].preemption
        blocked = entry.assignment.mode not in {Mode.NEVER, Mode.FIT}
        if not self.snapshot.policy.one_head or not blocked or rules.reclaim is Reclaim.ANY:
            return
        node = self.snapshot.later.nodes[entry.gang.queue]
        for cell, amount in entry.assignment.usage.items():
            quota, used = node.quota(cell), node.usage.get(cell, 0)
            if not entry.assignment.way.height:
                node.add(cell, max(0, min(amount, quota.nominal - used)))
            elif quota.borrowing_limit is None:
                node.add(cell, amount)
            else:
                node.add(cell, min(amount, quota.nominal + quota.borrowing_limit - used))

    def _closed(self, queue: str) -> Why | None:
        """Say why nobody of a queue is tried."""
        if queue not in self.snapshot.queues:
            return why(Reason.QUEUE_NOT_FOUND, queue=queue)
        if queue in self.snapshot.broken_queues:
            problem = self.snapshot.broken_queues[queue]
            return why(Reason.MISCONFIGURED, field=f"queue {queue}", problem=problem)
        return stopped(self.snapshot.queues, queue)

    def _foreign(self, gang: Gang) -> Why | None:
        """Say why jobs of the gang's namespace may not use its queue."""
        labels = self.snapshot.namespaces.get(gang.namespace, {})
        return not_for(self.snapshot.queues[gang.queue], gang.namespace, labels)

    def _not_yet(self, gang: Gang) -> Why | None:
        if gang.hold:
            return why(Reason.HELD, job=gang.name)
        closed = self._closed(gang.queue) or self._foreign(gang)
        if closed is None and gang.not_before > self.now:
            return why(Reason.BACK_OFF, until=clock(gang.not_before), cause=gang.last_end)
        return closed

    def _tell(self, gang: Gang, wait: Why) -> None:
        self.told[gang.uid] = wait
        strict = self.snapshot.queues[gang.queue].order is QueueOrder.STRICT_FIFO
        if strict and wait.reason not in _PASSED and gang.queue not in self.behind:
            behind = why(Reason.BEHIND_HEAD, queue=gang.queue, head=f"{gang.namespace}/{gang.name}")
            self.behind[gang.queue] = (pending_key(gang), behind)


class _Heads:
    """The heads of all queues, the best first."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, float, int, str], str]] = []
        self._heads: dict[str, _Head] = {}

    def __bool__(self) -> bool:
        return bool(self._heads)

    def push(self, head: _Head) -> None:
        queue = head.entry.gang.queue
        self._heads[queue] = head
        heapq.heappush(self._heap, (entry_key(head.entry), queue))

    def pop(self) -> _Head:
        return self._heads.pop(heapq.heappop(self._heap)[1])


class _FairHeads(_Heads):
    """The heads of all queues, the best of those first that win in their cohorts."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self._tree: Tree = snapshot.later
        self._past: dict[str, Share] = {}  # queue → its share of before; no entry: none
        if snapshot.past:
            nodes = self._tree.nodes
            used = nested((node for node in nodes.values() if node.parent is None), snapshot.past)
            self._past = {name: nodes[name].share_of(amounts) for name, amounts in used.items() if amounts}
        self._roots: dict[str, Node] = {}  # queue → root
        self._winners: dict[Node, str | None] = {}  # by root; shares change only where somebody was settled

    def push(self, head: _Head) -> None:
        queue = head.entry.gang.queue
        self._heads[queue] = head
        self._winners[self._root(queue)] = None

    def pop(self) -> _Head:
        for root, winner in list(self._winners.items()):
            if winner is None:
                self._winners[root] = self._fairest(root)
            if self._winners[root] is None:
                del self._winners[root]
        queue = min((w for w in self._winners.values() if w), key=lambda w: entry_key(self._heads[w].entry))
        self._winners[self._root(queue)] = None
        return self._heads.pop(queue)

    def _root(self, queue: str) -> Node:
        if queue not in self._roots:
            self._roots[queue] = self._tree.nodes[queue].root
        return self._roots[queue]

    def _fairest(self, top: Node) -> str | None:
        """Return the winner of a tournament from the leaves up.

        At each level the one wins whose side, with it admitted, 1. does not borrow what it asks for 2. has the
        smaller share, with what it had before added 3. has the higher priority 4. uses the smaller part of what it
        owns of that, which matters where nodes are fewer than quotas promise 5. came earlier.
        """
        sides = [(child, winner) for child in top.children for winner in [self._fairest(child)] if winner]
        if top.name in self._heads:
            sides.append((top, top.name))
        if len(sides) <= 1:
            return sides[0][1] if sides else None

        def unfairness(side: tuple[Node, str]) -> tuple[object, ...]:
            node, queue = side
            entry = self._heads[queue].entry
            self._tree.add(queue, entry.assignment.usage)
            share, part = node.share(), node.part(entry.assignment.usage)
            self._tree.remove(queue, entry.assignment.usage)
            borrows = any(entry.assignment.usage.get(cell, 0) > 0 for cell in share.cells)
            past = self._past.get(node.name)
            return (borrows, share.key_after(past), -entry.gang.priority, part, pending_key(entry.gang))

        return min(sides, key=unfairness)[1]
