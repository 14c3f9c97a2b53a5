"""Nodes that run pods as processes: an agent of a test's own, and pods for it."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from queuectl.kube.client import ApiError, KubeClient
from queuectl.kube.names import pods_path
from queuectl.local.agent.command import mounts_work
from queuectl.local.controlplane import Running
from queuectl.local.prepare import nodes_are_ready
from tests.support.eventually import eventually

Object = dict[str, Any]


@pytest.fixture(scope="session")
async def mounts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Leave out what needs folders inside of containers, where this machine allows none."""
    if not await mounts_work(tmp_path_factory.mktemp("mounts")):
        pytest.skip("this machine allows no mount namespace")


class Agent:
    """A node agent process."""

    def __init__(
        self,
        running: Running,
        folder: Path,
        nodes: Sequence[str],
        *,
        gpus: int = 0,
        under: Sequence[str] = (),
        lease_seconds: int = 40,
    ) -> None:
        self.nodes = nodes
        self.log = folder / "agent.log"
        self._command = [
            *under,
            *(sys.executable, "-m", "queuectl.local.agent", f"--kubeconfig={running.kubeconfig}"),
            *(f"--folder={folder / 'agent'}", f"--certificates={running.state / 'certs'}", f"--gpus={gpus}"),
            f"--lease-seconds={lease_seconds}",
            *nodes,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @asynccontextmanager
    async def running(self, kube: KubeClient) -> AsyncIterator[Self]:
        """Have it run, and its nodes be ready; they are removed in the end."""
        try:
            self.start()
            await nodes_are_ready(kube, self.nodes)
            yield self
        finally:
            self.end()
            for node in self.nodes:
                await kube.request("DELETE", f"/api/v1/nodes/{node}")

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; what it has started runs on."""
        assert self._process is not None
        self._process.send_signal(number)

    def processes(self) -> list[psutil.Process]:
        """All that it has started, and what these have."""
        assert self._process is not None
        return psutil.Process(self._process.pid).children(recursive=True)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send it a signal, and wait until it is gone."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)
                raise


class Pods:
    """Pods of one namespace, bound to a node from the first."""

    def __init__(self, kube: KubeClient, namespace: str, node: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._node = node

    def path(self, name: str, *more: str) -> str:
        return "/".join((pods_path(self._namespace, name), *more))

    async def run(
        self,
        name: str,
        script: str,
        *,
        annotations: Mapping[str, str] = {},
        labels: Mapping[str, str] = {},
        **more: Any,
    ) -> None:
        """Create a pod of one container, a shell script; `more` goes into its spec, but these go into the container."""
        inside = {
            "env",
            "envFrom",
            "volumeMounts",
            "readinessProbe",
            "livenessProbe",
            "startupProbe",
            "lifecycle",
            "terminationMessagePolicy",
            "ports",
        }
        container = {"name": "main", "image": "none", "command": ["sh", "-c", script]}
        container |= {key: more.pop(key) for key in inside & more.keys()}
        spec = {"nodeName": self._node, "restartPolicy": "Never", "containers": [container], **more}
        meta = {"name": name, "annotations": dict(annotations), "labels": dict(labels)}
        await self._kube.request("POST", pods_path(self._namespace), body={"metadata": meta, "spec": spec})

    async def get(self, name: str) -> Object | None:
        try:
            found: Object = await self._kube.request("GET", self.path(name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return found

    async def until(self, name: str, phase: str) -> Object:
        """Wait until a pod is in a phase; return it."""

        async def look() -> Object | None:
            pod = await self.get(name)
            return pod if pod and pod["status"]["phase"] == phase else None

        return await eventually(look, f"pod {name} is {phase}")

    async def until_gone(self, name: str) -> None:
        async def look() -> bool:
            return await self.get(name) is None

        await eventually(look, f"pod {name} is gone")

    async def delete(self, name: str, **options: Any) -> None:
        await self._kube.request("DELETE", self.path(name), body=options)

    async def logs(self, name: str, **params: str) -> str:
        return (await self._kube.request_raw("GET", self.path(name, "log"), params=params, accept="*/*")).decode()

    async def until_says(self, name: str, text: str) -> None:
        async def look() -> bool:
            try:
                return text in await self.logs(name)
            except ApiError:
                return False  # not started yet

        await eventually(look, f"pod {name} says {text!r}")


def ended(pod: Object, container: int = 0) -> Object:
    """Return how a container ended."""
    state: Object = pod["status"]["containerStatuses"][container]["state"]["terminated"]
    return state


def condition(thing: Object, kind: str) -> str:
    """Return the status of a condition, empty if there is none."""
    return next((c["status"] for c in thing["status"].get("conditions") or () if c["type"] == kind), "")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
