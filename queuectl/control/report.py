"""What people see: statuses of jobs and queues, and events. Writes are merged, bounded and never decide anything.

Changes of a job's phase go out at once. What else changes while a job waits is written at a bounded rate, whatever the
backlog: first whose reason is another one, then what merely drifts (a shortage's numbers), oldest first. A position
far down the line is told to within a tenth, so an admission that moves everybody up by one costs a few writes.
"""

import asyncio
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from itertools import islice

import structlog

from queuectl.control import status
from queuectl.control.world import World
from queuectl.core.limits import stopped
from queuectl.core.tree import broken_queues
from queuectl.kube.client import ApiError, ApiUnreachableError
from queuectl.kube.names import API_VERSION
from queuectl.kube.writes import Writer
from queuectl.model.lifecycle import AttemptState, Move, Workload, WorkloadState
from queuectl.model.objects import Job, Queue
from queuectl.model.reasons import Reason, Why, why

WRITERS = 4
DRIFT_SECONDS = 0.05  # between two writes of statuses that are not urgent
DRIFT_LOOKS = 100  # at statuses that turn out to be right, before the next pause
QUEUE_SECONDS = 1.0  # between two looks at the queues
EVENTS_KEPT = 1000  # waiting to be sent; older ones are dropped first
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
        pause: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(DRIFT_SECONDS),
    ) -> None:
        """Prepare; ``run`` starts the writing. ``pause`` comes before each write that is not urgent."""
        self._world = world
        self._writer = writer
        self._identity = identity
        self._now = now
        self._urgent: dict[str, None] = {}  # insertion order: the oldest first
        self._turned: dict[str, None] = {}  # waits for another reason than the one written
        self._drifting: dict[str, None] = {}
        self._pause = pause
        self._wake = asyncio.Event()
        self._events: deque[dict[str, object]] = deque(maxlen=EVENTS_KEPT)
        self._event_wake = asyncio.Event()
        self._busy: set[str] = set()

    def changed(self, uid: str) -> None:
        """Write the job's status soon, at once if its phase is another than the one written."""
        job, workload = self._world.jobs.get(uid), self._world.workloads.get(uid)
        if job is None or workload is None or uid in self._urgent:
            return
        attempt = self._world.attempts.get(uid)
        if job.status.get("phase") != status.phase(workload, attempt):
            self._turned.pop(uid, None)
            self._drifting.pop(uid, None)
            self._urgent.setdefault(uid)
            self._wake.set()
        elif job.status.get("reason") != status.reason(workload, attempt, self._wait(workload)).code:
            self._drifting.pop(uid, None)
            self._turned.setdefault(uid)
        elif uid not in self._turned:
            self._drifting.setdefault(uid)

    @property
    def behind(self) -> int:
        """How many statuses are still to be looked at."""
        return len(self._urgent) + len(self._turned) + len(self._drifting) + len(self._busy)

    def event(self, uid: str, cause: Why, *, warning: bool = False) -> None:
        """Record an event on the job."""
        job = self._world.jobs.get(uid)
        if job is None:
            return
        now = datetime.fromtimestamp(self._now(), UTC)
        self._events.append(
            {
                "apiVersion": "events.k8s.io/v1",
                "kind": "Event",
                "metadata": {"name": f"{job.gang.name}.{uuid.uuid4().hex[:16]}", "namespace": job.gang.namespace},
                "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                "reportingController": "queuectl.dev/controller",
                "reportingInstance": self._identity[:128],
                "action": cause.code,
                "reason": cause.code,
                "type": "Warning" if warning else "Normal",
                "note": str(cause)[:1024],
                "regarding": {
                    "apiVersion": API_VERSION,
                    "kind": "TrainingJob",
                    "namespace": job.gang.namespace,
                    "name": job.gang.name,
                    "uid": uid,
                },
            }
        )
        self._event_wake.set()

    def moved(self, move: Move) -> None:
        """Record the event of a move that people care about."""
        attempt = self._world.attempts.get(move.uid)
        workload = self._world.workloads.get(move.uid)
        if move.end is not None:
            self.event(move.uid, move.end.why, warning=move.end.exit_code != 0)
        elif workload is not None and move.to in {AttemptState.RESERVED, AttemptState.RUNNING}:
            self.event(move.uid, status.reason(workload, attempt, None))

    async def admitted(self, uid: str) -> Job | None:
        """Write Admitted for the generation that was planned for; None when the spec is another by now."""
        for _ in range(CONFLICT_TRIES):
            job, attempt = self._world.jobs.get(uid), self._world.attempts.get(uid)
            if job is None or attempt is None or job.generation != attempt.generation or job.deleting:
                return None
            try:
                return await self._write(job)
            except ApiError as error:
                if error.status != 409:  # noqa: PLR2004
                    raise
            live = await self._writer.get_job(job)
            if live is None or uid not in self._world.jobs:
                return None
            self._world.jobs[uid] = live
        raise ApiUnreachableError("the job's status is being written by others all the time")

    async def run(self) -> None:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WRITERS):
                group.create_task(self._write_urgent())
            group.create_task(self._write_drifting())
            group.create_task(self._send_events())
            group.create_task(self._write_queues())

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
            waiting = (uid for line in (self._turned, self._drifting) for uid in line if uid not in self._busy)
            for uid in list(islice(waiting, DRIFT_LOOKS)):
                self._turned.pop(uid, None)
                self._drifting.pop(uid, None)
                if await self._try_write(uid):
                    break

    async def _try_write(self, uid: str) -> bool:
        """Write the status, unless it is right as it stands; tell whether anything was sent."""
        job = self._world.jobs.get(uid)
        if job is None or uid not in self._world.workloads:
            return False
        attempt = self._world.attempts.get(uid)
        if attempt is not None and attempt.state is AttemptState.RESERVED:
            return False  # the attempt's first step writes it, with its precondition
        self._busy.add(uid)
        try:
            return await self._write(job) is not job
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
        return True

    def _wait(self, workload: Workload) -> Why | None:
        """Return why a workload waits, as far as it is known."""
        if workload.state is not WorkloadState.QUEUED:
            return None
        return self._world.problem(workload.uid) or self._world.plan.waits.get(workload.uid)

    async def _again(self, uid: str) -> None:
        """Write it soon, with the urgency that it has then: a new phase must not wait behind all that drifts."""
        await asyncio.sleep(RETRY_SECONDS)
        self.changed(uid)

    async def _write(self, job: Job) -> Job:
        uid = job.gang.uid
        workload, attempt = self._world.workloads[uid], self._world.attempts.get(uid)
        wanted = status.desired(
            job,
            workload,
            attempt,
            pods=self._world.pods.get((uid, workload.attempt), {}),
            wait=self._wait(workload),
            position=self._world.plan.positions.get(uid),
            now=self._now(),
        )
        if status.says(job.status, wanted):
            return job
        written = await self._writer.patch_job_status(job, wanted)
        known = self._world.jobs.get(uid)
        if known is not None and int(known.resource_version) < int(written.resource_version):
            self._world.jobs[uid] = written
        return written

    async def _send_events(self) -> None:
        while True:
            await self._event_wake.wait()
            self._event_wake.clear()
            while self._events:
                body = self._events.popleft()
                namespace = body["metadata"]["namespace"]  # type: ignore[index]
                try:
                    await self._writer.create_event(namespace, body)
                except (ApiError, ApiUnreachableError) as error:
                    log.warning("event lost", reason=body["reason"], error=str(error))

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

    def _queue_statuses(self) -> Iterator[tuple[Queue, status.Status]]:
        waiting: Counter[str] = Counter()
        active: Counter[str] = Counter()
        for workload in self._world.workloads.values():
            counts = waiting if workload.state is WorkloadState.QUEUED else active
            if workload.state is not WorkloadState.FINISHED:
                counts[workload.queue] += 1
        broken = broken_queues(self._world.queues)
        for name, queue in list(self._world.queues.items()):
            yield (
                queue,
                status.of_queue(
                    queue,
                    pending=waiting[name],
                    running=active[name],
                    used=self._world.holdings.used,
                    problem=self._problem(queue, broken.get(name, "")),
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
