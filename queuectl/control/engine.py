"""The loop of the leader: take in what changed, move attempts on, plan, reserve, hand out steps.

All writes to the ledger come from here, one after the other, so the world in memory and the ledger never differ
by more than the transaction under way. When the outcome of one is not known, the term ends and the next one
starts from what the ledger says.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable

import structlog

from queuectl.control import metrics
from queuectl.control.effects import Executor
from queuectl.control.report import Reporter
from queuectl.control.world import World
from queuectl.core.cycle import plan
from queuectl.core.lifecycle import next_move
from queuectl.kube.writes import Writer
from queuectl.model.lifecycle import AttemptState, End, Move, Outcome, WorkloadState
from queuectl.model.objects import Pod
from queuectl.model.plan import Admission, Plan
from queuectl.model.reasons import Reason, why
from queuectl.store.ledger import Ledger

PACE_SECONDS = 0.05  # between two rounds at least, so that one transaction takes the moves of many gangs
SWEEP_SECONDS = 1.0  # between two looks at what no event tells of
LOOK_AT_ALL_SECONDS = 30.0  # between two looks at everything

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
        self.executor = Executor(
            world=world, writer=writer, reporter=reporter, done=self.report, created=created, now=now
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
        while True:
            await self._round(self._now())
            self.beat = time.monotonic()
            try:
                async with asyncio.timeout(SWEEP_SECONDS):
                    await self._awake.wait()
            except TimeoutError:
                pass
            # The first event after a pause is taken at once; what follows it closely waits for the next round.
            await asyncio.sleep(self.beat + PACE_SECONDS - time.monotonic())
            self._awake.clear()

    async def _round(self, now: float) -> None:
        if now - self._swept >= SWEEP_SECONDS:
            self._sweep(now)
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
            self._world.touched |= self._world.workloads.keys()
        self._swept = now
        self._world.touched |= self._world.overdue(now)
        for uid in self._world.attempts.keys() - self._reported.keys():  # a step just done is not done again
            self.executor.offer(uid)
        self._update_gauges()

    async def _move_on(self, now: float) -> None:
        world = self._world
        reported, self._reported = self._reported, {}
        touched, world.touched = world.touched, set()
        moves: dict[str, Move] = {}
        leaving: dict[str, End] = {}
        for uid in sorted(touched | reported.keys()):
            view = world.view(uid, now)
            if view is None:
                if world.waits_in_vain(uid):
                    leaving[uid] = End(why(Reason.DELETED), Outcome.DELETED)
                elif uid not in world.jobs:
                    world.forget(uid)
                continue
            # What is observed goes before what a step reports: a gang whose pod is gone is not ungated any more.
            move = next_move(view) or reported.get(uid)
            if move is not None:
                moves[uid] = move
        if moves:
            with metrics.LEDGER_SECONDS.labels("advance").time():
                applied = await self._ledger.advance(self._epoch, list(moves.values()), now=now)
            for move in applied:
                self._take(move, now)
        if leaving:
            await self._ledger.retire(self._epoch, leaving, now=now)
            for uid in leaving:
                world.forget(uid)

    def _take(self, move: Move, now: float) -> None:
        attempt, workload = self._world.attempts[move.uid], self._world.workloads[move.uid]
        if move.to is AttemptState.RUNNING:
            metrics.READY_WAIT.labels(workload.queue).observe(max(0.0, now - attempt.admitted_at))
        if move.end is not None:
            metrics.ENDED.labels(move.end.why.code).inc()
        log.info(
            "attempt moved", job=workload.name, namespace=workload.namespace, uid=move.uid, attempt=move.attempt,
            to=move.to.value, why=str(move.end.why) if move.end else None,
        )  # fmt: skip
        self._world.moved(move, now)
        self._reporter.moved(move)
        self.executor.offer(move.uid)
        self.wake()  # a move may make the next one due

    async def _cycle(self, now: float) -> None:
        world, self._plan_again = self._world, False
        changes = world.take_changes()
        submissions = world.submissions(changes.submissions)
        world.restated |= changes.submissions  # those that the plan leaves out have a status too
        started = time.perf_counter()
        decided = plan(world.snapshot(), now)
        metrics.PLAN_SECONDS.observe(time.perf_counter() - started)
        nodes = {name: world.fleet.room(name) for name in changes.nodes}
        queues = {name: world.queues.get(name) for name in changes.queues}
        with metrics.LEDGER_SECONDS.labels("cycle").time():
            result = await self._ledger.cycle(
                self._epoch,
                plan_id=uuid.uuid4(),
                now=now,
                submissions=submissions,
                nodes={name: room for name, room in nodes.items() if room},
                nodes_gone=[name for name, room in nodes.items() if not room],
                quotas={name: queue.nominal for name, queue in queues.items() if queue},
                queues_gone=[name for name, queue in queues.items() if not queue],
                changed_by={name: queue.changed_by for name, queue in queues.items() if queue},
                admissions=[(admission, world.jobs[admission.uid].generation) for admission in decided.admissions],
            )
        for attempt in result.admitted:
            workload = world.workloads[attempt.uid]
            world.admitted(attempt)
            self._reporter.moved(Move(attempt.uid, attempt.number, AttemptState.RESERVED))
            self.executor.offer(attempt.uid)
            metrics.ADMITTED.labels(workload.queue).inc()
            metrics.ADMISSION_WAIT.labels(workload.queue).observe(max(0.0, now - workload.submitted_at))
        self._take_refusals(decided, set(result.refused))
        self._restate(decided)
        if decided.admissions:
            log.info(
                "cycle", admitted=len(result.admitted), refused=len(result.refused), waiting=len(decided.waits),
                seconds=round(time.perf_counter() - started, 4),
            )  # fmt: skip

    def _take_refusals(self, decided: Plan, refused: set[str]) -> None:
        """Have the ledger told anew what it seems not to know, and plan again."""
        metrics.REFUSED.inc(len(refused))
        again: list[Admission] = [admission for admission in decided.admissions if admission.uid in refused]
        for admission in again:
            self._world.changes.nodes |= {placement.node for placement in admission.placements}
            self._world.changes.queues.add(self._world.workloads[admission.uid].queue)
        pending = any(wait.reason is Reason.PENDING for wait in decided.waits.values())
        if again or pending:
            self._plan_again = True
            self.wake()

    def _restate(self, decided: Plan) -> None:
        before, self._world.plan = self._world.plan, decided
        for uid, wait in decided.waits.items():
            if before.waits.get(uid) != wait or before.positions.get(uid) != decided.positions.get(uid):
                self._world.restated.add(uid)

    def _update_gauges(self) -> None:
        world = self._world
        waiting = Counter(dict.fromkeys(world.queues, 0))
        active = Counter(dict.fromkeys(world.queues, 0))
        for workload in world.workloads.values():
            if workload.state is not WorkloadState.FINISHED:
                (waiting if workload.state is WorkloadState.QUEUED else active)[workload.queue] += 1
        for gauge, counts in ((metrics.PENDING, waiting), (metrics.ACTIVE, active)):
            gauge.clear()
            for name, count in counts.items():
                gauge.labels(name).set(count)
        reasons = Counter(wait.code for wait in world.plan.waits.values())
        metrics.WAIT_REASONS.clear()
        for code, count in reasons.items():
            metrics.WAIT_REASONS.labels(code).set(count)
        metrics.QUOTA.clear()
        metrics.USAGE.clear()
        for queue in world.queues.values():
            for (flavor, resource), nominal in queue.nominal.items():
                metrics.QUOTA.labels(queue.name, flavor, resource).set(nominal)
                metrics.USAGE.labels(queue.name, flavor, resource).set(
                    world.usage.get((queue.name, flavor, resource), 0)
                )
