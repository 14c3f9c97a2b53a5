"""A ledger with somebody who leads, and short ways to say what happens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from sqlalchemy import Table, select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from queuectl.model.lifecycle import Attempt, AttemptState, End, Move, Outcome, Step, Workload
from queuectl.model.plan import Admission, Placement
from queuectl.model.policy import Quota
from queuectl.model.reasons import Reason, why
from queuectl.model.resources import CARD, MAX_AMOUNT
from queuectl.store.leadership import Leadership
from queuectl.store.ledger import CycleResult, Ledger

GPU = "nvidia.com/gpu"
REQUEUE = End(
    why(Reason.PODS_READY_TIMEOUT, ready=1, pods=2, seconds=300, waits=""),
    Outcome.REQUEUE,
    not_before=500.25,
    charged=True,
    late=True,
    exit_code=3,
)
SUCCEEDED = End(why(Reason.SUCCEEDED), Outcome.SUCCEEDED)
PREEMPTED = End(why(Reason.POD_DISRUPTED, pod="p", problem="preempted"), Outcome.REQUEUE)
DELETED = End(why(Reason.DELETED), Outcome.DELETED)
UP = (AttemptState.CREATED, AttemptState.UNGATED, AttemptState.RUNNING)


def workload(uid: str, queue: str = "q", priority: int = 0, seq: int = 1) -> Workload:
    return Workload(uid, "ns", f"job-{uid}", queue, priority, submitted_at=100.5, seq=seq)


def admission(uid: str, *, charged: int | None = None, **gpus: int) -> tuple[Admission, int]:
    """Ask for one pod with so many GPUs on each named node; the queue is charged their sum."""
    places = tuple(
        Placement("worker", "a100", node, 1, ((GPU, n), ("pods", 1)), min(MAX_AMOUNT, n * CARD))
        for node, n in gpus.items()
    )
    amount = sum(gpus.values()) if charged is None else charged
    return Admission(uid, places, {("a100", GPU): amount}), 7


@dataclass
class Scene:
    engine: AsyncEngine
    ledger: Ledger
    leadership: Leadership
    epoch: int
    _seq: int = field(default=0)

    @classmethod
    async def open(cls, engine: AsyncEngine, *, holder: str = "a") -> "Scene":
        leadership = Leadership(engine, holder=holder, ttl=60)
        term = await leadership.acquire()
        assert term is not None
        return cls(engine, Ledger(engine), leadership, term.epoch)

    async def cycle(self, *, now: float = 1000.0, **arguments: Any) -> CycleResult:
        return await self.ledger.cycle(self.epoch, plan_id=uuid4(), now=now, **arguments)

    async def submit(self, *uids: str, queue: str = "q") -> None:
        workloads = []
        for uid in uids:
            self._seq += 1
            workloads.append(workload(uid, queue=queue, seq=self._seq))
        await self.cycle(submissions=workloads)

    async def nodes(self, **gpus: int) -> None:
        await self.cycle(nodes={node: {GPU: n, "pods": 110} for node, n in gpus.items()})

    async def quota(self, queue: str = "q", nominal: int = 1000, **arguments: Any) -> None:
        await self.cycle(quotas={queue: {("a100", GPU): Quota(nominal)}}, **arguments)

    async def admit(self, *admissions: tuple[Admission, int], **arguments: Any) -> CycleResult:
        return await self.cycle(admissions=admissions, **arguments)

    async def move(self, uid: str, *states: AttemptState, end: End = REQUEUE, attempt: int = 1) -> list[Move]:
        done: list[Move] = []
        for state in states:
            given = end if state is AttemptState.ENDING else None
            done += await self.ledger.advance(self.epoch, [Move(uid, attempt, state, given)], now=2000.0)
        return done

    async def workload(self, uid: str) -> Workload:
        return next(w for w in (await self.ledger.load([uid])).workloads if w.uid == uid)

    async def attempt(self, uid: str) -> Attempt:
        return next(a for a in (await self.ledger.load()).attempts if a.uid == uid)

    async def steps(self) -> dict[str, Step]:
        """Return the open steps, by workload."""
        rows = await self.rows("SELECT workload_uid, step FROM step WHERE done_at IS NULL")
        return {uid: Step(step) for uid, step in rows}

    async def room(self, table: Table) -> dict[tuple[str, ...], tuple[int, int, int]]:
        """Key → (room, reserved, deficit)."""
        async with self.engine.connect() as connection:
            rows = (await connection.execute(select(table))).mappings().all()
        keys = [column.name for column in table.primary_key.columns]
        return {tuple(row[key] for key in keys): (row["room"], row["reserved"], row["deficit"]) for row in rows}

    async def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        async with self.engine.begin() as connection:
            result = await connection.execute(text(sql), parameters or {})
            return [tuple(row) for row in result] if result.returns_rows else []
