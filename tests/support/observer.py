"""An observer that judges by the API server's own stream of pods, not by the controller's word."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from queuectl.kube.informer import Informer, Item
from queuectl.kube.names import ATTEMPT_LABEL, GATE, JOB_LABEL, pods_path
from queuectl.model.resources import pod_requests
from tests.support.stage import GPU, Stage

Object = dict[str, Any]


def _decode(raw: msgspec.Raw | bytes) -> Item[Object]:
    pod = msgspec.json.decode(raw)
    meta = pod["metadata"]
    return Item(f"{meta['namespace']}/{meta['name']}", meta["resourceVersion"], pod)


class Observer:
    """Sees every version of every pod, in the order of the API server."""

    def __init__(self, gpus: int) -> None:
        self.ungated: dict[tuple[str, int], int] = {}  # job, attempt → pods there when the first was ungated
        self.overbooked: list[str] = []
        self._gpus = gpus
        self._pods: dict[str, Object] = {}

    def on_change(self, old: Object | None, new: Object | None) -> None:
        if old is not None:
            self._pods.pop(old["metadata"]["uid"], None)
        if new is None:
            return
        self._pods[new["metadata"]["uid"]] = new
        key = _attempt(new)
        if key and key not in self.ungated and GATE not in _gates(new):
            self.ungated[key] = sum(1 for pod in self._pods.values() if _attempt(pod) == key)
        self._look_for_overbooking()

    def partial(self, sizes: Mapping[str, int]) -> list[str]:
        """Return the attempts of which a pod was ungated before all of the gang were there."""
        return [
            f"{job}, attempt {number}: {pods} of {sizes[job]} pods"
            for (job, number), pods in self.ungated.items()
            if pods != sizes[job]
        ]

    def _look_for_overbooking(self) -> None:
        used: Counter[str] = Counter()
        for pod in self._pods.values():
            node = pod["spec"].get("nodeName")
            if node and pod["status"].get("phase") not in {"Succeeded", "Failed"}:
                used[node] += pod_requests(pod["spec"]).get(GPU, 0)
        self.overbooked += [f"{node}: {amount} GPUs" for node, amount in used.items() if amount > self._gpus]


def _attempt(pod: Object) -> tuple[str, int] | None:
    labels = pod["metadata"].get("labels") or {}
    return (labels[JOB_LABEL], int(labels[ATTEMPT_LABEL])) if JOB_LABEL in labels else None


def _gates(pod: Object) -> set[str]:
    return {gate["name"] for gate in pod["spec"].get("schedulingGates") or ()}


@asynccontextmanager
async def observing(stage: Stage, *, gpus: int = 8) -> AsyncIterator[Observer]:
    """Watch the stage's pods; its nodes have `gpus` each."""
    observer = Observer(gpus)
    informer = Informer(stage.client, pods_path(stage.namespace), _decode, observer.on_change)
    task = asyncio.create_task(informer.run())
    try:
        async with asyncio.timeout(30):
            await informer.synced.wait()
        yield observer
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
