"""Which of several nodes a gang goes to that fits on one."""

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest

from queuectl.control.world import World
from queuectl.core.backlog import Backlog
from queuectl.core.cycle import plan
from queuectl.core.fleet import Fleet
from queuectl.core.fragmentation import Mix, Others
from queuectl.core.lifecycle import BackOff
from queuectl.model.lifecycle import Attempt, AttemptState, End, Move, Outcome
from queuectl.model.objects import Flavor, Job, Node, Role
from queuectl.model.reasons import Reason, why
from tests.support.builders import Requests, fleet, gang, node, requests, role, snapshot

ANY = Flavor("any")


def mix(*roles: Role) -> Mix:
    result = Mix()
    for one in roles:
        result.add(gang("other", one))
    return result


def chosen(cluster: Fleet, newcomer: Role, *others: Role) -> str:
    view = replace(snapshot([gang("newcomer", newcomer)], nodes=cluster), mix=mix(newcomer, *others))
    (admission,) = plan(view, 0.0).admissions
    return admission.placements[0].node


def of_model(name: str, model: str) -> Node:
    return node(name, gpu=2, labels={"model": model})


@dataclass(frozen=True)
class Case:
    nodes: list[Node]
    newcomer: Role
    others: tuple[Role, ...]
    goes_to: str
    used: tuple[tuple[str, int], ...] = ()  # node, GPUs in use


RARE = role(gpu=1, selector={"model": "rare"})
CASES = {
    "the node whose model nobody insists on": Case(
        [of_model("a", "rare"), of_model("b", "plain"), of_model("c", "plain")], role(gpu=1), (RARE, RARE), "b"
    ),
    "the rare one, for which nobody asks any more": Case(
        [of_model("a", "rare"), of_model("b", "plain"), of_model("c", "plain")], role(gpu=1), (), "a"
    ),
    "the broken node while others want whole ones": Case(
        [node("a"), node("b")], role(gpu=2), (role(gpu=8), role(gpu=8)), "b", used=(("b", 3),)
    ),
    "the node that has cpu to spare, when much of it is asked for": Case(
        [node("a", cpu=64), node("b", cpu=128)], role(gpu=1, cpu=16), (role(gpu=1, cpu=8),) * 3, "b"
    ),
    "the node without GPUs when it wants none": Case(
        [node("a", cpu=32), node("b", gpu=0, cpu=96)], role(cpu=8, gpu=0), (role(gpu=1, cpu=4),) * 3, "b"
    ),
    "the first by name among equals": Case([node("b"), node("a")], role(gpu=1), (role(gpu=4),), "a"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_gang_goes_where_it_leaves_the_others_most(case: Case) -> None:
    used = [(name, requests(gpu=gpus), 1) for name, gpus in case.used]
    assert chosen(fleet(case.nodes, reserved=used), case.newcomer, *case.others) == case.goes_to


def test_without_knowledge_of_others_the_tightest_node_is_taken() -> None:
    cluster = fleet([node("a"), node("b")], reserved=[("b", requests(gpu=3), 1)])
    (admission,) = plan(snapshot([gang("newcomer", role(gpu=1))], nodes=cluster), 0.0).admissions
    assert admission.placements[0].node == "b"


def test_models_that_a_gang_would_never_take_are_not_kept_for_it() -> None:
    picky = gang("picky", role(gpu=8), gpu_models=("H100",))
    known = Mix()
    known.add(picky)
    assert [kind.requests for kind, _ in known.of(Flavor("h", gpu_model="H100"))] == [requests(gpu=8)]
    assert known.of(Flavor("t", gpu_model="T4")) == []
    known.add(picky, -1)
    assert not known


def test_waiting_gangs_count_by_their_pods_while_they_may_be_tried() -> None:
    known = Mix()
    one, other = gang("one", role(pods=3, gpu=1)), gang("other", role(pods=2, gpu=4), queue="apart", user="ann")
    backlog = Backlog([one, other], mix=known)

    def counted() -> dict[Requests, int]:
        return {kind.requests: pods for kind, pods in known.of(ANY)}

    assert counted() == {requests(gpu=1): 3, requests(gpu=4): 2}
    backlog.tell_apart(["apart"])
    assert counted() == {requests(gpu=1): 3, requests(gpu=4): 2}
    backlog.update([replace(one, not_before=9.0)])
    assert counted() == {requests(gpu=4): 2}
    backlog.wake(9.0)
    backlog.update([], gone=["other"])
    assert counted() == {requests(gpu=1): 3}


def places(room: dict[str, int], one: Role) -> float:
    found = min(room.get(resource, 0) / amount for resource, amount in one.requests)
    return found if found >= 1 else 0.0


@pytest.mark.parametrize("seed", range(20))
def test_what_is_lost_is_what_counting_place_by_place_finds(seed: int) -> None:
    """Nodes that are alike are counted once, and constraints heeded; here each is looked at by itself."""
    dice = Random(seed)
    nodes = [
        node(f"n{i}", gpu=dice.choice((2, 8)), cpu=dice.choice((16, 64)), labels={"model": dice.choice("ab")})
        for i in range(30)
    ]
    kinds = [
        role(gpu=dice.choice((0, 1, 2, 8)), cpu=dice.choice((2, 3, 7)), selector=dice.choice(({}, {"model": "a"})))
        for _ in range(12)
    ]
    taken = [(f"n{dice.randrange(30)}", requests(gpu=1, cpu=dice.choice((1, 5))), 1) for _ in range(20)]
    cluster, newcomer = fleet(nodes, reserved=taken), role(gpu=1, cpu=2)
    room = cluster.free()
    rows = np.flatnonzero(room.pods(ANY, newcomer.constraints, newcomer.requests))
    found = Others(mix(*kinds), cluster).lose(room, rows, ANY, newcomer.requests, 1)

    free = {one.name: dict(one.allocatable) for one in nodes}
    for name, asked, _ in taken:
        for resource, amount in asked:
            free[name][resource] -= amount
    open_to = {
        one.name: [k for k in kinds if dict(k.constraints.selector).items() <= one.labels.items()] for one in nodes
    }
    total = {k: sum(places(free[name], k) for name in free if k in open_to[name]) for k in kinds}
    for row, lost in zip(rows.tolist(), found.tolist(), strict=True):
        name = cluster.name(row)
        after = {resource: free[name].get(resource, 0) - amount for resource, amount in newcomer.requests}
        expected = sum(
            (places(free[name], k) - places(free[name] | after, k)) / total[k] / len(kinds)
            for k in kinds
            if k in open_to[name] and total[k]
        )
        assert lost / 2**40 == pytest.approx(expected, abs=1e-9)


def test_losses_that_are_equal_compare_so_whatever_else_is_there() -> None:
    """The order in which nodes came does not matter."""
    nodes = [node(f"n{i}", cpu=7 * (i % 3) + 40) for i in range(9)]
    others = [role(gpu=g, cpu=c) for g in (1, 3, 7) for c in (3, 7, 11)]
    assert chosen(fleet(nodes), role(gpu=1, cpu=3), *others) == chosen(fleet(nodes[::-1]), role(gpu=1, cpu=3), *others)


def test_the_controller_counts_what_waits_and_runs_and_nothing_that_has_ended() -> None:
    world, job = World(BackOff()), gang("job", role(gpu=4), queue="q")
    world.on_job(None, Job(job, generation=1, resource_version="1"))
    world.load([], [], 0)
    world.submissions(["job"])

    def counted() -> dict[Requests, int]:
        return {kind.requests: pods for kind, pods in world.snapshot(0.0).mix.of(ANY)}

    assert counted() == {requests(gpu=4): 1}
    world.admitted(Attempt("job", 1, AttemptState.RUNNING, 1, (), 0.0, 0.0))
    assert counted() == {requests(gpu=4): 1}
    world.moved(Move("job", 1, AttemptState.ENDING, End(why(Reason.SUCCEEDED), Outcome.SUCCEEDED)), 1.0)
    world.moved(Move("job", 1, AttemptState.ENDED), 2.0)
    assert counted() == {}
