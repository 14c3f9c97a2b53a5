"""Both sides of a preemption as people see it; who gives way to whom is told by scenarios (test_scenarios.py)."""

from queuectl.local.controlplane import Running
from tests.support.commands import Commands
from tests.support.ledger import until_free
from tests.support.stage import Stage


def fact(description: str, label: str) -> str:
    """Return what `queuectl describe` says of it."""
    return next(line for line in description.splitlines() if line.startswith(f"{label}:"))


def row(description: str, section: str, word: str) -> str:
    """Return the only line of a section that has this word in one of its first three cells."""
    lines = description.split(f"\n{section}:\n")[1].split("\n\n", maxsplit=1)[0].splitlines()
    [found] = [line for line in lines if word in line.split()[:3]]
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
        for told in (row(victim, "Conditions", "Evicted"), row(victim, "Events", "Preempted")):
            assert f"Gave way to {stage.namespace}/big of queue {stage.name}, priority 7" in told
            assert "it has the higher claim in the same queue. It loses" in told

    waits = f"preempted jobs to stop: {stage.namespace}/slow (queue {stage.name}, priority 0, loses"
    await stage.until_job("big", lambda s: waits in s.get("message", ""), f"says {waits}")
    assert waits in fact(await describe("big"), "Message")
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
