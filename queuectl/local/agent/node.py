"""The nodes of an agent: registered, kept alive by their leases, and the pods that are bound to them."""

import asyncio
import os
import platform
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain

import msgspec
import psutil
import structlog

from queuectl.kube.client import APPLY_PATCH, ApiError, ApiUnreachableError
from queuectl.kube.informer import Informer, Item
from queuectl.kube.names import pods_path
from queuectl.local.agent.config import Manifest
from queuectl.local.agent.given import HOST_ADDRESS
from queuectl.local.agent.pod import STRATEGIC, Host, Pod
from queuectl.local.nodes import node_manifest

GRACE_SECONDS = 5.0  # of pods when the agent is told to end
REPORT_SECONDS = 3.0  # for the last reports and conditions
REAL = "local.queuectl.dev/real"
PRETENDED = "Pretended"  # the model of GPUs that are none
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"

log = structlog.get_logger()
_decode = msgspec.json.Decoder().decode


def manifest(name: str, gpus: int) -> Manifest:
    """Return a node with this machine's CPUs and memory, and GPUs that it only pretends to have."""
    memory = f"{psutil.virtual_memory().total // 1024}Ki"
    node = node_manifest(
        name, gpus=gpus, gpu_product=PRETENDED, cpu=str(os.cpu_count()), memory=memory, labels={REAL: "true"}
    )
    del node["metadata"]["annotations"]  # by which kwok knows its nodes
    return node


class Node:
    """One node. ``run`` registers it, keeps it alive and runs its pods, until it is cancelled."""

    def __init__(self, host: Host, name: str, *, port: int, gpus: int, lease_seconds: int) -> None:
        """Prepare; nothing is sent before ``run``. `port`: where the API server asks for logs and commands."""
        self._host = host
        self._manifest = manifest(name, gpus)
        self._port = port
        self._lease_seconds = lease_seconds
        self.name = name
        self.lives: set[asyncio.Task[None]] = set()
        self.pods = Informer(host.client, pods_path(), _item, self._changed, field_selector=f"spec.nodeName={name}")

    async def run(self) -> None:
        """Go on until cancelled; trouble with the API server is waited out."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat())
            group.create_task(self.pods.run())

    async def report(self, *, ready: bool) -> None:
        """Write the node's status. Raises ApiError and ApiUnreachableError."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        reason, message = ("AgentReady", "the node agent runs") if ready else ("AgentEnded", "the node agent has ended")
        condition = {"type": "Ready", "status": "True" if ready else "False", "reason": reason, "message": message}
        status = {
            "capacity": self._manifest["status"]["capacity"],
            "allocatable": self._manifest["status"]["allocatable"],
            "conditions": [condition | {"lastHeartbeatTime": now, "lastTransitionTime": now}],
            "addresses": [{"type": "InternalIP", "address": HOST_ADDRESS}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
            "declaredFeatures": ["ExtendWebSocketsToKubelet"],  # so that kubectl's websockets come as they are
            "nodeInfo": {
                "architecture": self._manifest["metadata"]["labels"]["kubernetes.io/arch"],
                "operatingSystem": "linux",
                "kernelVersion": platform.release(),
                "osImage": platform.platform(),
                "containerRuntimeVersion": "queuectl://processes",
                "kubeletVersion": "queuectl-agent",
                **dict.fromkeys(("machineID", "systemUUID", "bootID", "kubeProxyVersion"), ""),
            },
        }
        path = f"/api/v1/nodes/{self.name}/status"
        await self._host.client.request("PATCH", path, body={"status": status}, content_type=STRATEGIC)

    async def _beat(self) -> None:
        """Renew the lease four times in its duration; say that the node is ready when the API server doesn't."""
        registered = False
        while True:
            try:
                if not registered:
                    await self._register()
                    registered = True
                await self._renew()
            except (ApiError, ApiUnreachableError) as error:
                log.warning("node not reported", node=self.name, error=str(error))
            await asyncio.sleep(self._lease_seconds / 4 if registered else 1.0)

    async def _register(self) -> None:
        try:
            await self._host.client.request("POST", "/api/v1/nodes", body=self._manifest)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
        await self.report(ready=True)
        log.info("node ready", node=self.name)

    async def _renew(self) -> None:
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.name, "namespace": "kube-node-lease"},
            "spec": {
                "holderIdentity": self.name,
                "leaseDurationSeconds": self._lease_seconds,
                "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            },
        }
        params = {"fieldManager": "queuectl", "force": "true"}
        await self._host.client.request(
            "PATCH", f"{_LEASES}/{self.name}", params=params, body=body, content_type=APPLY_PATCH
        )
        node = await self._host.client.request("GET", f"/api/v1/nodes/{self.name}")
        conditions = (node.get("status") or {}).get("conditions") or ()
        if not any(each["type"] == "Ready" and each["status"] == "True" for each in conditions):
            await self.report(ready=True)  # silence was taken for the node's end

    def _changed(self, old: Manifest | None, new: Manifest | None) -> None:
        pods = self._host.pods
        gone = pods.get(old["metadata"]["uid"]) if old else None
        if gone and (new is None or new["metadata"]["uid"] != gone.uid):
            gone.vanish()
        if new is not None:
            if known := pods.get(new["metadata"]["uid"]):
                known.update(new)
            else:
                pod = pods[new["metadata"]["uid"]] = Pod(self._host, new)
                life = asyncio.create_task(self._live(pod))
                self.lives.add(life)
                life.add_done_callback(self.lives.discard)

    async def _live(self, pod: Pod) -> None:
        name = f"{pod.manifest['metadata']['namespace']}/{pod.manifest['metadata']['name']}"
        log.info("pod begins", pod=name, uid=pod.uid)
        try:
            await pod.run()
        except Exception:
            log.exception("pod given up", pod=name, uid=pod.uid)
        log.info("pod is over", pod=name, uid=pod.uid)
        if pod.gone or pod.manifest["metadata"].get("deletionTimestamp"):
            del self._host.pods[pod.uid]
            await asyncio.to_thread(shutil.rmtree, pod.folder, ignore_errors=True)


async def run(host: Host, nodes: Sequence[Node], told: asyncio.Event) -> None:
    """Run nodes until `told` to end; then end their pods, and say so."""
    running = [asyncio.create_task(node.run()) for node in nodes]
    cleaning = asyncio.create_task(_clean(host, nodes))
    stopping = asyncio.create_task(told.wait())
    try:
        done, _ = await asyncio.wait({stopping, *running}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (*running, cleaning):
            task.cancel()
        for pod in host.pods.values():
            pod.shut_down(GRACE_SECONDS)
        lives = set(chain.from_iterable(node.lives for node in nodes))
        if lives:
            await asyncio.wait(lives, timeout=GRACE_SECONDS + REPORT_SECONDS)
        for life in lives:
            life.cancel()
        for node in nodes:
            try:
                async with asyncio.timeout(REPORT_SECONDS / len(nodes)):
                    await node.report(ready=False)
            except (ApiError, ApiUnreachableError, TimeoutError) as error:
                log.warning("node not reported", node=node.name, error=str(error))


async def _clean(host: Host, nodes: Sequence[Node]) -> None:
    """Remove what an earlier agent left of pods that are no more."""
    for node in nodes:
        await node.pods.synced.wait()
    for folder in (host.folder / "pods").glob("*"):
        if folder.name not in host.pods:
            shutil.rmtree(folder, ignore_errors=True)


def _item(raw: msgspec.Raw | bytes) -> Item[Manifest]:
    pod: Manifest = _decode(raw)
    meta = pod["metadata"]
    return Item(f"{meta['namespace']}/{meta['name']}", meta["resourceVersion"], pod)
