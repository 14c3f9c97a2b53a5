"""Any order of observations, cycles and moves: the ledger agrees with a few lines of Python and with itself."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from queuectl.model.checkpoint import Ask
from queuectl.model.lifecycle import LEAVING, UNDER_WAY, AttemptState, Done, End, Move, Outcome, Shrink, WorkloadState
from queuectl.model.plan import Admission, Eviction, Placement, Portion, Preempt, Repair
from queuectl.model.policy import Cause, Quota
from queuectl.model.reasons import Reason, why
from queuectl.store import tables
from queuectl.store.engine import Fenced, open_engine
from tests.store.scene import GPU, REQUEUE, Scene, workload

UIDS = [f"w{i}" for i in range(6)]
NODES = ["n1", "n2", "n3"]
QUEUES = ["q1", "q2"]
TOP = "top"  # the queue above them
CLAIMED, RESERVED, CREATED, UNGATED, RUNNING, SHRINKING, REPAIRING, GROWING, CHECKPOINTING, ENDING, ENDED = AttemptState
LIFE = [CLAIMED, RESERVED, CREATED, UNGATED, RUNNING, ENDING, ENDED]
PLACES = st.dictionaries(st.sampled_from(NODES), st.integers(1, 6), min_size=1)
SHRUNK = why(
    Reason.SHRUNK, gone=1, before=2, after=1, job="ns/p", queue="q1", priority=1, cause="it has the higher claim"
)
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
    leaving: dict[str, int] = field(default_factory=dict)  # given up, and held beside that
    lost: dict[str, int] = field(default_factory=dict)  # likewise, but of no queue, for others are charged instead
    holds: bool = False
    promised: bool = False
    claimed_by: str = ""
    done: set[tuple[str, int]] = field(default_factory=set)

    def leave(self, part: dict[str, int]) -> None:
        """Give up a part, or (with an empty one) all."""
        left = {node: n - part.get(node, 0) for node, n in self.held.items()}
        self.held = {node: n for node, n in left.items() if n}
        self.leaving, self.promised = part, bool(part)

    def finish(self, done: Done) -> None:
        """Give back what pods held that are done."""
        left = Counter(self.held)
        left.subtract({place.node: place.pods for place in done.part.placements})
        self.held, self.done = dict(+left), self.done | done.pods

    def go_for(self, uid: str) -> None:
        self.claimed_by = uid if self.holds else ""
        if self.leaving:
            self.at = SHRINKING
        elif self.at not in LEAVING:
            self.at, self.end = self.told.first, self.told

    @property
    def told(self) -> End:
        """How it goes for another: who runs is asked to save its work first."""
        return replace(REQUEUE, ask=Ask(900.0, 960.0, 1)) if self.at is RUNNING else REQUEUE


def _next(at: AttemptState) -> int:
    """Return the place in its life that follows upon a state."""
    beside = {SHRINKING: RUNNING, REPAIRING: RUNNING, GROWING: RUNNING, CHECKPOINTING: ENDING}
    return LIFE.index(beside[at]) if at in beside else LIFE.index(at) + 1


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
        jobs = [job for job in self.jobs.values() if node or queue in {job.queue, TOP}]

        def amount(of: dict[str, int]) -> int:
            return of.get(node, 0) if node else sum(of.values())

        return (
            sum(
                amount(job.held) + amount(job.leaving) + (amount(job.lost) if node else 0) for job in jobs if job.holds
            ),
            sum(amount(job.held) for job in jobs if job.promised),
        )

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
        job.done = set()
        job.holds, job.promised = at is RESERVED, True

    def may_be_taken(self, victim: str, part: dict[str, int], overtaken: set[str]) -> bool:
        job = self.jobs.get(victim)
        if victim in overtaken and not part:
            return True
        if job is None or not job.holds or job.claimed_by not in {"", *overtaken} or job.leaving or job.lost:
            return False
        return not part or (job.at is RUNNING and all(n <= job.held.get(node, 0) for node, n in part.items()))

    def claim(self, uid: str, wanted: dict[str, int], victims: list[str], parts: dict[str, dict[str, int]]) -> bool:
        if not self.waits(uid) or len(set(victims)) < len(victims):
            return False
        overtaken = {victim for victim in victims if victim in self.jobs and self.jobs[victim].at is CLAIMED}
        if not all(self.may_be_taken(victim, parts.get(victim, {}), overtaken) for victim in victims):
            return False
        taken = [self.jobs[victim] for victim in victims]
        before = [(job.promised, job.held, job.leaving) for job in taken]
        for victim, job in zip(victims, taken, strict=True):
            job.leave(parts.get(victim, {}))
        if not all(promised + n <= room for room, _, promised, n in self.rows(uid, wanted)):
            for job, was in zip(taken, before, strict=True):
                job.promised, job.held, job.leaving = was
            return False
        for job in self.jobs.values():
            if job.claimed_by in overtaken:
                job.claimed_by = ""
        for job in taken:
            job.go_for(uid)
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
        parts: Mapping[str, dict[str, int]] = MappingProxyType({}),
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
                        {v: Shrink(SHRUNK, _part(parts[v])) if v in parts else self.told(v) for v in victims},
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
            (claimed if self.claim(uid, places, victims, dict(parts)) else refused).append(uid)
        for uid, places in wanted:
            if self.waits(uid) and all(max(now, later) + n <= room for room, now, later, n in self.rows(uid, places)):
                self.admit(uid, places, RESERVED)
                admitted.append(uid)
            else:
                refused.append(uid)
        assert ([a.uid for a in result.admitted], [a.uid for a in result.claimed]) == (admitted, claimed)
        assert result.refused == refused

    def told(self, uid: str) -> End:
        return self.jobs[uid].told if uid in self.jobs else REQUEUE

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
        self._take(uid, queue, places, idle, {victim: {} for victim in victims})

    @precondition(lambda self: any(job.at is RUNNING for job in self.jobs.values()))
    @rule(
        uid=st.sampled_from(UIDS),
        queue=st.sampled_from(QUEUES),
        picks=st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 5)), min_size=1, max_size=2),
        less=st.integers(-1, 2),
        idle=st.none() | st.integers(0, 6),
    )
    def shrink(self, uid: str, queue: str, picks: list[tuple[int, int]], less: int, idle: int | None) -> None:
        """Take a part of some that run, so that a little of each is left, or more than they have, or all."""
        running = [name for name, job in sorted(self.jobs.items()) if job.at is RUNNING]
        parts: dict[str, dict[str, int]] = {}
        for pick, stays in picks:
            victim = running[pick % len(running)]
            held = sorted(self.jobs[victim].held.items())
            part = dict(held[-1:]) if len(held) > 1 else {}
            part[held[0][0]] = held[0][1] - stays
            parts[victim] = {node: n for node, n in part.items() if n > 0}
        parts = {victim: part if part != self.jobs[victim].held else {} for victim, part in parts.items()}
        places = {node: max(1, n - less) for part in parts.values() for node, n in part.items()}
        if places:
            self._take(uid, queue, places, idle, parts)

    def _take(
        self,
        uid: str,
        queue: str,
        places: dict[str, int],
        idle: int | None,
        parts: dict[str, dict[str, int]],
    ) -> None:
        self._cycle(
            submitted={uid: queue},
            nodes={} if idle is None else {node: max(self.sums(node=node)) + idle for node in places},
            gone=set(),
            quotas=dict.fromkeys(QUEUES, 30),
            queues_gone=set(),
            wanted=[],
            claims=[(uid, places, sorted(parts))],
            top=60,
            parts={victim: part for victim, part in parts.items() if part},
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
                st.sampled_from(AttemptState),
                st.sampled_from(list(Outcome)),
                st.booleans(),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def advance(self, moves: list[tuple[str, int, AttemptState, Outcome, bool]]) -> None:
        given = [
            Move(uid, number, to, End(why(Reason.DELETED), outcome, charged=charged) if to in LEAVING else None)
            for uid, number, to, outcome, charged in moves
        ]
        self._advance(given)

    @precondition(lambda self: any(job.at for job in self.jobs.values()))
    @rule(pick=st.integers(0, 5), arrows=st.integers(1, 6), outcome=st.sampled_from(list(Outcome)))
    def live(self, pick: int, arrows: int, outcome: Outcome) -> None:
        """Bring an active attempt some arrows further."""
        active = [(uid, job, job.at) for uid, job in sorted(self.jobs.items()) if job.at is not None]
        uid, job, at = active[pick % len(active)]
        ahead = [*([GROWING] if at is REPAIRING else []), *LIFE[_next(at) :]]
        end = End(why(Reason.DELETED), outcome)
        self._advance([Move(uid, job.attempt, to, end if to is ENDING else None) for to in ahead[:arrows]])

    @precondition(lambda self: any(job.at in UNDER_WAY for job in self.jobs.values()))
    @rule(
        some=st.lists(
            st.tuples(
                st.integers(0, 5),
                st.dictionaries(st.sampled_from(NODES), st.integers(1, 4), min_size=1, max_size=2),
                st.integers(0, 9),
                st.sampled_from([0, 0, 0, 1]),
                st.sampled_from([None, None, None, RUNNING, ENDED]),
            ),
            min_size=1,
            max_size=3,
        ),
        more=st.sampled_from([(), (), (RUNNING,), (ENDING, ENDED)]),
    )
    def finish(self, some: list[Any], more: tuple[AttemptState, ...]) -> None:
        """Have pods of some gangs be done, now and then more than they hold, others than these, or all; and go on."""
        under_way = [(uid, job, job.at) for uid, job in sorted(self.jobs.items()) if job.at in UNDER_WAY]
        moves = []
        for pick, places, index, others, to in some:
            uid, job, at = under_way[pick % len(under_way)]
            here = {node: gpus for node, gpus in places.items() if gpus <= job.held.get(node, 0)} or places
            keys = frozenset(("r", index + n) for n in range(sum(here.values()) + others))
            assert at is not None
            moves.append(Move(uid, job.attempt, to or at, done=Done(keys, _part(here))))
        uid, job, at = under_way[some[0][0] % len(under_way)]
        end = End(why(Reason.DELETED), Outcome.REQUEUE)
        self._advance([*moves, *(Move(uid, job.attempt, to, end if to is ENDING else None) for to in more)])

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
            gone = [
                Move(name, attempt, RUNNING if self.jobs[name].at is SHRINKING else ENDED)
                for name, attempt in victims[skip:]
            ]
            self._advance([*gone, Move(uid, number, RESERVED)])

    @precondition(lambda self: any(job.at is RUNNING for job in self.jobs.values()))
    @rule(pick=st.integers(0, 5), stays=st.integers(-1, 5), asks=st.booleans())
    def give_up(self, pick: int, stays: int, asks: bool) -> None:  # noqa: FBT001
        """Have one that runs give up a part, which may be more than it has, for nobody; perhaps its pods save before."""
        running = [name for name, job in sorted(self.jobs.items()) if job.at is RUNNING]
        uid = running[pick % len(running)]
        job = self.jobs[uid]
        part = {node: n - stays for node, n in sorted(job.held.items())[:1] if n > stays}
        if part and part != job.held:
            ask = Ask(self.now, self.now + 60, 2) if asks else None
            move = Move(uid, job.attempt, SHRINKING, shrink=Shrink(SHRUNK, _part(part), ask))
            before = (job.at, job.promised, job.held, job.leaving)
            if all(n <= job.held[node] for node, n in part.items()):
                job.leave(part)
                job.at = SHRINKING
            done = self.run(self.scene.ledger.advance(self.scene.epoch, [move], now=self.now))
            assert bool(done) == ((job.at, job.promised, job.held, job.leaving) != before)
            saved = Move(uid, job.attempt, SHRINKING, asked=Ask(self.now, self.now + 5, 2, 2))
            for once in (True, False):
                told = self.run(self.scene.ledger.advance(self.scene.epoch, [saved], now=self.now))
                assert bool(told) == (bool(done) and asks and once)

    @precondition(lambda self: any(job.at is RUNNING for job in self.jobs.values()))
    @rule(pick=st.integers(0, 5), to=st.sampled_from(NODES), less=st.integers(-1, 1), arrows=st.integers(0, 3))
    def repair(self, pick: int, to: str, less: int, arrows: int) -> None:
        """Have one that runs lose a node, get another one, and perhaps start there; now and then there is no room."""
        running = [name for name, job in sorted(self.jobs.items()) if job.at is RUNNING]
        uid = running[pick % len(running)]
        job = self.jobs[uid]
        node, gpus = min(job.held.items())
        if to in job.held:
            return
        left, found = {node: gpus}, {to: gpus}
        room = max(0, max(self.sums(node=to)) + gpus - max(0, less))
        keys = frozenset(("r", index) for index in range(gpus))
        given = Repair(keys, _part(left).placements, _part(found).placements, why(Reason.RUNNING, pods=1))
        result = self.run(self.scene.cycle(nodes={to: {GPU: room}}, repairs={(uid, job.attempt): given}))
        self.nodes[to] = room
        assert (result.repaired, result.refused) == (([uid], []) if less <= 0 else ([], [uid]))
        if less > 0:
            return
        job.held = {name: n for name, n in job.held.items() if name != node} | found
        job.lost, job.at = left, REPAIRING
        self._advance([Move(uid, job.attempt, at) for at in (GROWING, RUNNING, GROWING)[:arrows]])

    def _advance(self, moves: list[Move]) -> None:
        done = self.run(self.scene.ledger.advance(self.scene.epoch, moves, now=self.now))
        want = []
        for move in moves:
            job = self.jobs.get(move.uid)
            if job is None or job.at is None or job.attempt != move.attempt:
                continue
            if move.done is not None:
                if job.at in UNDER_WAY and move.to is job.at and self.may_finish(job, move.done):
                    job.finish(move.done)
                    want.append(move)
                continue
            if move.to not in self.ahead(job.at):
                continue
            if move.to is RESERVED and not self.may_start(move.uid):
                continue
            want.append(move)
            if job.at is SHRINKING and move.to is RUNNING:
                job.leaving, job.claimed_by = {}, ""
            if job.at is REPAIRING and move.to is GROWING:
                job.lost = {}
            job.at, job.end = move.to, move.end or job.end
            job.holds = job.holds or move.to is RESERVED
            if move.to is ENDED:
                self.ended(move.uid, job)
        assert done == want

    def may_finish(self, job: Job, done: Done) -> bool:
        pods = {place.node: place.pods for place in done.part.placements}
        ours = not job.done & done.pods and all(n <= job.held.get(node, 0) for node, n in pods.items())
        return ours and len(done.pods) == sum(pods.values()) < sum(job.held.values())

    def ahead(self, at: AttemptState) -> set[AttemptState]:
        if at in {SHRINKING, REPAIRING, GROWING, CHECKPOINTING}:
            return {GROWING if at is REPAIRING else LIFE[_next(at)], ENDING}
        here = LIFE.index(at)
        if at is RUNNING:
            return {CHECKPOINTING, ENDING}
        return set(LIFE[here + 1 : here + 2]) | ({ENDING} if here < LIFE.index(ENDING) else set())

    def may_start(self, uid: str) -> bool:
        if any(job.claimed_by == uid for job in self.jobs.values()):
            return False
        rows = self.rows(uid, self.jobs[uid].held)
        return all(reserved + n <= room and promised <= room for room, reserved, promised, n in rows)

    def ended(self, uid: str, job: Job) -> None:
        assert job.end is not None
        job.at, job.held, job.leaving, job.holds, job.promised, job.claimed_by = None, {}, {}, False, False, ""
        job.lost = {}
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
        for a in loaded.attempts:
            job = self.jobs[a.uid]
            assert a.whole == _part(job.held)
            assert a.done == job.done
            lost = Portion(_part(job.lost).placements)
            assert (a.leaving or Portion(())) == (_part(job.leaving) if job.leaving else lost)
        for (node, _), (room, reserved, deficit) in self.run(self.scene.room(tables.node_room)).items():
            assert (room, reserved) == (self.nodes.get(node, 0), self.sums(node=node)[0])
            assert deficit == max(0, *(amount - room for amount in self.sums(node=node)))
        for (queue, *_), (room, reserved, deficit) in self.run(self.scene.room(tables.quota_room)).items():
            assert (room, reserved) == (self.quotas.get(queue, 0), self.sums(queue=queue)[0])
            assert deficit == max(0, *(amount - room for amount in self.sums(queue=queue)))

    def victims(self, uid: str) -> tuple[tuple[str, int], ...]:
        return tuple((name, job.attempt) for name, job in sorted(self.jobs.items()) if job.claimed_by == uid)


def _admission(uid: str, places: dict[str, int]) -> Admission:
    part = _part(places)
    return Admission(uid, part.placements, part.quota)


def _part(places: dict[str, int]) -> Portion:
    """A pod with one GPU for each GPU on each node."""
    placements = tuple(Placement("r", "f", node, gpus, ((GPU, 1),)) for node, gpus in sorted(places.items()))
    return Portion(placements, {("f", GPU): sum(places.values())})


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
