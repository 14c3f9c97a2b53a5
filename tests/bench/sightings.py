"""When each pod was seen bound and ready, by a watch of the benchmark's own. The same in every kind of run."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from queuectl.kube import decode
from queuectl.kube.client import KubeClient
from queuectl.kube.informer import Informer
from queuectl.kube.names import pods_path
from queuectl.model.objects import Pod
from tests.bench.load import NAMESPACE, Load


class Sightings:
    """Times are of the monotonic clock, in seconds; gangs go by the uid that their pods carry."""

    def __init__(self, load: Load) -> None:
        self.all_ready = asyncio.Event()
        self._load = load
        self._bound: dict[str, dict[str, float]] = defaultdict(dict)  # gang → pod uid → when
        self._ready: dict[str, dict[str, float]] = defaultdict(dict)
        self._count = 0

    def on_pod(self, _: Pod | None, pod: Pod | None) -> None:
        if pod is None:
            return
        now = time.monotonic()
        if pod.node:
            self._bound[pod.workload].setdefault(pod.uid, now)
        if pod.ready and pod.uid not in self._ready[pod.workload]:
            self._ready[pod.workload][pod.uid] = now
            self._count += 1
            if self._count >= self._load.total:
                self.all_ready.set()

    def bound(self) -> dict[str, float]:
        """Return gang → when the last of its pods was seen bound; whole gangs only."""
        return self._whole(self._bound)

    def ready(self) -> dict[str, float]:
        """Return gang → when the last of its pods was seen ready; whole gangs only."""
        return self._whole(self._ready)

    def _whole(self, seen: dict[str, dict[str, float]]) -> dict[str, float]:
        return {gang: max(pods.values()) for gang, pods in seen.items() if len(pods) == self._load.pods}


@asynccontextmanager
async def watching(client: KubeClient, load: Load) -> AsyncIterator[Sightings]:
    sightings = Sightings(load)
    informer = Informer(client, pods_path(NAMESPACE), decode.pod, sightings.on_pod)
    task = asyncio.create_task(informer.run())
    try:
        await asyncio.wait_for(informer.synced.wait(), 30)
        yield sightings
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
