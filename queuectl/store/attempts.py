"""Attempts in a transaction: what they hold, where they are, and writing where they have come to."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Integer,
    RowMapping,
    TableValuedAlias,
    Text,
    Update,
    and_,
    case,
    func,
    insert,
    literal,
    null,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import TypeEngine

from queuectl.model.lifecycle import STEP_OF, Attempt, AttemptKey, AttemptState, End, Shrink
from queuectl.model.plan import Placement, Portion, Repair, place
from queuectl.model.resources import total
from queuectl.store import tables
from queuectl.store.room import Amounts
from queuectl.store.rows import (
    Places,
    attempt_from_row,
    end_from_json,
    end_to_json,
    places_by_attempt,
    quota_to_json,
    rowset,
    why_to_json,
)

_STAMPS = {
    "admitted_at": AttemptState.RESERVED,
    "created_at": AttemptState.CREATED,
    "ungated_at": AttemptState.UNGATED,
    "running_at": AttemptState.RUNNING,
    "growing_at": AttemptState.GROWING,
    "asked_at": AttemptState.CHECKPOINTING,
    "ending_at": AttemptState.ENDING,
    "ended_at": AttemptState.ENDED,
}


_COMING = [AttemptState.REPAIRING.value, AttemptState.GROWING.value]
_PLACE = {"uid": Text, "attempt": Integer, "role": Text, "flavor": Text, "node": Text, "first": Integer}


@dataclass(frozen=True)
class Stake:
    """What an active attempt is about.

    Only what leaves of it, what comes and what is done change, and only by its leader's transactions, so it may be read before
    anything is locked.
    """

    attempt: Attempt
    charged: tuple[str, ...]  # queues

    def of(self, part: Portion) -> Amounts:
        """Return what a part of it takes."""
        on_nodes = total({(p.node, name): amount * p.pods for name, amount in p.requests} for p in part.placements)
        return Amounts.of(self.charged, part.quota, on_nodes)

    @cached_property
    def amounts(self) -> Amounts:
        """What it takes, what leaves of it aside."""
        return self.of(self.attempt.whole)

    @cached_property
    def leaving(self) -> Amounts:
        """What leaves of it and is still held."""
        return self.of(self.attempt.leaving) if self.attempt.leaving else Amounts()


@dataclass(slots=True)
class Held:
    """An attempt as read under its workload's lock, and where its moves have brought it."""

    state: AttemptState
    end: End | None
    holds: bool  # counted in the rooms' reserved
    promised: bool  # counted in the rooms' promised
    claimed_by: AttemptKey | None  # if that is still there
    leaving: bool  # gives up a part
    asks: bool  # is asked to save its work before
    passed: list[AttemptState] = field(default_factory=list)

    @property
    def in_the_way(self) -> bool:
        """Tell whether the one who has claimed it still has to wait for it."""
        return self.claimed_by is not None and self.state is not AttemptState.ENDED


async def stakes(connection: AsyncConnection, uids: Collection[str]) -> dict[AttemptKey, Stake]:
    """Return what the active attempts of these workloads are about."""
    if not uids:
        return {}
    a, r, given = tables.attempt, tables.reservation, _uids(uids)
    active = and_(a.c.workload_uid == given.c.uid, a.c.state != AttemptState.ENDED.value)
    on = and_(r.c.workload_uid == a.c.workload_uid, r.c.attempt == a.c.number, r.c.freed_at.is_(None))
    places = places_by_attempt((await connection.execute(select(r).join(a, on).where(active))).mappings())
    return {
        (row["workload_uid"], row["number"]): Stake(
            attempt_from_row(row, places.get((row["workload_uid"], row["number"]), Places())), tuple(row["charged"])
        )
        for row in (await connection.execute(select(a).where(active))).mappings()
    }


async def waited_for(
    connection: AsyncConnection, claimers: Collection[AttemptKey]
) -> dict[AttemptKey, set[AttemptKey]]:
    """Return, for each claimer that has any, its victims that have not ended. They get fewer, never more."""
    if not claimers:
        return {}
    a, given = tables.attempt, keys(claimers)
    statement = select(a.c.workload_uid, a.c.number, a.c.claimed_by_uid, a.c.claimed_by_attempt).where(
        a.c.claimed_by_uid == given.c.uid,
        a.c.claimed_by_attempt == given.c.attempt,
        a.c.state != AttemptState.ENDED.value,
    )
    found: dict[AttemptKey, set[AttemptKey]] = {}
    for row in await connection.execute(statement):
        claimer = (row.claimed_by_uid, row.claimed_by_attempt)
        found.setdefault(claimer, set()).add((row.workload_uid, row.number))
    return found


async def lock_workloads(connection: AsyncConnection, uids: Collection[str]) -> dict[str, RowMapping]:
    """Lock these workloads, in the one order: uid → queue, state, attempt."""
    if not uids:
        return {}
    w = tables.workload
    statement = (
        select(w.c.uid, w.c.queue, w.c.state, w.c.attempt)
        .where(w.c.uid.in_(select(_uids(uids).c.uid)))
        .order_by(w.c.uid)
        .with_for_update(key_share=True)
    )
    return {row["uid"]: row for row in (await connection.execute(statement)).mappings()}


async def latest(connection: AsyncConnection, uids: Collection[str]) -> dict[AttemptKey, Held]:
    """Return the latest attempt of each of these locked workloads, if it has any."""
    if not uids:
        return {}
    a, w = tables.attempt, tables.workload
    columns = (a.c.workload_uid, a.c.number, a.c.state, a.c.end, a.c.holds, a.c.promised)
    statement = (
        select(
            *columns,
            a.c.claimed_by_uid,
            a.c.claimed_by_attempt,
            a.c.leaving.is_not(None).label("leaves"),
            a.c.ask.is_not(None).label("asks"),
        )
        .join(w, (w.c.uid == a.c.workload_uid) & (w.c.attempt == a.c.number))
        .where(w.c.uid.in_(select(_uids(uids).c.uid)))
    )
    return {
        (row.workload_uid, row.number): Held(
            AttemptState(row.state),
            end_from_json(row.end),
            row.holds,
            row.promised,
            None if row.claimed_by_uid is None else (row.claimed_by_uid, row.claimed_by_attempt),
            row.leaves,
            row.asks,
        )
        for row in await connection.execute(statement)
    }


async def write(connection: AsyncConnection, epoch: int, moved: Mapping[AttemptKey, Held], *, now: float) -> None:
    """Write where attempts have come to; their open steps are done, and the steps of their new states open."""
    if not moved:
        return
    a, w, s = tables.attempt, tables.workload, tables.step
    at = literal(now, tables.UnixTime)
    given = _rowset(
        {
            key: {
                "state": held.state.value,
                "end": end_to_json(held.end),
                "holds": held.holds,
                "promised": held.promised,
                "step": STEP_OF[held.state].value if held.state in STEP_OF else None,
                **{name: state in held.passed for name, state in _STAMPS.items()},
            }
            for key, held in moved.items()
        },
        state=Text,
        end=JSONB,
        holds=Boolean,
        promised=Boolean,
        step=Text,
        **dict.fromkeys(_STAMPS, Boolean),
    )
    await connection.execute(
        _update(given).values(
            state=given.c.state,
            end=given.c.end,
            holds=given.c.holds,
            promised=given.c.promised,
            coming=case((given.c.state.in_(_COMING), a.c.coming), else_=text("'[]'::jsonb")),
            ask=null(),  # who begins to shrink is asked after this
            # Its lost pods have been replaced; of one that grew it has been null since.
            shrunk=case(
                ((given.c.state == AttemptState.RUNNING.value) & (a.c.coming != text("'[]'::jsonb")), null()),
                else_=a.c.shrunk,
            ),
            # The first time counts, but for two: a claim is admitted again when it is reserved, and growth comes again.
            **{
                name: case(
                    (given.c[name], at if name in {"admitted_at", "growing_at"} else func.coalesce(a.c[name], at)),
                    else_=a.c[name],
                )
                for name in _STAMPS
            },
        )
    )
    await connection.execute(
        update(s)
        .values(done_at=at)
        .where(s.c.workload_uid == given.c.uid, s.c.attempt == given.c.attempt, s.c.done_at.is_(None))
    )
    await connection.execute(
        insert(s).from_select(
            ["workload_uid", "attempt", "step", "created_at", "epoch"],
            select(given.c.uid, given.c.attempt, given.c.step, at, literal(epoch)).where(given.c.step.is_not(None)),
        )
    )
    if any(AttemptState.RUNNING in held.passed for held in moved.values()):
        await connection.execute(update(w).values(late_starts=0).where(w.c.uid == given.c.uid, given.c.running_at))


async def shrinking(connection: AsyncConnection, of: Collection[AttemptKey]) -> set[AttemptKey]:
    """Return which of the attempts are giving up a part, or are being repaired."""
    if not of:
        return set()
    a, given = tables.attempt, keys(of)
    statement = select(a.c.workload_uid, a.c.number).where(
        _is(given),
        a.c.state.in_([AttemptState.SHRINKING.value, AttemptState.REPAIRING.value]),
    )
    return {(row.workload_uid, row.number) for row in await connection.execute(statement)}


async def claim(
    connection: AsyncConnection, claims: Mapping[AttemptKey, AttemptKey], shrinks: Collection[AttemptKey]
) -> None:
    """Write down who waits for whose room: victim → claimer. Of those who shrink only a part is claimed."""
    if not claims:
        return
    given = _rowset(
        {
            victim: {"by_uid": by_uid, "by_attempt": by_attempt, "promised": victim in shrinks}
            for victim, (by_uid, by_attempt) in claims.items()
        },
        by_uid=Text,
        by_attempt=Integer,
        promised=Boolean,
    )
    await connection.execute(
        _update(given).values(
            promised=given.c.promised, claimed_by_uid=given.c.by_uid, claimed_by_attempt=given.c.by_attempt
        )
    )


async def ask_no_longer(connection: AsyncConnection, told: Collection[AttemptKey]) -> None:
    """Write down that nobody waits any longer for what these attempts' pods were asked, before a part of them goes."""
    if told:
        await connection.execute(_update(keys(told)).values(ask=null()))


async def give_up(connection: AsyncConnection, shrinks: Mapping[AttemptKey, Shrink]) -> None:
    """Write down which parts attempts give up, and why; they hold them until these pods are gone."""
    if not shrinks:
        return
    r = tables.reservation
    given = _rowset(
        {
            key: {
                "leaving": quota_to_json(shrink.part.quota),
                "shrunk": why_to_json(shrink.why),
                "ask": asdict(shrink.ask) if shrink.ask else None,
            }
            for key, shrink in shrinks.items()
        },
        leaving=JSONB,
        shrunk=JSONB,
        ask=JSONB,
    )
    await connection.execute(_update(given).values(leaving=given.c.leaving, shrunk=given.c.shrunk, ask=given.c.ask))
    places = rowset(
        [
            {
                "uid": uid, "attempt": n, "role": p.role, "flavor": p.flavor, "node": p.node, "first": p.first,
                "pods": p.pods,
            }
            for (uid, n), shrink in sorted(shrinks.items())
            for p in shrink.part.placements
        ],
        **_PLACE,
        pods=Integer,
    )  # fmt: skip
    await connection.execute(update(r).values(leaving=places.c.pods).where(_same(places)))


async def grow(
    connection: AsyncConnection,
    growths: Mapping[AttemptKey, Portion],
    before: Mapping[AttemptKey, Stake],
    *,
    now: float,
) -> None:
    """Write down what attempts get in addition, which are Growing already. ``before``: as they were."""
    if not growths:
        return
    given = _rowset(
        {
            key: {
                "quota": quota_to_json(total((before[key].attempt.quota, part.quota))),
                "later": quota_to_json({cell: -amount for cell, amount in part.quota.items()}),
                "coming": sorted((p.role, p.first + i) for p in part.placements for i in range(p.pods)),
            }
            for key, part in growths.items()
        },
        quota=JSONB,
        later=JSONB,
        coming=JSONB,
    )
    await connection.execute(_update(given).values(quota=given.c.quota, coming=given.c.coming, shrunk=null()))
    at = literal(now, tables.UnixTime)
    await connection.execute(
        insert(tables.freed).from_select(
            ["workload_uid", "attempt", "at", "quota"], select(given.c.uid, given.c.attempt, at, given.c.later)
        )
    )
    await _reserve(connection, {key: part.placements for key, part in growths.items()})


async def repair(connection: AsyncConnection, repairs: Mapping[AttemptKey, Repair], *, now: float) -> None:
    """Write down which pods of attempts are replaced, which are Repairing already, and where to."""
    if not repairs:
        return
    given = _rowset(
        {key: {"coming": sorted(repair.pods), "shrunk": why_to_json(repair.why)} for key, repair in repairs.items()},
        coming=JSONB,
        shrunk=JSONB,
    )
    await connection.execute(
        _update(given).values(coming=given.c.coming, shrunk=given.c.shrunk, growing_at=literal(now, tables.UnixTime))
    )
    await give_up(connection, {key: Shrink(one.why, Portion(one.left)) for key, one in repairs.items() if one.left})
    await _reserve(connection, {key: one.found for key, one in repairs.items()})


async def _reserve(connection: AsyncConnection, added: Mapping[AttemptKey, Sequence[Placement]]) -> None:
    """Write down the places that attempts get in addition."""
    r = tables.reservation
    places = rowset(
        [
            {
                "uid": uid, "attempt": n, "role": p.role, "flavor": p.flavor, "node": p.node, "first": p.first,
                "pods": p.pods, "requests": p.requests, "cards": p.cards,
            }
            for (uid, n), placements in sorted(added.items())
            for p in placements
        ],
        **_PLACE,
        pods=Integer,
        requests=JSONB,
        cards=BigInteger,
    )  # fmt: skip
    names = ["role", "flavor", "node", "first", "pods", "requests", "cards"]
    statement = upsert(r).from_select(
        ["workload_uid", "attempt", *names], select(places.c.uid, places.c.attempt, *(places.c[name] for name in names))
    )
    new = statement.excluded
    await connection.execute(  # it may have had the same place before, and given it up
        statement.on_conflict_do_update(
            index_elements=["workload_uid", "attempt", *names[:4]],
            set_={"pods": new.pods, "leaving": 0, "freed_at": null()},
            where=r.c.freed_at.is_not(None),
        )
    )


async def give_back(
    connection: AsyncConnection, before: Mapping[AttemptKey, Stake], after: Mapping[AttemptKey, Stake], *, now: float
) -> None:
    """Write down that these attempts hold less: pods are done, or what left is gone, for which nobody waits then.

    ``before``: as they were when the transaction began.
    """
    if not after:
        return
    a, r = tables.attempt, tables.reservation
    rows: dict[AttemptKey, dict[str, Any]] = {}
    places = []
    for (uid, number), stake in sorted(after.items()):
        was, left = before[uid, number].attempt, stake.attempt
        quota, rest = (total(part.quota for part in one.parts) for one in (was, left))
        freed = {cell: amount - rest.get(cell, 0) for cell, amount in quota.items() if amount > rest.get(cell, 0)}
        rows[uid, number] = {
            "quota": quota_to_json(rest),
            "freed": quota_to_json(freed),
            "left": was.leaving is not None and left.leaving is None,
            "done": sorted(left.done),
        }
        held, holds = _by_place(was.held), _by_place(left.held)
        leaving = _by_place(left.leaving.placements if left.leaving else ())
        places += [
            {
                "uid": uid, "attempt": number, "role": at[0], "node": at[1], "flavor": at[2], "first": at[3],
                "pods": holds[at], "leaving": leaving[at],
            }
            for at, pods in sorted(held.items())
            if pods > holds[at]
        ]  # fmt: skip
    given = _rowset(rows, quota=JSONB, freed=JSONB, left=Boolean, done=JSONB)
    await connection.execute(
        _update(given).values(
            quota=given.c.quota,
            done=given.c.done,
            **{
                name: case((given.c.left, null()), else_=a.c[name])
                for name in ("leaving", "claimed_by_uid", "claimed_by_attempt")
            },
        )
    )
    at = literal(now, tables.UnixTime)
    await connection.execute(
        insert(tables.freed).from_select(
            ["workload_uid", "attempt", "at", "quota"], select(given.c.uid, given.c.attempt, at, given.c.freed)
        )
    )
    on = rowset(places, **_PLACE, pods=Integer, leaving=Integer)
    await connection.execute(
        update(r)
        .values(
            pods=case((on.c.pods > 0, on.c.pods), else_=r.c.pods),
            leaving=on.c.leaving,
            freed_at=case((on.c.pods > 0, null()), else_=at),
        )
        .where(_same(on), r.c.freed_at.is_(None))
    )


def _same(given: TableValuedAlias) -> ColumnElement[bool]:
    r = tables.reservation
    names = ("attempt", "role", "flavor", "node", "first")
    return and_(r.c.workload_uid == given.c.uid, *(r.c[name] == given.c[name] for name in names))


def _by_place(placements: Iterable[Placement]) -> Counter[tuple[str, str, str, int]]:
    """Return the pods by what their placements are known by."""
    pods: Counter[tuple[str, str, str, int]] = Counter()
    for placement in placements:
        pods[place(placement)] += placement.pods
    return pods


async def unclaim(connection: AsyncConnection, claimers: Collection[AttemptKey]) -> None:
    """Take these claimers' claims off the victims that are still there; who has ended stays on record."""
    if not claimers:
        return
    a, given = tables.attempt, keys(claimers)
    await connection.execute(
        update(a)
        .values(claimed_by_uid=None, claimed_by_attempt=None)
        .where(
            a.c.claimed_by_uid == given.c.uid,
            a.c.claimed_by_attempt == given.c.attempt,
            a.c.state != AttemptState.ENDED.value,
        )
    )


def keys(attempts: Collection[AttemptKey]) -> TableValuedAlias:
    """Return a table of attempts' keys: uid, attempt."""
    return _rowset({key: {} for key in attempts})


def _rowset(
    rows: Mapping[AttemptKey, Mapping[str, Any]], **columns: type[TypeEngine[Any]] | TypeEngine[Any]
) -> TableValuedAlias:
    """Return a table of attempts: uid, attempt, and what else is given of each."""
    by_key = [{"uid": uid, "attempt": number, **rows[uid, number]} for uid, number in sorted(rows)]
    return rowset(by_key, uid=Text, attempt=Integer, **columns)


def _update(given: TableValuedAlias) -> Update:
    """Begin to change the attempts that are given, one row each."""
    return update(tables.attempt).where(_is(given))


def _is(given: TableValuedAlias) -> ColumnElement[bool]:
    a = tables.attempt
    return and_(a.c.workload_uid == given.c.uid, a.c.number == given.c.attempt)


def _uids(uids: Collection[str]) -> TableValuedAlias:
    return rowset([{"uid": uid} for uid in sorted(uids)], uid=Text)
