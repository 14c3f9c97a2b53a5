"""What is known of jobs' checkpoints, and of the work that interruptions cost."""

from collections.abc import Mapping

from sqlalchemy import BigInteger, Boolean, Float, Integer, Text, func, select, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model.checkpoint import Checkpoint, Interruption
from queuectl.model.lifecycle import AttemptKey
from queuectl.store import tables
from queuectl.store.leadership import fence
from queuectl.store.rows import checkpoint_to_json, rowset


async def save(connection: AsyncConnection, epoch: int, saves: Mapping[str, Checkpoint]) -> None:
    """Write down the last checkpoint of each of these workloads. Raises Fenced."""
    await fence(connection, epoch)
    w = tables.workload
    given = rowset(
        [{"uid": uid, "saved": checkpoint_to_json(checkpoint)} for uid, checkpoint in sorted(saves.items())],
        uid=Text,
        saved=JSONB,
    )
    await connection.execute(update(w).values(saved=given.c.saved).where(w.c.uid == given.c.uid))


async def interrupt(connection: AsyncConnection, interruptions: Mapping[AttemptKey, Interruption]) -> None:
    """Write down what the ends of these attempts cost, once for each."""
    if not interruptions:
        return
    i = tables.interruption
    given = rowset(
        [
            {
                "uid": uid, "attempt": number, "at": one.at, "cause": one.cause, "saved_at": one.saved_at,
                "saved_step": one.saved_step, "gpu_seconds": one.lost.gpu_seconds,
                "pod_seconds": one.lost.pod_seconds, "answered": one.answered,
            }
            for (uid, number), one in sorted(interruptions.items())
        ],
        uid=Text, attempt=Integer, at=Float(53), cause=Text, saved_at=Float(53), saved_step=BigInteger,
        gpu_seconds=BigInteger, pod_seconds=BigInteger, answered=Boolean,
    )  # fmt: skip
    same = ["cause", "saved_step", "gpu_seconds", "pod_seconds", "answered"]
    times = [func.to_timestamp(given.c[name]) for name in ("at", "saved_at")]
    statement = upsert(i).from_select(
        ["workload_uid", "attempt", *same, "at", "saved_at"],
        select(given.c.uid, given.c.attempt, *(given.c[name] for name in same), *times),
    )
    await connection.execute(statement.on_conflict_do_nothing())
