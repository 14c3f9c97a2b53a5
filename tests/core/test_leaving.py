"""Who is on its way out anyway: its room is waited for, whatever the rules of preemption say, before anybody goes."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queuectl.model.policy import VictimChoice
from queuectl.simulate.clockwork import PREEMPTED, Run, run
from queuectl.simulate.form import GPU, read
from tests.support.victims import Case, draw, fair

MINE = {"flavor": "default", "resource": GPU, "nominal": 8}


def play(*jobs: dict[str, Any], **parts: Any) -> Run:
    """Play jobs of queue q, which may take lower priorities in its queue only, on nodes of 8 GPUs."""
    queue = {"name": "q", "preemption": {"withinQueue": "LowerPriority"}, "quotas": [MINE]}
    given = {"nodes": [{"name": "n", "gpus": 8}], "queues": [queue], "until": 1000, **parts}
    result = run(read({**given, "jobs": [{"queue": "q", "gpus": 4, **job} for job in jobs]}))
    assert result.faults == []
    return result


def evicted(result: Run) -> list[str]:
    return [entry.job for entry in result.of(PREEMPTED)]


def started(result: Run, job: str) -> float | None:
    return next((entry.at for entry in result.of("Running") if entry.job == job), None)


LOW = {"name": "low"}
WISH = {"name": "wish", "priority": 5, "at": 20}
LEAVES = {"name": "leaves", "pods": 2, "gpus": 2, "grace": 30, "priority": 9}


@pytest.mark.parametrize("priority", [0, 5, 9])
@pytest.mark.parametrize("event", [{"delete": "leaves"}, {"fail": "leaves"}])
def test_whoever_leaves_is_waited_for(priority: int, event: dict[str, str]) -> None:
    leaves = {**LEAVES, "priority": priority, "backoffLimit": 0}
    result = play(LOW, leaves, WISH, events=[{"at": 10, **event}])
    assert evicted(result) == []
    assert started(result, "wish") == 40


def test_also_on_nodes_when_its_queue_is_in_no_cohort_with_mine() -> None:
    other = {"name": "other", "quotas": [MINE]}
    mine = {"name": "q", "preemption": {"withinQueue": "LowerPriority"}, "quotas": [MINE]}
    leaves = {**LEAVES, "queue": "other"}
    result = play(LOW, leaves, WISH, queues=[mine, other], events=[{"at": 10, "delete": "leaves"}])
    assert evicted(result) == []
    assert started(result, "wish") == 40


@pytest.mark.parametrize("rules", [[], ["LessThanOrEqualToFinalShare", "LessThanInitialShare"]])
@pytest.mark.parametrize("event", [
    {"delete": "leaves"},
    {"setStopPolicy": {"queue": "other", "stopPolicy": "HoldAndDrain"}},
])  # fmt: skip
def test_also_in_a_queue_of_the_cohort_that_uses_no_more_than_its_own(event: dict[str, Any], rules: list[str]) -> None:
    """It lends what its job leaves, so nobody who borrows has to give it back."""
    queues = [
        {"name": "top"},
        {"name": "q", "parent": "top", "preemption": {"reclaimFromCohort": "Any"}, "quotas": [{**MINE, "nominal": 2}]},
        {"name": "other", "parent": "top", "quotas": [{**MINE, "nominal": 4}]},
        {"name": "third", "parent": "top", "quotas": [{**MINE, "nominal": 2}]},
    ]
    borrows = {"name": "borrows", "queue": "third"}
    leaves = {**LEAVES, "queue": "other"}
    wish = {**WISH, "gpus": 2}
    result = play(borrows, leaves, wish, queues=queues, events=[{"at": 10, **event}], policy={"fairSharing": rules})
    assert evicted(result) == []
    assert started(result, "wish") == 40


def test_in_another_flavor_too() -> None:
    flavors = [{"name": f, "nodeLabels": {"f": f}} for f in ("one", "two")]
    nodes = [{"name": f, "gpus": 4, "labels": {"f": f}} for f in ("one", "two")]
    quotas = [{**MINE, "flavor": f, "nominal": 4} for f in ("one", "two")]
    queue = {"name": "q", "preemption": {"withinQueue": "LowerPriority"}, "quotas": quotas}
    result = play(
        LOW, LEAVES, WISH, nodes=nodes, flavors=flavors, queues=[queue], events=[{"at": 10, "delete": "leaves"}]
    )
    assert evicted(result) == []
    assert started(result, "wish") == 40


def test_with_what_others_victims_leave_it_may_suffice() -> None:
    """Of the six that the first preemptor has taken it needs two."""
    quotas = [{**MINE, "nominal": 14}]
    queue = {
        "name": "q",
        "preemption": {"withinQueue": "LowerPriority", "victims": "LowestPriority"},
        "quotas": quotas,
    }
    taken = {"name": "taken", "gpus": 6, "grace": 30}
    low = {"name": "low", "priority": 1}
    first = {"name": "first", "gpus": 2, "priority": 9, "at": 5}
    result = play(
        taken, low, LEAVES, first, {**WISH, "gpus": 8},
        nodes=[{"name": "n", "gpus": 14}], queues=[queue], events=[{"at": 10, "delete": "leaves"}],
    )  # fmt: skip
    assert evicted(result) == ["taken"]
    assert started(result, "wish") == 40


def test_a_flavor_that_is_free_now_goes_before_one_that_will_be() -> None:
    flavors = [{"name": f, "nodeLabels": {"f": f}} for f in ("one", "two")]
    nodes = [{"name": f, "gpus": 4, "labels": {"f": f}} for f in ("one", "two")]
    queue = {
        "name": "q",
        "preemption": {"withinQueue": "LowerPriority"},
        "flavorChoice": {"whenCanPreempt": "Stop"},
        "quotas": [{**MINE, "flavor": f, "nominal": 4} for f in ("one", "two")],
    }
    result = play(LEAVES, WISH, nodes=nodes, flavors=flavors, queues=[queue], events=[{"at": 10, "delete": "leaves"}])
    assert started(result, "wish") == 20


def test_it_counts_first_when_somebody_must_go_as_well() -> None:
    lows = [{"name": "low-0", "gpus": 2}, {"name": "low-1", "gpus": 2}]
    result = play(*lows, LEAVES, {**WISH, "gpus": 6}, events=[{"at": 10, "delete": "leaves"}])
    assert len(evicted(result)) == 1
    assert started(result, "wish") == 40


def test_two_do_not_wait_for_the_same() -> None:
    result = play(LOW, LEAVES, WISH, {**WISH, "name": "next", "at": 21}, events=[{"at": 10, "delete": "leaves"}])
    assert evicted(result) == ["low"]
    assert (started(result, "wish"), started(result, "next")) == (40, 21)


def test_the_room_of_one_that_is_in_line_again_at_once_is_not_taken_from_it_by_who_comes_after_it() -> None:
    """Else it would have to take it back."""
    nodes = [{"name": f"n-{i}", "gpus": 4, "labels": {"n": str(i)}} for i in range(3)]
    queue = {"name": "q", "preemption": {"withinQueue": "LowerPriority"}, "quotas": [{**MINE, "nominal": 12}]}
    moves = {**LEAVES, "name": "moves", "gpus": 4}
    after = {"name": "after", "at": 20, "nodeSelector": {"n": "0"}}
    events = [{"at": 5, "nodeDown": "n-2"}, {"at": 10, "nodeDown": "n-1"}, {"at": 25, "nodeUp": "n-2"}]
    result = play(moves, after, nodes=nodes, queues=[queue], events=events)
    assert evicted(result) == []
    assert [entry.at for entry in result.of("Running") if entry.job == "moves"] == [0, 40]


def test_who_failed_and_tries_again_once_it_is_gone_leaves_its_room_only_to_those_before_it() -> None:
    after = {"name": "after", "at": 20, "gpus": 4}
    before = {"name": "before", "at": 20, "gpus": 4, "priority": 10}
    failed = {**LEAVES, "gpus": 4}
    fails = [{"at": 10, "fail": "leaves"}]
    result = play(failed, after, events=fails)
    assert evicted(result) == []
    assert [entry.at for entry in result.of("Running") if entry.job == "leaves"] == [0, 40]
    result = play(failed, before, events=fails)
    assert evicted(result) == []
    assert started(result, "before") == 40


def some_leave(case: Case, dice: random.Random) -> Case:
    running = {
        queue: [replace(gang, evicting=dice.random() < 0.4) for gang in gangs]
        for queue, gangs in case.snapshot.running.items()
    }
    return replace(case, snapshot=replace(case.snapshot, running=running))


@given(st.integers(0, 10**9), st.booleans(), st.sampled_from(VictimChoice))
def test_nobody_goes_in_vain(seed: int, by_shares: bool, choice: VictimChoice) -> None:  # noqa: FBT001
    dice = random.Random(seed)
    case = some_leave(draw(dice), dice)
    case = fair(case) if by_shares else case
    going, victims = case.snapshot.going, case.victims(choice)
    if case.makes_room(going, at_home=False) and not case.makes_room([]):
        assert victims
        assert all(one.evicting for one in victims)
    evicted = [one for one in victims if not one.evicting]
    for one in evicted if not (by_shares or case.at_home) else ():
        assert not case.makes_room(going + [other for other in evicted if other is not one], at_home=False)
