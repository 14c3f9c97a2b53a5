"""Real training on the real control plane: preempted, killed, disturbed in all ways, it ends as if nothing had been."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from queuectl.kube.client import MERGE_PATCH, KubeClient
from queuectl.kube.names import pods_path
from queuectl.local.controlplane import Running
from queuectl.local.prepare import nodes_are_ready
from queuectl.trainer.checkpoints import Folder
from tests.support import ledger
from tests.support.commands import Commands
from tests.support.eventually import eventually
from tests.support.real import Agent, is_alive
from tests.support.stage import Object, Stage
from tests.trainer.training import SCRIPT, STEPS, Training

EVERY = 20
PAUSE = 0.15  # seconds that a step takes longer, until the training may be fast
HOME = "/training"  # of the training, as its containers see it
ADDRESS = {"name": "QUEUECTL_CHECKPOINT_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


@pytest.fixture(scope="module")
async def agent(
    mounts: None, kube: KubeClient, control_plane: Running, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Agent]:
    async with Agent(control_plane, tmp_path_factory.mktemp("agent"), ["training"], gpus=2).running(kube) as agent:
        yield agent


@pytest.fixture
async def stage(live: Stage, agent: Agent) -> AsyncIterator[Stage]:
    """Open a stage on the agent's node, in a queue in which others go first; its pods may tell of themselves."""
    rbac, meta = "rbac.authorization.k8s.io", {"name": "tells", "namespace": live.namespace}
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}
    await live.create({"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": [rule]})
    who = {
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": live.namespace}],
        "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "tells"},
    }
    await live.create({"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": meta, **who})
    await live.adopt(["training"])
    await live.queue(2, preemption={"withinQueue": "LowerPriority"})
    yield live
    await live.end_jobs()
    await live.adopt(["training"], mine=False)  # the stage removes nodes that are its own


async def change_node(stage: Stage, node: str, body: Object) -> None:
    await stage.client.request("PATCH", f"/api/v1/nodes/{node}", body=body, content_type=MERGE_PATCH)


@pytest.fixture
def training(tmp_path: Path) -> Training:
    """What a training job leaves behind: it runs in pods, and saves each 20 steps without being asked."""
    return Training(tmp_path / "training")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


async def train(
    stage: Stage, training: Training, *options: str, pods: int = 1, restarts: str = "Never", **checkpoint: Any
) -> None:
    """Submit it as the job `low`, with as many GPUs as pods, and wait until it has taken some steps."""
    port = free_port()
    if checkpoint["signal"] == "HTTP":
        checkpoint["http"] = {"port": port}
    if checkpoint["signal"] == "Exec":
        checkpoint["exec"] = {"command": ["python", "-m", "queuectl.trainer"]}
    command = [
        *("python", str(SCRIPT), f"{HOME}/checkpoints", "--steps", str(STEPS), "--every", str(EVERY)),
        *("--pause", str(PAUSE), "--fast", f"{HOME}/fast", "--log", f"{HOME}/log", "--result", f"{HOME}/result.npz"),
        *("--peers", str(free_port()), *options),
    ]
    env: list[Object] = [
        {"name": "PYTHONPATH", "value": os.pathsep.join(sys.path)},
        {"name": "OPENBLAS_NUM_THREADS", "value": "1"},
    ]
    if checkpoint["signal"] in {"HTTP", "Exec"}:
        env += [{"name": "QUEUECTL_CHECKPOINT_PORT", "value": str(port)}, ADDRESS]
    pod = {
        "serviceAccountName": "default",
        "volumes": [{"name": "home", "hostPath": {"path": str(training.home)}}],
        "terminationGracePeriodSeconds": 10,
        "restartPolicy": restarts,
    }
    job = stage.job("low", pods, 1, pod=pod, checkpoint={"path": f"{HOME}/checkpoints"} | checkpoint)
    container = job["spec"]["roles"][0]["template"]["spec"]["containers"][0]
    container |= {"command": command, "env": env, "volumeMounts": [{"name": "home", "mountPath": HOME}]}
    await stage.create(job)
    await until_step(training, EVERY + 3)


async def until_step(training: Training, step: int) -> None:
    async def taken() -> bool:
        return any(number >= step for _, number, _ in training.steps())

    await eventually(taken, f"step {step} is taken")


async def preempt(stage: Stage) -> Object:
    """Have an urgent gang take all room, and return the job `low` once it is back in its queue."""
    job = stage.job("high", 2, 1, priority=5)
    job["spec"]["roles"][0]["template"]["spec"]["containers"][0]["command"] = ["sleep", "600"]
    await stage.create(job)
    await stage.until_phase("high", "Running")
    return await stage.until_phase("low", "Pending")


async def go_on(stage: Stage, training: Training) -> Object:
    """Let the urgent gang go, if there is one, and the training come to its end, as fast as it can."""
    (training.home / "fast").touch()
    if await stage.get_job("high"):
        await stage.delete_job("high")
    return await stage.until_phase("low", "Succeeded", "Failed")


def repeated(training: Training, attempt: int = 2) -> int:
    """Return how many steps an attempt has taken that the one before had taken, too."""
    last = max(step for number, step, _ in training.steps() if number == attempt - 1)
    return last + 1 - min(step for number, step, _ in training.steps() if number == attempt)


async def interruptions(stage: Stage) -> list[dict[str, Any]]:
    """Return what the ledger says of the interruptions of `low`."""
    query = """
        SELECT i.*, a.running_at, a.asked_at FROM interruption i JOIN workload w ON w.uid = i.workload_uid
        JOIN attempt a ON a.workload_uid = i.workload_uid AND a.number = i.attempt
        WHERE w.namespace = :namespace AND w.name = 'low'
    """
    return await ledger.rows(stage, query, namespace=stage.namespace)


async def is_told(stage: Stage, low: Object, training: Training, gpus: int = 1) -> dict[str, Any]:
    """See that ledger and status say of an interruption what the training's own files do; return what the ledger says."""
    [one], newest = await interruptions(stage), training.newest()
    assert newest is not None
    assert one["saved_step"] == newest.step
    assert abs(one["saved_at"].timestamp() - newest.at) < 0.001
    assert one["gpu_seconds"] == gpus * max(0, round((one["at"] - one["saved_at"]).total_seconds()))
    said = low["status"]["lastCheckpoint"]
    assert (said["step"], said["attempt"]) == (newest.step, 1)
    assert said["path"] == f"{HOME}/checkpoints/{newest.path.name}"
    assert low["status"].get("lostSeconds", 0) == one["gpu_seconds"]
    return one


@pytest.mark.parametrize("how", ["SigTerm", "Annotation", "HTTP", "Exec", "File"])
async def test_who_saves_when_asked_loses_no_step(
    stage: Stage, training: Training, undisturbed: Training, how: str
) -> None:
    rules: Object = {"signal": how}
    if how == "File":
        rules = {"signal": "Annotation", "answer": "File", "file": f"{HOME}/checkpoints/latest"}
    await train(stage, training, graceSeconds=60, **rules)
    low = await preempt(stage)
    one = await is_told(stage, low, training)
    assert (one["cause"], one["answered"], one["gpu_seconds"]) == ("Preempted", True, 0)
    assert training.steps()[-1][1] == one["saved_step"]
    assert low["status"]["failures"] == 0
    await stage.until_event("low", "Checkpointed")
    done = await go_on(stage, training)
    assert done["status"]["phase"] == "Succeeded", json.dumps(done["status"])
    assert repeated(training) == 0
    training.is_as_undisturbed(undisturbed)


async def test_of_ranks_at_one_port_all_are_asked_at_their_own_address(
    stage: Stage, tmp_path: Path, undisturbed_pair: Training
) -> None:
    pair = Training(tmp_path / "pair", ranks=2)
    await train(stage, pair, pods=2, signal="HTTP", graceSeconds=60)
    low = await preempt(stage)
    one = await is_told(stage, low, pair, gpus=2)
    assert (one["answered"], one["gpu_seconds"]) == (True, 0)
    assert (await go_on(stage, pair))["status"]["phase"] == "Succeeded"
    assert repeated(pair) == 0
    pair.is_as_undisturbed(undisturbed_pair)


@pytest.mark.parametrize(
    ("what", "signal", "grace"),
    [
        ("ignore", "HTTP", 4),
        ("ignore", "SigTerm", 4),
        ("be-late", "Annotation", 4),
        ("repeat", "HTTP", 60),
        ("die", "HTTP", 60),
        ("die", "SigTerm", 60),
    ],
)
async def test_whatever_a_trainer_does_when_asked_it_goes_in_time_and_goes_on_from_what_is_saved(  # noqa: PLR0917
    stage: Stage, training: Training, undisturbed: Training, what: str, signal: str, grace: int
) -> None:
    in_time = what == "repeat"
    await train(stage, training, "--when-asked", what, signal=signal, graceSeconds=grace)
    low = await preempt(stage)
    await stage.until_event("low", "Checkpointed" if in_time else "CheckpointMissed")
    last, newest = training.steps()[-1][1], training.newest()
    assert newest is not None
    assert not list(training.checkpoints.glob("*.tmp-*")) or what == "die"
    one = await is_told(stage, low, training)
    assert (one["cause"], one["answered"]) == ("Preempted", in_time)
    if signal != "SigTerm":  # there it is told to go at once, and the kubelet waits
        deadline = one["asked_at"] + timedelta(seconds=grace)
        assert (one["at"] >= deadline) == (what in {"ignore", "be-late"})
    assert low["status"]["failures"] == 0, "that it died while it had to go is no failure"
    assert (await go_on(stage, training))["status"]["phase"] == "Succeeded"
    assert (
        repeated(training) == last - newest.step == (0 if what in {"be-late", "repeat"} else last - one["saved_step"])
    )
    training.is_as_undisturbed(undisturbed)


@pytest.mark.parametrize(
    ("on_sigterm", "grace", "answered"),
    [("exit 0", 60, True), ("exit 143", 60, True), ("exit 1", 60, False), ("", 2, False)],
    ids=["exits with 0", "exits with 143", "exits with 1", "ignores it"],
)
async def test_who_reports_nothing_answers_sigterm_by_its_exit_code(
    stage: Stage,
    on_sigterm: str,
    grace: int,
    answered: bool,  # noqa: FBT001
) -> None:
    script = f"trap '{on_sigterm}' TERM; touch /there/ready; while :; do sleep 0.1; done"
    volumes = [{"name": "there", "emptyDir": {}}]
    job = stage.job("low", 2, 1, pod={"volumes": volumes}, checkpoint={"signal": "SigTerm", "graceSeconds": grace})
    container = job["spec"]["roles"][0]["template"]["spec"]["containers"][0]
    container |= {
        "command": ["sh", "-c", script],
        "volumeMounts": [{"name": "there", "mountPath": "/there"}],
        "readinessProbe": {"exec": {"command": ["cat", "/there/ready"]}, "periodSeconds": 1},
    }
    await stage.create(job)
    await stage.until_phase("low", "Running")
    low = await preempt(stage)
    [one] = await interruptions(stage)
    assert (one["cause"], one["answered"]) == ("Preempted", answered)
    if answered:
        assert (one["gpu_seconds"], low["status"]["lastCheckpoint"]["attempt"]) == (0, 1)
    else:
        assert one["saved_at"] is None
        assert "lastCheckpoint" not in low["status"]
    await stage.until_event("low", "Checkpointed" if answered else "CheckpointMissed")
    assert low["status"]["failures"] == 0


@pytest.fixture
def small(training: Training) -> Iterator[Path]:
    """A small volume for the checkpoints."""
    training.checkpoints.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(training.checkpoints)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield training.checkpoints
    subprocess.run(["umount", training.checkpoints], check=True)


def fill(file: Path) -> None:
    """Write to a file until there is no space left."""
    with file.open("wb", buffering=0) as content, suppress(OSError):
        while content.write(bytes(4096)):
            pass


async def test_on_a_full_volume_nothing_is_saved_and_nothing_lost_that_was(
    small: Path, stage: Stage, training: Training, undisturbed: Training
) -> None:
    await train(stage, training, "--patient", signal="HTTP", graceSeconds=4)
    fill(small / "filler")
    before = training.newest()
    assert before is not None
    low = await preempt(stage)
    assert "No space left on device" in await stage.until_event("low", "AskFailed")
    assert "0 did within 4 s" in await stage.until_event("low", "CheckpointMissed")
    one = await is_told(stage, low, training)
    assert (one["answered"], one["saved_step"]) == (False, before.step)
    (small / "filler").unlink()
    assert (await go_on(stage, training))["status"]["phase"] == "Succeeded"
    assert repeated(training) > 0
    training.is_as_undisturbed(undisturbed)


def kill(agent: Agent) -> None:
    [process] = [each for each in agent.processes() if str(SCRIPT) in each.cmdline()]
    process.kill()


@pytest.mark.parametrize("how", ["its process is killed", "its pod is removed by force"])
async def test_who_is_not_asked_loses_an_interval_at_most(
    stage: Stage, agent: Agent, training: Training, undisturbed: Training, how: str
) -> None:
    await train(stage, training, signal="Annotation")
    saved = await stage.until_job("low", lambda s: "lastCheckpoint" in s, "has saved")
    [pod] = await stage.pods("low")
    if how == "its process is killed":
        kill(agent)
    else:
        await stage.delete_pod(pod["metadata"]["name"], at_once=True)

    async def again() -> bool:
        return any(number == 2 for number, _, _ in training.steps())

    await eventually(again, "its next attempt trains")
    low = await go_on(stage, training)
    assert low["status"]["phase"] == "Succeeded"
    assert low["status"]["lastCheckpoint"]["attempt"] == 2
    assert low["status"]["lastCheckpoint"]["step"] > saved["status"]["lastCheckpoint"]["step"]
    assert 0 <= repeated(training) <= EVERY
    went_on_from = min(step for attempt, step, _ in training.steps() if attempt == 2) - 1
    [one] = await interruptions(stage)
    assert low["status"].get("lostSeconds", 0) == one["gpu_seconds"]
    if how == "its process is killed":
        assert (one["cause"], one["saved_step"], low["status"]["failures"]) == ("PodFailed", went_on_from, 1)
    else:  # it may have saved once more, on SIGTERM, when nobody heard it any more
        assert (one["cause"], low["status"]["failures"]) == ("PodLost", 0)
        assert one["saved_step"] <= went_on_from
    training.is_as_undisturbed(undisturbed)


@pytest.fixture
async def other(kube: KubeClient, control_plane: Running, tmp_path: Path) -> AsyncIterator[Agent]:
    """Another node, which can be cut off."""
    agent = Agent(control_plane, tmp_path, ["cut-off"], gpus=1)
    try:
        agent.start()
        await nodes_are_ready(kube, agent.nodes)
        yield agent
    finally:
        agent.send(signal.SIGCONT)
        agent.end()


async def test_who_runs_on_where_nobody_reaches_it_does_not_save_once_another_has_begun(
    stage: Stage, other: Agent, training: Training, undisturbed: Training, tmp_path: Path
) -> None:
    """Its node is given up and comes back; meanwhile the next attempt went on from a checkpoint that can be trusted."""
    await stage.adopt(["cut-off"])
    await change_node(stage, "training", {"spec": {"unschedulable": True}})
    await train(stage, training, signal="Annotation")
    await until_step(training, 2 * EVERY + 3)
    await stage.until_job(
        "low", lambda s: s.get("lastCheckpoint", {}).get("step", 0) >= 2 * EVERY, "has told what it saved"
    )
    [first] = [each for each in other.processes() if str(SCRIPT) in each.cmdline()]
    [pod] = await stage.pods("low")
    other.send(signal.SIGSTOP)
    first.suspend()
    damaged = training.newest()
    assert damaged is not None
    with (damaged.path / "model.npz").open("r+b") as file:
        file.write(b"torn")
    await change_node(stage, "training", {"spec": {"unschedulable": None}})
    await stage.client.request("DELETE", "/api/v1/nodes/cut-off")

    async def again() -> bool:
        return any(number == 2 for number, _, _ in training.steps())

    await eventually(again, "its next attempt trains")
    first.resume()

    async def has_ended() -> bool:
        return not is_alive(first.pid)

    await eventually(has_ended, "the first attempt has ended by itself")
    said = (tmp_path / "agent" / "pods" / pod["metadata"]["uid"] / "logs" / "main" / "0.log").read_text()
    assert "Superseded: attempt 2 has begun in" in said
    log = f"{pods_path(stage.namespace, 'low-worker-2-0')}/log"
    said = (await stage.client.request_raw("GET", log, accept="*/*")).decode()
    assert f"{HOME}/checkpoints/{damaged.path.name}/model.npz is not what was written" in said
    assert f"queuectl knows of a checkpoint of step {damaged.step}" in said
    low = await go_on(stage, training)
    assert (low["status"]["phase"], low["status"]["attempt"], low["status"]["failures"]) == ("Succeeded", 2, 0)
    [one] = await interruptions(stage)
    assert (one["cause"], one["answered"]) == ("NodeLost", None)
    assert {Folder(training.checkpoints).read(step).attempt for step in Folder(training.checkpoints).steps()} == {2}
    assert not list(training.checkpoints.glob("*.tmp-*"))
    training.is_as_undisturbed(undisturbed)


async def test_a_process_that_its_pod_starts_anew_goes_on_in_the_same_attempt(
    stage: Stage, agent: Agent, training: Training, undisturbed: Training
) -> None:
    await train(stage, training, restarts="OnFailure", signal="SigTerm")
    kill(agent)
    await stage.until_job("low", lambda s: s.get("lastCheckpoint"), "has told what it saved, by its last words")

    async def anew() -> bool:
        [pod] = await stage.pods("low")
        [container] = pod["status"]["containerStatuses"]
        return container["restartCount"] == 1 and "running" in container["state"]

    await eventually(anew, "it runs again")
    low = await go_on(stage, training)
    assert (low["status"]["phase"], low["status"]["attempt"], low["status"]["failures"]) == ("Succeeded", 1, 0)
    assert await interruptions(stage) == []
    steps = [step for _, step, _ in training.steps()]
    assert len(steps) - STEPS <= EVERY
    training.is_as_undisturbed(undisturbed)


async def test_a_training_saves_for_its_user_and_runs_on(
    stage: Stage, control_plane: Running, training: Training, undisturbed: Training
) -> None:
    await train(stage, training, signal="HTTP")
    out = (await Commands(control_plane.kubeconfig, stage.namespace)("checkpoint", "low", "--wait")).out
    saved = re.search(rf"low saved at \S+ step (\d+) path {HOME}/checkpoints/(\S+)", out)
    assert saved, out
    assert (training.checkpoints / saved[2]).is_dir()
    assert int(saved[1]) >= EVERY
    low = await go_on(stage, training)
    assert (low["status"]["phase"], low["status"]["attempt"]) == ("Succeeded", 1)
    assert await interruptions(stage) == []
    training.is_as_undisturbed(undisturbed)
