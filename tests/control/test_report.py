"""How much is written of those who wait: it does not grow with the backlog."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from queuectl.control import report
from queuectl.control.report import REST_SECONDS, WAIT_SECONDS, WAITS_KEPT, Reporter
from queuectl.control.world import World
from queuectl.core.lifecycle import BackOff
from queuectl.kube.client import ApiError
from queuectl.kube.writes import Writer
from queuectl.model.lifecycle import Attempt, AttemptState, Workload
from queuectl.model.objects import Job, Node, Pod
from queuectl.model.plan import Placement, Plan
from queuectl.model.reasons import Reason, Why, why
from tests.support.builders import gang, role
from tests.support.eventually import eventually


class Api:
    """Takes statuses and events, and remembers whose."""

    def __init__(self) -> None:
        self.writes: list[str] = []
        self.events: list[tuple[str, str, str]] = []

    async def create_event(self, namespace: str, body: Mapping[str, Any]) -> None:
        assert namespace == "team"
        self.events.append((body["regarding"]["name"], body["type"], body["reason"]))

    async def patch_job_status(self, job: Job, status: Mapping[str, Any]) -> Job:
        self.writes.append(job.gang.uid)
        return replace(job, status=status, resource_version=str(int(job.resource_version) + 1))


class Line:
    """A queue's line as the controller knows it, and a reporter that tells of it, step by step."""

    def __init__(self, waiting: int) -> None:
        self.api, self.world, self.now = Api(), World(BackOff()), 0.0
        self._steps, self._left = asyncio.Semaphore(0), 0
        self.names = [f"job-{i:04}" for i in range(waiting)]
        gangs = [gang(name, role()) for name in self.names]
        for one in gangs:
            self.world.jobs[one.uid] = Job(one, generation=1, resource_version="1")
            self.world.workloads[one.uid] = Workload(one.uid, "team", one.name, "q", 0, 0.0, 0)
        self.world.waiting.update(gangs)
        self.reporter = Reporter(self.world, cast("Writer", self.api), "me", lambda: self.now, self._step)

    async def _step(self) -> None:
        await self._steps.acquire()
        self._left -= 1

    def planned(self, first: int = 0, *, used: int = 8, jobs: str = "", wait: Why | None = None) -> None:
        """Take in a cycle in which those before ``first`` have started."""
        left = self.names[first:]
        wait = wait or why(
            Reason.WAITING_FOR_QUOTA, queue="q", flavor="any", resource="nvidia.com/gpu", wanted=1, missing=1, used=used,
            nominal=8, limit="", holders="", jobs=jobs,
        )  # fmt: skip
        self.world.waiting.update([], gone=self.names[:first])
        self.world.plan = Plan(waits=dict.fromkeys(left, wait), positions={name: i for i, name in enumerate(left, 1)})

    async def told(self, steps: int) -> list[str]:
        """Return whose statuses were written in so many steps."""
        self._left = steps
        for _ in range(steps):
            self._steps.release()

        async def done() -> bool:
            return self._left == 0

        await eventually(done, "the steps")
        writes, self.api.writes = self.api.writes, []
        return writes

    def shown(self, name: str) -> Mapping[str, Any]:
        return self.world.jobs[name].status


@asynccontextmanager
async def line(waiting: int, wait: Why | None = None) -> AsyncIterator[Line]:
    """Return a line of which all has been told."""
    result = Line(waiting)
    task = asyncio.create_task(result.reporter.run())
    result.planned(wait=wait)
    assert sorted(await result.told(2 * waiting)) == result.names
    yield result
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


SIZES = [100, 1000]


@pytest.mark.parametrize("waiting", SIZES)
async def test_which_jobs_hold_the_quota_is_told_to_the_first_ten(waiting: int) -> None:
    async with line(waiting) as one:
        for holder in ("first", "next"):
            one.planned(jobs=f" Jobs of q: team/{holder} (8).")
            assert sorted(await one.told(100)) == one.names[:10]
            assert one.shown(one.names[0])["message"].endswith(f"Jobs of q: team/{holder} (8).")


@pytest.mark.parametrize("waiting", SIZES)
async def test_an_admission_that_moves_everybody_up_is_told_to_the_first_only(waiting: int) -> None:
    async with line(waiting) as one:
        one.planned(1)
        assert len(await one.told(100)) == 9

        for first in range(2, 60):
            one.planned(first)
            await one.told(100)
            for place, name in enumerate(one.names[first:], 1):
                assert abs(one.shown(name)["queuePosition"] - place) <= place // 10


@pytest.mark.parametrize("waiting", SIZES)
async def test_numbers_that_drift_are_told_one_at_a_step(waiting: int) -> None:
    async with line(waiting) as one:
        one.planned(used=7)
        assert len(await one.told(20)) == 20
        one.planned(used=6)  # told instead of the one before, not after it
        assert len(await one.told(3 * waiting)) <= 2 * waiting
        assert all("owns 8 and uses 6" in one.shown(name)["message"] for name in one.names)


async def test_who_has_changed_is_told_at_once_however_many_were_looked_at_that_have_not() -> None:
    """As after a restart, when nothing that was told before counts as told."""
    async with line(1000) as one:
        for name in one.names:
            one.reporter.changed(name)
        last = one.names[-1]
        one.world.workloads[last] = replace(one.world.workloads[last], failures=1)
        one.reporter.changed(last)
        assert await one.told(30) == [last]


def node(silent_since: float | None) -> Node:
    return Node("n", ready=silent_since is None, unready_since=silent_since)


async def test_a_running_gang_whose_node_is_not_ready_says_so_and_one_that_comes_and_goes_is_told_rarely() -> None:
    async with line(1) as one:
        [uid], world = one.names, one.world
        placement = Placement("worker", "any", "n", 1, ())
        world.admitted(Attempt(uid, 1, AttemptState.RUNNING, 1, (placement,), 0.0, running_at=1.0))
        there = Pod("p", "team", "p-0", "1", node="n", phase="Running", ready=True, role="worker")
        world.on_pod(None, replace(there, workload=uid, attempt=1))
        one.reporter.changed(uid)
        await one.told(2)
        writes, before = 0, node(None)
        world.on_node(None, before)
        for one.now in range(1, 61):
            now = node(one.now if one.now % 2 else None)
            world.restated.clear()
            world.on_node(before, now)
            before = now
            assert world.restated == {uid}
            one.reporter.changed(uid)
            writes += len(await one.told(4))
            if one.now == 1:
                assert one.shown(uid)["message"] == (
                    "Ready now: 0 of 1 pod; node n has not been Ready since 00:00:01 UTC."
                )
                [ready] = [each for each in one.shown(uid)["conditions"] if each["type"] == "PodsReady"]
                assert (ready["status"], ready["reason"]) == ("False", "PodsNotReady")
        assert 2 <= writes <= 60 / REST_SECONDS + 1
        one.now += REST_SECONDS
        await one.told(4)
        assert (one.shown(uid)["reason"], one.shown(uid)["pods"]) == ("Running", "1/1")


async def test_a_job_read_in_a_conflict_does_not_undo_what_the_watch_has_shown_meanwhile() -> None:
    class Behind(Api):
        """Refuses a write, and answers a read after the watch has shown what came after it."""

        async def patch_job_status(self, *_: Any) -> Job:
            raise ApiError(409, "Conflict", "it has changed")

        async def get_job(self, job: Job) -> Job:
            world.on_job(job, replace(job, generation=2, resource_version="3"))
            return replace(job, resource_version="2")

    world = World(BackOff())
    one = gang("j", role())
    world.on_job(None, Job(one, generation=1, resource_version="1"))
    world.workloads[one.uid] = Workload(one.uid, "team", one.name, "q", 0, 0.0, 0)
    world.attempts[one.uid] = Attempt(one.uid, 1, AttemptState.RESERVED, 1, (), 0.0)
    reporter = Reporter(world, cast("Writer", Behind()), "me", lambda: 0.0)
    assert await reporter.admitted(one.uid) is None, "its spec is another by now"
    assert world.jobs[one.uid].generation == 2


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no time between events of those that wait."""
    monkeypatch.setattr(report, "WAIT_EVENT_SECONDS", 0.001)


async def until_events(one: Line, count: int) -> list[tuple[str, str, str]]:
    async def there() -> bool:
        return len(one.api.events) >= count

    await eventually(there, f"{count} events")
    return sorted(one.api.events)


@pytest.mark.usefixtures("at_once")
async def test_who_waits_has_an_event_for_each_reason_and_who_starts_soon_has_none() -> None:
    async with line(3) as one:
        soon, first, second = one.names
        one.now = WAIT_SECONDS - 1
        del one.world.workloads[soon]
        one.planned(1, used=7)  # other numbers, the same reason
        await one.told(4)
        one.now = WAIT_SECONDS
        told = await until_events(one, 2)
        assert told == [(name, "Normal", "WaitingForQuota") for name in (first, second)]

        missing = why(Reason.QUEUE_NOT_FOUND, queue="q")
        one.planned(1, wait=missing)
        await one.told(4)
        one.planned(1)
        one.world.plan = replace(one.world.plan, waits={**one.world.plan.waits, second: missing})
        await one.told(4)  # the first waits for what it did before, and that was told
        one.now += WAIT_SECONDS
        assert (await until_events(one, 3))[-1] == (second, "Warning", "QueueNotFound")
        assert len(one.api.events) == 3


async def test_a_reason_that_the_status_says_late_is_told_once() -> None:
    """In a long line a status is written long after the plan says why."""
    async with line(1, wait=why(Reason.PENDING)) as one:
        one.planned()
        one.now = WAIT_SECONDS
        one.reporter._tell_wait()
        await one.told(2)
        one.now += WAIT_SECONDS
        one.reporter._tell_wait()
        one.planned(wait=why(Reason.QUEUE_NOT_FOUND, queue="q"))
        await one.told(2)
        one.now += WAIT_SECONDS
        assert [reason for _, _, reason in await until_events(one, 2)] == ["WaitingForQuota", "QueueNotFound"]


@pytest.mark.usefixtures("at_once")
async def test_events_of_those_that_wait_are_bounded_however_many_do() -> None:
    async with line(WAITS_KEPT + 500) as one:
        one.now += WAIT_SECONDS
        await until_events(one, WAITS_KEPT)
        one.planned(wait=why(Reason.QUEUE_NOT_FOUND, queue="q"))
        await one.told(2)  # who is told now comes behind all of those
        one.now += WAIT_SECONDS
        told = await until_events(one, WAITS_KEPT + 1)
        assert [reason for _, _, reason in told].count("WaitingForQuota") == WAITS_KEPT
