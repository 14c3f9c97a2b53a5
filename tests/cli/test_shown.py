"""What the tables say of queues, and of pods that are gone."""

from typing import Any

from queuectl.cli.cluster import queue_rows
from queuectl.cli.jobs import by_attempt, logged, places
from queuectl.kube.names import ATTEMPT_LABEL, ROLE_LABEL

QUOTA = {"flavor": "gpu", "resource": "nvidia.com/gpu", "nominal": 0}


def test_a_queue_whose_drain_is_blocked_says_by_whom() -> None:
    conditions = [
        {"type": "Ready", "status": "False", "message": "Queue q admits nothing new."},
        {"type": "EvictionBlocked", "status": "True", "message": "1 job can't be stopped: default/a."},
    ]
    queue = {"metadata": {"name": "q"}, "spec": {}, "status": {"conditions": conditions}}
    [row] = queue_rows(queue, wide=False)
    assert row[-1] == "no: Queue q admits nothing new.; 1 job can't be stopped: default/a."
    conditions[0]["status"] = "True"
    [row] = queue_rows(queue, wide=False)
    assert row[-1] == "yes; 1 job can't be stopped: default/a."


def test_a_parents_row_has_what_is_used_below_it_and_out_of_what() -> None:
    reserved = {**QUOTA, "amount": "9", "total": "12", "nominal": "0"}
    queue = {"metadata": {"name": "team"}, "spec": {"quotas": [QUOTA]}, "status": {"reserved": [reserved]}}
    assert [row[6:] for row in queue_rows(queue, wide=True)] == [["gpu", "nvidia.com/gpu", "9", "12", "0"]]
    assert [row[6:] for row in queue_rows({**queue, "status": {}}, wide=True)] == [["gpu", "nvidia.com/gpu", 0, 0, 0]]


def test_pods_of_a_gang_that_stops_are_gone_and_not_to_come() -> None:
    assignment = {"role": "worker", "node": "n", "flavor": "gpu", "pods": 2}
    for phase, state in (("Starting", "not bound yet"), ("Stopping", "gone")):
        assert [row[-1] for row in places({"phase": phase, "assignments": [assignment]}, [])] == [state]


def pod(attempt: int, index: int, phase: str) -> dict[str, Any]:
    labels = {ATTEMPT_LABEL: str(attempt), ROLE_LABEL: "worker"}
    meta = {"name": f"llm-worker-{attempt}-{index}", "labels": labels}
    return {"metadata": meta, "spec": {"nodeName": "n"}, "status": {"phase": phase}}


def test_a_job_that_failed_shows_the_pods_of_its_last_attempt_and_whose_log_to_read() -> None:
    status = {
        "phase": "Failed",
        "attempt": 2,
        "message": "Failed 2 times; last: Pod llm-worker-2-1 failed with exit code 3.",
    }
    pods = [pod(1, 0, "Failed"), pod(2, 0, "Failed"), pod(2, 1, "Failed"), pod(2, 2, "Running")]
    last, before = by_attempt(status, pods)
    assert list(places(status, last)) == [["worker", "n", "-", 3, "2 Failed, 1 Running"]]
    assert before == pods[:1]
    assert logged(status, last) == "llm-worker-2-1"
    assert logged({"message": "Backing off"}, [pod(1, index, "Failed") for index in (10, 9)]) == "llm-worker-1-9"
    assert logged({}, [pod(1, 0, "Running"), pod(1, 1, "Failed")]) == "llm-worker-1-1"
    assert logged({}, [pod(1, 0, "Pending")]) is None
