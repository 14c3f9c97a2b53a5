"""GPUs that claims name, on a real control plane: nobody shares one, domains inside nodes are kept.

kube-scheduler allocates every claim; what it allocates is what the ledger says.
"""

import os
import random
from collections.abc import Awaitable, Callable
from typing import Any

from queuectl.kube.names import JOB_LABEL, claims_path
from queuectl.model.resources import device_name
from tests.support import devices, ledger, manifests
from tests.support.devices import DRIVER
from tests.support.eventually import eventually
from tests.support.stage import Controller, Object, Stage

GANGS = int(os.environ.get("DEVICES_GANGS", "20"))
SEED = int(os.environ.get("DEVICES_SEED", "1"))
ASKED: tuple[Object, ...] = (
    {}, {"required": "nvlink"}, {"required": "pcie"}, {"slices": {"level": "nvlink", "size": 1}},
)  # fmt: skip


async def test_a_requeued_job_and_one_that_arrives_share_no_device(live: Stage) -> None:
    await devices.offer(live, gpus=2)
    await live.queue(2)
    slow = {"local.queuectl.dev/stop-after": "4s"}  # longer than its back-off
    await live.submit("first", 1, 1, annotations=slow)
    await live.submit("second", 1, 1)
    for name in ("first", "second"):
        await live.until_phase(name, "Running")
    assert sorted((await _allocated(live)).values()) == [["gpu-0"], ["gpu-1"]]
    [second] = [names for job, names in (await _allocated(live)).items() if job == "second"]

    async with devices.shared_devices(live) as shared:
        await live.submit("third", 1, 1)
        [pod] = await live.pods("first")
        await live.delete_pod(pod["metadata"]["name"])  # it goes back to its queue, ahead of the third
        await live.until_job("first", lambda s: s.get("attempt") == 2 and s.get("phase") == "Running", "runs again")

        allocated = await _allocated(live)
        assert allocated.keys() == {"first", "second"}
        assert allocated["second"] == second
        assert sorted(allocated.values()) == [["gpu-0"], ["gpu-1"]]
        assert "1 nvidia.com/gpu" in (await live.until_reason("third", "WaitingForQuota"))["status"]["message"]
        assert await ledger.audit(live) == []
        await live.delete_job("second")
        await live.until_phase("third", "Running")
        allocated = await _allocated(live)
        assert allocated["third"] == second
        assert await _told(live) == allocated
    assert shared == []


async def test_four_gpus_of_one_domain_wait_for_the_devices_of_another_job(live: Stage) -> None:
    await devices.offer(live, gpus=8)
    await live.queue(16)
    await live.submit("small", 1, 1)
    await live.until_phase("small", "Running")
    await live.create(_job(live, "big", 1, 4, {"required": "nvlink"}))
    await live.until_phase("big", "Running")
    await live.create(_job(live, "next", 1, 4, {"required": "nvlink"}))

    waits = await live.until_reason("next", "WaitingForNodes")

    allocated = await _allocated(live)
    assert allocated == {"small": ["gpu-0"], "big": ["gpu-4", "gpu-5", "gpu-6", "gpu-7"]}
    assert await _told(live) == allocated
    assert "1 place with 4 nvidia.com/gpu" in waits["status"]["message"]
    await live.create(_job(live, "pair", 1, 2, {"required": "pcie"}))
    await live.until_phase("pair", "Running")
    assert (await _allocated(live))["pair"] == ["gpu-2", "gpu-3"]
    for name in ("small", "pair"):
        await live.delete_job(name)
    await live.until_phase("next", "Running")
    assert (await _allocated(live))["next"] == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    assert await ledger.audit(live) == []


async def test_each_pod_of_a_gang_gets_a_domain(live: Stage) -> None:
    await devices.offer(live, gpus=8)
    await live.queue(8)
    await live.create(_job(live, "train", 2, 4, {"slices": {"level": "nvlink", "size": 1}}))

    job = await live.until_phase("train", "Running")

    [assigned] = job["status"]["assignments"]
    assert assigned["devices"] == [f"gpu-{number}" for number in range(8)]
    domains = [{name in _names(claim) for name in ("gpu-0", "gpu-3")} for claim in await _claims(live)]
    assert domains in ([{True}, {False}], [{False}, {True}])
    [first, second] = sorted([c["metadata"]["name"] for c in await _claims(live)])
    assert [first, second] == sorted(pod["metadata"]["name"] for pod in await live.pods("train"))
    await live.end_pods("train")
    await live.until_phase("train", "Succeeded")

    async def gone() -> bool:
        return await _claims(live) == []

    await eventually(gone, "claims are gone with the attempt")


async def test_what_others_claim_is_not_given_away(live: Stage) -> None:
    [node] = await devices.offer(live, gpus=4)
    await live.queue(4)
    await _others(live, node, number=2)
    await live.create(_job(live, "four", 1, 4, {"required": "nvlink"}))

    waits = await live.until_reason("four", "WaitingForNodes")

    assert "1 place with 4 nvidia.com/gpu" in waits["status"]["message"]
    await live.submit("one", 1, 2)
    await live.until_phase("one", "Running")
    taken = {device for names in (await _allocated(live)).values() for device in names}
    assert len(taken) == 4
    await live.delete_job("one")
    await live.delete_pod("other")
    await live.client.request("DELETE", claims_path(live.namespace, "other"))
    await live.until_phase("four", "Running")


async def test_what_others_pods_ask_for_by_name_counts_once(live: Stage) -> None:
    """kube-scheduler makes a claim for such a pod; the pod's requests are counted already."""
    resource = "named.example.com/gpu"
    await devices.offer(live, gpus=4, by_name=resource)
    quota = manifests.quota(8, flavor=live.name, resource=resource)
    await live.create(manifests.queue(live.name, quotas=[quota]))
    limits = {"limits": {resource: 1}}
    containers = [{"name": "main", "image": "other:1", "resources": limits}]
    await live.others_pod("other", 0, containers=containers)

    async def allocated() -> bool:
        return any(_names(claim) for claim in await _claims(live))

    await eventually(allocated, "kube-scheduler has made a claim for the others' pod")
    job = live.job("three", 3, 0)
    job["spec"]["roles"][0]["template"]["spec"]["containers"][0]["resources"] = limits
    await live.create(job)
    await live.until_phase("three", "Running")
    names = [name for claim in await _claims(live) for name in _names(claim)]
    assert sorted(names) == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]


async def test_random_gangs_that_preempt_and_shrink_share_no_device(live: Stage) -> None:
    await devices.offer(live, gpus=8, count=2)
    await live.queue(16, preemption={"withinQueue": "LowerPriority"})
    draw = random.Random(SEED)
    async with devices.shared_devices(live) as shared:
        for number in range(GANGS):
            pods, gpus, topology = draw.choice((1, 2, 3)), draw.choice((1, 2, 4)), draw.choice(ASKED)
            ends = {
                "local.queuectl.dev/run-seconds": draw.choice(("1s", "3s")),
                "local.queuectl.dev/stop-after": draw.choice(("0s", "1s")),
            }
            job = _job(live, f"gang-{number}", pods, gpus, topology, annotations=ends, priority=draw.randrange(3))
            if "required" not in topology:
                job["spec"]["roles"][0]["minReplicas"] = draw.randint(1, pods)
            await live.create(job)
        await eventually(_over(live), "all gangs that could ever run have run", seconds=180)
    assert shared == []
    assert await ledger.audit(live) == []


async def test_a_controller_that_dies_among_the_claims_names_the_same_devices_again(
    live: Stage, shared_controller: Controller
) -> None:
    await devices.offer(live, gpus=8)
    await live.queue(8)

    async def begun() -> bool:
        return bool(await _claims(live))

    await live.submit("train", 6, 1)
    await eventually(begun, "a claim exists")
    shared_controller.kill()
    told = await _told(live)
    shared_controller.start()
    job = await live.until_phase("train", "Running")

    assert job["status"]["attempt"] == 1
    assert await _told(live) == told
    assert sorted(name for claim in await _claims(live) for name in _names(claim)) == told["train"]
    await live.submit("next", 1, 2)
    await live.until_phase("next", "Running")
    assert (await _told(live))["next"] == ["gpu-6", "gpu-7"]


async def test_random_gangs_run_in_turn_and_share_no_device(live: Stage) -> None:
    await devices.offer(live, gpus=8, count=2)
    await live.queue(100)
    draw = random.Random(SEED)
    async with devices.shared_devices(live) as shared:
        for number in range(GANGS):
            pods, gpus, topology = draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2, 4)), draw.choice(ASKED)
            ends = {"local.queuectl.dev/run-seconds": draw.choice(("0s", "1s"))}
            await live.create(_job(live, f"gang-{number}", pods, gpus, topology, annotations=ends))
        await eventually(_over(live), "all gangs that could ever run have run", seconds=120)
    assert shared == []
    jobs = {job["metadata"]["name"]: job["status"] for job in await live.jobs()}
    ran = [status["attempt"] for status in jobs.values() if status["phase"] == "Succeeded"]
    assert len(ran) > GANGS / 2
    assert set(ran) == {1}


async def test_preempted_devices_are_the_preemptors_once_they_are_released(live: Stage) -> None:
    await devices.offer(live, gpus=4)
    await live.queue(8, preemption={"withinQueue": "LowerPriority"})
    slow = {"local.queuectl.dev/stop-after": "1s"}
    for number in range(2):
        await live.submit(f"low-{number}", 1, 2, annotations=slow)
        await live.until_phase(f"low-{number}", "Running")

    await live.create(_job(live, "high", 1, 4, {"required": "nvlink"}, priority=10))

    high = await live.until_phase("high", "Running")
    assert high["status"]["attempt"] == 1
    assert (await _allocated(live))["high"] == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    assert await ledger.audit(live) == []


def _over(stage: Stage) -> Callable[[], Awaitable[bool]]:
    async def over() -> bool:
        statuses = [job.get("status", {}) for job in await stage.jobs()]
        return all(s.get("phase") == "Succeeded" or s.get("reason") == "ExceedsCluster" for s in statuses)

    return over


def _job(stage: Stage, name: str, pods: int, gpus: int, topology: Object, **spec: Any) -> Object:
    job = stage.job(name, pods, gpus, **spec)
    job["spec"]["roles"][0]["topology"] = topology
    return job


async def _others(stage: Stage, node: str, *, number: int) -> None:
    """Have somebody else claim devices of the node."""
    request = {"name": "gpus", "exactly": {"deviceClassName": DRIVER, "count": number}}
    await stage.create(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": "other", "namespace": stage.namespace},
            "spec": {"devices": {"requests": [request]}},
        }
    )
    containers = [{"name": "main", "image": "other:1", "resources": {"claims": [{"name": "gpus"}]}}]
    claims = [{"name": "gpus", "resourceClaimName": "other"}]
    await stage.others_pod("other", 0, containers=containers, resourceClaims=claims)

    async def allocated() -> bool:
        return any(_names(claim) for claim in await _claims(stage))

    await eventually(allocated, "the others' claim is allocated")


async def _claims(stage: Stage) -> list[Object]:
    found: list[Object] = (await stage.client.request("GET", claims_path(stage.namespace)))["items"]
    return found


def _names(claim: Object) -> list[str]:
    allocation = claim.get("status", {}).get("allocation") or {}
    return sorted(result["device"] for result in allocation.get("devices", {}).get("results", ()))


async def _allocated(stage: Stage) -> dict[str, list[str]]:
    """Return the devices that kube-scheduler has allocated, by job; none of them twice."""
    claims = [(claim["metadata"].get("labels", {}).get(JOB_LABEL, ""), _names(claim)) for claim in await _claims(stage)]
    everything = [device for _, names in claims for device in names]
    assert len(everything) == len(set(everything)), claims
    return {job: names for job, names in claims if names}


async def _told(stage: Stage) -> dict[str, list[str]]:
    """Return the devices that the ledger says are held, by job."""
    query = (
        "SELECT w.name, q ->> 0 AS device FROM reservation r JOIN workload w ON w.uid = r.workload_uid,"
        " jsonb_array_elements(r.requests) q WHERE r.freed_at IS NULL AND w.namespace = :mine"
        " AND q ->> 0 LIKE 'device-%' ORDER BY 1, 2"
    )
    found: dict[str, list[str]] = {}
    for row in await ledger.rows(stage, query, mine=stage.namespace):
        found.setdefault(row["name"], []).append(row["device"].removeprefix(device_name(DRIVER, "", "")))
    return found
