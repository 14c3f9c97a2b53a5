"""Plain cordon and drain: who is on the node saves its work while its pod has time to stop, and goes on elsewhere."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from queuectl.kube.client import KubeClient
from queuectl.kube.names import pods_path
from queuectl.local.controlplane import Running
from tests.e2e.test_checkpoint import STAYS, asks, condition, interruptions, remove, report
from tests.e2e.test_training import go_on, repeated, train
from tests.support.drain import cordon, drain, evict
from tests.support.eventually import eventually
from tests.support.real import Agent
from tests.support.stage import Object, Stage
from tests.trainer.training import Training

NODES = ["drained-0", "drained-1", "drained-2"]


@pytest.fixture(scope="module")
async def agent(
    mounts: None, kube: KubeClient, control_plane: Running, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Agent]:
    """Three nodes of one GPU each, so that two pods are on two of them and have one more to go to."""
    async with Agent(control_plane, tmp_path_factory.mktemp("agent"), NODES, gpus=1).running(kube) as agent:
        yield agent


@pytest.fixture
async def stage(live: Stage, agent: Agent) -> AsyncIterator[Stage]:
    await live.adopt(NODES)
    await live.queue(2)
    yield live
    await live.end_jobs()
    for node in NODES:
        await cordon(live.client, node, closed=False)
    await live.adopt(NODES, mine=False)


def node_of(pod: Object) -> str:
    return str(pod["spec"]["nodeName"])


@pytest.mark.parametrize("signal", ["HTTP", "Annotation", "SigTerm"])
async def test_a_drained_node_costs_a_training_no_step(
    stage: Stage, tmp_path: Path, undisturbed_pair: Training, signal: str
) -> None:
    pair = Training(tmp_path / "pair", ranks=2)
    await train(stage, pair, pods=2, signal=signal, graceSeconds=60)
    node = node_of((await stage.pods("low"))[1])
    await cordon(stage.client, node)
    before = pair.steps()[-1][1]

    async def runs_on() -> bool:
        return pair.steps()[-1][1] > before + 3

    await eventually(runs_on, "a cordon alone disturbs nobody")
    await drain(stage.client, node)

    async def again() -> bool:
        return any(attempt == 2 for attempt, _, _ in pair.steps())

    await eventually(again, "its next attempt trains")
    assert node not in {node_of(pod) for pod in await stage.pods("low")}
    low = await go_on(stage, pair)
    assert (low["status"]["phase"], low["status"]["attempt"]) == ("Succeeded", 2), json.dumps(low["status"])
    assert low["status"]["failures"] == 0
    [one] = await interruptions(stage, "low")
    assert one["cause"] in {"PodDisrupted", "PodLost"}
    assert one["gpu_seconds"] == 0
    assert repeated(pair) == 0
    pair.is_as_undisturbed(undisturbed_pair)


async def runs(live: Stage, grace: int, **checkpoint: Any) -> list[Object]:
    """Have a gang of two simulated pods run, and return them; they stay until they are removed."""
    await live.nodes(2)
    await live.queue(16)
    pod = {"terminationGracePeriodSeconds": grace}
    await live.submit("gang", 2, 8, annotations=STAYS, pod=pod, checkpoint=checkpoint)
    await live.until_phase("gang", "Running")
    return await live.pods("gang")


async def end(live: Stage) -> None:
    """Let its next attempt run, and delete the job: its pods don't go by themselves."""
    await live.until_job("gang", lambda s: s.get("attempt") == 2 and s["phase"] == "Running", "runs again")
    await live.delete_job("gang")
    await remove(live, "gang")


@pytest.mark.parametrize("how", ["evicted", "deleted"])
async def test_all_pods_are_asked_while_one_that_others_remove_still_stops(live: Stage, how: str) -> None:
    first, second = await runs(live, 600, signal="Annotation", graceSeconds=500)
    if how == "evicted":
        await evict(live.client, first)
    else:
        await live.client.request("DELETE", pods_path(live.namespace, first["metadata"]["name"]))
    told = await live.until_phase("gang", "Checkpointing")
    assert "0 of 2 pods have" in told["status"]["message"]
    (_, ask), _ = await asks(live, "gang")
    await report(live, first, ask["id"], 7)
    await live.until_job("gang", lambda s: "1 of 2 pods have" in s.get("message", ""), "has one answer")
    [other] = [pod for pod in await live.pods("gang") if pod["metadata"]["name"] == second["metadata"]["name"]]
    assert "deletionTimestamp" not in other["metadata"]
    await report(live, second, ask["id"], 7)
    for pod in await remove(live, "gang"):
        if how == "evicted":
            assert condition(pod, "DisruptionTarget")["status"] == "True", "also those that were not evicted"
    back = await live.until_job(
        "gang", lambda s: s.get("attempt") == 2 or s["phase"] == "Pending", "is back in its queue"
    )
    assert back["status"]["failures"] == 0
    await live.until_event("gang", "Checkpointed")
    [one] = await interruptions(live, "gang")
    cause = "PodDisrupted" if how == "evicted" else "PodLost"
    assert (one["cause"], one["answered"], one["saved_step"]) == (cause, True, 7)
    await end(live)


async def test_nobody_waits_for_longer_than_the_evicted_pod_may_take(live: Stage) -> None:
    first, _ = await runs(live, 4, signal="Annotation", graceSeconds=500)
    await evict(live.client, first)
    await live.until_phase("gang", "Checkpointing")
    await live.until_event("gang", "CheckpointMissed")
    await remove(live, "gang")
    await live.until_job("gang", lambda s: s.get("attempt") == 2 or s["phase"] == "Pending", "is back in its queue")
    [one] = await interruptions(live, "gang")
    assert (one["cause"], one["answered"]) == ("PodDisrupted", False)
    await end(live)
