"""Pods that have something of their node for themselves: host ports, and being apart from others."""

from typing import Any

from queuectl.core.cycle import plan
from queuectl.core.fleet import Base
from queuectl.core.nominate import nominate
from queuectl.model.objects import Gang, Role
from queuectl.model.resources import ALONE
from tests.support.builders import fleet, gang, node, role, snapshot, spread

PORT = "hostport-TCP-8080"
APART = "apart-team:app In llm"


def _role(alone: str, amount: int = ALONE, *, pods: int = 1, name: str = "worker") -> Role:
    asks: Any = {alone: amount}
    return role(name, pods, gpu=1, **asks)


def _two(first: Gang, second: Gang, nodes: int) -> list[list[str]]:
    """Return on which nodes each of two gangs is placed, if it is, in one cycle."""
    found = plan(snapshot([first, second], nodes=[node(f"n{i}") for i in range(nodes)]), 0.0).admissions
    placed = {one.uid: sorted(p.node for p in one.placements) for one in found}
    return [placed.get("a", []), placed.get("b", [])]


def test_two_pods_of_one_host_port_are_on_two_nodes() -> None:
    first, second = (gang(name, _role(PORT)) for name in "ab")
    assert _two(first, second, 2) == [["n0"], ["n1"]]
    assert _two(first, second, 1) == [["n0"], []]
    other = gang("b", _role("hostport-TCP-8081"))
    assert _two(first, other, 1) == [["n0"], ["n0"]]


def test_the_reason_names_the_port() -> None:
    waiting = gang("a", _role(PORT, pods=3))
    decided = plan(snapshot([waiting], nodes=[node("n0"), node("n1")]), 0.0)
    assert decided.waits["a"].facts["short"] == "1 place where host port TCP-8080 is free"
    others = fleet([node("n0"), node("n1"), node("n2")], others=[("n1", _role(PORT).requests)])
    assert "1 place where host port" in str(plan(snapshot([waiting], nodes=others), 0.0).waits["a"])


def test_roles_of_a_gang_are_apart_from_each_other_too() -> None:
    workers, logger = _role(APART, pods=2), _role(APART, 1, pods=2, name="logger")
    [admission] = plan(snapshot([gang("a", workers, logger)], nodes=[node(f"n{i}") for i in range(3)]), 0.0).admissions
    placed = spread(admission.placements)
    assert set(placed["worker"].values()) == {1}
    assert placed["worker"].keys().isdisjoint(placed["logger"])
    assert list(placed["logger"].values()) == [2]


def test_many_that_wait_each_for_itself_cost_no_more_than_one() -> None:
    nodes = fleet([node("n0")])
    view = snapshot([], nodes=nodes)
    for i in range(100):
        entry = nominate(view, frozenset(), gang("a", _role(f"apart-team:job In g{i}", pods=2)), 0.0)
        assert entry.wait is not None
        assert entry.wait.code == "ExceedsCluster"
    assert nodes.matrix(Base.FREE).shape[1] < 20


def test_what_is_given_back_is_to_be_had_again() -> None:
    nodes = fleet([node("n0")])
    for _ in range(100):  # other names each time would else grow without end
        for port in range(3):
            one = _role(f"hostport-TCP-{port}")
            nodes.reserve("n0", one.requests, 1)
            waiting = gang("a", one)
            assert not plan(snapshot([waiting], nodes=nodes.snapshot()), 0.0).admissions
            nodes.reserve("n0", one.requests, -1)
            assert plan(snapshot([waiting], nodes=nodes.snapshot()), 0.0).admissions
