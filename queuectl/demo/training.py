"""The second act: of two like trainings, as processes of this machine, one is preempted. Both have to end alike."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import queuectl
from queuectl.demo.script import GPU, GPUS_PER_NODE, NAMESPACE
from queuectl.demo.trainee import STEPS
from queuectl.kube.client import KubeClient
from queuectl.kube.names import API_VERSION, jobs_path
from queuectl.local.agent.node import REAL
from queuectl.local.errors import LocalError
from queuectl.local.prepare import apply, nodes_are_ready

NODES = 2
QUEUE = FLAVOR = "training"
UNDISTURBED, DISTURBED, URGENT = "undisturbed", "disturbed", "urgent"
PAUSE_SECONDS = 0.1  # of a step
URGENT_SECONDS = 2.0
LIMIT_SECONDS = 120.0  # several times of what each wait takes
LOOK_SECONDS = 0.1

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What the two trainings have left behind."""

    at: int  # the step that was the last before it gave way
    lost_steps: int
    lost_gpu_seconds: int
    saved: int | None  # the step that queuectl knew of then
    equal: bool

    @property
    def good(self) -> bool:
        """Tell whether all is as it should be."""
        return self.equal and not self.lost_steps and self.saved == self.at

    def __str__(self) -> str:
        """Return it in lines."""
        verdict = "equal to the last bit" if self.equal else "NOT EQUAL"
        return (
            f"training     {DISTURBED} ({GPUS_PER_NODE} GPUs) gave way to {URGENT} (2 pods of {GPUS_PER_NODE // 2} GPUs) after step "
            f"{self.at} of {STEPS}; saved was step {self.saved}\n"
            f"             lost: {self.lost_steps} steps, {self.lost_gpu_seconds} GPU-seconds\n"
            f"             curve and final weights against those of {UNDISTURBED}: {verdict}"
        )


async def play(kubeconfig: Path, folder: Path, nodes: Sequence[str], check: Callable[[], None]) -> Result:
    """Have both train in `folder` and one of them preempted. Raises LocalError when that takes too long.

    ``check`` is called now and then and raises when there is no use in going on.
    """
    async with await KubeClient.open(str(kubeconfig)) as client:
        jobs = _Jobs(client, check)
        await nodes_are_ready(client, nodes)
        await apply(client, _admin_objects())
        for name, priority in ((UNDISTURBED, 2), (DISTURBED, 0)):
            await jobs.submit(_training(name, priority, folder))
        await jobs.until(f"{DISTURBED} trains", lambda: len(_lines(folder, DISTURBED)) > STEPS // 4)
        await jobs.submit(_urgent())
        await jobs.until(f"{DISTURBED} gives way", lambda: jobs.phase(URGENT) in {"Running", "Succeeded"})
        ended = {"Succeeded", "Failed"}
        for name in (URGENT, UNDISTURBED, DISTURBED):
            await jobs.until(f"{name} ends", lambda name=name: jobs.phase(name) in ended)  # type: ignore[misc]
        told = jobs.status[DISTURBED]  # it saved only once
        saved, lost = (told.get("lastCheckpoint") or {}).get("step"), told.get("lostSeconds") or 0
    return _result(_lines(folder, UNDISTURBED), _lines(folder, DISTURBED), saved, lost)


class _Jobs:
    """The jobs, as they were seen last."""

    def __init__(self, client: KubeClient, check: Callable[[], None]) -> None:
        self.status: dict[str, Manifest] = {}
        self._client = client
        self._check = check

    async def submit(self, manifest: Manifest) -> None:
        await self._client.request("POST", jobs_path(NAMESPACE), body=manifest)

    def phase(self, name: str) -> str:
        return str(self.status.get(name, {}).get("phase"))

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            items = (await self._client.request("GET", jobs_path(NAMESPACE)))["items"]
            self.status = {item["metadata"]["name"]: item.get("status") or {} for item in items}
            if holds():
                return
            self._check()
            if time.monotonic() > deadline:
                raise LocalError(f"{what}: not within {LIMIT_SECONDS:g} s.")
            await asyncio.sleep(LOOK_SECONDS)


def _result(undisturbed: list[str], disturbed: list[str], saved: int | None, lost: int) -> Result:
    """Compare what both have written: attempt, step and loss a line, and the digest of the weights."""
    steps = [line.split() for line in disturbed if " " in line]
    last = max(int(step) for attempt, step, _ in steps if attempt == "1")
    first = min((int(step) for attempt, step, _ in steps if attempt != "1"), default=1)
    curves = [[line.split()[-2:] for line in lines] for lines in (undisturbed, disturbed)]
    return Result(last, last + 1 - first, lost, saved, equal=curves[0] == curves[1])


def _lines(folder: Path, name: str) -> list[str]:
    curve = folder / name / "curve"
    return curve.read_text().splitlines() if curve.exists() else []


def _admin_objects() -> list[Manifest]:
    """Return the flavor of the nodes that run processes, and a queue in which others may go first."""
    nominal = NODES * GPUS_PER_NODE
    spec = {
        "quotas": [{"flavor": FLAVOR, "resource": GPU, "nominal": nominal}],
        "preemption": {"withinQueue": "LowerPriority"},
    }
    return [
        _object("ResourceFlavor", FLAVOR, {"nodeLabels": {REAL: "true"}}),
        _object("Queue", QUEUE, spec),
    ]


def _training(name: str, priority: int, folder: Path) -> Manifest:
    home = folder / name
    command = [sys.executable, "-m", "queuectl.demo.trainee", str(home / "curve"), str(PAUSE_SECONDS)]
    container = {
        "command": command,
        "env": [{"name": "PYTHONPATH", "value": str(Path(queuectl.__file__).parent.parent)}],
        "volumeMounts": [{"name": "home", "mountPath": str(home)}],
    }
    volume = {"name": "home", "hostPath": {"path": str(home), "type": "DirectoryOrCreate"}}
    checkpoint = {"path": str(home / "checkpoints"), "graceSeconds": 60}
    return _job(name, container, pods=1, gpus=GPUS_PER_NODE, volumes=[volume], priority=priority, checkpoint=checkpoint)


def _urgent() -> Manifest:
    return _job(URGENT, {"command": ["sleep", str(URGENT_SECONDS)]}, pods=2, gpus=GPUS_PER_NODE // 2, priority=1)


def _job(
    name: str, container: Manifest, *, pods: int, gpus: int, volumes: Sequence[Manifest] = (), **spec: Any
) -> Manifest:
    container = {"name": "main", "image": "none", "resources": {"limits": {GPU: gpus}}, **container}
    role = {
        "name": "worker",
        "replicas": pods,
        "template": {"spec": {"containers": [container], "volumes": [*volumes]}},
    }
    job = _object("TrainingJob", name, {"queue": QUEUE, "roles": [role], **spec})
    job["metadata"]["namespace"] = NAMESPACE
    return job


def _object(kind: str, name: str, spec: Manifest) -> Manifest:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
