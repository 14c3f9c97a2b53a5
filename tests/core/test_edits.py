"""ResourceFlavors and nodes that are edited, relabelled and replaced while gangs run and wait."""

from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from queuectl.model.gpus import Gpus
from queuectl.model.objects import Constraints, Flavor, Level, Node
from queuectl.model.resources import CARD, CARDS
from queuectl.simulate.clockwork import Clockwork
from queuectl.simulate.form import GPU, EventForm, JobForm, read
from tests.core.test_invariants import Watched
from tests.support.virtual import FLAVORS, clusters, jobs

STEPS = 25


def _edit_flavor(clock: Clockwork, name: str, new: Flavor | None) -> None:
    old = clock.world.flavors.get(name)
    if new is not None:
        clock.cluster._flavors[name] = new
    clock.world.on_flavor(old, new)
    clock.settle()


def _edit_node(clock: Clockwork, old: Node, **changes: Any) -> None:
    new = clock.cluster._nodes[old.name] = clock.cluster._known[old.name] = replace(old, **changes)
    clock.world.on_node(old, new)
    clock.settle()


def _any_flavor(random: Random, known: Flavor) -> Flavor | None:
    changes: list[dict[str, Any]] = [
        {"gpus": ((GPU, random.choice([CARD // 2, CARD, CARD // 7])),)},
        {"node_labels": (("color", random.choice([*FLAVORS, "none"])),)},
        {"node_labels": (("color", known.name),)},
        {"levels": () if known.levels else (Level("rack", "rack"),)},
        {"gpu_model": "" if known.gpu_model else "A"},
    ]
    return random.choice([*(replace(known, **one) for one in changes), None])


def _any_node(random: Random, known: Node) -> dict[str, Any]:
    changes: list[dict[str, Any]] = [
        {"labels": {**known.labels, "rack": random.choice("xyz")}},
        {"labels": {**known.labels, "color": random.choice(FLAVORS)}},
        {"allocatable": {**known.allocatable, GPU: random.randint(0, 6)}},
        {"gpus": Gpus(random.choice("AB"), random.choice(["", "1", "2"]))},
    ]
    another = changes[1] | {"gpus": Gpus("C"), "allocatable": {**known.allocatable, GPU: random.randint(1, 4)}}
    return random.choice([*changes, another])


@settings(max_examples=40, deadline=None)
@given(clusters(), st.lists(jobs("j", ends=True), min_size=4, max_size=9), st.integers(0, 2**32))
def test_whatever_is_edited_no_promise_is_broken(
    cluster: dict[str, Any], batch: list[dict[str, Any]], seed: int
) -> None:
    """What is decided is checked by counting anew, and what is known from before against what would be found out."""
    random, clock = Random(seed), Watched(read(cluster))
    clock.settle()
    left = [(f"j{number}", form) for number, form in enumerate(batch)]
    for _ in range(STEPS):
        match random.choice("sffnnw"):
            case "s" if left:
                name, form = left.pop()
                clock._submit(JobForm.model_validate({**form, "name": name}), name)
                clock.settle()
            case "f":
                name = random.choice(FLAVORS)
                _edit_flavor(clock, name, _any_flavor(random, clock.cluster._flavors[name]))
            case "n":
                node = clock.cluster._nodes[random.choice(sorted(clock.cluster._nodes))]
                _edit_node(clock, node, **_any_node(random, node))
            case _:
                clock._until = clock.now + random.choice([1, 3, 10, 60])
                clock.run()
                assert clock.result.faults == []


def _clock(nominal: int, resource: str = GPU) -> Clockwork:
    clock = Clockwork(
        read(
            {
                "nodes": [{"name": "n", "gpus": 8, "labels": {"color": "red"}}],
                "flavors": [{"name": "red", "nodeLabels": {"color": "red"}}],
                "queues": [{"name": "q", "quotas": [{"flavor": "red", "resource": resource, "nominal": nominal}]}],
                "jobs": [{"name": "runs", "queue": "q", "pods": 2, "gpus": 1}],
            }
        )
    )
    clock.run()
    return clock


def _submit(clock: Clockwork, name: str, pods: int) -> None:
    clock._submit(JobForm.model_validate({"name": name, "queue": "q", "pods": pods, "gpus": 1}), name)
    clock.settle()


def test_who_runs_is_charged_as_it_was_admitted_and_who_comes_by_the_new_weight() -> None:
    clock = _clock(3, CARDS)
    _edit_flavor(clock, "red", replace(clock.world.flavors["red"], gpus=((GPU, 2 * CARD),)))
    _submit(clock, "first", 1)
    assert clock.states()["first"].code == "WaitingForQuota"  # 1 card is left, and it counts as 2
    assert dict(clock.world.attempts["runs"].quota) == {("red", CARDS): 2 * CARD}
    _edit_flavor(clock, "red", replace(clock.world.flavors["red"], gpus=()))
    assert dict(clock.world.attempts["first"].quota) == {("red", CARDS): CARD}
    assert clock.states()["runs"].phase == "Running"


def test_who_runs_on_nodes_that_are_of_the_flavor_no_more_runs_on_and_others_wait() -> None:
    clock = _clock(8)
    _edit_flavor(clock, "red", replace(clock.world.flavors["red"], node_labels=(("color", "blue"),)))
    _submit(clock, "comes", 1)
    states = clock.states()
    assert (states["runs"].phase, states["comes"].code) == ("Running", "ExceedsCluster")
    _edit_node(clock, clock.cluster._nodes["n"], labels={"color": "blue"})
    states = clock.states()
    assert (states["runs"].phase, states["comes"].phase) == ("Running", "Running")


def test_a_silent_node_that_is_cordoned_stays_silent_until_it_is_back_and_cordoned_then() -> None:
    clock = _clock(8)
    for verb in ("nodeSilent", "uncordon", "cordon", "nodeUp"):
        assert clock.cluster.happen(EventForm.model_validate({"at": clock.now, verb: "n"}), clock.now) == (
            verb != "uncordon"
        )
    there = clock.world.fleet.closed(clock.world.flavors["red"], Constraints())
    assert [(node.ready, node.unschedulable) for node in there] == [(True, True)]


def test_a_node_that_is_replaced_by_another_of_its_name_takes_what_it_has() -> None:
    """Its gang's pods are there still, and hold what they hold; nobody new gets what the new one lacks."""
    clock = _clock(8)
    _edit_node(clock, clock.cluster._nodes["n"], allocatable={**clock.cluster._nodes["n"].allocatable, GPU: 3})
    _submit(clock, "comes", 2)
    states = clock.states()
    assert (states["runs"].phase, states["comes"].code) == ("Running", "WaitingForNodes")
    _edit_node(clock, clock.cluster._nodes["n"], allocatable={**clock.cluster._nodes["n"].allocatable, GPU: 4})
    assert clock.states()["comes"].phase == "Running"
