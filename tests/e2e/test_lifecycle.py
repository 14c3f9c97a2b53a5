"""The life of jobs: success and failure of roles, retries, limits, hold and TTL, and a controller that starts anew."""

from typing import Any

import pytest

from queuectl.kube.client import ApiError
from tests.support import ledger, manifests
from tests.support.eventually import eventually
from tests.support.stage import GPU, Controller, Stage


def role(name: str, pods: int, gpus: int, **more: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "train:1", "resources": {"limits": {GPU: gpus} if gpus else {"cpu": "1"}}}
    return manifests.role(name, pods, container, **more)


async def until_no_pod_runs(stage: Stage, job: str) -> list[dict[str, Any]]:
    """Wait until the job's pods that are left have ended; return them."""
    left: list[dict[str, Any]] = []

    async def stopped() -> bool:
        nonlocal left
        left = await stage.pods(job)
        return all(pod["status"]["phase"] in {"Succeeded", "Failed"} for pod in left)

    await eventually(stopped, f"no pod of {job} runs")
    return left


async def until_attempt_runs(stage: Stage, job: str, attempt: int) -> dict[str, Any]:
    return await stage.until_job(
        job, lambda s: s.get("attempt") == attempt and s["phase"] == "Running", f"runs in attempt {attempt}", seconds=60
    )


async def test_roles_that_need_not_succeed_are_stopped_when_the_others_have(live: Stage) -> None:
    await live.nodes(2)
    await live.queue(16)
    roles = [role("worker", 3, 4), role("server", 2, 0, mustSucceed=False)]
    await live.create(manifests.job("train", *roles, namespace=live.namespace, queue=live.name))
    await live.until_phase("train", "Running")

    await live.end_pods("train", role="server")  # that one of them is done early ends nothing
    await live.end_pods("train", role="worker")
    job = await live.until_phase("train", "Succeeded")
    assert job["status"]["exitCode"] == 0
    assert job["status"]["attempt"] == 1
    left = await until_no_pod_runs(live, "train")
    assert sum(1 for pod in left if "-worker-" in pod["metadata"]["name"]) == 3
    await ledger.until_free(live)


async def test_servers_still_running_are_stopped_and_the_workers_logs_stay(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    roles = [role("worker", 2, 4), role("server", 1, 0, mustSucceed=False)]
    await live.create(manifests.job("train", *roles, namespace=live.namespace, queue=live.name))
    await live.until_phase("train", "Running")
    await live.end_pods("train", role="worker")
    await live.until_phase("train", "Succeeded")
    left = await until_no_pod_runs(live, "train")
    assert sorted(pod["metadata"]["name"] for pod in left) == ["train-worker-1-0", "train-worker-1-1"]


async def test_what_pods_held_that_are_done_is_given_back_while_the_others_run_on(
    live: Stage, shared_controller: Controller
) -> None:
    await live.nodes(2)
    await live.queue(16)
    roles = [role("shard", 6, 2), role("merge", 2, 2)]
    await live.create(manifests.job("train", *roles, namespace=live.namespace, queue=live.name))
    await live.until_phase("train", "Running")
    await live.submit("next", 3, 4)
    await live.until_reason("next", "WaitingForQuota")

    await live.end_pods("train", role="shard")
    await live.until_phase("next", "Running")
    job = await live.until_job("train", lambda s: s["message"].startswith("2 of 8"), "says how many run on")
    assert job["status"]["message"] == "2 of 8 pods run on; 6 are done, and what they held is given back."
    assert (job["status"]["phase"], job["status"]["reason"], job["status"]["pods"]) == ("Running", "PartlyDone", "8/8")
    assert sum(place["pods"] for place in job["status"]["assignments"]) == 2
    assert await ledger.audit(live) == []

    for index in range(6):
        await live.delete_pod(f"train-shard-1-{index}", at_once=True)  # somebody cleans up
    shared_controller.kill()
    shared_controller.start()
    await shared_controller.until_leading()
    await live.end_pods("train", role="merge")
    job = await live.until_phase("train", "Succeeded")
    assert job["status"]["attempt"] == 1
    await live.end_pods("next")
    await ledger.until_free(live)


async def test_a_failed_pod_ends_the_whole_attempt_and_the_last_one_the_job(live: Stage) -> None:
    await live.nodes(2)
    await live.queue(16)
    bad = {"local.queuectl.dev/exit-code": "3"}
    await live.submit("bad", 2, 8, run_seconds=0.1, annotations=bad, backoffLimit=1)
    job = await live.until_phase("bad", "Failed", seconds=60)
    status = job["status"]
    assert (status["attempt"], status["failures"], status["exitCode"]) == (2, 2, 3)
    assert status["reason"] == "BackoffLimitExceeded"
    assert "backoffLimit is 1" in status["message"]
    assert "exit code 3" in status["message"]
    assert {c["type"]: c["status"] for c in status["conditions"]}["Finished"] == "True"
    await until_no_pod_runs(live, "bad")
    await ledger.until_free(live)


async def test_a_failure_is_counted_and_the_next_attempt_may_succeed(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    await live.submit("flaky", 2, 4)
    await until_attempt_runs(live, "flaky", 1)
    await live.end_pods("flaky", exit_code=9)
    await until_attempt_runs(live, "flaky", 2)
    await live.end_pods("flaky")
    job = await live.until_phase("flaky", "Succeeded")
    assert (job["status"]["attempt"], job["status"]["failures"], job["status"]["exitCode"]) == (2, 1, 0)


async def test_a_pod_removed_by_others_takes_the_gang_back_without_a_charge(live: Stage) -> None:
    await live.nodes(2)
    await live.queue(16)
    await live.submit("gang", 2, 8, backoffLimit=0)
    await until_attempt_runs(live, "gang", 1)
    await live.delete_pod("gang-worker-1-1")
    job = await until_attempt_runs(live, "gang", 2)
    assert job["status"]["failures"] == 0
    assert "PodLost" in await ledger.history(live, "gang")
    assert {pod["metadata"]["name"] for pod in await live.pods("gang")} == {"gang-worker-2-0", "gang-worker-2-1"}


async def test_a_disrupted_pod_is_not_charged(live: Stage) -> None:
    await live.nodes(2)
    await live.queue(16)
    stopping = {"local.queuectl.dev/stop-after": "2s"}
    await live.submit("gang", 2, 8, annotations=stopping, backoffLimit=0)
    await until_attempt_runs(live, "gang", 1)
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "gang-worker-1-0", "namespace": live.namespace},
    }
    path = f"/api/v1/namespaces/{live.namespace}/pods/gang-worker-1-0/eviction"
    await live.client.request("POST", path, body=eviction)
    job = await until_attempt_runs(live, "gang", 2)
    assert job["status"]["failures"] == 0
    assert "PodDisrupted" in await ledger.history(live, "gang")


async def test_a_job_that_runs_too_long_is_stopped_and_fails(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    await live.submit("long", 2, 4, maxRunSeconds=1)
    job = await live.until_phase("long", "Failed")
    assert job["status"]["reason"] == "MaxRunSecondsExceeded"
    assert job["status"]["exitCode"] == 124
    assert await live.pods("long") == []
    await ledger.until_free(live)


async def test_hold_and_release(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    await live.submit("held", 1, 8, hold=True)
    await live.until_reason("held", "Held")
    await live.submit("other", 1, 8, run_seconds=0.1)
    await live.until_phase("other", "Succeeded")  # a held job is in nobody's way
    assert await live.pods("held") == []
    assert await ledger.history(live, "held") == []

    await live.patch_job("held", {"spec": {"hold": False}})
    await live.until_phase("held", "Running")
    await live.patch_job("held", {"spec": {"hold": True}})
    job = await live.until_job("held", lambda s: s["observedGeneration"] == 3, "has seen the new spec")
    assert job["status"]["phase"] == "Running"  # it starts nothing, and stops nothing
    await live.end_pods("held", exit_code=1)
    job = await live.until_reason("held", "Held")
    assert job["status"]["failures"] == 1


async def test_a_waiting_job_moves_to_another_queue(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(4)
    other = await live.queue(8, "other")
    await live.submit("job", 1, 8)
    await live.until_reason("job", "ExceedsMaxQuota")
    await live.patch_job("job", {"spec": {"queue": other}})
    await live.until_phase("job", "Running")
    (held,) = await ledger.rows(live, "SELECT queue FROM quota_room WHERE reserved = 8 AND queue = :queue", queue=other)
    assert held == {"queue": other}
    with pytest.raises(ApiError, match=r"spec\.queue can't be changed while the job is Running"):
        await live.patch_job("job", {"spec": {"queue": live.name}})


async def test_a_finished_job_is_deleted_after_its_ttl(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    await live.submit("short", 1, 8, run_seconds=0.1, ttlSecondsAfterFinished=2)
    await live.submit("keeps", 1, 8, run_seconds=0.1)
    await live.until_phase("short", "Succeeded")
    await live.until_gone("short")

    async def no_pods() -> bool:
        return await live.pods("short") == []

    await eventually(no_pods, "its pods are collected", seconds=60)
    await live.until_phase("keeps", "Succeeded")


async def test_nothing_that_is_finished_runs_again_after_a_restart(live: Stage, shared_controller: Controller) -> None:
    await live.nodes(2)
    await live.queue(16)
    await live.submit("done", 2, 4, run_seconds=0.1)
    await live.submit(
        "failed", 1, 4, run_seconds=0.1, annotations={"local.queuectl.dev/exit-code": "1"}, backoffLimit=0
    )
    await live.submit("running", 1, 4)
    await live.until_phase("done", "Succeeded")
    await live.until_phase("failed", "Failed")
    await live.until_phase("running", "Running")
    await live.delete_pod("done-worker-1-0")  # somebody cleans up
    before = {job["metadata"]["name"]: job["status"] for job in await live.jobs()}
    pods = {pod["metadata"]["uid"] for pod in await live.pods() if "deletionTimestamp" not in pod["metadata"]}

    shared_controller.kill()
    shared_controller.start()
    await shared_controller.until_leading()
    await live.submit("after", 1, 4, run_seconds=0.1)
    await live.until_phase("after", "Succeeded")

    now = {job["metadata"]["name"]: job["status"] for job in await live.jobs()}
    assert {name: now[name] for name in before} == before
    assert pods <= {pod["metadata"]["uid"] for pod in await live.pods()}
    for name in ("done", "failed", "running"):
        assert (await ledger.history(live, name)).count("Admitted") == 1
