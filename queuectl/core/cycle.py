"""START HERE: one admission cycle, from a snapshot to a plan."""

from dataclasses import replace
from datetime import UTC, datetime

from queuectl.core import fit, quota
from queuectl.core.snapshot import Snapshot
from queuectl.model.objects import Gang, QueueOrder
from queuectl.model.plan import Admission, Plan
from queuectl.model.reasons import Reason, Why, why

MAX_ADMISSIONS = 500  # of one transaction
MAX_PLACEMENTS = 10_000  # of one transaction; a single gang may have more

# Why a gang that quota and nodes refuse waits. When its flavors fail for different reasons, the last of these is told.
_FURTHEST = (
    Reason.NO_MATCHING_FLAVOR,
    Reason.EXCEEDS_MAX_QUOTA,
    Reason.EXCEEDS_CLUSTER,
    Reason.WAITING_FOR_QUOTA,
    Reason.WAITING_FOR_NODES,
)
# The first gang of a StrictFIFO queue holds up the others, unless only an admin or its user could ever start it.
# Nodes come and go by themselves, so a gang that is too big for today's nodes keeps its place.
_BLOCKING = {Reason.EXCEEDS_CLUSTER, Reason.WAITING_FOR_QUOTA, Reason.WAITING_FOR_NODES}


def pending_key(gang: Gang) -> tuple[int, float, int, str]:
    """Order of trial: 1. higher priority 2. earlier first submission 3. earlier arrival 4. uid."""
    return (-gang.priority, gang.submitted_at, gang.seq, gang.uid)


def plan(snapshot: Snapshot, now: float) -> Plan:
    """Decide one cycle: which waiting gangs start where, and why each other one waits.

    Pure: the same snapshot gives the same plan. ``now`` is in Unix seconds.
    """
    snapshot = replace(snapshot, fleet=snapshot.fleet.snapshot(), usage=dict(snapshot.usage))
    admissions: list[Admission] = []
    waits: dict[str, Why] = {}
    positions: dict[str, int] = {}
    failed_shapes: dict[object, Why] = {}
    blocked: dict[str, str] = {}  # StrictFIFO queue → its head
    ahead: dict[str, int] = {}
    room = MAX_PLACEMENTS
    for gang in sorted(snapshot.waiting, key=pending_key):
        wait = _not_yet(snapshot, gang, now) or _behind(blocked, gang) or failed_shapes.get(gang.shape)
        if wait is None:
            full = len(admissions) == MAX_ADMISSIONS or room <= 0
            result = why(Reason.PENDING) if full else admit(snapshot, gang)
            if isinstance(result, Admission):
                room -= len(result.placements)
                if room >= 0 or not admissions:
                    snapshot.assume(gang, result)
                    admissions.append(result)
                    continue
                result = why(Reason.PENDING)  # the cycle is full; this gang is tried first in the next
            wait = failed_shapes[gang.shape] = result
        waits[gang.uid] = wait
        positions[gang.uid] = ahead[gang.queue] = ahead.get(gang.queue, 0) + 1
        if wait.reason in _BLOCKING and snapshot.queues[gang.queue].order is QueueOrder.STRICT_FIFO:
            blocked.setdefault(gang.queue, f"{gang.namespace}/{gang.name}")
    wake_at = min((g.not_before for g in snapshot.waiting if g.not_before > now), default=None)
    return Plan(tuple(admissions), waits, positions, wake_at)


def admit(snapshot: Snapshot, gang: Gang) -> Admission | Why:
    """Return the gang's place by quota and nodes, flavors in order, or the reason that came furthest."""
    queue = snapshot.queues[gang.queue]
    best: Why | None = None
    for flavors in quota.flavor_choices(snapshot, queue, gang):
        charged = quota.check(snapshot, queue, gang, flavors)
        if isinstance(charged, Why):
            waits = charged.reason is Reason.WAITING_FOR_QUOTA
            found = (fit.exceeds_cluster(snapshot.fleet, gang, flavors) if waits else None) or charged
        else:
            placed = fit.place(snapshot.fleet, gang, flavors)
            if not isinstance(placed, Why):
                return Admission(gang.uid, placed, charged)
            found = placed
        if best is None or _FURTHEST.index(found.reason) > _FURTHEST.index(best.reason):
            best = found
    return best or quota.no_flavor(snapshot, queue, gang)


def _not_yet(snapshot: Snapshot, gang: Gang, now: float) -> Why | None:
    if gang.hold:
        return why(Reason.HELD, job=gang.name)
    if gang.queue not in snapshot.queues:
        return why(Reason.QUEUE_NOT_FOUND, queue=gang.queue)
    if gang.queue in snapshot.broken_queues:
        problem = snapshot.broken_queues[gang.queue]
        return why(Reason.MISCONFIGURED, field=f"queue {gang.queue}", problem=problem)
    if gang.not_before > now:
        return why(Reason.BACK_OFF, until=_clock(gang.not_before), cause=gang.last_end)
    return None


def _clock(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%H:%M:%S UTC")


def _behind(blocked: dict[str, str], gang: Gang) -> Why | None:
    head = blocked.get(gang.queue)
    return why(Reason.BEHIND_HEAD, queue=gang.queue, head=head) if head else None
