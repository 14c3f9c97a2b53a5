"""What nodes have done reaches decisions, what waiting jobs are told, and the next controller."""

from dataclasses import replace
from typing import Any

import pytest

from queuectl.control.suspects import Suspects
from queuectl.core.lifecycle import Loss, next_move
from queuectl.core.suspects import offences
from queuectl.model.lifecycle import AttemptState
from queuectl.model.objects import Node
from queuectl.model.plan import Portion, Repair
from queuectl.model.reasons import Reason, why
from queuectl.model.suspects import Healing, Offence
from queuectl.simulate.clockwork import Clockwork
from queuectl.simulate.form import GPU, read

GONE = why(Reason.NODE_LOST, node="n-1")


def clock(*events: dict[str, Any], until: float = 100, **parts: Any) -> Clockwork:
    """Have a gang on two of three nodes; each has room for one pod."""
    form = {
        "nodes": [{"name": "n", "count": 3, "gpus": 1}],
        "queues": [{"name": "q", "quotas": [{"flavor": "default", "resource": GPU, "nominal": 3}]}],
        "jobs": [
            {"name": "gang", "queue": "q", "pods": 2, "gpus": 1},
            {"name": "later", "queue": "q", "gpus": 1, "at": 40},
        ],
        "events": list(events),
        "until": until,
        **parts,
    }
    result = Clockwork(read(form))
    assert result.run().faults == []
    return result


LOST = ({"at": 10, "nodeDown": "n-1"}, {"at": 30, "nodeUp": "n-1"})


def test_a_job_that_waits_is_told_which_nodes_are_avoided_and_until_when() -> None:
    told = clock(*LOST).states()["later"]
    assert told.code == "WaitingForNodes"
    assert told.why.endswith("1 node that it could use is avoided: n-1 (until 00:10:10 UTC, Node n-1 is gone).")


def test_a_gang_that_needs_the_node_waits_for_it_and_is_not_told_that_it_can_never_start() -> None:
    alone: dict[str, Any] = {
        "nodes": [{"name": "n", "count": 2, "gpus": 1}],
        "jobs": [{"name": "gang", "queue": "q", "pods": 2, "gpus": 1}],
    }
    assert clock(*LOST, **alone).states()["gang"].code == "WaitingForNodes"
    assert [entry.at for entry in clock(*LOST, until=1000, **alone).result.of("Running")] == [0.0, 610.0]


def test_it_starts_there_in_the_moment_in_which_the_node_is_trusted_again() -> None:
    ran = clock(*LOST, until=1000)
    assert [entry.at for entry in ran.result.of("Running") if entry.job == "later"] == [610.0]


@pytest.mark.parametrize("at", [12, 25, 50])
def test_the_next_controller_avoids_it_too(at: float) -> None:
    ran = clock(*LOST, {"at": at, "controllerRestart": True}, until=1000)
    assert [entry.at for entry in ran.result.of("Running") if entry.job == "later"] == [610.0]


@pytest.mark.parametrize("restart", [None, 11.5, 13, 14.5])
def test_peers_that_fail_of_a_node_that_is_soon_back_under_its_name_are_no_failure(restart: float | None) -> None:
    """Also when it is back before anybody has seen that nothing is left of the gang."""
    job = {"name": "gang", "queue": "q", "pods": 2, "gpus": 1, "grace": 5, "backoffLimit": 0}
    hasty: list[dict[str, Any]] = [
        {"at": 10, "fail": "gang"},
        {"at": 11, "nodeDown": "n-1"},
        {"at": 12, "nodeUp": "n-1"},
    ]
    restarts = [{"at": restart, "controllerRestart": True}] if restart else []
    ran = clock(*hasty, *restarts, jobs=[job])
    workload = ran.world.workloads["gang"]
    assert (workload.failures, workload.attempt, ran.states()["gang"].code) == (0, 2, "Running")
    assert str(workload.last_end and workload.last_end.why) == (
        "Node n-1 was gone, and what ran there with it; another is there under its name."
    )
    assert {p.node for p in ran.world.attempts["gang"].placements} == {"n-0", "n-2"}, "and it is to blame"


def test_peers_that_fail_before_a_restarted_kubelet_tells_of_its_pod_are_no_failure() -> None:
    job = {"name": "gang", "queue": "q", "pods": 2, "gpus": 1, "grace": 5, "backoffLimit": 0}
    ran = clock({"at": 10, "fail": "gang"}, jobs=[job], until=11)
    [left] = [pod for pod in ran.world.pods["gang", 1].values() if pod.node == "n-1"]
    ran.world.on_pod(left, replace(left, phase="Failed", disrupted="lost", disrupted_by="ContainerStatusUnknown"))
    ran.world.on_pod(left, None)
    view = ran.world.view("gang", 12.0)
    assert view is not None
    move = next_move(view)
    assert move is not None
    assert move.end is not None
    assert (str(move.end.why), move.end.charged) == ("Pod gang-worker-1-1 was disrupted: lost", False)
    assert [one.node for one in offences(view, move, move.end.why)] == ["n-1"]


@pytest.mark.parametrize("what", ["node", "pod"])
def test_what_becomes_of_lost_pods_and_their_node_while_they_are_replaced_excuses_no_later_failure(what: str) -> None:
    ran = clock(jobs=[{"name": "gang", "queue": "q", "pods": 2, "gpus": 1, "grace": 5}], until=10)
    world = ran.world
    lost, pod = Loss(frozenset({("worker", 1)}), GONE), world.pods["gang", 1]["worker", 1]
    left = tuple(p for p in world.attempts["gang"].placements if p.node == pod.node)
    world.lost("gang", lost)
    world.repairs("gang", Repair(lost.pods, left, tuple(replace(p, node="n-2") for p in left), lost.why), 20.0)
    if what == "pod":
        world.on_pod(pod, replace(pod, phase="Failed", disrupted="shutdown", disrupted_by="TerminationByKubelet"))
    else:
        node = world.nodes.known[pod.node]
        world.on_node(node, None)
        world.on_node(None, replace(node, uid="another", created_at=25.0))
    view = world.view("gang", 30.0)
    assert view is not None
    assert view.attempt.state is AttemptState.REPAIRING
    assert view.struck is None


def test_nor_does_what_becomes_of_pods_that_would_have_joined_it() -> None:
    ran = clock(jobs=[{"name": "gang", "queue": "q", "pods": 2, "gpus": 1, "grace": 5}], until=10)
    world, pod = ran.world, ran.world.pods["gang", 1]["worker", 1]
    world.grows("gang", Portion((replace(world.attempts["gang"].placements[-1], node="n-2", first=2),)), 20.0)
    joins = replace(pod, uid="p", name="gang-worker-1-2", index=2, node="n-2", ready=False)
    world.on_pod(None, joins)
    world.on_pod(joins, replace(joins, phase="Failed", disrupted="refused", disrupted_by="UnexpectedAdmissionError"))
    view = world.view("gang", 30.0)
    assert view is not None
    assert view.struck is None


def test_a_job_that_fails_by_itself_later_has_failed() -> None:
    job = {"name": "gang", "queue": "q", "pods": 2, "gpus": 1, "backoffLimit": 0}
    assert clock(*LOST, {"at": 60, "fail": "gang"}, jobs=[job]).states()["gang"].code == "BackoffLimitExceeded"


def test_a_node_that_is_cordoned_has_done_nothing() -> None:
    cordoned = clock({"at": 5, "cordon": "n-1"}, until=20)
    cordoned.world.nodes.offend([Offence("n-1", 15.0, GONE, "gang", 1), Offence("n-0", 15.0, GONE, "gang", 1)])
    assert [one.node for one in cordoned.world.suspects.take()[0]] == ["n-0"]


# What is known of nodes

NODE = Node("n-1", unready_since=50.0, ready=False)


def flavors() -> list[set[str]]:
    return [{f"n-{i}" for i in range(9)}]


def known(*offences: Offence, first: float = 600.0) -> Suspects:
    result = Suspects(Healing(first=first))
    result.offend(offences)
    result.keep(result.take()[0])
    return result


def test_an_offence_is_told_once_and_so_is_its_end() -> None:
    suspects = known(Offence("n-1", 10.0, GONE, "gang", 1))
    suspects.offend([Offence("n-1", 11.0, GONE, "gang", 1)])  # the same, seen again
    assert suspects.take() == ([], {})
    [news] = suspects.judge(12.0, flavors)
    assert str(news.why) == "No new gang goes onto it until 00:10:10 UTC, offence 1 in a row: Node n-1 is gone."
    assert (suspects.due(609.9), suspects.due(610.0)) == (False, True)
    [news] = suspects.judge(610.0, flavors)
    assert news.why.reason is Reason.NODE_TRUSTED
    assert suspects.avoidances() == {}
    assert not suspects.due(1e9)


def test_a_node_above_the_bound_is_told_and_not_avoided() -> None:
    suspects = known(*(Offence(f"n-{i}", 10.0 + i, GONE, "gang", 1) for i in range(2)))
    told = [(news.node, news.why.reason) for news in suspects.judge(12.0, flavors)]
    assert told == [("n-0", Reason.NODE_SUSPECT), ("n-1", Reason.NODE_SUSPECT_ONLY)]
    assert set(suspects.avoidances()) == {"n-0"}


def test_without_time_nobody_is_avoided() -> None:
    assert known(Offence("n-1", 10.0, GONE, "gang", 1), first=0).judge(10.0, flavors) == []


def test_who_is_forgiven_is_trusted_at_once_and_earlier_offences_count_no_more() -> None:
    suspects = known(Offence("n-1", 10.0, GONE, "gang", 1))
    suspects.judge(12.0, flavors)
    suspects.on_node("n-1", replace(NODE, forgiven_at=20.0))
    assert suspects.take() == ([], {"n-1": 20.0})
    assert [news.why.reason for news in suspects.judge(20.0, flavors)] == [Reason.NODE_TRUSTED]
    suspects.offend([Offence("n-1", 19.0, GONE, "other", 1), Offence("n-1", 21.0, GONE, "gang", 2)])
    new, forgiven = suspects.take()
    assert ([one.at for one in new], forgiven) == ([21.0], {})
    suspects.keep(new)
    suspects.judge(21.0, flavors)
    assert suspects.now["n-1"].times == 1


def test_also_when_it_was_forgiven_before_the_ledger_was_read() -> None:
    suspects = known()
    suspects.on_node("n-1", replace(NODE, forgiven_at=20.0))
    suspects.load([Offence("n-1", 10.0, GONE, "gang", 1)])
    assert suspects.judge(21.0, flavors) == []
    assert suspects.take() == ([], {"n-1": 20.0})


def test_which_nodes_are_not_ready() -> None:
    suspects = known()
    suspects.on_node("n-1", NODE)
    assert suspects.unready_of(["n-0", "n-1"]) == {"n-1": 50.0}
    suspects.on_node("n-1", replace(NODE, ready=True, unready_since=None))
    assert suspects.unready == {}


def test_a_node_bears_why_it_is_suspect_for_as_long_as_it_is() -> None:
    suspects = known(Offence("n-1", 10.0, GONE, "gang", 1), Offence("gone", 10.0, GONE, "gang", 1))
    suspects.on_node("n-1", NODE)
    suspects.judge(12.0, flavors)
    [(node, cause)] = suspects.untold().items()
    assert (node, cause.split(",")[0]) == ("n-1", "No new gang goes onto it until 00:10:10 UTC")
    suspects.on_node("n-1", replace(NODE, suspect=cause))
    assert suspects.untold() == {}
    suspects.judge(610.0, flavors)
    assert suspects.untold() == {"n-1": ""}
    suspects.on_node("n-1", NODE)
    assert suspects.untold() == {}
