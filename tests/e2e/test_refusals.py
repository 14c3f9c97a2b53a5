"""Gangs that can't come up: all of it is taken back, the reason is told, and it starts once the cause is gone."""

from typing import Any

from queuectl.kube.client import MERGE_PATCH
from queuectl.kube.names import pods_path
from tests.support import ledger
from tests.support.eventually import eventually
from tests.support.stage import Stage


def requeued(reason: str) -> Any:
    """Return a test of a status: back in the queue for this reason."""
    return lambda status: (
        status.get("phase") == "Pending"
        and any(
            c["type"] == "Requeued" and c["status"] == "True" and c["reason"] == reason for c in status["conditions"]
        )
    )


async def until_nothing_is_held(stage: Stage, name: str, reason: str) -> dict[str, Any]:
    """Wait for the job to back off with nothing held; return it."""

    async def look() -> dict[str, Any] | None:
        job = await stage.until_job(name, requeued(reason), f"is requeued for {reason}")
        if job["status"]["reason"] != "BackOff" or await stage.pods(name):
            return None
        held = await ledger.rows(
            stage, "SELECT sum(reserved) AS held FROM node_room WHERE node LIKE :mine", mine=f"{stage.name}-%"
        )
        now = await stage.get_job(name)
        assert now is not None
        return job if not held[0]["held"] and now["status"]["attempt"] == job["status"]["attempt"] else None

    found: dict[str, Any] = await eventually(look, f"{name} backs off and holds nothing", seconds=60)
    assert await ledger.audit(stage) == []
    return found


async def test_a_gang_whose_fifth_pod_is_refused(live: Stage) -> None:
    await live.nodes(8)
    await live.queue(64)
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few-pods", "namespace": live.namespace},
        "spec": {"hard": {"count/pods": "4"}},
    }
    await live.create(quota)
    path = f"/api/v1/namespaces/{live.namespace}/resourcequotas/few-pods"

    async def counted() -> bool:
        return "count/pods" in ((await live.client.request("GET", path)).get("status", {}).get("used") or {})

    await eventually(counted, "the quota is in force")
    await live.submit("gang", 8, 8)
    job = await until_nothing_is_held(live, "gang", "PodsRefused")
    assert "exceeded quota: few-pods" in job["status"]["message"]
    assert "Backing off until" in job["status"]["message"]
    assert job["status"]["failures"] == 0

    body = {"spec": {"hard": {"count/pods": "8"}}}
    await live.client.request("PATCH", path, body=body, content_type=MERGE_PATCH)
    await live.until_phase("gang", "Running", seconds=60)
    assert len(await live.pods("gang")) == 8


async def test_a_gang_that_is_not_ready_by_its_deadline(live: Stage) -> None:
    await live.nodes(2)
    await live.queue(16)
    never = {"local.queuectl.dev/never-ready": "true"}
    await live.submit("gang", 2, 8, annotations=never, startDeadlineSeconds=2)
    job = await until_nothing_is_held(live, "gang", "PodsReadyTimeout")
    assert "Only 0 of 2 pods got ready within 2 s of the start" in job["status"]["message"]
    assert job["status"]["failures"] == 0

    good = live.job("gang", 2, 8, startDeadlineSeconds=60)

    async def edited() -> bool:
        try:
            await live.patch_job("gang", {"spec": good["spec"]})
        except Exception as error:  # noqa: BLE001 - while it is admitted the API server refuses the edit
            assert "can't be changed while the job is" in str(error)  # noqa: PT017
            return False
        return True

    await eventually(edited, "the template is corrected")
    await live.until_phase("gang", "Running", seconds=60)


async def test_the_back_off_grows_while_the_cause_stays(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    never = {"local.queuectl.dev/never-ready": "true"}
    await live.submit("gang", 1, 8, annotations=never, startDeadlineSeconds=1)
    await live.until_job("gang", lambda s: s.get("attempt", 0) > 2, "is tried for the third time", seconds=60)
    pauses = """
        SELECT extract(epoch FROM later.admitted_at - earlier.ending_at) AS seconds
        FROM attempt earlier JOIN attempt later
          ON later.workload_uid = earlier.workload_uid AND later.number = earlier.number + 1
        JOIN workload ON uid = later.workload_uid WHERE namespace = :namespace ORDER BY later.number
    """
    first, second, *_ = await ledger.rows(live, pauses, namespace=live.namespace)
    assert first["seconds"] >= 1
    assert second["seconds"] >= 2


async def test_a_pod_of_another_with_the_name_of_ours(live: Stage) -> None:
    await live.nodes(2)
    await live.queue(16)
    await live.others_pod("gang-worker-1-0", 1)
    await live.submit("gang", 1, 8)
    job = await live.until_job("gang", requeued("PodsRefused"), "is requeued for PodsRefused")
    assert "a pod gang-worker-1-0 exists that is not of this attempt" in job["status"]["message"]
    await live.until_phase("gang", "Running")
    assert [pod["metadata"]["name"] for pod in await live.pods("gang")] == ["gang-worker-2-0"]
    other = await live.client.request("GET", pods_path(live.namespace, "gang-worker-1-0"))
    assert "deletionTimestamp" not in other["metadata"]
