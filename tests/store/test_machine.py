"""Any order of observations, cycles and moves: the ledger agrees with a few lines of Python and with itself."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from queuectl.model.lifecycle import AttemptState, End, Move, Outcome, WorkloadState
from queuectl.model.plan import Admission, Placement
from queuectl.model.reasons import Reason, why
from queuectl.store import tables
from queuectl.store.engine import Fenced, open_engine
from tests.store.scene import GPU, Scene, workload

UIDS = [f"w{i}" for i in range(6)]
NODES = ["n1", "n2", "n3"]
QUEUES = ["q1", "q2"]
LIFE = list(AttemptState)
PLACES = st.dictionaries(st.sampled_from(NODES), st.integers(1, 6), min_size=1)
TABLES = ", ".join(table.name for table in tables.metadata.sorted_tables)


@dataclass
class Job:
    queue: str
    state: WorkloadState = WorkloadState.QUEUED
    attempt: int = 0
    at: AttemptState | None = None
    end: End | None = None
    failures: int = 0
    held: dict[str, int] = field(default_factory=dict)  # node → GPUs


class LedgerMachine(RuleBasedStateMachine):
    url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.engine = open_engine(self.url)
        self.scene = self.run(self._open())
        self.jobs: dict[str, Job] = {}
        self.nodes: dict[str, int] = {}
        self.quotas: dict[str, int] = {}
        self.now = 1000.0

    async def _open(self) -> Scene:
        async with self.engine.begin() as connection:
            await connection.exec_driver_sql(f"TRUNCATE {TABLES}")
        return await Scene.open(self.engine)

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def teardown(self) -> None:
        self.run(self.engine.dispose())
        self.runner.close()

    def reserved(self, *, node: str = "", queue: str = "") -> int:
        if node:
            return sum(job.held.get(node, 0) for job in self.jobs.values())
        return sum(sum(job.held.values()) for job in self.jobs.values() if job.queue == queue)

    def fits(self, uid: str, wanted: dict[str, int]) -> bool:
        job = self.jobs.get(uid)
        if job is None or job.state is not WorkloadState.QUEUED:
            return False
        queue_fits = self.reserved(queue=job.queue) + sum(wanted.values()) <= self.quotas.get(job.queue, 0)
        return queue_fits and all(self.reserved(node=n) + gpus <= self.nodes.get(n, 0) for n, gpus in wanted.items())

    @rule(
        submitted=st.dictionaries(st.sampled_from(UIDS), st.sampled_from(QUEUES), max_size=3),
        nodes=st.dictionaries(st.sampled_from(NODES), st.integers(-2, 12), max_size=2),
        gone=st.sets(st.sampled_from(NODES), max_size=1),
        quotas=st.dictionaries(st.sampled_from(QUEUES), st.integers(0, 20), max_size=2),
        queues_gone=st.sets(st.sampled_from(QUEUES), max_size=1),
        wanted=st.lists(st.tuples(st.sampled_from(UIDS), PLACES), max_size=4),
    )
    def cycle(self, **drawn: Any) -> None:
        self._cycle(**drawn)

    def _cycle(
        self,
        *,
        submitted: dict[str, str],
        nodes: dict[str, int],
        gone: set[str],
        quotas: dict[str, int],
        queues_gone: set[str],
        wanted: list[tuple[str, dict[str, int]]],
    ) -> None:
        nodes = {node: gpus for node, gpus in nodes.items() if node not in gone}
        quotas = {queue: gpus for queue, gpus in quotas.items() if queue not in queues_gone}
        result = self.run(
            self.scene.cycle(
                submissions=[workload(uid, queue=queue) for uid, queue in submitted.items()],
                nodes={node: {GPU: gpus} for node, gpus in nodes.items()},
                nodes_gone=gone,
                quotas={queue: {("f", GPU): gpus} for queue, gpus in quotas.items()},
                queues_gone=queues_gone,
                admissions=[(_admission(uid, places), 1) for uid, places in wanted],
            )
        )
        for node, gpus in nodes.items():
            self.nodes[node] = max(0, gpus)
        for node in gone:
            self.nodes.pop(node, None)
        self.quotas.update(quotas)
        for queue in queues_gone:
            self.quotas.pop(queue, None)
        for uid, queue in submitted.items():
            job = self.jobs.setdefault(uid, Job(queue))
            if job.state is WorkloadState.QUEUED:
                job.queue = queue
        admitted, refused = [], []
        for uid, places in wanted:
            if self.fits(uid, places):
                job = self.jobs[uid]
                job.state, job.attempt, job.at, job.held = WorkloadState.ACTIVE, job.attempt + 1, LIFE[0], places
                admitted.append(uid)
            else:
                refused.append(uid)
        assert ([a.uid for a in result.admitted], result.refused) == (admitted, refused)

    @rule(uid=st.sampled_from(UIDS), queue=st.sampled_from(QUEUES), places=PLACES)
    def start(self, uid: str, queue: str, places: dict[str, int]) -> None:
        """Bring a gang in with room for it, which chance alone seldom does."""
        room = {node: self.reserved(node=node) + gpus for node, gpus in places.items()}
        self._cycle(
            submitted={uid: queue},
            nodes=room,
            gone=set(),
            quotas=dict.fromkeys(QUEUES, 20),
            queues_gone=set(),
            wanted=[(uid, places)],
        )

    @rule(
        moves=st.lists(
            st.tuples(
                st.sampled_from(UIDS),
                st.integers(1, 3),
                st.sampled_from(LIFE),
                st.sampled_from(list(Outcome)),
                st.booleans(),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def advance(self, moves: list[tuple[str, int, AttemptState, Outcome, bool]]) -> None:
        given = [
            Move(uid, number, to, End(why(Reason.DELETED), outcome, charged=charged) if to is LIFE[4] else None)
            for uid, number, to, outcome, charged in moves
        ]
        self._advance(given)

    @precondition(lambda self: any(job.at for job in self.jobs.values()))
    @rule(pick=st.integers(0, 5), arrows=st.integers(1, 5), outcome=st.sampled_from(list(Outcome)))
    def live(self, pick: int, arrows: int, outcome: Outcome) -> None:
        """Bring an active attempt some arrows further."""
        active = [(uid, job, job.at) for uid, job in sorted(self.jobs.items()) if job.at is not None]
        uid, job, at = active[pick % len(active)]
        here = LIFE.index(at) + 1
        end = End(why(Reason.DELETED), outcome)
        self._advance([Move(uid, job.attempt, to, end if to is LIFE[4] else None) for to in LIFE[here : here + arrows]])

    def _advance(self, moves: list[Move]) -> None:
        done = self.run(self.scene.ledger.advance(self.scene.epoch, moves, now=self.now))
        want = []
        for move in moves:
            job = self.jobs.get(move.uid)
            if job is None or job.at is None or job.attempt != move.attempt:
                continue
            here, there = LIFE.index(job.at), LIFE.index(move.to)
            if there != here + 1 and not (there == 4 and here < 4):
                continue
            want.append(move)
            job.at, job.end = move.to, move.end or job.end
            if there == 5:
                assert job.end is not None
                job.at, job.held, job.failures = None, {}, job.failures + job.end.charged
                again = job.end.outcome is Outcome.REQUEUE
                job.state = WorkloadState.QUEUED if again else WorkloadState.FINISHED
        assert done == want

    @rule(uid=st.sampled_from(UIDS))
    def retire(self, uid: str) -> None:
        ended = self.run(
            self.scene.ledger.retire(self.scene.epoch, {uid: End(why(Reason.DELETED), Outcome.DELETED)}, now=self.now)
        )
        job = self.jobs.get(uid)
        waits = job is not None and job.state is WorkloadState.QUEUED
        assert ended == ([uid] if waits else [])
        if job is not None and waits:
            job.state = WorkloadState.FINISHED

    @rule()
    def fail_over(self) -> None:
        old, self.scene = self.scene, self.run(Scene.open(self.engine))
        with pytest.raises(Fenced):
            self.run(old.cycle(nodes={"n1": {GPU: 99}}))

    @invariant()
    def agrees(self) -> None:
        assert self.run(self.scene.ledger.audit()) == []
        loaded = self.run(self.scene.ledger.load(UIDS))
        assert {w.uid: (w.state, w.attempt, w.queue, w.failures) for w in loaded.workloads} == {
            uid: (job.state, job.attempt, job.queue, job.failures) for uid, job in self.jobs.items()
        }
        assert {(a.uid, a.number): a.state for a in loaded.attempts} == {
            (uid, job.attempt): job.at for uid, job in self.jobs.items() if job.at is not None
        }
        for (node, _), (room, reserved, deficit) in self.run(self.scene.room(tables.node_room)).items():
            assert (room, reserved) == (self.nodes.get(node, 0), self.reserved(node=node))
            assert deficit == max(0, reserved - room)


def _admission(uid: str, places: dict[str, int]) -> Admission:
    placements = tuple(Placement("r", "f", node, 1, ((GPU, gpus),)) for node, gpus in places.items())
    return Admission(uid, placements, {("f", GPU): sum(places.values())})


def test_any_history_keeps_the_ledger_true(database_url: str) -> None:
    run_state_machine_as_test(
        type("LedgerMachine", (LedgerMachine,), {"url": database_url}),
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
