"""The observer can fail: pods made by hand break every rule, on the real API server, and lawful ones break none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from queuectl.demo.observer import Observer
from queuectl.kube.client import JSON_PATCH, MERGE_PATCH
from queuectl.kube.names import API, ATTEMPT_LABEL, GATE, QUEUE_LABEL, WORKLOAD_LABEL, pods_path
from tests.support import manifests
from tests.support.eventually import eventually
from tests.support.stage import GPU, STAGE_LABEL, Stage

Object = dict[str, Any]


@asynccontextmanager
async def observing(stage: Stage) -> AsyncIterator[Observer]:
    observer = Observer(stage.client, namespace=stage.namespace, lag=0.5, grace=1.0)
    task = asyncio.create_task(observer.run())
    try:
        async with asyncio.timeout(20):
            await observer.ready()
        yield observer
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def gang(stage: Stage, pods: int, **spec: Any) -> Object:
    """Submit a job; nobody but the test acts on it."""
    return await stage.submit("gang", pods, 8, **spec)


async def make(stage: Stage, job: Object, index: int, *, gated: bool = True, gpus: int = 8, **spec: Any) -> str:
    """Create a pod of the job's first attempt."""
    name = f"gang-{index}"
    labels = {WORKLOAD_LABEL: job["metadata"]["uid"], ATTEMPT_LABEL: "1", QUEUE_LABEL: job["spec"]["queue"]}
    container = {"name": "main", "image": "train:1", "resources": {"limits": {GPU: gpus}}}
    wanted: Object = {"containers": [container], "nodeSelector": {STAGE_LABEL: stage.name}}
    if gated:
        wanted["schedulingGates"] = [{"name": GATE}]
    meta = {"name": name, "namespace": stage.namespace, "labels": labels}
    await stage.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": wanted | spec})
    return name


async def ungate(stage: Stage, *names: str) -> None:
    for name in names:
        patch = [{"op": "remove", "path": "/spec/schedulingGates"}]
        await stage.client.request("PATCH", pods_path(stage.namespace, name), body=patch, content_type=JSON_PATCH)


async def until_phase(stage: Stage, name: str, phase: str) -> None:
    async def look() -> bool:
        pod: Object = await stage.client.request("GET", pods_path(stage.namespace, name))
        return bool(pod["status"]["phase"] == phase)

    await eventually(look, f"pod {name} is {phase}")


async def until_said(sentences: list[str]) -> str:
    async def look() -> bool:
        return bool(sentences)

    await eventually(look, "the observer objects")
    assert len(sentences) == 1
    return sentences[0]


async def test_a_lawful_gang_is_no_violation_and_is_counted(stage: Stage) -> None:
    await stage.nodes(2)
    await stage.queue(16)
    async with observing(stage) as observer:
        job = await gang(stage, 2)
        names = [await make(stage, job, index) for index in range(2)]
        await ungate(stage, *names)
        for name in names:
            await until_phase(stage, name, "Running")
        assert [observer.gpus_on(f"{stage.name}-{i}") for i in range(2)] == [8, 8]
        assert observer.gpus_of(stage.name) == 16
        await stage.client.request(
            "DELETE", pods_path(stage.namespace, names[0]), body={"gracePeriodSeconds": 0}
        )  # a pod lost in running is a fault, not a partial start
        await observer.settled()
        assert observer.partial_gangs == observer.over_bookings == []
        assert observer.peak_gpus == 16
        assert observer.gpu_seconds() > 0


async def test_a_pod_ungated_before_its_peers_exist_is_a_partial_gang(stage: Stage) -> None:
    await stage.nodes(2)
    await stage.queue(16)
    async with observing(stage) as observer:
        job = await gang(stage, 2)
        await ungate(stage, await make(stage, job, 0))
        await make(stage, job, 1)  # too late
        said = await until_said(observer.partial_gangs)
        assert said == "gang, attempt 1: gang-0 was ungated when 1 of 2 pods of its gang existed"
        assert observer.over_bookings == []


async def test_a_pod_that_never_had_a_gate_counts_too_and_an_attempt_counts_once(stage: Stage) -> None:
    await stage.queue(64)
    async with observing(stage) as observer:
        job = await gang(stage, 3)
        await make(stage, job, 0, gated=False)
        await make(stage, job, 1, gated=False)
        assert "gang-0 was ungated when 1 of 3" in await until_said(observer.partial_gangs)
        await observer.settled()
        assert len(observer.partial_gangs) == 1


async def test_a_peer_that_is_gone_again_does_not_exist(stage: Stage) -> None:
    await stage.queue(64)
    async with observing(stage) as observer:
        job = await gang(stage, 2)
        first, second = [await make(stage, job, index) for index in range(2)]
        await stage.client.request("DELETE", pods_path(stage.namespace, second))
        await ungate(stage, first)
        assert "1 of 2 pods of its gang existed (2 had existed)" in await until_said(observer.partial_gangs)


async def test_ungated_pods_with_unbound_peers_past_the_deadline_are_a_partial_gang(stage: Stage) -> None:
    await stage.nodes(1)
    await stage.queue(16)
    async with observing(stage) as observer:
        job = await gang(stage, 2, startDeadlineSeconds=1)
        await ungate(stage, *[await make(stage, job, index) for index in range(2)])  # one node: one finds no place
        said = await until_said(observer.partial_gangs)
        assert "1 of 2 pods were bound" in said
        assert "startDeadlineSeconds is 1" in said
        assert observer.over_bookings == []


async def test_pods_that_ask_for_more_than_their_node_has_are_an_over_booking(stage: Stage) -> None:
    (node,) = await stage.nodes(1)
    await stage.queue(64)
    async with observing(stage) as observer:
        job = await gang(stage, 2)
        # Bound without kube-scheduler, which would not have done it.
        names = [await make(stage, job, i, nodeName=node, gated=False, gpus=5) for i in range(2)]
        said = await until_said(observer.over_bookings)
        assert said == f"node {node}: its pods asked for 10 {GPU}, it has 8"
        assert len(names) == 2


async def test_others_pods_count_on_a_node(stage: Stage) -> None:
    (node,) = await stage.nodes(1)
    async with observing(stage) as observer:
        for name in "ab":
            container = {"name": "main", "image": "other:1", "resources": {"limits": {GPU: 5}}}
            meta = {"name": name, "namespace": stage.namespace}
            spec = {"nodeName": node, "containers": [container]}
            await stage.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        assert node in await until_said(observer.over_bookings)


async def test_ungated_pods_above_the_quota_are_an_over_booking(stage: Stage) -> None:
    await stage.nodes(2)
    await stage.queue(8)
    async with observing(stage) as observer:
        job = await gang(stage, 2)
        await ungate(stage, *[await make(stage, job, index) for index in range(2)])
        said = await until_said(observer.over_bookings)
        assert said == (f"queue {stage.name}: ungated pods asked for 16 {GPU} in flavor {stage.name}, its quota is 8")
        assert observer.partial_gangs == []


async def test_quota_may_be_borrowed_as_far_as_the_cohort_owns_it(stage: Stage) -> None:
    await stage.nodes(3)
    await stage.create(manifests.queue(f"{stage.name}-all"))
    for name in ("a", "b"):
        await stage.queue(8, name, parent=f"{stage.name}-all")
    async with observing(stage) as observer:
        job = await gang(stage, 2, queue=f"{stage.name}-a")
        await ungate(stage, *[await make(stage, job, index) for index in range(2)])
        await observer.settled()
        assert observer.over_bookings == []
        other = await stage.submit("other", 1, 8, queue=f"{stage.name}-b")
        await ungate(stage, await make(stage, other, 7))
        assert f"queue {stage.name}-all: ungated pods asked for 24" in await until_said(observer.over_bookings)


async def test_more_than_may_be_borrowed_is_an_over_booking(stage: Stage) -> None:
    await stage.nodes(2)
    quota = manifests.quota(8, flavor=stage.name)
    await stage.create(manifests.queue(f"{stage.name}-all", quotas=[quota]))
    await stage.create(manifests.queue(stage.name, parent=f"{stage.name}-all", quotas=[quota | {"borrowingLimit": 4}]))
    async with observing(stage) as observer:
        job = await gang(stage, 2)
        await ungate(stage, *[await make(stage, job, index) for index in range(2)])
        said = f"queue {stage.name}: ungated pods asked for 16 {GPU} in flavor {stage.name}, its quota is 12"
        assert await until_said(observer.over_bookings) == said


async def test_an_elastic_gang_may_start_with_as_few_pods_as_it_must_have(stage: Stage) -> None:
    await stage.nodes(2)
    await stage.queue(24)
    manifest = stage.job("gang", 3, 8)
    manifest["spec"]["roles"][0]["minReplicas"] = 2
    async with observing(stage) as observer:
        job = await stage.create(manifest)
        await ungate(stage, *[await make(stage, job, index) for index in range(2)])
        await observer.settled()
        assert observer.partial_gangs == observer.over_bookings == []


async def test_each_flavor_has_its_own_quota(stage: Stage) -> None:
    await stage.create(manifests.flavor(f"{stage.name}-other", nodeLabels={STAGE_LABEL: stage.name, "kind": "other"}))
    await stage.create(manifests.flavor(f"{stage.name}-this", nodeLabels={STAGE_LABEL: stage.name, "kind": "this"}))
    quotas = [manifests.quota(8, flavor=f"{stage.name}-{kind}") for kind in ("other", "this")]
    await stage.create(manifests.queue(stage.name, quotas=quotas))
    await stage.nodes(2, labels={"kind": "this"})
    async with observing(stage) as observer:
        job = await gang(stage, 2)  # 16 of 16, but both on nodes of one flavor
        names = [await make(stage, job, i, nodeName=f"{stage.name}-{i}", gated=False) for i in range(2)]
        assert f"16 {GPU} in flavor {stage.name}-this, its quota is 8" in await until_said(observer.over_bookings)
        assert len(names) == 2


async def test_a_quota_lowered_under_running_pods_and_finished_pods_are_no_over_booking(stage: Stage) -> None:
    await stage.nodes(2)
    await stage.queue(16)
    async with observing(stage) as observer:
        job = await gang(stage, 2)
        names = [await make(stage, job, index) for index in range(2)]
        await ungate(stage, *names)
        for name in names:
            await until_phase(stage, name, "Running")
        lower = {"spec": {"quotas": [manifests.quota(8, flavor=stage.name)]}}
        await stage.client.request("PATCH", f"{API}/queues/{stage.name}", body=lower, content_type=MERGE_PATCH)
        await observer.settled()
        end = {"metadata": {"annotations": {"local.queuectl.dev/run-seconds": "0"}}}
        for name in names:
            path = pods_path(stage.namespace, name)
            await stage.client.request("PATCH", path, body=end, content_type=MERGE_PATCH)
            await until_phase(stage, name, "Succeeded")
        assert await eventually(lambda: _whole(observer), "the gang is seen to succeed") == 1
        # The same room again, by pods of a job that fits.
        other = await stage.submit("other", 1, 8)
        await ungate(stage, await make(stage, other, 7))
        await until_phase(stage, "gang-7", "Running")
        await observer.settled()
        assert observer.partial_gangs == observer.over_bookings == []


async def _whole(observer: Observer) -> int:
    return observer.whole_gangs_succeeded()


async def test_a_node_that_shrank_is_an_over_booking_when_nothing_is_done(stage: Stage) -> None:
    (node,) = await stage.nodes(1)
    await stage.queue(8)
    async with observing(stage) as observer:
        job = await gang(stage, 1)
        name = await make(stage, job, 0)
        await ungate(stage, name)
        await until_phase(stage, name, "Running")
        less = {"status": {"allocatable": {GPU: "4"}}}
        await stage.client.request("PATCH", f"/api/v1/nodes/{node}/status", body=less, content_type=MERGE_PATCH)
        assert f"node {node}: its pods asked for 8 {GPU}, it has 4" == await until_said(observer.over_bookings)
