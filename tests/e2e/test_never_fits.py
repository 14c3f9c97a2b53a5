"""Jobs that can never fit say so, and nobody waits for them in a BestEffortFIFO queue."""

from typing import Any

import pytest

from tests.support.stage import Stage

# pods, GPUs each, quota → reason and what its message names
CASES = {
    "quota": (3, 8, 16, "ExceedsMaxQuota", ["24 nvidia.com/gpu", "16"]),
    "cluster": (3, 8, 64, "ExceedsCluster", ["3 pods of role worker", "2 would fit"]),
    "any-node": (1, 16, 64, "ExceedsCluster", ["1 pod of role worker", "0 would fit"]),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_job_that_can_never_fit_says_so_and_blocks_nobody(live: Stage, case: str) -> None:
    pods, gpus, quota, reason, named = CASES[case]
    await live.nodes(2)
    await live.queue(quota, order="BestEffortFIFO")
    await live.submit("huge", pods, gpus, priority=100)
    huge = await live.until_reason("huge", reason)
    assert all(text in huge["status"]["message"] for text in named), huge["status"]["message"]
    assert huge["status"]["queuePosition"] == 1

    await live.submit("small", 2, 8, run_seconds=0.1)
    await live.until_phase("small", "Succeeded")
    now: dict[str, Any] = await live.until_reason("huge", reason)
    assert now["status"]["attempt"] == 0
    assert await live.pods("huge") == []


async def test_it_starts_once_what_was_missing_is_there(live: Stage) -> None:
    await live.nodes(2)
    await live.queue(64)
    await live.submit("huge", 3, 8)
    await live.until_reason("huge", "ExceedsCluster")
    await live.nodes(1, first=2)
    await live.until_phase("huge", "Running")


async def test_a_head_that_only_time_can_help_blocks_a_strict_queue(live: Stage) -> None:
    await live.nodes(2)
    await live.queue(16, order="StrictFIFO")
    await live.submit("runs", 1, 8)
    await live.until_phase("runs", "Running")
    await live.submit("hopeless", 3, 8, priority=200)  # no end of another job would help: it does not block
    await live.until_reason("hopeless", "ExceedsMaxQuota")
    await live.submit("head", 2, 8, priority=100)
    await live.until_reason("head", "WaitingForQuota")
    await live.submit("small", 1, 8)
    job = await live.until_reason("small", "BehindHead")
    assert f"{live.namespace}/head" in job["status"]["message"]
    await live.end_pods("runs")
    await live.until_phase("head", "Running")
    await live.end_pods("head")
    await live.until_phase("small", "Running")
