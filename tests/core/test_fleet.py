"""The matrix of nodes: kept incrementally, it equals one that is built from scratch."""

from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from queuectl.core import fleet as fleets
from queuectl.core.fleet import Base, Fleet
from queuectl.model.objects import Constraints, Flavor, Node, Place, Taint
from tests.support.builders import GPU, Requests, flavor, fleet, node, requests, role

ANY = flavor()
PLAIN = Constraints()


@dataclass(frozen=True)
class Case:
    fleet: Fleet
    want: Place
    constraints: Constraints = PLAIN
    flavor: Flavor = ANY


EIGHT, FOUR = requests(gpu=8), requests(gpu=4)
PLACES = {
    "reserved and free": Case(fleet([node("a")], reserved=[("a", EIGHT, 1)]), Place.GOOD),
    "unknown": Case(fleet(), Place.GONE),
    "deleted": Case(fleet(reserved=[("a", EIGHT, 1)]), Place.GONE),
    "cordoned": Case(fleet([node("a", unschedulable=True)], reserved=[("a", EIGHT, 1)]), Place.CLOSED),
    "not ready": Case(fleet([node("a", ready=False)]), Place.CLOSED),
    "newly tainted": Case(fleet([node("a", taints=[Taint("x", "", "NoSchedule")])]), Place.CLOSED),
    "relabelled": Case(fleet([node("a")]), Place.CLOSED, flavor=flavor(labels={"gpu": "h100"})),
    "not what the pods want": Case(fleet([node("a")]), Place.CLOSED, role(selector={"gpu": "h100"}).constraints),
    "others took what was reserved": Case(fleet([node("a")], reserved=[("a", EIGHT, 1)], others=[("a", requests(gpu=1))]), Place.CROWDED),
    "others took what was left": Case(fleet([node("a")], reserved=[("a", FOUR, 1)], others=[("a", FOUR)]), Place.GOOD),
    "others took too much of what nobody reserved": Case(fleet([node("a")], reserved=[("a", EIGHT, 1)], others=[("a", requests(cpu=200))]), Place.GOOD),
    "two gangs share it, one pod of others is too many": Case(
        fleet([node("a")], reserved=[("a", FOUR, 1), ("a", FOUR, 1)], others=[("a", requests(gpu=1))]), Place.CROWDED
    ),
    "it shrank below what is reserved": Case(fleet([node("a"), node("a", gpu=7)], reserved=[("a", EIGHT, 1)]), Place.CROWDED),
    "others left again": Case(
        fleet([node("a")], reserved=[("a", EIGHT, 1), ("a", FOUR, 3), ("a", FOUR, -3)]), Place.GOOD
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES.values(), ids=PLACES.keys())
def test_what_a_reserved_place_is_worth(case: Case) -> None:
    assert case.fleet.place("a", case.flavor, case.constraints, EIGHT) is case.want


def test_room_is_what_others_leave() -> None:
    one = fleet([node("a", gpu=8, cpu=4, memory=0)], others=[("a", requests(gpu=3, cpu=5))], reserved=[("a", FOUR, 1)])
    assert one.room("a") == {GPU: 5, "cpu": 0, "pods": 109}
    assert one.room("b") == {}
    one.remove_node("a")
    assert one.room("a") == {}


def test_a_node_that_announces_nonsense_has_nothing() -> None:
    one = fleet([Node("a", allocatable={"cpu": -(2**63), GPU: 8})], others=[("a", requests(cpu=1))])
    assert one.room("a") == {GPU: 8, "cpu": 0}


def test_removing_an_unknown_node_is_nothing() -> None:
    one = fleet([node("a")])
    one.remove_node("b")
    assert one.node_names() == ["a"]


def test_a_snapshot_reserves_for_itself() -> None:
    one = fleet([node("a")])
    copy = one.snapshot()
    copy.reserve("a", EIGHT, 1)
    assert one.matrix(Base.FREE).max() == 2**40
    assert (one.matrix(Base.FREE) - copy.matrix(Base.FREE)).sum() == 9
    assert one.place("a", ANY, PLAIN, EIGHT) is Place.GOOD


def test_a_snapshot_may_reserve_what_no_node_has() -> None:
    one = fleet([Node("a", allocatable={f"example.com/{i}": 1 for i in range(8)})])
    one.snapshot().reserve("b", FOUR, 1)
    assert one.columns(FOUR) is None
    one.use("b", FOUR, +1)
    assert one.matrix(Base.FREE).sum() == 8
    assert one.node_names() == ["a"]


def test_only_rows_that_hold_a_node_have_a_name() -> None:
    one = fleet([node("a")])
    assert [one.name(row) for row in one.domains().order] == ["a"]
    one.use("b", FOUR, +1)
    assert len(one.domains().order) == 1
    with pytest.raises(LookupError, match="holds no node"):
        one.name(next(row for row in range(16) if row not in one.domains().order))


def test_flavors_that_changed_are_looked_at_anew() -> None:
    one = fleet([node("a", labels={"gpu": "h100"})])
    mask = one.mask(ANY, PLAIN)
    assert one.mask(ANY, PLAIN) is mask
    one.forget_masks()
    assert one.mask(ANY, PLAIN) is not mask


def test_masks_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "MAX_MASKS", 2)
    one = fleet([node("a")])
    first, second = one.mask(ANY, PLAIN), one.mask(flavor("b"), PLAIN)
    one.mask(flavor("c"), PLAIN)
    assert one.mask(flavor("b"), PLAIN) is second
    assert one.mask(ANY, PLAIN) is not first


NAMES = [f"n{i}" for i in range(18)]  # more than fit at first
RESOURCES = ["cpu", GPU, *(f"example.com/{i}" for i in range(7))]
PORTS = ["hostport-TCP-1", "hostport-TCP-2"]  # no node announces them


def _some(resources: list[str]) -> st.SearchStrategy[Requests]:
    return st.dictionaries(st.sampled_from(resources), st.integers(0, 9), min_size=1, max_size=4).map(
        lambda amounts: tuple(sorted({"pods": 1, **amounts}.items()))
    )


asked = _some([*RESOURCES, *PORTS])
PICKY = role(selector={"zone": "a"}).constraints


class FleetMachine(RuleBasedStateMachine):
    """Any history of a cluster."""

    pods = Bundle("pods")
    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.nodes: dict[str, Node] = {}
        self.used: list[tuple[str, Requests]] = []
        self.reserved: Counter[tuple[str, Requests]] = Counter()

    @rule(name=st.sampled_from(NAMES), amounts=_some(RESOURCES), zone=st.sampled_from("ab"), open_=st.booleans())
    def set_node(self, name: str, amounts: Requests, zone: str, open_: bool) -> None:  # noqa: FBT001
        self.nodes[name] = Node(name, {"zone": zone}, (), dict(amounts), unschedulable=not open_)
        self.fleet.set_node(self.nodes[name])

    @rule(start=st.integers(0, 17))
    def set_many_nodes(self, start: int) -> None:
        for name in NAMES[start:]:
            self.set_node(name, FOUR, "a", open_=True)

    @rule(name=st.sampled_from(NAMES))
    def remove_node(self, name: str) -> None:
        self.nodes.pop(name, None)
        self.fleet.remove_node(name)

    @rule(target=pods, name=st.sampled_from(NAMES), amounts=asked)
    def bind(self, name: str, amounts: Requests) -> tuple[str, Requests]:
        self.used.append((name, amounts))
        self.fleet.use(name, amounts, +1)
        return name, amounts

    @rule(pod=consumes(pods))
    def unbind(self, pod: tuple[str, Requests]) -> None:
        self.used.remove(pod)
        self.fleet.use(*pod, -1)

    @rule(target=reservations, name=st.sampled_from(NAMES), amounts=asked, count=st.integers(1, 3))
    def reserve(self, name: str, amounts: Requests, count: int) -> tuple[str, Requests, int]:
        self.reserved[name, amounts] += count
        self.fleet.reserve(name, amounts, count)
        return name, amounts, count

    @rule(target=reservations, held=consumes(reservations), part=st.integers(1, 3))
    def give_back(self, held: tuple[str, Requests, int], part: int) -> object:
        name, amounts, count = held
        part = min(part, count)
        self.reserved[name, amounts] -= part
        self.fleet.reserve(name, amounts, -part)
        return (name, amounts, count - part) if part < count else multiple()

    @rule()
    def plan_something(self) -> None:
        copy = self.fleet.snapshot()
        for name in copy.node_names():
            copy.reserve(name, FOUR, 1)

    @rule()
    def change_flavors(self) -> None:
        self.fleet.forget_masks()

    @invariant()
    def equals_one_built_from_scratch(self) -> None:
        fresh = fleet(
            self.nodes.values(),
            others=self.used,
            reserved=[(*key, count) for key, count in self.reserved.items() if count],
        )
        assert sorted(self.fleet.node_names()) == sorted(self.nodes)
        assert self.seen(self.fleet) == self.seen(fresh)
        for name in NAMES:
            assert self.fleet.room(name) == fresh.room(name)
            for constraints in (PLAIN, PICKY):
                assert self.fleet.place(name, ANY, constraints, FOUR) is fresh.place(name, ANY, constraints, FOUR)

    @staticmethod
    def seen(one: Fleet) -> list[tuple[str, dict[str, int], bool, bool]]:
        """Return what planning reads, by node in order of name."""
        one.meet([(port, 1) for port in PORTS])
        free, result = one.matrix(Base.FREE), []
        masks = [one.mask(ANY, constraints) for constraints in (PLAIN, PICKY)]
        for row in one.domains().order:
            if not masks[0][row]:
                continue
            amounts = {}
            for resource in (*RESOURCES, *PORTS):
                columns = one.columns([(resource, 1)])
                amounts[resource] = int(free[row, columns[0]].sum()) if columns else 0
            result.append((one.name(row), amounts, bool(masks[0][row]), bool(masks[1][row])))
        return result


FleetMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestAnyHistory = FleetMachine.TestCase
