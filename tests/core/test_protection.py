"""Who may not be taken, and who may not take: disruption budgets, priority classes, jobs that are not preemptible."""

import json
from dataclasses import replace
from typing import Any

import pytest

from queuectl.control import status
from queuectl.kube import decode
from queuectl.kube.names import JOB_LABEL, PREEMPTIBLE
from queuectl.model.objects import Budget, PriorityClass, Requirement
from queuectl.simulate.clockwork import PREEMPTED, Clockwork, Run
from queuectl.simulate.form import GPU, EventForm, read


def clockwork(*jobs: dict[str, Any], gpus: int = 8, **spec: Any) -> Clockwork:
    quota = {"flavor": "default", "resource": GPU, "nominal": gpus}
    queue = {"name": "q", "preemption": {"withinQueue": "LowerPriority"}, "quotas": [quota], **spec}
    return Clockwork(
        read(
            {"nodes": [{"name": "n", "gpus": gpus}], "queues": [queue], "jobs": [{"queue": "q", **job} for job in jobs]}
        )
    )


def covers(*names: str, allowed: int) -> Budget:
    return Budget("default", "keep", (Requirement(JOB_LABEL, "In", names),), allowed)


def evicted(result: Run) -> list[tuple[float, str]]:
    assert result.faults == []
    return [(entry.at, entry.job) for entry in result.of(PREEMPTED)]


def reason(clock: Clockwork, job: str) -> str:
    return clock.states()[job].code


def test_nobody_is_told_to_go_whom_a_disruption_budget_keeps() -> None:
    clock = clockwork({"name": "low", "pods": 4, "gpus": 2}, {"name": "high", "gpus": 8, "priority": 1, "at": 10})
    told: list[str] = []
    before, after = covers("low", allowed=3), covers("low", allowed=4)
    clock.world.on_budget(None, before)
    clock.at(20, lambda: told.append(clock.states()["high"].why))
    clock.at(30, lambda: clock.world.on_budget(before, after))
    result = clock.run()
    assert told == ["default/low could give way to it, but PodDisruptionBudget default/keep does not allow it now."]
    assert evicted(result) == [(30, "low")]


def test_victims_under_one_budget_count_together() -> None:
    jobs = [{"name": name, "gpus": 4, "at": at} for at, name in enumerate(("one", "two", "free"))]
    newcomer = {"name": "high", "gpus": 8, "priority": 1, "at": 100}
    clock = clockwork(*jobs, newcomer, gpus=12)
    clock.world.on_budget(None, covers("one", "two", allowed=1))
    result = clock.run()
    gone = {job for _, job in evicted(result)}
    assert len(gone) == 2
    assert "free" in gone

    clock = clockwork(*jobs[:2], newcomer)
    clock.world.on_budget(None, covers("one", "two", allowed=1))
    assert evicted(clock.run()) == []
    assert reason(clock, "high") == "DisruptionForbidden"


@pytest.mark.parametrize("choice", ["LeastWorkLost", "LowestPriority"])
def test_a_budget_is_not_spent_on_who_is_of_no_use(choice: str) -> None:
    """The small one would go first: it loses less and came later. But only one may, and that must be the big one."""
    big, small = {"name": "big", "gpus": 8}, {"name": "small", "gpus": 1, "at": 90}
    rules = {"withinQueue": "LowerPriority", "victims": choice}
    clock = clockwork(big, small, {"name": "high", "gpus": 8, "priority": 1, "at": 100}, gpus=9, preemption=rules)
    clock.world.on_budget(None, covers("big", "small", allowed=1))
    assert evicted(clock.run()) == [(100, "big")]


def test_pods_that_have_been_told_to_go_count_until_they_are_gone() -> None:
    lows = [{"name": f"low-{i}", "gpus": 4, "grace": 30} for i in range(2)]
    highs = [{"name": f"high-{i}", "gpus": 4, "priority": 1, "at": 10 + i} for i in range(2)]
    clock = clockwork(*lows, *highs)
    clock.world.on_budget(None, covers("low-0", "low-1", allowed=1))
    clock._until = 39
    assert len(evicted(clock.run())) == 1
    assert reason(clock, "high-1") == "DisruptionForbidden"


def test_a_budget_as_the_api_server_shows_it() -> None:
    meta = {"name": "keep", "namespace": "team", "generation": 2, "resourceVersion": "7"}
    state = {"disruptionsAllowed": 3, "observedGeneration": 2}
    spec = {"selector": {"matchLabels": {"app": "a"}}}

    def read_budget(**changes: Any) -> Budget:
        return decode.budget(json.dumps({"metadata": meta, "spec": spec, "status": state} | changes).encode()).value

    assert read_budget() == Budget("team", "keep", (Requirement("app", "In", ("a",)),), 3)
    assert read_budget(status={**state, "observedGeneration": 1}).allowed == 0
    assert read_budget(status={}).allowed == 0
    assert read_budget(spec={"selector": {}}).selector == ()
    assert read_budget(spec={}).selector is None


def test_a_priority_class_as_the_api_server_shows_it() -> None:
    given = {"metadata": {"name": "c", "annotations": {PREEMPTIBLE: "false"}}, "value": 5, "preemptionPolicy": "Never"}
    assert decode.priority_class(json.dumps(given).encode()).value == PriorityClass(
        "c", 5, preemptible=False, preempts=False
    )
    assert decode.priority_class(b'{"metadata": {"name": "c"}, "value": 5}').value == PriorityClass("c", 5)


def with_class(clock: Clockwork, job: str, given: PriorityClass) -> None:
    """Let a job have a class from the moment on in which it is submitted."""
    clock.world.on_priority_class(None, given)
    submit = clock.cluster._set_job
    clock.cluster._set_job = lambda name, made: submit(  # type: ignore[method-assign, assignment]
        name, replace(made, priority_class=given.name) if name == job else made
    )


def test_jobs_of_a_class_that_is_not_preemptible_stay() -> None:
    clock = clockwork({"name": "low", "gpus": 8}, {"name": "high", "gpus": 8, "priority": 1, "at": 10})
    with_class(clock, "low", PriorityClass("kept", 0, preemptible=False))
    assert evicted(clock.run()) == []
    assert reason(clock, "high") == "WaitingForQuota"


def test_jobs_of_a_class_that_never_preempts_take_nobody() -> None:
    clock = clockwork({"name": "low", "gpus": 8}, {"name": "high", "gpus": 8, "at": 10})
    with_class(clock, "high", PriorityClass("meek", 9, preempts=False))
    assert evicted(clock.run()) == []
    assert reason(clock, "high") == "WaitingForQuota"


def test_the_spec_that_a_running_job_was_planned_for_decides_whether_it_may_be_taken() -> None:
    """Else a job could borrow first and forbid to be taken then."""
    clock = clockwork(
        {"name": "low", "gpus": 8, "preemptible": False}, {"name": "high", "gpus": 8, "priority": 1, "at": 10}
    )
    clock.at(20, lambda: clock._happen(EventForm(at=20, release="low")))
    clock.at(20, clock.plan_again)
    assert evicted(clock.run()) == [(20, "low")]


def test_both_sides_are_told_who_for_whom_why_and_what_is_lost() -> None:
    clock = clockwork(
        {"name": "low", "gpus": 8, "grace": 30}, {"name": "high", "gpus": 8, "priority": 1, "at": 100, "run": 5}
    )
    clock._until = 110
    clock.run()
    high, low = (status_of(clock, name) for name in ("high", "low"))
    assert high["reason"] == "WaitingForVictims"
    assert "default/low (queue q, priority 0, loses 800 GPU-seconds)" in high["message"]
    preempted = next(c for c in low["conditions"] if c["type"] == "Preempted")
    assert (preempted["status"], preempted["reason"]) == ("True", "Preempted")
    for part in ("default/high", "queue q", "priority 1", "800 GPU-seconds", "since 00:00:00 UTC"):
        assert part in preempted["message"]

    clock._until = 200
    clock.run()
    again = next(c for c in status_of(clock, "low")["conditions"] if c["type"] == "Preempted")
    assert again["status"] == "False"  # it runs again


def status_of(clock: Clockwork, name: str) -> status.Status:
    world = clock.world
    attempt = world.attempts.get(name)
    return status.desired(
        world.jobs[name],
        world.workloads[name],
        attempt,
        pods={},
        wait=world.plan.waits.get(name),
        leaving=world.gangs.leaving(attempt) if attempt else (),
        position=None,
        now=clock.now,
    )


def test_two_preemptors_of_one_cycle_do_not_spend_a_budget_twice() -> None:
    lows = [{"name": f"low-{i}", "gpus": 4, "grace": 30} for i in range(2)]
    highs = [{"name": f"high-{i}", "gpus": 4, "priority": 1, "at": 10} for i in range(2)]
    clock = clockwork(*lows, *highs)
    clock.world.on_budget(None, covers("low-0", "low-1", allowed=1))
    clock.at(12, lambda: None)
    clock._until = 12
    assert len(evicted(clock.run())) == 1
