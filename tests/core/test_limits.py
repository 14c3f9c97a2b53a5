"""Who may use a queue and how much each may hold: what the jobs that wait are told."""

from dataclasses import replace
from typing import Any

import pytest

from queuectl.core.cycle import plan
from queuectl.core.limits import Held
from queuectl.core.snapshot import Snapshot
from queuectl.model.objects import Gang, Queue
from queuectl.model.plan import Plan
from queuectl.model.policy import Cap, StopPolicy
from tests.support.builders import GPU, amounts, gang, needs, node, queue, role, snapshot

EIGHT = Cap(max_resources=((GPU, 8),))


def limited(**given: Any) -> Queue:
    return replace(queue(), **given)


def asking(name: str, gpu: int, **given: Any) -> Gang:
    return gang(name, role(gpu=gpu), **{"user": "ann", **given})


def view(*waiting: Gang, queues: Queue, holding: tuple[tuple[str, str, int], ...] = ()) -> Snapshot:
    """Return a view of one queue, in which users of namespaces hold GPUs already."""
    held = Held()
    for namespace, user, gpu in holding:
        held.add(queues, namespace, user, amounts(gpu=gpu))
    nodes = [node(f"n{i}", gpu=16) for i in range(4)]
    return replace(snapshot(waiting, nodes=nodes, queues=[queues]), held=held)


def started(decided: Plan) -> list[str]:
    return [admission.uid for admission in decided.admissions]


def told(decided: Plan, uid: str) -> str:
    return str(decided.waits[uid])


@pytest.mark.parametrize(
    ("rules", "holding", "sentence"),
    [
        (
            {"max_running": 1}, (("team", "bob", 1),),
            "Queue q lets 1 job in all hold room at a time (maxRunning); now it is 1.",
        ),
        (
            {"per_user": Cap(max_running=1)}, (("other", "ann", 1),),
            "Queue q lets 1 job of user ann hold room at a time (perUser.maxRunning); now it is 1.",
        ),
        (
            {"per_namespace": Cap(max_running=1)}, (("team", "bob", 1),),
            "Queue q lets 1 job of namespace team hold room at a time (perNamespace.maxRunning); now it is 1.",
        ),
        (
            {"per_user": EIGHT}, (("other", "ann", 5),),
            ("Queue q lets jobs of user ann hold 8 nvidia.com/gpu at a time (perUser.maxResources):"
            " they hold 5, and it asks for 4."),
        ),
        (
            {"per_namespace": EIGHT}, (("team", "bob", 5),),
            ("Queue q lets jobs of namespace team hold 8 nvidia.com/gpu at a time (perNamespace.maxResources):"
            " they hold 5, and it asks for 4."),
        ),
        (
            {"per_user": Cap(max_resources=((GPU, 3),))}, (),
            ("Can never start: it asks for 4 nvidia.com/gpu, and queue q lets jobs of user ann hold 3"
            " (perUser.maxResources)."),
        ),
    ],
)  # fmt: skip
def test_a_job_over_a_limit_is_told_the_limit(
    rules: dict[str, Any], holding: tuple[tuple[str, str, int], ...], sentence: str
) -> None:
    decided = plan(view(asking("a", 4), queues=limited(**rules), holding=holding), 0)
    assert not decided.admissions
    assert told(decided, "a") == sentence


@pytest.mark.parametrize("rules", [{"max_running": 2}, {"per_user": Cap(2, ((GPU, 8),))}, {"per_namespace": EIGHT}])
def test_a_job_within_its_limits_starts(rules: dict[str, Any]) -> None:
    holding = (("other", "bob", 5), ("other", "bob", 5)) if "max_running" not in rules else (("team", "ann", 4),)
    assert started(plan(view(asking("a", 4), queues=limited(**rules), holding=holding), 0)) == ["a"]


def test_what_starts_in_the_same_cycle_counts() -> None:
    jobs = [asking(name, 3) for name in "abc"]
    decided = plan(view(*jobs, queues=limited(per_user=EIGHT)), 0)
    assert started(decided) == ["a", "b"]
    assert "they hold 6, and it asks for 3" in told(decided, "c")


def test_a_limit_that_was_lowered_keeps_out_only_what_it_is_about() -> None:
    jobs = [asking("gpu", 1), asking("cpu", 0)]
    assert started(plan(view(*jobs, queues=limited(per_user=EIGHT), holding=(("team", "ann", 9),)), 0)) == ["cpu"]


def test_a_user_over_a_limit_holds_up_nobody_else() -> None:
    rules = replace(limited(per_user=EIGHT), order=queue(strict=True).order)
    jobs = [asking("own", 4), asking("never", 9), asking("others", 4, user="bob")]
    assert started(plan(view(*jobs, queues=rules, holding=(("team", "ann", 8),)), 0)) == ["others"]


def test_jobs_of_one_shape_are_told_apart_by_their_users() -> None:
    jobs = [asking("a", 4), asking("b", 4, user="bob"), asking("c", 4)]
    decided = plan(view(*jobs, queues=limited(per_user=Cap(max_running=1)), holding=(("team", "ann", 4),)), 0)
    assert started(decided) == ["b"]
    assert "user ann" in told(decided, "a")
    assert "user ann" in told(decided, "c")


def test_an_elastic_gang_is_told_what_keeps_its_smallest_size_out() -> None:
    workers = replace(role(pods=16, gpu=1), least=4)
    rules = limited(per_user=EIGHT, quotas=queue(any={GPU: 2}).quotas)
    decided = plan(view(gang("a", workers, user="ann"), queues=rules), 0)
    assert decided.waits["a"].code == "ExceedsMaxQuota", "the limit would let a smaller gang in, the quota doesn't"

    decided = plan(view(gang("a", workers, user="ann"), queues=limited(per_user=EIGHT), holding=(("t", "ann", 5),)), 0)
    assert "they hold 5, and it asks for 4" in told(decided, "a")


SELECTOR = (needs("team", "In", "a", "b"), needs("guest", "DoesNotExist"))


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ({"team": "b"}, ""),
        ({"team": "c"}, "Queue q takes only jobs of namespaces with team in (a, b), and namespace team has team=c."),
        ({}, "Queue q takes only jobs of namespaces with team in (a, b), and namespace team has no label team."),
        (
            {"team": "a", "guest": "yes"},
            "Queue q takes only jobs of namespaces with no label guest, and namespace team has guest=yes.",
        ),
    ],
)
def test_a_namespace_is_told_what_its_labels_lack(labels: dict[str, str], sentence: str) -> None:
    seen = replace(view(asking("a", 1), queues=limited(namespaces=SELECTOR)), namespaces={"team": labels})
    decided = plan(seen, 0)
    assert "".join(str(wait) for wait in decided.waits.values()) == sentence
    assert bool(started(decided)) == (not sentence)


@pytest.mark.parametrize("stop", [StopPolicy.HOLD, StopPolicy.HOLD_AND_DRAIN])
def test_a_stopped_queue_stops_those_below_it(stop: StopPolicy) -> None:
    queues = [Queue("top", stop=stop), Queue("mid", parent="top"), replace(queue(), parent="mid"), queue("open")]
    jobs = [asking("a", 1), asking("b", 1, queue="open")]
    decided = plan(snapshot(jobs, nodes=[node("n")], queues=queues), 0)
    assert started(decided) == ["b"]
    assert told(decided, "a") == f"Queue q admits nothing new: queue top has stopPolicy {stop.value}."


def test_one_that_fits_passes_a_thousand_different_ones_that_do_not() -> None:
    unfitting = [gang(f"big{i:04}", role(gpu=16, cpu=i + 1), seq=i) for i in range(1000)]
    decided = plan(snapshot([*unfitting, gang("small", role(gpu=1), seq=1000)], nodes=[node("n")]), 0)
    assert started(decided) == ["small"]
    assert len(decided.waits) == 1000


def test_limits_may_come_and_go_while_jobs_wait() -> None:
    jobs = [asking(f"{user}{i}", 16, user=user, seq=i) for i in range(3) for user in ("ann", "bob")]
    seen = replace(view(*jobs, queues=queue()), fleet=None)
    assert len(plan(seen, 0).admissions) == 6
    one_each = replace(seen, queues={"q": limited(per_user=Cap(max_running=1))})
    decided = plan(one_each, 0)
    assert started(decided) == ["ann0", "bob0"]
    assert {uid: wait.code for uid, wait in decided.waits.items()} == dict.fromkeys(
        ["ann1", "bob1", "ann2", "bob2"], "MaxRunningReached"
    )
    seen.waiting.update([], gone=["ann0", "bob1"])
    assert len(plan(seen, 0).admissions) == 4
