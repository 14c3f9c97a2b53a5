"""The loop of the leader: take in what changed, move attempts on, plan, reserve, hand out steps.

All writes to the ledger come from here, one after the other, so the world in memory and the ledger never differ
by more than the transaction under way. When the outcome of one is not known, the term ends and the next one
starts from what the ledger says.
"""

import asyncio
import gc
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import structlog

from queuectl.control import metrics, status, turn
from queuectl.control.asker import Asker
from queuectl.control.effects import Executor
from queuectl.control.report import Reporter
from queuectl.control.world import World
from queuectl.core.backlog import Waits
from queuectl.core.checkpoint import last_words
from queuectl.kube.writes import Writer
from queuectl.model.lifecycle import LEAVING, Attempt, AttemptState, Leave, Move, Shrink, WorkloadState
from queuectl.model.objects import MoveRequest, Pod
from queuectl.model.plan import Preempt
from queuectl.model.reasons import Reason, Why
from queuectl.store.ledger import Ledger

PACE_SECONDS = 0.05  # between two rounds at least, so that one transaction takes the moves of many gangs
SWEEP_SECONDS = 1.0  # between two looks at what no event tells of
LOOK_AT_ALL_SECONDS = 30.0  # between two looks at everything
MAX_NODES_TOLD = 100  # in metrics, of suspect ones

log = structlog.get_logger()


class Engine:
    """One leader's loop, for one term."""

    def __init__(
        self,
        *,
        world: World,
        ledger: Ledger,
        epoch: int,
        writer: Writer,
        reporter: Reporter,
        created: Callable[[Pod], None],
        now: Callable[[], float],
    ) -> None:
        """Prepare; ``run`` starts the loop."""
        self.asker = Asker(world=world, writer=writer, reporter=reporter, heard=self.wake, now=now)
        self.executor = Executor(
            world=world, writer=writer, reporter=reporter, asker=self.asker, done=self.report, created=created, now=now
        )
        self._world = world
        self._ledger = ledger
        self._epoch = epoch
        self._reporter = reporter
        self._now = now
        self._reported: dict[str, Move] = {}
        self._awake = asyncio.Event()
        self._plan_again = True
        self._swept = 0.0
        self._looked_at_all = 0.0
        self.beat = time.monotonic()  # of the last round, for /healthz

    def wake(self) -> None:
        """Look again soon."""
        self._awake.set()

    def report(self, move: Move) -> None:
        """Take the executor's word that a step has come to its end."""
        self._reported[move.uid] = move
        self.wake()

    async def run(self) -> None:
        """Go on until cancelled. Raises Fenced or StoreUnavailable, which end the term."""
        for uid in self._world.attempts:
            self.executor.offer(uid)
        await self._round(self._now())
        # What is there now stays: to look through all of it for garbage would halt decisions again and again.
        gc.freeze()
        gc.enable()
        while True:
            began = time.monotonic()
            await self._round(self._now())
            self.beat = time.monotonic()
            try:
                async with asyncio.timeout(SWEEP_SECONDS):
                    await self._awake.wait()
            except TimeoutError:
                pass
            # The first event after a pause is taken at once; what follows it closely waits for the next round, the
            # longer the longer rounds take, so that under load fewer transactions take more moves each.
            pause = max(PACE_SECONDS, self.beat - began)
            await asyncio.sleep(self.beat + pause - time.monotonic())
            self._awake.clear()

    async def _round(self, now: float) -> None:
        if now - self._swept >= SWEEP_SECONDS:
            self._sweep(now)
        await self._save(now)
        await self._move_on(now)
        wake_at = self._world.plan.wake_at
        if self._world.changes or self._plan_again or (wake_at is not None and wake_at <= now):
            await self._cycle(now)
        restated, self._world.restated = self._world.restated, set()
        for uid in restated:
            self._reporter.changed(uid)

    def _sweep(self, now: float) -> None:
        """Look at what no event tells of: time limits, and steps that could not be carried out."""
        if now - self._looked_at_all >= LOOK_AT_ALL_SECONDS:
            self._looked_at_all = now
            self._update_history(now)
            self._world.touched |= self._world.workloads.keys()
        self._swept = now
        for node, problem in sorted(self._world.nodes.judge_faults(now).items()):
            log.warning("node at fault" if problem else "node at fault no more", node=node, problem=problem or None)
        self._world.touched |= self._world.overdue(now)
        for uid in self._world.attempts.keys() - self._reported.keys():  # a step just done is not done again
            self.executor.offer(uid)
        self.asker.sweep(now)
        self._update_gauges()

    async def _save(self, now: float) -> None:
        """Take in the checkpoints that pods have reported, and what GPUs have."""
        await self._ledger.keep_readings(self._epoch, self._world.faults.take_unsaved())
        saves = self._world.saves.take(now)
        await self._ledger.save(self._epoch, saves)
        for uid, checkpoint in saves.items():
            self._world.saved(uid, checkpoint)
        for uid, cause in self._world.saves.take_unreadable().items():
            self._reporter.event(uid, cause, warning=True)

    async def _move_on(self, now: float) -> None:
        reported, self._reported = self._reported, {}
        moves, leaving = turn.due(self._world, reported, now)
        await self._suspect(now)
        await self._make(moves, now)
        if leaving:
            await self._ledger.retire(self._epoch, leaving, now=now)
            for uid in leaving:
                self._world.forget(uid)

    async def _suspect(self, now: float) -> None:
        """Take in what nodes have done, before the moves are made that come of it, and tell who is suspect."""
        suspects = self._world.suspects
        offences, forgiven = suspects.take()
        await self._ledger.offend(self._epoch, offences, forgiven)
        suspects.keep(offences)
        for one in offences:
            metrics.OFFENCES.labels(one.why.code).inc()
        if not suspects.due(now):
            return
        for news in self._world.nodes.judge_suspects(now):
            trusted = news.why.reason is Reason.NODE_TRUSTED
            log.info("node trusted" if trusted else "node suspect", node=news.node, why=str(news.why))
            self._reporter.node_event(news.node, news.why, warning=not trusted)

    async def _make(self, moves: Sequence[Move], now: float) -> None:
        if not moves:
            return
        with metrics.LEDGER_SECONDS.labels("advance").time():
            applied = await self._ledger.advance(self._epoch, moves, now=now)
        for move in applied:
            self._take(move, now)

    def _take(self, move: Move, now: float) -> None:
        attempt, workload = self._world.attempts[move.uid], self._world.workloads[move.uid]
        if move.to is AttemptState.RUNNING and attempt.running_at is None:
            metrics.READY_WAIT.labels(workload.queue).observe(max(0.0, now - attempt.admitted_at))
        told = move.end.told(attempt.end) if move.end else None
        if move.end is not None and told is move.end.why:
            metrics.ENDED.labels(told.code).inc()
        cause = told or (move.shrink.why if move.shrink else move.asked.outcome if move.asked else None)
        log.info(
            "attempt moved", job=workload.name, namespace=workload.namespace, uid=move.uid, attempt=move.attempt,
            to=move.to.value, why=str(cause) if cause else None, done=len(move.done.pods) if move.done else None,
        )  # fmt: skip
        if move.interruption is not None:
            metrics.LOST.labels(move.interruption.cause).inc(move.interruption.lost.gpu_seconds)
        job, came = self._world.jobs.get(move.uid), None
        if move.to in {AttemptState.RUNNING, AttemptState.ENDED} and job is not None:
            came = last_words(attempt, job, self._world.saves.of(attempt.key), now)
        self._world.moved(move, now)
        self._reporter.moved(move, told)
        if came is not None:
            self._reporter.event(move.uid, came, warning=came.reason is not Reason.CHECKPOINTED)
        self.executor.offer(move.uid)
        self.wake()  # a move may make the next one due

    async def _cycle(self, now: float) -> None:
        world, self._plan_again = self._world, False
        started = time.perf_counter()
        cycle = turn.prepare(world, now)
        decided = turn.decide(world, cycle, now)
        metrics.PLAN_SECONDS.observe(time.perf_counter() - started)
        await self._make(decided.evictions, now)
        with metrics.LEDGER_SECONDS.labels("cycle").time():
            result = await self._ledger.cycle(
                self._epoch,
                plan_id=uuid.uuid4(),
                now=now,
                submissions=cycle.submissions,
                nodes=decided.nodes,
                nodes_gone=cycle.nodes_gone,
                quotas=cycle.quotas,
                queues_gone=cycle.queues_gone,
                changed_by=cycle.changed_by,
                change_why=cycle.change_why,
                limits=cycle.limits,
                ancestors=decided.ancestors,
                admissions=decided.admissions,
                preemptions=decided.preemptions,
                growths=decided.growths,
                repairs=decided.repairs,
            )
        for attempt in result.admitted:
            workload = world.workloads[attempt.uid]
            world.admitted(attempt)
            self._reporter.moved(Move(attempt.uid, attempt.number, AttemptState.RESERVED))
            self.executor.offer(attempt.uid)
            metrics.ADMITTED.labels(workload.queue).inc()
            metrics.ADMISSION_WAIT.labels(workload.queue).observe(max(0.0, now - workload.submitted_at))
        for attempt, preempt, leaves in turn.claims(decided, result.claimed):
            self._take_claim(attempt, preempt, leaves, now)
        for uid in result.grown:
            world.grows(uid, decided.plan.growths[uid], now)
            self._reporter.event(uid, status.reason(world.workloads[uid], world.attempts[uid], None, ()))
            self.executor.offer(uid)
        self._refuse(decided.plan.refusals)
        for uid in result.repaired:
            world.repairs(uid, decided.plan.repairs[uid], now)
            self._reporter.event(uid, decided.plan.repairs[uid].why, warning=True)
            self.executor.offer(uid)
        world.irreparable(decided.plan.irreparable)
        if decided.plan.irreparable:
            self.wake()
        metrics.REFUSED.inc(len(result.refused))
        if turn.plan_again(world, decided.plan, result.refused):
            self._plan_again = True
            self.wake()
        world.plan = decided.plan
        if decided.admissions:
            log.info(
                "cycle", admitted=len(result.admitted), refused=len(result.refused), waiting=len(decided.plan.waits),
                seconds=round(time.perf_counter() - started, 4),
            )  # fmt: skip

    def _refuse(self, refusals: Mapping[MoveRequest, Why]) -> None:
        """Answer those who have asked for moves that are not made."""
        for request, cause in refusals.items():
            bearers = self._world.moves.refuse(request)
            for uid in [request.uid] if request.uid in self._world.jobs else bearers:
                self._reporter.event(uid, cause, warning=True)
            for uid in bearers:
                self._reporter.refused(uid, request, cause)

    def _take_claim(self, attempt: Attempt, preempt: Preempt, leaves: Mapping[str, Leave], now: float) -> None:
        """Take in that the ledger has promised a preemptor its room, and have its victims go."""
        for victim, leave in leaves.items():
            if isinstance(leave, Shrink):
                self._reporter.event(victim, leave.why, warning=True)
                self._world.shrinks(victim, leave)
            else:
                if self._world.attempts[victim].state not in LEAVING:
                    self._reporter.event(victim, leave.why, warning=True)
                    metrics.ENDED.labels(leave.why.code).inc()
                self._world.evicted(victim, leave, now)
            self.executor.offer(victim)
        self._world.admitted(attempt)
        self._reporter.event(attempt.uid, preempt.why)

    def _update_history(self, now: float) -> None:
        metrics.HISTORY.clear()
        for queue, averages in self._world.history.past(now).items():
            for (flavor, resource), average in averages.items():
                metrics.HISTORY.labels(queue, flavor, resource).set(float(average))

    def _update_gauges(self) -> None:
        world = self._world
        for gauge, state in ((metrics.PENDING, WorkloadState.QUEUED), (metrics.ACTIVE, WorkloadState.ACTIVE)):
            gauge.clear()
            counts = +world.standing[state]
            for name in world.queues.keys() | counts.keys():
                gauge.labels(name).set(counts[name])
        metrics.FAULTY_NODES.set(world.faults.count)
        waits = world.plan.waits
        reasons = waits.codes() if isinstance(waits, Waits) else Counter[str]()  # no plan has been made yet
        metrics.SUSPECT.set(len(world.suspects.now))
        metrics.AVOIDED.set(len(world.suspects.avoided))
        metrics.SUSPECT_TIMES.clear()
        for one in world.suspects.worst(MAX_NODES_TOLD):
            metrics.SUSPECT_TIMES.labels(one.node).set(one.times)
        metrics.WAIT_REASONS.clear()
        for code, count in reasons.items():
            metrics.WAIT_REASONS.labels(code).set(count)
        metrics.QUOTA.clear()
        metrics.USAGE.clear()
        for queue in world.queues.values():
            for (flavor, resource), nominal in queue.nominal.items():
                metrics.QUOTA.labels(queue.name, flavor, resource).set(nominal)
                metrics.USAGE.labels(queue.name, flavor, resource).set(
                    world.holdings.used(queue.name, (flavor, resource))
                )
