"""Whatever is deleted or changed, and whenever: no stuck finalizer, no pod left, no reservation left behind."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from queuectl.kube.client import MERGE_PATCH, ApiError
from queuectl.kube.names import API, jobs_path
from queuectl.local.controlplane import Running
from tests.support import ledger, manifests
from tests.support.eventually import eventually
from tests.support.proxy import proxied
from tests.support.stage import Controller, Stage

NEVER_READY = {"local.queuectl.dev/never-ready": "true"}
SLOW_STOP = {"local.queuectl.dev/stop-after": "3s"}


async def pending(stage: Stage) -> None:
    await stage.submit("gang", 3, 8)
    await stage.until_reason("gang", "ExceedsCluster")


async def held(stage: Stage) -> None:
    await stage.submit("gang", 2, 8, hold=True)
    await stage.until_reason("gang", "Held")


async def unseen(stage: Stage) -> None:
    await stage.submit("gang", 2, 8)


async def creating(stage: Stage) -> None:
    await stage.nodes(1, gpus=200, pods=250, first=2)
    await stage.submit("gang", 200, 1)

    async def some_pods() -> bool:
        return bool(await stage.pods("gang"))

    await eventually(some_pods, "the first pods exist")


async def ungated(stage: Stage) -> None:
    await stage.submit("gang", 2, 8, annotations=NEVER_READY)
    await stage.until_reason("gang", "Starting")


async def backing_off(stage: Stage) -> None:
    await stage.submit("gang", 2, 8, annotations=NEVER_READY, startDeadlineSeconds=1)
    await stage.until_reason("gang", "BackOff")


async def running(stage: Stage) -> None:
    await stage.submit("gang", 2, 8)
    await stage.until_phase("gang", "Running")


async def stopping(stage: Stage) -> None:
    await stage.submit("gang", 2, 8, annotations=SLOW_STOP, maxRunSeconds=1)
    await stage.until_phase("gang", "Stopping")


async def succeeded(stage: Stage) -> None:
    await stage.submit("gang", 2, 8, run_seconds=0.1)
    await stage.until_phase("gang", "Succeeded")


async def failed(stage: Stage) -> None:
    await stage.submit("gang", 2, 8, run_seconds=0.1, annotations={"local.queuectl.dev/exit-code": "1"}, backoffLimit=0)
    await stage.until_phase("gang", "Failed")


PHASES = [pending, held, unseen, creating, ungated, backing_off, running, stopping, succeeded, failed]


async def until_no_pods(stage: Stage, job: str = "") -> None:
    async def none() -> bool:
        return await stage.pods(job) == []

    await eventually(none, f"no pods are left of {job or 'the stage'}", seconds=60)


@pytest.mark.parametrize("bring", PHASES)
async def test_a_job_deleted_in_each_phase(live: Stage, bring: Callable[[Stage], Awaitable[None]]) -> None:
    await live.nodes(2)
    await live.queue(256)
    await bring(live)
    await live.delete_job("gang")
    await live.until_gone("gang", seconds=60)
    await until_no_pods(live)
    await ledger.until_free(live)
    await live.submit("next", 2, 8)  # under whatever was left, it would not run
    await live.until_phase("next", "Running")


async def test_a_job_deleted_while_no_controller_runs(live: Stage, shared_controller: Controller) -> None:
    await live.nodes(2)
    await live.queue(16)
    await live.submit("runs", 1, 8)
    await live.submit("waits", 3, 8)
    await live.submit("done", 1, 8, run_seconds=0.1)
    await live.submit("forced", 1, 8, annotations={"local.queuectl.dev/run-seconds": "600"})
    for name, phase in (("runs", "Running"), ("waits", "Pending"), ("done", "Succeeded"), ("forced", "Running")):
        await live.until_phase(name, phase)
    shared_controller.kill()
    for name in ("runs", "waits", "done", "forced"):
        await live.delete_job(name)
    await live.patch_job("forced", {"metadata": {"finalizers": None}})  # somebody has no patience
    assert await live.get_job("forced") is None
    shared_controller.start()
    for name in ("runs", "waits", "done"):
        await live.until_gone(name, seconds=60)
    await until_no_pods(live)
    await ledger.until_free(live)


async def test_a_job_created_anew_under_the_same_name(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    first = await live.submit("gang", 2, 4, annotations=SLOW_STOP)
    await live.until_phase("gang", "Running")
    await live.delete_job("gang")
    await live.until_gone("gang")
    second = await live.submit("gang", 2, 4, run_seconds=0.1)
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    job = await live.until_phase("gang", "Succeeded")
    assert job["status"]["attempt"] == 1


async def test_a_node_deleted_under_a_running_gang(live: Stage) -> None:
    names = await live.nodes(3)
    await live.queue(24)
    await live.submit("gang", 2, 8, backoffLimit=0)
    job = await live.until_phase("gang", "Running")
    lost = job["status"]["assignments"][0]["node"]
    await live.client.request("DELETE", f"/api/v1/nodes/{lost}")
    job = await live.until_job("gang", lambda s: s["attempt"] == 2 and s["phase"] == "Running", "runs elsewhere")
    assert {a["node"] for a in job["status"]["assignments"]} == set(names) - {lost}
    assert job["status"]["failures"] == 0
    assert "NodeLost" in await ledger.history(live, "gang")

    lost = job["status"]["assignments"][0]["node"]
    await live.client.request("DELETE", f"/api/v1/nodes/{lost}")
    waiting = await live.until_reason("gang", "ExceedsCluster", "WaitingForNodes")
    assert "1 " in waiting["status"]["message"]
    await until_no_pods(live, "gang")
    await ledger.until_free(live)
    await live.nodes(1, first=3)
    await live.until_job("gang", lambda s: s["attempt"] == 3 and s["phase"] == "Running", "runs again")


async def test_quota_lowered_under_running_jobs(live: Stage) -> None:
    await live.nodes(4)
    queue = await live.queue(32)
    for name in ("first", "second"):
        await live.submit(name, 1, 8)
        await live.until_phase(name, "Running")
    quotas = [manifests.quota(8, flavor=live.name)]
    body = {"spec": {"quotas": quotas}}
    await live.client.request("PATCH", f"{API}/queues/{queue}", body=body, content_type=MERGE_PATCH)

    async def versions() -> list[dict[str, Any]]:
        return await ledger.rows(
            live, "SELECT from_nominal, to_nominal, changed_by FROM quota_version WHERE queue = :queue ORDER BY id",
            queue=queue,
        )  # fmt: skip

    async def cut() -> bool:
        return len(await versions()) == 2

    await eventually(cut, "the cut is recorded")
    user = (await live.client.request("GET", f"{API}/queues/{queue}"))["metadata"]["annotations"][
        "queuectl.dev/changed-by"
    ]
    assert user
    assert await versions() == [
        {"from_nominal": None, "to_nominal": 32, "changed_by": user},
        {"from_nominal": 32, "to_nominal": 8, "changed_by": user},
    ]
    await live.submit("third", 1, 8)
    job = await live.until_reason("third", "WaitingForQuota")
    assert "it owns 8 and uses 16" in job["status"]["message"]
    for name in ("first", "second"):
        assert (await live.until_job(name, bool, "has a status"))["status"]["phase"] == "Running"
    assert await ledger.audit(live) == []

    await live.end_pods("first")
    await live.until_phase("first", "Succeeded")
    await live.until_job("third", lambda s: "it owns 8 and uses 8" in s["message"], "still waits")
    await live.end_pods("second")
    await live.until_phase("third", "Running")


async def test_a_namespace_deleted_with_running_gangs(live: Stage) -> None:
    await live.nodes(2)
    await live.queue(16)
    namespace = f"{live.name}-doomed"
    await live.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    for name, pods, phase in (("runs", 1, "Running"), ("slow", 1, "Running"), ("waits", 3, "Pending")):
        job = live.job(name, pods, 8, annotations=SLOW_STOP if name == "slow" else None)
        job["metadata"]["namespace"] = namespace
        await live.create(job)

        async def has_come(path: str = jobs_path(namespace, name), phase: str = phase) -> bool:
            return bool((await live.client.request("GET", path)).get("status", {}).get("phase") == phase)

        await eventually(has_come, f"{name} is {phase}")
    path = f"/api/v1/namespaces/{namespace}"
    await live.client.request("DELETE", path)

    async def gone() -> bool:
        with contextlib.suppress(ApiError):
            await live.client.request("GET", path)
            return False
        return True

    await eventually(gone, "the namespace is gone", seconds=90)
    await ledger.until_free(live)
    await live.submit("next", 2, 8)
    await live.until_phase("next", "Running")


async def test_a_queue_deleted_while_in_use(live: Stage) -> None:
    await live.nodes(2)
    queue = await live.queue(16)
    await live.submit("runs", 1, 8)
    await live.until_phase("runs", "Running")
    await live.client.request("DELETE", f"{API}/queues/{queue}")
    await live.submit("waits", 1, 8)
    job = await live.until_reason("waits", "QueueNotFound")
    assert queue in job["status"]["message"]
    assert (await live.until_job("runs", bool, "has a status"))["status"]["phase"] == "Running"
    assert await ledger.audit(live) == []
    await live.end_pods("runs")
    await live.until_phase("runs", "Succeeded")
    await ledger.until_free(live)
    await live.queue(16)
    await live.until_phase("waits", "Running")


async def test_a_flavor_deleted_while_in_use(live: Stage) -> None:
    await live.nodes(2)
    await live.queue(16)
    await live.submit("runs", 1, 8)
    await live.submit("late", 1, 8, annotations=NEVER_READY)
    await live.until_phase("runs", "Running")
    await live.until_reason("late", "Starting")
    await live.client.request("DELETE", f"{API}/resourceflavors/{live.name}")
    await live.submit("waits", 1, 8)
    await live.until_reason("waits", "NoMatchingFlavor")
    assert (await live.until_job("runs", bool, "has a status"))["status"]["phase"] == "Running"
    for name in ("runs", "late"):
        await live.delete_job(name)
        await live.until_gone(name)
    await ledger.until_free(live)
    await live.flavor()
    await live.until_phase("waits", "Running")


async def test_a_spec_edited_between_decision_and_start(
    live: Stage, shared_controller: Controller, control_plane: Running, tmp_path: Path
) -> None:
    await live.nodes(2)
    await live.queue(16)
    shared_controller.stop()
    async with proxied(control_plane, tmp_path) as proxy:

        async def edit() -> None:
            smaller = live.job("gang", 1, 4)["spec"]
            await live.patch_job("gang", {"spec": smaller})

        def starts_the_job(method: str, path: str, body: bytes) -> bool:
            mine = path.startswith(jobs_path(live.namespace, "gang") + "/status")
            return mine and method == "PATCH" and b'"Starting"' in body

        rule = proxy.on(starts_the_job, do=edit)
        controller = live.controller("behind-proxy", kubeconfig=proxy.kubeconfig)
        controller.start()
        await live.submit("gang", 2, 8)
        await rule.until_fired(60)
        job = await live.until_phase("gang", "Running")
        assert job["status"]["observedGeneration"] == 2
        assert job["status"]["attempt"] == 2
        assert [pod["metadata"]["name"] for pod in await live.pods()] == ["gang-worker-2-0"]
        history = await ledger.history(live, "gang")
        assert "SpecChanged" in history
        assert history.count("Created") == 1, "no pod of what was decided before may have been created"
        controller.stop()
    shared_controller.start()
    await shared_controller.until_leading()


async def test_a_job_edited_many_times_while_it_is_admitted(live: Stage) -> None:
    await live.nodes(2)
    await live.queue(16)
    await live.submit("gang", 2, 8)
    edits = 0
    for gpus in (7, 6, 5, 4, 3, 2, 1):
        try:
            await live.patch_job("gang", {"spec": live.job("gang", 2, gpus)["spec"]})
            edits += 1
        except ApiError as error:
            assert "can't be changed while the job is" in error.message  # noqa: PT017
        await asyncio.sleep(0.03)
    job = await live.until_phase("gang", "Running")
    wanted = job["spec"]["roles"][0]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    for pod in await live.pods("gang"):
        assert int(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) == wanted
    assert job["metadata"]["generation"] == edits + 1
