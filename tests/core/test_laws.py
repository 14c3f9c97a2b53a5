"""What holds for every cycle, whatever the cluster: checked against counting by hand."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from queuectl.core.cycle import plan
from queuectl.core.fleet import Base
from queuectl.core.nodes import back, eligible
from queuectl.core.snapshot import Snapshot
from queuectl.model.objects import Flavor, Gang, Node, NodeTerm, Queue, QueueOrder, Role, Taint, Toleration
from queuectl.model.plan import Admission, Plan
from queuectl.model.policy import Quota
from queuectl.model.reasons import Reason
from queuectl.model.resources import is_extended, is_gpu
from tests.support.builders import GPU, Requests, flavor, fleet, gang, needs, node, requests, role, snapshot

T = TypeVar("T")
NOW = 100.0
Amounts = dict[tuple[str, str], int]


def mostly(usual: T, *rare: T) -> st.SearchStrategy[T]:
    """Return a strategy in which the usual value is three times as frequent as all the rare ones together."""
    return st.sampled_from([usual] * 3 * len(rare) + list(rare))


SPOT = Taint("spot", "", "NoSchedule")
sizes = st.builds(requests, gpu=mostly(2, 0, 1, 4, 8), cpu=mostly(1, 0, 2, 5), memory=mostly(0, 1, 3))
nodes = st.builds(
    lambda gpu, cpu, pods, zone, taints, closed: node(
        "", gpu=gpu, cpu=cpu, memory=8, pods=pods, labels={"zone": zone}, taints=taints, unschedulable=closed
    ),
    gpu=mostly(8, 0, 3, 4), cpu=mostly(8, 2, 5), pods=mostly(110, 1, 3), zone=st.sampled_from("ab"),
    taints=mostly((), (SPOT,)), closed=mostly(False, True),  # noqa: FBT003 - values of a field
)  # fmt: skip
roles = st.builds(
    lambda pods, asks, selector, terms, tolerations: replace(
        role("", pods, selector=selector, terms=terms, tolerations=tolerations), requests=asks
    ),
    pods=st.integers(1, 4), asks=sizes, selector=mostly({}, {"zone": "a"}),
    terms=mostly((), (NodeTerm((needs("zone", "NotIn", "a"),)),)), tolerations=mostly((), (Toleration("spot", "Exists"),)),
)  # fmt: skip
FLAVORS = {
    one.name: one
    for one in (
        flavor("fa", labels={"zone": "a"}, model="A"),
        flavor("fb", labels={"zone": "b"}, model="B"),
        flavor("any"),
    )
}
quotas = st.lists(
    st.tuples(mostly("any", "fa", "fb", "gone"), mostly(64, 0, 3, 5, 8, 11), mostly(None, 2000, 9000)),
    min_size=1,
    max_size=3,
).map(
    lambda given: (
        {(kind, GPU): gpus for kind, gpus, _ in given}
        | {(kind, "cpu"): cpus for kind, _, cpus in given if cpus is not None}
    )
)
queues = st.builds(
    lambda nominal, order: Queue("", order=order, quotas={cell: Quota(amount) for cell, amount in nominal.items()}),
    quotas,
    mostly(QueueOrder.BEST_EFFORT_FIFO, QueueOrder.STRICT_FIFO),
)
gangs = st.builds(
    lambda parts, **given: gang("", *(replace(part, name=f"r{i}") for i, part in enumerate(parts)), **given),
    parts=st.lists(roles, min_size=1, max_size=2), queue=st.sampled_from([*8 * ["q0", "q1"], "q2"]), priority=st.integers(0, 2),
    submitted_at=st.integers(0, 3).map(float), seq=st.integers(0, 2), gpu_models=st.sampled_from([*8 * [()], ("A",), ("B", "X")]),
    hold=st.sampled_from([False] * 15 + [True]),
    not_before=st.sampled_from([0.0] * 12 + [NOW, NOW + 5]),
)  # fmt: skip


@dataclass(frozen=True)
class World:
    """All that a snapshot is made of, so that it can be made again."""

    nodes: list[Node]
    queues: list[Queue]
    gangs: list[Gang]
    others: list[tuple[str, Requests]]
    reserved: list[tuple[str, Requests, int]]
    usage: dict[tuple[str, str, str], int]

    def snapshot(self, order: random.Random | None = None) -> Snapshot:
        """Return the snapshot, with everything told in another order if one is given."""

        def told(things: Iterable[T]) -> list[T]:
            listed = list(things)
            if order:
                order.shuffle(listed)
            return listed

        cluster = fleet(told(self.nodes), others=told(self.others), reserved=told(self.reserved))
        kinds = told(FLAVORS.values())
        return snapshot(told(self.gangs), nodes=cluster, queues=told(self.queues), flavors=kinds, usage=self.usage)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Return a small cluster with jobs."""
    servers = [replace(one, name=f"n{i}") for i, one in enumerate(draw(st.lists(nodes, min_size=2, max_size=5)))]
    names = st.sampled_from([one.name for one in servers])
    lines = [replace(one, name=f"q{i}") for i, one in enumerate(draw(st.lists(queues, min_size=2, max_size=2)))]
    waiting = [
        replace(one, uid=f"g{i}", name=f"g{i}") for i, one in enumerate(draw(st.lists(gangs, min_size=3, max_size=7)))
    ]
    keys = st.sampled_from([(line.name, *key) for line in lines for key in line.nominal] or [("q0", "any", GPU)])
    return World(
        servers,
        lines,
        waiting,
        draw(st.lists(st.tuples(names, sizes), max_size=2)),
        draw(st.lists(st.tuples(names, sizes, st.integers(1, 2)), max_size=2)),
        draw(st.dictionaries(keys, st.integers(0, 9), max_size=3)),
    )


def room(world: World, admissions: tuple[Admission, ...] = ()) -> Amounts:
    """Return what is free on each node, counted by hand."""
    free: Amounts = {
        (one.name, resource): amount for one in world.nodes for resource, amount in one.allocatable.items()
    }
    for name, asked in world.others:
        for resource, amount in asked:
            free[name, resource] = free.get((name, resource), 0) - amount
    free = {key: max(0, amount) for key, amount in free.items()}
    taken = [(name, asked, count) for name, asked, count in world.reserved]
    taken += [(p.node, p.requests, p.pods) for admission in admissions for p in admission.placements]
    for name, asked, count in taken:
        for resource, amount in asked:
            free[name, resource] = free.get((name, resource), 0) - amount * count
    return free


def usage(world: World, decided: Plan) -> Counter[tuple[str, str, str]]:
    """Return what each queue uses after the plan, from the gangs' requests."""
    by_uid = {one.uid: one for one in world.gangs}
    used = Counter(world.usage)
    for admission in decided.admissions:
        job = by_uid[admission.uid]
        for placement in admission.placements:
            for resource, amount in placement.requests:
                used[job.queue, placement.flavor, resource] += amount * placement.pods
    return used


@given(worlds())
def test_an_admitted_gang_has_exactly_its_pods_on_nodes_that_take_them(world: World) -> None:
    servers, by_uid = {one.name: one for one in world.nodes}, {one.uid: one for one in world.gangs}
    for admission in plan(world.snapshot(), NOW).admissions:
        job = by_uid[admission.uid]
        parts = {one.name: one for one in job.roles}
        assert Counter({name: one.pods for name, one in parts.items()}) == sum(
            (Counter({p.role: p.pods}) for p in admission.placements), Counter()
        )
        assert len({(p.role, p.node) for p in admission.placements}) == len(admission.placements)
        gpu_flavors = set()
        for p in admission.placements:
            assert p.requests == parts[p.role].requests
            assert eligible(servers[p.node], FLAVORS[p.flavor], parts[p.role].constraints)
            if any(is_gpu(resource) for resource, _ in p.requests):
                gpu_flavors.add(p.flavor)
        assert len(gpu_flavors) <= 1
        if job.gpu_models:
            assert all(FLAVORS[name].gpu_model in job.gpu_models for name in gpu_flavors)


@given(worlds())
def test_no_node_and_no_queue_is_overbooked(world: World) -> None:
    decided = plan(world.snapshot(), NOW)
    before, after = room(world), room(world, decided.admissions)
    assert all(after[key] >= 0 for key in after if after[key] != before.get(key, 0))
    nominal = {(one.name, *key): amount for one in world.queues for key, amount in one.nominal.items()}
    used = usage(world, decided)
    for key, amount in used.items():
        if amount != world.usage.get(key, 0) and (key in nominal or is_extended(key[2])):
            assert amount <= nominal[key]
    charged = Counter(world.usage)
    by_uid = {one.uid: one for one in world.gangs}
    for admission in decided.admissions:
        charged.update({(by_uid[admission.uid].queue, *key): amount for key, amount in admission.quota.items()})
    assert {key: used[key] for key in charged} == dict(charged)


@given(worlds())
def test_every_gang_starts_or_is_told_why_not(world: World) -> None:
    decided = plan(world.snapshot(), NOW)
    admitted = [admission.uid for admission in decided.admissions]
    assert sorted([*admitted, *decided.waits]) == sorted(one.uid for one in world.gangs)
    assert decided.waits.keys() == decided.positions.keys()
    assert all(str(told) for told in decided.waits.values())
    for job in world.gangs:
        if job.hold or job.not_before > NOW or job.queue not in {one.name for one in world.queues}:
            assert decided.waits[job.uid].reason in {Reason.HELD, Reason.BACK_OFF, Reason.QUEUE_NOT_FOUND}
    ends = (one.not_before for one in world.gangs if one.not_before > NOW and not one.hold)
    assert decided.wake_at == min(ends, default=None)


@given(worlds(), st.randoms(use_true_random=False))
def test_the_same_world_gives_the_same_plan(world: World, order: random.Random) -> None:
    view = world.snapshot()
    assert view.fleet
    free, used = (
        view.fleet.matrix(Base.FREE).tolist(),
        {name: dict(node.usage) for name, node in view.tree.nodes.items()},
    )
    decided = plan(view, NOW)
    assert view.fleet.matrix(Base.FREE).tolist() == free
    assert {name: node.usage for name, node in view.tree.nodes.items()} == used
    assert plan(view, NOW) == decided
    assert plan(world.snapshot(order), NOW) == decided


def fits_somewhere(world: World, queue: Queue, job: Gang, free: Amounts, used: Counter[tuple[str, str, str]]) -> bool:
    """Tell by counting whether a gang of one role has room and quota in some flavor."""
    [part] = job.roles
    for name in {kind for kind, _ in queue.nominal} & FLAVORS.keys():
        if (
            any(is_gpu(r) for r, _ in part.requests)
            and job.gpu_models
            and FLAVORS[name].gpu_model not in job.gpu_models
        ):
            continue
        counts = [
            (resource, amount)
            for resource, amount in part.requests
            if is_extended(resource) or (name, resource) in queue.nominal
        ]
        if all(
            used[queue.name, name, r] + amount * part.pods <= queue.nominal.get((name, r), -1) for r, amount in counts
        ):
            pods = sum(pods_on(one, part, FLAVORS[name], free) for one in world.nodes)
            if pods >= part.pods:
                return True
    return False


def pods_on(one: Node, part: Role, kind: Flavor, free: Amounts) -> int:
    """Count the pods that a node takes, one after the other."""
    if not eligible(one, kind, part.constraints):
        return 0
    left, pods = dict(free), 0
    while all(left.get((one.name, resource), 0) >= amount for resource, amount in part.requests):
        for resource, amount in part.requests:
            left[one.name, resource] -= amount
        pods += 1
    return pods


@given(worlds())
def test_who_waits_for_room_does_not_fit_in_what_is_left(world: World) -> None:
    decided = plan(world.snapshot(), NOW)
    free, used = room(world, decided.admissions), usage(world, decided)
    lines = {one.name: one for one in world.queues}
    excused = {Reason.HELD, Reason.BACK_OFF, Reason.QUEUE_NOT_FOUND, Reason.BEHIND_HEAD}
    for job in world.gangs:
        if job.uid in decided.waits and decided.waits[job.uid].reason not in excused and len(job.roles) == 1:
            assert not fits_somewhere(world, lines[job.queue], job, free, used)


@given(worlds())
def test_who_can_never_fit_does_not_fit_into_an_empty_cluster(world: World) -> None:
    nodes = [back(one) if one.closed else one for one in world.nodes]  # nor would it then
    empty = replace(world, nodes=nodes, others=[], reserved=[], usage={})
    lines = {one.name: one for one in world.queues}
    never = {Reason.EXCEEDS_CLUSTER, Reason.EXCEEDS_MAX_QUOTA, Reason.NO_MATCHING_FLAVOR}
    decided = plan(world.snapshot(), NOW)
    for job in world.gangs:
        told = decided.waits.get(job.uid)
        if told is not None and len(job.roles) == 1 and job.queue in lines:
            fits = fits_somewhere(empty, lines[job.queue], job, room(empty), Counter())
            if told.reason in never:
                assert not fits
            elif told.reason is Reason.WAITING_FOR_NODES:
                assert fits


@given(worlds())
def test_nobody_passes_the_head_of_a_strict_queue(world: World) -> None:
    decided = plan(world.snapshot(), NOW)
    admitted = {admission.uid for admission in decided.admissions}
    blocking = {Reason.EXCEEDS_CLUSTER, Reason.WAITING_FOR_QUOTA, Reason.WAITING_FOR_NODES}
    for line in world.queues:
        jobs = [one for one in world.gangs if one.queue == line.name]
        heads = [one for one in jobs if one.uid in decided.waits and decided.waits[one.uid].reason in blocking]
        if line.order is QueueOrder.STRICT_FIFO and heads:
            assert len(heads) == 1
            key = (-heads[0].priority, heads[0].submitted_at, heads[0].seq, heads[0].uid)
            passed = [one for one in jobs if (-one.priority, one.submitted_at, one.seq, one.uid) > key]
            assert not admitted & {one.uid for one in passed}
