"""The outbox's executor: carries out the step that each attempt's state asks for. It never decides.

A step is known by its attempt and may be carried out again at any time; its end is reported as a Move, which the
engine writes to the ledger. What is learnt on the way (a pod refused, a place lost) is reported in the same way.
"""

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from queuectl.control import metrics
from queuectl.control.asker import Asker
from queuectl.control.report import Reporter
from queuectl.control.world import World
from queuectl.core.checkpoint import by_sigterm
from queuectl.core.lifecycle import View, can_go, coming, holding, not_grown, refused, still_asked
from queuectl.kube import pods
from queuectl.kube.claims import UnnamedError, claim
from queuectl.kube.client import ApiError, ApiUnreachableError
from queuectl.kube.writes import DeposedError, NameTakenError, Writer
from queuectl.model.lifecycle import STEP_OF, Attempt, AttemptState, End, Move, Outcome, Step
from queuectl.model.objects import Job, Place, Pod
from queuectl.model.plan import PodKey
from queuectl.model.reasons import GIVES_UP, Reason, Why, why

WORKERS = 8  # gangs under way at once; a gang is finished before the next is begun
GIVE_UP_SECONDS = 10.0  # of trying one step; the engine then offers it again, behind those of others

log = structlog.get_logger()

# Answers that the same pod will get again however often it is sent.
_PERMANENT = {400, 413, 422}
_URGENCY = {Step.ASK: 0, Step.REMOVE: 0, Step.SHRINK: 0, Step.UNGATE: 1, Step.CREATE: 2, Step.GROW: 3}


class _SupersededError(Exception):
    """The attempt has moved on meanwhile."""


class Executor:
    """Workers that take steps, the most urgent first."""

    def __init__(
        self,
        *,
        world: World,
        writer: Writer,
        reporter: Reporter,
        asker: Asker,
        done: Callable[[Move], None],
        created: Callable[[Pod], None],
        now: Callable[[], float],
    ) -> None:
        """Prepare; ``run`` starts the workers. ``created`` is told of pods before any watch shows them."""
        self._world = world
        self._writer = writer
        self._reporter = reporter
        self._asker = asker
        self._done = done
        self._created = created
        self._now = now
        self._queue: asyncio.PriorityQueue[tuple[int, int, str, int, AttemptState]] = asyncio.PriorityQueue()
        self._order = itertools.count()
        self._waiting: set[tuple[str, int, AttemptState]] = set()
        self._locks: dict[str, asyncio.Lock] = {}

    def offer(self, uid: str) -> None:
        """Queue the step that the workload's attempt is at, unless it is queued or has none."""
        attempt = self._world.attempts.get(uid)
        step = STEP_OF.get(attempt.state) if attempt else None
        if attempt is None or step is None:
            return
        key = (uid, attempt.number, attempt.state)
        if key not in self._waiting:
            self._waiting.add(key)
            self._queue.put_nowait((_URGENCY[step], next(self._order), *key))

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            _, _, uid, number, state = await self._queue.get()
            lock = self._locks.setdefault(uid, asyncio.Lock())
            async with lock:
                try:
                    await self._carry_out(uid, number, state)
                except _SupersededError:
                    pass
                except (ApiUnreachableError, ApiError, NameTakenError) as error:
                    # Still the attempt's step: the engine's sweep offers it again, and its deadline bounds it.
                    log.warning("step failed", uid=uid, attempt=number, step=STEP_OF[state], error=str(error))
                    metrics.STEP_FAILURES.labels(STEP_OF[state]).inc()
                except DeposedError:
                    raise
                except Exception:  # one gang's trouble must not end the term of all others, and of the next leader's
                    log.exception("step failed", uid=uid, attempt=number, step=STEP_OF[state])
                    metrics.STEP_FAILURES.labels(STEP_OF[state]).inc()
                finally:
                    self._waiting.discard((uid, number, state))
            if not lock.locked() and uid not in self._world.attempts:
                self._locks.pop(uid, None)

    async def _carry_out(self, uid: str, number: int, state: AttemptState) -> None:
        steps = {
            Step.CREATE: self._create, Step.UNGATE: self._ungate, Step.SHRINK: self._shrink, Step.GROW: self._grow,
            Step.ASK: self._ask, Step.REMOVE: self._remove,
        }  # fmt: skip
        step = steps[STEP_OF[state]]
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(ApiUnreachableError),
            wait=wait_random_exponential(multiplier=0.2, max=5),
            stop=stop_after_delay(GIVE_UP_SECONDS),
            reraise=True,
        ):
            with attempt:
                view = self._current(uid, number, state)
                move = await step(view)
        if move is not None:
            self._done(move)

    def _current(self, uid: str, number: int, state: AttemptState) -> View:
        view = self._world.view(uid, self._now())
        if view is None or view.attempt.number != number or view.attempt.state is not state:
            raise _SupersededError
        return view

    async def _create(self, view: View) -> Move | None:
        """Say Admitted for the spec that was planned for, then create what is missing of the gang, gated."""
        attempt = view.attempt
        job = await self._reporter.admitted(attempt.uid)
        if job is None:
            return self._end(view, End(why(Reason.SPEC_CHANGED), Outcome.REQUEUE))
        if not job.has_finalizer:
            await self._writer.set_finalizer(job, present=True)
        try:
            await self._create_pods(job, view, pods.nodes_of(attempt), since=attempt.admitted_at)
        except _RefusedError as error:
            return self._end(view, refused(view, error.pod, error.problem, permanent=error.permanent))
        return Move(attempt.uid, attempt.number, AttemptState.CREATED)

    async def _create_pods(self, job: Job, view: View, wanted: Collection[PodKey], *, since: float) -> None:
        """Create those of the wanted pods that are not there, gated. Raises _RefusedError."""
        attempt = view.attempt
        if pods.priority_class_name(view.workload.priority) not in self._world.gangs.priorities:
            await self._writer.ensure_priority_class(view.workload.priority)
        flavors, workload = self._world.flavors, view.workload
        manifests = pods.manifests(job, attempt, workload.priority, flavors, workload.saved)
        claims = self._claims(job, attempt, manifests)
        there = self._world.pods.get((attempt.uid, attempt.number), {})  # as of now, not as of before the writes above
        missing = [(manifests[key], claims.get(key)) for key in wanted if key not in there]

        async def create(manifest: pods.Manifest, claim: pods.Manifest | None) -> None:
            self._current(attempt.uid, attempt.number, attempt.state)
            try:
                if claim is not None:
                    await self._writer.create_claim(claim)
                self._created(await self._writer.create_pod(manifest))
            except ApiError as error:
                if pods.lacks_priority_class(error) and self._now() < since + GIVE_UP_SECONDS:
                    raise ApiUnreachableError("the API server has yet to hear of the new PriorityClass") from error
                permanent = error.status in _PERMANENT
                raise _RefusedError(manifest["metadata"]["name"], error.message, permanent=permanent) from error
            except NameTakenError as error:
                if self._now() < since + GIVE_UP_SECONDS:
                    raise  # one of a deleted job of the same name may just be going
                raise _RefusedError(manifest["metadata"]["name"], str(error), permanent=False) from error

        await _all(create(manifest, claim) for manifest, claim in missing)

    def _claims(
        self, job: Job, attempt: Attempt, manifests: Mapping[PodKey, pods.Manifest]
    ) -> dict[PodKey, pods.Manifest]:
        """Return the claims of pods whose devices are named. Raises _RefusedError."""
        result = {}
        for key, (node, kind, devices) in pods.devices_of(attempt, self._world.flavors).items():
            manifest, template = manifests[key], job.templates[key[0]]["spec"]
            try:
                result[key] = claim(manifest, template, kind, devices, self._world.devices.identities(node))
            except UnnamedError as error:
                raise _RefusedError(manifest["metadata"]["name"], str(error), permanent=False) from error
        return result

    async def _ungate(self, view: View) -> Move | None:
        """Take all gates away, if every pod is there and every place still good."""
        attempt, job = view.attempt, view.job
        nodes = {key: node for key, (node, _) in pods.nodes_of(attempt).items()}
        if job is None or not can_go(view, nodes):
            return None  # the engine sees the same and ends the attempt
        await self._ungate_pods(job, view, nodes)
        return Move(attempt.uid, attempt.number, AttemptState.UNGATED)

    async def _ungate_pods(self, job: Job, view: View, nodes: Mapping[PodKey, str]) -> None:
        attempt = view.attempt

        async def ungate(pod: Pod, node: str) -> None:
            self._current(attempt.uid, attempt.number, attempt.state)
            now = await self._writer.ungate(job, pod, node)
            if now is None:
                raise _SupersededError  # the watch will tell that the pod is gone

        await _all(ungate(view.pods[key], node) for key, node in nodes.items() if view.pods[key].gated)

    async def _grow(self, view: View) -> Move | None:
        """Create the pods that come and let them go, once the others have saved; that they are ready shows in the watch."""
        attempt, job, nodes = view.attempt, view.job, coming(view.attempt)
        if job is None or job.generation != attempt.generation:
            return None  # the engine sees the same
        try:
            await self._create_pods(job, view, nodes, since=attempt.growing_at or 0.0)
        except _RefusedError as error:
            return not_grown(view, f"the API server refused pod {error.pod}: {error.problem}")
        view = self._current(attempt.uid, attempt.number, attempt.state)
        if (ask := still_asked(view)) is not None:
            self._asker.ask(view.attempt, ask)
        elif can_go(view, nodes):
            await self._ungate_pods(job, view, nodes)
        return None

    async def _shrink(self, view: View) -> None:
        """Delete the pods that the gang gives up or that are replaced; that they are gone shows in the watch.

        Before it gives up any, it saves its work.
        """
        attempt = view.attempt
        if attempt.asking:
            self._asker.ask(attempt, attempt.asking)
            return
        lost = {node for node, place in view.places.items() if place is Place.GONE}
        left = [pod for pod in holding(view) if pod.node in lost or not pod.deleting]
        grace = by_sigterm(view.job, attempt.ask)
        if attempt.shrunk is not None and attempt.shrunk.reason in GIVES_UP:
            await self._tell_disrupted(attempt, left, attempt.shrunk)
        await _all(self._writer.remove_pod(pod, grace_seconds=0 if pod.node in lost else grace) for pod in left)

    async def _ask(self, view: View) -> None:
        """Have pods asked to save their work; what they answer shows in time."""
        if view.attempt.asking:
            self._asker.ask(view.attempt, view.attempt.asking)

    async def _remove(self, view: View) -> None:
        """Delete what still holds room, and say why before; that it is gone shows in the watch."""
        attempt = view.attempt
        left = holding(view)
        lost = [pod for pod in left if pod.node and view.places.get(pod.node) is Place.GONE]
        await _all(self._writer.remove_pod(pod, grace_seconds=0) for pod in lost)
        if all(pod.deleting for pod in left):
            return
        end = attempt.end
        if end is not None and end.disrupts:
            await self._tell_disrupted(attempt, left, end.why)
        grace = by_sigterm(view.job, end.ask if end else None)
        everything = end is not None and end.outcome is Outcome.DELETED
        await self._writer.remove_pods(attempt, view.workload.namespace, ended_too=everything, grace_seconds=grace)

    async def _tell_disrupted(self, attempt: Attempt, left: Iterable[Pod], cause: Why) -> None:
        untold = [pod for pod in left if pod.node and not pod.disrupted and not pod.deleting]
        try:
            await _all(self._writer.tell_disrupted(pod, str(cause)) for pod in untold)
        except ApiError as error:  # they have to go all the same
            log.warning("disruption not told", uid=attempt.uid, attempt=attempt.number, error=error.message)

    @staticmethod
    def _end(view: View, end: End) -> Move:
        return Move(view.attempt.uid, view.attempt.number, AttemptState.ENDING, end)


class _RefusedError(Exception):
    def __init__(self, pod: str, problem: str, *, permanent: bool) -> None:
        super().__init__(problem)
        self.pod = pod
        self.problem = problem
        self.permanent = permanent


async def _all(work: Iterable[Coroutine[object, object, None]]) -> None:
    """Run all of it side by side; the first failure cancels the rest and is raised as it is.

    Not a TaskGroup: before Python 3.13 one that fails in the moment in which it is cancelled forgets the
    cancellation, and the worker would outlive its term.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    if not tasks:
        return
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for failure in sorted(failures, key=lambda failure: isinstance(failure, asyncio.CancelledError)):
        raise failure
