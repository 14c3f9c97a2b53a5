"""Clean up in the API server what is over: pods and claims that no attempt owns, finalizers of jobs that hold nothing, TTLs."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from queuectl.control.world import World
from queuectl.kube.client import ApiError, ApiUnreachableError
from queuectl.kube.writes import Writer
from queuectl.model.objects import Pod

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
            for clean in self._due():
                try:
                    await clean()
                except (ApiError, ApiUnreachableError) as error:
                    # One that can't be cleaned up must not keep the others.
                    log.warning("not cleaned up", error=str(error))
                    await asyncio.sleep(LOOK_SECONDS)
            await asyncio.sleep(LOOK_SECONDS)

    def _due(self) -> list[Callable[[], Awaitable[None]]]:
        world, now = self._world, self._now()
        due: list[Callable[[], Awaitable[None]]] = [partial(self._remove, pod) for pod in world.pods.orphans()]
        due += [partial(self._writer.remove_claim, claim) for claim in world.devices.orphans(world.attempts)]
        for uid, job in world.jobs.items():
            if not (job.deleting or job.ttl_seconds is not None) or not world.is_over(uid):
                continue
            workload = world.workloads.get(uid)
            if job.deleting and job.has_finalizer:
                due.append(partial(self._writer.set_finalizer, job, present=False))
            elif (
                not job.deleting
                and job.ttl_seconds is not None
                and workload is not None
                and workload.finished_at is not None
                and now >= workload.finished_at + job.ttl_seconds
            ):
                due.append(partial(self._writer.delete_job, job))
        return due

    async def _remove(self, pod: Pod) -> None:
        log.warning("removing a pod without a reservation", pod=pod.name, namespace=pod.namespace)
        await self._writer.remove_pod(pod)
