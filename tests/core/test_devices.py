"""Devices that claims name: a pod gets them in one domain inside its node, and no two pods get the same one."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queuectl.core import fit
from queuectl.core.cycle import plan
from queuectl.core.fleet import Fleet
from queuectl.core.nominate import unpromised
from queuectl.model.objects import Device, DeviceKind, Flavor, GpuNeed, Inside, Node, Role, Together, Topology
from queuectl.model.plan import Placement
from queuectl.model.reasons import Reason
from queuectl.model.resources import device_name, is_device
from tests.support.builders import GPU, flavor, fleet, gang, node, role, snapshot

KIND = DeviceKind("gpu.example.com", "gpu.example.com", GPU, "uuid")
INSIDE = (Inside("nvlink", 4), Inside("pcie", 2))
NAMED = replace(flavor(), devices=KIND, inside=INSIDE)
NVLINK, PCIE = Topology(required="nvlink"), Topology(required="pcie")
EACH_NVLINK = Topology(slice_level="nvlink", slice_size=1)


def name(number: int) -> str:
    return device_name(KIND.driver, "", f"gpu-{number}")


def server(node_name: str, gpus: int = 8) -> Node:
    """Return a node of two NVLink groups of four GPUs, each of two PCIe switches."""
    devices = tuple(Device(name(i), GPU, (("nvlink", str(i // 4)), ("pcie", str(i // 2 % 2)))) for i in range(gpus))
    bare = node(node_name, gpu=0)
    amounts = {**bare.allocatable, GPU: gpus, **dict.fromkeys((device.name for device in devices), 1)}
    return replace(bare, allocatable=amounts, devices=devices)


def worker(pods: int = 1, gpu: int = 1, topology: Topology | None = None, role_name: str = "worker") -> Role:
    return replace(role(role_name, pods, gpu=gpu, need=GpuNeed()), topology=topology or Topology())


def place(room: Fleet, *roles: Role) -> tuple[Placement, ...] | fit.Short:
    return fit.place(room, roles, dict.fromkeys((one.name for one in roles), NAMED))


def taken(*numbers: int, of: str = "n1") -> tuple[str, tuple[tuple[str, int], ...]]:
    """Return what counts as used by others for these devices of a node."""
    return of, ((GPU, len(numbers)), *((name(number), 1) for number in numbers))


def got(placements: tuple[Placement, ...] | fit.Short) -> list[list[int]]:
    """Return the numbers of the devices that each pod got, in order of the pods."""
    assert not isinstance(placements, fit.Short), placements
    assert all(p.pods == 1 for p in placements)
    return [[int(r.rpartition("-")[2]) for r, _ in p.requests if is_device(r)] for p in placements]


@pytest.mark.parametrize(
    ("used", "asked", "want"),
    [
        ((), worker(gpu=2), [[0, 1]]),
        ((0,), worker(gpu=1), [[1]]),  # the switch that is broken already
        ((0,), worker(gpu=2, topology=PCIE), [[2, 3]]),  # the rest of the group that is, and a whole switch of it
        ((0,), worker(gpu=4, topology=NVLINK), [[4, 5, 6, 7]]),
        ((0, 4), worker(gpu=2), [[2, 3]]),
        ((), worker(2, gpu=4, topology=EACH_NVLINK), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ((7,), worker(3, gpu=1, topology=NVLINK), [[6], [4], [5]]),  # all in the tightest group that holds them
        ((1, 3, 5, 7), worker(2, gpu=2), [[0, 2], [4, 6]]),
    ],
)
def test_a_pod_gets_devices_where_they_fit_tightest(used: Sequence[int], asked: Role, want: list[list[int]]) -> None:
    assert got(place(fleet([server("n1")], others=[taken(*used)]), asked)) == want


def test_of_two_nodes_the_one_whose_domain_is_free_is_taken() -> None:
    room = fleet([server("n1"), server("n2")], others=[taken(0, 4), taken(0, 1, 2, of="n2")])

    [found] = place(room, worker(gpu=4, topology=NVLINK))  # type: ignore[misc]

    assert found.node == "n2"  # n1 has six free, and no four of them in a group


@pytest.mark.parametrize(
    ("asked", "lacks"),
    [
        (worker(gpu=4, topology=NVLINK), "1 place with 4 nvidia.com/gpu in one nvlink; the roomiest has 3 free"),
        (worker(2, gpu=2, topology=NVLINK), "1 place with 4 nvidia.com/gpu in one nvlink; the roomiest has 3 free"),
        (
            worker(3, gpu=2, topology=EACH_NVLINK),
            "1 place with 2 nvidia.com/gpu in one nvlink; the roomiest has 3 free",
        ),
        (worker(gpu=8), "1 place with 8 nvidia.com/gpu."),
    ],
)
def test_a_wait_for_a_domain_says_how_much_of_it_is_free(asked: Role, lacks: str) -> None:
    found = place(fleet([server("n1")], others=[taken(0, 4)]), asked)

    assert isinstance(found, fit.Short)
    assert lacks in str(found.because(Reason.WAITING_FOR_NODES))


def test_devices_of_victims_that_are_on_their_way_out_are_not_given_away_twice() -> None:
    room = fleet([server("n1", gpus=4)])
    victim = place(room, worker(gpu=4))
    assert not isinstance(victim, fit.Short)
    [held] = victim
    room.reserve("n1", held.requests, 1)
    room.reserve("n1", held.requests, -1, now=False)  # it leaves
    [promised] = fit.place(room, [worker(gpu=2)], {"worker": NAMED}, gone=[held])  # type: ignore[misc]
    room.reserve("n1", promised.requests, 1, now=False)

    assert isinstance(place(room, worker(gpu=1)), fit.Short)


@pytest.mark.parametrize(
    ("asked", "together", "kind", "problem"),
    [
        (worker(gpu=2, topology=NVLINK), Together(), NAMED, ""),
        (worker(gpu=2, topology=NVLINK), Together(), replace(NAMED, devices=None), ""),
        (worker(gpu=2), Together(required="nvlink"), replace(NAMED, devices=None), "a role has to ask for it"),
        (worker(gpu=2), Together(required="nvlink"), NAMED, "a role has to ask for it"),
        (worker(gpu=2, topology=replace(NVLINK, slice_level="pcie")), Together(), NAMED, "only one level"),
        (worker(gpu=2, topology=Topology(required="numa")), Together(), NAMED, "has no level numa"),
    ],
)
def test_what_can_be_promised_inside_a_node(asked: Role, together: Together, kind: Flavor, problem: str) -> None:
    said = unpromised(gang("job", asked, together=together), ["worker"], kind)

    assert problem in said
    assert bool(problem) == bool(said)


def test_nodes_whose_devices_claims_name_are_for_no_flavor_that_makes_none() -> None:
    asked = role(gpu=1, need=GpuNeed())

    assert isinstance(fit.place(fleet([server("n1")]), [asked], {"worker": flavor()}), fit.Short)


PLUGIN = replace(NAMED, devices=None)
KUBELET = "more than the 4 GPUs that share a domain, and the kubelet picks which a pod gets"


@pytest.mark.parametrize(
    ("asked", "want"),
    [
        (worker(gpu=4, topology=NVLINK), ["four"]),
        (worker(2, gpu=2, topology=NVLINK), ["four"]),
        (worker(gpu=1, topology=NVLINK), ["four"]),  # one GPU is near itself anywhere; the tightest node is taken
        (worker(2, gpu=4, topology=EACH_NVLINK), KUBELET),
        (worker(gpu=8, topology=NVLINK), KUBELET),
        (worker(gpu=8), ["eight"]),
    ],
)
def test_where_the_kubelet_picks_a_domain_is_promised_on_nodes_that_are_one(asked: Role, want: list[str] | str) -> None:
    """A node of which half is broken has two halves all the same."""
    half = replace(node("half", gpu=4), broken={GPU: 4})
    room = fleet([node("four", gpu=4), node("eight", gpu=8), half])

    found = fit.place(room, [asked], {"worker": PLUGIN})

    if isinstance(found, fit.Short):
        assert str(want) in str(found.because(Reason.EXCEEDS_CLUSTER))
    else:
        assert [p.node for p in found] == want


def test_of_nodes_that_are_cordoned_only_those_that_are_one_domain_are_said_to_be_of_use() -> None:
    asked, flavors = [worker(2, gpu=2, topology=NVLINK)], {"worker": PLUGIN}
    for nodes, never in (
        ([node("eight", gpu=8)], True),
        ([node("eight", gpu=8, unschedulable=True)], True),
        ([node("eight", gpu=8), node("four", gpu=4, unschedulable=True)], False),
    ):
        room = fleet(nodes)
        assert (fit.exceeds_cluster(room, asked, flavors) is not None) is never
        found = fit.place(room, asked, flavors)
        assert isinstance(found, fit.Short)
        assert ("cordoned: four" in found.lacks) is not never
        assert "cordoned: eight" not in found.lacks


def test_gangs_of_one_cycle_get_devices_of_their_own() -> None:
    jobs = [gang(f"job-{i}", worker(gpu=2), seq=i) for i in range(4)]

    decided = plan(snapshot(jobs, nodes=[server("n1")], flavors=[NAMED]), 0.0)

    assert sorted(got(tuple(p for one in decided.admissions for p in one.placements))) == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


TOPOLOGIES = st.sampled_from([Topology(), NVLINK, PCIE, EACH_NVLINK, Topology(slice_level="pcie", slice_size=2)])
ROLES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8), TOPOLOGIES), min_size=1, max_size=3)
JOBS = st.lists(ROLES, max_size=8)


@given(jobs=JOBS, used=st.sets(st.integers(0, 7)), gpus=st.sampled_from([4, 6, 8]))
def test_no_device_is_given_twice_and_domains_are_kept(
    jobs: list[list[tuple[int, int, Topology]]], used: set[int], gpus: int
) -> None:
    others = {number for number in used if number < gpus}
    room = fleet([server("n1", gpus), server("n2")], others=[taken(*sorted(others))] if others else [])
    count: Counter[tuple[str, str]] = Counter(("n1", name(number)) for number in others)
    for job in jobs:
        roles = [worker(pods, gpu, topology, f"role-{i}") for i, (pods, gpu, topology) in enumerate(job)]
        roles = [one for one in roles if one.pods % one.topology.slice_size == 0]
        found = place(room, *roles) if roles else ()
        if isinstance(found, fit.Short):
            continue
        for p in found:
            room.reserve(p.node, p.requests, p.pods)
            count.update((p.node, r) for r, _ in p.requests if is_device(r))
        for one in roles:
            _check(one, sorted((p for p in found if p.role == one.name), key=lambda p: p.first))
    assert set(count.values()) <= {1}


def _check(asked: Role, found: Sequence[Placement]) -> None:
    gpus, topology = dict(asked.requests).get(GPU, 0), asked.topology
    pods = [
        (p.node, [int(r.rpartition("-")[2]) for r, _ in p.requests if is_device(r)])
        for p in found
        for _ in range(p.pods)
    ]
    assert len(pods) == asked.pods
    assert all(len(devices) == gpus for _, devices in pods)
    level = topology.required or topology.slice_level
    size = {"nvlink": 4, "pcie": 2}.get(level, 8)
    mates = asked.pods if topology.required else topology.slice_size
    for first in range(0, asked.pods, mates) if level and gpus else ():
        domains = {(at, number // size) for at, devices in pods[first : first + mates] for number in devices}
        assert len(domains) == 1
