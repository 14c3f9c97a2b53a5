"""THE transaction: record what was seen, reserve what was planned, and write the first step of each gang."""

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    BigInteger,
    Float,
    Integer,
    RowMapping,
    Text,
    and_,
    delete,
    func,
    literal,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model.lifecycle import STEP_OF, Attempt, AttemptState, Workload, WorkloadState
from queuectl.model.plan import Admission, Placement
from queuectl.model.reasons import Reason, why
from queuectl.store import tables
from queuectl.store.engine import Conflict
from queuectl.store.events import Event, record, told
from queuectl.store.leadership import fence
from queuectl.store.room import Key, Room
from queuectl.store.rows import attempt_from_row, placements_by_attempt, quota_to_json, rowset

MAX_GANGS = 500
MAX_RESERVATIONS = 10_000


@dataclass(frozen=True, slots=True)
class CycleResult:
    """What became of the admissions: the attempts that hold room now, and the uids that were refused."""

    admitted: list[Attempt]
    refused: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of ``Ledger.cycle``."""

    epoch: int
    plan_id: uuid.UUID
    now: float
    submissions: Sequence[Workload]
    nodes: Mapping[str, Mapping[str, int]]
    nodes_gone: Collection[str]
    quotas: Mapping[str, Mapping[tuple[str, str], int]]
    queues_gone: Collection[str]
    changed_by: Mapping[str, str]
    admissions: Sequence[tuple[Admission, int]]

    @property
    def empty(self) -> bool:
        """Tell whether there is nothing to write."""
        return not (
            self.submissions or self.nodes or self.nodes_gone or self.quotas or self.queues_gone or self.admissions
        )


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A gang that fits, with what is written for it."""

    admission: Admission
    generation: int
    queue: str
    number: int
    placements: tuple[Placement, ...] = field(default=())


async def cycle(connection: AsyncConnection, request: Request) -> CycleResult:
    """Write one cycle. Raises Fenced, or Conflict when the transaction must be done over.

    1. fence   2. the plan's id   3. lock quota, then nodes   4. observations   5. submissions   6. lock workloads
    7. decide, in order   8. write: room, workloads, attempts, reservations, steps, events
    """
    await fence(connection, request.epoch)
    if not await _is_new(connection, request):
        return await _already_done(connection, request)
    candidates, left = _bounded(request.admissions)
    queue_of = await _queues(connection, request, candidates)
    quota, nodes = Room.of_quota(), Room.of_nodes()
    observed_queues = {*request.quotas, *request.queues_gone}
    observed_nodes = {*request.nodes, *request.nodes_gone}
    await quota.lock(connection, observed_queues.union(queue_of.values()))
    await nodes.lock(connection, observed_nodes.union(p.node for a, _ in candidates for p in a.placements))

    events = await _observe_quota(connection, request, quota, observed_queues)
    seen = {(node, name): room for node, vector in request.nodes.items() for name, room in vector.items()}
    await nodes.observe(connection, {k: v for k, v in seen.items() if k[0] not in request.nodes_gone}, observed_nodes)
    await _submit(connection, request.submissions)

    waiting = await _lock_workloads(connection, [admission.uid for admission, _ in candidates])
    admitted: list[_Admitted] = []
    refused: list[str] = []
    for admission, generation in candidates:
        row = waiting.get(admission.uid)
        charged: dict[Key, int] = (
            {} if row is None else {(row["queue"], *key): n for key, n in admission.quota.items() if n > 0}
        )
        held: dict[Key, int] = {key: n for key, n in admission.per_node().items() if n > 0}
        if (
            row is None
            or row["queue"] != queue_of.get(admission.uid)
            or not admission.placements
            or not quota.fits(charged)
            or not nodes.fits(held)
        ):
            refused.append(admission.uid)
            continue
        del waiting[admission.uid]
        quota.take(charged)
        nodes.take(held)
        placements = _merged(admission.placements)
        admitted.append(_Admitted(admission, generation, row["queue"], row["attempt"] + 1, placements))

    await quota.write_taken(connection)
    await nodes.write_taken(connection)
    await _write_admitted(connection, request, admitted)
    events.extend(_told(gang) for gang in admitted)
    await record(connection, request.epoch, events, now=request.now)
    return CycleResult([_attempt(gang, request.now) for gang in admitted], refused + [a.uid for a, _ in left])


async def _is_new(connection: AsyncConnection, request: Request) -> bool:
    """Write the plan's id. Waits for a lost transaction of the same plan; False when that one committed."""
    t = tables.plan
    await connection.execute(delete(t).where(t.c.committed_at < func.now() - text("interval '1 day'")))
    statement = insert(t).values(id=request.plan_id, epoch=request.epoch, admitted=0).on_conflict_do_nothing()
    return await connection.scalar(statement.returning(t.c.id)) is not None


async def _already_done(connection: AsyncConnection, request: Request) -> CycleResult:
    a, r = tables.attempt, tables.reservation
    mine = a.c.plan_id == request.plan_id
    rows = (await connection.execute(select(a).where(mine))).mappings().all()
    held = select(r).join(a, and_(a.c.workload_uid == r.c.workload_uid, a.c.number == r.c.attempt)).where(mine)
    placements = placements_by_attempt((await connection.execute(held)).mappings())
    found = {row["workload_uid"]: attempt_from_row(row, placements[row["workload_uid"], row["number"]]) for row in rows}
    uids = [admission.uid for admission, _ in request.admissions]
    return CycleResult([found[uid] for uid in uids if uid in found], [uid for uid in uids if uid not in found])


def _bounded(admissions: Sequence[tuple[Admission, int]]) -> tuple[Sequence[tuple[Admission, int]], ...]:
    """Split into what one transaction takes and the rest; the first gang is taken whatever its size."""
    count = rows = 0
    for admission, _ in admissions:
        rows += len(admission.placements)
        if count and (count == MAX_GANGS or rows > MAX_RESERVATIONS):
            break
        count += 1
    return admissions[:count], admissions[count:]


async def _queues(
    connection: AsyncConnection, request: Request, candidates: Sequence[tuple[Admission, int]]
) -> dict[str, str]:
    """Return the queue that each candidate will be charged to; checked again once its workload is locked."""
    if not candidates:
        return {}
    w = tables.workload
    given = rowset([{"uid": admission.uid} for admission, _ in candidates], uid=Text)
    statement = select(w.c.uid, w.c.queue).where(
        w.c.uid.in_(select(given.c.uid)), w.c.state == WorkloadState.QUEUED.value
    )
    found = {row.uid: row.queue for row in await connection.execute(statement)}
    # A submission moves a waiting workload to its new queue; one that isn't waiting is refused later anyway.
    return found | {workload.uid: workload.queue for workload in request.submissions}


async def _observe_quota(
    connection: AsyncConnection, request: Request, quota: Room, observed: Collection[str]
) -> list[Event]:
    seen: dict[Key, int] = {
        (queue, *key): nominal
        for queue, vector in request.quotas.items()
        if queue not in request.queues_gone
        for key, nominal in vector.items()
    }
    changes = await quota.observe(connection, seen, observed)
    if not changes:
        return []
    columns = ["queue", "flavor", "resource", "from_nominal", "to_nominal", "changed_by"]
    rows = [
        dict(zip(columns, (*key, before, after, request.changed_by.get(key[0], "")), strict=True))
        for key, before, after in changes
    ]
    given = rowset(
        rows, queue=Text, flavor=Text, resource=Text, from_nominal=BigInteger, to_nominal=BigInteger, changed_by=Text
    )
    source = select(*(given.c[name] for name in columns), literal(request.now, tables.UnixTime))
    await connection.execute(insert(tables.quota_version).from_select([*columns, "changed_at"], source))
    return [Event("QuotaChanged", _quota_sentence(row), facts=row) for row in rows]


def _quota_sentence(row: Mapping[str, Any]) -> str:
    before = "nothing" if row["from_nominal"] is None else row["from_nominal"]
    after = "nothing" if row["to_nominal"] is None else row["to_nominal"]
    who = row["changed_by"] or "somebody unknown"
    return (
        f"Quota of queue {row['queue']} in flavor {row['flavor']}: {row['resource']} from {before} to {after} by {who}."
    )


async def _submit(connection: AsyncConnection, submissions: Sequence[Workload]) -> None:
    if not submissions:
        return
    columns = ["uid", "namespace", "name", "queue", "priority", "submitted_at", "seq"]
    # By uid, the last one counts: one statement may touch a row only once.
    rows = {workload.uid: {name: getattr(workload, name) for name in columns} for workload in submissions}
    given = rowset(
        list(rows.values()),
        uid=Text,
        namespace=Text,
        name=Text,
        queue=Text,
        priority=BigInteger,
        submitted_at=Float(53),
        seq=BigInteger,
    )
    values = [func.to_timestamp(given.c[name]) if name == "submitted_at" else given.c[name] for name in columns]
    statement = insert(tables.workload).from_select(columns, select(*values).order_by(given.c.uid))
    new, w = statement.excluded, tables.workload
    await connection.execute(
        statement.on_conflict_do_update(
            index_elements=["uid"],
            set_={"queue": new.queue, "priority": new.priority},
            where=and_(
                w.c.state == WorkloadState.QUEUED.value, or_(w.c.queue != new.queue, w.c.priority != new.priority)
            ),
        )
    )


async def _lock_workloads(connection: AsyncConnection, uids: Collection[str]) -> dict[str, RowMapping]:
    """Lock these workloads and return those that are waiting."""
    if not uids:
        return {}
    w = tables.workload
    given = rowset([{"uid": uid} for uid in uids], uid=Text)
    statement = (
        select(w.c.uid, w.c.queue, w.c.state, w.c.attempt)
        .where(w.c.uid.in_(select(given.c.uid)))
        .order_by(w.c.uid)
        .with_for_update(key_share=True)
    )
    rows = (await connection.execute(statement)).mappings()
    return {row["uid"]: row for row in rows if row["state"] == WorkloadState.QUEUED.value}


def _merged(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return one placement for each role, flavor and node, sorted."""
    merged: dict[tuple[str, str, str], Placement] = {}
    for p in placements:
        key = (p.role, p.flavor, p.node)
        pods = p.pods + (merged[key].pods if key in merged else 0)
        merged[key] = Placement(p.role, p.flavor, p.node, pods, p.requests)
    return tuple(merged[key] for key in sorted(merged))


async def _write_admitted(connection: AsyncConnection, request: Request, admitted: Sequence[_Admitted]) -> None:
    if not admitted:
        return
    w = tables.workload
    gangs = rowset(
        [
            {
                "uid": gang.admission.uid,
                "number": gang.number,
                "generation": gang.generation,
                "queue": gang.queue,
                "quota": quota_to_json(gang.admission.quota),
            }
            for gang in admitted
        ],
        uid=Text,
        number=Integer,
        generation=BigInteger,
        queue=Text,
        quota=JSONB,
    )
    now, epoch = literal(request.now, tables.UnixTime), literal(request.epoch, BigInteger)
    moved = await connection.execute(
        update(w)
        .values(state=WorkloadState.ACTIVE.value, attempt=gangs.c.number)
        .where(w.c.uid == gangs.c.uid, w.c.state == WorkloadState.QUEUED.value, w.c.attempt == gangs.c.number - 1)
    )
    if moved.rowcount != len(admitted):
        raise Conflict("workloads changed while they were locked")
    await connection.execute(
        insert(tables.attempt).from_select(
            ["workload_uid", "number", "state", "generation", "plan_id", "epoch", "queue", "quota", "admitted_at"],
            select(
                gangs.c.uid,
                gangs.c.number,
                literal(AttemptState.RESERVED.value),
                gangs.c.generation,
                literal(request.plan_id, tables.attempt.c.plan_id.type),
                epoch,
                gangs.c.queue,
                gangs.c.quota,
                now,
            ),
        )
    )
    places = rowset(
        [
            {
                "uid": gang.admission.uid,
                "attempt": gang.number,
                "role": place.role,
                "flavor": place.flavor,
                "node": place.node,
                "pods": place.pods,
                "requests": place.requests,
            }
            for gang in admitted
            for place in gang.placements
        ],
        uid=Text,
        attempt=Integer,
        role=Text,
        flavor=Text,
        node=Text,
        pods=Integer,
        requests=JSONB,
    )
    columns = ["workload_uid", "attempt", "role", "flavor", "node", "pods", "requests"]
    await connection.execute(insert(tables.reservation).from_select(columns, select(*places.c)))
    await connection.execute(
        insert(tables.step).from_select(
            ["workload_uid", "attempt", "step", "created_at", "due_at", "epoch"],
            select(gangs.c.uid, gangs.c.number, literal(STEP_OF[AttemptState.RESERVED].value), now, now, epoch),
        )
    )
    p = tables.plan
    await connection.execute(update(p).where(p.c.id == request.plan_id).values(admitted=len(admitted)))


def _attempt(gang: _Admitted, now: float) -> Attempt:
    return Attempt(
        uid=gang.admission.uid,
        number=gang.number,
        state=AttemptState.RESERVED,
        generation=gang.generation,
        placements=gang.placements,
        admitted_at=now,
        quota=dict(gang.admission.quota),
    )


def _told(gang: _Admitted) -> Event:
    pods = sum(place.pods for place in gang.placements)
    nodes = len({place.node for place in gang.placements})
    return told(why(Reason.ADMITTED, pods=pods, nodes=nodes), gang.admission.uid, gang.number)
