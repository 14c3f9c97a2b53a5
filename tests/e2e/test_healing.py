"""Nodes that fall silent or go under gangs, on a real control plane: the gangs go elsewhere, the nodes are not trusted.

Nodes that fall silent run their pods as real processes: their agent is stopped, and these run on.
"""

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from queuectl.kube.client import MERGE_PATCH, KubeClient
from queuectl.kube.names import SUSPECT, pods_path
from queuectl.local import controlplane
from queuectl.local.agent.node import PRETENDED
from queuectl.local.controlplane import Running
from queuectl.local.nodes import node_manifest
from queuectl.local.prepare import create_nodes, nodes_are_ready, prepare
from tests.support import ledger
from tests.support.commands import Commands
from tests.support.eventually import eventually
from tests.support.real import Agent
from tests.support.stage import GPU, STAGE_LABEL, Object, Stage
from tests.trainer.training import SCRIPT, STEPS, Training

GRACE = 10  # seconds without a heartbeat after which a node is not ready
HOME = "/training"
LEAVES = {"QUEUECTL_NODE_NOT_READY": "3"}
PATIENT = {**LEAVES, "QUEUECTL_SUSPECT_FIRST": "3600"}


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A control plane of its own, that misses heartbeats soon."""
    state = tmp_path_factory.mktemp("control-plane")
    try:
        yield controlplane.up(
            state, node_grace_seconds=GRACE, flags={"kube-controller-manager": ["--node-monitor-period=1s"]}
        )
    finally:
        controlplane.down(state, delete=True)


@pytest.fixture(scope="module")
async def kube(control_plane: Running) -> AsyncIterator[KubeClient]:
    async with await KubeClient.open(str(control_plane.kubeconfig)) as client:
        await prepare(client)
        yield client


Start = Callable[[str], Any]


@pytest.fixture
async def real(mounts: None, stage: Stage, control_plane: Running, tmp_path: Path) -> AsyncIterator[Start]:
    """Start a node of 4 GPUs of the stage's that runs pods as processes, with an agent of its own."""
    agents: list[Agent] = []

    async def start(name: str) -> Agent:
        folder = tmp_path / name
        folder.mkdir()
        agent = Agent(control_plane, folder, [f"{stage.name}-{name}"], gpus=4, lease_seconds=GRACE)
        agents.append(agent)
        agent.start()
        await nodes_are_ready(stage.client, agent.nodes)
        await stage.adopt(agent.nodes)
        return agent

    yield start
    for agent in agents:
        agent.send(signal.SIGCONT)
        agent.end()


async def condition(stage: Stage, node: str, kind: str) -> Object:
    found = await stage.client.request("GET", f"/api/v1/nodes/{node}")
    return next(
        (c for c in found["status"].get("conditions") or () if c["type"] == kind), {"status": "", "message": ""}
    )


async def until_condition(stage: Stage, node: str, kind: str, *statuses: str) -> str:
    """Wait until a node's condition has one of these statuses; return its message."""

    async def look() -> Object | None:
        found = await condition(stage, node, kind)
        return found if found["status"] in statuses else None

    return str((await eventually(look, f"condition {kind} of {node} is {statuses}")).get("message", ""))


async def until_told(stage: Stage, node: str, reason: str) -> str:
    """Wait until an event of a node bears the reason; return its note."""

    async def look() -> str | None:
        found = await stage.client.request("GET", "/apis/events.k8s.io/v1/namespaces/default/events")
        mine = (
            item for item in found["items"] if item["regarding"] == {**item["regarding"], "kind": "Node", "name": node}
        )
        return next((str(item["note"]) for item in mine if item["reason"] == reason), None)

    return await eventually(look, f"node {node} has an event {reason}")


async def nodes_of(stage: Stage, job: str, attempt: int) -> set[str]:
    return {
        pod["spec"]["nodeName"]
        for pod in await stage.pods(job)
        if pod["metadata"]["labels"]["queuectl.dev/attempt"] == str(attempt)
    }


def gang(stage: Stage, name: str, pods: int, command: list[str] | None = None, **more: Any) -> Object:
    """Return a gang whose pods take all GPUs of a node each; 1 s to stop."""
    job = stage.job(name, pods, 4, pod={"terminationGracePeriodSeconds": 1, **more.pop("pod", {})}, **more)
    container = job["spec"]["roles"][0]["template"]["spec"]["containers"][0]
    container["command"] = command or ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]
    return job


async def test_a_gang_leaves_a_silent_node_and_what_may_still_run_there_keeps_its_room(
    stage: Stage, real: Start
) -> None:
    """The node is back later, and suspect; that outlives the controller, and ends when somebody forgives it."""
    controller = stage.controller(env=PATIENT)
    controller.start()
    agent = await real("silent")
    [silent] = agent.nodes
    first = (await stage.nodes(1, gpus=4, gpu_product=PRETENDED))[0]
    await stage.queue(16)
    await stage.create(gang(stage, "gang", 2))
    await stage.until_phase("gang", "Running")
    assert await nodes_of(stage, "gang", 1) == {silent, first}
    await stage.nodes(2, gpus=4, gpu_product=PRETENDED, first=1)

    agent.send(signal.SIGSTOP)
    await stage.until_job("gang", lambda s: s.get("attempt") == 2 and s["phase"] == "Running", "runs again")
    assert silent not in await nodes_of(stage, "gang", 2)
    assert "has not been ready" in await stage.until_event("gang", "NodeNotReady")
    assert await ledger.rows(stage, "SELECT name, failures FROM workload") == [{"name": "gang", "failures": 0}]
    # The pod is still there, as is its process, and nobody else may have what it holds.
    [stuck] = [pod for pod in await stage.pods("gang") if pod["spec"].get("nodeName") == silent]
    assert stuck["metadata"]["deletionTimestamp"]
    assert agent.processes()
    room = "SELECT room, reserved FROM node_room WHERE node = :node AND resource = :gpu"
    assert await ledger.rows(stage, room, node=silent, gpu=GPU) == [{"room": 0, "reserved": 0}]
    assert await ledger.audit(stage) == []
    assert "has not been ready" in await until_condition(stage, silent, SUSPECT, "True")
    assert "has not been ready" in await until_told(stage, silent, "NodeSuspect")

    agent.send(signal.SIGCONT)
    await until_condition(stage, silent, "Ready", "True")

    async def gone() -> bool:
        return not any(pod["spec"].get("nodeName") == silent for pod in await stage.pods("gang"))

    await eventually(gone, "the agent has stopped what was told to stop")
    controller.kill()
    controller.start()
    await stage.create(gang(stage, "next", 2))
    waits = await stage.until_reason("next", "WaitingForNodes")
    assert f"1 node that it could use is avoided: {silent} (until" in waits["status"]["message"]

    queuectl = Commands(stage.kubeconfig)
    shown = next(line for line in (await queuectl("nodes", "-o", "wide")).out.splitlines() if line.startswith(silent))
    assert "Ready,Suspect" in shown
    assert "offence 1 in a row" in shown
    assert (await queuectl("forgive", silent)).out == f"node/{silent} forgiven\n"
    await stage.until_phase("next", "Running")
    assert silent in await nodes_of(stage, "next", 1)
    await until_told(stage, silent, "NodeTrusted")
    await until_condition(stage, silent, SUSPECT, "False")
    assert (await queuectl("forgive", silent)).out == f"node/{silent} not suspect\n"
    assert (await queuectl("forgive", "nowhere", code=3)).err
    forgiven = "SELECT count(*) AS count FROM offence WHERE forgiven_at IS NOT NULL AND node = :node"
    assert await ledger.rows(stage, forgiven, node=silent) == [{"count": 1}]


async def test_what_a_stuck_pod_holds_is_free_once_its_node_is_tainted_out_of_service(
    stage: Stage, real: Start
) -> None:
    stage.controller(env=LEAVES).start()
    agent = await real("lost")
    [lost] = agent.nodes
    await stage.nodes(1, gpus=4, gpu_product=PRETENDED)
    await stage.queue(12)
    await stage.create(gang(stage, "gang", 2))
    await stage.until_phase("gang", "Running")
    await stage.nodes(1, gpus=4, gpu_product=PRETENDED, first=1)
    agent.send(signal.SIGSTOP)
    await stage.until_job("gang", lambda s: s.get("attempt") == 2 and s["phase"] == "Running", "runs again")

    async def room() -> int:
        query = "SELECT room FROM node_room WHERE node = :node AND resource = :gpu"
        return int((await ledger.rows(stage, query, node=lost, gpu=GPU))[0]["room"])

    assert await room() == 0
    taint = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
    node = await stage.client.request("GET", f"/api/v1/nodes/{lost}")
    body = {"spec": {"taints": [*(node["spec"].get("taints") or ()), taint]}}
    await stage.client.request("PATCH", f"/api/v1/nodes/{lost}", body=body, content_type=MERGE_PATCH)

    async def free() -> bool:
        return await room() == 4

    await eventually(free, "its room is free")


def trains(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and any("digits.py" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


async def test_a_training_on_a_silent_node_goes_on_elsewhere_and_the_one_that_still_runs_saves_nothing_more(
    stage: Stage, real: Start, tmp_path: Path
) -> None:
    undisturbed, training = Training(tmp_path / "undisturbed"), Training(tmp_path / "training")
    undisturbed.run()
    controller = stage.controller(env=LEAVES)
    controller.start()
    await stage.queue(16)
    first = await real("first")
    command = [
        *(
            sys.executable,
            str(SCRIPT),
            f"{HOME}/checkpoints",
            "--steps",
            str(STEPS),
            "--every",
            "20",
            "--pause",
            "0.6",
        ),
        *("--fast", f"{HOME}/fast", "--log", f"{HOME}/log", "--result", f"{HOME}/result.npz"),
    ]
    job = gang(
        stage, "training", 1, command, pod={"volumes": [{"name": "home", "hostPath": {"path": str(training.home)}}]}
    )
    container = job["spec"]["roles"][0]["template"]["spec"]["containers"][0]
    container["volumeMounts"] = [{"name": "home", "mountPath": HOME}]
    container["env"] = [
        {"name": "PYTHONPATH", "value": os.pathsep.join(sys.path)},
        {"name": "OPENBLAS_NUM_THREADS", "value": "1"},
    ]
    await stage.create(job)

    async def taken(attempt: int, step: int) -> bool:
        return any(a == attempt and s >= step for a, s, _ in training.steps())

    await eventually(lambda: taken(1, 23), "step 23 is taken")
    await real("second")
    first.send(signal.SIGSTOP)
    await eventually(lambda: taken(2, 1), "the next attempt takes steps")

    async def fenced() -> bool:
        return not any(trains(process) for process in first.processes())

    await eventually(fenced, "the one before finds that it is superseded, and ends")
    (training.home / "fast").touch()
    await stage.until_phase("training", "Succeeded")
    training.is_as_undisturbed(undisturbed)
    resumed = min(step for attempt, step, _ in training.steps() if attempt == 2)
    assert resumed > 20  # where its predecessor had saved last
    first.send(signal.SIGCONT)


async def test_a_node_that_was_deleted_under_a_gang_is_avoided_when_it_is_back_until_its_time_is_over(
    stage: Stage,
) -> None:
    controller = stage.controller(env={**LEAVES, "QUEUECTL_SUSPECT_FIRST": "25"})
    controller.start()
    [kept, lost] = await stage.nodes(2, gpus=4)
    await stage.queue(16)
    await stage.create(gang(stage, "gang", 2))
    await stage.until_phase("gang", "Running")
    await stage.client.request("DELETE", f"/api/v1/nodes/{lost}")
    await stage.until_event("gang", "NodeLost")
    await create_nodes(stage.client, [node_manifest(lost, gpus=4, labels={STAGE_LABEL: stage.name})])
    waits = await stage.until_job("gang", lambda s: "avoided" in s.get("message", ""), "says that a node is avoided")
    assert waits["status"]["reason"] == "WaitingForNodes"
    assert f"{lost} (until" in waits["status"]["message"]
    await stage.until_job("gang", lambda s: s.get("attempt") == 2 and s["phase"] == "Running", "runs again")
    assert await nodes_of(stage, "gang", 2) == {kept, lost}
    await until_told(stage, lost, "NodeTrusted")


async def test_a_job_that_crashes_everywhere_leaves_no_node_suspect(stage: Stage) -> None:
    """Of its first node that is thought for as long as it has crashed nowhere else."""
    controller = stage.controller(env=PATIENT)
    controller.start()
    names = await stage.nodes(3, gpus=4)
    await stage.queue(16)
    crashes = {"local.queuectl.dev/run-seconds": "0", "local.queuectl.dev/exit-code": "1"}
    await stage.create(gang(stage, "buggy", 1, annotations=crashes, backoffLimit=2))
    await stage.until_phase("buggy", "Failed")
    [suspect] = {
        row["node"] for row in await ledger.rows(stage, "SELECT node FROM offence GROUP BY node HAVING count(*) = 2")
    }
    await until_told(stage, suspect, "NodeSuspect")
    await until_told(stage, suspect, "NodeTrusted")
    for name in names:
        await until_condition(stage, name, SUSPECT, "", "False")


async def test_what_people_do_speaks_against_no_node(stage: Stage) -> None:
    """A cordon, an eviction, a pod that is deleted, a job that is."""
    controller = stage.controller(env=PATIENT)
    controller.start()
    await stage.nodes(2, gpus=4)
    await stage.queue(16)
    for number, name in enumerate(("evicted", "deleted", "cancelled")):
        await stage.create(gang(stage, name, 1))
        await stage.until_phase(name, "Running")
        [pod] = await stage.pods(name)
        meta, place = {"name": pod["metadata"]["name"], "namespace": stage.namespace}, pod["spec"]["nodeName"]
        if number == 0:
            body: Object = {"spec": {"unschedulable": True}}
            await stage.client.request("PATCH", f"/api/v1/nodes/{place}", body=body, content_type=MERGE_PATCH)
            eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
            await stage.client.request("POST", pods_path(stage.namespace, meta["name"]) + "/eviction", body=eviction)
        elif number == 1:
            await stage.delete_pod(meta["name"])
        if number < 2:
            await stage.until_job(name, lambda s: s.get("attempt") == 2 and s["phase"] == "Running", "runs again")
        await stage.delete_job(name)
        await stage.until_gone(name)
    assert await ledger.rows(stage, "SELECT * FROM offence") == []
