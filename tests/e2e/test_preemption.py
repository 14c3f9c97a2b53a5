"""Both sides of a preemption as people see it; who gives way to whom is told by scenarios (test_scenarios.py)."""

from queuectl.local.controlplane import Running
from tests.support.commands import Commands
from tests.support.ledger import history, until_free
from tests.support.observer import observing
from tests.support.stage import Stage

SLOW = {"local.queuectl.dev/stop-after": "4s"}


def fact(description: str, label: str) -> str:
    """Return what `queuectl describe` says of it."""
    return next(line for line in description.splitlines() if line.startswith(f"{label}:"))


def row(description: str, section: str, word: str) -> str:
    """Return the only line of a section that is about this word: a condition by its type, an event by its reason."""
    lines = description.split(f"\n{section}:\n")[1].split("\n\n", maxsplit=1)[0].splitlines()
    [found] = [line for line in lines if word == line.split()[{"Conditions": 0, "Events": 2}[section]]]
    return found


async def test_the_victim_names_its_preemptor_and_the_preemptor_its_victims(
    stage: Stage, control_plane: Running
) -> None:
    queuectl = Commands(control_plane.kubeconfig, stage.namespace)

    async def describe(job: str) -> str:
        return (await queuectl("describe", job)).out

    await stage.nodes(2)
    await stage.queue(16, preemption={"withinQueue": "LowerPriority"})
    stage.controller().start()
    for name, stop in {"quick": "0s", "slow": "1000h"}.items():
        await stage.submit(name, 1, 8, annotations={"local.queuectl.dev/stop-after": stop})
        await stage.until_phase(name, "Running")
    await stage.submit("big", 2, 8, priority=7)
    await stage.until_phase("quick", "Pending")
    for name, phase in {"quick": "Pending", "slow": "Stopping"}.items():
        victim = await describe(name)
        assert phase in fact(victim, "Phase")
        for told in (row(victim, "Conditions", "Preempted"), row(victim, "Events", "Preempted")):
            assert f"Gave way to {stage.namespace}/big of queue {stage.name}, priority 7" in told
            assert "it goes first in the same queue. Not saved yet:" in told

    waits = f"preempted job to leave it: {stage.namespace}/slow (queue {stage.name}, priority 0, loses"
    await stage.until_job("big", lambda s: waits in s.get("message", ""), f"says {waits}")
    promised = await describe("big")
    assert waits in fact(promised, "Message")
    assert "not bound yet" not in promised
    assert not any(line.startswith("Admitted:") for line in promised.splitlines())
    [pod] = await stage.pods("slow")
    await stage.delete_pod(pod["metadata"]["name"], at_once=True)
    await stage.until_phase("big", "Running")
    told = row(await describe("big"), "Events", "WaitingForVictims")
    for name in ("quick", "slow"):
        assert f"{stage.namespace}/{name} (queue {stage.name}, priority 0, loses" in told

    for name in ("quick", "slow", "big"):
        await stage.delete_job(name)
        await stage.until_gone(name)
    await until_free(stage)


async def test_nobody_is_told_to_go_whom_a_disruption_budget_keeps(stage: Stage) -> None:
    await stage.nodes(1)
    await stage.queue(8, preemption={"withinQueue": "LowerPriority"})
    await stage.create(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "keep", "namespace": stage.namespace},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"queuectl.dev/job": "low"}}},
        }
    )
    stage.controller().start()
    await stage.submit("low", 1, 8)
    await stage.until_phase("low", "Running")
    await stage.submit("high", 1, 8, priority=10)
    await stage.until_reason("high", "DisruptionForbidden")
    assert f"{stage.namespace}/keep" in (await stage.get_job("high") or {})["status"]["message"]
    path = f"/apis/policy/v1/namespaces/{stage.namespace}/poddisruptionbudgets/keep"
    await stage.client.request("DELETE", path)
    await stage.until_phase("high", "Running", seconds=60)


async def test_an_elastic_gang_gives_up_pods_that_it_can_spare_and_runs_on(stage: Stage) -> None:
    """The victim never stops, also when the controller dies while its pods go."""
    await stage.nodes(2)
    await stage.queue(16, preemption={"withinQueue": "LowerPriority"})
    controller = stage.controller()
    controller.start()
    elastic = stage.job("elastic", 4, 4, annotations=SLOW)
    elastic["spec"]["roles"][0]["minReplicas"] = 1
    await stage.create(elastic)
    before = await stage.until_phase("elastic", "Running")
    pods = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await stage.pods("elastic")}
    async with observing(stage):
        await stage.submit("high", 1, 8, priority=10)
        shrinking = await stage.until_reason("elastic", "Shrunk")
        assert (shrinking["status"]["phase"], shrinking["status"]["pods"]) == ("Running", "2/4")
        told = await stage.until_event("elastic", "Shrunk")
        assert f"Gave up 2 of 4 pods for {stage.namespace}/high of queue {stage.name}, priority 10" in told
        assert "gives up 2 pods" in await stage.until_event("high", "WaitingForVictims")
        controller.kill()
        stage.controller("b").start()
        await stage.until_phase("high", "Running", seconds=60)
        after = await stage.until_reason("elastic", "Running")
    for what in ("startedAt", "attempt"):
        assert after["status"][what] == before["status"][what]
    assert (after["status"]["phase"], after["status"]["pods"]) == ("Running", "2/4")
    assert sum(place["pods"] for place in after["status"]["assignments"]) == 2
    shrunk = next(c for c in after["status"]["conditions"] if c["type"] == "Shrunk")
    assert (shrunk["status"], shrunk["message"]) == ("True", told)
    # Those that stay are the first ones, and they are the same as ever.
    left = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await stage.pods("elastic")}
    assert left == {f"elastic-worker-1-{index}": pods[f"elastic-worker-1-{index}"] for index in (0, 1)}
    await stage.end_pods("elastic")
    await stage.until_phase("elastic", "Succeeded")
    assert await history(stage, "elastic") == [
        "Admitted", "Created", "Ungated", "Running", "Shrunk", "Running", "Succeeded", "Finished",
    ]  # fmt: skip
    await stage.delete_job("high")
    await until_free(stage)
