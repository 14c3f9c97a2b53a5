"""What follows from failed pods, as their job's rules say."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queuectl.core.lifecycle import View, loss, next_move
from queuectl.model.checkpoint import Checkpoint
from queuectl.model.failures import MAX_BLAMED, Action, FailurePolicy, FailureRule, Ignored
from queuectl.model.lifecycle import Attempt, AttemptState, End, Outcome, Workload
from queuectl.model.objects import Job, Place, Pod
from queuectl.model.plan import Placement
from tests.support.builders import gang, requests, role

NOW = 1000.0
JOB = Job(gang("g", role("worker", 2), role("ps", 1)), 1, "7", backoff_limit=1, replaces_lost_pods=True)
PLACEMENTS = (
    Placement("worker", "any", "n0", 1, requests()), Placement("worker", "any", "n1", 1, requests(), first=1),
    Placement("ps", "any", "n1", 1, requests()),
)  # fmt: skip
ATTEMPT = Attempt("g", 1, AttemptState.RUNNING, 1, PLACEMENTS, 0.0, 1.0)
WORKLOAD = Workload("g", "team", "g", "q", 0, 0.0, 1, attempt=1)


def rule(action: Action, *codes: int, **more: Any) -> FailureRule:
    return FailureRule(action, codes=frozenset(codes), **more)


def failed(*exits: tuple[str, int], conditions: Sequence[tuple[str, str]] = (), **more: Any) -> dict[str, Any]:
    code = exits[0][1] if exits else None
    return {"phase": "Failed", "ready": False, "exit_code": code, "exits": exits, "conditions": (*conditions,), **more}


def view(rules: Sequence[FailureRule], workload: Workload = WORKLOAD, **pods: dict[str, Any]) -> View:
    """Return a gang whose pods, by role and index, are as given; the others run. Rules allow three failures."""
    keys = {"worker0": ("worker", 0), "worker1": ("worker", 1), "ps0": ("ps", 0)}
    there = {
        key: Pod(
            **{
                "uid": name, "namespace": "team", "name": name, "resource_version": "1", "role": key[0],
                "index": key[1], "node": f"n{min(1, key[1] + (key[0] == 'ps'))}", "phase": "Running", "ready": True,
                **pods.get(name, {}),
            }
        )
        for name, key in keys.items()
    }  # fmt: skip
    job = replace(JOB, failures=FailurePolicy((*rules,), ignore_limit=3))
    return View(workload, ATTEMPT, job, there, {"n0": Place.GOOD, "n1": Place.GOOD}, NOW)


def end(*rules: FailureRule, **given: Any) -> End:
    move = next_move(view(rules, **given))
    assert move is not None
    assert move.end is not None
    return move.end


def test_without_a_rule_that_matches_a_failure_is_charged() -> None:
    rules = [
        rule(Action.FAIL_JOB, 4), rule(Action.FAIL_JOB, 3, role="ps"), rule(Action.FAIL_JOB, 3, container="log"),
        rule(Action.FAIL_JOB, 3, 4, among=False), rule(Action.FAIL_JOB, conditions=(("Broken", "True"),)),
    ]  # fmt: skip
    one = end(*rules, worker1=failed(("main", 3), conditions=[("Broken", "False")]))
    assert (one.outcome, one.charged, one.exit_code) == (Outcome.REQUEUE, True, 3)
    assert str(one.why) == "Pod worker1 failed with exit code 3."


@pytest.mark.parametrize(
    ("matching", "how"),
    [
        (rule(Action.FAIL_JOB, 2, 3), "exit code 3 of container main"),
        (rule(Action.FAIL_JOB, 3, container="main", role="worker"), "exit code 3 of container main"),
        (rule(Action.FAIL_JOB, 9, container="log"), "exit code 9 of container log"),
        (rule(Action.FAIL_JOB, 3, among=False), "exit code 9 of container log"),
        (rule(Action.FAIL_JOB, conditions=(("A", "True"), ("Broken", "False"))), "condition Broken=False"),
    ],
)
def test_a_rule_may_fail_the_job_at_once_and_is_named(matching: FailureRule, how: str) -> None:
    pod = failed(("main", 3), ("log", 9), conditions=[("A", "False"), ("Broken", "False")])
    one = end(rule(Action.COUNT, 200), matching, worker0=pod)
    assert one.outcome is Outcome.FAILED
    assert str(one.why) == f"Pod worker0 failed with {how}, for which rules[1] of podFailurePolicy fails the job."
    assert one.exit_code == (9 if "log" in how else 3)


def test_the_first_rule_counts_whichever_pod_it_is_about() -> None:
    """Peers fail of what one does."""
    one = end(rule(Action.FAIL_JOB, 42), rule(Action.IGNORE, 1), ps0=failed(("main", 1)), worker1=failed(("main", 42)))
    assert "Pod worker1 failed with exit code 42" in str(one.why)
    one = end(rule(Action.COUNT, 1), rule(Action.IGNORE, 1, 42), worker0=failed(("main", 1)))
    assert (str(one.why), one.charged) == (
        "Pod worker0 failed with exit code 1 (rules[0] of podFailurePolicy: Count).", True,
    )  # fmt: skip


def test_what_is_ignored_is_not_charged_and_waits_ever_longer() -> None:
    workload, waits = replace(WORKLOAD, failures=1), []
    for _ in range(3):
        one = end(rule(Action.IGNORE, 75), workload=workload, worker0=failed(("main", 75)))
        assert (one.outcome, one.charged) == (Outcome.REQUEUE, False)
        assert one.ignored is not None
        workload = replace(workload, ignored=one.ignored)
        waits.append(one.not_before - NOW)
    assert waits == [10, 20, 40]
    assert str(one.why) == (
        "Pod worker0 failed with exit code 75 of container main, which rules[0] of podFailurePolicy ignores:"
        " 3 of at most 3 such failures in a row."
    )
    last = end(rule(Action.IGNORE, 75), workload=workload, worker0=failed(("main", 75)))
    assert (last.outcome, last.exit_code) == (Outcome.FAILED, 75)
    assert str(last.why).startswith(
        "Failed 4 times in a row without getting further, ignoreLimit is 3; last: Pod worker0"
    )


def test_getting_further_than_ever_begins_the_count_anew() -> None:
    def after(step: int | None, ignored: Ignored) -> Ignored | None:
        workload = replace(WORKLOAD, ignored=ignored, saved=Checkpoint(5.0, step, attempt=1))
        return end(rule(Action.IGNORE, 75), workload=workload, worker0=failed(("main", 75))).ignored

    assert after(100, Ignored(2)) == Ignored(1, 100)
    assert after(100, Ignored(2, 100)) == Ignored(3, 100)
    assert after(40, Ignored(2, 100)) == Ignored(3, 100), "it began from an older one"
    assert after(101, Ignored(3, 100)) == Ignored(1, 101)
    assert after(None, Ignored(2, 100)) == Ignored(3, 100)


@given(st.lists(st.tuples(st.sampled_from([1, 75, 80]), st.none() | st.integers(0, 5)), min_size=40, max_size=40))
def test_a_crash_loop_always_ends(failures: list[tuple[int, int | None]]) -> None:
    """Whatever it saves: six steps that are new begin the count of three anew at most, and one may be charged."""
    rules = rule(Action.IGNORE, 75), rule(Action.AVOID_NODE, 80)
    workload = WORKLOAD
    for times, (code, step) in enumerate(failures, 1):
        workload = replace(workload, saved=Checkpoint(5.0, step, attempt=1))
        one = end(*rules, workload=workload, worker0=failed(("main", code)))
        assert len((one.ignored or Ignored()).nodes) <= MAX_BLAMED
        if one.outcome is Outcome.FAILED:
            assert times <= (6 + 1) * 3 + 1 + 1
            return
        workload = replace(workload, failures=workload.failures + one.charged, ignored=one.ignored or workload.ignored)
    pytest.fail("it goes on")


def test_a_node_that_is_blamed_is_remembered() -> None:
    one = end(rule(Action.AVOID_NODE, 80), worker1=failed(("main", 80)))
    assert (one.outcome, one.charged) == (Outcome.REQUEUE, False)
    assert one.ignored == Ignored(1, None, (("n1", NOW),))
    assert "blames node n1: it starts again on others" in str(one.why)
    before = Ignored(3, 9, (("n1", 1.0), ("n2", 2.0), ("n3", 3.0), ("n4", 4.0)))
    assert before.then(10, "n5", 9.0).nodes == (("n2", 2.0), ("n3", 3.0), ("n4", 4.0), ("n5", 9.0))
    assert before.then(10, "n2", 9.0).nodes == (("n1", 1.0), ("n3", 3.0), ("n4", 4.0), ("n2", 9.0))


def test_of_disrupted_pods_only_their_conditions_count() -> None:
    """A program that is told to stop may exit with any code."""
    disrupted = failed(("main", 143), conditions=[("DisruptionTarget", "True")], disrupted="drained")
    condition = {"conditions": (("DisruptionTarget", "True"),)}
    by_code = view([rule(Action.FAIL_JOB, 143)], worker1=disrupted)
    assert next_move(by_code) is None
    assert loss(by_code) is not None
    ignored = view([rule(Action.IGNORE, **condition), rule(Action.FAIL_JOB, 143)], worker1=disrupted)
    assert next_move(ignored) is None
    assert loss(ignored) is not None, "it is replaced as without any rule"
    charged = view([rule(Action.COUNT, **condition)], worker1=disrupted)
    assert loss(charged) is None
    move = next_move(charged)
    assert move is not None
    assert move.end is not None
    assert move.end.charged
