"""Pods that the API server makes larger than their template says still go where kube-scheduler takes them."""

from typing import Any

from tests.support.stage import Stage

CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"


async def _refusals(stage: Stage) -> list[str]:
    path = f"/apis/events.k8s.io/v1/namespaces/{stage.namespace}/events"
    found = await stage.client.request("GET", path, params={"fieldSelector": "reason=FailedScheduling"})
    return [str(item.get("note")) for item in found["items"]]


async def test_requests_that_a_limit_range_gives_are_reserved(live: Stage) -> None:
    nodes = await live.nodes(2, cpu="8")
    await live.queue(16)
    limit = {"type": "Container", "defaultRequest": {"cpu": "6"}}
    meta = {"name": "defaults", "namespace": live.namespace}
    await live.create({"apiVersion": "v1", "kind": "LimitRange", "metadata": meta, "spec": {"limits": [limit]}})

    await live.submit("llm", 2, 1)
    await live.until_phase("llm", "Running")
    assert {pod["spec"]["nodeName"] for pod in await live.pods("llm")} == set(nodes)
    await live.submit("next", 1, 1)
    told = await live.until_reason("next", "WaitingForNodes")
    assert "1 place with 6 cpu" in told["status"]["message"]
    await live.delete_job("llm")
    assert (await live.until_phase("next", "Running"))["status"]["attempt"] == 1
    assert await _refusals(live) == []


async def test_what_a_runtime_class_adds_is_reserved_on_its_nodes(live: Stage) -> None:
    await live.nodes(1, cpu="8")
    there = await live.nodes(2, first=1, cpu="3", labels={"sandbox": "yes"})
    await live.queue(24)
    kind: dict[str, Any] = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": live.name}}
    kind |= {"handler": "kata", "overhead": {"podFixed": {"cpu": "2"}}}
    kind["scheduling"] = {"nodeSelector": {"sandbox": "yes"}}
    await live.client.request("POST", CLASSES, body=kind)
    try:
        await live.submit("llm", 2, 1, pod={"runtimeClassName": live.name})
        await live.until_phase("llm", "Running")
        assert {pod["spec"]["nodeName"] for pod in await live.pods("llm")} == set(there)
        assert await _refusals(live) == []
    finally:
        await live.client.request("DELETE", f"{CLASSES}/{live.name}")
