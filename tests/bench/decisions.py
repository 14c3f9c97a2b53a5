"""How long the core takes to decide, by size of cluster and backlog. Nothing but this process runs.

The world is filled as informers would fill it. The cluster is full before the first measured cycle ends, so all
but the first admissions wait; each event after that is the end of one running gang, whose room is then given anew.
"""

import gc
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import count

import psutil

from queuectl.control.world import World
from queuectl.core.cycle import plan
from queuectl.core.lifecycle import BackOff
from queuectl.model.lifecycle import Attempt, AttemptState, End, Move, Outcome
from queuectl.model.objects import Flavor, Gang, Job, Node, Queue, Role
from queuectl.model.plan import Plan
from queuectl.model.policy import Quota
from queuectl.model.reasons import Reason, why
from tests.bench.plane import peak_memory

SIZES = ((100, 1_000), (1_000, 10_000), (10_000, 100_000))  # nodes, waiting gangs
EVENTS = 100
BUDGET_SECONDS = 60.0  # of measuring one size
QUEUES = 20
GPU, FLAVOR = "nvidia.com/gpu", "h100"
NOW = 1_000_000.0


@dataclass
class Decisions:
    """One size. Seconds of CPU, of which one core gives one per second; memory in bytes."""

    nodes: int
    gangs: int
    cold: float = 0.0  # the first cycle of the planner, everything waiting
    cold_snapshot: float = 0.0
    cycles: list[float] = field(default_factory=list)  # of the planner, each after one event
    snapshots: list[float] = field(default_factory=list)
    admitted: int = 0  # by the cycles after events
    running: int = 0
    memory: int = 0  # the process's peak
    baseline: int = 0  # what it held before the world was filled


def measure(sizes: Sequence[tuple[int, int]] = SIZES, events: int = EVENTS) -> Iterator[Decisions]:
    """Measure each size in a process of its own, so that memory is its alone."""
    context = multiprocessing.get_context("spawn")
    for nodes, gangs in sizes:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            yield pool.submit(decide, nodes, gangs, events).result()


def decide(nodes: int, gangs: int, events: int) -> Decisions:
    result = Decisions(nodes, gangs, baseline=psutil.Process().memory_info().rss)
    dice = random.Random(f"{nodes} {gangs}")
    world = _world(nodes, gangs, dice)
    arrivals = count(gangs)
    result.cold_snapshot, result.cold, decided = _cycle(world)
    while decided.admissions:  # fill the cluster; a cycle is bounded
        _admit(world, decided)
        *_, decided = _cycle(world)
    result.running = len(world.attempts)
    began = time.perf_counter()
    while len(result.cycles) < events and time.perf_counter() - began < BUDGET_SECONDS:
        _end(world, dice.choice(list(world.attempts)))
        snapshot, seconds, decided = _cycle(world)
        result.snapshots.append(snapshot)
        result.cycles.append(seconds)
        result.admitted += len(decided.admissions)
        _admit(world, decided)
        for _ in decided.admissions:  # the backlog keeps its size
            _submit(world, _gang(next(arrivals), dice))
        _told(world)
    result.memory = peak_memory(psutil.Process())
    return result


def _cycle(world: World) -> tuple[float, float, Plan]:
    gc.collect()  # or a collection of what the benchmark left would count as the planner's
    began = time.process_time()
    snapshot = world.snapshot()
    between = time.process_time()
    decided = plan(snapshot, NOW)
    return between - began, time.process_time() - between, decided


def _world(nodes: int, gangs: int, dice: random.Random) -> World:
    world = World(BackOff())
    world.on_flavor(None, Flavor(FLAVOR, gpu_model="H100"))
    for number in range(nodes):
        has = {"cpu": 96_000, "memory": 768 * 2**30, "pods": 110, GPU: 8}
        world.on_node(None, Node(f"node-{number:05}", labels={"pool": f"p{number % 4}"}, allocatable=has))
    share = 8 * nodes // QUEUES
    for number in range(QUEUES):
        # Half of them are short of quota, the others of nodes.
        quotas = {(FLAVOR, GPU): Quota(share // 2 if number % 2 else share * 3)}
        world.on_queue(None, Queue(f"team-{number:02}", quotas=quotas))
    for number in range(gangs):
        _submit(world, _gang(number, dice))
    world.load([], [], 0)
    _told(world)
    return world


def _gang(number: int, dice: random.Random) -> Gang:
    """Sizes as a shared cluster sees them: mostly small, some of many whole nodes."""
    (pods,) = dice.choices((1, 2, 4, 8, 16, 32, 64), (40, 15, 15, 12, 8, 6, 4))
    gpus = 8 if pods > 1 else dice.choice((1, 2, 4, 8))
    requests = (("cpu", 8_000), ("memory", 32 * 2**30), (GPU, gpus), ("pods", 1))
    return Gang(
        uid=f"uid-{number:07}",
        namespace=f"team-{number % QUEUES:02}",
        name=f"gang-{number:07}",
        queue=f"team-{dice.randrange(QUEUES):02}",
        priority=dice.choice((0, 0, 0, 10, 100)),
        submitted_at=NOW - 1_000 + number / 1_000,
        roles=(Role("worker", pods, requests),),
    )


def _submit(world: World, gang: Gang) -> None:
    version = str(int(gang.uid.removeprefix("uid-")) + 1)
    world.on_job(None, Job(gang, generation=1, resource_version=version))


def _told(world: World) -> None:
    world.submissions(world.take_changes().submissions)
    world.touched.clear()
    world.restated.clear()


def _admit(world: World, decided: Plan) -> None:
    for admission in decided.admissions:
        number = world.workloads[admission.uid].attempt + 1
        attempt = Attempt(
            admission.uid, number, AttemptState.RESERVED, 1, admission.placements, NOW, quota=dict(admission.quota)
        )
        world.admitted(attempt)


def _end(world: World, uid: str) -> None:
    attempt = world.attempts[uid]
    end = End(why(Reason.SUCCEEDED), Outcome.SUCCEEDED)
    world.moved(Move(uid, attempt.number, AttemptState.ENDING, end), NOW)
    world.moved(Move(uid, attempt.number, AttemptState.ENDED), NOW)
    world.on_job(world.jobs[uid], None)
    world.forget(uid)
    world.take_changes()
