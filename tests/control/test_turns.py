"""Who is told first, of those whose status only drifts."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from queuectl.control.report import Reporter
from queuectl.control.world import World
from queuectl.core.lifecycle import BackOff
from queuectl.kube.writes import Writer
from queuectl.model.lifecycle import Workload
from queuectl.model.objects import Job
from queuectl.model.plan import Plan
from queuectl.model.reasons import Reason, why
from tests.support.builders import gang, role
from tests.support.eventually import eventually


async def test_who_waits_is_told_although_others_change_all_the_time() -> None:
    world = World(BackOff())
    names = ["busy", *(f"waits-{i}" for i in range(5))]
    for seq, name in enumerate(names):
        world.jobs[name] = Job(gang(name, role()), generation=1, resource_version="1", status={"phase": "Pending"})
        world.workloads[name] = Workload(name, "team", name, "q", 0, 0.0, seq)
    world.waiting.update([world.jobs[name].gang for name in names[1:]])

    class Api:
        """Takes statuses; whenever one is written, the busy job has changed again."""

        async def patch_job_status(self, job: Job, status: Mapping[str, Any]) -> Job:
            written = replace(job, status=status, resource_version=str(int(job.resource_version) + 1))
            reporter.changed("busy")
            return written

    reporter = Reporter(world, cast("Writer", Api()), "me", lambda: 0.0)
    behind = why(Reason.BEHIND_HEAD, queue="q", head="team/busy")
    world.plan = Plan(waits=dict.fromkeys(names[1:], behind))
    reporter.changed("busy")
    task = asyncio.create_task(reporter.run())

    async def told() -> bool:
        reporter.changed("busy")
        return all(world.jobs[name].status.get("reason") == "BehindHead" for name in names[1:])

    try:
        await eventually(told, "all who wait are told", seconds=30)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
