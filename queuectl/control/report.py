"""What people see: statuses of jobs and queues, and events. Writes are merged, bounded and never decide anything.

Changes of a job's phase go out at once, and of why a running one is as it is. What merely drifts (a shortage's numbers)
is written slowly, so that writes do not grow with the backlog. A position far down the line is told to within a tenth: an
admission that moves everybody up by one costs a few writes.

That a job begins to wait, or waits for another reason, is an event, too, once that has lasted for some seconds: so who
starts at once has none. They go out at a steady rate; those of more than a thousand at a time are left out, for the
statuses say the same.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial

import structlog

from queuectl.control import status
from queuectl.control.world import World
from queuectl.core.limits import stopped
from queuectl.core.tree import broken_queues
from queuectl.kube.client import ApiError, ApiUnreachableError
from queuectl.kube.events import event
from queuectl.kube.names import API_VERSION
from queuectl.kube.writes import Writer
from queuectl.model.lifecycle import UP, AttemptState, Move, WorkloadState
from queuectl.model.objects import Job, MoveRequest, Queue
from queuectl.model.plan import Plan
from queuectl.model.reasons import STUCK, Reason, Why, why

WRITERS = 4
REST_SECONDS = 5.0  # between two of the same gang that has room: pods may be ready and not, over and over
DRIFT_SECONDS = 0.05  # between two writes of drifting statuses
LOOKED_AT = 100  # statuses in that time, whether they still say what is true
QUEUE_SECONDS = 1.0  # between two looks at the queues
EVENTS_KEPT = 1000  # waiting to be sent; older ones are dropped first
WAIT_SECONDS = 5.0  # for which a job has waited for one reason before an event says so
WAITS_KEPT = 1000  # of which that is still to be said
WAIT_EVENT_SECONDS = 0.2  # between two such events
CONFLICT_TRIES = 5
RETRY_SECONDS = 0.5  # before a status that could not be written is tried again

log = structlog.get_logger()


class Reporter:
    """Writes statuses and events of one leader's term."""

    def __init__(
        self,
        world: World,
        writer: Writer,
        identity: str,
        now: Callable[[], float],
        pause: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(DRIFT_SECONDS),
    ) -> None:
        """Prepare; ``run`` starts the writing. ``pause`` comes before each write of what merely drifts."""
        self._world = world
        self._writer = writer
        self._identity = identity
        self._now = now
        self._pause = pause
        self._urgent: dict[str, None] = {}  # insertion order: the oldest first
        self._drifting: dict[str, None] = {}
        self._resting: dict[str, float] = {}  # uid → Unix seconds, since when: the oldest first
        self._review: Iterator[str] = iter(())  # of those that wait, after each plan
        self._reviewed: Plan | None = None
        self._waiting_first = False
        self._wake = asyncio.Event()
        self._waits: dict[str, tuple[str, float]] = {}  # uid → what was told before, Unix seconds: the oldest first
        self._events: deque[Callable[[], Awaitable[None]]] = deque(maxlen=EVENTS_KEPT)
        self._event_wake = asyncio.Event()
        self._busy: set[str] = set()

    def changed(self, uid: str) -> None:
        """Write the job's status soon, at once if its phase is another than written, or why it is in it while it runs."""
        job, workload = self._world.jobs.get(uid), self._world.workloads.get(uid)
        if job is None or workload is None:
            return
        attempt = self._world.attempts.get(uid)
        other = job.status.get("phase") != status.phase(workload, attempt)
        if attempt is not None and attempt.state in UP:
            code = status.reason(workload, attempt, None, ()).code
            other = other or job.status.get("reason") not in {code, Reason.PODS_NOT_READY.code}
        if other:
            self._drifting.pop(uid, None)
            self._urgent.setdefault(uid)
            self._wake.set()
        elif uid not in self._urgent and uid not in self._resting:
            self._drifting.setdefault(uid)

    def event(self, uid: str, cause: Why, *, warning: bool = False) -> None:
        """Record an event on the job."""
        job = self._world.jobs.get(uid)
        if job is None:
            return
        namespace, name = job.gang.namespace, job.gang.name
        about = {"apiVersion": API_VERSION, "kind": "TrainingJob", "namespace": namespace, "name": name, "uid": uid}
        self._tell(namespace, about, cause, warning=warning)

    def node_event(self, node: str, cause: Why, *, warning: bool = False) -> None:
        """Record an event on a node."""
        # As kubelets do, and as kubectl describe looks for it: the uid is the name.
        about = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node}
        self._tell("default", about, cause, warning=warning)

    def _tell(self, namespace: str, about: Mapping[str, str], cause: Why, *, warning: bool) -> None:
        body = event(about, cause.code, str(cause), identity=self._identity, now=self._now(), warning=warning)
        self._events.append(partial(self._writer.create_event, namespace, body))
        self._event_wake.set()

    def refused(self, uid: str, request: MoveRequest, because: Why) -> None:
        """Answer a job's request to move."""
        job = self._world.jobs.get(uid)
        if job is not None:
            self._events.append(partial(self._writer.refuse_move, job, request, str(because)))
            self._event_wake.set()

    def moved(self, move: Move, told: Why | None = None) -> None:
        """Record the event of a move that people care about. ``told``: what there is to say of one that ends it."""
        attempt = self._world.attempts.get(move.uid)
        workload = self._world.workloads.get(move.uid)
        if move.done is not None:
            return  # the status says it; a gang may have thousands of pods that end one by one
        if move.asked is not None:
            self.event(move.uid, move.asked.outcome, warning=move.asked.outcome.reason is not Reason.CHECKPOINTED)
        elif move.shrink is not None:
            self.event(move.uid, move.shrink.why, warning=True)
        elif move.end is not None and told is not None:
            fine = move.end.exit_code == 0 or told.reason is Reason.CHECKPOINTED
            self.event(move.uid, told, warning=not fine)
        elif workload is not None and move.to in {AttemptState.RESERVED, AttemptState.RUNNING}:
            self.event(move.uid, status.reason(workload, attempt, None, ()))

    async def admitted(self, uid: str) -> Job | None:
        """Write Admitted for the generation that was planned for; None when the spec is another by now."""
        for _ in range(CONFLICT_TRIES):
            job, attempt = self._world.jobs.get(uid), self._world.attempts.get(uid)
            if job is None or attempt is None or job.generation != attempt.generation or job.deleting:
                return None
            try:
                await self._write(job)
            except ApiError as error:
                if error.status != 409:  # noqa: PLR2004
                    raise
            else:
                known = self._world.jobs.get(uid)  # with what its claims and its queue mean for it
                return known if known and known.generation == attempt.generation else None
            live = await self._writer.get_job(job)
            if live is None or uid not in self._world.jobs:
                return None
            self._world.keep_job(live)
        raise ApiUnreachableError("the job's status is being written by others all the time")

    async def run(self) -> None:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WRITERS):
                group.create_task(self._write_urgent())
            group.create_task(self._write_drifting())
            group.create_task(self._send_events())
            group.create_task(self._tell_waits())
            group.create_task(self._write_queues())
            group.create_task(self._write_nodes())

    async def _write_urgent(self) -> None:
        while True:
            uid = next((uid for uid in self._urgent if uid not in self._busy), None)
            if uid is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            del self._urgent[uid]
            await self._try_write(uid)

    async def _write_drifting(self) -> None:
        while True:
            await self._pause()
            uid = self._drifted()
            if uid is not None:
                self._drifting.pop(uid, None)
                if uid in self._world.attempts:
                    self._resting.pop(uid, None)
                    self._resting[uid] = self._now()
                await self._try_write(uid)

    def _drifted(self) -> str | None:
        """Return a job whose status is to be written next, though nothing hangs on it.

        Those that were changed and those that wait take turns, so that many of the ones never keep back the others.
        """
        self._waiting_first = not self._waiting_first
        if self._waiting_first:
            return self._outdated() or self._changed()
        return self._changed() or self._outdated()

    def _changed(self) -> str | None:
        """Return one that was changed and whose status does not say so; after a restart most do already."""
        while self._resting:
            rested, since = next(iter(self._resting.items()))
            if 0 <= self._now() - since < REST_SECONDS:
                break
            del self._resting[rested]
            self._drifting.setdefault(rested)
        for _ in range(LOOKED_AT):
            uid = next((uid for uid in self._drifting if uid not in self._busy), None)
            if uid is None or self._is_stale(uid):
                return uid
            del self._drifting[uid]
        return None

    def _outdated(self) -> str | None:
        """Return one that waits and whose status does not say what the plan does."""
        for _ in range(LOOKED_AT):
            uid = next(self._review, None)
            if uid is None:
                if self._reviewed is self._world.plan:
                    return None
                self._reviewed = self._world.plan
                self._review = iter(self._world.waiting.uids())
            elif uid not in self._busy and uid not in self._urgent and self._is_stale(uid):
                return uid
        return None

    async def _try_write(self, uid: str) -> None:
        job = self._world.jobs.get(uid)
        if job is None or uid not in self._world.workloads:
            return
        attempt = self._world.attempts.get(uid)
        if attempt is not None and attempt.state is AttemptState.RESERVED:
            return  # the attempt's first step writes it, with its precondition
        self._busy.add(uid)
        try:
            await self._write(job)
        except ApiError as error:
            if error.status == 409:  # noqa: PLR2004 - the watch will bring the newer version
                await self._again(uid)
            elif error.status != 404:  # noqa: PLR2004
                log.warning("status refused", job=job.gang.name, namespace=job.gang.namespace, error=error.message)
        except ApiUnreachableError:
            await self._again(uid)
        finally:
            self._busy.discard(uid)
            self._wake.set()

    async def _again(self, uid: str) -> None:
        """Write it soon, with the urgency that it has then: a new phase must not wait behind all that drifts."""
        await asyncio.sleep(RETRY_SECONDS)
        self.changed(uid)

    async def _write(self, job: Job) -> None:
        wanted = self._wanted(job)
        if status.says(job.status, wanted):
            return
        written = await self._writer.patch_job_status(job, wanted)
        if job.gang.uid in self._world.jobs:
            self._world.keep_job(written)
        before = str(job.status.get("reason", ""))
        if wanted["phase"] == "Pending" and wanted["reason"] != before and len(self._waits) < WAITS_KEPT:
            self._waits.setdefault(job.gang.uid, (before, self._now()))

    def _is_stale(self, uid: str) -> bool:
        """Tell whether a job's status does not say what is true."""
        job = self._world.jobs.get(uid)
        return job is not None and uid in self._world.workloads and not status.says(job.status, self._wanted(job))

    def _wanted(self, job: Job) -> status.Status:
        uid = job.gang.uid
        workload, attempt = self._world.workloads[uid], self._world.attempts.get(uid)
        plan = self._world.plan
        return status.desired(
            job,
            workload,
            attempt,
            pods=self._world.pods.get((uid, workload.attempt), {}),
            wait=self._wait(uid),
            leaving=self._world.gangs.leaving(attempt) if attempt else (),
            answers=self._world.answers(attempt) if attempt else 0,
            position=plan.positions.get(uid),
            now=self._now(),
            silent=self._world.nodes.silent(attempt) if attempt else {},
        )

    async def _send_events(self) -> None:
        while True:
            await self._event_wake.wait()
            self._event_wake.clear()
            while self._events:
                send = self._events.popleft()
                try:
                    await send()
                except (ApiError, ApiUnreachableError) as error:
                    log.warning("event lost", error=str(error))

    async def _tell_waits(self) -> None:
        while True:
            await asyncio.sleep(WAIT_EVENT_SECONDS)
            self._tell_wait()

    def _tell_wait(self) -> None:
        """Record one event on a job that waits for a reason that was not told before, once its status says so."""
        while self._waits:
            uid, (before, since) = next(iter(self._waits.items()))
            if 0 <= self._now() - since < WAIT_SECONDS:
                return
            del self._waits[uid]
            wait, job = self._wait(uid), self._world.jobs.get(uid)
            if wait is None or job is None or wait.code != job.status.get("reason"):
                continue  # it is noted when its status says so
            if wait.code not in {before, Reason.PENDING.code}:
                self.event(uid, wait, warning=wait.reason in STUCK)
                return

    def _wait(self, uid: str) -> Why | None:
        """Return why a job waits, as the plan has it."""
        workload = self._world.workloads.get(uid)
        if workload is None or workload.state is not WorkloadState.QUEUED:
            return None
        return self._world.gangs.problem(uid) or self._world.plan.waits.get(uid)

    async def _write_queues(self) -> None:
        while True:
            await asyncio.sleep(QUEUE_SECONDS)
            for queue, wanted in self._queue_statuses():
                if queue.status == wanted:
                    continue
                try:
                    await self._writer.patch_queue_status(queue, wanted)
                except (ApiError, ApiUnreachableError) as error:
                    log.warning("queue status not written", queue=queue.name, error=str(error))

    async def _write_nodes(self) -> None:
        """Keep on nodes why they are suspect, as a condition of theirs."""
        while True:
            await asyncio.sleep(QUEUE_SECONDS)
            for node, cause in self._world.suspects.untold().items():
                try:
                    await self._writer.tell_suspect(node, cause)
                except (ApiError, ApiUnreachableError) as error:
                    log.warning("node condition not written", node=node, error=str(error))

    def _queue_statuses(self) -> Iterator[tuple[Queue, status.Status]]:
        standing = self._world.standing
        broken = broken_queues(self._world.queues)
        for name, queue in list(self._world.queues.items()):
            yield (
                queue,
                status.of_queue(
                    queue,
                    pending=standing[WorkloadState.QUEUED][name],
                    running=standing[WorkloadState.ACTIVE][name],
                    node=self._world.holdings.now.nodes.get(name),
                    problem=self._problem(queue, broken.get(name, "")),
                    blocked=self._world.plan.blocked.get(name),
                    now=self._now(),
                ),
            )

    def _problem(self, queue: Queue, broken: str) -> Why | None:
        problem = broken or self._missing_flavors(queue)
        if problem:
            return why(Reason.MISCONFIGURED, field=f"queue {queue.name}", problem=problem)
        return stopped(self._world.queues, queue.name)

    def _missing_flavors(self, queue: Queue) -> str:
        missing = sorted({flavor for flavor, _ in queue.quotas} - self._world.flavors.keys())
        return (
            f"ResourceFlavor {', '.join(missing)} does not exist; create it or correct spec.quotas" if missing else ""
        )
