"""Mistakes that no single object shows: the job or queue says what is wrong, holds nothing, and goes on once it is right."""

import asyncio
from typing import Any

from queuectl.kube.client import MERGE_PATCH
from queuectl.kube.names import API
from tests.support import ledger, manifests
from tests.support.eventually import eventually
from tests.support.stage import GPU, Controller, Stage


async def until_misconfigured(stage: Stage, name: str, *texts: str) -> None:
    """Wait until the job waits as misconfigured, naming `texts`, and has no pod and no reservation."""
    job = await stage.until_job(
        name, lambda s: (s.get("phase"), s.get("reason")) == ("Pending", "Misconfigured"), "waits as misconfigured"
    )
    for text in texts:
        assert text in job["status"]["message"]
    assert {c["reason"] for c in job["status"]["conditions"] if c["type"] == "Admitted"} == {"Misconfigured"}

    async def no_pods() -> bool:
        return await stage.pods(name) == []

    await eventually(no_pods, f"no pods are left of {name}")
    await ledger.until_free(stage)


async def test_an_unknown_queue(live: Stage) -> None:
    await live.nodes(1)
    await live.submit("lost", 1, 8)
    job = await live.until_reason("lost", "QueueNotFound")
    assert f"Queue {live.name} does not exist" in job["status"]["message"]
    assert job["status"]["attempt"] == 0
    assert await live.pods() == []
    await live.queue(8)
    await live.until_phase("lost", "Running")


async def test_an_unknown_priority_class(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    name = f"{live.name}-urgent"
    await live.submit("job", 1, 8, priorityClassName=name)
    await until_misconfigured(live, "job", "spec.priorityClassName", name, "create it or name another")
    path = "/apis/scheduling.k8s.io/v1/priorityclasses"
    body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": 1234}
    await live.client.request("POST", path, body=body)
    try:
        await live.until_phase("job", "Running")
        (pod,) = await live.pods("job")
        assert pod["spec"]["priority"] == 1234
        assert pod["spec"]["preemptionPolicy"] == "Never"
        await live.submit("waits", 1, 8, priorityClassName=name)
        await live.until_reason("waits", "WaitingForQuota")
    finally:
        await live.client.request("DELETE", f"{path}/{name}")
    await live.until_reason("waits", "Misconfigured")


async def test_many_jobs_with_the_same_mistake(live: Stage) -> None:
    names = [f"job-{number}" for number in range(20)]
    await asyncio.gather(*(live.submit(name, 1, 8, priorityClassName=f"{live.name}-none") for name in names))
    for name in names:
        await live.until_reason(name, "Misconfigured")


async def test_parents_that_form_a_cycle(live: Stage) -> None:
    await live.nodes(1)
    names = {side: f"{live.name}-{side}" for side in ("a", "b", "c")}
    for side, parent in (("a", "b"), ("b", "c"), ("c", "a")):
        await live.queue(8, side, parent=names[parent])
    await live.queue(8)
    for side, name in names.items():
        condition = await until_condition(live, name, "False", says="cycle")
        assert condition["reason"] == "Misconfigured", side
        assert "change one spec.parent" in condition["message"]
    await until_condition(live, live.name, "True")
    await live.submit("job", 1, 8, queue=names["a"])
    await until_misconfigured(live, "job", f"queue {names['a']}", "cycle")
    await live.submit("fine", 1, 8, run_seconds=0.1)
    await live.until_phase("fine", "Succeeded")

    body = {"spec": {"parent": None}}
    await live.client.request("PATCH", f"{API}/queues/{names['c']}", body=body, content_type=MERGE_PATCH)
    await live.until_phase("job", "Running")
    for name in names.values():
        await until_condition(live, name, "True")


async def until_condition(stage: Stage, queue: str, status: str, *, says: str = "") -> dict[str, Any]:
    """Wait for the queue's Ready condition to be of this status and to say this."""

    async def look() -> dict[str, Any] | None:
        found = await stage.client.request("GET", f"{API}/queues/{queue}")
        conditions = found.get("status", {}).get("conditions", [])
        ready = [c for c in conditions if c["type"] == "Ready" and c["status"] == status]
        return next((c for c in ready if says in c["message"]), None)

    return await eventually(look, f"queue {queue} has Ready={status}")


async def test_an_unknown_field_in_the_pod_template(live: Stage, shared_controller: Controller) -> None:
    await live.nodes(1)
    await live.queue(8)
    await live.submit("job", 2, 4, pod={"hostNetwrk": True})
    await until_misconfigured(live, "job", "hostNetwrk")
    for name in ("next", "after-a-restart"):
        await live.submit(name, 2, 4, run_seconds=0.1)  # nobody waits for it
        await live.until_phase(name, "Succeeded")
        attempts = (await live.until_reason("job", "Misconfigured"))["status"]["attempt"]
        assert attempts == 1, "it would be refused again, and others might have to go for it"
        shared_controller.kill()
        shared_controller.start()
        await shared_controller.until_leading()

    await live.patch_job("job", {"spec": live.job("job", 2, 4)["spec"]})
    await live.until_phase("job", "Running")


async def test_an_extended_resource_without_a_limit(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    container = {"name": "main", "image": "train:1", "resources": {"requests": {GPU: 4}}}
    await live.create(
        manifests.job("job", manifests.role("worker", 2, container), namespace=live.namespace, queue=live.name)
    )
    await until_misconfigured(live, "job", "spec.containers[0].resources.limits", "Limit must be set")
    await live.patch_job("job", {"spec": live.job("job", 2, 4)["spec"]})
    job = await live.until_phase("job", "Running")
    assert job["status"]["failures"] == 0


async def test_a_gang_of_which_only_one_role_is_refused(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    good = manifests.role("good", 4, {"name": "main", "image": "train:1", "resources": {"limits": {GPU: 1}}})
    bad = manifests.role("bad", 1, {"name": "main", "image": "train:1", "resources": {"limits": {GPU: 1}}})
    bad["template"]["spec"]["dnsPolicy"] = "Sometimes"
    await live.create(manifests.job("job", good, bad, namespace=live.namespace, queue=live.name))
    await until_misconfigured(live, "job", "Sometimes")


async def test_what_a_queue_does_not_offer(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    container = {"name": "main", "image": "train:1", "resources": {"limits": {"amd.com/gpu": 1}}}
    await live.create(
        manifests.job("job", manifests.role("worker", 1, container), namespace=live.namespace, queue=live.name)
    )
    job = await live.until_reason("job", "NoMatchingFlavor")
    assert "amd.com/gpu" in job["status"]["message"]
    assert await live.pods() == []
