"""A rolling upgrade of the drivers of 16 nodes, while gangs of 32 GPUs really train there.

The nodes are the node agent's: every pod is a process, and its GPUs are only pretended. What the GPU Operator does is done
by a double of it, by the same labels.
"""

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from queuectl.core.maintenance import UPGRADE_SKIP
from queuectl.kube.client import KubeClient
from queuectl.local.controlplane import Running
from tests.e2e.test_training import ADDRESS, EVERY, HOME, free_port, until_step
from tests.support import ledger
from tests.support.eventually import eventually
from tests.support.gpu_operator import DRIVER, GpuOperator
from tests.support.maintenance import maintenance_of
from tests.support.real import Agent
from tests.support.stage import STAGE_LABEL, Object, Stage
from tests.trainer.training import SCRIPT, STEPS, Training

NODES, GANGS, PODS, GPUS = 16, 4, 4, 8
PAUSE = 1.5  # seconds that a step takes longer, until the upgrade is over
LIMIT_SECONDS = 300.0


@pytest.fixture
async def nodes(
    mounts: None, stage: Stage, kube: KubeClient, control_plane: Running, tmp_path: Path
) -> AsyncIterator[list[str]]:
    names = [f"{stage.name}-real-{number:02}" for number in range(NODES)]
    async with Agent(control_plane, tmp_path, names, gpus=GPUS).running(kube):
        yield names


async def train(stage: Stage, training: Training, name: str) -> None:
    port = free_port()
    command = [
        *("python", str(SCRIPT), f"{HOME}/checkpoints", "--steps", str(STEPS), "--every", str(EVERY)),
        *("--pause", str(PAUSE), "--fast", f"{HOME}/fast", "--log", f"{HOME}/log", "--result", f"{HOME}/result.npz"),
        *("--peers", str(free_port())),
    ]
    env = [
        {"name": "PYTHONPATH", "value": os.pathsep.join(sys.path)},
        {"name": "OPENBLAS_NUM_THREADS", "value": "1"},
        {"name": "QUEUECTL_CHECKPOINT_PORT", "value": str(port)},
        ADDRESS,
    ]
    pod = {
        "volumes": [{"name": "home", "hostPath": {"path": str(training.home)}}],
        "terminationGracePeriodSeconds": 10,
    }
    rules = {"signal": "HTTP", "http": {"port": port}, "graceSeconds": 60, "path": f"{HOME}/checkpoints"}
    job = stage.job(name, PODS, GPUS, pod=pod, checkpoint=rules)
    container = job["spec"]["roles"][0]["template"]["spec"]["containers"][0]
    container |= {"command": command, "env": env, "volumeMounts": [{"name": "home", "mountPath": HOME}]}
    await stage.create(job)


async def test_a_rolling_driver_upgrade_of_16_nodes_with_gangs_of_32_gpus(
    stage: Stage, nodes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = Training(tmp_path / "undisturbed", ranks=PODS)
    undisturbed.run()
    stage.controller().start()
    await stage.queue(NODES * GPUS)
    names = [f"gang-{number}" for number in range(GANGS)]
    gangs = {name: Training(tmp_path / name, ranks=PODS) for name in names}
    operator = GpuOperator(stage.client, f"{STAGE_LABEL}={stage.name}")
    async with maintenance_of(stage) as maintenance, operator.running():
        for node in nodes:
            labels = {STAGE_LABEL: stage.name, DRIVER: "570"}
            await maintenance.patch_node(node, {"metadata": {"labels": labels}})
        for name, training in gangs.items():
            await train(stage, training, name)
        for training in gangs.values():
            await until_step(training, 3)

        container: Object = {"name": "test", "image": "none", "command": ["sh", "-c", "exit 0"]}
        container["resources"] = {"limits": {"nvidia.com/gpu": GPUS}}
        template = {"spec": {"containers": [container]}}
        test = {"namespace": stage.namespace, "timeoutSeconds": 60, "template": template}
        await maintenance.begin(work="DriverUpgrade", maxUnavailable="25%", reason="driver 580", test=test)

        async def held() -> bool:
            return all([UPGRADE_SKIP in (await maintenance.node(node))["metadata"]["labels"] for node in nodes])

        await eventually(held, "all nodes are held back")
        operator.version = "580"
        await maintenance.until("Finished", seconds=LIMIT_SECONDS)
        assert await maintenance.phases() == {"Released": NODES}
        [canary] = [node["name"] for node in (await maintenance.nodes()).values() if node.get("canary")]
        await maintenance.until_as_before()
        for name in gangs:
            await stage.until_phase(name, "Running")
    assert all([(await maintenance.node(node))["metadata"]["labels"][DRIVER] == "580" for node in nodes])

    upgraded = operator.nodes_in("upgrade-done")[NODES:]
    assert upgraded[0] == canary
    assert sorted(upgraded) == nodes, "each was upgraded once"
    begun = [(step.node, step.state) for step in operator.steps]
    assert begun.index((canary, "upgrade-done"), 2 * NODES) < min(
        begun.index((node, "cordon-required")) for node in nodes if node != canary
    )
    loaded = [step for step in operator.steps if step.state in {"cordon-required", "pod-restart-required"}]
    assert {step.pods for step in loaded} == {()}, (
        "nobody had a GPU there when the driver was loaded, or was to be moved"
    )

    for training in gangs.values():
        (training.home / "fast").touch()
    for name, training in gangs.items():
        job = await stage.until_phase(name, "Succeeded", "Failed")
        assert (job["status"]["phase"], job["status"]["failures"], job["status"]["attempt"]) == ("Succeeded", 0, 2)
        training.is_as_undisturbed(undisturbed)
        assert training.lost_steps() == [0]
    query = """
        SELECT w.name, i.cause, i.answered, i.gpu_seconds FROM interruption i JOIN workload w ON w.uid = i.workload_uid
        WHERE w.namespace = :namespace
    """
    interruptions = await ledger.rows(stage, query, namespace=stage.namespace)
    assert Counter(one["name"] for one in interruptions) == dict.fromkeys(names, 1), "no gang had to go twice"
    assert {(one["cause"], one["answered"]) for one in interruptions} == {("NodeMaintenance", True)}
    lost = sum(one["gpu_seconds"] for one in interruptions)
    assert lost <= GANGS * PODS * GPUS * 2 * PAUSE, "what was saved when asked is all but the last moment"
    with capsys.disabled():
        sys.stdout.write(f"\n{NODES} drivers upgraded, {len(interruptions)} evictions, {lost} GPU-seconds lost\n")
