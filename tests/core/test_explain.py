"""What those who wait are told: what is missing, what says so, and who has it."""

from typing import Any

from queuectl.control import status
from queuectl.model.objects import Budget, Requirement
from queuectl.simulate.clockwork import Clockwork
from queuectl.simulate.form import GPU, read


def quota(nominal: int, resource: str = GPU, **limits: int) -> dict[str, Any]:
    return {"flavor": "default", "resource": resource, "nominal": nominal, **limits}


def team(name: str, nominal: int, *, parent: str = "team", **given: Any) -> dict[str, Any]:
    limits = {key: given.pop(key) for key in ("borrowingLimit", "lendingLimit") if key in given}
    return {"name": name, "parent": parent, "quotas": [quota(nominal, **limits)], **given}


def clockwork(queues: list[dict[str, Any]], *jobs: dict[str, Any], gpus: int = 64, **given: Any) -> Clockwork:
    return Clockwork(read({"nodes": [{"name": "n", "gpus": gpus}], "queues": queues, "jobs": list(jobs), **given}))


def told(clock: Clockwork, name: str) -> str:
    assert clock.run().faults == []
    return clock.states()[name].why


TEAM = {"name": "team"}


def test_a_borrowing_limit_is_named_where_it_is_what_keeps_the_job_waiting() -> None:
    queues = [TEAM, team("a", 4, borrowingLimit=2), team("b", 8)]
    runs, waits = {"name": "runs", "queue": "a", "gpus": 5}, {"name": "waits", "queue": "a", "gpus": 2, "at": 1}
    assert told(clockwork(queues, runs, waits), "waits") == (
        f"It asks for 2 {GPU} in flavor default, and queue a is short of 1: it owns 4 and uses 5, and it may borrow 2"
        " (borrowingLimit). Jobs of a: default/runs (5)."
    )


def test_the_borrowing_limit_of_a_queue_above_is_named() -> None:
    queues = [TEAM, team("left", 0, borrowingLimit=1), team("right", 8), team("a", 4, parent="left")]
    runs, waits = {"name": "runs", "queue": "a", "gpus": 4}, {"name": "waits", "queue": "a", "gpus": 2, "at": 1}
    assert told(clockwork(queues, runs, waits), "waits") == (
        f"It asks for 2 {GPU} in flavor default, and queue a is short of 1: it owns 4 and uses 4; of the 4 that left has"
        " for its queues, 4 are in use, and it may borrow 1 (borrowingLimit). Used by: a (4). Jobs of a: default/runs (4)."
    )


def test_who_holds_the_queues_own_quota_is_named_the_largest_first() -> None:
    sizes = {"a": 1, "b": 6, "c": 2, "d": 3, "e": 4}
    runs = [{"name": name, "queue": "q", "gpus": gpus} for name, gpus in sizes.items()]
    for rule, says in (({}, "queue q is short of 2"), ({"preemptible": False}, "It is not preemptible")):
        waits = {"name": "waits", "queue": "q", "gpus": 2, "at": 1, **rule}
        message = told(clockwork([{"name": "q", "quotas": [quota(16)]}], *runs, waits), "waits")
        assert says in message
        assert message.endswith(" Jobs of q: default/b (6), default/e (4), default/d (3), and 2 more.")


def test_who_is_not_preemptible_has_what_the_queue_itself_owns_however_many_ask_and_whatever_those_below_lend() -> None:
    queues = [{"name": "dept", "quotas": [quota(4)]}, team("leaf", 4, parent="dept")]
    keeps = {"queue": "dept", "gpus": 3, "preemptible": False}
    says = f"asks for 3 {GPU} in flavor default, and of queue dept's own 4, {{}} are in use.{{}}"
    clock = clockwork(queues, {"name": "runs", **keeps}, {"name": "waits", **keeps, "at": 1})
    assert told(clock, "waits").endswith(says.format(3, " Jobs of dept: default/runs (3)."))
    below = {"name": "below", "queue": "leaf", "gpus": 6}
    assert told(clockwork(queues, below, {"name": "waits", **keeps, "at": 1}), "waits").endswith(says.format(2, ""))
    low = {"name": "low", "queue": "dept", "gpus": 6}
    queues[0]["preemption"] = {"withinQueue": "LowerPriority"}
    clock = clockwork(queues, low, {"name": "urgent", **keeps, "at": 1, "priority": 5})
    assert told(clock, "urgent") == "The whole gang is ready: 1 pod."


def test_jobs_of_queues_below_are_told_by_their_queue() -> None:
    queues = [{"name": "top", "quotas": [quota(8)]}, team("below", 0, parent="top")]
    runs, waits = {"name": "runs", "queue": "below", "gpus": 8}, {"name": "waits", "queue": "top", "gpus": 2, "at": 1}
    assert told(clockwork(queues, runs, waits), "waits").endswith(
        "it owns 8 and uses 8. Used by: below (8, 8 borrowed)."
    )


def test_whose_own_quota_is_lent_is_told_who_uses_it() -> None:
    queues = [TEAM, *(team(name, 4) for name in ("mine", "a", "b", "c", "d"))]
    users = [{"name": name, "queue": name, "gpus": gpus} for name, gpus in zip("abcd", (8, 3, 4, 2), strict=True)]
    assert told(clockwork(queues, *users, {"name": "waits", "queue": "mine", "gpus": 4, "at": 1}), "waits") == (
        f"It asks for 4 {GPU} in flavor default, and queue mine is short of 1: it owns 4 and uses 0; of the 20 that team"
        " has for its queues, 17 are in use. Used by: a (8, 4 borrowed), c (4), b (3), and 1 more."
    )


def test_what_a_queue_keeps_for_itself_is_not_counted_among_what_is_shared() -> None:
    queues = [TEAM, team("mine", 0), team("keeps", 8, lendingLimit=2), team("b", 4)]
    users = [{"name": "k", "queue": "keeps", "gpus": 7}, {"name": "b", "queue": "b", "gpus": 4}]
    assert told(clockwork(queues, *users, {"name": "waits", "queue": "mine", "gpus": 2, "at": 1}), "waits") == (
        f"It asks for 2 {GPU} in flavor default, and queue mine is short of 1: it owns 0 and uses 0; of the 6 that team"
        " has for its queues, 5 are in use. Used by: b (4), keeps (1)."
    )


def test_the_resource_that_is_missing_is_named_and_not_the_first_of_those_asked_for() -> None:
    queue = {"name": "q", "quotas": [quota(100, "cpu"), quota(8)]}
    runs, waits = (
        {"name": "runs", "queue": "q", "gpus": 6},
        {"name": "waits", "queue": "q", "gpus": 4, "cpu": 1, "at": 1},
    )
    assert f"asks for 4 {GPU} in flavor default, and queue q is short of 2" in told(
        clockwork([queue], runs, waits), "waits"
    )
    cohort: list[dict[str, Any]] = [
        TEAM,
        queue | {"parent": "team"},
        {"name": "p", "parent": "team", "quotas": [quota(100, "cpu"), quota(8)]},
    ]
    runs, waits = (
        {"name": "runs", "queue": "p", "gpus": 6},
        {"name": "waits", "queue": "q", "gpus": 12, "cpu": 1, "at": 1},
    )
    assert f"asks for 12 {GPU} in flavor default, and queue q is short of 2" in told(
        clockwork(cohort, runs, waits), "waits"
    )


def test_what_all_roles_ask_for_together_is_told() -> None:
    queue = {"name": "q", "quotas": [quota(8), quota(8, "cpu")]}
    roles = [{"name": "train", "gpus": 1, "cpu": 6}, {"name": "data", "cpu": 4}]
    assert told(clockwork([queue], {"name": "both", "queue": "q", "roles": roles}), "both") == (
        "Can never fit: it asks for 10 cpu and queue q has 8 in flavor default."
    )


def test_who_waits_for_others_victims_is_told_whose_room_it_is() -> None:
    rules = {"preemption": {"withinQueue": "LowerPriority"}}
    jobs = [
        {"name": "victim", "queue": "q", "gpus": 8, "grace": 30},
        {"name": "first", "queue": "q", "gpus": 4, "priority": 2, "at": 5},
        {"name": "second", "queue": "q", "gpus": 4, "priority": 1, "at": 5},
    ]
    clock = clockwork([{"name": "q", "quotas": [quota(8)], **rules}], *jobs, gpus=8, until=10)
    clock.run()
    by_quota = "Nobody has to give way to it: jobs that already give way to others still use the room: default/victim (queue q)."
    assert clock.states()["second"].why == by_quota

    clock = clockwork([{"name": "q", "quotas": [quota(100)], **rules}], *jobs, gpus=8, until=10)
    clock.run()
    assert clock.states()["second"].why == by_quota, "short of nodes instead of quota"


def test_who_is_not_preemptible_and_in_the_way_is_named() -> None:
    rules = {"preemption": {"withinQueue": "LowerPriority"}}
    low = {"name": "low", "queue": "q", "gpus": 8, "preemptible": False}
    high = {"name": "high", "queue": "q", "gpus": 8, "priority": 1, "at": 5}
    assert told(clockwork([{"name": "q", "quotas": [quota(8)], **rules}], low, high), "high").endswith(
        "it owns 8 and uses 8. Not preemptible: default/low. Jobs of q: default/low (8)."
    )


def blocked(clock: Clockwork, queue: str) -> dict[str, Any]:
    world = clock.world
    told = status.of_queue(
        world.queues[queue],
        pending=0,
        running=0,
        node=None,
        problem=None,
        blocked=world.plan.blocked.get(queue),
        now=0.0,
    )
    return {condition["type"]: condition["message"] for condition in told["conditions"]}


def test_a_drain_that_a_disruption_budget_holds_up_says_so_in_the_queue() -> None:
    jobs = [{"name": name, "queue": "q"} for name in ("free", "kept")]
    stop = {"at": 5, "setStopPolicy": {"queue": "q", "stopPolicy": "HoldAndDrain"}}
    clock = clockwork([{"name": "q", "quotas": [quota(8)]}], *jobs, events=[stop])
    selector = (Requirement("queuectl.dev/job", "In", ("kept",)),)
    clock.world.on_budget(None, Budget("default", "keep", selector, 0))
    clock.run()
    assert clock.states()["free"].phase == "Pending"
    assert blocked(clock, "q")["EvictionBlocked"] == (
        "Queue q is being drained, and 1 job can't be stopped: default/kept (PodDisruptionBudget default/keep)."
    )


def test_a_lowered_quota_that_can_t_be_taken_back_says_who_keeps_it() -> None:
    jobs = [{"name": f"j{i}", "queue": "q", "gpus": 2, "preemptible": False} for i in range(4)]
    cut = {"at": 5, "setQuota": {"queue": "q", "nominal": 4}}
    clock = clockwork([{"name": "q", "quotas": [quota(8)], "whenOverQuota": "TakeBack"}], *jobs, events=[cut])
    clock.run()
    names = ", ".join(f"default/j{i} (preemptible: false)" for i in range(3))
    assert blocked(clock, "q")["EvictionBlocked"] == (
        f"Of {GPU} in flavor default, 8 are in use in queue q and 4 may be; it can't take back the rest from 4 jobs:"
        f" {names}, and 1 more."
    )
    assert "EvictionBlocked" not in blocked(clockwork([{"name": "q", "quotas": [quota(8)]}]), "q")


def test_a_parent_shows_what_its_queues_use_out_of_what_they_share() -> None:
    clock = clockwork([TEAM, team("a", 4, lendingLimit=1), team("b", 8)], {"name": "runs", "queue": "b", "gpus": 9})
    clock.run()
    node = clock.world.holdings.now.nodes["team"]
    shown = status.of_queue(
        clock.world.queues["team"], pending=0, running=0, node=node, problem=None, blocked=None, now=0.0
    )
    assert shown["reserved"] == [{"flavor": "default", "resource": GPU, "amount": "9", "total": "9", "nominal": "0"}]


def test_who_is_promised_room_is_not_shown_as_admitted() -> None:
    rules = {"preemption": {"withinQueue": "LowerPriority"}}
    low, high = {"name": "low", "queue": "q", "gpus": 8, "grace": 30}, {"name": "high", "queue": "q", "gpus": 8}
    clock = clockwork(
        [{"name": "q", "quotas": [quota(8)], **rules}], low, {**high, "priority": 1, "at": 5}, gpus=8, until=10
    )
    clock.run()
    world = clock.world
    workload, attempt = world.workloads["high"], world.attempts["high"]
    shown = status.desired(
        world.jobs["high"], workload, attempt, pods={}, wait=None, leaving=(), position=None, now=10.0
    )
    assert (shown["phase"], shown["reason"]) == ("Pending", "WaitingForVictims")
    assert not {"admittedAt", "assignments"} & shown.keys()


def test_who_loses_nothing_is_not_told_since_when() -> None:
    rules = {"preemption": {"withinQueue": "LowerPriority"}}
    low, high = {"name": "low", "queue": "q", "gpus": 8}, {"name": "high", "queue": "q", "gpus": 8, "priority": 1}
    clock = clockwork(
        [{"name": "q", "quotas": [quota(8)], **rules}], {**low, "checkpoints": 5}, {**high, "at": 5}, gpus=8
    )
    [preempted] = clock.run().of("Preempted")
    assert preempted.why.endswith(". Not saved yet: nothing.")
