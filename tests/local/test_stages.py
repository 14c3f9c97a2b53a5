"""What simulated pods do when their annotations ask for it, seen in the API server."""

import time
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import pytest

from queuectl.kube.client import ApiError, KubeClient
from queuectl.local.nodes import node_manifest
from queuectl.local.prepare import apply, create_nodes
from tests.support.eventually import eventually

OURS = "local.queuectl.dev/"
PODS = "/api/v1/namespaces/stages/pods"


@pytest.fixture
async def pods(kube: KubeClient) -> AsyncIterator[KubeClient]:
    await create_nodes(kube, [node_manifest("stages", labels={"for": "stages"})])
    await apply(kube, [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "stages"}}])
    yield kube
    await kube.request("DELETE", PODS, params={"gracePeriodSeconds": "0"})


async def create(kube: KubeClient, name: str, *, gated: bool = False, **annotations: str) -> None:
    await kube.request(
        "POST",
        PODS,
        body={
            "metadata": {
                "name": name,
                "annotations": {OURS + key.replace("_", "-"): value for key, value in annotations.items()},
            },
            "spec": {
                "nodeSelector": {"for": "stages"},
                "schedulingGates": [{"name": "queuectl.dev/gang"}] if gated else [],
                "initContainers": [{"name": "init", "image": "none"}],
                "containers": [{"name": "a", "image": "none"}, {"name": "b", "image": "none"}],
                "restartPolicy": "Never",
            },
        },
    )


async def get(kube: KubeClient, name: str) -> dict[str, Any]:
    pod: dict[str, Any] = await kube.request("GET", f"{PODS}/{name}")
    return pod


async def reached(kube: KubeClient, name: str, phase: str) -> dict[str, Any]:
    async def look() -> dict[str, Any] | None:
        pod = await get(kube, name)
        return pod if pod["status"]["phase"] == phase else None

    pod = await eventually(look, f"{name} is {phase}")
    assert pod is not None
    return pod


async def gone(kube: KubeClient, name: str) -> None:
    async def look() -> bool:
        try:
            await get(kube, name)
        except ApiError as error:
            return error.status == 404
        return False

    await eventually(look, f"{name} is gone")


def is_ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))


async def test_a_plain_pod_is_ready_and_runs_on(pods: KubeClient) -> None:
    await create(pods, "plain")
    await create(pods, "later", run_seconds="2s")
    plain = await reached(pods, "plain", "Running")
    assert is_ready(plain)
    assert plain["status"]["podIP"]
    assert [c["ready"] for c in plain["status"]["containerStatuses"]] == [True, True]
    await reached(pods, "later", "Succeeded")
    assert (await get(pods, "plain"))["metadata"]["resourceVersion"] == plain["metadata"]["resourceVersion"]


@pytest.mark.parametrize(("text", "seconds"), [("2s", 2.0), ("1.5", 1.5), ("2200ms", 2.2), ("0m1s", 1.0)])
async def test_a_pod_runs_as_long_as_it_says(pods: KubeClient, text: str, seconds: float) -> None:
    name = f"run-{text.replace('.', '-')}"
    await create(pods, name, run_seconds=text)
    running = await reached(pods, name, "Running")
    begun = time.monotonic()
    # A change while it runs must not make the time start again.
    patch = {"metadata": {"labels": {"changed": "yes"}}}
    await pods.request("PATCH", f"{PODS}/{name}", body=patch, content_type="application/merge-patch+json")
    done = await reached(pods, name, "Succeeded")
    assert seconds - 0.5 < time.monotonic() - begun < seconds + 1.0
    assert not is_ready(done)
    for before, after in zip(running["status"]["containerStatuses"], done["status"]["containerStatuses"], strict=True):
        ended = after["state"]["terminated"]
        assert (ended["exitCode"], ended["reason"]) == (0, "Completed")
        assert ended["startedAt"] == before["state"]["running"]["startedAt"]
        assert datetime.fromisoformat(ended["startedAt"]) <= datetime.fromisoformat(ended["finishedAt"])


async def test_a_pod_fails_with_the_code_it_asks_for(pods: KubeClient) -> None:
    await create(pods, "fails", run_seconds="0.3s", exit_code="3")
    failed = await reached(pods, "fails", "Failed")
    ends = [c["state"]["terminated"] for c in failed["status"]["containerStatuses"]]
    assert [(end["exitCode"], end["reason"]) for end in ends] == [(3, "Error")] * 2


async def test_ready_late_or_never(pods: KubeClient) -> None:
    await create(pods, "never", never_ready="true")
    await create(pods, "late", ready_after="2s")
    await create(pods, "at-once")
    await reached(pods, "at-once", "Running")
    begun = time.monotonic()
    assert (await get(pods, "late"))["status"]["phase"] == "Pending"
    await reached(pods, "late", "Running")
    assert 1.5 < time.monotonic() - begun < 3.0
    never = await get(pods, "never")
    assert never["spec"]["nodeName"] == "stages"
    assert never["status"]["phase"] == "Pending"
    assert not is_ready(never)


async def test_a_gated_pod_is_not_touched_until_its_gate_goes(pods: KubeClient) -> None:
    await create(pods, "gated", gated=True)

    async def is_gated() -> dict[str, Any] | None:  # the API server's own word
        pod = await get(pods, "gated")
        return pod if pod["status"].get("conditions") else None

    before = await eventually(is_gated, "the gate is reported")
    await create(pods, "beside", run_seconds="1s")
    await reached(pods, "beside", "Succeeded")
    assert await get(pods, "gated") == before
    patch = [{"op": "remove", "path": "/spec/schedulingGates"}]
    await pods.request("PATCH", f"{PODS}/gated", body=patch, content_type="application/json-patch+json")
    await reached(pods, "gated", "Running")


async def test_a_pod_stops_by_once_or_slowly(pods: KubeClient) -> None:
    await create(pods, "slow", stop_after="2s")
    await create(pods, "quick")
    await reached(pods, "slow", "Running")
    await reached(pods, "quick", "Running")
    begun = time.monotonic()
    await pods.request("DELETE", f"{PODS}/slow")
    await pods.request("DELETE", f"{PODS}/quick")
    await gone(pods, "quick")
    assert time.monotonic() - begun < 1.0
    stopping = await get(pods, "slow")
    assert stopping["metadata"]["deletionTimestamp"]
    assert stopping["status"]["phase"] == "Running"
    patch = {"metadata": {"labels": {"changed": "yes"}}}
    await pods.request("PATCH", f"{PODS}/slow", body=patch, content_type="application/merge-patch+json")
    await gone(pods, "slow")
    assert 2.0 <= time.monotonic() - begun < 4.0
