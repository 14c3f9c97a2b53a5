"""Starting, repairing and ending a control plane of its own."""

import asyncio
import http.client
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from queuectl.cli import local as cli
from queuectl.kube.client import KubeClient
from queuectl.local import components, controlplane
from queuectl.local.controlplane import Running
from queuectl.local.errors import LocalError
from queuectl.local.nodes import node_manifest
from queuectl.local.prepare import create_nodes
from tests.support.eventually import eventually
from tests.support.real import Pods

GRACE = 6


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    state = tmp_path_factory.mktemp("own")
    try:
        yield state
    finally:
        controlplane.down(state, delete=True)


@pytest.fixture
def running(own: Path) -> Running:
    return controlplane.up(
        own, node_grace_seconds=GRACE, real_nodes=1, flags={"kube-controller-manager": ["--node-monitor-period=1s"]}
    )


def pids(state: Path) -> dict[str, int | None]:
    return {item.component: item.pid for item in controlplane.status(state)}


def answers(running: Running, context: ssl.SSLContext) -> int:
    host, _, port = running.server.removeprefix("https://").partition(":")
    connection = http.client.HTTPSConnection(host, int(port), timeout=5, context=context)
    try:
        connection.request("GET", "/api/v1/nodes", headers={"Authorization": f"Bearer {running.token}"})
        return connection.getresponse().status
    finally:
        connection.close()


async def condition(kube: KubeClient, node: str) -> str:
    found = await kube.request("GET", f"/api/v1/nodes/{node}")
    ready: list[str] = [c["status"] for c in found["status"].get("conditions", []) if c["type"] == "Ready"]
    return ready[0] if ready else ""


async def renewed(kube: KubeClient, node: str) -> str:
    lease = await kube.request("GET", f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{node}")
    time: str = lease["spec"]["renewTime"]
    return time


async def a_pod_runs(running: Running, name: str) -> None:
    """Scheduler and kwok both work, on nodes that were there before."""
    pods = "/api/v1/namespaces/default/pods"
    spec = {"containers": [{"name": "a", "image": "none"}]}
    async with await KubeClient.open(str(running.kubeconfig)) as kube:
        await create_nodes(kube, [node_manifest("a", gpus=4, labels={"rack": "r1"})])
        await kube.request("POST", pods, body={"metadata": {"name": name}, "spec": spec})

        async def look() -> bool:
            pod = await kube.request("GET", f"{pods}/{name}")
            return bool(pod["status"]["phase"] == "Running")

        await eventually(look, f"{name} runs", seconds=GRACE - 1)


def test_up_again_changes_nothing(running: Running, own: Path) -> None:
    before = pids(own)
    assert all(before.values())
    assert controlplane.up(own) == running
    assert pids(own) == before


def test_the_kubeconfig_is_private_and_verified(running: Running) -> None:
    assert stat.S_IMODE(running.kubeconfig.stat().st_mode) == 0o600
    assert "insecure" not in running.kubeconfig.read_text()
    assert answers(running, ssl.create_default_context(cadata=running.authority)) == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        answers(running, ssl.create_default_context())


async def test_up_restarts_what_was_killed_and_only_that(running: Running, own: Path) -> None:
    await a_pod_runs(running, "before-a-kill")
    before = pids(own)
    os.kill(before["kwok"] or 0, signal.SIGKILL)

    async def is_gone() -> bool:
        return pids(own)["kwok"] is None

    await eventually(is_gone, "kwok is seen as gone")
    controlplane.up(own)
    after = pids(own)
    assert after.pop("kwok") not in (None, before.pop("kwok"))
    assert after == before
    await a_pod_runs(running, "after-a-kill")


@pytest.mark.parametrize("kill", [False, True])
async def test_the_api_server_comes_back_with_port_and_data(running: Running, own: Path, *, kill: bool) -> None:
    name = f"kept-{kill}".lower()
    async with await KubeClient.open(str(running.kubeconfig)) as kube:
        await kube.request("POST", "/api/v1/namespaces", body={"metadata": {"name": name}})
        controlplane.stop(own, "kube-apiserver", kill=kill)
        with pytest.raises(ConnectionRefusedError):
            answers(running, ssl.create_default_context(cadata=running.authority))
        others = {key: pid for key, pid in pids(own).items() if key != "kube-apiserver"}
        assert all(others.values())
        controlplane.start(own, "kube-apiserver", reconnect=kill)
        assert (await kube.request("GET", f"/api/v1/namespaces/{name}"))["metadata"]["name"] == name
    if kill:
        await a_pod_runs(running, "after-an-outage")
    after = pids(own)
    assert all(after.values())
    assert {name for name, pid in others.items() if after[name] != pid} == (
        set(components.NAMES[2:]) if kill else set()
    )


async def test_nodes_stay_ready_while_kwok_runs_and_only_then(running: Running, own: Path) -> None:
    async with await KubeClient.open(str(running.kubeconfig)) as kube:
        await create_nodes(kube, [node_manifest("a", gpus=4, labels={"rack": "r1"})])
        node = await kube.request("GET", "/api/v1/nodes/a")
        assert node["status"]["allocatable"]["nvidia.com/gpu"] == "4"
        assert node["metadata"]["labels"]["nvidia.com/gpu.count"] == "4"
        assert node["metadata"]["labels"]["rack"] == "r1"

        seen: set[str] = set()

        async def renewed_often() -> bool:  # each renewal is a quarter of the grace
            assert await condition(kube, "a") == "True"
            seen.add(await renewed(kube, "a"))
            return len(seen) > 8

        await eventually(renewed_often, "two graces of renewals", seconds=60)

        async def is_unknown() -> bool:
            return await condition(kube, "a") == "Unknown"

        async def is_ready() -> bool:
            return await condition(kube, "a") == "True"

        controlplane.pause(own, "kwok")
        await eventually(is_unknown, "node without heartbeat", seconds=60)
        controlplane.resume(own, "kwok")
        await eventually(is_ready, "node with heartbeat again", seconds=60)


async def test_real_nodes_run_pods_and_are_missed_without_their_agent(running: Running, own: Path) -> None:
    (node,) = running.real_nodes
    async with await KubeClient.open(str(running.kubeconfig)) as kube:
        pods = Pods(kube, "default", node)
        await pods.run("real", "echo runs; sleep 600")
        await pods.until_says("real", "runs")
        os.kill(pids(own)["agent"] or 0, signal.SIGKILL)

        async def is_unknown() -> bool:
            return await condition(kube, node) == "Unknown"

        await eventually(is_unknown, "node without heartbeat", seconds=60)
        controlplane.up(own)
        assert (await pods.until("real", "Failed"))["status"]["reason"] == "NodeAgentRestarted"

        async def is_ready() -> bool:
            return await condition(kube, node) == "True"

        await eventually(is_ready, "node with heartbeat again", seconds=60)
        await pods.delete("real")


def test_other_options_need_a_down_first(running: Running, own: Path) -> None:
    with pytest.raises(LocalError, match=r"evict_seconds: 300 is in use .* run `down` first"):
        controlplane.up(own, evict_seconds=5)


def test_a_wrong_component_is_named(running: Running, own: Path) -> None:
    with pytest.raises(LocalError, match=r"'etc' is no component; known are etcd, "):
        controlplane.stop(own, "etc")


def test_the_command_line(running: Running, own: Path) -> None:
    command = CliRunner()
    shown = command.invoke(cli.app, ["status", "--state", str(own), "-o", "json"])
    assert shown.exit_code == 0
    assert {item["component"]: item["pid"] for item in json.loads(shown.stdout)} == pids(own)

    up = command.invoke(cli.app, ["up", "--state", str(own), "--nodes", "2"])
    assert up.stdout == f"export KUBECONFIG={running.kubeconfig}\n"
    assert running.server in up.stderr
    assert up.stderr.splitlines()[-1].endswith("queuectl controller")

    async def nodes() -> set[str]:
        async with await KubeClient.open(str(running.kubeconfig)) as kube:
            found: dict[str, Any] = await kube.request("GET", "/api/v1/nodes")
            return {item["metadata"]["name"] for item in found["items"]}

    assert {"node-0001", "node-0002"} <= asyncio.run(nodes())


def test_down_leaves_no_process_and_no_port_and_no_stranger_is_hurt(running: Running, own: Path) -> None:
    before = controlplane.status(own)
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        # As if kwok had died long ago and somebody else had its pid by now.
        controlplane.stop(own, "kwok")
        record = json.loads((own / "state.json").read_text())
        record["processes"]["kwok"] = {"pid": stranger.pid, "born": "earlier"}
        (own / "state.json").write_text(json.dumps(record))

        down = CliRunner().invoke(cli.app, ["down", "--state", str(own)])
        assert (down.exit_code, down.stdout) == (0, "")
        assert down.stderr.startswith("Ended etcd, ")
        assert "kwok" not in down.stderr
        again = CliRunner().invoke(cli.app, ["down", "--state", str(own)])
        assert again.stderr == "Nothing ran.\n"
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(timeout=10)
    for item in before:
        with pytest.raises(ProcessLookupError):
            os.kill(item.pid or 0, 0)
        assert item.port is None or components.is_free(item.port)
    assert not any(pids(own).values())
    controlplane.down(own)
    assert CliRunner().invoke(cli.app, ["status", "--state", str(own)]).exit_code == 1


def test_a_component_that_dies_shows_its_log(own: Path) -> None:
    try:
        with pytest.raises(LocalError, match=r"kwok ended on its own; the end of .*kwok\.log:\n(.*\n)*.*no-such-flag"):
            controlplane.up(own, flags={"kwok": ["--no-such-flag"]})
        assert pids(own)["kwok"] is None
    finally:
        controlplane.down(own)


def test_data_stays_and_a_taken_port_is_left_to_its_owner(own: Path) -> None:
    first = controlplane.up(own, flags={})
    controlplane.down(own)
    port = int(first.server.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        second = controlplane.up(own)
    assert second.server != first.server
    assert second.authority == first.authority
    context = ssl.create_default_context(cadata=second.authority)
    assert answers(second, context) == 200
    controlplane.down(own, delete=True)
    assert [path.name for path in own.iterdir()] == [".lock"]
