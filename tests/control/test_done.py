"""Pods that are done while others of their gang run on, whoever cleans them up and whenever."""

from dataclasses import replace

import pytest

from queuectl.model.lifecycle import Attempt, AttemptState
from queuectl.model.reasons import Reason
from queuectl.simulate.clockwork import DONE, Clockwork
from queuectl.simulate.form import GPU, ROLE, read

INDEXES = (1, 2, 5)


@pytest.fixture
def clock() -> Clockwork:
    clock = Clockwork(
        read(
            {
                "nodes": [{"name": "n", "count": 2, "gpus": 3}],
                "queues": [{"name": "q", "quotas": [{"flavor": "default", "resource": GPU, "nominal": 6}]}],
                "jobs": [{"name": "j", "queue": "q", "pods": 6, "gpus": 1}],
            }
        )
    )
    clock.run()
    return clock


def attempt(clock: Clockwork) -> Attempt:
    return clock.world.attempts["j"]


def clean_up(clock: Clockwork) -> None:
    for index in INDEXES:
        clock.cluster._remove_pod(("j", 1, ROLE, index))


@pytest.mark.parametrize("when", ["before the ledger is told", "after", "after a restart"])
def test_a_pod_that_is_removed_after_it_has_succeeded_is_not_lost(clock: Clockwork, when: str) -> None:
    clock.cluster.succeed("j", [(ROLE, index) for index in INDEXES])
    if when != "before the ledger is told":
        clock.settle()
    if when == "after a restart":
        clock.restart()
    clean_up(clock)
    clock.settle()
    assert attempt(clock).number == 1
    assert attempt(clock).done == {(ROLE, index) for index in INDEXES}
    assert attempt(clock).whole.pods == 3
    clock.cluster.succeed("j", [(ROLE, index) for index in range(6)])
    clock.settle()
    assert clock.states()["j"].phase == "Succeeded"


def test_a_pod_that_is_removed_while_it_runs_is(clock: Clockwork) -> None:
    clean_up(clock)
    clock.settle()
    assert any(entry.code == Reason.POD_LOST.code for entry in clock.result.timeline)


def test_pods_that_are_done_together_are_one_move(clock: Clockwork) -> None:
    clock.cluster.succeed("j", [(ROLE, index) for index in INDEXES])
    clock.settle()
    [entry] = clock.result.of(DONE)
    assert entry.why == "3 of 6 pods run on; 3 are done, and what they held is given back."
    assert clock.world.holdings.used("q", ("default", GPU)) == 3


def test_a_pod_that_ends_well_because_its_node_is_drained_is_replaced_and_not_done() -> None:
    clock = Clockwork(
        read(
            {
                "nodes": [{"name": "n", "count": 3, "gpus": 2}],
                "queues": [{"name": "q", "quotas": [{"flavor": "default", "resource": GPU, "nominal": 4}]}],
                "jobs": [{"name": "j", "queue": "q", "pods": 4, "gpus": 1, "replaceLostPods": True, "grace": 5}],
            }
        )
    )
    clock.run()
    pods = dict(clock.world.pods["j", 1])
    node = pods[ROLE, 0].node
    clock.cluster._turn("cordon", node)
    clock.cluster._set_pod(replace(pods[ROLE, 0], deleting=True, disrupted="Eviction: drained"))
    clock.settle()
    assert attempt(clock).state is AttemptState.REPAIRING
    lost = [(ROLE, index) for index in range(4) if pods[ROLE, index].node == node]
    clock.cluster.succeed("j", lost)  # having been told to stop
    clock.settle()
    for key in lost:
        clock.cluster._remove_pod(("j", 1, *key))
    clock.settle()
    assert (attempt(clock).number, attempt(clock).state, attempt(clock).done) == (1, AttemptState.RUNNING, frozenset())
    assert [clock.world.pods["j", 1][key].node for key in lost] == ["n-2", "n-2"]
