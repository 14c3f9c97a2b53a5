"""Reads what exporters of GPUs' metrics show, now and then: which errors there are, and whose."""

import asyncio
from collections.abc import Callable

import structlog

from queuectl.control import metrics
from queuectl.control.report import Reporter
from queuectl.control.world import World
from queuectl.core.faults import told
from queuectl.kube.client import KubeClient
from queuectl.kube.exporters import Exporter, Reader, UnreadableError, exporter
from queuectl.kube.informer import Informer
from queuectl.kube.names import pods_path
from queuectl.model.faults import Xid
from queuectl.model.reasons import Reason, why

AT_ONCE = 64  # that are read
RATE = 100.0  # per second at most, so that of many none is a burden to the leader; each is read more seldom then

log = structlog.get_logger()


class Exporters:
    """Reads exporters for one leader's term."""

    def __init__(
        self,
        client: KubeClient,
        world: World,
        reporter: Reporter,
        heard: Callable[[], None],
        now: Callable[[], float],
        *,
        namespace: str,
        selector: str,
        seconds: float,
    ) -> None:
        """Prepare; ``run`` reads the namespace's pods that the label selector selects, each every so many seconds.

        Of one namespace, for what they show takes nodes away from others: not anybody may run one.
        """
        self._world = world
        self._reporter = reporter
        self._heard = heard
        self._now = now
        self._seconds = seconds
        self._pods = Informer(client, pods_path(namespace), exporter, lambda _old, _new: None, label_selector=selector)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._silent: set[str] = set()  # nodes whose exporter could not be read the last time

    async def run(self) -> None:
        """Read until cancelled."""
        async with Reader() as reader, asyncio.TaskGroup() as group:
            group.create_task(self._pods.run())
            await self._pods.synced.wait()
            while True:
                exporters = [item.value for item in self._pods.objects.values() if item.value.runs]
                self._silent &= {one.node for one in exporters}
                for one in exporters:
                    await self._slots.acquire()
                    group.create_task(self._read(reader, one))
                    await asyncio.sleep(max(1 / RATE, self._seconds / len(exporters)))
                if not exporters:
                    await asyncio.sleep(self._seconds)

    async def _read(self, reader: Reader, exporter: Exporter) -> None:
        try:
            shown = await reader.read(exporter)
        except UnreadableError as error:
            metrics.EXPORTER_FAILURES.inc()
            if exporter.node not in self._silent:
                self._silent.add(exporter.node)
                log.warning("exporter not read", node=exporter.node, error=str(error))
            return
        except Exception:  # one exporter's trouble must not end the term of all others
            metrics.EXPORTER_FAILURES.inc()
            log.exception("exporter not read", node=exporter.node)
            return
        finally:
            self._slots.release()
        self._silent.discard(exporter.node)
        for xid in self._world.faults.read(exporter.node, shown, self._now()):
            self._tell(exporter.node, xid)
        if shown:
            self._heard()

    def _tell(self, node: str, xid: Xid) -> None:
        """Tell the job whose GPU it is of an error that the node is not blamed for; if nobody knows whose, the only one."""
        uid = self._whose(node, xid.pod)
        if uid is not None and self._world.faults.is_news(uid, xid.code, self._now()):
            self._reporter.event(uid, why(Reason.GPU_ERROR, node=node, error=told(xid.gpu, xid.code)), warning=True)

    def _whose(self, node: str, pod: str) -> str | None:
        """Return whose a pod on a node is, by its namespace and name; without these, who is alone there."""
        there = self._world.holdings.on(node)
        if not pod:
            return next(iter(there)) if len(there) == 1 else None
        for uid in there & self._world.attempts.keys():
            pods = self._world.pods.get(self._world.attempts[uid].key, {}).values()
            if any(f"{one.namespace}/{one.name}" == pod for one in pods):
                return uid
        return None
