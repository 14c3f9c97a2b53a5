"""THE transaction: record what was seen, reserve what was planned, and write the first step of each gang."""

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Integer,
    RowMapping,
    Text,
    and_,
    delete,
    func,
    literal,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model import policy
from queuectl.model.lifecycle import (
    LEAVING,
    STEP_OF,
    Attempt,
    AttemptKey,
    AttemptState,
    Leave,
    Shrink,
    Workload,
    WorkloadState,
)
from queuectl.model.plan import Admission, Placement, Portion, Preempt, Repair
from queuectl.model.reasons import Reason, why
from queuectl.store import attempts, observe, tables
from queuectl.store.attempts import Held, Stake
from queuectl.store.engine import Conflict
from queuectl.store.events import Event, record, told
from queuectl.store.leadership import fence
from queuectl.store.room import Amounts, Key, Rooms
from queuectl.store.rows import attempt_from_row, places_by_attempt, quota_to_json, rowset

MAX_GANGS = 500
MAX_RESERVATIONS = 10_000
KEPT_SECONDS = 86_400.0  # of a done step
MAX_PRUNED = 1000  # rows of each table in one cycle, more than one makes


@dataclass(frozen=True, slots=True)
class CycleResult:
    """What became of the plan: attempts that hold room now, uids that were refused, attempts that wait for victims.

    ``grown``: uids whose attempts got what they were to get in addition; ``repaired``: in the stead of what they lost.
    """

    admitted: list[Attempt]
    refused: list[str]
    claimed: list[Attempt] = field(default_factory=list)
    grown: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of ``Ledger.cycle``."""

    epoch: int
    plan_id: uuid.UUID
    now: float
    submissions: Sequence[Workload]
    nodes: Mapping[str, Mapping[str, int]]
    nodes_gone: Collection[str]
    quotas: Mapping[str, Mapping[policy.Cell, policy.Quota]]
    limits: Mapping[str, policy.Amounts]
    queues_gone: Collection[str]
    changed_by: Mapping[str, str]
    change_why: Mapping[str, str]
    ancestors: Mapping[str, Sequence[str]]
    admissions: Sequence[tuple[Admission, int]]
    preemptions: Sequence[tuple[Preempt, int, Mapping[str, Leave]]]
    growths: Mapping[AttemptKey, Portion]
    repairs: Mapping[AttemptKey, Repair]

    @property
    def empty(self) -> bool:
        """Tell whether there is nothing to write."""
        return not (
            self.submissions
            or self.nodes
            or self.nodes_gone
            or self.quotas
            or self.limits
            or self.queues_gone
            or self.admissions
            or self.preemptions
            or self.growths
            or self.repairs
        )

    @property
    def candidates(self) -> list["_Candidate"]:
        """Return whom the plan wants to start, in the order in which they are taken: preemptors first.

        Whatever the order in which the core decided, none is refused in this one: a preemptor only asks that what is
        promised fits, and without the admissions that is less; an admission finds reserved what it would in the
        core's order, and promised no more than when the whole plan is made.
        """
        return [
            _Candidate(preempt.admission, generation, preempt, leaves)
            for preempt, generation, leaves in self.preemptions
        ] + [_Candidate(admission, generation) for admission, generation in self.admissions]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A gang that is to start, or (with ``preempt``) to be promised its room."""

    admission: Admission
    generation: int
    preempt: Preempt | None = None
    leaves: Mapping[str, Leave] = field(default_factory=dict)  # by victim

    @property
    def uid(self) -> str:
        return self.admission.uid

    @property
    def victims(self) -> list[str]:
        return [victim.uid for victim in self.preempt.victims] if self.preempt else []


@dataclass(frozen=True, slots=True)
class _Gang:
    """A gang that fits, with what is written for it."""

    admission: Admission
    generation: int
    queue: str
    charged: tuple[str, ...]
    number: int
    placements: tuple[Placement, ...]
    preempt: Preempt | None  # given when it is to wait for its room
    victims: tuple[AttemptKey, ...]  # those that it waits for
    overtaken: tuple[AttemptKey, ...]  # those whose claims it takes over

    @property
    def key(self) -> AttemptKey:
        return self.admission.uid, self.number

    @property
    def claims(self) -> bool:
        return self.preempt is not None

    @property
    def state(self) -> AttemptState:
        return AttemptState.CLAIMED if self.claims else AttemptState.RESERVED

    def attempt(self, now: float) -> Attempt:
        return Attempt(
            uid=self.admission.uid,
            number=self.number,
            state=self.state,
            generation=self.generation,
            placements=self.placements,
            admitted_at=now,
            quota=dict(self.admission.quota),
            holds=not self.claims,
            victims=self.victims,
        )

    def event(self) -> Event:
        if self.preempt is not None:
            reason = self.preempt.why
        else:
            pods = sum(place.pods for place in self.placements)
            reason = why(Reason.ADMITTED, pods=pods, nodes=len({place.node for place in self.placements}))
        return told(reason, *self.key)


async def cycle(connection: AsyncConnection, request: Request) -> CycleResult:
    """Write one cycle. Raises Fenced, or Conflict when the transaction must be done over.

    1. fence   2. the plan's id   3. lock quota, then nodes   4. observations   5. submissions   6. lock workloads
    7. decide, in order   8. write: room, workloads, attempts, reservations, claims, steps, events
    """
    await fence(connection, request.epoch)
    if not await _is_new(connection, request):
        return await _already_done(connection, request)
    candidates, left = _bounded(request.candidates)
    queue_of = await _queues(connection, request, candidates)
    wanted = [_amounts(request, candidate.admission, queue_of.get(candidate.uid)) for candidate in candidates]
    victims = {uid for candidate in candidates for uid in candidate.victims}
    growing = {uid for uid, _ in (*request.growths, *request.repairs)}
    stakes = await attempts.stakes(connection, victims | growing)
    parts = {**request.growths} | {key: Portion(repair.found) for key, repair in request.repairs.items()}
    more = {key: stakes[key].of(part) for key, part in parts.items() if key in stakes}
    rooms = Rooms()
    await rooms.lock(
        connection,
        chain(wanted, (stake.amounts for stake in stakes.values()), more.values()),
        queues={*request.quotas, *request.limits, *request.queues_gone},
        nodes={*request.nodes, *request.nodes_gone},
    )
    events = await _observe(connection, request, rooms)
    await observe.submissions(connection, request.submissions)
    rows = await attempts.lock_workloads(connection, victims.union(growing, (one.uid for one in candidates)))
    waiting = {uid: row for uid, row in rows.items() if row["state"] == WorkloadState.QUEUED.value}
    held = {key: one for key, one in (await attempts.latest(connection, victims | growing)).items() if key in stakes}

    gangs: list[_Gang] = []
    refused: list[str] = []
    repaired = _repair(request, held, stakes, more, rooms)
    events.extend(told(repair.why, *key) for key, repair in repaired.items())
    shrinks: dict[AttemptKey, Shrink] = {}
    for candidate, amounts in zip(candidates, wanted, strict=True):
        row, taken = waiting.get(candidate.uid), _taken(candidate, held, stakes)
        if (
            row is None
            or row["queue"] != queue_of.get(candidate.uid)
            or not candidate.admission.placements
            or taken is None
            or not _fits(rooms, candidate, amounts, taken.values())
        ):
            refused.append(candidate.uid)
            continue
        del waiting[candidate.uid]
        gang = _gang(request, candidate, row, tuple(taken), held)
        gangs.append(gang)
        events.append(gang.event())
        events.extend(_claim(gang, candidate, held, taken, rooms))
        shrinks |= {key: leave for key in taken if isinstance(leave := candidate.leaves.get(key[0]), Shrink)}
        rooms.take(amounts, reserved=not gang.claims, promised=True)

    grown = _grow(request, held, more, rooms)
    for key, part in grown.items():
        there = stakes[key].attempt.whole.pods
        events.append(told(why(Reason.GROWING, there=there, pods=there + part.pods), *key))
    refused += [key[0] for key in (*request.repairs, *request.growths) if key not in repaired and key not in grown]

    await rooms.write(connection)
    await _write_gangs(connection, request, gangs)
    moved = {key: one for key, one in held.items() if one.passed}
    await attempts.write(connection, request.epoch, moved, now=request.now)
    await attempts.grow(connection, grown, stakes, now=request.now)
    await attempts.repair(connection, repaired, now=request.now)
    await attempts.unclaim(connection, [key for gang in gangs for key in gang.overtaken])
    await attempts.give_up(connection, shrinks)
    await attempts.claim(connection, {victim: gang.key for gang in gangs for victim in gang.victims}, shrinks)
    await record(connection, request.epoch, events, now=request.now)
    return CycleResult(
        admitted=[gang.attempt(request.now) for gang in gangs if not gang.claims],
        refused=refused + [candidate.uid for candidate in left],
        claimed=[gang.attempt(request.now) for gang in gangs if gang.claims],
        grown=[uid for uid, _ in grown],
        repaired=[uid for uid, _ in repaired],
    )


def _repair(
    request: Request,
    held: Mapping[AttemptKey, Held],
    stakes: Mapping[AttemptKey, Stake],
    more: Mapping[AttemptKey, Amounts],
    rooms: Rooms,
) -> dict[AttemptKey, Repair]:
    """Reserve the places that attempts get in the stead of lost ones, and return those for which it is so."""
    repaired = {}
    for key, repair in request.repairs.items():
        lost = Portion(repair.left)
        if _may_grow(held.get(key)) and stakes[key].attempt.whole.has(lost) and rooms.fits(more[key]):
            rooms.take(more[key], reserved=True, promised=True)
            rooms.free(stakes[key].of(lost), promised=True)
            held[key].state, held[key].leaving = AttemptState.REPAIRING, bool(repair.left)
            held[key].passed.append(AttemptState.REPAIRING)
            repaired[key] = repair
    return repaired


def _grow(
    request: Request, held: Mapping[AttemptKey, Held], more: Mapping[AttemptKey, Amounts], rooms: Rooms
) -> dict[AttemptKey, Portion]:
    """Reserve what attempts get in addition, and return those for which it is so."""
    grown = {}
    for key, part in request.growths.items():
        if _may_grow(held.get(key)) and rooms.fits(more[key]):
            rooms.take(more[key], reserved=True, promised=True)
            held[key].state = AttemptState.GROWING
            held[key].passed.append(AttemptState.GROWING)
            grown[key] = part
    return grown


def _may_grow(attempt: Held | None) -> bool:
    return attempt is not None and attempt.state is AttemptState.RUNNING and attempt.claimed_by is None


async def _is_new(connection: AsyncConnection, request: Request) -> bool:
    """Write the plan's id. Waits for a lost transaction of the same plan; False when that one committed."""
    await _prune(connection, request.now)
    t = tables.plan
    statement = insert(t).values(id=request.plan_id, epoch=request.epoch, admitted=0).on_conflict_do_nothing()
    return await connection.scalar(statement.returning(t.c.id)) is not None


async def _prune(connection: AsyncConnection, now: float) -> None:
    """Drop plans and done steps that are older than a day, some at a time. Events stay: they are the history."""
    p, s = tables.plan, tables.step
    for table, at, limit in (
        (p, p.c.committed_at, func.now() - text("interval '1 day'")),
        (s, s.c.done_at, literal(now - KEPT_SECONDS, tables.UnixTime)),
    ):
        old = select(table.c.id).where(at < limit).order_by(at).limit(MAX_PRUNED)
        await connection.execute(delete(table).where(table.c.id.in_(old)))


async def _already_done(connection: AsyncConnection, request: Request) -> CycleResult:
    a, r = tables.attempt, tables.reservation
    mine = a.c.plan_id == request.plan_id
    rows = (await connection.execute(select(a).where(mine))).mappings().all()
    reserved = select(r).join(a, and_(a.c.workload_uid == r.c.workload_uid, a.c.number == r.c.attempt)).where(mine)
    places = places_by_attempt((await connection.execute(reserved)).mappings())
    victims = await attempts.waited_for(connection, [(row["workload_uid"], row["number"]) for row in rows])
    found = {}
    for row in rows:
        key = (row["workload_uid"], row["number"])
        found[key[0]] = attempt_from_row(row, places[key], tuple(sorted(victims.get(key, ()))))
    held = await attempts.latest(connection, {uid for uid, _ in (*request.growths, *request.repairs)})
    at = {key: one.state for key, one in held.items()}
    grown = [key[0] for key in request.growths if at.get(key) is AttemptState.GROWING]
    repaired = [key[0] for key in request.repairs if at.get(key) is AttemptState.REPAIRING]
    return CycleResult(
        grown=grown,
        repaired=repaired,
        admitted=[found[a.uid] for a, _ in request.admissions if a.uid in found and found[a.uid].holds],
        refused=[candidate.uid for candidate in request.candidates if candidate.uid not in found]
        + [uid for uid, _ in (*request.growths, *request.repairs) if uid not in (*grown, *repaired)],
        claimed=[one for p, _, _ in request.preemptions if (one := found.get(p.admission.uid)) and not one.holds],
    )


def _bounded(candidates: Sequence[_Candidate]) -> tuple[Sequence[_Candidate], ...]:
    """Split into what one transaction takes and the rest; the first gang is taken whatever its size."""
    count = rows = 0
    for candidate in candidates:
        rows += len(candidate.admission.placements) + len(candidate.victims)
        if count and (count == MAX_GANGS or rows > MAX_RESERVATIONS):
            break
        count += 1
    return candidates[:count], candidates[count:]


async def _queues(connection: AsyncConnection, request: Request, candidates: Sequence[_Candidate]) -> dict[str, str]:
    """Return the queue that each candidate will be charged to; checked again once its workload is locked."""
    if not candidates:
        return {}
    w = tables.workload
    given = rowset([{"uid": candidate.uid} for candidate in candidates], uid=Text)
    statement = select(w.c.uid, w.c.queue).where(
        w.c.uid.in_(select(given.c.uid)), w.c.state == WorkloadState.QUEUED.value
    )
    found = {row.uid: row.queue for row in await connection.execute(statement)}
    # A submission moves a waiting workload to its new queue; one that isn't waiting is refused later anyway.
    return found | {workload.uid: workload.queue for workload in request.submissions}


def _charged(request: Request, queue: str) -> tuple[str, ...]:
    """Return the queue and its ancestors."""
    return (queue, *request.ancestors.get(queue, ()))


def _amounts(request: Request, admission: Admission, queue: str | None) -> Amounts:
    return Amounts.of(() if queue is None else _charged(request, queue), admission.quota, admission.per_node())


async def _observe(connection: AsyncConnection, request: Request, rooms: Rooms) -> list[Event]:
    gone = set(request.queues_gone)
    events = await observe.quota_edits(
        connection, request.quotas, gone, by=request.changed_by, because=request.change_why, now=request.now
    )
    nominal = {name: {cell: quota.nominal for cell, quota in vector.items()} for name, vector in request.quotas.items()}
    room = {**nominal, **request.limits}
    in_queues: dict[Key, int] = {
        (queue, *cell): amount for queue, vector in room.items() if queue not in gone for cell, amount in vector.items()
    }
    await rooms.quota.observe(connection, in_queues, {*room, *gone})
    on_nodes: dict[Key, int] = {
        (node, name): amount
        for node, vector in request.nodes.items()
        if node not in request.nodes_gone
        for name, amount in vector.items()
    }
    await rooms.nodes.observe(connection, on_nodes, {*request.nodes, *request.nodes_gone})
    return events


def _taken(
    candidate: _Candidate, held: Mapping[AttemptKey, Held], stakes: Mapping[AttemptKey, Stake]
) -> dict[AttemptKey, Amounts] | None:
    """Return the victims' attempts, sorted, each with what it takes out of what is promised.

    None unless every one of them is there to be taken: it holds room that nobody has claimed, or only those whose
    claims are taken over with it; or it claims. Who shrinks already is not, and only who runs can begin to.
    """
    active = {uid: (uid, number) for uid, number in held}
    found = [active.pop(uid, None) for uid in candidate.victims]
    keys = sorted(key for key in found if key is not None)
    if len(keys) < len(found):
        return None
    overtaken = {key for key in keys if held[key].state is AttemptState.CLAIMED}
    taken = {}
    for key in keys:
        victim, stake, leave = held[key], stakes[key], candidate.leaves.get(key[0])
        free = victim.holds and victim.claimed_by in {None, *overtaken} and victim.state is not AttemptState.ENDED
        if (not free and key not in overtaken) or victim.leaving:
            return None
        if victim.state not in LEAVING and leave is None:
            return None
        taken[key] = stake.amounts if victim.promised else Amounts()
        if isinstance(leave, Shrink):
            if victim.state is not AttemptState.RUNNING or not stake.attempt.whole.has(leave.part):
                return None
            taken[key] = stake.of(leave.part)
    return taken


def _fits(rooms: Rooms, candidate: _Candidate, amounts: Amounts, leaving: Collection[Amounts]) -> bool:
    return rooms.fits_later(amounts, leaving) if candidate.preempt else rooms.fits(amounts)


def _gang(
    request: Request,
    candidate: _Candidate,
    row: RowMapping,
    taken: tuple[AttemptKey, ...],
    held: Mapping[AttemptKey, Held],
) -> _Gang:
    return _Gang(
        admission=candidate.admission,
        generation=candidate.generation,
        queue=row["queue"],
        charged=_charged(request, row["queue"]),
        number=row["attempt"] + 1,
        placements=_merged(candidate.admission.placements),
        preempt=candidate.preempt,
        victims=tuple(key for key in taken if held[key].holds),
        overtaken=tuple(key for key in taken if not held[key].holds),
    )


def _claim(
    gang: _Gang,
    candidate: _Candidate,
    held: Mapping[AttemptKey, Held],
    taken: Mapping[AttemptKey, Amounts],
    rooms: Rooms,
) -> list[Event]:
    """Have those that it takes from end, or shrink, and take what leaves out of what is promised."""
    events = []
    for victim in held.values():
        if victim.claimed_by in gang.overtaken:
            victim.claimed_by = None
    for key in (*gang.overtaken, *gang.victims):
        victim, leave = held[key], candidate.leaves.get(key[0])
        rooms.free(taken[key], promised=True)
        victim.claimed_by = gang.key if victim.holds else None
        if isinstance(leave, Shrink):
            victim.state, victim.leaving = AttemptState.SHRINKING, True
            victim.passed.append(victim.state)
            events.append(told(leave.why, *key))
            continue
        victim.promised = False
        if victim.state in LEAVING or leave is None:
            facts = {"by_uid": gang.key[0], "by_attempt": gang.key[1]}
            events.append(Event("Claimed", "Its room is promised to a job that waits for it.", *key, facts))
        else:
            victim.state, victim.end = leave.first, leave
            victim.passed.append(victim.state)
            events.append(told(leave.why, *key))
    return events


def _merged(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return one placement for each role, flavor, node and what its pods get there, sorted."""
    merged: dict[tuple[object, ...], Placement] = {}
    for p in placements:
        key = (p.role, p.flavor, p.node, p.requests)
        known = merged.get(key, replace(p, pods=0))
        merged[key] = replace(p, pods=known.pods + p.pods, first=min(known.first, p.first))
    return tuple(merged[key] for key in sorted(merged, key=lambda key: (key[:3], merged[key].first)))


async def _write_gangs(connection: AsyncConnection, request: Request, made: Sequence[_Gang]) -> None:
    if not made:
        return
    w = tables.workload
    gangs = rowset(
        [
            {
                "uid": gang.admission.uid,
                "number": gang.number,
                "state": gang.state.value,
                "holds": not gang.claims,
                "generation": gang.generation,
                "queue": gang.queue,
                "charged": gang.charged,
                "quota": quota_to_json(gang.admission.quota),
                "step": STEP_OF[gang.state].value if gang.state in STEP_OF else None,
            }
            for gang in made
        ],
        uid=Text,
        number=Integer,
        state=Text,
        holds=Boolean,
        generation=BigInteger,
        queue=Text,
        charged=ARRAY(Text),
        quota=JSONB,
        step=Text,
    )
    now, epoch = literal(request.now, tables.UnixTime), literal(request.epoch, BigInteger)
    moved = await connection.execute(
        update(w)
        .values(
            state=WorkloadState.ACTIVE.value,
            attempt=gangs.c.number,
            first_admitted_at=func.coalesce(w.c.first_admitted_at, now),
        )
        .where(w.c.uid == gangs.c.uid, w.c.state == WorkloadState.QUEUED.value, w.c.attempt == gangs.c.number - 1)
    )
    if moved.rowcount != len(made):
        raise Conflict("workloads changed while they were locked")
    same = ["number", "state", "holds", "generation", "queue", "charged", "quota"]
    plan_id = literal(request.plan_id, tables.attempt.c.plan_id.type)
    await connection.execute(
        insert(tables.attempt).from_select(
            ["workload_uid", *same, "plan_id", "epoch", "admitted_at"],
            select(gangs.c.uid, *(gangs.c[name] for name in same), plan_id, epoch, now),
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
                "cards": place.cards,
                "first": place.first,
            }
            for gang in made
            for place in gang.placements
        ],
        uid=Text,
        attempt=Integer,
        role=Text,
        flavor=Text,
        node=Text,
        pods=Integer,
        requests=JSONB,
        cards=BigInteger,
        first=Integer,
    )
    columns = ["workload_uid", "attempt", "role", "flavor", "node", "pods", "requests", "cards", "first"]
    await connection.execute(insert(tables.reservation).from_select(columns, select(*places.c)))
    await connection.execute(
        insert(tables.step).from_select(
            ["workload_uid", "attempt", "step", "created_at", "epoch"],
            select(gangs.c.uid, gangs.c.number, gangs.c.step, now, epoch).where(gangs.c.step.is_not(None)),
        )
    )
    p = tables.plan
    count = sum(not gang.claims for gang in made)
    await connection.execute(update(p).where(p.c.id == request.plan_id).values(admitted=count))
