"""What fills a World: the lists and watches of the API server, and the ledger."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from queuectl.control.world import World
from queuectl.core.checkpoint import asked_anew
from queuectl.core.lifecycle import BackOff
from queuectl.core.snapshot import Policy
from queuectl.kube import decode, maintenance, volumes
from queuectl.kube.client import KubeClient
from queuectl.kube.informer import Informer
from queuectl.kube.names import API, claims_path, jobs_path, pods_path, slices_path
from queuectl.model.faults import FaultRules
from queuectl.model.objects import Flavor, Node, Pod
from queuectl.store.ledger import Ledger

SYNC_SECONDS = 120.0  # for all lists to come in

T = TypeVar("T")
Change = Callable[[T | None, T | None], None]


def informers(
    client: KubeClient, world: World, wake: Callable[[], None] = lambda: None
) -> tuple[list[Informer[Any]], Informer[Pod]]:
    """Return the informers that keep a world current, that of pods by itself too. ``wake``: called after each change."""

    def told(change: Change[T]) -> Change[T]:
        def on_change(old: T | None, new: T | None) -> None:
            change(old, new)
            wake()

        return on_change

    devices = asyncio.Event()

    def on_flavor(old: Flavor | None, new: Flavor | None) -> None:
        world.on_flavor(old, new)
        if new is not None and new.devices is not None:
            devices.set()

    def on_pod(old: Pod | None, new: Pod | None) -> None:
        world.on_pod(old, new)
        world.upkeep.on_pod(old, new)

    def on_node(old: Node | None, new: Node | None) -> None:
        world.on_node(old, new)
        world.upkeep.on_node(old, new)

    node = partial(decode.node, faulty=world.faults.rules.conditions)
    pods = Informer(client, pods_path(), decode.pod, told(on_pod))
    upkeep = world.upkeep
    # Only where a flavor has devices; claims first, so that none of them seems to be free that is not.
    claims = Informer(client, claims_path(), decode.resource_claim, told(world.on_device_claim), after=devices)
    slices = Informer(client, slices_path(), decode.resource_slice, told(world.on_slice), after=claims.synced)
    classes, budgets = "/apis/scheduling.k8s.io/v1/priorityclasses", "/apis/policy/v1/poddisruptionbudgets"
    everything: list[Informer[Any]] = [
        Informer(client, classes, decode.priority_class, told(world.on_priority_class)),
        Informer(client, budgets, decode.budget, told(world.on_budget)),
        Informer(client, f"{API}/resourceflavors", decode.flavor, told(on_flavor)),
        Informer(client, "/api/v1/namespaces", decode.namespace, told(world.on_namespace)),
        Informer(client, f"{API}/queues", decode.queue, told(world.on_queue)),
        Informer(client, "/api/v1/nodes", node, told(on_node)),
        Informer(client, jobs_path(), decode.job, told(world.on_job)),
        pods,
        claims,
        slices,
        Informer(client, maintenance.PATH, maintenance.maintenance, upkeep.on_maintenance),
        Informer(client, pods_path(), maintenance.node_test, upkeep.on_test, label_selector=maintenance.MARK),
    ]
    return everything, pods


def _volume_informers(client: KubeClient, world: World, wake: Callable[[], None] = lambda: None) -> list[Informer[Any]]:
    def told(change: Change[T]) -> Change[T]:
        def on_change(old: T | None, new: T | None) -> None:
            change(old, new)
            if world.changes:
                wake()

        return on_change

    return [
        Informer(client, "/apis/storage.k8s.io/v1/storageclasses", volumes.storage_class, told(world.on_storage_class)),
        Informer(client, "/api/v1/persistentvolumes", volumes.volume, told(world.on_volume)),
        Informer(client, "/api/v1/persistentvolumeclaims", volumes.claim, told(world.on_volume_claim)),
    ]


async def follow_volumes(client: KubeClient, world: World, wake: Callable[[], None]) -> None:
    """Keep what a world knows of volumes current, from the first job on that uses a claim, until cancelled."""
    await world.volumes.used.wait()
    informers = _volume_informers(client, world, wake)
    async with asyncio.TaskGroup() as group:
        for informer in informers:
            group.create_task(informer.run())
        for informer in informers:  # however long it takes: only jobs with claims wait for it
            await informer.synced.wait()
        world.volumes_are_known()
        wake()


async def in_sync(everything: list[Informer[Any]]) -> None:
    """Wait until all lists are in that are needed. Raises TimeoutError."""
    async with asyncio.timeout(SYNC_SECONDS):
        for informer in everything:
            if informer.needed:
                await informer.synced.wait()


async def load(world: World, ledger: Ledger) -> None:
    """Read the ledger into a world whose lists are in."""
    now = time.time()
    loaded = await ledger.load(list(world.jobs), half_life=world.history.half_life, now=now)
    for queue, averages in loaded.past.items():
        world.history.recall(queue, averages, now)
    world.faults.recall(loaded.readings, loaded.workloads)
    attempts = [asked_anew(one, world.jobs.get(one.uid), world.pods.get(one.key, {}), now) for one in loaded.attempts]
    world.load(loaded.workloads, attempts, loaded.max_seq)
    world.suspects.load(loaded.offences)
    world.nodes.judge_suspects(now)  # what comes of it was told when it was new
    world.nodes.judge_faults(now)


async def look(client: KubeClient, ledger: Ledger, policy: Policy, rules: FaultRules) -> World:
    """Return the world as it is now, for somebody who only wants to know. Raises what its sources raise."""
    world = World(BackOff(), policy, fault_rules=rules)
    everything, _ = informers(client, world)
    await asyncio.gather(*(informer.once() for informer in everything if informer.needed))
    for informer in everything:
        if informer.needed:
            await informer.once()  # those that were not needed until then
    if world.volumes.used.is_set():
        await asyncio.gather(*(informer.once() for informer in _volume_informers(client, world)))
        world.volumes_are_known()
    await load(world, ledger)
    world.upkeep.say(time.time())
    world.submissions(world.jobs)  # those that the controller has not seen yet
    return world
