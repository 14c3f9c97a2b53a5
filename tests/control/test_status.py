"""What jobs are told while they wait."""

from dataclasses import replace

import msgspec

from queuectl.control.status import conditions, desired, reason
from queuectl.kube import decode
from queuectl.model.lifecycle import Attempt, AttemptState, Workload, WorkloadState
from queuectl.model.objects import Pod
from queuectl.model.plan import Placement
from queuectl.model.reasons import Reason, why
from queuectl.simulate.clockwork import Clockwork, run
from queuectl.simulate.form import GPU, read
from tests.support.manifests import job, with_pod


def test_who_waits_for_victims_is_told_how_many_are_still_there() -> None:
    scenario = read(
        {
            "nodes": [{"name": "n", "gpus": 3}],
            "queues": [
                {
                    "name": "q",
                    "preemption": {"withinQueue": "LowerPriority"},
                    "quotas": [{"flavor": "default", "resource": GPU, "nominal": 3}],
                }
            ],
            "jobs": [
                {"name": f"v{grace}", "queue": "q", "gpus": 1, "priority": 0, "grace": grace} for grace in (10, 20, 30)
            ]
            + [{"name": "p", "queue": "q", "gpus": 3, "priority": 1, "at": 5}],
            "events": [{"at": 26, "controllerRestart": True}],
            "want": [{"at": at, "pending": ["p"]} for at in (6, 16, 24, 27)],
        }
    )
    looks = run(scenario).looks
    told = [int(states["p"].why.partition("waiting for ")[2].split()[0]) for _, states in sorted(looks.items())]
    assert told == [3, 2, 2, 1]


def test_who_waits_is_told_what_its_reservation_will_not_cover() -> None:
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
    told = []
    for manifest in (job(), with_pod(job(), topologySpreadConstraints=[spread])):
        one = decode.job(msgspec.json.encode(manifest)).value
        waits = Workload("u", "default", "llm", "team-a", 0, 0.0, 1)
        found = conditions(one, waits, None, why(Reason.PENDING), 0.0)
        told.append([each["message"] for each in found if (each["type"], each["status"]) == ("PlaceUncertain", "True")])
    [none, [message]] = told
    assert none == []
    assert "spec.roles[worker].template.spec.topologySpreadConstraints" in message


def test_a_gang_that_has_lost_pods_says_which_nodes_and_how_many_run_until_it_is_whole_again() -> None:
    scenario = read(
        {
            "nodes": [{"name": "n", "count": 3, "gpus": 2}],
            "queues": [{"name": "q", "quotas": [{"flavor": "default", "resource": GPU, "nominal": 4}]}],
            "jobs": [{"name": "j", "queue": "q", "pods": 4, "gpus": 1, "replaceLostPods": True, "startSeconds": 5}],
            "events": [{"at": 10, "nodeDown": "n-1"}],
            "until": 0,
        }
    )
    told = []
    for until in (9, 12, 20):
        clock = Clockwork(scenario.model_copy(update={"until": until}))
        clock.run()
        world = clock.world
        attempt, job = world.attempts["j"], world.jobs["j"]
        status = desired(
            job, world.workloads["j"], attempt, pods=world.pods["j", 1], wait=None, leaving=(), position=None, now=until
        )
        ready = next(each["status"] for each in status["conditions"] if each["type"] == "PodsReady")
        assert not [each for each in status["conditions"] if each["type"] == "Shrunk"]
        told.append((status["phase"], status["reason"], status["pods"], ready))
        if status["reason"] == "Replacing":
            assert status["message"] == (
                "The gang runs with 2 of 4 pods; those that were on n-1 are being replaced. Node n-1 is gone."
            )
    assert told == [
        ("Running", "Running", "4/4", "True"),
        ("Running", "Replacing", "2/4", "False"),
        ("Running", "Running", "4/4", "True"),
    ]


def test_a_gang_that_starts_says_how_far_its_pods_are_and_which_cannot_start() -> None:
    attempt = Attempt("g", 1, AttemptState.UNGATED, 1, (Placement("worker", "any", "n", 3, ()),), 0.0)
    pods = {("worker", i): Pod(f"p{i}", "team", f"g-worker-{i}", "1", role="worker", index=i) for i in range(3)}
    pods["worker", 0] = replace(pods["worker", 0], node="n", ready=True)
    pods["worker", 2] = replace(pods["worker", 2], node="n", waits="ImagePullBackOff")
    workload = Workload("g", "team", "g", "q", 0, 0.0, 1, state=WorkloadState.ACTIVE, attempt=1)
    assert str(reason(workload, attempt, None, (), pods=pods)) == (
        "The whole gang, 3 pods, was let go together; bound to nodes: 2, ready: 1. Pod g-worker-2 waits: ImagePullBackOff."
    )


def test_a_cause_is_told_by_one_condition_and_the_others_refer_to_it() -> None:
    """At each moment of a job that runs, gives way to another, waits, and runs again to its end."""
    scenario = read(
        {
            "nodes": [{"name": "n", "gpus": 1}],
            "queues": [
                {
                    "name": "q",
                    "preemption": {"withinQueue": "LowerPriority"},
                    "quotas": [{"flavor": "default", "resource": GPU, "nominal": 1}],
                }
            ],
            "jobs": [
                {"name": "j", "queue": "q", "gpus": 1, "run": 30, "grace": 10},
                {"name": "high", "queue": "q", "gpus": 1, "priority": 1, "at": 5, "run": 20},
            ],
        }
    )
    told = []
    for until in (4, 10, 20, 50, 100):
        clock = Clockwork(scenario.model_copy(update={"until": until}))
        clock.run()
        world, attempt = clock.world, clock.world.attempts.get("j")
        status = desired(
            world.jobs["j"], world.workloads["j"], attempt, pods={}, wait=world.plan.waits.get("j"), leaving=(),
            position=None, now=until,
        )  # fmt: skip
        found = {each["type"]: each["message"] for each in status["conditions"]}
        causes = [message for message in found.values() if not message.startswith("See condition ")]
        assert len(causes) == len(set(causes))
        assert {f"See condition {kind}." for kind in found} >= {*found.values()} - {*causes}
        told.append((status["phase"], *(kind for kind, message in found.items() if message == status["message"])))
    assert told == [
        ("Running", "PodsReady"),
        ("Stopping", "Preempted"),
        ("Pending", "QuotaReserved"),
        ("Running", "PodsReady"),
        ("Succeeded", "Finished"),
    ]
