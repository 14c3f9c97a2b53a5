"""START HERE: one admission cycle, from a snapshot to a plan."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from queuectl.core.flavors import Mode
from queuectl.core.limits import OVER_A_LIMIT, not_for, stopped
from queuectl.core.nominate import Entry, nominate
from queuectl.core.preemption import Field
from queuectl.core.snapshot import Snapshot
from queuectl.core.tree import Node
from queuectl.model.objects import Gang, QueueOrder
from queuectl.model.plan import Admission, Plan, Preempt
from queuectl.model.policy import Reclaim
from queuectl.model.reasons import Reason, Why, why

MAX_ADMISSIONS = 500  # of one transaction
MAX_PLACEMENTS = 10_000  # of one transaction; a single gang may have more

# The first gang of a StrictFIFO queue holds up the others, unless only an admin or its user could ever start it, or it
# waits for others of its own user. Nodes come and go by themselves, so one too big for today's nodes keeps its place.
_PASSED = {Reason.NO_MATCHING_FLAVOR, Reason.EXCEEDS_MAX_QUOTA, *OVER_A_LIMIT}


def pending_key(gang: Gang) -> tuple[int, float, int, str]:
    """Order of a queue's line: 1. higher priority 2. earlier first submission 3. earlier arrival 4. uid."""
    return (-gang.priority, gang.submitted_at, gang.seq, gang.uid)


def entry_key(entry: Entry) -> tuple[int, int, float, int, str]:
    """Order of heads: 1. borrows from less far away 2. as in a queue's line."""
    return (entry.assignment.way.height, *pending_key(entry.gang))


def plan(snapshot: Snapshot, now: float) -> Plan:
    """Decide one cycle: which waiting gangs start where, who gives way, and why each other gang waits.

    1. Each queue's gangs stand in line. 2. The first of each line is nominated: flavors, nodes and, if it needs
    any, victims. 3. The best of these heads is settled: it is admitted, is promised its victims' room, or is told
    why it waits. 4. The next in its line becomes a head, until all lines are through.

    Pure: the same snapshot gives the same plan. ``now`` is in Unix seconds.
    """
    return _Cycle(snapshot.copy(), now).run()


@dataclass
class _Cycle:
    snapshot: Snapshot
    now: float
    admissions: list[Admission] = field(default_factory=list)
    preemptions: list[Preempt] = field(default_factory=list)
    waits: dict[str, Why] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)  # workloads that give way in this cycle
    failed: dict[object, Why] = field(default_factory=dict)  # by shape
    over: dict[object, Why] = field(default_factory=dict)  # over a limit, by shape and whose it is
    blocked: dict[str, str] = field(default_factory=dict)  # StrictFIFO queue → its head
    closed: dict[tuple[str, str], Why | None] = field(default_factory=dict)  # queue, namespace → why it is closed to it
    room: int = field(default_factory=lambda: MAX_PLACEMENTS)

    def run(self) -> Plan:
        waiting = sorted(self.snapshot.waiting, key=pending_key)
        lines: dict[str, list[Gang]] = {}
        for gang in waiting:
            wait = self._not_yet(gang)
            if wait is not None:
                self.waits[gang.uid] = wait
            else:
                lines.setdefault(gang.queue, []).append(gang)
        upcoming = {queue: iter(line) for queue, line in lines.items()}
        heads: dict[str, Entry] = {}
        for queue, line in upcoming.items():
            self._advance(queue, line, heads)
        while heads:
            entry = heads.pop(self._best(heads))
            self._settle(entry)
            if not self.snapshot.policy.one_head:
                self._advance(entry.gang.queue, upcoming[entry.gang.queue], heads)
        ahead: dict[str, int] = {}
        started = {admission.uid for admission in self.admissions}
        for gang in waiting:
            if gang.uid not in started:
                self.positions[gang.uid] = ahead[gang.queue] = ahead.get(gang.queue, 0) + 1
                self.waits.setdefault(gang.uid, why(Reason.PENDING))
        wake_at = min((g.not_before for g in waiting if g.not_before > self.now), default=None)
        return Plan(tuple(self.admissions), tuple(self.preemptions), self.waits, self.positions, wake_at)

    def _advance(self, queue: str, line: Iterator[Gang], heads: dict[str, Entry]) -> None:
        """Make the next gang of a line that may be tried the queue's head."""
        for gang in line:
            wait = self._behind(gang) or self.failed.get(gang.shape) or self._over(gang)
            if wait is not None:
                self._tell(gang, wait)
            elif len(self.admissions) + len(self.preemptions) >= MAX_ADMISSIONS or self.room <= 0:
                self._tell(gang, why(Reason.PENDING))  # the cycle is full; it is tried first in the next
            else:
                entry = nominate(self.snapshot, self.taken, gang)
                if entry.wait is None or entry.wait.reason not in OVER_A_LIMIT:
                    heads[queue] = entry
                    return
                self.over[_claimant(gang)] = entry.wait
                self._tell(gang, entry.wait)

    def _settle(self, entry: Entry) -> None:
        gang = entry.gang
        if entry.wait is None and not self._still(entry):
            if self.snapshot.policy.one_head:
                self._tell(gang, why(Reason.PENDING))
                return
            entry = nominate(self.snapshot, self.taken, gang)
        if entry.wait is not None:
            self.failed[gang.shape] = entry.wait
            self._tell(gang, entry.wait)
            self._keep_for(entry)
            return
        if len(entry.placements) > self.room and self.admissions:
            self.room = 0
            self._tell(gang, why(Reason.PENDING))
            return
        self.room -= len(entry.placements)
        admission = entry.admission()
        victims = [victim.gang for victim in entry.victims]
        self.snapshot.assume(gang, admission, victims)
        if not victims:
            self.admissions.append(admission)
            return
        self.taken |= {victim.uid for victim in victims}
        self.preemptions.append(Preempt(admission, tuple((v.gang.uid, v.cause) for v in entry.victims)))
        self._tell(gang, why(Reason.WAITING_FOR_VICTIMS, count=len(victims)))

    def _still(self, entry: Entry) -> bool:
        """Tell whether the entry can still be had after what was settled since it was nominated."""
        snapshot, usage, queue = self.snapshot, entry.assignment.usage, entry.gang.queue
        victims = [victim.gang for victim in entry.victims]
        if any(victim.uid in self.taken for victim in victims):
            return False
        for tree in (snapshot.tree, snapshot.later):
            with Field(tree, {}, {}).without(victims):
                if not tree.fits(queue, usage):
                    return False
        return snapshot.fleet is None or snapshot.fleet.has_room(
            [(p.node, p.requests, p.pods) for p in entry.placements],
            [(p.node, p.requests, p.pods) for victim in victims for p in victim.placements],
        )

    def _keep_for(self, entry: Entry) -> None:
        """Let nobody borrow away in this cycle what a head that found no victims could have of its own."""
        rules = self.snapshot.queues[entry.gang.queue].preemption
        blocked = entry.assignment.mode in {Mode.NOBODY, Mode.PREEMPT, Mode.RECLAIM}
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

    def _best(self, heads: dict[str, Entry]) -> str:
        """Return the queue of the head that goes next."""
        if not self.snapshot.policy.fair_sharing:
            return min(heads, key=lambda queue: entry_key(heads[queue]))
        roots = {id(root): root for queue in heads for root in [self.snapshot.later.nodes[queue].root]}
        winners = [winner for root in roots.values() for winner in [self._fairest(root, heads)] if winner]
        return min(winners, key=lambda queue: entry_key(heads[queue]))

    def _fairest(self, top: Node, heads: dict[str, Entry]) -> str | None:
        """Return the winner of a tournament from the leaves up.

        At each level the one wins whose side, with it admitted, 1. does not borrow what it asks for 2. has the
        smaller share 3. has the higher priority 4. came earlier.
        """
        sides = [(child, winner) for child in top.children for winner in [self._fairest(child, heads)] if winner]
        if top.name in heads:
            sides.append((top, top.name))
        if len(sides) <= 1:
            return sides[0][1] if sides else None
        tree = self.snapshot.later

        def unfairness(side: tuple[Node, str]) -> tuple[object, ...]:
            node, queue = side
            usage = heads[queue].assignment.usage
            tree.add(queue, usage)
            share = node.share()
            tree.remove(queue, usage)
            borrows = any(usage.get(cell, 0) > 0 for cell in share.cells)
            return (borrows, share.key, *pending_key(heads[queue].gang))

        return min(sides, key=unfairness)[1]

    def _not_yet(self, gang: Gang) -> Why | None:
        if gang.hold:
            return why(Reason.HELD, job=gang.name)
        if gang.queue not in self.snapshot.queues:
            return why(Reason.QUEUE_NOT_FOUND, queue=gang.queue)
        if gang.queue in self.snapshot.broken_queues:
            problem = self.snapshot.broken_queues[gang.queue]
            return why(Reason.MISCONFIGURED, field=f"queue {gang.queue}", problem=problem)
        closed = self._closed(gang.queue, gang.namespace)
        if closed is not None:
            return closed
        if gang.not_before > self.now:
            return why(Reason.BACK_OFF, until=_clock(gang.not_before), cause=gang.last_end)
        return None

    def _closed(self, queue: str, namespace: str) -> Why | None:
        key, snapshot = (queue, namespace), self.snapshot
        if key not in self.closed:
            labels = snapshot.namespaces.get(namespace, {})
            self.closed[key] = stopped(snapshot.queues, queue) or not_for(snapshot.queues[queue], namespace, labels)
        return self.closed[key]

    def _behind(self, gang: Gang) -> Why | None:
        head = self.blocked.get(gang.queue)
        return why(Reason.BEHIND_HEAD, queue=gang.queue, head=head) if head else None

    def _over(self, gang: Gang) -> Why | None:
        return self.over.get(_claimant(gang)) if self.over else None

    def _tell(self, gang: Gang, wait: Why) -> None:
        self.waits[gang.uid] = wait
        strict = self.snapshot.queues[gang.queue].order is QueueOrder.STRICT_FIFO
        if strict and wait.reason not in _PASSED:
            self.blocked.setdefault(gang.queue, f"{gang.namespace}/{gang.name}")


def _claimant(gang: Gang) -> tuple[object, ...]:
    """Return what gangs have in common that meet limits alike; in the course of a cycle limits are only used up."""
    return (gang.shape, gang.namespace, gang.user)


def _clock(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%H:%M:%S UTC")
