"""Attempts in a transaction: what they hold, where they are, and writing where they have come to."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Boolean, Integer, RowMapping, TableValuedAlias, Text, and_, case, insert, literal, select, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model.lifecycle import STEP_OF, AttemptState, End
from queuectl.model.resources import times, total
from queuectl.store import tables
from queuectl.store.room import Amounts
from queuectl.store.rows import end_from_json, end_to_json, quota_from_json, rowset

AttemptKey = tuple[str, int]  # workload uid, number

_STAMPS = {
    "admitted_at": AttemptState.RESERVED,
    "created_at": AttemptState.CREATED,
    "ungated_at": AttemptState.UNGATED,
    "running_at": AttemptState.RUNNING,
    "ending_at": AttemptState.ENDING,
    "ended_at": AttemptState.ENDED,
}


@dataclass(frozen=True, slots=True)
class Stake:
    """What an active attempt is about; settled when it is made, so it may be read before anything is locked."""

    amounts: Amounts
    pods: int
    nodes: int


@dataclass(slots=True)
class Held:
    """An attempt as read under its workload's lock, and where its moves have brought it."""

    state: AttemptState
    end: End | None
    holds: bool  # counted in the rooms' reserved
    promised: bool  # counted in the rooms' promised
    claimed_by: AttemptKey | None  # if that is still there
    passed: list[AttemptState] = field(default_factory=list)


async def stakes(connection: AsyncConnection, uids: Collection[str]) -> dict[AttemptKey, Stake]:
    """Return what the active attempts of these workloads are about."""
    if not uids:
        return {}
    a, r, given = tables.attempt, tables.reservation, _uids(uids)
    active = and_(a.c.workload_uid == given.c.uid, a.c.state != AttemptState.ENDED.value)
    places: dict[AttemptKey, list[Any]] = {}
    on = and_(r.c.workload_uid == a.c.workload_uid, r.c.attempt == a.c.number)
    reserved = select(r.c.workload_uid, r.c.attempt, r.c.node, r.c.pods, r.c.requests).join(a, on).where(active)
    for place in await connection.execute(reserved):
        places.setdefault((place.workload_uid, place.attempt), []).append(place)
    found = {}
    for row in await connection.execute(select(a.c.workload_uid, a.c.number, a.c.charged, a.c.quota).where(active)):
        mine = places.get((row.workload_uid, row.number), [])
        on_nodes = total(
            {(place.node, name): amount for name, amount in times(dict(place.requests), place.pods).items()}
            for place in mine
        )
        amounts = Amounts.of(row.charged, quota_from_json(row.quota), on_nodes)
        pods, nodes = sum(place.pods for place in mine), len({place.node for place in mine})
        found[row.workload_uid, row.number] = Stake(amounts, pods, nodes)
    return found


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
        select(*columns, a.c.claimed_by_uid, a.c.claimed_by_attempt)
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
        )
        for row in await connection.execute(statement)
    }


async def write(connection: AsyncConnection, epoch: int, moved: Mapping[AttemptKey, Held], *, now: float) -> None:
    """Write where attempts have come to; their open steps are done, and the steps of their new states open."""
    if not moved:
        return
    a, w, s = tables.attempt, tables.workload, tables.step
    at = literal(now, tables.UnixTime)
    given = rowset(
        [
            {
                "uid": uid,
                "attempt": number,
                "state": held.state.value,
                "end": end_to_json(held.end),
                "holds": held.holds,
                "promised": held.promised,
                "step": STEP_OF[held.state].value if held.state in STEP_OF else None,
                **{name: state in held.passed for name, state in _STAMPS.items()},
            }
            for (uid, number), held in sorted(moved.items())
        ],
        uid=Text,
        attempt=Integer,
        state=Text,
        end=JSONB,
        holds=Boolean,
        promised=Boolean,
        step=Text,
        **dict.fromkeys(_STAMPS, Boolean),
    )
    await connection.execute(
        update(a)
        .values(
            state=given.c.state,
            end=given.c.end,
            holds=given.c.holds,
            promised=given.c.promised,
            **{name: case((given.c[name], at), else_=a.c[name]) for name in _STAMPS},
        )
        .where(a.c.workload_uid == given.c.uid, a.c.number == given.c.attempt)
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


async def claim(connection: AsyncConnection, claims: Mapping[AttemptKey, AttemptKey]) -> None:
    """Write down who waits for whose room: victim → claimer."""
    if not claims:
        return
    a = tables.attempt
    given = rowset(
        [
            {"uid": uid, "attempt": number, "by_uid": by_uid, "by_attempt": by_attempt}
            for (uid, number), (by_uid, by_attempt) in sorted(claims.items())
        ],
        uid=Text,
        attempt=Integer,
        by_uid=Text,
        by_attempt=Integer,
    )
    await connection.execute(
        update(a)
        .values(promised=False, claimed_by_uid=given.c.by_uid, claimed_by_attempt=given.c.by_attempt)
        .where(a.c.workload_uid == given.c.uid, a.c.number == given.c.attempt)
    )


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
    return rowset([{"uid": uid, "attempt": n} for uid, n in sorted(attempts)], uid=Text, attempt=Integer)


def _uids(uids: Collection[str]) -> TableValuedAlias:
    return rowset([{"uid": uid} for uid in sorted(uids)], uid=Text)
