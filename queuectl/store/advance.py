"""Moving attempts along their arrows, and giving their room back at the end."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Boolean, Float, Integer, TableValuedAlias, Text, case, func, insert, literal, select, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model.lifecycle import STEP_OF, AttemptState, End, Move, Outcome, WorkloadState
from queuectl.model.resources import times, total
from queuectl.store import tables
from queuectl.store.events import Event, record, told
from queuectl.store.leadership import fence
from queuectl.store.room import Key, Room
from queuectl.store.rows import end_from_json, end_to_json, quota_from_json, rowset

_NEXT = {
    AttemptState.RESERVED: {AttemptState.CREATED, AttemptState.ENDING},
    AttemptState.CREATED: {AttemptState.UNGATED, AttemptState.ENDING},
    AttemptState.UNGATED: {AttemptState.RUNNING, AttemptState.ENDING},
    AttemptState.RUNNING: {AttemptState.ENDING},
    AttemptState.ENDING: {AttemptState.ENDED},
    AttemptState.ENDED: set[AttemptState](),
}
_STAMPS = {
    AttemptState.CREATED: "created_at",
    AttemptState.UNGATED: "ungated_at",
    AttemptState.RUNNING: "running_at",
    AttemptState.ENDING: "ending_at",
    AttemptState.ENDED: "ended_at",
}
_SENTENCES = {
    AttemptState.CREATED: "All pods exist, gated.",
    AttemptState.UNGATED: "Every gate is gone.",
    AttemptState.RUNNING: "All pods are ready.",
}


@dataclass(slots=True)
class _Held:
    """An attempt as read under its workload's lock, and where its moves have brought it."""

    state: AttemptState
    end: End | None
    queue: str
    quota: Any
    passed: list[AttemptState] = field(default_factory=list)


async def advance(
    connection: AsyncConnection, epoch: int, moves: Sequence[Move], *, now: float, again: bool
) -> list[Move]:
    """Make the moves that are legal. Raises Fenced.

    ``again``: an earlier try may have committed, so a move whose state was already reached counts as made.
    """
    await fence(connection, epoch)
    ending = {(move.uid, move.attempt) for move in moves if move.to is AttemptState.ENDED}
    quota, nodes = Room.of_quota(), Room.of_nodes()
    if ending:
        queue_names, node_names = await _places(connection, ending)
        await quota.lock(connection, queue_names)
        await nodes.lock(connection, node_names)
    held = await _lock(connection, {move.uid for move in moves})

    done: list[Move] = []
    events: list[Event] = []
    for move in moves:
        attempt = held.get((move.uid, move.attempt))
        if attempt is None or (move.to is AttemptState.ENDING) != (move.end is not None):
            continue
        if move.to not in _NEXT[attempt.state]:
            if again and move.to is attempt.state and not attempt.passed:
                done.append(move)
            continue
        attempt.state = move.to
        attempt.end = move.end or attempt.end
        attempt.passed.append(move.to)
        done.append(move)
        events.append(_event(move, attempt))
    moved = {key: attempt for key, attempt in held.items() if attempt.passed}
    if moved:
        await _write_attempts(connection, epoch, moved, now=now)
        await _free(
            connection, {key: a for key, a in moved.items() if a.state is AttemptState.ENDED}, quota, nodes, now
        )
        await record(connection, epoch, events, now=now)
    return done


async def retire(connection: AsyncConnection, epoch: int, ends: Mapping[str, End], *, now: float) -> list[str]:
    """Finish queued workloads that end without an attempt. Raises Fenced."""
    await fence(connection, epoch)
    w = tables.workload
    given = rowset(
        [{"uid": uid, "last_end": end_to_json(end)} for uid, end in sorted(ends.items())], uid=Text, last_end=JSONB
    )
    locked = (
        select(w.c.uid)
        .where(w.c.uid.in_(select(given.c.uid)), w.c.state == WorkloadState.QUEUED.value)
        .order_by(w.c.uid)
        .with_for_update(key_share=True)
    )
    uids = list((await connection.scalars(locked)).all())
    await connection.execute(
        update(w)
        .values(
            state=WorkloadState.FINISHED.value,
            finished_at=literal(now, tables.UnixTime),
            last_end=given.c.last_end,
        )
        .where(w.c.uid == given.c.uid, w.c.uid.in_(uids))
    )
    await record(connection, epoch, [told(ends[uid].why, uid, None) for uid in uids], now=now)
    return uids


def _keys(keys: Collection[tuple[str, int]]) -> TableValuedAlias:
    return rowset([{"uid": uid, "attempt": n} for uid, n in sorted(keys)], uid=Text, attempt=Integer)


async def _places(connection: AsyncConnection, keys: Collection[tuple[str, int]]) -> tuple[set[str], set[str]]:
    """Return the queues and nodes where these attempts hold room. Both are settled when an attempt is made."""
    a, r, given = tables.attempt, tables.reservation, _keys(keys)
    queues = select(a.c.queue).where(a.c.workload_uid == given.c.uid, a.c.number == given.c.attempt)
    nodes = select(r.c.node).where(r.c.workload_uid == given.c.uid, r.c.attempt == given.c.attempt)
    return set((await connection.scalars(queues)).all()), set((await connection.scalars(nodes)).all())


async def _lock(connection: AsyncConnection, uids: Collection[str]) -> dict[tuple[str, int], _Held]:
    """Lock the workloads and return their latest attempts, if active."""
    w, a = tables.workload, tables.attempt
    given = rowset([{"uid": uid} for uid in sorted(uids)], uid=Text)
    await connection.execute(
        select(w.c.uid).where(w.c.uid.in_(select(given.c.uid))).order_by(w.c.uid).with_for_update(key_share=True)
    )
    latest = (
        select(a.c.workload_uid, a.c.number, a.c.state, a.c.end, a.c.queue, a.c.quota)
        .join(w, (w.c.uid == a.c.workload_uid) & (w.c.attempt == a.c.number))
        .where(w.c.uid.in_(select(given.c.uid)))
    )
    return {
        (row.workload_uid, row.number): _Held(AttemptState(row.state), end_from_json(row.end), row.queue, row.quota)
        for row in await connection.execute(latest)
    }


def _event(move: Move, attempt: _Held) -> Event:
    if move.to is AttemptState.ENDING and move.end is not None:
        return told(move.end.why, move.uid, move.attempt)
    if move.to is AttemptState.ENDED and attempt.end is not None:
        end = attempt.end
        facts = {"outcome": end.outcome.value, "reason": end.why.code, "exit_code": end.exit_code}
        if end.outcome is Outcome.REQUEUE:
            return Event("Requeued", f"Back in its queue: {end.why}", move.uid, move.attempt, facts)
        return Event("Finished", f"{end.outcome.value}: {end.why}", move.uid, move.attempt, facts)
    return Event(move.to.value, _SENTENCES[move.to], move.uid, move.attempt)


async def _write_attempts(
    connection: AsyncConnection, epoch: int, moved: Mapping[tuple[str, int], _Held], *, now: float
) -> None:
    a, w, s = tables.attempt, tables.workload, tables.step
    at = literal(now, tables.UnixTime)
    stamps = {name: state for state, name in _STAMPS.items()}
    given = rowset(
        [
            {
                "uid": uid,
                "attempt": number,
                "state": held.state.value,
                "end": end_to_json(held.end),
                "step": STEP_OF[held.state].value if held.state in STEP_OF else None,
                **{name: state in held.passed for name, state in stamps.items()},
            }
            for (uid, number), held in sorted(moved.items())
        ],
        uid=Text,
        attempt=Integer,
        state=Text,
        end=JSONB,
        step=Text,
        **dict.fromkeys(stamps, Boolean),
    )
    await connection.execute(
        update(a)
        .values(
            state=given.c.state,
            end=given.c.end,
            **{name: case((given.c[name], at), else_=a.c[name]) for name in stamps},
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
            ["workload_uid", "attempt", "step", "created_at", "due_at", "epoch"],
            select(given.c.uid, given.c.attempt, given.c.step, at, at, literal(epoch)).where(given.c.step.is_not(None)),
        )
    )
    if any(AttemptState.RUNNING in held.passed for held in moved.values()):
        await connection.execute(update(w).values(late_starts=0).where(w.c.uid == given.c.uid, given.c.running_at))


async def _free(
    connection: AsyncConnection, ended: Mapping[tuple[str, int], _Held], quota: Room, nodes: Room, now: float
) -> None:
    """Give back the room of ended attempts and decide what their workloads are now."""
    if not ended:
        return
    r, given = tables.reservation, _keys(ended)
    freed = (
        update(r)
        .values(freed_at=literal(now, tables.UnixTime))
        .where(r.c.workload_uid == given.c.uid, r.c.attempt == given.c.attempt, r.c.freed_at.is_(None))
        .returning(r.c.node, r.c.pods, r.c.requests)
    )
    on_nodes: dict[Key, int] = total(
        {(node, name): amount for name, amount in times(dict(requests), pods).items()}
        for node, pods, requests in await connection.execute(freed)
    )
    in_queues: dict[Key, int] = total(
        {(held.queue, *key): amount for key, amount in quota_from_json(held.quota).items()} for held in ended.values()
    )
    await quota.free(connection, {key: n for key, n in in_queues.items() if n > 0})
    await nodes.free(connection, {key: n for key, n in on_nodes.items() if n > 0})
    await _settle(connection, ended, now)


async def _settle(connection: AsyncConnection, ended: Mapping[tuple[str, int], _Held], now: float) -> None:
    w = tables.workload
    rows = []
    for (uid, _), held in sorted(ended.items()):
        end = held.end
        if end is None:  # the table forbids it
            continue
        again = end.outcome is Outcome.REQUEUE
        rows.append(
            {
                "uid": uid,
                "state": (WorkloadState.QUEUED if again else WorkloadState.FINISHED).value,
                "not_before": end.not_before if again else 0.0,
                "charged": int(end.charged),
                "late": int(end.late),
                "last_end": end_to_json(end),
            }
        )
    given = rowset(rows, uid=Text, state=Text, not_before=Float(53), charged=Integer, late=Integer, last_end=JSONB)
    finished = given.c.state == WorkloadState.FINISHED.value
    await connection.execute(
        update(w)
        .values(
            state=given.c.state,
            not_before=func.to_timestamp(given.c.not_before),
            failures=w.c.failures + given.c.charged,
            late_starts=w.c.late_starts + given.c.late,
            last_end=given.c.last_end,
            finished_at=case((finished, literal(now, tables.UnixTime)), else_=None),
        )
        .where(w.c.uid == given.c.uid)
    )
