"""Clean up in the API server what is over: pods that no attempt owns, finalizers of jobs that hold nothing, TTLs."""

import asyncio
from collections.abc import Callable

import structlog

from queuectl.control.world import World
from queuectl.kube.client import ApiError, ApiUnreachableError
from queuectl.kube.writes import Writer

LOOK_SECONDS = 0.5

log = structlog.get_logger()


class Janitor:
    """One leader's cleaner."""

    def __init__(self, world: World, writer: Writer, now: Callable[[], float]) -> None:
        """Prepare; ``run`` starts it."""
        self._world = world
        self._writer = writer
        self._now = now

    async def run(self) -> None:
        """Clean until cancelled."""
        while True:
            try:
                await self._clean()
            except (ApiError, ApiUnreachableError) as error:
                log.warning("cleaning interrupted", error=str(error))
            await asyncio.sleep(LOOK_SECONDS)

    async def _clean(self) -> None:
        world, now = self._world, self._now()
        for pod in world.orphans():
            log.warning("removing a pod without a reservation", pod=pod.name, namespace=pod.namespace)
            await self._writer.remove_pod(pod)
        for uid, job in list(world.jobs.items()):
            if not (job.deleting or job.ttl_seconds is not None) or not world.is_over(uid):
                continue
            workload = world.workloads.get(uid)
            if job.deleting and job.has_finalizer:
                await self._writer.set_finalizer(job, present=False)
            elif (
                not job.deleting
                and job.ttl_seconds is not None
                and workload is not None
                and workload.finished_at is not None
                and now >= workload.finished_at + job.ttl_seconds
            ):
                await self._writer.delete_job(job)
