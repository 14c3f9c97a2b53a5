"""A gang that has lost nodes gets places for just the lost pods, under the same constraints, or none."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from queuectl.core import fit
from queuectl.core.lifecycle import PodKey
from queuectl.core.repair import places_for_missing
from queuectl.model.gpus import Gpus
from queuectl.model.objects import ANYWHERE, Flavor, Gang, Level, Node, Role, Together, Topology
from tests.support.builders import fleet, gang, node, requests, role

ONE = requests(gpu=1)
RACKS = Flavor("racks", levels=(Level("block", "block"), Level("rack", "rack")))


def servers(*names: str, gpu: int = 2, model: str = "H100") -> list[Node]:
    """Return nodes of racks: block, rack and node are the letters of a name."""
    nodes = [node(name, gpu=gpu, labels={"block": name[0], "rack": name[:2]}) for name in names]
    return [replace(one, gpus=Gpus(model)) for one in nodes]


def mend(
    nodes: Iterable[Node], asked: Gang, stays: Mapping[str, int], used: Mapping[str, int] = {}
) -> dict[str, int] | None:
    """Return node → pods that replace those missing; the first pods of the first role stay."""
    there = [name for name, pods in stays.items() for _ in range(pods)]
    keys = {(asked.roles[0].name, index): name for index, name in enumerate(there)}
    reserved = [(name, ONE, pods) for name, pods in Counter(there).items()]
    world = fleet(nodes, reserved=reserved + [(name, ONE, pods) for name, pods in used.items()])
    found = places_for_missing(world, asked, dict.fromkeys((r.name for r in asked.roles), RACKS), keys)
    return None if found is None else dict(Counter(found.values()))


def workers(pods: int, topology: Topology = ANYWHERE) -> Gang:
    """Return a gang of pods with one GPU each."""
    return gang("g", replace(role(pods=pods, gpu=1), topology=topology))


def test_goes_to_the_rack_in_which_the_others_have_to_be_though_another_is_emptier() -> None:
    """What is required of all pods holds for the old and the new ones together."""
    asked = workers(4, Topology(required="rack"))
    assert mend(servers("aa1", "aa2", "ab1"), asked, {"aa1": 2}) == {"aa2": 2}
    assert mend(servers("aa1", "ab1", "ab2"), asked, {"aa1": 2}) is None


def test_a_preferred_rack_is_that_of_most_of_the_others_and_else_one_as_near_as_can_be() -> None:
    """A preference keeps no gang from being mended."""
    asked = workers(4, Topology(preferred="rack"))
    nodes = servers("aa1", "ab1", "ab2", "ac1", "ba1")
    assert mend(nodes, asked, {"aa1": 1, "ab1": 2}) == {"ab2": 1}
    assert mend(nodes, asked, {"aa1": 2, "ab1": 1}, {"ab1": 1, "ab2": 1}) == {"ab2": 1}
    assert mend(nodes, asked, {"aa1": 2, "ab1": 1}, {"ab1": 1, "ab2": 2}) == {"ac1": 1}
    assert mend(nodes, asked, {"aa1": 2, "ab1": 1}, {"ab1": 1, "ab2": 2, "ac1": 2}) == {"ba1": 1}


def test_a_slice_is_made_whole_where_its_others_are() -> None:
    """Of two slices that lost a pod, each gets it back in its own rack; a lost slice finds another rack."""
    asked = workers(6, Topology(slice_level="rack", slice_size=2))
    world = fleet(servers("aa1", "aa2", "ab1", "ab2", "ba1"), reserved=[("aa1", ONE, 2), ("ab1", ONE, 2)])
    stays = {("worker", 0): "aa1", ("worker", 3): "ab1"}
    found = places_for_missing(world, asked, {"worker": RACKS}, stays)
    assert found is not None
    assert (found["worker", 1], found["worker", 2]) == ("aa2", "ab2")
    assert (found["worker", 4], found["worker", 5]) == ("ba1", "ba1")


def test_a_role_that_is_lost_goes_where_the_other_roles_of_its_gang_are() -> None:
    """All roles share the domain that the gang requires; a helper without GPUs may be anywhere."""
    asked = gang("g", role("a", 1, gpu=1), role("b", 2, gpu=1), role("helper", 1, cpu=1), together=Together("rack"))
    flavors = dict.fromkeys(("a", "b", "helper"), RACKS)
    world = fleet(servers("aa1", "ab1", "ab2"), reserved=[("ab1", ONE, 2)])
    found = places_for_missing(world, asked, flavors, {("a", 0): "ab1"})
    assert found is not None
    assert (found["b", 0], found["b", 1]) == ("ab2", "ab2")
    full = fleet(servers("aa1", "ab1", "ab2"), reserved=[("ab1", ONE, 2), ("ab2", ONE, 1)])
    assert places_for_missing(full, asked, flavors, {("a", 0): "ab1"}) is None


def test_a_gang_of_which_nothing_stays_is_placed_anew_as_a_whole() -> None:
    """All of its roles find one rack, though another would hold the first of them."""
    asked = gang("g", role("a", 1, gpu=2), role("b", 2, gpu=1), together=Together("rack"))
    world = fleet(servers("aa1", "ba1", "ba2"))
    assert places_for_missing(world, asked, dict.fromkeys("ab", RACKS), {}) == {
        ("a", 0): "ba1", ("b", 0): "ba2", ("b", 1): "ba2",
    }  # fmt: skip


def test_gpus_stay_of_one_model() -> None:
    """A gang of H100s is not mended with an A100."""
    other = servers("aa2", model="A100")
    assert mend(servers("aa1") + other, workers(3), {"aa1": 2}) is None
    assert mend(servers("aa1", "ba1") + other, workers(3), {"aa1": 2}) == {"ba1": 1}


TOPOLOGIES = [
    Topology(),
    Topology(preferred="rack"),
    Topology(required="block"),
    Topology(required="rack"),
    Topology(required="block", slice_level="rack", slice_size=2),
    Topology(preferred="block", slice_level="rack", slice_size=2),
    Topology(slice_level="node", slice_size=2),
]
NAMES = ("aa1", "aa2", "ab1", "ba1", "ba2", "bb1")


@given(st.data())
def test_finds_a_place_exactly_when_there_is_one(data: st.DataObject) -> None:
    """Held against every way to put the missing pods onto nodes; what is found breaks nothing that was asked."""
    sizes = data.draw(st.tuples(*(st.integers(0, 3) for _ in NAMES)))
    asked = gang(
        "g",
        replace(
            role(
                pods=data.draw(
                    st.sampled_from([2, 4]),
                ),
                gpu=1,
            ),
            topology=data.draw(st.sampled_from(TOPOLOGIES)),
        ),
    )
    before = [one for name, size in zip(NAMES, sizes, strict=True) for one in servers(name, gpu=size)]
    placed = fit.place(fleet(before), asked.roles, {"worker": RACKS})
    if isinstance(placed, fit.Short):
        return
    nodes = [p.node for p in placed for _ in range(p.pods)]
    lost = data.draw(st.sets(st.sampled_from(NAMES)))
    stays = {("worker", index): name for index, name in enumerate(nodes) if name not in lost}
    there = Counter(stays.values())
    used = {n.name: data.draw(st.integers(0, n.allocatable.get("nvidia.com/gpu", 0) - there[n.name])) for n in before}
    world = fleet(
        [replace(one, ready=one.name not in lost) for one in before],
        reserved=[(name, ONE, there[name] + used[name]) for name in used],
    )
    found = places_for_missing(world, asked, {"worker": RACKS}, stays)
    room = {
        n.name: n.allocatable.get("nvidia.com/gpu", 0) - there[n.name] - used[n.name]
        for n in before
        if n.name not in lost
    }
    missing = [("worker", index) for index in range(asked.roles[0].pods) if ("worker", index) not in stays]
    if found is not None:
        assert found.keys() == set(missing)
        assert _holds(asked.roles[0], room, stays, found)
        return
    ways = product([name for name in room if room[name]], repeat=len(missing))
    assert not any(_holds(asked.roles[0], room, stays, dict(zip(missing, way, strict=True))) for way in ways)


def _holds(role: Role, room: Mapping[str, int], stays: Mapping[PodKey, str], found: Mapping[PodKey, str]) -> bool:
    """Tell whether nodes have room for what is found, and all pods together are as close as they have to be."""
    letters = {"block": 1, "rack": 2, "node": 3}
    asked, everything = role.topology, dict(stays) | dict(found)
    if any(pods > room.get(name, 0) for name, pods in Counter(found.values()).items()):
        return False
    if asked.required and len({name[: letters[asked.required]] for name in everything.values()}) > 1:
        return False
    slices: dict[int, set[str]] = {}
    for (_, index), name in everything.items():
        if asked.slice_level:
            slices.setdefault(index // asked.slice_size, set()).add(name[: letters[asked.slice_level]])
    return all(len(homes) == 1 for homes in slices.values())
