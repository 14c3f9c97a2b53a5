"""Where the pods of a gang go in a topology, held against an exact solver."""

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from queuectl.core import fit
from queuectl.model.gpus import Gpus, Unit
from queuectl.model.objects import (
    ALIKE,
    ANYWHERE,
    Constraints,
    Flavor,
    GpuNeed,
    Level,
    Node,
    Role,
    Taint,
    Together,
    Toleration,
    Topology,
)
from queuectl.model.resources import ALONE
from tests.support import exact
from tests.support.builders import GI, GPU, fleet, node, requests, role, spread

LEVELS = Flavor("racks", levels=(Level("block", "example.com/block"), Level("rack", "example.com/rack")))
CASES = 2000
MIG, HUGE, PORT, APART = "nvidia.com/mig-1g.10gb", "hugepages-2Mi", "hostport-TCP-80", "apart-team:app In llm"
SPOT = Taint("spot", "", "NoSchedule")


def at(name: str, block: str, rack: str) -> Node:
    return node(name, labels={"example.com/block": block, "example.com/rack": rack})


def near(pods: int, gpu: int = 8, name: str = "worker", **topology: object) -> Role:
    return replace(role(name, pods, gpu=gpu), topology=Topology(**topology))  # type: ignore[arg-type]


# Two blocks of three racks of four nodes; one node is half used.
NODES = [at(f"n{b}{r}{n}", f"b{b}", f"r{r}") for b in range(2) for r in range(3) for n in range(4)]
HALF = [("n000", requests(gpu=4), 1)]


@dataclass(frozen=True)
class Case:
    roles: tuple[Role, ...]
    want: dict[str, list[str]] | str  # role → the racks or nodes it is on, or what is missing
    together: Together = ALIKE
    nodes: list[Node] = field(default_factory=lambda: NODES)


CASES_BY_NAME = {
    "the tightest rack that holds it": Case((near(3),), {"worker": ["b0r0"]}),
    "a whole rack for a gang as large": Case((near(4),), {"worker": ["b0r1"]}),
    "the tightest block when no rack holds it": Case((near(5),), {"worker": ["b0r0", "b0r1"]}),
    "not across racks when one is required": Case((near(5, required="rack"),), "one rack with room for all of them; the roomiest, r1, has room for 4"),
    "as few racks as possible when one is preferred": Case((near(13, preferred="rack"),), {"worker": ["b0r0", "b1r0", "b1r1", "b1r2"]}),
    "slices each in a rack": Case((near(8, slice_level="rack", slice_size=4, required="block"),), {"worker": ["b0r1", "b0r2"]}),
    "slices, not a pod more": Case((near(24, gpu=8, slice_level="rack", slice_size=4),), "1 place with 8 nvidia.com/gpu"),
    "slices of which too few are whole": Case((near(21, slice_level="rack", slice_size=3),), "room for 3 pods in one rack, 7 times; there is for 6"),
    "balanced over the racks it needs": Case((near(6, balanced=True),), {"worker": ["b0r1", "b0r2"]}),
    "all roles in one block": Case((near(4, name="a"), near(3, name="b")), {"a": ["b0r1"], "b": ["b0r0"]}, Together("block")),
    "no rack for all roles": Case((near(4, name="a"), near(3, name="b")), "one rack with room for all roles", Together("rack")),
    "roles with a rack each": Case((near(4, name="a", required="rack"), near(4, name="b", required="rack")), {"a": ["b0r1"], "b": ["b0r2"]}),
    "of equal nodes the one in the tightest rack": Case(
        (near(1),), {"worker": ["b1r9"]}, nodes=[at("a", "b0", "r0"), at("b", "b0", "r0"), at("z", "b1", "r9")]
    ),
    "of a wider level that is required nodes need the label, too": Case(
        (near(1, required="block"),), {"worker": ["b0r1"]}, Together("rack"),
        nodes=[node("a", labels={"example.com/rack": "r0"}), at("b", "b0", "r1")],
    ),
    "nodes that only one role can use are left to it, though the other has the larger pods": Case(
        (replace(near(2, gpu=8, name="a"), constraints=Constraints()), replace(near(1, gpu=4, name="b"), constraints=Constraints((("example.com/rack", "r1"),)))),
        {"a": ["b0r0", "b0r2"], "b": ["b0r1"]}, nodes=[at("n0", "b0", "r1"), at("n1", "b0", "r0"), at("n2", "b0", "r2")],
    ),
    "nodes without the label are in no rack": Case(
        (near(2, required="rack"),), {"worker": ["b0r1"]},
        nodes=[node("x"), node("y"), at("n1", "b0", "r1"), at("n2", "b0", "r1")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES_BY_NAME.values(), ids=CASES_BY_NAME.keys())
def test_where_pods_go(case: Case) -> None:
    """The racks that a gang is on, or the words that it is told."""
    found = fit.place(fleet(case.nodes, reserved=HALF), case.roles, _flavors(case.roles), case.together)
    if isinstance(found, fit.Short):
        assert found.lacks == case.want
        return
    rack = {one.name: "".join(one.labels.values()) for one in case.nodes}
    assert {name: sorted({rack[n] for n in there}) for name, there in spread(found).items()} == case.want


def test_gpus_of_a_gang_are_of_one_model_and_one_driver_when_asked() -> None:
    """A gang does not go where it would have GPUs of two kinds."""
    kinds = [Gpus("A100", "550"), Gpus("A100", "550"), Gpus("A100", "570"), Gpus("H100", "570"), Gpus("H100", "570")]
    nodes = [replace(node(f"n{i}"), gpus=gpus) for i, gpus in enumerate(kinds)]

    def placed(pods: int, **asked: bool) -> set[str]:
        found = fit.place(fleet(nodes), [near(pods)], _flavors([near(pods)]), Together(**asked))  # type: ignore[arg-type]
        return set() if isinstance(found, fit.Short) else {p.node for p in found}

    assert placed(3) == {"n0", "n1", "n2"}
    assert placed(4) == set()
    assert placed(4, same_model=False) == {"n0", "n1", "n2", "n3"}
    assert placed(3, same_driver=True) == set()
    assert placed(2, same_driver=True) == {"n3", "n4"}  # all of their kind, so that three A100 nodes stay free


def test_gpus_that_turn_out_to_be_others_are_alike_no_more_though_all_labels_stay() -> None:
    """As ResourceSlices tell them, which come after the node and change with its driver."""
    nodes = [replace(node(f"n{i}"), gpus=Gpus("A100", "1")) for i in range(2)]
    for others, alike in (
        (Gpus("A100", "2"), Together(same_driver=True)),
        (Gpus("H100", "1"), Together(same_model=True)),
    ):
        room = fleet(nodes)
        assert not isinstance(fit.place(room, [near(2)], _flavors([near(2)]), alike), fit.Short)
        room.set_node(replace(nodes[1], gpus=others))
        assert isinstance(fit.place(room, [near(2)], _flavors([near(2)]), alike), fit.Short)


def test_nodes_of_whose_driver_no_label_tells_do_not_pass_for_alike() -> None:
    nodes = [replace(node(f"n{i}"), gpus=Gpus("A100")) for i in range(2)]
    for pods, lacks in (
        (1, ""),
        (
            2,
            "one version of the GPU driver with room for all of them; the roomiest, which no label tells, has room for 1",
        ),
    ):
        found = fit.place(fleet(nodes), [near(pods)], _flavors([near(pods)]), Together(same_driver=True))
        assert (found.lacks if isinstance(found, fit.Short) else "") == lacks


def test_what_an_exact_solver_finds_is_found_and_nothing_impossible() -> None:
    """Of small random gangs that fit, at least 99 of 100 get a place, and every place keeps all that is promised."""
    random = Random(1)
    possible = found = 0
    for _ in range(CASES):
        nodes, roles, together = _nodes(random), _roles(random), _together(random)
        used = [(one.name, requests(cpu=random.choice([1, 4]), gpu=_some(one, random)), 1) for one in nodes[::2]]
        placed = fit.place(fleet(nodes, reserved=used), roles, _flavors(roles), together)
        holds = exact.fits(nodes, roles, LEVELS, together, used)
        possible += holds
        if isinstance(placed, fit.Short):
            continue
        assert holds
        assert exact.broken(nodes, roles, LEVELS, together, placed, used=used) == []
        found += 1
    assert possible > CASES // 6
    assert found >= 0.99 * possible, f"{found} of {possible}"


def _some(one: Node, random: Random) -> int:
    return random.choice([0, 1, 2]) if one.allocatable.get(GPU) else 0


def _nodes(random: Random) -> list[Node]:
    result = []
    for i in range(random.randint(3, 9)):
        labels = {"example.com/block": f"b{random.randint(0, 1)}", "example.com/rack": f"r{random.randint(0, 2)}"}
        if random.random() < 0.1:
            del labels[random.choice(sorted(labels))]
        unit = Unit(random.choice([40, 80]) * GI, random.random() < 0.1, random.choice(["", "", "", "1g.10gb"]))
        kind = Gpus(random.choice("AAB"), random.choice("112"), unit=unit, slices=((MIG, Unit(10 * GI)),))
        asks: dict[str, Any] = {MIG: random.choice([0, 0, 7]), HUGE: random.choice([0, 4, 16])}
        one = node(
            f"n{i}", gpu=random.choice([0, 2, 4, 8]), cpu=random.choice([8, 16, 64]), pods=random.choice([2, 10]),
            labels=labels | {"disk": random.choice(["ssd", "hdd"])}, taints=[SPOT] if random.random() < 0.2 else [], **asks,
        )  # fmt: skip
        result.append(replace(one, gpus=kind))
    return result


def _roles(random: Random) -> list[Role]:
    roles = []
    for i in range(random.choice([1, 1, 2, 3])):
        size = random.choice([1, 1, 2, 3])
        topology = Topology(
            required=random.choice(["", "", "rack", "block", "node"]),
            preferred=random.choice(["", "rack", "block"]),
            slice_level=random.choice(["rack", "node", "block"]) if size > 1 else "",
            slice_size=size,
            balanced=random.random() < 0.2,
        )
        asks: dict[str, Any] = {"gpu": random.choice([0, 1, 2, 4]), "cpu": random.choice([1, 4, 8])}
        for more in ({"gpu": 0, MIG: 2}, {HUGE: 1}, {HUGE: 4}, {PORT: ALONE}, {APART: ALONE}, {APART: 1}):
            asks |= more if random.random() < 0.1 else {}
        least = 0 if MIG in asks else random.choice([0, 0, 60 * GI])
        need = GpuNeed((), least, shared=random.random() < 0.2, slice=random.choice(["", "", "", "1g.10gb"]))
        one = role(
            f"role{i}", size * random.randint(1, 4), need=need, selector={"disk": "ssd"} if random.random() < 0.15 else {},
            tolerations=[Toleration("spot", "Exists")] if random.random() < 0.4 else [], **asks,
        )  # fmt: skip
        roles.append(replace(one, topology=topology if random.random() < 0.7 else ANYWHERE))
    return roles


def _together(random: Random) -> Together:
    return Together(
        required=random.choice(["", "", "", "rack", "block"]),
        preferred=random.choice(["", "", "rack"]),
        same_model=random.random() < 0.7,
        same_driver=random.random() < 0.2,
    )


def _flavors(roles: list[Role] | tuple[Role, ...]) -> dict[str, Flavor]:
    return {one.name: LEVELS for one in roles}
