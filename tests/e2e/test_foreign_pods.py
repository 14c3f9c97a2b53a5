"""Gangs beside pods of others, which take room at any moment."""

import asyncio
import itertools
import time
from typing import Any

from queuectl.kube.client import MERGE_PATCH
from tests.support import ledger
from tests.support.eventually import eventually
from tests.support.observer import observing
from tests.support.stage import GPU, Stage

GANGS = [f"gang-{number}" for number in range(10)]
PODS = 8
WAVES = [f"gang-{number}" for number in range(25)]  # several cluster fulls
STEADY_SECONDS = 30
OTHERS_AT_ONCE = 12
STUCK_SECONDS = 15.0  # a gang that neither runs nor has given up its place by then is stuck


def _settled(job: dict[str, Any]) -> bool:
    return job.get("status", {}).get("phase") in {"Running", "Pending"}


async def _until_all_settled(stage: Stage, *gangs: str) -> dict[str, str]:
    """Wait until each gang runs whole, or waits and has no pod and no reservation; return the phases."""

    async def look() -> dict[str, str] | None:
        jobs = await stage.jobs()
        if len(jobs) < len(gangs) or not all(_settled(job) for job in jobs):
            return None
        phases = {job["metadata"]["name"]: job["status"]["phase"] for job in jobs}
        for name, phase in phases.items():
            pods = await stage.pods(name)
            if phase == "Pending" and pods:
                return None
            if phase == "Running" and not all(pod["spec"].get("nodeName") for pod in pods):
                return None
        held = """
            SELECT name FROM attempt JOIN workload ON uid = workload_uid
            WHERE namespace = :namespace AND attempt.state <> 'Ended'
        """
        active = {row["name"] for row in await ledger.rows(stage, held, namespace=stage.namespace)}
        return phases if active == {name for name, phase in phases.items() if phase == "Running"} else None

    return await eventually(look, "every gang runs whole or holds nothing", seconds=40)


async def test_gangs_and_pods_of_others_arrive_in_the_same_second(live: Stage) -> None:
    await live.nodes(10)
    await live.queue(80)
    others = [f"other-{number}" for number in range(20)]
    async with observing(live):
        await asyncio.gather(
            *(live.submit(name, PODS, 1) for name in GANGS), *(live.others_pod(name, 1) for name in others)
        )
        phases = await _until_all_settled(live, *GANGS)
        bound = [pod for pod in await live.pods() if pod["metadata"]["name"] in others and pod["spec"].get("nodeName")]
        running = [name for name in GANGS if phases[name] == "Running"]
        assert len(running) == (80 - len(bound)) // 8, f"{len(bound)} pods of others left room for more"
        for name in set(GANGS) - set(running):
            await live.until_reason(name, "WaitingForNodes")

        await asyncio.gather(*(live.delete_pod(name) for name in others))
        for name in GANGS:
            await live.until_phase(name, "Running")
    assert await ledger.audit(live) == []


async def _come_and_go(stage: Stage, until: float) -> None:
    """Have small pods of others arrive all the time, each staying a while."""
    there: list[str] = []
    for number in itertools.count():
        if time.monotonic() > until:
            break
        there.append(f"other-{number}")
        await stage.others_pod(there[-1], 1 + number % 2)
        if len(there) > OTHERS_AT_ONCE:
            await stage.delete_pod(there.pop(0))
        await asyncio.sleep(0.2)
    await asyncio.gather(*(stage.delete_pod(name) for name in there))


async def _look_for_stuck(stage: Stage, until: float) -> list[str]:
    """Return the attempts that were starting for too long."""
    since: dict[tuple[str, int], float] = {}
    stuck = []
    while time.monotonic() < until:
        now = time.monotonic()
        starting = {
            (job["metadata"]["name"], job["status"]["attempt"])
            for job in await stage.jobs()
            if job.get("status", {}).get("phase") == "Starting"
        }
        since = {attempt: since.get(attempt, now) for attempt in starting}
        stuck += [f"{attempt} for {now - at:.0f} s" for attempt, at in since.items() if now - at > STUCK_SECONDS]
        await asyncio.sleep(0.5)
    return stuck


async def test_gangs_under_a_steady_stream_of_pods_of_others(live: Stage) -> None:
    await live.nodes(10)
    await live.queue(80)
    until = time.monotonic() + STEADY_SECONDS
    async with observing(live) as observer:
        stuck, *_ = await asyncio.gather(
            _look_for_stuck(live, until),
            _come_and_go(live, until),
            *(live.submit(name, PODS, 1, run_seconds=8) for name in WAVES),
        )
        assert stuck == []
        for name in WAVES:
            await live.until_phase(name, "Succeeded", seconds=60)
        assert observer.whole_gangs_succeeded() == len(WAVES)
        await ledger.until_free(live)
    lost = "SELECT kind FROM event JOIN workload ON uid = workload_uid WHERE kind = 'PlaceLost' AND namespace = :mine"
    assert await ledger.rows(live, lost, mine=live.namespace), "others never took a place: this has shown nothing"


async def test_a_gang_preempted_by_others_goes_back_whole_and_uncharged(live: Stage) -> None:
    await live.nodes(2)
    await live.queue(16)
    stopping = {"local.queuectl.dev/stop-after": "2s"}
    await live.submit("gang", 2, 8, annotations=stopping, backoffLimit=0)
    await live.until_phase("gang", "Running")
    path = "/apis/scheduling.k8s.io/v1/priorityclasses"
    name = f"{live.name}-urgent"
    body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": 1000}
    await live.client.request("POST", path, body=body)
    try:
        await live.others_pod("urgent", 8, priorityClassName=name)

        async def runs() -> bool:
            return any(
                pod["metadata"]["name"] == "urgent" and pod["status"]["phase"] == "Running" for pod in await live.pods()
            )

        await eventually(runs, "the urgent pod runs")
        await _until_all_settled(live, "gang")
        job = await live.until_reason("gang", "WaitingForNodes")
        assert job["status"]["failures"] == 0
        assert "PodDisrupted" in await ledger.history(live, "gang")
        await live.delete_pod("urgent")
        await live.until_phase("gang", "Running")
    finally:
        await live.client.request("DELETE", f"{path}/{name}")


async def test_a_node_that_shrank_still_takes_those_that_need_nothing_of_what_it_lacks(live: Stage) -> None:
    (node,) = await live.nodes(1)
    await live.queue(8)
    await live.submit("runs", 1, 8)
    await live.until_phase("runs", "Running")
    body = {"status": {"allocatable": {GPU: "4"}}}
    await live.client.request("PATCH", f"/api/v1/nodes/{node}/status", body=body, content_type=MERGE_PATCH)
    seen = "SELECT room FROM node_room WHERE node = :node AND resource = :gpu"

    async def shrunk() -> bool:
        return [row["room"] for row in await ledger.rows(live, seen, node=node, gpu=GPU)] == [4]

    await eventually(shrunk, "the ledger has seen it")
    await live.create(live.job("cpu-only", 2, 0))
    job = await live.until_phase("cpu-only", "Running")
    assert job["status"]["attempt"] == 1
    assert (await live.until_job("runs", bool, "has a status"))["status"]["phase"] == "Running"
    assert await ledger.audit(live) == []
