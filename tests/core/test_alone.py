"""Pods that have something of their node for themselves: host ports, and being apart from others."""

from queuectl.core.cycle import plan
from queuectl.model.objects import Gang, Role
from queuectl.model.resources import ALONE
from tests.support.builders import fleet, gang, node, requests, role, snapshot, spread

PORT = "hostport-TCP-8080"
APART = "apart-team:app In llm"


def _role(name: str = "worker", pods: int = 1, **asks: int) -> Role:
    return role(name, pods, gpu=1, **asks)


def _two(first: Gang, second: Gang, nodes: int) -> list[list[str]]:
    """Return on which nodes each of two gangs is placed, if it is, in one cycle."""
    found = plan(snapshot([first, second], nodes=[node(f"n{i}") for i in range(nodes)]), 0.0).admissions
    placed = {one.uid: sorted(p.node for p in one.placements) for one in found}
    return [placed.get("a", []), placed.get("b", [])]


def test_two_pods_of_one_host_port_are_on_two_nodes() -> None:
    first, second = (gang(name, _role(pods=1, **{PORT: ALONE})) for name in "ab")
    assert _two(first, second, 2) == [["n0"], ["n1"]]
    assert _two(first, second, 1) == [["n0"], []]
    other = gang("b", _role(pods=1, **{"hostport-TCP-8081": ALONE}))
    assert _two(first, other, 1) == [["n0"], ["n0"]]


def test_the_reason_names_the_port() -> None:
    waiting = gang("a", _role(pods=3, **{PORT: ALONE}))
    decided = plan(snapshot([waiting], nodes=[node("n0"), node("n1")]), 0.0)
    assert decided.waits["a"].facts["short"] == "1 place where host port TCP-8080 is free"
    others = fleet([node("n0"), node("n1"), node("n2")], others=[("n1", requests(**{PORT: ALONE}))])
    assert "1 place where host port" in str(plan(snapshot([waiting], nodes=others), 0.0).waits["a"])


def test_roles_of_a_gang_are_apart_from_each_other_too() -> None:
    workers, logger = _role("worker", 2, **{APART: ALONE}), _role("logger", 2, **{APART: 1})
    [admission] = plan(snapshot([gang("a", workers, logger)], nodes=[node(f"n{i}") for i in range(3)]), 0.0).admissions
    placed = spread(admission.placements)
    assert set(placed["worker"].values()) == {1}
    assert placed["worker"].keys().isdisjoint(placed["logger"])
    assert list(placed["logger"].values()) == [2]


def test_what_is_given_back_is_to_be_had_again() -> None:
    nodes = fleet([node("n0")])
    for _ in range(100):  # other names each time would else grow without end
        for port in range(3):
            asked = requests(gpu=1, **{f"hostport-TCP-{port}": ALONE})
            nodes.reserve("n0", asked, 1)
            waiting = gang("a", role("worker", 1, gpu=1, **{f"hostport-TCP-{port}": ALONE}))
            assert not plan(snapshot([waiting], nodes=nodes.snapshot()), 0.0).admissions
            nodes.reserve("n0", asked, -1)
            assert plan(snapshot([waiting], nodes=nodes.snapshot()), 0.0).admissions
