"""Maintenance of nodes on a real control plane: jobs leave with their work saved, nodes are worked on and come back."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from queuectl.core.maintenance import UPGRADE_STATE
from queuectl.kube.maintenance import NODE
from tests.e2e.test_checkpoint import asks, condition, interruptions, remove, report
from tests.support.commands import Commands
from tests.support.maintenance import Maintenance, maintenance_of
from tests.support.stage import Object, Stage

STAYS = {"local.queuectl.dev/stop-after": "1000h"}  # a pod that has been deleted can be looked at until it is removed
FAILS = {"local.queuectl.dev/run-seconds": "0", "local.queuectl.dev/exit-code": "7"}
PASSES = {"local.queuectl.dev/run-seconds": "0", "local.queuectl.dev/exit-code": "0"}


@pytest.fixture
async def maintenance(stage: Stage) -> AsyncIterator[Maintenance]:
    async with maintenance_of(stage) as result:
        yield result


def verified(stage: Stage, annotations: Object, gpus: int = 8) -> Object:
    """Return spec.test: a pod that ends as its annotations say."""
    container = {"name": "test", "image": "test:1", "resources": {"limits": {"nvidia.com/gpu": gpus}}}
    template = {"metadata": {"annotations": annotations}, "spec": {"containers": [container]}}
    return {"namespace": stage.namespace, "timeoutSeconds": 60, "template": template}


async def nodes_of(stage: Stage, job: str) -> set[str]:
    return {pod["spec"]["nodeName"] for pod in await stage.pods(job)}


async def test_jobs_are_saved_and_moved_and_the_node_comes_back_also_when_the_controller_dies_meanwhile(
    stage: Stage, maintenance: Maintenance
) -> None:
    controller = stage.controller()
    controller.start()
    await stage.nodes(2)
    await stage.queue(16)
    await stage.submit("llm", 2, 8, annotations=STAYS, checkpoint={"signal": "Annotation", "graceSeconds": 600})
    await stage.until_phase("llm", "Running")
    node = min(await nodes_of(stage, "llm"))

    await maintenance.begin(nodes=[node], reason="new fans", test=verified(stage, PASSES))
    await maintenance.until_node("Draining", node, f"{stage.namespace}/llm leave it")
    await maintenance.until_cordoned(node)
    told = await stage.until_phase("llm", "Checkpointing")
    assert f"leaves node {node} for maintenance: {maintenance.name}, new fans" in told["status"]["message"]
    controller.kill()
    for pod, ask in await asks(stage, "llm"):
        await report(stage, pod, ask["id"], 40)
    controller.start()
    for pod in await remove(stage, "llm"):
        assert condition(pod, "DisruptionTarget")["status"] == "True"
    await maintenance.until_node("Safe", node)
    [one] = await interruptions(stage, "llm")
    assert (one["cause"], one["saved_step"], one["answered"]) == ("NodeMaintenance", 40, True)
    llm = await stage.until_reason("llm", "WaitingForNodes", "ExceedsCluster")
    assert (llm["status"]["failures"], llm["status"]["attempt"]) == (0, 1)
    assert (await maintenance.node(node))["spec"]["unschedulable"] is True

    controller.kill()
    queuectl = Commands(stage.kubeconfig)
    assert node in (await queuectl("maintenance", "done", node)).out
    controller.start()
    await maintenance.until("Finished")
    assert "succeeded" in (await maintenance.nodes())[node]["message"]
    await maintenance.until_as_before()
    await stage.until_phase("llm", "Running")
    assert [pod for pod in await stage.pods() if NODE in (pod["metadata"].get("annotations") or {})] == []


async def test_who_fails_its_test_halts_the_rest_until_somebody_says_that_it_is_good_or_cancels(
    stage: Stage, maintenance: Maintenance
) -> None:
    stage.controller().start()
    await stage.nodes(4)
    await stage.queue(32)
    await stage.submit("llm", 2, 8)
    await stage.until_phase("llm", "Running")
    await maintenance.begin(maxUnavailable="50%", test=verified(stage, FAILS))
    safe = await maintenance.until_node("Safe")
    assert safe["name"] not in await nodes_of(stage, "llm"), "one that nobody has to leave goes first"
    assert await maintenance.phases() == {"Safe": 1, "Pending": 3}
    await maintenance.done(safe["name"])
    halted = await maintenance.until("Halted")
    assert "exited with 7" in halted["message"]
    assert condition({"status": halted}, "Halted")["status"] == "True"
    assert await maintenance.phases() == {"Failed": 1, "Pending": 3}
    waiting = await maintenance.until_node("Pending", says=f"{safe['name']}, which failed")
    assert waiting["reason"] == "NodeWaits"

    await maintenance.done(safe["name"])
    await maintenance.until_node("Released", safe["name"])
    await maintenance.until_node("Safe")
    queuectl = Commands(stage.kubeconfig)
    rows = (await queuectl("maintenance", "status", maintenance.name)).rows
    assert rows[1][:4] == [maintenance.name, "Manual", "Active", "1/4"]
    assert [safe["name"], "Released"] in [row[:2] for row in rows]
    assert "released" in (await queuectl("maintenance", "cancel", maintenance.name)).out
    await maintenance.until_as_before()


async def test_what_others_did_is_kept_and_who_cannot_leave_is_named(stage: Stage, maintenance: Maintenance) -> None:
    stage.controller().start()
    first, second = await stage.nodes(2)
    await stage.queue(16)
    await maintenance.patch_node(first, {"spec": {"unschedulable": True}})
    await stage.submit("stays", 1, 4, preemptible=False)
    await stage.until_phase("stays", "Running")
    assert await nodes_of(stage, "stays") == {second}
    other = await stage.others_pod("inference", 2)
    await maintenance.begin(canary=0, maxUnavailable=2)
    await maintenance.until_node("Safe", first)
    blocked = await maintenance.until_node("Draining", second, "can't be told to leave")
    assert f"{stage.namespace}/stays, which is not preemptible" in blocked["message"]
    assert blocked["reason"] == "NodeDrainBlocked"
    await stage.delete_job("stays")
    safe = await maintenance.until_node("Safe", second)
    assert f"{stage.namespace}/{other['metadata']['name']}" in safe["message"]
    assert [pod["metadata"]["name"] for pod in await stage.pods()] == ["inference"], "pods of others are left alone"
    await Commands(stage.kubeconfig)("maintenance", "cancel", maintenance.name)
    await maintenance.until_as_before(first)


async def test_jobs_leave_before_the_gpu_operator_upgrades_a_driver_and_nobody_comes_before_it_has(
    stage: Stage, maintenance: Maintenance
) -> None:
    stage.controller().start()
    [node] = await stage.nodes(1)
    await stage.queue(8)
    await stage.submit("llm", 1, 8, checkpoint={"signal": "Annotation", "graceSeconds": 600})
    await stage.until_phase("llm", "Running")
    for state in ("upgrade-done", "upgrade-required", "cordon-required", "wait-for-jobs-required"):
        await maintenance.patch_node(node, {"metadata": {"labels": {UPGRADE_STATE: state}}})
    [(pod, ask)] = await asks(stage, "llm")
    await report(stage, pod, ask["id"], 7)
    waits = await stage.until_phase("llm", "Pending")
    assert waits["status"]["failures"] == 0
    for state in ("drain-required", "pod-restart-required", "validation-required", "uncordon-required"):
        await maintenance.patch_node(node, {"metadata": {"labels": {UPGRADE_STATE: state}}})
    await stage.until_reason("llm", "WaitingForNodes", "ExceedsCluster")
    assert (await stage.get_job("llm") or {})["status"]["phase"] == "Pending"
    await maintenance.patch_node(node, {"metadata": {"labels": {UPGRADE_STATE: "upgrade-done"}}})
    await stage.until_phase("llm", "Running")
    [one] = await interruptions(stage, "llm")
    assert (one["cause"], one["saved_step"], one["answered"]) == ("NodeMaintenance", 7, True)


async def test_who_would_not_be_over_by_then_stays_off_a_node_that_a_window_takes(
    stage: Stage, maintenance: Maintenance
) -> None:
    stage.controller().start()
    await stage.nodes(1)
    await stage.queue(16)
    start = datetime.now(UTC) + timedelta(hours=1)
    await maintenance.begin(window={"start": start.strftime("%Y-%m-%dT%H:%M:%SZ")})
    await maintenance.until("Waiting")
    await stage.submit("long", 1, 8, maxRunSeconds=7200)
    waits = await stage.until_reason("long", "MaintenanceAhead")
    assert "with maxRunSeconds of at most" in waits["status"]["message"]
    await stage.submit("short", 1, 8, maxRunSeconds=600)
    await stage.until_phase("short", "Running")
    queuectl = Commands(stage.kubeconfig)
    await queuectl("maintenance", "cancel", maintenance.name)
    await stage.delete_job("short")
    await stage.until_phase("long", "Running")
