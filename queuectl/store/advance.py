"""Moving attempts along their arrows, and giving their room back at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain

from sqlalchemy import BigInteger, Float, Integer, Text, case, func, literal, select, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model.checkpoint import Ask, Interruption
from queuectl.model.lifecycle import (
    LEAVING,
    UNDER_WAY,
    AttemptKey,
    AttemptState,
    Done,
    End,
    Move,
    Outcome,
    WorkloadState,
)
from queuectl.model.reasons import FOR_OTHERS, Reason, why
from queuectl.model.resources import total
from queuectl.store import attempts, checkpoints, tables
from queuectl.store.attempts import Held, Stake
from queuectl.store.events import Event, record, told
from queuectl.store.leadership import fence
from queuectl.store.room import Rooms
from queuectl.store.rows import end_to_json, quota_to_json, rowset

_NEXT = {
    AttemptState.CLAIMED: {AttemptState.RESERVED, AttemptState.ENDING},
    AttemptState.RESERVED: {AttemptState.CREATED, AttemptState.ENDING},
    AttemptState.CREATED: {AttemptState.UNGATED, AttemptState.ENDING},
    AttemptState.UNGATED: {AttemptState.RUNNING, AttemptState.ENDING},
    AttemptState.RUNNING: {AttemptState.SHRINKING, AttemptState.CHECKPOINTING, AttemptState.ENDING},
    AttemptState.SHRINKING: {AttemptState.RUNNING, AttemptState.ENDING},
    AttemptState.REPAIRING: {AttemptState.GROWING, AttemptState.ENDING},
    AttemptState.GROWING: {AttemptState.RUNNING, AttemptState.SHRINKING, AttemptState.ENDING},
    AttemptState.CHECKPOINTING: {AttemptState.ENDING},
    AttemptState.ENDING: {AttemptState.ENDED},
    AttemptState.ENDED: set[AttemptState](),
}
# And what follows upon SHRINKING and REPAIRING.
_TOUCH_ROOM = {AttemptState.RESERVED, AttemptState.SHRINKING, AttemptState.ENDED}
_SENTENCES = {
    AttemptState.CREATED: "All pods exist, gated.",
    AttemptState.UNGATED: "Every gate is gone.",
    AttemptState.GROWING: "What was left of the lost pods is gone.",
    AttemptState.RUNNING: "All pods are ready.",
}


async def advance(
    connection: AsyncConnection, epoch: int, moves: Sequence[Move], *, now: float, again: bool
) -> list[Move]:
    """Make the moves that are legal. Raises Fenced.

    ``again``: an earlier try may have committed, so a move whose state was already reached counts as made.
    """
    await fence(connection, epoch)
    touching = {(move.uid, move.attempt) for move in moves if move.to in _TOUCH_ROOM}
    touching |= await attempts.shrinking(
        connection,
        {(move.uid, move.attempt) for move in moves if move.to in {AttemptState.RUNNING, AttemptState.GROWING}},
    )
    parts = [((move.uid, move.attempt), move.done.part) for move in moves if move.done is not None]
    concerned = touching.union(key for key, _ in parts)
    stakes = await attempts.stakes(connection, {uid for uid, _ in concerned})
    stakes = {key: stake for key, stake in stakes.items() if key in concerned}
    before = dict(stakes)
    victims = await attempts.waited_for(connection, touching)
    touched = [stakes[key] for key in touching & stakes.keys()]
    rooms = Rooms()
    await rooms.lock(
        connection,
        chain(
            (amounts for stake in touched for amounts in (stake.amounts, stake.leaving)),
            (stakes[key].of(part) for key, part in parts if key in stakes),
        ),
    )
    uids = {move.uid for move in moves}.union(uid for some in victims.values() for uid, _ in some)
    await attempts.lock_workloads(connection, uids)
    held = await attempts.latest(connection, uids)

    on_the_way = _OnTheWay(held, stakes, victims, rooms, again=again)
    done = [move for move in moves if on_the_way.make(move)]
    moved = {key: attempt for key, attempt in held.items() if attempt.passed}
    given_back = {key: stake for key, stake in stakes.items() if stake is not before[key]}
    if moved or given_back or on_the_way.told:
        ended = {key: attempt for key, attempt in moved.items() if attempt.state is AttemptState.ENDED}
        await attempts.give_back(connection, before, given_back, now=now)
        await attempts.write(connection, epoch, moved, now=now)
        await attempts.ask_no_longer(connection, on_the_way.told)
        shrinks = {(move.uid, move.attempt): move.shrink for move in done if move.shrink}
        await attempts.give_up(connection, {key: shrink for key, shrink in shrinks.items() if key in moved})
        await attempts.unclaim(connection, [key for key, attempt in ended.items() if not attempt.holds])
        lost = {(move.uid, move.attempt): move.interruption for move in done if move.interruption}
        lost = {key: one for key, one in lost.items() if key in ended}
        await checkpoints.interrupt(connection, lost)
        await _free(connection, ended, lost, now)
        await rooms.write(connection)
        await record(connection, epoch, on_the_way.events, now=now)
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


@dataclass
class _OnTheWay:
    """Attempts as the moves have brought them, before any of it is written."""

    held: Mapping[AttemptKey, Held]
    stakes: dict[AttemptKey, Stake]  # of those whose room is touched
    victims: Mapping[AttemptKey, set[AttemptKey]]
    rooms: Rooms
    again: bool
    events: list[Event] = field(default_factory=list)
    told: list[AttemptKey] = field(default_factory=list)  # whose pods are asked no longer, and a part of them goes

    def make(self, move: Move) -> bool:
        """Make a move, if it is legal, and tell whether it was made, now or by an earlier try."""
        attempt = self.held.get((move.uid, move.attempt))
        staying = move.done is not None or move.asked is not None
        ends = move.to in LEAVING or (move.to is AttemptState.ENDED and move.end is not None)
        given = (ends, move.to is AttemptState.SHRINKING and not staying)
        if attempt is None or given != (move.end is not None, move.shrink is not None):
            return False
        if move.done is not None:
            return move.to is attempt.state and move.to in UNDER_WAY and self._finish(move, move.done)
        if move.asked is not None:
            return move.to is attempt.state is AttemptState.SHRINKING and self._asked(move, attempt, move.asked)
        if move.to not in _NEXT[attempt.state]:
            return self.again and move.to is attempt.state and not attempt.passed
        has_shrunk = (attempt.state, move.to) in {
            (AttemptState.SHRINKING, AttemptState.RUNNING),
            (AttemptState.REPAIRING, AttemptState.GROWING),
        }
        if (move.to in _TOUCH_ROOM or has_shrunk) and not self._account(move, attempt):
            return False
        told_before, attempt.end = attempt.end, move.end or attempt.end
        attempt.state = move.to
        attempt.passed.append(move.to)
        self.events.append(_event(move, attempt, self.stakes.get((move.uid, move.attempt)), told_before))
        return True

    def _account(self, move: Move, attempt: Held) -> bool:
        """Turn a claim into a reservation, or give back what is gone of an attempt, or will be of what is promised.

        False when there is no room yet, or not what is to be given up.
        """
        key = (move.uid, move.attempt)
        stake = self.stakes.get(key)
        if stake is None:
            return False
        if move.shrink is not None:
            if not stake.attempt.whole.has(move.shrink.part):
                return False
            self.rooms.free(stake.of(move.shrink.part), promised=True)
            attempt.leaving = True
            return True
        if move.to is AttemptState.RESERVED:
            waits = any(v in self.held and self.held[v].in_the_way for v in self.victims.get(key, ()))
            if waits or not self.rooms.fits_now(stake.amounts):
                return False
            self.rooms.take(stake.amounts, reserved=True)
            attempt.holds = True
            return True
        if attempt.leaving:
            self.rooms.free(stake.leaving, reserved=True)
            attempt.leaving, attempt.claimed_by = False, None
        if move.to is AttemptState.ENDED:
            self.rooms.free(stake.amounts, reserved=attempt.holds, promised=attempt.promised)
            self.rooms.nodes.shrink(total({(node, name): n for name, n in used} for node, used in move.left))
        else:
            self.stakes[key] = replace(stake, attempt=replace(stake.attempt, leaving=None))
        return True

    def _asked(self, move: Move, attempt: Held, asked: Ask) -> bool:
        """Ask no longer, and say what came of it."""
        if not attempt.asks:
            return self.again
        attempt.asks = False
        self.told.append((move.uid, move.attempt))
        self.events.append(told(asked.outcome, move.uid, move.attempt))
        return True

    def _finish(self, move: Move, done: Done) -> bool:
        """Give back what pods held that are done; False when they are not the attempt's own, or its last."""
        key = (move.uid, move.attempt)
        stake = self.stakes[key]
        before = stake.attempt
        if done.pods <= before.done:
            return self.again
        ours = before.done.isdisjoint(done.pods) and before.whole.has(done.part)
        if not ours or not 0 < done.part.pods == len(done.pods) < before.whole.pods:
            return False
        self.rooms.free(stake.of(done.part), reserved=True, promised=True)
        self.stakes[key] = replace(stake, attempt=before.without(done))
        told = self.stakes[key].attempt.progress
        facts = {**told.facts, "freed": quota_to_json(done.part.quota)}
        self.events.append(Event(told.code, str(told), *key, facts))
        return True


def _event(move: Move, attempt: Held, stake: Stake | None, told_before: End | None) -> Event:
    if move.end is not None and move.to is not AttemptState.ENDED:
        return told(move.end.told(told_before), move.uid, move.attempt)
    if move.shrink is not None:
        return told(move.shrink.why, move.uid, move.attempt)
    if move.to is AttemptState.ENDED and attempt.end is not None:
        end = attempt.end
        facts = {"outcome": end.outcome.value, "reason": end.why.code, "exit_code": end.exit_code}
        if end.outcome is Outcome.REQUEUE:
            return Event("Requeued", f"Back in its queue: {end.why}", move.uid, move.attempt, facts)
        return Event("Finished", f"{end.outcome.value}: {end.why}", move.uid, move.attempt, facts)
    if move.to is AttemptState.RESERVED and stake is not None:
        nodes = len({place.node for place in stake.attempt.placements})
        return told(why(Reason.ADMITTED, pods=stake.attempt.whole.pods, nodes=nodes), move.uid, move.attempt)
    return Event(move.to.value, _SENTENCES[move.to], move.uid, move.attempt)


async def _free(
    connection: AsyncConnection,
    ended: Mapping[AttemptKey, Held],
    lost: Mapping[AttemptKey, Interruption],
    now: float,
) -> None:
    """Mark the reservations of ended attempts as freed and decide what their workloads are now."""
    if not ended:
        return
    r, given = tables.reservation, attempts.keys(ended)
    await connection.execute(
        update(r)
        .values(freed_at=literal(now, tables.UnixTime))
        .where(r.c.workload_uid == given.c.uid, r.c.attempt == given.c.attempt, r.c.freed_at.is_(None))
    )
    w = tables.workload
    rows = []
    for (uid, number), held in sorted(ended.items()):
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
                "preempted": int(held.holds and end.why.reason in FOR_OTHERS),
                "lost": lost[uid, number].lost.gpu_seconds if (uid, number) in lost else 0,
                "last_end": end_to_json(end),
                "ignored": asdict(end.ignored) if end.ignored else None,
            }
        )
    given = rowset(
        rows, uid=Text, state=Text, not_before=Float(53), charged=Integer, late=Integer, preempted=Integer,
        lost=BigInteger, last_end=JSONB, ignored=JSONB,
    )  # fmt: skip
    finished = given.c.state == WorkloadState.FINISHED.value
    at = literal(now, tables.UnixTime)
    await connection.execute(
        update(w)
        .values(
            state=given.c.state,
            not_before=func.to_timestamp(given.c.not_before),
            failures=w.c.failures + given.c.charged,
            late_starts=w.c.late_starts + given.c.late,
            ignored=func.coalesce(given.c.ignored, w.c.ignored),
            preemptions=w.c.preemptions + given.c.preempted,
            lost=w.c.lost + given.c.lost,
            requeued_at=at,
            last_end=given.c.last_end,
            finished_at=case((finished, at), else_=None),
        )
        .where(w.c.uid == given.c.uid)
    )
