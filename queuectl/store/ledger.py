"""The ledger: what queuectl promised, in Postgres. START HERE; ``reserve`` and ``advance`` hold the two transactions.

Every write is one transaction that first makes sure the caller's epoch still leads. Locks are taken in one order:
leadership, quota rows, node rows, workloads, each sorted by its key.
"""

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sqlalchemy import Text, func, or_, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from queuectl.core.suspects import REMEMBERED
from queuectl.model.checkpoint import Checkpoint
from queuectl.model.faults import Reading
from queuectl.model.lifecycle import Attempt, AttemptKey, AttemptState, End, Leave, Move, Workload, WorkloadState
from queuectl.model.plan import Admission, Portion, Preempt, Repair
from queuectl.model.policy import Amounts, Cell, Quota
from queuectl.model.suspects import Offence
from queuectl.store import advance, audit, checkpoints, readings, reserve, suspects, tables, usage
from queuectl.store.engine import WrongCluster, retried, transaction
from queuectl.store.reserve import CycleResult
from queuectl.store.rows import (
    attempts_from_rows,
    places_by_attempt,
    rowset,
    workload_from_row,
)

__all__ = ["CycleResult", "Ledger", "Loaded"]

_NONE: Mapping[str, Any] = MappingProxyType({})
_NO_GROWTHS: Mapping[AttemptKey, Portion] = MappingProxyType({})
_NO_REPAIRS: Mapping[AttemptKey, Repair] = MappingProxyType({})
_ONE_SNAPSHOT = text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a controller starts from."""

    workloads: list[Workload]
    attempts: list[Attempt]
    max_seq: int
    past: dict[str, dict[Cell, float]] = field(
        default_factory=dict
    )  # in queues' averages, what attempts no longer hold
    offences: list[Offence] = field(default_factory=list)  # of nodes, the oldest first
    readings: dict[str, Reading] = field(default_factory=dict)  # of the GPUs of nodes


class Ledger:
    """What is written about workloads, attempts and room.

    Every method raises StoreUnavailable when Postgres can't be reached in time, and those that take an epoch raise
    Fenced when another controller leads; then nothing was written.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        """Don't connect yet."""
        self._engine = engine

    async def bind(self, cluster_uid: str) -> str:
        """Tie the ledger to a cluster, once and for all; return its own name, that no other ledger has.

        Raises WrongCluster when it is tied to another one.
        """
        async with transaction(self._engine) as connection:
            await connection.execute(insert(tables.cluster).values(uid=cluster_uid).on_conflict_do_nothing())
            bound, name = (await connection.execute(select(tables.cluster.c.uid, tables.cluster.c.ledger))).one()
        if bound != cluster_uid:
            raise WrongCluster(
                f"this database belongs to cluster {bound}, and this is cluster {cluster_uid}; "
                "set DATABASE_URL to a database of this cluster's own"
            )
        return str(name)

    async def load(self, uids: Collection[str] = (), *, half_life: float = 0.0, now: float = 0.0) -> Loaded:
        """Return every workload that is not finished, the finished ones among ``uids``, and all active attempts.

        With a half-life (seconds) also what attempts have held by ``now`` (Unix seconds) and hold no longer. What nodes
        have done is given as far as it matters then.
        """
        w, a, r = tables.workload, tables.attempt, tables.reservation
        known = rowset([{"uid": uid} for uid in sorted(uids)], uid=Text)
        workloads = select(w).where(
            or_(w.c.state != WorkloadState.FINISHED.value, w.c.uid.in_(select(known.c.uid))),
        )
        async with transaction(self._engine) as connection:
            # One snapshot for all reads, or an attempt could be seen without its workload.
            await connection.execute(_ONE_SNAPSHOT)
            found = [workload_from_row(row) for row in (await connection.execute(workloads)).mappings()]
            held = (await connection.execute(select(r).where(r.c.freed_at.is_(None)))).mappings()
            places = places_by_attempt(held)
            active = (await connection.execute(select(a).where(a.c.state != AttemptState.ENDED.value))).mappings().all()
            attempts = attempts_from_rows(active, places)
            max_seq = await connection.scalar(select(func.coalesce(func.max(w.c.seq), 0)))
            past = await usage.past(connection, half_life=half_life, now=now) if half_life else {}
            offences = await suspects.load(connection, since=max(0.0, now - REMEMBERED))
            known_gpus = await readings.load(connection)
        return Loaded(found, attempts, int(max_seq or 0), past, offences, known_gpus)

    async def cycle(
        self,
        epoch: int,
        *,
        plan_id: uuid.UUID,
        now: float,
        submissions: Sequence[Workload] = (),
        nodes: Mapping[str, Mapping[str, int]] = _NONE,
        nodes_gone: Collection[str] = (),
        quotas: Mapping[str, Mapping[Cell, Quota]] = _NONE,
        limits: Mapping[str, Amounts] = _NONE,
        queues_gone: Collection[str] = (),
        changed_by: Mapping[str, str] = _NONE,
        change_why: Mapping[str, str] = _NONE,
        ancestors: Mapping[str, Sequence[str]] = _NONE,
        admissions: Sequence[tuple[Admission, int]] = (),
        preemptions: Sequence[tuple[Preempt, int, Mapping[str, Leave]]] = (),
        growths: Mapping[AttemptKey, Portion] = _NO_GROWTHS,
        repairs: Mapping[AttemptKey, Repair] = _NO_REPAIRS,
    ) -> CycleResult:
        """Record what was seen and reserve what was planned, in one transaction.

        ``nodes`` and ``quotas`` give each changed node's or queue's whole vector. What differs in ``quotas`` from how
        it last was is kept as a version, with who changed the queue (``changed_by``) and ``change_why``. A queue's
        ``limits``, its whole vector too, are what may be reserved in it and below it, where that is not the nominal.
        ``ancestors`` of a queue, nearest first, are charged with what the queue is charged.

        Preemptions are taken in order, each with the generation that was planned for and its victims' ends, or the parts
        that they give up, and after them the admissions; one that no longer fits, or whose victim is gone or already
        claimed, is refused and the rest commits. A preemptor's room is promised to it; it may move to RESERVED when its
        victims have ended or shrunk. Of an attempt that itself still waits for victims it takes over the claim: those of
        these victims that it names are now its own, and the others nobody's; none of them may be shrinking. At most 500
        gangs or 10,000 reservations and victims are taken, the rest is refused and left for
        the next cycle. Before all come the ``repairs`` of running attempts: which lost pods are replaced, and where. What
        they had on lost nodes is promised to it no more, and held until the attempt is Growing. Last come the ``growths`` of running attempts, by uid and number too: what each gets in addition. Both
        are refused when they no longer fit, or the attempt is anything but Running and whole.

        When the answer to COMMIT is lost, the plan is looked up by its id; StoreUnavailable then means that it still
        isn't known: call ``load`` before planning again.
        """
        request = reserve.Request(
            epoch=epoch,
            plan_id=plan_id,
            now=now,
            submissions=submissions,
            nodes=nodes,
            nodes_gone=nodes_gone,
            quotas=quotas,
            limits=limits,
            queues_gone=queues_gone,
            changed_by=changed_by,
            change_why=change_why,
            ancestors=ancestors,
            admissions=admissions,
            preemptions=preemptions,
            growths=growths,
            repairs=repairs,
        )
        if request.empty:
            return CycleResult([], [])

        async def work(_again: bool) -> CycleResult:  # noqa: FBT001
            async with transaction(self._engine) as connection:
                return await reserve.cycle(connection, request)

        return await retried(work)

    async def advance(self, epoch: int, moves: Sequence[Move], *, now: float) -> list[Move]:
        """Move attempts along their arrows and return the moves that took effect.

        A move that is illegal, repeated, or of an attempt that isn't its workload's latest is left out; so is a
        move to RESERVED while a victim is still there, or when its room is no longer enough, and one that has pods done
        which the attempt does not hold, or its last ones. When the answer to COMMIT is lost, the moves are made again,
        and those already made count as having taken effect.
        """
        if not moves:
            return []

        async def work(again: bool) -> list[Move]:  # noqa: FBT001
            async with transaction(self._engine) as connection:
                return await advance.advance(connection, epoch, moves, now=now, again=again)

        return await retried(work)

    async def save(self, epoch: int, saves: Mapping[str, Checkpoint]) -> None:
        """Record the last checkpoint of each of these workloads, in one transaction."""
        if not saves:
            return

        async def work(_again: bool) -> None:  # noqa: FBT001
            async with transaction(self._engine) as connection:
                await checkpoints.save(connection, epoch, saves)

        await retried(work)

    async def offend(self, epoch: int, offences: Sequence[Offence], forgiven: Mapping[str, float] = _NONE) -> None:
        """Record what nodes have done; of the ``forgiven`` ones nothing counts that was until the time given."""
        if not offences and not forgiven:
            return

        async def work(_again: bool) -> None:  # noqa: FBT001
            async with transaction(self._engine) as connection:
                await suspects.offend(connection, epoch, offences, forgiven)

        await retried(work)

    async def keep_readings(self, epoch: int, found: Mapping[str, Reading | None]) -> None:
        """Record what was read last of the GPUs of each of these nodes, in one transaction; None: nothing any more."""
        if not found:
            return

        async def work(_again: bool) -> None:  # noqa: FBT001
            async with transaction(self._engine) as connection:
                await readings.keep(connection, epoch, found)

        await retried(work)

    async def retire(self, epoch: int, ends: Mapping[str, End], *, now: float) -> list[str]:
        """Finish queued workloads that end without an attempt; return the uids that were."""
        if not ends:
            return []

        async def work(_again: bool) -> list[str]:  # noqa: FBT001
            async with transaction(self._engine) as connection:
                return await advance.retire(connection, epoch, ends, now=now)

        return await retried(work)

    async def audit(self) -> list[str]:
        """Return a sentence about everything in the ledger that contradicts itself; empty when all is well."""
        async with transaction(self._engine) as connection:
            await connection.execute(_ONE_SNAPSHOT)
            return await audit.audit(connection)

    async def quota_history(self, queue: str = "", *, limit: int = 100) -> list[dict[str, Any]]:
        """Return the latest changes of quotas, of one queue if it is named, newest first: the columns of the table."""
        v = tables.quota_version
        statement = select(v).order_by(v.c.id.desc()).limit(limit)
        if queue:
            statement = statement.where(v.c.queue == queue)
        async with transaction(self._engine) as connection:
            return [dict(row) for row in (await connection.execute(statement)).mappings()]

    async def history(self, uid: str) -> list[dict[str, Any]]:
        """Return the events of a workload, oldest first: at, attempt, kind, message, facts, epoch."""
        e = tables.event
        statement = (
            select(e.c.at, e.c.attempt, e.c.kind, e.c.message, e.c.facts, e.c.epoch)
            .where(e.c.workload_uid == uid)
            .order_by(e.c.id)
        )
        async with transaction(self._engine) as connection:
            return [dict(row) for row in (await connection.execute(statement)).mappings()]
