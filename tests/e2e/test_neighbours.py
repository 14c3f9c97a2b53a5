"""One job's trouble is not its neighbours'."""

from typing import Any

from queuectl.kube.client import MERGE_PATCH
from queuectl.kube.names import WORKLOAD_LABEL, pod_name, pods_path
from tests.support import ledger
from tests.support.stage import Stage


async def test_a_priority_class_that_somebody_deletes_is_made_again(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    await live.submit("first", 1, 1, priority=77, run_seconds=0)
    await live.until_phase("first", "Succeeded")
    await live.client.request("DELETE", "/apis/scheduling.k8s.io/v1/priorityclasses/queuectl-77")
    await live.submit("second", 1, 1, priority=77, run_seconds=0)
    job = await live.until_phase("second", "Succeeded")
    assert job["status"]["attempt"] <= 2  # the first may not have heard of the deletion yet


async def test_gangs_whose_names_are_taken_hold_up_nobody_else(live: Stage) -> None:
    """As many as the executor has workers; each waits for its name until its start deadline."""
    await live.nodes(2)
    await live.queue(16)
    spec: dict[str, Any] = {
        "containers": [{"name": "main", "image": "none"}],
        "schedulingGates": [{"name": "example.com/never"}],
    }
    blocked = [f"blocked-{i}" for i in range(8)]
    for name in blocked:
        metadata = {"name": pod_name(name, "worker", 1, 0), "namespace": live.namespace}
        await live.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        await live.submit(name, 1, 1)
    for name in blocked:
        await live.until_phase(name, "Starting")
    await live.submit("free", 1, 1, run_seconds=0)
    await live.until_phase("free", "Succeeded", seconds=50)
    for name in blocked:
        await live.delete_pod(pod_name(name, "worker", 1, 0))
    for name in blocked:
        await live.until_phase(name, "Running")


async def test_a_template_that_nobody_can_read_is_named_and_one_with_nulls_runs(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    await live.submit("gates", 1, 1, pod={"schedulingGates": 5})
    job = await live.until_reason("gates", "Misconfigured")
    assert "schedulingGates of role worker is 5; write a list" in job["status"]["message"]
    nothing: dict[str, Any] = {"nodeAffinity": None}
    await live.submit("nulls", 1, 1, run_seconds=0, pod={"affinity": nothing, "tolerations": None})
    await live.until_phase("nulls", "Succeeded")


async def test_a_pod_whose_labels_are_taken_away_is_lost_to_its_gang(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    await live.submit("first", 2, 2)
    await live.until_phase("first", "Running")
    path = pods_path(live.namespace, pod_name("first", "worker", 1, 1))
    labels = {WORKLOAD_LABEL: None}
    await live.client.request("PATCH", path, body={"metadata": {"labels": labels}}, content_type=MERGE_PATCH)
    await live.until_job("first", lambda s: s.get("attempt") == 2 and s.get("phase") == "Running", "runs again")
    assert [event for event in await ledger.history(live, "first") if event == "PodLost"]
    await live.client.request("DELETE", path)
    await live.delete_job("first")
    await live.until_gone("first")
