"""How much is written of those who wait: it does not grow with the backlog."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from queuectl.control.report import Reporter
from queuectl.control.world import World
from queuectl.core.lifecycle import BackOff
from queuectl.kube.writes import Writer
from queuectl.model.lifecycle import Workload
from queuectl.model.objects import Job
from queuectl.model.plan import Plan
from queuectl.model.reasons import Reason, Why, why
from tests.support.builders import gang, role
from tests.support.eventually import eventually


class Api:
    """Takes statuses, and remembers whose."""

    def __init__(self) -> None:
        self.writes: list[str] = []

    async def patch_job_status(self, job: Job, status: Mapping[str, Any]) -> Job:
        self.writes.append(job.gang.uid)
        return replace(job, status=status, resource_version=str(int(job.resource_version) + 1))


class Line:
    """A queue's line as the controller knows it, and a reporter that tells of it."""

    def __init__(self, waiting: int, pause: Callable[[], Any]) -> None:
        self.api, self.world = Api(), World(BackOff())
        self.names = [f"job-{i:04}" for i in range(waiting)]
        for name in self.names:
            self.world.jobs[name] = Job(gang(name, role()), generation=1, resource_version="1")
            self.world.workloads[name] = Workload(name, "team", name, "q", 0, 0.0, 0)
        self.reporter = Reporter(self.world, cast("Writer", self.api), "me", lambda: 0.0, pause)

    def planned(self, first: int = 0, *, used: int = 8, others: Mapping[str, Why] | None = None) -> None:
        """Tell of a cycle in which those before ``first`` have left."""
        left = self.names[first:]
        wait = why(
            Reason.WAITING_FOR_QUOTA, queue="q", flavor="any", resource="nvidia.com/gpu", missing=1, used=used, nominal=8
        )  # fmt: skip
        waits = dict.fromkeys(left, wait) | dict(others or {})
        self.world.plan = Plan(waits=waits, positions={name: i for i, name in enumerate(left, 1)})
        for name in left:
            self.reporter.changed(name)

    async def told(self) -> list[str]:
        """Wait until all is told, and return whose statuses were written for it."""

        async def caught_up() -> bool:
            return self.reporter.behind == 0

        await eventually(caught_up, "all to be told")
        writes, self.api.writes = self.api.writes, []
        return writes

    def shown(self, name: str) -> Mapping[str, Any]:
        return self.world.jobs[name].status


@asynccontextmanager
async def line(waiting: int, pause: Callable[[], Any] = lambda: asyncio.sleep(0)) -> AsyncIterator[Line]:
    result = Line(waiting, pause)
    task = asyncio.create_task(result.reporter.run())
    yield result
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("waiting", [100, 1000])
async def test_an_admission_that_moves_everybody_up_is_told_to_the_first_only(waiting: int) -> None:
    async with line(waiting) as one:
        one.planned()
        assert sorted(await one.told()) == one.names

        one.planned(1)
        assert len(await one.told()) == 9

        for first in range(2, 60):
            one.planned(first)
            await one.told()
            for place, name in enumerate(one.names[first:], 1):
                assert abs(one.shown(name)["queuePosition"] - place) <= place // 10


@pytest.mark.parametrize("waiting", [100, 1000])
async def test_numbers_that_drift_are_told_one_by_one(waiting: int) -> None:
    ticks = asyncio.Semaphore(0)
    async with line(waiting, ticks.acquire) as one:
        one.planned()
        await eventually(lambda: _wrote(one, waiting), "the first statuses")
        one.planned(used=7)
        for _ in range(20):
            ticks.release()
        await eventually(lambda: _wrote(one, waiting + 20), "20 writes")
        one.planned(used=6)  # told instead of the one before, not after it
        for _ in range(waiting):
            ticks.release()
        await one.told()
        assert all("6 of 8" in one.shown(name)["message"] for name in one.names)


async def _wrote(one: Line, count: int) -> bool:
    assert len(one.api.writes) <= count
    return len(one.api.writes) == count


async def test_another_reason_is_told_before_what_drifts() -> None:
    async with line(100) as one:
        one.planned()
        await one.told()
        one.planned(used=7)
        one.planned(used=7, others={"job-0099": why(Reason.QUEUE_NOT_FOUND, queue="q")})
        assert (await one.told())[0] == "job-0099"
        assert one.shown("job-0099")["reason"] == "QueueNotFound"
