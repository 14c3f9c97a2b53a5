"""Whole gangs or nothing, on a real control plane."""

import asyncio

from tests.support.observer import observing
from tests.support.stage import Stage


async def test_a_gang_runs_and_gives_everything_back(live: Stage) -> None:
    await live.nodes(2)
    await live.queue(16)
    await live.submit("first", 2, 8, run_seconds=2)
    await live.submit("second", 2, 8, run_seconds=1)
    first = await live.until_phase("first", "Succeeded")
    second = await live.until_phase("second", "Succeeded")
    assert first["status"]["attempt"] == second["status"]["attempt"] == 1
    assert second["status"]["startedAt"] >= first["status"]["finishedAt"]


async def test_a_gang_that_does_not_fit_has_no_pod_and_says_what_is_missing(live: Stage) -> None:
    await live.nodes(3)
    await live.queue(64)
    await live.submit("big", 4, 8)
    job = await live.until_reason("big", "ExceedsCluster")
    assert "of 4 pods of role worker, 3 would fit" in job["status"]["message"]
    assert await live.pods() == []


async def test_of_two_gangs_that_want_the_same_nodes_one_runs_whole_and_the_other_has_no_pod(live: Stage) -> None:
    await live.nodes(12)
    await live.queue(128)
    rounds = range(11)
    async with observing(live) as observer:
        for number in rounds:
            names = [f"left-{number}", f"right-{number}"]
            await asyncio.gather(*(live.submit(name, 8, 8) for name in names))
            for name in names:
                await live.until_job(name, lambda s: s.get("reason") in {"Running", "WaitingForNodes"}, "is decided")
            phases = {name: (await live.until_job(name, bool, "has a status"))["status"]["phase"] for name in names}
            assert sorted(phases.values()) == ["Pending", "Running"]
            winner, loser = sorted(names, key=lambda name: phases[name], reverse=True)
            waiting = await live.until_reason(loser, "WaitingForNodes")
            assert "4 of 8 pods" in waiting["status"]["message"]
            assert "short of 4 places with 8 nvidia.com/gpu" in waiting["status"]["message"]
            assert await live.pods(loser) == []
            assert len(await live.pods(winner)) == 8

            await live.end_pods(winner)
            await live.until_phase(winner, "Succeeded")
            await live.until_phase(loser, "Running")
            await live.end_pods(loser)
            await live.until_phase(loser, "Succeeded")
        assert observer.whole_gangs_succeeded() == 2 * len(rounds)
