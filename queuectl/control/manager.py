"""A controller's life: wait to be elected, act for a term, start over when the term is lost.

Everything that acts belongs to a term and is made anew for it: informers list the cluster after the election, then
the ledger is read, then the first cycle runs. A term that is lost takes all of it along, so nothing stale survives.
"""

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import structlog

from queuectl.control import feed, metrics
from queuectl.control.engine import Engine
from queuectl.control.exporters import Exporters
from queuectl.control.janitor import Janitor
from queuectl.control.maintenance import Maintainer
from queuectl.control.report import Reporter
from queuectl.control.settings import Settings
from queuectl.control.world import World
from queuectl.core.lifecycle import BackOff
from queuectl.core.snapshot import Policy
from queuectl.kube import lease
from queuectl.kube.client import ApiError, ApiUnreachableError, KubeClient
from queuectl.kube.informer import Item
from queuectl.kube.writes import DeposedError, Writer
from queuectl.model.suspects import Healing
from queuectl.store.engine import Fenced, StoreUnavailable, open_engine
from queuectl.store.leadership import Leadership, Term
from queuectl.store.ledger import Ledger

STUCK_SECONDS = 60.0  # without a round of the engine: /healthz fails
PAUSE_SECONDS = 1.0  # before standing for election again

log = structlog.get_logger()


@dataclass
class Health:
    """What /healthz and /readyz tell."""

    leading: bool = False
    database: bool = False
    engine: Engine | None = field(default=None, repr=False)

    def alive(self) -> bool:
        """Tell whether the process does its work, as leader or in waiting."""
        return self.engine is None or time.monotonic() - self.engine.beat < STUCK_SECONDS

    def ready(self) -> bool:
        """Tell whether the process leads or could take over."""
        return self.database


class Manager:
    """One controller process."""

    def __init__(self, settings: Settings, client: KubeClient, database_url: str) -> None:
        """Prepare; ``run`` starts it."""
        self.health = Health()
        self._settings = settings
        self._client = client
        self._engine = open_engine(database_url)
        self._ledger = Ledger(self._engine)
        self._leadership = Leadership(self._engine, holder=settings.identity, ttl=settings.lease_seconds)
        self._term: Term | None = None
        self._named = ""  # the ledger's own name
        self._other: tuple[lease.Shown, float] | None = (
            None  # who leads by another ledger, and since when that is known
        )

    async def run(self) -> None:
        """Stand for election and act, until cancelled.

        Raises WrongCluster when the ledger belongs to another cluster.
        """
        me = asyncio.current_task()
        try:
            while True:
                await self._stand()
                if me is not None and me.cancelling():  # told to end in the moment in which the term was lost
                    raise asyncio.CancelledError
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            metrics.forget()
            await self._engine.dispose()

    async def _stand(self) -> None:
        try:
            namespace = await self._client.request("GET", "/api/v1/namespaces/kube-system")
            self._named = await self._ledger.bind(namespace["metadata"]["uid"])
            self.health.database = True
            if await self._is_led_by_another_ledger():
                return
            self._term = await self._leadership.acquire()
        except StoreUnavailable as error:
            self.health.database = False
            log.warning("database unreachable", error=str(error))
            return
        except (ApiUnreachableError, ApiError) as error:
            log.warning("API server unreachable", error=str(error))
            return
        if self._term is None:
            return
        log.info("leading", identity=self._settings.identity, epoch=self._term.epoch)
        metrics.LEADING.set(1)
        self.health.leading = True
        epoch, cause = self._term.epoch, "stopped"
        try:
            # In a task of its own: a TaskGroup may leave its task marked as cancelled (until Python 3.13).
            await asyncio.create_task(self._act(epoch))
        except* (Fenced, DeposedError):
            cause = "deposed"
        except* StoreUnavailable as errors:
            cause = "database"
            log.warning("database lost", error=_first(errors))
        except* (ApiUnreachableError, ApiError, TimeoutError) as errors:
            cause = "api"
            log.warning("API server lost", error=_first(errors))
        finally:
            gc.enable()
            self.health.leading, self.health.engine, self._term = False, None, None
            metrics.forget()
            log.info("term over", epoch=epoch, cause=cause)
            await self._resign(epoch)
        metrics.TERMS_LOST.labels(cause).inc()

    async def _is_led_by_another_ledger(self) -> bool:
        """Tell whether a controller leads this cluster by another ledger: then all that runs is unknown to this one.

        By the Lease, which counts until it has not been renewed for its own duration, by the clock of this process.
        """
        now = time.monotonic()
        shown = await lease.shown(self._client)
        if shown is None or not shown.holder or shown.ledger in {"", self._named}:
            self._other = None
            return False
        if self._other is None or self._other[0] != shown:
            if self._other is None or self._other[0].holder != shown.holder:
                log.error(
                    "another controller leads this cluster by another ledger, which this one must not do beside it: end that"
                    " one first, or give this one the same database",
                    holder=shown.holder,
                )
            self._other = (shown, now)
        return now < self._other[1] + shown.seconds

    async def _act(self, epoch: int) -> None:
        gc.unfreeze()  # what an earlier term has left is garbage now
        gc.disable()  # until all that stays is there: see Engine.run
        world = World(
            BackOff(self._settings.back_off_first, self._settings.back_off_longest),
            Policy(fair_sharing=self._settings.fair_sharing, usage_half_life=self._settings.usage_half_life),
            Healing(self._settings.node_not_ready, self._settings.suspect_first),
            self._settings.fault_rules,
        )
        writer = Writer(self._client, self._trusted)
        reporter = Reporter(world, writer, self._settings.identity, time.time)
        engine: Engine

        def wake() -> None:
            engine.wake()

        everything, pods = feed.informers(self._client, world, wake)
        engine = Engine(
            world=world,
            ledger=self._ledger,
            epoch=epoch,
            writer=writer,
            reporter=reporter,
            created=lambda pod: pods.adopt(Item(f"{pod.namespace}/{pod.name}", pod.resource_version, pod)),
            now=time.time,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_leading(epoch))
            group.create_task(self._show(epoch))
            for informer in everything:
                group.create_task(informer.run())
            group.create_task(feed.follow_volumes(self._client, world, wake))
            await feed.in_sync(everything)
            await feed.load(world, self._ledger)
            log.info("in sync", jobs=len(world.jobs), active=len(world.attempts), nodes=len(world.fleet.node_names()))
            maintainer = Maintainer(world, writer, self._settings.identity, wake, time.time)
            maintainer.say()
            engine.beat = time.monotonic()
            self.health.engine = engine
            janitor = Janitor(world, writer, time.time)
            for service in (engine, engine.executor, engine.asker, reporter, janitor, maintainer):
                group.create_task(service.run())
            if self._settings.exporter_labels:
                group.create_task(self._exporters(world, reporter, wake).run())

    def _exporters(self, world: World, reporter: Reporter, wake: Callable[[], None]) -> Exporters:
        return Exporters(
            self._client,
            world,
            reporter,
            wake,
            time.time,
            namespace=self._settings.exporter_namespace,
            selector=self._settings.exporter_labels,
            seconds=self._settings.exporter_seconds,
        )

    def _trusted(self) -> bool:
        return self._term is not None and self._term.trusted()

    async def _keep_leading(self, epoch: int) -> None:
        """Renew until the lead is lost. Raises Fenced then."""
        while True:
            try:
                renewed = await self._leadership.renew(epoch)
                if renewed is None:
                    raise Fenced(f"epoch {epoch} is over")
                self._term = renewed
            except StoreUnavailable as error:
                if not self._trusted():
                    raise
                log.warning("lead not renewed", error=str(error))
            await asyncio.sleep(self._settings.lease_seconds / 4)
            if not self._trusted():
                raise Fenced(f"epoch {epoch} was not renewed in time")

    async def _show(self, epoch: int) -> None:
        """Mirror the leader into a Lease."""
        while True:
            await self._write_lease(epoch, self._settings.identity)
            await asyncio.sleep(self._settings.lease_seconds / 4)

    async def _write_lease(self, epoch: int, holder: str) -> None:
        try:
            await lease.show(
                self._client,
                holder=holder,
                ledger=self._named,
                epoch=epoch,
                seconds=self._settings.lease_seconds,
                now=datetime.now(UTC),
            )
        except (ApiError, ApiUnreachableError) as error:
            log.warning("lease not shown", error=str(error))

    async def _resign(self, epoch: int) -> None:
        try:
            if await asyncio.shield(self._leadership.resign(epoch)):
                await self._write_lease(epoch, "")
        except StoreUnavailable as error:
            log.warning("could not resign", error=str(error))


def _first(errors: BaseException) -> str:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return str(errors) or type(errors).__name__
