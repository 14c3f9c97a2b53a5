"""Gangs on nodes that are not ready, pods that don't stop, and what speaks against their nodes."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from queuectl.core.healing import STUCK_ON_READY_SECONDS, STUCK_SECONDS, patience, stuck_from
from queuectl.core.lifecycle import View, loss, next_move
from queuectl.core.suspects import offences
from queuectl.model.failures import Action, FailurePolicy, FailureRule
from queuectl.model.lifecycle import Attempt, AttemptState, End, Move, Outcome, Shrink, Workload
from queuectl.model.objects import Job, Place, Pod
from queuectl.model.plan import Placement, PodKey, Portion, Repair
from queuectl.model.reasons import Reason, Why, why
from queuectl.model.suspects import Healing, Offence
from queuectl.simulate.clockwork import run
from queuectl.simulate.form import GPU, read
from queuectl.simulate.verdict import differences
from tests.support.builders import gang, requests, role

NOW = 1000.0
EIGHT = requests(gpu=8)
PLACEMENTS = tuple(Placement("worker", "any", f"n{i}", 1, EIGHT, first=i) for i in range(3))
WORKLOAD = Workload("g", "team", "g", "q", 0, 0.0, 1, attempt=3)
JOB = Job(gang("g", role("worker", 3, gpu=8)), generation=1, resource_version="7", start_deadline_seconds=300)
KEYS = [("worker", i) for i in range(3)]
SUCCEEDED = End(why(Reason.SUCCEEDED), Outcome.SUCCEEDED)


def pod(index: int, **given: Any) -> Pod:
    there = {"node": f"n{index}", "phase": "Running", "ready": True, "role": "worker", "index": index}
    return Pod(f"uid-{index}", "team", f"g-worker-{index}", "1", **{**there, **given})


def view(
    state: AttemptState = AttemptState.RUNNING,
    *,
    pods: Mapping[int, Mapping[str, Any]] = {},
    end: End | None = None,
    admitted_at: float = NOW - 100,
    **given: Any,
) -> View:
    """Return a gang of three pods on as many nodes; what is given of some goes for these."""
    attempt = Attempt("g", 3, state, 1, PLACEMENTS, admitted_at, admitted_at + 1, end)
    there: dict[PodKey, Pod] = {("worker", i): pod(i, **pods.get(i, {})) for i in range(3)}
    places = {f"n{i}": Place.GOOD for i in range(3)}
    return View(WORKLOAD, attempt, JOB, there, places, NOW, **given)


def ends(one: View) -> Why | None:
    move = next_move(one)
    return move.end.why if move is not None and move.end is not None else None


def blamed(one: View) -> list[Offence]:
    move = next_move(one)
    return offences(one, move, move.end.why if move and move.end else None)


def failed_at(one: View) -> View:
    """Return a gang of which pods have failed, when nothing of it holds room any more."""
    move = next_move(one)
    assert move is not None
    return replace(one, attempt=replace(one.attempt, state=AttemptState.ENDING, end=move.end))


# Nodes that are not ready


@pytest.mark.parametrize("state", [AttemptState.UNGATED, AttemptState.RUNNING])
def test_a_gang_leaves_a_node_that_has_not_been_ready_for_too_long(state: AttemptState) -> None:
    waits = view(state, unready={"n1": NOW - 29.9}, not_ready_seconds=30)
    assert ends(waits) is None
    leaves = replace(waits, unready={"n1": NOW - 30.0})
    move = next_move(leaves)
    assert move is not None
    assert move.end == End(why(Reason.NODE_NOT_READY, node="n1", seconds=30), Outcome.REQUEUE)  # at once, uncharged
    assert [one.node for one in blamed(leaves)] == ["n1"]


def test_not_when_its_pods_there_have_ended() -> None:
    done = {"phase": "Succeeded", "ready": False}
    assert ends(view(pods={1: done}, unready={"n1": 0.0})) is None


def test_who_saves_its_work_then_goes_without_waiting_for_the_silent_pod() -> None:
    told = End(why(Reason.QUEUE_DRAINED, queue="q"), Outcome.REQUEUE)
    saving = view(AttemptState.CHECKPOINTING, end=told, unready={"n1": 0.0})
    move = next_move(saving)
    assert move is not None
    assert (move.to, move.end) == (AttemptState.ENDING, told)


def test_a_gang_that_is_repaired_lets_the_silent_node_go_only() -> None:
    one = view(unready={"n1": 0.0})
    one = replace(one, job=replace(JOB, replaces_lost_pods=True), places={**one.places, "n1": Place.CLOSED})
    found = loss(one)
    assert next_move(one) is None
    assert found is not None
    assert found.pods == {("worker", 1)}
    assert [each.node for each in offences(one, None, found.why)] == ["n1"]


@pytest.mark.parametrize(
    ("unready", "nodes", "seconds"), [(1, 1, 30), (2, 2, 30), (3, 100, 30), (3, 5, inf), (3, 6, 30), (55, 100, inf)]
)
def test_when_most_nodes_are_not_ready_nobody_leaves(unready: int, nodes: int, seconds: float) -> None:
    """It is the network, or the API server; there is no better place."""
    assert patience(Healing(not_ready=30), unready, nodes) == seconds


# Pods that don't stop


def test_a_pod_is_stuck_some_time_after_its_time_to_stop() -> None:
    one = pod(0, deleting=True, stops_by=NOW)
    for unreachable, after in ((True, STUCK_SECONDS), (False, STUCK_ON_READY_SECONDS)):
        assert stuck_from(one, unreachable=unreachable) == NOW + after
    assert stuck_from(pod(0), unreachable=True) == inf


GOING = {"deleting": True, "stops_by": NOW - 900}


def test_an_attempt_ends_when_all_that_is_left_of_it_is_stuck_and_its_room_there_is_not_given_back() -> None:
    end = End(why(Reason.NODE_NOT_READY, node="n1", seconds=30), Outcome.REQUEUE)
    some = view(AttemptState.ENDING, end=end, pods={1: GOING, 2: GOING}, stuck=frozenset({("worker", 1)}))
    del some.pods["worker", 0]  # type: ignore[attr-defined]
    assert next_move(some) is None
    both = replace(some, stuck=frozenset({("worker", 1), ("worker", 2)}), unready={"n1": NOW - 100})
    assert next_move(both) == Move("g", 3, AttemptState.ENDED, left=(("n1", EIGHT), ("n2", EIGHT)))
    # Of a node that is not ready that was said before; n2 is, and does not stop its pod.
    assert blamed(both) == [Offence("n2", NOW, why(Reason.POD_STUCK, pod="g-worker-2", seconds=900), "g", 3)]


def test_a_gang_is_not_repaired_where_a_lost_pod_does_not_stop() -> None:
    """Its peers hang until then, and the start deadline is about pods that start."""
    moved = (replace(PLACEMENTS[1], node="n3"),)
    repair = Repair(frozenset({("worker", 1)}), PLACEMENTS[1:2], moved, why(Reason.RUNNING, pods=2))
    one = view(pods={1: GOING}, unready={"n1": NOW - 100})
    one = replace(one, attempt=one.attempt.repairing(repair, NOW - 60), places={**one.places, "n3": Place.GOOD})
    assert next_move(one) is None
    move = next_move(replace(one, stuck=frozenset({("worker", 1)})))
    assert move is not None
    assert move.end is not None
    assert str(move.end.why) == ("The lost pods could not be replaced: pod g-worker-1 does not stop on node n1.")


def test_a_gang_that_gives_up_a_part_which_does_not_stop_goes_whole_for_somebody_waits_for_it() -> None:
    shrink = Shrink(why(Reason.RUNNING, pods=2), Portion(PLACEMENTS[2:]))
    one = view(pods={2: GOING})
    one = replace(one, attempt=one.attempt.shrinking(shrink))
    assert next_move(one) is None
    stuck = replace(one, stuck=frozenset({("worker", 2)}))
    assert next_move(stuck) == Move(
        "g", 3, AttemptState.ENDING, End(why(Reason.POD_STUCK, pod="g-worker-2", seconds=900), Outcome.REQUEUE)
    )
    # For room on a node that is not ready nobody waits, and the others run on.
    assert next_move(replace(stuck, unready={"n2": NOW - 1000})) is None


def test_what_has_ended_and_can_not_be_removed_holds_nothing() -> None:
    gone = End(why(Reason.DELETED), Outcome.DELETED)
    stuck = {**GOING, "phase": "Succeeded"}
    one = view(AttemptState.ENDING, end=gone, pods=dict.fromkeys(range(3), stuck), stuck=frozenset(KEYS))
    assert next_move(one) == Move("g", 3, AttemptState.ENDED)


# What speaks against nodes


def test_a_node_that_is_gone() -> None:
    one = view()
    one = replace(one, places={**one.places, "n2": Place.GONE})
    assert [(each.node, each.why.reason) for each in blamed(one)] == [("n2", Reason.NODE_LOST)]


@pytest.mark.parametrize(
    ("reason", "nodes"),
    [
        ("TerminationByKubelet", ["n1"]),
        ("UnexpectedAdmissionError", ["n1"]),
        ("EvictionByEvictionAPI", []),
        ("DeletionByTaintManager", []),
        ("PreemptionByScheduler", []),
        ("PreemptionByQueuectl", []),
        ("DeletionByPodGC", []),
    ],
)
def test_what_its_kubelet_does_to_a_pod_and_not_what_people_do(reason: str, nodes: list[str]) -> None:
    bad = {"phase": "Failed", "ready": False, "disrupted": "It was told to go.", "disrupted_by": reason}
    one = view(pods={1: bad})
    assert ends(one) is not None
    assert [each.node for each in blamed(one)] == nodes


def test_not_that_somebody_deletes_a_pod() -> None:
    one = view(pods={1: {"deleting": True, "stops_by": NOW + 30}})
    assert ends(one) is not None
    assert blamed(one) == []


@pytest.mark.parametrize(
    ("late", "nodes"),
    [
        ({1: {"ready": False}}, ["n1"]),
        ({1: {"ready": False}, 2: {"ready": False}}, []),
        ({1: {"ready": False, "node": ""}}, []),
    ],
)
def test_a_start_in_which_only_one_nodes_pods_got_not_ready(late: dict[int, dict[str, Any]], nodes: list[str]) -> None:
    one = view(AttemptState.UNGATED, pods=late, admitted_at=NOW - 300)
    cause = ends(one)
    assert cause is not None
    assert cause.reason is Reason.PODS_READY_TIMEOUT
    assert [each.node for each in blamed(one)] == nodes


@pytest.mark.parametrize("failures", [0, 9])
def test_pods_that_failed_of_many_as_many_as_tell_that_it_is_no_nodes_fault(failures: int) -> None:
    failed = {"phase": "Failed", "ready": False, "exit_code": 3}
    one = view(pods={0: failed, 1: failed, 2: failed})
    one = replace(one, workload=replace(WORKLOAD, failures=failures))
    assert blamed(one) == [], "a node may turn out to be lost, of which they failed"
    assert [(each.node, str(each.why)) for each in blamed(failed_at(one))] == [
        ("n0", "Pod g-worker-0 failed with exit code 3."),
        ("n1", "Pod g-worker-1 failed with exit code 3."),
    ]


@pytest.mark.parametrize("rules", [(), (FailureRule(Action.AVOID_NODE, codes=frozenset({1})),)])
def test_the_node_that_peers_failed_of_and_not_theirs_also_when_another_has_its_name(
    rules: tuple[FailureRule, ...],
) -> None:
    failed = {"phase": "Failed", "ready": False, "exit_code": 1, "exits": (("main", 1),)}
    one = view(pods={0: failed, 1: failed})
    one = replace(one, job=replace(JOB, backoff_limit=0, failures=FailurePolicy(rules)))
    over = failed_at(one)
    del over.pods["worker", 2]  # type: ignore[attr-defined]  # it was removed with its node
    replaced = why(Reason.NODE_REPLACED, node="n2")
    over = replace(over, struck=replaced)
    assert next_move(over) == Move("g", 3, AttemptState.ENDED, End(replaced, Outcome.REQUEUE))
    assert [(each.node, each.why) for each in blamed(over)] == [("n2", replaced)]


def test_nothing_when_it_goes_for_others_or_comes_to_its_end() -> None:
    done = view(pods={i: {"phase": "Succeeded", "ready": False} for i in range(3)})
    assert ends(done) is not None
    assert blamed(done) == []
    told = view(leave=why(Reason.NODE_MAINTENANCE, node="n1", problem="driver upgrade"))
    assert ends(told) is not None
    assert blamed(told) == []


def test_in_a_scenario_a_silent_node_that_is_cordoned_meanwhile_comes_back_too() -> None:
    scenario = read(
        {
            "nodes": [{"name": "n", "gpus": 2}],
            "queues": [{"name": "q", "quotas": [{"flavor": "default", "resource": GPU, "nominal": 2}]}],
            "jobs": [{"name": "j", "queue": "q", "gpus": 2, "at": 5}],
            "events": [
                {"at": at, verb: "n"} for at, verb in enumerate(("nodeSilent", "cordon", "uncordon"), start=1)
            ] + [{"at": 10, "nodeUp": "n"}],
            "want": [{"at": 9, "pending": ["j"]}, {"at": 11, "running": ["j"]}],
            "until": 20,
        }
    )  # fmt: skip
    assert differences(scenario, run(scenario)) == []
