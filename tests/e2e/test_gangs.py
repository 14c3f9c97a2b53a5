"""Whole gangs or nothing, on a real control plane."""

from tests.support.stage import Stage


async def test_a_gang_runs_and_gives_everything_back(stage: Stage) -> None:
    await stage.nodes(2)
    await stage.queue(16)
    stage.controller().start()
    await stage.submit("first", 2, 8, run_seconds=2)
    await stage.submit("second", 2, 8, run_seconds=1)
    first = await stage.until_phase("first", "Succeeded")
    second = await stage.until_phase("second", "Succeeded")
    assert first["status"]["attempt"] == second["status"]["attempt"] == 1
    assert second["status"]["startedAt"] >= first["status"]["finishedAt"]


async def test_a_gang_that_does_not_fit_has_no_pod_and_says_what_is_missing(stage: Stage) -> None:
    await stage.nodes(3)
    await stage.queue(64)
    stage.controller().start()
    await stage.submit("big", 4, 8)
    job = await stage.until_reason("big", "ExceedsCluster")
    assert "3 of 4 pods" in job["status"]["message"]
    assert await stage.pods() == []
