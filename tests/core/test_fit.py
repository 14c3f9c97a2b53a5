"""All of a gang on nodes, or nothing and what is missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queuectl.core import fit
from queuectl.core.fit import exceeds_cluster
from queuectl.core.fleet import AMOUNT_LIMIT, Base, Fleet
from queuectl.model.objects import Flavor, Gang, Role, Taint
from queuectl.model.plan import Placement
from queuectl.model.reasons import Reason, Why
from queuectl.model.resources import MAX_AMOUNT
from tests.support.builders import HCA, flavor, fleet, gang, node, requests, role, spread


def place(fleet: Fleet, roles: Sequence[Role], flavors: Mapping[str, Flavor]) -> tuple[Placement, ...] | Why:
    """Return a place, or the reason that the gang would be told."""
    found = fit.place(fleet, roles, flavors)
    if isinstance(found, fit.Short):
        return exceeds_cluster(fleet, roles, flavors) or found.because(Reason.WAITING_FOR_NODES)
    return found


ANY = flavor()
EIGHT = requests(gpu=8)
NO_HCA: dict[str, Any] = dict.fromkeys(HCA, 0)


@dataclass(frozen=True)
class Case:
    fleet: Fleet
    gang: Gang
    want: dict[str, dict[str, int]] | str = field(default_factory=dict)  # role → node → pods, or the sentence


def used(**gpus: int) -> Fleet:
    """Return 8-GPU nodes of which so many GPUs are reserved."""
    reserved = [(name, requests(gpu=gpu), 1) for name, gpu in gpus.items() if gpu]
    return fleet([node(name) for name in gpus], reserved=reserved)


PLACED = {
    "a whole gang on whole nodes": Case(used(a=0, b=0), gang("g", role(pods=2, gpu=8)), {"worker": {"a": 1, "b": 1}}),
    "one pod fills up the fullest node": Case(used(a=0, b=4, c=6), gang("g", role(gpu=2)), {"worker": {"c": 1}}),
    "equal nodes are taken by name": Case(used(b=0, c=0, a=0), gang("g", role(gpu=1)), {"worker": {"a": 1}}),
    "few nodes, the emptiest first, the last one tight": Case(
        used(a=4, b=0, c=5, d=0, e=6), gang("g", role(pods=18, gpu=1)), {"worker": {"b": 8, "d": 8, "e": 2}}
    ),
    "the last one is tight by what a pod needs": Case(used(a=1, b=2, c=0), gang("g", role(pods=3, gpu=4)), {"worker": {"c": 2, "a": 1}}),
    "cpu binds before GPUs": Case(fleet([node("a", cpu=8), node("b", cpu=8)]), gang("g", role(pods=2, gpu=1, cpu=5)), {"worker": {"a": 1, "b": 1}}),
    "the number of pods binds": Case(fleet([node("a", pods=1), node("b", pods=1)]), gang("g", role(pods=2, gpu=1)), {"worker": {"a": 1, "b": 1}}),
    "roles share nodes, the largest pods are placed first": Case(
        used(a=0, b=4), gang("g", role("small", 4, gpu=1), role("large", 1, gpu=8)), {"large": {"a": 1}, "small": {"b": 4}}
    ),
    "GPUs go before cpu": Case(
        fleet([node("a", gpu=8, cpu=8), node("b", gpu=0, cpu=4)]), gang("g", role("ps", 1, cpu=4), role("worker", 1, gpu=8, cpu=8)),
        {"worker": {"a": 1}, "ps": {"b": 1}},
    ),
    "others' pods and reservations are not free": Case(
        fleet([node("a"), node("b"), node("c")], others=[("a", requests(gpu=1))], reserved=[("b", requests(gpu=1), 1)]),
        gang("g", role(gpu=8)), {"worker": {"c": 1}},
    ),
    "a node short of what nobody asks for is good": Case(fleet([node("a")], others=[("a", requests(memory="2Ti"))]), gang("g", role(gpu=8)), {"worker": {"a": 1}}),
    "a zero request asks for nothing": Case(fleet([node("a", gpu=0)]), gang("g", role(gpu=0, cpu=1, **NO_HCA)), {"worker": {"a": 1}}),
    "amounts of any size": Case(fleet([node("a", cpu="1e15", memory="7Ei")]), gang("g", role(pods=100, cpu="1e6", memory="1Ti")), {"worker": {"a": 100}}),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACED.values(), ids=PLACED.keys())
def test_where_a_gang_goes(case: Case) -> None:
    placed = place(case.fleet, case.gang.roles, {one.name: ANY for one in case.gang.roles})
    assert not isinstance(placed, Why), str(placed)
    assert spread(placed) == case.want
    asked = {one.name: one.requests for one in case.gang.roles}
    assert all((one.flavor, one.requests) == ("any", asked[one.role]) for one in placed)


WAITS = {
    "one pod of four has no node": Case(
        used(a=0, b=0, c=0, d=1), gang("g", role(pods=4, gpu=8)),
        "Only 3 of 4 pods of role worker fit on the 4 nodes of flavor any that they may use: short of 1 place with 8 nvidia.com/gpu.",
    ),
    "GPUs that are free on different nodes don't add up": Case(
        used(a=4, b=4), gang("g", role(gpu=8)),
        "Only 0 of 1 pod of role worker fit on the 2 nodes of flavor any that they may use: short of 1 place with 8 nvidia.com/gpu.",
    ),
    "each resource is there, but not together": Case(
        fleet([node("a"), node("b")], reserved=[("a", EIGHT, 1), ("b", requests(cpu=96), 1)]), gang("g", role(pods=1, gpu=8, cpu=8)),
        "Only 0 of 1 pod of role worker fit on the 2 nodes of flavor any that they may use: short of 1 place with all that a pod requests on one node.",
    ),
    "the scarcest resource is named": Case(
        fleet([node("a"), node("b")], reserved=[("a", requests(gpu=2, cpu=90), 1)]), gang("g", role(pods=4, gpu=4, cpu=48)),
        "Only 2 of 4 pods of role worker fit on the 2 nodes of flavor any that they may use: short of 2 places with 48 cpu.",
    ),
    "nodes that could hold it are not ready or cordoned": Case(
        fleet([
            node("a", unschedulable=True, taints=[Taint("node.kubernetes.io/unschedulable", "", "NoSchedule")]),
            *(node(name, ready=False, taints=[Taint("node.kubernetes.io/not-ready", "", "NoExecute")]) for name in "bc"),
            node("d", unschedulable=True, taints=[Taint("x", "", "NoSchedule")]), node("e"),
        ]),
        gang("g", role(pods=4, gpu=8)),
        "Only 1 of 4 pods of role worker fit on the 1 node of flavor any that they may use: short of 3 places with 8 nvidia.com/gpu;"
        " 2 nodes that it could use are not Ready: b, c; 1 node that it could use is cordoned: a.",
    ),
    "the second role finds the room used up by the first": Case(
        used(a=0, b=7), gang("g", role("a-small", 2, gpu=1), role("large", 1, gpu=8)),
        "Only 1 of 2 pods of role a-small fit on the 2 nodes of flavor any that they may use: short of 1 place with 1 nvidia.com/gpu.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WAITS.values(), ids=WAITS.keys())
def test_what_a_gang_waits_for(case: Case) -> None:
    told = place(case.fleet, case.gang.roles, {one.name: ANY for one in case.gang.roles})
    assert isinstance(told, Why)
    assert (told.reason, str(told)) == (Reason.WAITING_FOR_NODES, case.want)
    assert exceeds_cluster(case.fleet, case.gang.roles, {one.name: ANY for one in case.gang.roles}) is None


NEVER = "Can never fit on today's nodes: of {} of role worker, {} would fit on the {} of flavor any that they may use if nothing else were there; short of {}."
HOPELESS = {
    "no nodes": Case(fleet(), gang("g", role(pods=2, gpu=8)), NEVER.format("2 pods", 0, "0 nodes", "2 places with 8 nvidia.com/gpu")),
    "larger than any node": Case(used(a=0, b=8), gang("g", role(gpu=16)), NEVER.format("1 pod", 0, "2 nodes", "1 place with 16 nvidia.com/gpu")),
    "larger than the cluster": Case(used(a=0, b=8), gang("g", role(pods=5, gpu=4)), NEVER.format("5 pods", 4, "2 nodes", "1 place with 4 nvidia.com/gpu")),
    "larger than the cluster, were its cordoned node back": Case(
        fleet([node("a"), node("b", unschedulable=True)]), gang("g", role(pods=3, gpu=8)),
        NEVER.format("3 pods", 1, "1 node", "2 places with 8 nvidia.com/gpu; 1 node that it could use is cordoned: b"),
    ),
    "a resource that no node has": Case(used(a=0), gang("g", role(gpu=1, **HCA)), NEVER.format("1 pod", 0, "1 node", "1 place with 1 rdma/hca")),
    "a resource that only a node had that is gone": Case(
        fleet([node("a", **HCA), node("a")]), gang("g", role(gpu=1, **HCA)), NEVER.format("1 pod", 0, "1 node", "1 place with 1 rdma/hca")
    ),
    "all nodes are tainted": Case(
        fleet([node("c", taints=[Taint("x", "", "NoSchedule")])]),
        gang("g", role(gpu=8)), NEVER.format("1 pod", 0, "0 nodes", "1 place with 8 nvidia.com/gpu"),
    ),
    "more than a number can hold": Case(
        fleet([node("a", cpu="9e18"), node("b", memory="7Ei")]), gang("g", role(pods=2, cpu=MAX_AMOUNT, memory=MAX_AMOUNT, gpu=MAX_AMOUNT * 4)),
        NEVER.format("2 pods", 0, "2 nodes", f"2 places with {MAX_AMOUNT * 4} nvidia.com/gpu"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOPELESS.values(), ids=HOPELESS.keys())
def test_what_can_never_fit_says_so(case: Case) -> None:
    told = place(case.fleet, case.gang.roles, {one.name: ANY for one in case.gang.roles})
    assert isinstance(told, Why)
    assert (told.reason, str(told)) == (Reason.EXCEEDS_CLUSTER, case.want)


def test_a_flavor_limits_the_nodes() -> None:
    nodes = fleet([node("a", labels={"gpu": "a100"}), node("b", labels={"gpu": "h100"})])
    placed = place(nodes, gang("g", role(gpu=8)).roles, {"worker": flavor("h100", labels={"gpu": "h100"})})
    assert not isinstance(placed, Why)
    assert spread(placed) == {"worker": {"b": 1}}


def test_placing_changes_nothing() -> None:
    nodes = used(a=0, b=3)
    before = nodes.matrix(Base.FREE).tolist(), nodes.matrix(Base.ALLOCATABLE).tolist()
    assert not isinstance(place(nodes, gang("g", role(pods=2, gpu=4)).roles, {"worker": ANY}), Why)
    assert isinstance(place(nodes, gang("g", role(pods=4, gpu=4)).roles, {"worker": ANY}), Why)
    assert (nodes.matrix(Base.FREE).tolist(), nodes.matrix(Base.ALLOCATABLE).tolist()) == before


def test_many_wild_pods_of_others_do_not_overflow_a_node() -> None:
    wild = requests(memory=MAX_AMOUNT)
    nodes = fleet([node("a", memory=MAX_AMOUNT)], others=[("a", wild)] * 2000)
    assert isinstance(place(nodes, gang("g", role(memory=1)).roles, {"worker": ANY}), Why)
    for _ in range(2000):
        nodes.use("a", wild, -1)
    assert nodes.room("a")["memory"] == AMOUNT_LIMIT


sizes = st.integers(0, 9)
rooms = st.lists(st.tuples(sizes, sizes, sizes), min_size=1, max_size=6)  # gpu, cpu, pods per node


@given(rooms=rooms, pods=st.integers(1, 12), gpu=sizes, cpu=sizes)
def test_one_role_is_placed_exactly_when_it_fits(
    rooms: list[tuple[int, int, int]], pods: int, gpu: int, cpu: int
) -> None:
    """Compare with counting by hand; and no plan uses more nodes than needed, nor leaves its last one looser."""
    nodes = fleet([node(f"n{i}", gpu=g, cpu=c, memory=0, pods=p) for i, (g, c, p) in enumerate(rooms)])
    counts = [min([p] + [have // ask for have, ask in ((g, gpu), (c, cpu)) if ask]) for g, c, p in rooms]
    placed = place(nodes, gang("g", role(pods=pods, gpu=gpu, cpu=cpu)).roles, {"worker": ANY})
    if sum(counts) < pods:
        assert isinstance(placed, Why)
        assert placed.facts["found"] == sum(counts)
        return
    assert not isinstance(placed, Why)
    chosen = spread(placed)["worker"]
    assert sum(chosen.values()) == pods
    assert all(0 < count <= counts[int(name[1:])] for name, count in chosen.items())
    largest = sorted(counts, reverse=True)
    assert len(chosen) == next(n for n in range(1, len(counts) + 1) if sum(largest[:n]) >= pods)
    *_, (tail, rest) = chosen.items()
    spare = [count for i, count in enumerate(counts) if f"n{i}" not in chosen]
    assert not any(rest <= count < counts[int(tail[1:])] for count in spare)
