"""Who gives way, on a real control plane: reclaim, priority, fair share, and the room that is held."""

from typing import Any

from tests.support import manifests
from tests.support.ledger import history, until_free
from tests.support.observer import observing
from tests.support.stage import Stage

ANY = {"withinQueue": "LowerPriority", "reclaimFromCohort": "Any"}
SLOW = {"local.queuectl.dev/stop-after": "4s"}
FAIR = {"QUEUECTL_FAIR_SHARING": "LessThanOrEqualToFinalShare,LessThanInitialShare"}


async def cohort(stage: Stage, *names: str, nominal: int, **spec: Any) -> None:
    """Create queues of one parent that has no quota itself."""
    await stage.create(manifests.queue(f"{stage.name}-all"))
    for name in names:
        await stage.queue(nominal, name, parent=f"{stage.name}-all", **spec)


def queue(stage: Stage, name: str) -> str:
    return f"{stage.name}-{name}"


async def test_a_higher_priority_takes_the_lower_one_of_its_queue(stage: Stage) -> None:
    await stage.nodes(2)
    await stage.queue(16, preemption={"withinQueue": "LowerPriority"})
    stage.controller().start()
    await stage.submit("low", 2, 8)
    await stage.until_phase("low", "Running")
    await stage.submit("high", 2, 8, priority=10, run_seconds=2)
    await stage.until_phase("high", "Succeeded", seconds=60)
    told = await stage.until_event("high", "WaitingForVictims")
    assert f"{stage.namespace}/low (queue {stage.name}, priority 0, loses " in told
    low = await stage.until_phase("low", "Running", seconds=60)
    assert low["status"]["attempt"] == 2
    assert low["status"].get("failures", 0) == 0


async def test_lent_quota_is_taken_back(stage: Stage) -> None:
    await stage.nodes(2)
    await cohort(stage, "a", "b", nominal=8, preemption=ANY)
    stage.controller().start()
    await stage.submit("borrower", 2, 8, queue=queue(stage, "b"))
    await stage.until_phase("borrower", "Running")
    await stage.submit("owner", 1, 8, queue=queue(stage, "a"))
    await stage.until_phase("owner", "Running", seconds=60)
    gone = await stage.until_job("borrower", lambda s: s.get("phase") == "Pending", "waits", seconds=60)
    for kind in ("Evicted", "Preempted"):
        condition = next(c for c in gone["status"]["conditions"] if c["type"] == kind)
        assert (condition["status"], condition["reason"]) == ("True", "Preempted")
        for told in (f"{stage.namespace}/owner", f"queue {queue(stage, 'a')}", "priority 0", "It loses "):
            assert told in condition["message"]
    assert condition["message"] in await stage.until_event("borrower", "Preempted")


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


async def test_nobody_is_taken_for_a_job_that_would_not_fit_then(stage: Stage) -> None:
    await stage.nodes(2)
    await cohort(stage, "a", "b", nominal=8, preemption=ANY)
    stage.controller().start()
    await stage.submit("borrower", 2, 8, queue=queue(stage, "b"))
    await stage.until_phase("borrower", "Running")
    await stage.submit("too-big", 3, 8, queue=queue(stage, "a"), priority=100)
    await stage.until_reason("too-big", "ExceedsMaxQuota", "ExceedsCluster")
    borrower = await stage.get_job("borrower")
    assert borrower
    assert borrower["status"]["phase"] == "Running"
    assert borrower["status"]["attempt"] == 1


async def test_the_room_of_victims_that_stop_one_after_the_other_is_held(stage: Stage) -> None:
    """The first victim's room stays empty, although another job would fit into it, and through a restart."""
    await stage.nodes(2)
    await stage.queue(16, preemption={"withinQueue": "LowerPriority"})
    controller = stage.controller()
    controller.start()
    await stage.submit("quick", 1, 8)
    await stage.submit("slow", 1, 8, annotations=SLOW)
    for name in ("quick", "slow"):
        await stage.until_phase(name, "Running")
    await stage.submit("big", 2, 8, priority=10, run_seconds=2)
    await stage.until_reason("big", "WaitingForVictims")
    await stage.submit("small", 1, 8, priority=5)
    await stage.until_phase("quick", "Pending")
    controller.kill()
    stage.controller("b").start()
    await stage.until_phase("big", "Succeeded", seconds=90)
    small = await stage.until_phase("small", "Running", seconds=60)
    big = await stage.get_job("big")
    assert big
    assert small["status"]["startedAt"] >= big["status"]["finishedAt"]
    assert big["status"]["attempt"] == 1


async def test_fair_sharing_takes_from_who_has_the_larger_share(stage: Stage) -> None:
    await stage.nodes(3)
    await stage.create(manifests.queue(f"{stage.name}-all", quotas=[manifests.quota(24, flavor=stage.name)]))
    for name in ("a", "b"):
        await stage.queue(0, name, parent=f"{stage.name}-all", preemption={"reclaimFromCohort": "Any"})
    stage.controller(env=FAIR).start()
    for number in range(3):
        await stage.submit(f"b{number}", 1, 8, queue=queue(stage, "b"))
    for number in range(3):
        await stage.until_phase(f"b{number}", "Running")
    await stage.submit("a0", 1, 8, queue=queue(stage, "a"))
    await stage.until_phase("a0", "Running", seconds=60)
    phases = [job["status"]["phase"] for job in await stage.jobs() if job["metadata"]["name"].startswith("b")]
    assert sorted(phases) == ["Pending", "Running", "Running"]


async def test_a_preemptor_that_is_deleted_lets_go_of_its_claim(stage: Stage) -> None:
    await stage.nodes(1)
    await stage.queue(8, preemption={"withinQueue": "LowerPriority"})
    stage.controller().start()
    await stage.submit("slow", 1, 8, annotations=SLOW)
    await stage.until_phase("slow", "Running")
    await stage.submit("high", 1, 8, priority=10)
    await stage.until_reason("high", "WaitingForVictims")
    await stage.delete_job("high")
    await stage.until_gone("high")
    await stage.until_job("slow", lambda s: s.get("attempt") == 2 and s["phase"] == "Running", "runs again", seconds=60)
    await stage.delete_job("slow")
    await stage.until_gone("slow", seconds=60)
    await until_free(stage)


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
