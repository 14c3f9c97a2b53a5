"""Has pods asked to save their work: before they have to go, now and then while they run, and when a user wants it.

It decides nothing and keeps nothing that can't be lost: an ask has the same name when the next leader repeats it, and
what pods answer goes to the world as what they report by themselves. After a restart a running job may be reminded
once more than it would have been.
"""

import asyncio
from collections.abc import Callable

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from queuectl.control.report import Reporter
from queuectl.control.world import World
from queuectl.core.checkpoint import answered, asked, remind
from queuectl.core.nominate import clock
from queuectl.kube.asking import Asking, UnansweredError
from queuectl.kube.writes import DeposedError, Writer
from queuectl.model.checkpoint import Ask
from queuectl.model.lifecycle import Attempt, AttemptKey, AttemptState
from queuectl.model.plan import PodKey
from queuectl.model.reasons import Reason, why

TALKS = 1000  # pods that are being asked at once, each on a connection that it may keep until its work is saved

_RUN_ON = {AttemptState.RUNNING, AttemptState.GROWING}

log = structlog.get_logger()


class Asker:
    """Asks pods for one leader's term."""

    def __init__(
        self, *, world: World, writer: Writer, reporter: Reporter, heard: Callable[[], None], now: Callable[[], float]
    ) -> None:
        """Prepare; ``run`` lets it ask. ``heard`` is called after each answer that no watch will show."""
        self._world = world
        self._writer = writer
        self._reporter = reporter
        self._heard = heard
        self._now = now
        self._asks: dict[AttemptKey, Ask] = {}  # the latest
        self._talks: dict[AttemptKey, dict[PodKey, asyncio.Task[None]]] = {}  # about that
        self._told: dict[AttemptKey, str] = {}  # the ask about whose trouble people were told
        self._slots = asyncio.Semaphore(TALKS)
        self._group: asyncio.TaskGroup | None = None
        self._asking: Asking | None = None

    async def run(self) -> None:
        """Ask until cancelled."""
        async with Asking(self._writer) as self._asking, asyncio.TaskGroup() as self._group:
            await asyncio.get_running_loop().create_future()

    def ask(self, attempt: Attempt, ask: Ask) -> None:
        """Ask those pods of an attempt that have not answered yet, unless they are being asked; an earlier ask is over."""
        key, job = (attempt.uid, attempt.number), self._world.jobs.get(attempt.uid)
        if job is None or self._group is None:
            return
        before = self._asks.get(key)
        if before is None or before.at != ask.at:
            self._drop(key)
            self._asks[key] = ask
        talks = self._talks.setdefault(key, {})
        pods, reports = self._world.pods.get(key, {}), self._world.saves.of(attempt.key)
        done = {*answered(attempt, job, pods, reports, ask), *talks}
        for pod in asked(attempt, job):
            if pod not in done and pod in pods:
                talks[pod] = self._group.create_task(self._talk(key, pod, ask))

    def sweep(self, now: float) -> None:
        """Remind those who run and whose time it is, and forget those who don't run any more."""
        attempts = self._world.attempts
        for key in self._asks.keys() | self._talks.keys():
            attempt = attempts.get(key[0])
            current = attempt if attempt is not None and attempt.number == key[1] else None
            if current is None or not (current.state in _RUN_ON or current.asking):
                self._drop(key)
        for uid, attempt in attempts.items():
            job = self._world.jobs.get(uid)
            ask = remind(attempt, job, self._asks.get((uid, attempt.number)), now) if job else None
            if ask is not None:
                self.ask(attempt, ask)

    def _drop(self, key: AttemptKey) -> None:
        self._asks.pop(key, None)
        self._told.pop(key, None)
        for talk in self._talks.pop(key, {}).values():
            talk.cancel()

    async def _talk(self, key: AttemptKey, pod: PodKey, ask: Ask) -> None:
        """Ask a pod until it is asked, or has answered where it does so on the spot; at the latest until the deadline."""
        name = ask.id(key[1])
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(UnansweredError),
                wait=wait_random_exponential(multiplier=0.5, max=10),
                stop=stop_after_delay(max(0.0, ask.until - self._now())),
                reraise=True,
            ):
                with attempt:
                    await self._once(key, pod, ask, name)
        except UnansweredError as error:
            log.warning("not asked to save", uid=key[0], attempt=key[1], pod=pod, error=str(error))
        except DeposedError:
            raise
        except Exception:  # one pod's trouble must not end the term of all others
            log.exception("not asked to save", uid=key[0], attempt=key[1], pod=pod)

    async def _once(self, key: AttemptKey, pod: PodKey, ask: Ask, name: str) -> None:
        async with self._slots:
            there, job = self._world.pods.get(key, {}).get(pod), self._world.jobs.get(key[0])
            left = ask.until - self._now()
            if there is None or there.ended or job is None or job.saving is None or self._asking is None or left <= 0:
                return
            try:
                report = await self._asking.ask(there, job.saving, name, ask, seconds=left)
            except UnansweredError as error:
                if self._told.get(key) != name:
                    self._told[key] = name
                    cause = why(Reason.ASK_FAILED, pod=there.name, problem=str(error), until=clock(ask.until))
                    self._reporter.event(key[0], cause, warning=True)
                raise
        if report is not None:
            self._world.heard(key, pod, report)
            self._heard()
