"""Gangs beside pods of others, which take room at any moment."""

import asyncio
import itertools
import time
from typing import Any

from tests.support import ledger
from tests.support.eventually import eventually
from tests.support.observer import observing
from tests.support.stage import Stage

GANGS = [f"gang-{number}" for number in range(10)]
SIZES = dict.fromkeys(GANGS, 8)
STEADY_SECONDS = 30
STUCK_SECONDS = 15.0  # a gang that neither runs nor has given up its place by then is stuck


def _settled(job: dict[str, Any]) -> bool:
    return job.get("status", {}).get("phase") in {"Running", "Pending"}


async def _until_all_settled(stage: Stage) -> dict[str, str]:
    """Wait until each gang runs whole or waits and has no pod and no reservation; return the phases."""

    async def look() -> dict[str, str] | None:
        jobs = await stage.jobs()
        if len(jobs) < len(GANGS) or not all(_settled(job) for job in jobs):
            return None
        phases = {job["metadata"]["name"]: job["status"]["phase"] for job in jobs}
        for name, phase in phases.items():
            pods = await stage.pods(name)
            if phase == "Pending" and pods:
                return None
            if phase == "Running" and not (len(pods) == SIZES[name] and all(p["spec"].get("nodeName") for p in pods)):
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
    async with observing(live) as observer:
        await asyncio.gather(
            *(live.submit(name, 8, 1) for name in GANGS), *(live.others_pod(name, 1) for name in others)
        )
        phases = await _until_all_settled(live)
        bound = [pod for pod in await live.pods() if pod["metadata"]["name"] in others and pod["spec"].get("nodeName")]
        running = [name for name in GANGS if phases[name] == "Running"]
        assert len(running) == (80 - len(bound)) // 8, f"{len(bound)} pods of others left room for more"
        for name in set(GANGS) - set(running):
            await live.until_reason(name, "WaitingForNodes")

        await asyncio.gather(*(live.delete_pod(name) for name in others))
        for name in GANGS:
            await live.until_phase(name, "Running")
        assert observer.partial(SIZES) == []
        assert observer.overbooked == []
        assert await ledger.audit(live) == []


async def test_gangs_under_a_steady_stream_of_pods_of_others(live: Stage) -> None:
    await live.nodes(10)
    await live.queue(80)
    until = time.monotonic() + STEADY_SECONDS

    async def others() -> None:
        there: list[str] = []
        for number in itertools.count():
            if time.monotonic() > until:
                break
            name = f"other-{number}"
            await live.others_pod(name, 1 + number % 2)
            there.append(name)
            if len(there) > 12:
                await live.delete_pod(there.pop(0))
            await asyncio.sleep(0.2)
        await asyncio.gather(*(live.delete_pod(name) for name in there))

    async def look_for_stuck() -> list[str]:
        since: dict[tuple[str, int], float] = {}
        stuck = []
        while time.monotonic() < until:
            for job in await live.jobs():
                status = job.get("status", {})
                key = (job["metadata"]["name"], status.get("attempt", 0))
                if status.get("phase") == "Starting":
                    if time.monotonic() - since.setdefault(key, time.monotonic()) > STUCK_SECONDS:
                        stuck.append(f"{key}: {status['message']}")
                else:
                    since.pop(key, None)
            await asyncio.sleep(0.5)
        return stuck

    async with observing(live) as observer:
        _, stuck, *_ = await asyncio.gather(
            others(), look_for_stuck(), *(live.submit(name, 8, 1, run_seconds=8) for name in GANGS)
        )
        assert stuck == []
        for name in GANGS:
            await live.until_phase(name, "Succeeded", seconds=60)
        assert observer.partial(SIZES) == []
        assert observer.overbooked == []
        await ledger.until_free(live)
