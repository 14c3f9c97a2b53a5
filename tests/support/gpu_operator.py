"""A test double of the GPU Operator's driver upgrade: it moves nodes through its states by their labels, and no more.

It does in each round what NVIDIA's k8s-operator-libs do (pkg/upgrade, ApplyState) in the in-place mode: each node takes at
most one step, in the order of the states, upon what was read when the round began. Its driver is a label; loading it
takes a moment.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from queuectl.core.maintenance import UPGRADE_SKIP, UPGRADE_STATE
from queuectl.kube.client import MERGE_PATCH, KubeClient
from queuectl.kube.names import WORKLOAD_LABEL, pods_path
from tests.support.stage import GPU, Object

DRIVER = "example.com/driver"  # of a node: the version that is loaded
LOADING_SECONDS = 1.0
ROUND_SECONDS = 0.3


@dataclass(frozen=True)
class Step:
    """That a node has come to a state, and with which pods with GPUs on it."""

    node: str
    state: str
    pods: tuple[str, ...]


class GpuOperator:
    """Upgrades the drivers of the nodes with a label, one at a time unless told otherwise.

    ``waits_for``: the label of pods that have to be over before it removes any (waitForCompletion.podSelector).
    """

    def __init__(
        self, client: KubeClient, selector: str, *, max_parallel: int = 1, waits_for: str = WORKLOAD_LABEL
    ) -> None:
        self.version = ""
        self.steps: list[Step] = []
        self._client = client
        self._selector = selector
        self._max_parallel = max_parallel
        self._waits_for = waits_for
        self._loading: dict[str, float] = {}

    def nodes_in(self, state: str) -> list[str]:
        """Return the nodes in the order in which they came to a state."""
        return [step.node for step in self.steps if step.state == state]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self.round()
            await asyncio.sleep(ROUND_SECONDS)

    async def round(self) -> None:
        """Take a step with each node that can take one."""
        found = await self._client.request("GET", "/api/v1/nodes", params={"labelSelector": self._selector})
        pods = (await self._client.request("GET", pods_path()))["items"]
        nodes = [(node["metadata"]["labels"].get(UPGRADE_STATE, ""), node) for node in found["items"]]
        free = self._max_parallel - sum(state not in {"", "upgrade-done", "upgrade-required"} for state, _ in nodes)
        for state, node in nodes:
            if state in {"", "upgrade-done"}:
                await self._look(state, node, pods)
            elif state == "upgrade-required":
                free -= await self._begin(node, pods, free=free)
            else:
                await self._go_on(state, node, pods)

    async def _look(self, state: str, node: Object, pods: Sequence[Object]) -> None:
        if self.version and node["metadata"]["labels"].get(DRIVER) != self.version:
            await self._to(node, "upgrade-required", pods)
        elif not state:
            await self._to(node, "upgrade-done", pods)

    async def _begin(self, node: Object, pods: Sequence[Object], *, free: int) -> bool:
        """Begin with a node if there is a place for it, or somebody has cordoned it; tell whether it was begun."""
        skipped = node["metadata"]["labels"].get(UPGRADE_SKIP) == "true"
        if skipped or (free <= 0 and not node["spec"].get("unschedulable")):
            return False
        await self._to(node, "cordon-required", pods)
        return True

    async def _go_on(self, state: str, node: Object, pods: Sequence[Object]) -> None:
        there = with_gpus(node, pods)
        match state:
            case "cordon-required":
                await self._to(node, "wait-for-jobs-required", pods, unschedulable=True)
            case "wait-for-jobs-required" if not any(self._waits_for in pod["metadata"]["labels"] for pod in there):
                await self._to(node, "pod-deletion-required", pods)
            case "pod-deletion-required" if there:
                for meta in [pod["metadata"] for pod in there]:
                    await self._client.request("DELETE", pods_path(meta["namespace"], meta["name"]))
            case "pod-deletion-required":
                await self._to(node, "pod-restart-required", pods)
            case "pod-restart-required":
                await self._load(node, pods)
            case "validation-required":
                await self._to(node, "uncordon-required", pods)
            case "uncordon-required":
                await self._to(node, "upgrade-done", pods, unschedulable=None)

    async def _load(self, node: Object, pods: Sequence[Object]) -> None:
        name = node["metadata"]["name"]
        begun = self._loading.setdefault(name, time.monotonic())
        if time.monotonic() >= begun + LOADING_SECONDS:
            await self._patch(name, {"metadata": {"labels": {DRIVER: self.version}}})
            await self._to(node, "validation-required", pods)

    async def _to(self, node: Object, state: str, pods: Sequence[Object], **spec: bool | None) -> None:
        name = node["metadata"]["name"]
        there = tuple(pod["metadata"]["name"] for pod in with_gpus(node, pods))
        self.steps.append(Step(name, state, there))
        await self._patch(name, {"spec": spec} if spec else {})
        await self._patch(name, {"metadata": {"labels": {UPGRADE_STATE: state}}})

    async def _patch(self, name: str, body: Object) -> None:
        if body:
            await self._client.request("PATCH", f"/api/v1/nodes/{name}", body=body, content_type=MERGE_PATCH)


def with_gpus(node: Object, pods: Sequence[Object]) -> list[Object]:
    """Return the pods on a node that have GPUs and are not over."""
    return [
        pod
        for pod in pods
        if pod["spec"].get("nodeName") == node["metadata"]["name"]
        and pod["status"]["phase"] in {"Pending", "Running"}
        and any(GPU in each.get("resources", {}).get("limits", {}) for each in pod["spec"]["containers"])
    ]
