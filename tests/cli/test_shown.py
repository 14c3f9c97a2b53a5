"""What the tables say of queues, and of pods that are gone."""

from queuectl.cli.cluster import queue_rows
from queuectl.cli.jobs import places

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
