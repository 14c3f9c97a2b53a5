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
from queuectl.core.snapshot import Policy
from queuectl.model.lifecycle import Attempt, AttemptState, End, Move, Outcome
from queuectl.model.objects import Flavor, Gang, Job, Node, Queue, Role
from queuectl.model.plan import Plan
from queuectl.model.policy import FairRule, Preemption, Quota, Reclaim, Within
from queuectl.model.reasons import Reason, why
from tests.bench.plane import peak_memory

SIZES = ((100, 1_000), (1_000, 10_000), (10_000, 100_000), (20_000, 200_000))  # nodes, waiting gangs
EVENTS = 100
BUDGET_SECONDS = 60.0  # of measuring one size
GPU, FLAVOR = "nvidia.com/gpu", "h100"
NOW = 1_000_000.0


@dataclass
class Decisions:
    """One size. Seconds of CPU, of which one core gives one per second; memory in bytes."""

    nodes: int
    gangs: int
    queues: int = 0
    cold: float = 0.0  # the first cycle of the planner, everything waiting
    cold_snapshot: float = 0.0
    cycles: list[float] = field(default_factory=list)  # of the planner, each after one event
    snapshots: list[float] = field(default_factory=list)
    admitted: int = 0  # by the cycles after events
    preempted: int = 0
    running: int = 0
    memory: int = 0  # the process's peak
    baseline: int = 0  # what it held before the world was filled


@dataclass(frozen=True, slots=True)
class Shape:
    """What queues there are, and what runs.

    In cohorts, each queue owns half of its part of the GPUs and borrows the other half, takes back from its cohort
    and preempts lower priorities; gangs are then small, so that there are many of them.
    """

    queues: int = 20
    cohorts: int = 0
    fair: bool = False


def measure(
    sizes: Sequence[tuple[int, int]] = SIZES, events: int = EVENTS, shapes: Sequence[Shape] = ()
) -> Iterator[Decisions]:
    """Measure each size in a process of its own, so that memory is its alone; ``shapes`` go with the sizes."""
    context = multiprocessing.get_context("spawn")
    for (nodes, gangs), shape in zip(sizes, shapes or [Shape()] * len(sizes), strict=True):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            yield pool.submit(decide, nodes, gangs, events, shape).result()


def decide(nodes: int, gangs: int, events: int, shape: Shape) -> Decisions:
    result = Decisions(nodes, gangs, shape.queues, baseline=psutil.Process().memory_info().rss)
    dice = random.Random(f"{nodes} {gangs}")
    world = _world(nodes, gangs, shape, dice)
    arrivals = count(gangs)
    gc.disable()  # as the controller does until it has made its first cycle
    result.cold_snapshot, result.cold, decided = _cycle(world)
    gc.freeze()
    gc.enable()
    while decided.admissions or decided.preemptions:  # fill the cluster; a cycle is bounded
        _carry_out(world, decided)
        *_, decided = _cycle(world)
    result.running = len(world.attempts)
    began = time.perf_counter()
    while len(result.cycles) < events and time.perf_counter() - began < BUDGET_SECONDS:
        _end(world, dice.choice(list(world.attempts)), End(why(Reason.SUCCEEDED), Outcome.SUCCEEDED))
        snapshot, seconds, decided = _cycle(world)
        result.snapshots.append(snapshot)
        result.cycles.append(seconds)
        result.admitted += len(decided.admissions)
        result.preempted += sum(len(preempt.victims) for preempt in decided.preemptions)
        _carry_out(world, decided)
        for _ in decided.admissions:  # the backlog keeps its size
            _submit(world, _gang(next(arrivals), shape, dice))
        _told(world)
    result.memory = peak_memory(psutil.Process())
    return result


def _cycle(world: World) -> tuple[float, float, Plan]:
    gc.collect()  # or a collection of what the benchmark left would count as the planner's
    began = time.process_time()
    snapshot = world.snapshot(NOW)
    between = time.process_time()
    decided = plan(snapshot, NOW)
    return between - began, time.process_time() - between, decided


def _world(nodes: int, gangs: int, shape: Shape, dice: random.Random) -> World:
    fair = (FairRule.FINAL, FairRule.INITIAL) if shape.fair else ()
    world = World(BackOff(), Policy(fair_sharing=fair))
    world.on_flavor(None, Flavor(FLAVOR, gpu_model="H100"))
    for number in range(nodes):
        has = {"cpu": 96_000, "memory": 768 * 2**30, "pods": 110, GPU: 8}
        world.on_node(None, Node(f"node-{number:05}", labels={"pool": f"p{number % 4}"}, allocatable=has))
    for queue in _queues(shape, 8 * nodes // shape.queues):
        world.on_queue(None, queue)
    for number in range(gangs):
        _submit(world, _gang(number, shape, dice))
    world.load([], [], 0)
    _told(world)
    return world


def _queues(shape: Shape, share: int) -> Iterator[Queue]:
    if not shape.cohorts:  # half of them are short of quota, the others of nodes
        for number in range(shape.queues):
            yield Queue(_team(number), quotas={(FLAVOR, GPU): Quota(share // 2 if number % 2 else share * 3)})
        return
    rules = Preemption(within_queue=Within.LOWER_PRIORITY, reclaim=Reclaim.LOWER_PRIORITY)
    for number in range(shape.cohorts):
        lent = share * shape.queues // shape.cohorts // 2
        yield Queue(f"cohort-{number:03}", quotas={(FLAVOR, GPU): Quota(lent)})
    for number in range(shape.queues):
        parent = f"cohort-{number % shape.cohorts:03}"
        yield Queue(_team(number), parent, quotas={(FLAVOR, GPU): Quota(share // 2)}, preemption=rules)


def _team(number: int) -> str:
    return f"team-{number:04}"


def _gang(number: int, shape: Shape, dice: random.Random) -> Gang:
    """Sizes as a shared cluster sees them: mostly small, without cohorts some of many whole nodes."""
    if shape.cohorts:
        pods, gpus = dice.choice((1, 1, 1, 2)), dice.choice((4, 8))
    else:
        (pods,) = dice.choices((1, 2, 4, 8, 16, 32, 64), (40, 15, 15, 12, 8, 6, 4))
        gpus = 8 if pods > 1 else dice.choice((1, 2, 4, 8))
    requests = (("cpu", 8_000), ("memory", 32 * 2**30), (GPU, gpus), ("pods", 1))
    return Gang(
        uid=f"uid-{number:07}",
        namespace=_team(number % shape.queues),
        name=f"gang-{number:07}",
        queue=_team(dice.randrange(shape.queues)),
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


def _carry_out(world: World, decided: Plan) -> None:
    """Let all that was decided be so at once: victims are gone, and everybody runs."""
    for preempt in decided.preemptions:
        for victim in preempt.victims:
            _end(world, victim.uid, End(why(Reason.DELETED), Outcome.REQUEUE))
    for admission in (*decided.admissions, *(preempt.admission for preempt in decided.preemptions)):
        number = world.workloads[admission.uid].attempt + 1
        attempt = Attempt(
            admission.uid, number, AttemptState.RUNNING, 1, admission.placements, NOW, NOW, quota=dict(admission.quota)
        )
        world.admitted(attempt)


def _end(world: World, uid: str, end: End) -> None:
    number = world.attempts[uid].number
    world.moved(Move(uid, number, AttemptState.ENDING, end), NOW)
    world.moved(Move(uid, number, AttemptState.ENDED), NOW)
    if end.outcome is Outcome.SUCCEEDED:
        world.on_job(world.jobs[uid], None)
        world.forget(uid)
    world.take_changes()
