"""Any order of observations, cycles and moves: the ledger agrees with a few lines of Python and with itself."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from queuectl.model.lifecycle import AttemptState, End, Move, Outcome, WorkloadState
from queuectl.model.plan import Admission, Eviction, Placement, Preempt
from queuectl.model.policy import Cause, Quota
from queuectl.model.reasons import Reason, why
from queuectl.store import tables
from queuectl.store.engine import Fenced, open_engine
from tests.store.scene import GPU, REQUEUE, Scene, workload

UIDS = [f"w{i}" for i in range(6)]
NODES = ["n1", "n2", "n3"]
QUEUES = ["q1", "q2"]
TOP = "top"  # the queue above them
LIFE = list(AttemptState)
CLAIMED, RESERVED, ENDING, ENDED = LIFE[0], LIFE[1], LIFE[5], LIFE[6]
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
    holds: bool = False
    promised: bool = False
    claimed_by: str = ""


class LedgerMachine(RuleBasedStateMachine):
    url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.engine = open_engine(self.url)
        self.scene = self.run(self._open())
        self.jobs: dict[str, Job] = {}
        self.nodes: dict[str, int] = {}
        self.quotas: dict[str, int] = {}  # what may be used of each queue
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

    def sums(self, *, node: str = "", queue: str = "") -> tuple[int, int]:
        """What is reserved and what is promised of a node or a queue."""
        amounts = [
            (job, job.held.get(node, 0) if node else sum(job.held.values()))
            for job in self.jobs.values()
            if node or queue in {job.queue, TOP}
        ]
        return sum(n for job, n in amounts if job.holds), sum(n for job, n in amounts if job.promised)

    def rows(self, uid: str, wanted: dict[str, int]) -> list[tuple[int, int, int, int]]:
        """For everything that the gang asks for: room, reserved, promised, wanted."""
        queues = (self.jobs[uid].queue, TOP)
        nodes = [(self.nodes.get(node, 0), *self.sums(node=node), gpus) for node, gpus in wanted.items()]
        total = sum(wanted.values())
        return nodes + [(self.quotas.get(queue, 0), *self.sums(queue=queue), total) for queue in queues]

    def waits(self, uid: str) -> bool:
        return uid in self.jobs and self.jobs[uid].state is WorkloadState.QUEUED

    def admit(self, uid: str, wanted: dict[str, int], at: AttemptState) -> None:
        job = self.jobs[uid]
        job.state, job.attempt, job.at, job.held = WorkloadState.ACTIVE, job.attempt + 1, at, wanted
        job.holds, job.promised = at is RESERVED, True

    def claim(self, uid: str, wanted: dict[str, int], victims: list[str]) -> bool:
        if not self.waits(uid) or len(set(victims)) < len(victims):
            return False
        known = [victim for victim in victims if victim in self.jobs]
        overtaken = {victim for victim in known if self.jobs[victim].at is CLAIMED}
        free = {name for name in known if self.jobs[name].holds and self.jobs[name].claimed_by in {"", *overtaken}}
        if not free | overtaken >= set(victims):
            return False
        taken = [self.jobs[victim] for victim in victims]
        before = [job.promised for job in taken]
        for job in taken:
            job.promised = False
        if not all(promised + n <= room for room, _, promised, n in self.rows(uid, wanted)):
            for job, promised in zip(taken, before, strict=True):
                job.promised = promised
            return False
        for job in self.jobs.values():
            if job.claimed_by in overtaken:
                job.claimed_by = ""
        for job in taken:
            job.claimed_by = uid if job.holds else ""
            if job.at is not ENDING:
                job.at, job.end = ENDING, REQUEUE
        self.admit(uid, wanted, CLAIMED)
        return True

    @rule(
        submitted=st.dictionaries(st.sampled_from(UIDS), st.sampled_from(QUEUES), max_size=3),
        nodes=st.dictionaries(st.sampled_from(NODES), st.integers(-2, 12), max_size=2),
        gone=st.sets(st.sampled_from(NODES), max_size=1),
        quotas=st.dictionaries(st.sampled_from(QUEUES), st.integers(0, 20), max_size=2),
        queues_gone=st.sets(st.sampled_from(QUEUES), max_size=1),
        wanted=st.lists(st.tuples(st.sampled_from(UIDS), PLACES), max_size=4),
        claims=st.lists(
            st.tuples(st.sampled_from(UIDS), PLACES, st.lists(st.sampled_from(UIDS), max_size=2)), max_size=2
        ),
        top=st.none() | st.integers(0, 40),
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
        claims: list[tuple[str, dict[str, int], list[str]]],
        top: int | None,
    ) -> None:
        nodes = {node: gpus for node, gpus in nodes.items() if node not in gone}
        quotas = {queue: gpus for queue, gpus in quotas.items() if queue not in queues_gone}
        result = self.run(
            self.scene.cycle(
                submissions=[workload(uid, queue=queue) for uid, queue in submitted.items()],
                nodes={node: {GPU: gpus} for node, gpus in nodes.items()},
                nodes_gone=gone,
                quotas={queue: {("f", GPU): Quota(gpus)} for queue, gpus in quotas.items()},
                queues_gone=queues_gone,
                limits={} if top is None else {TOP: {("f", GPU): top}},
                ancestors=dict.fromkeys(QUEUES, (TOP,)),
                admissions=[(_admission(uid, places), 1) for uid, places in wanted],
                preemptions=[
                    (
                        Preempt(_admission(uid, places), tuple(Eviction(victim, Cause.QUEUE) for victim in victims)),
                        1,
                        dict.fromkeys(victims, REQUEUE),
                    )
                    for uid, places, victims in claims
                ],
            )
        )
        for node, gpus in nodes.items():
            self.nodes[node] = max(0, gpus)
        for node in gone:
            self.nodes.pop(node, None)
        self.quotas |= quotas | ({} if top is None else {TOP: top})
        for queue in queues_gone:
            self.quotas.pop(queue, None)
        for uid, queue in submitted.items():
            job = self.jobs.setdefault(uid, Job(queue))
            if job.state is WorkloadState.QUEUED:
                job.queue = queue
        admitted: list[str] = []
        refused: list[str] = []
        claimed: list[str] = []
        for uid, places, victims in claims:
            (claimed if self.claim(uid, places, victims) else refused).append(uid)
        for uid, places in wanted:
            if self.waits(uid) and all(max(now, later) + n <= room for room, now, later, n in self.rows(uid, places)):
                self.admit(uid, places, RESERVED)
                admitted.append(uid)
            else:
                refused.append(uid)
        assert ([a.uid for a in result.admitted], [a.uid for a in result.claimed]) == (admitted, claimed)
        assert result.refused == refused

    @rule(uid=st.sampled_from(UIDS), queue=st.sampled_from(QUEUES), places=PLACES)
    def start(self, uid: str, queue: str, places: dict[str, int]) -> None:
        """Bring a gang in with room for it, which chance alone seldom does."""
        room = {node: max(self.sums(node=node)) + gpus for node, gpus in places.items()}
        self._cycle(
            submitted={uid: queue},
            nodes=room,
            gone=set(),
            quotas=dict.fromkeys(QUEUES, 20),
            queues_gone=set(),
            wanted=[(uid, places)],
            claims=[],
            top=40,
        )

    @precondition(lambda self: any(job.holds for job in self.jobs.values()))
    @rule(
        uid=st.sampled_from(UIDS),
        queue=st.sampled_from(QUEUES),
        picks=st.sets(st.integers(0, 5), min_size=1, max_size=2),
        less=st.integers(-2, 4),
        idle=st.none() | st.integers(0, 6),
    )
    def preempt(self, uid: str, queue: str, picks: set[int], less: int, idle: int | None) -> None:
        """Take the place of some that hold one, or part of it, or a little more."""
        holders = [name for name, job in sorted(self.jobs.items()) if job.holds]
        victims = sorted({holders[pick % len(holders)] for pick in picks})
        places = {node: max(1, n - less) for victim in victims for node, n in self.jobs[victim].held.items()}
        self._cycle(
            submitted={uid: queue},
            nodes={} if idle is None else {node: max(self.sums(node=node)) + idle for node in places},
            gone=set(),
            quotas=dict.fromkeys(QUEUES, 30),
            queues_gone=set(),
            wanted=[],
            claims=[(uid, places, victims)],
            top=60,
        )

    @precondition(lambda self: any(job.at is CLAIMED for job in self.jobs.values()))
    @rule(
        uid=st.sampled_from(UIDS),
        queue=st.sampled_from(QUEUES),
        pick=st.integers(0, 5),
        left=st.integers(0, 2),
        less=st.integers(-1, 3),
        more=st.sets(st.integers(0, 5), max_size=1),
    )
    def overtake(self, *, uid: str, queue: str, pick: int, left: int, less: int, more: set[int]) -> None:
        """Take over a claim with all of its victims, some of them or others besides."""
        claimers = [name for name, job in sorted(self.jobs.items()) if job.at is CLAIMED]
        claimer = claimers[pick % len(claimers)]
        holders = [name for name, job in sorted(self.jobs.items()) if job.holds]
        inherited = [victim for victim, _ in self.victims(claimer)][left:]
        further = {holders[pick % len(holders)] for pick in more} if holders else set()
        victims = sorted({claimer, *inherited, *further})
        places = {node: max(1, n - less) for victim in victims for node, n in self.jobs[victim].held.items()}
        self._cycle(
            submitted={uid: queue},
            nodes={},
            gone=set(),
            quotas=dict.fromkeys(QUEUES, 30),
            queues_gone=set(),
            wanted=[],
            claims=[(uid, places, victims)],
            top=60,
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
            Move(uid, number, to, End(why(Reason.DELETED), outcome, charged=charged) if to is ENDING else None)
            for uid, number, to, outcome, charged in moves
        ]
        self._advance(given)

    @precondition(lambda self: any(job.at for job in self.jobs.values()))
    @rule(pick=st.integers(0, 5), arrows=st.integers(1, 6), outcome=st.sampled_from(list(Outcome)))
    def live(self, pick: int, arrows: int, outcome: Outcome) -> None:
        """Bring an active attempt some arrows further."""
        active = [(uid, job, job.at) for uid, job in sorted(self.jobs.items()) if job.at is not None]
        uid, job, at = active[pick % len(active)]
        here = LIFE.index(at) + 1
        end = End(why(Reason.DELETED), outcome)
        self._advance([Move(uid, job.attempt, to, end if to is ENDING else None) for to in LIFE[here : here + arrows]])

    @precondition(lambda self: any(job.at is CLAIMED for job in self.jobs.values()))
    @rule(pick=st.integers(0, 5), end=st.booleans(), skip=st.integers(0, 1))
    def settle(self, pick: int, end: bool, skip: int) -> None:  # noqa: FBT001
        """End the victims of one that waits for them, or all but one, and have it start; or end it instead."""
        claimers = [uid for uid, job in sorted(self.jobs.items()) if job.at is CLAIMED]
        uid = claimers[pick % len(claimers)]
        victims = [(name, job.attempt) for name, job in sorted(self.jobs.items()) if job.claimed_by == uid]
        number = self.jobs[uid].attempt
        if end:
            over = End(why(Reason.DELETED), Outcome.REQUEUE)
            self._advance([Move(uid, number, ENDING, over), Move(uid, number, ENDED)])
        else:
            self._advance([Move(*victim, ENDED) for victim in victims[skip:]] + [Move(uid, number, RESERVED)])

    def _advance(self, moves: list[Move]) -> None:
        done = self.run(self.scene.ledger.advance(self.scene.epoch, moves, now=self.now))
        want = []
        for move in moves:
            job = self.jobs.get(move.uid)
            if job is None or job.at is None or job.attempt != move.attempt:
                continue
            here, there = LIFE.index(job.at), LIFE.index(move.to)
            if there != here + 1 and not (move.to is ENDING and here < there):
                continue
            if move.to is RESERVED and not self.may_start(move.uid):
                continue
            want.append(move)
            job.at, job.end = move.to, move.end or job.end
            job.holds = job.holds or move.to is RESERVED
            if move.to is ENDED:
                self.ended(move.uid, job)
        assert done == want

    def may_start(self, uid: str) -> bool:
        if any(job.claimed_by == uid for job in self.jobs.values()):
            return False
        rows = self.rows(uid, self.jobs[uid].held)
        return all(reserved + n <= room and promised <= room for room, reserved, promised, n in rows)

    def ended(self, uid: str, job: Job) -> None:
        assert job.end is not None
        job.at, job.held, job.holds, job.promised, job.claimed_by = None, {}, False, False, ""
        job.failures += job.end.charged
        again = job.end.outcome is Outcome.REQUEUE
        job.state = WorkloadState.QUEUED if again else WorkloadState.FINISHED
        for victim in self.jobs.values():
            if victim.claimed_by == uid:
                victim.claimed_by = ""

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
        assert {(a.uid, a.number): (a.state, a.holds, a.claimed, a.victims) for a in loaded.attempts} == {
            (uid, job.attempt): (job.at, job.holds, not job.promised, self.victims(uid))
            for uid, job in self.jobs.items()
            if job.at is not None
        }
        for (node, _), (room, reserved, deficit) in self.run(self.scene.room(tables.node_room)).items():
            assert (room, reserved) == (self.nodes.get(node, 0), self.sums(node=node)[0])
            assert deficit == max(0, *(amount - room for amount in self.sums(node=node)))
        for (queue, *_), (room, reserved, deficit) in self.run(self.scene.room(tables.quota_room)).items():
            assert (room, reserved) == (self.quotas.get(queue, 0), self.sums(queue=queue)[0])
            assert deficit == max(0, *(amount - room for amount in self.sums(queue=queue)))

    def victims(self, uid: str) -> tuple[tuple[str, int], ...]:
        return tuple((name, job.attempt) for name, job in sorted(self.jobs.items()) if job.claimed_by == uid)


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
