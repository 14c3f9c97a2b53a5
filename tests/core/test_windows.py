"""Maintenance windows: who may still go onto a node that one will take, and what the others are told."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from queuectl.control.world import World
from queuectl.core.cycle import plan
from queuectl.core.defrag import make_room
from queuectl.core.lifecycle import BackOff
from queuectl.model.objects import Alternative, Gang, Lifetime, Node
from queuectl.model.plan import Plan
from queuectl.model.reasons import Reason
from tests.core.test_defrag import NOW, moved, running, world
from tests.support.builders import GPU, flavor, fleet, gang, node, queue, role, snapshot, spread

HOUR = 3600


def at(name: str, start: float | None, **given: Any) -> Node:
    """Return a node that is taken so many seconds from now on."""
    return replace(node(name, **given), taken_at=None if start is None else NOW + start)


def lasting(name: str, run: int | None, *, gpu: int = 8, pods: int = 1, saves: bool = False, **given: Any) -> Gang:
    """Return a gang that starts within a minute and runs at most so many seconds."""
    return gang(name, role(pods=pods, gpu=gpu), lifetime=Lifetime(60, run, saves), **given)


def told(decided: Plan, uid: str) -> str:
    return str(decided.waits[uid])


def test_who_is_over_exactly_when_maintenance_begins_may_start() -> None:
    for run, starts in ((HOUR - 60, True), (HOUR - 59, False), (None, False)):
        decided = plan(snapshot([lasting("g", run)], nodes=[at("n", HOUR)]), NOW)
        assert bool(decided.admissions) is starts, run


def test_it_is_told_the_smallest_change_with_which_it_would_start() -> None:
    nodes = [at("a", HOUR), at("b", 3 * HOUR), at("c", 5 * HOUR)]
    decided = plan(snapshot([lasting("g", 20 * HOUR, pods=2), lasting("endless", None)], nodes=nodes), NOW)
    assert told(decided, "g") == (
        "Maintenance takes a, b at 1970-01-01 03:46:40 UTC, and it may take until 1970-01-01 22:47:40 UTC;"
        " with maxRunSeconds of at most 10740 it would start now."  # on b and c
    )
    assert decided.waits["endless"].reason is Reason.MAINTENANCE_AHEAD
    assert "it has no maxRunSeconds; with maxRunSeconds of at most 17940 or spec.checkpoint" in told(decided, "endless")
    shorter = plan(snapshot([lasting("g", 10740, pods=2)], nodes=nodes), NOW)
    assert spread(shorter.admissions[0].placements) == {"worker": {"b": 1, "c": 1}}


def test_those_who_are_alike_but_for_their_limits_are_not_told_the_same() -> None:
    """The first of a kind fails; that says nothing of a shorter one behind it."""
    line = [lasting("long", 9 * HOUR), lasting("short", 60, seq=1), lasting("endless", None, seq=2)]
    view = snapshot(line, nodes=[at("n", HOUR)])
    decided = plan(view, NOW)
    assert [admission.uid for admission in decided.admissions] == ["short"]
    assert set(decided.waits) == {"long", "endless"}
    assert view.fleet is not None
    view.fleet.set_node(node("n"))
    again = plan(replace(view, waiting=view.waiting), NOW)
    assert [admission.uid for admission in again.admissions] == ["long"], "as ever, once no window is ahead"


def test_who_can_be_asked_to_save_and_has_no_end_starts_where_else_nodes_would_stand_idle() -> None:
    saves = lasting("saves", None, saves=True)
    [started] = plan(snapshot([saves], nodes=[at("a", HOUR), at("b", None)]), NOW).admissions
    assert spread(started.placements) == {"worker": {"b": 1}}, "elsewhere if it can"
    [started] = plan(snapshot([saves], nodes=[at("a", HOUR)]), NOW).admissions
    assert spread(started.placements) == {"worker": {"a": 1}}
    limited = lasting("limited", 2 * HOUR, saves=True)
    assert not plan(snapshot([limited], nodes=[at("a", HOUR)]), NOW).admissions, "who names an end is let come to it"


def test_an_alternative_without_a_window_will_do() -> None:
    flavors = [flavor("h", labels={"gpu": "h"}, model="H"), flavor("a", labels={"gpu": "a"}, model="A")]
    nodes = [at("h", HOUR, labels={"gpu": "h"}), at("a", None, labels={"gpu": "a"})]
    wish = replace(lasting("g", None), gpu_models=("H",), alternatives=(Alternative(("A",)),))
    view = snapshot([wish], nodes=nodes, flavors=flavors, queues=[queue(h={GPU: 8}, a={GPU: 8})])
    [started] = plan(view, NOW).admissions
    assert spread(started.placements) == {"worker": {"a": 1}}


HAS_IT = {"avoided": "in maintenance"}


@pytest.mark.parametrize("state", [{}, HAS_IT, {**HAS_IT, "unschedulable": True}, {**HAS_IT, "ready": False}])
def test_what_maintenance_has_is_no_reason_why_a_gang_could_never_fit(state: dict[str, Any]) -> None:
    nodes = [replace(at("a", -5 if state else HOUR), **state), at("b", None)]
    decided = plan(snapshot([lasting("g", 9 * HOUR, pods=2), lasting("big", None, pods=3)], nodes=nodes), NOW)
    assert decided.waits["g"].reason is (Reason.WAITING_FOR_NODES if state else Reason.MAINTENANCE_AHEAD)
    assert decided.waits["big"].reason is Reason.EXCEEDS_CLUSTER
    if state:
        assert "1 node that it could use is avoided: a (in maintenance)" in told(decided, "g")


def test_nodes_that_a_window_takes_are_told_beside_what_others_use() -> None:
    full = running(gang("full", role(gpu=8)), {"b": 1})
    view, _ = world([at("a", HOUR), at("b", None), at("c", None)], [full], [wish := lasting("wish", 9 * HOUR, pods=3)])
    assert "maintenance takes 1 more node before it is over" in told(plan(view, NOW), wish.uid)


def test_nobody_is_moved_onto_a_node_that_maintenance_takes_before_its_end() -> None:
    small = [running(gang(f"s{i}", role(gpu=5), lifetime=Lifetime(60, HOUR)), {name: 1}) for i, name in enumerate("ab")]
    wish = lasting("wish", 60)
    for start, moves in ((None, {"s0": {"c": 1}}), (2 * HOUR, {"s0": {"c": 1}}), (HOUR, {})):
        view, gangs = world([node("a"), node("b"), at("c", start, gpu=5)], small, [wish])
        assert moved(make_room(view, wish, gangs, NOW)) == moves, start


def test_the_same_nodes_are_taken_before_all_ends_that_count_as_one() -> None:
    those = fleet([at("a", 10), at("b", 20), at("c", 20), node("d")])
    assert those.windows == [NOW + 10, NOW + 20]
    assert [those.taken_before(NOW + end) for end in (10, 11, 20, 21)] == [0.0, NOW + 20, NOW + 20, inf]
    those.remove_node("a")
    those.set_node(node("b"))
    assert those.windows == [NOW + 20]
    those.set_node(node("c"))
    assert not those.has_windows


def test_windows_are_told_anew_and_call_for_a_cycle() -> None:
    view = World(BackOff())
    for name in "ab":
        view.on_node(None, node(name))
    view.take_changes()
    view.nodes.take_at({"a": 5.0, "gone": 6.0})
    assert (view.fleet.taken_at("a"), view.fleet.taken_at("b"), view.fleet.taken_at("gone")) == (5.0, inf, inf)
    assert view.take_changes().nodes == {"a"}
    view.on_node(None, node("gone"))
    view.on_node(node("a"), node("a", gpu=4))
    assert (view.fleet.taken_at("gone"), view.fleet.taken_at("a")) == (6.0, 5.0), "also of nodes that come or change"
    view.take_changes()
    view.nodes.take_at({"gone": 6.0})
    assert view.take_changes().nodes == {"a"}, "only those of which something new is said"
    assert view.fleet.windows == [6.0]
