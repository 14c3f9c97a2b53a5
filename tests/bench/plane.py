"""A fresh control plane for one run, and what is counted around the run: CPU, memory, requests."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from queuectl.kube.client import KubeClient
from queuectl.kube.pods import priority_class
from queuectl.local import controlplane
from queuectl.local.prepare import prepare
from tests.bench.load import NAMESPACE, QUEUE, Load
from tests.support import manifests

# A machine that is kept busy must not lose nodes for late heartbeats; these are renewed each quarter of it.
NODE_GRACE_SECONDS = 200
WRITING = {"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"}
Write = tuple[str, str]  # verb, resource/subresource


@dataclass(frozen=True)
class Plane:
    """A control plane that holds the load's nodes and queue, and nothing else."""

    client: KubeClient
    kubeconfig: Path
    processes: Mapping[str, psutil.Process]
    folder: Path  # for what a run writes


@asynccontextmanager
async def fresh_plane(load: Load) -> AsyncIterator[Plane]:
    with tempfile.TemporaryDirectory(prefix="queuectl-bench-", ignore_cleanup_errors=True) as folder:
        state = Path(folder) / "plane"
        try:
            running = await asyncio.to_thread(controlplane.up, state, node_grace_seconds=NODE_GRACE_SECONDS)
            async with await KubeClient.open(str(running.kubeconfig)) as client:
                await prepare(client, nodes=load.node_manifests())
                namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
                await client.request("POST", "/api/v1/namespaces", body=namespace)
                await client.request("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", body=priority_class(0))
                quota = manifests.quota(load.gangs * load.pods * load.gpus, flavor=QUEUE)
                for manifest in (manifests.flavor(QUEUE), manifests.queue(QUEUE, quotas=[quota])):
                    await client.request("POST", manifests.collection(manifest), body=manifest)
                processes = {s.component: psutil.Process(s.pid) for s in controlplane.status(state) if s.pid}
                yield Plane(client, running.kubeconfig, processes, Path(folder))
        finally:
            await asyncio.to_thread(controlplane.down, state, delete=True)


async def count_writes(client: KubeClient) -> tuple[Counter[Write], Counter[Write]]:
    """Return the API server's own count of writing requests, by whomever, leases left out; and those it refused."""
    text = (await client.request_raw("GET", "/metrics", accept="text/plain")).decode()
    counted: Counter[Write] = Counter()
    refused: Counter[Write] = Counter()
    for family in text_string_to_metric_families(text):
        if family.name != "apiserver_request":
            continue
        for sample in family.samples:
            labels = sample.labels
            if sample.name != "apiserver_request_total" or labels["verb"] not in WRITING:
                continue
            if labels["resource"] == "leases":  # heartbeats, which come with time and not with pods
                continue
            resource = "/".join(filter(None, (labels["resource"], labels["subresource"])))
            counted[labels["verb"], resource] += int(sample.value)
            if labels["code"] >= "400":
                refused[labels["verb"], resource] += int(sample.value)
    return counted, refused


def cpu_seconds(process: psutil.Process, *, children: bool = False) -> float:
    """Return user and system time so far; `children` adds those alive and those that have ended."""
    times = process.cpu_times()
    used = times.user + times.system
    if children:
        used += times.children_user + times.children_system
        for child in process.children(recursive=True):
            try:
                used += cpu_seconds(child)
            except psutil.NoSuchProcess:
                continue
    return float(used)


def machine_seconds() -> float:
    """Return the CPU time that all processes of the machine have used."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0) - getattr(times, "guest", 0))


def peak_memory(process: psutil.Process) -> int:
    """Return the most memory that the process has held, in bytes; where the system doesn't keep it, what it holds."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return int(process.memory_info().rss)
