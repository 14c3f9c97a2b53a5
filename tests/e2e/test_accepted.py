"""What the core promises, kube-scheduler accepts: random gangs on nodes of several kinds, on a real control plane.

ACCEPTED_GANGS says how many, ACCEPTED_SEED which.
"""

import asyncio
import os
import random
from collections.abc import Callable, Mapping
from typing import Any

from queuectl.kube.names import JOB_LABEL, jobs_path
from tests.support import ledger, manifests
from tests.support.claims import Claims
from tests.support.eventually import eventually
from tests.support.stage import GPU, STAGE_LABEL, Object, Stage

GANGS = int(os.environ.get("ACCEPTED_GANGS", "100"))
SEED = int(os.environ.get("ACCEPTED_SEED", "1"))
RDMA = "rdma/hca"
HUGE = "hugepages-2Mi"
AT_ONCE = 20  # jobs that are being submitted
NEVER = {"ExceedsCluster", "NoMatchingFlavor"}  # what is said before admission of what can't be had
ZONE = "topology.kubernetes.io/zone"
NO_ZONE = 1  # of the kinds of nodes
VOLUMES: Mapping[str, Mapping[str, Any]] = {  # by claim, from where they can be reached
    "fast": {"reach": {"disk": "ssd"}},
    "zoned": {"reach": {ZONE: "z0"}},
    "labelled": {"labels": {ZONE: "z0__z2"}},
    "anywhere": {},
}
BATCH = {"key": "dedicated", "value": "batch", "effect": "NoSchedule"}
KINDS: tuple[Mapping[str, Any], ...] = (  # of nodes, each with a disk, a generation and racks of its own
    {"count": 6, "gpus": 8, "more": {RDMA: "8", HUGE: "8Gi"}, "labels": {"disk": "ssd", "generation": "4"}},
    {"count": 4, "gpus": 8, "gpu_product": "NVIDIA-A100-SXM4-80GB", "cpu": "24", "labels": {"generation": "3"}},
    {"count": 4, "gpus": 4, "gpu_product": "NVIDIA-L4", "taints": [BATCH], "labels": {"disk": "ssd"}},
    {"count": 4, "gpus": 0, "cpu": "16", "pods": 8, "more": {HUGE: "1Gi"}, "labels": {"disk": "hdd"}},
)


async def test_every_pod_is_bound_to_the_node_that_was_promised_to_it(live: Stage, claims: Claims) -> None:
    await _nodes(live)
    for name, volume in VOLUMES.items():
        await claims.bound(name, **volume)
    await _queue(live)
    draw = random.Random(SEED)
    gangs = [_gang(draw, live, number) for number in range(GANGS)]
    gate = asyncio.Semaphore(AT_ONCE)

    async def submit(gang: Object) -> None:
        async with gate:
            await live.create(gang)

    await asyncio.gather(*(submit(gang) for gang in gangs))
    left: list[Object] = []

    async def over() -> bool:
        nonlocal left
        assert await _unschedulable(live) == []
        found = (await live.client.request("GET", jobs_path(live.namespace)))["items"]
        left = [{"job": job["metadata"]["name"], **job.get("status", {})} for job in found if not _is_over(job)]
        await asyncio.sleep(1)  # a list of all jobs costs the API server more than a gang does
        return not left

    try:
        await eventually(over, "all gangs have run, or are told why they never will", seconds=900)
    except AssertionError as error:
        raise AssertionError(f"{error}; left: {left[:3]}") from None

    pods = await live.pods()
    assert {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in pods} == {
        pod["metadata"]["name"]: _pinned(pod) for pod in pods
    }
    jobs = {job["metadata"]["name"]: job["status"] for job in await live.jobs()}
    ran = {name for name, status in jobs.items() if status["phase"] == "Succeeded"}
    assert len(ran) > GANGS * 0.7, f"too few could ever run: {len(ran)}"
    assert {pod["metadata"]["labels"][JOB_LABEL] for pod in pods} == ran
    assert {name: jobs[name]["attempt"] for name in ran} == dict.fromkeys(ran, 1)
    assert await ledger.audit(live) == []


async def _unschedulable(stage: Stage) -> list[str]:
    """Return what kube-scheduler says of pods that it finds no place for."""
    path = f"/apis/events.k8s.io/v1/namespaces/{stage.namespace}/events"
    found = await stage.client.request("GET", path, params={"fieldSelector": "reason=FailedScheduling"})
    return [f"{item['regarding']['name']}: {item.get('note')}" for item in found["items"]]


def _is_over(job: Object) -> bool:
    status = job.get("status") or {}
    return status.get("phase") == "Succeeded" or status.get("reason") in NEVER


def _pinned(pod: Object) -> str:
    """Return the one node that all alternatives of a pod's affinity name."""
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    pins = {tuple(term["matchFields"][-1]["values"]) for term in required["nodeSelectorTerms"]}
    assert len(pins) == 1, pins
    [[node]] = pins
    return str(node)


async def _nodes(stage: Stage) -> None:
    first = 0
    for number, kind in enumerate(KINDS):
        more = {key: value for key, value in kind.items() if key not in {"count", "labels"}}
        for rack in range(2):
            count = kind["count"] // 2
            labels = {**kind["labels"], "rack": f"r{number}-{rack}", "kind": str(number)}
            labels |= {ZONE: f"z{rack}"} if number != NO_ZONE else {}
            await stage.nodes(count, first=first, labels=labels, **more)
            first += count


async def _queue(stage: Stage) -> None:
    """Create a queue that lacks nothing, over a flavor with racks; what is short is room on nodes."""
    flavor = f"{stage.name}-racks"
    topology = {"levels": [{"name": "rack", "nodeLabel": "rack"}]}
    await stage.create(manifests.flavor(flavor, nodeLabels={STAGE_LABEL: stage.name}, topology=topology))
    quotas = [manifests.quota(10_000, flavor=flavor, resource=resource) for resource in (GPU, RDMA)]
    await stage.create(manifests.queue(stage.name, quotas=quotas))


def _gang(draw: random.Random, stage: Stage, number: int) -> Object:
    """Return a job of one to three roles that ask for all that the core heeds."""
    name = f"gang-{number}"
    roles = [_role(draw, name, f"role-{index}") for index in range(draw.choice((1, 1, 2, 3)))]
    spec: Object = {"queue": stage.name, "priority": draw.randrange(3)}
    if draw.random() < 0.1:
        spec["topology"] = {draw.choice(("required", "preferred")): "rack"}
    return manifests.job(name, *roles, namespace=stage.namespace, **spec)


def _role(draw: random.Random, gang: str, name: str) -> Object:
    pods = draw.choice((1, 1, 2, 2, 3, 4))
    gpus = draw.choice((0, 0, 1, 2, 4, 8))
    limits: dict[str, Any] = {"cpu": f"{draw.choice((100, 500, 2000, 7000))}m", "memory": draw.choice(("64Mi", "20Gi"))}
    if gpus:
        limits[GPU] = gpus
    if gpus and draw.random() < 0.2:
        limits[RDMA] = draw.choice((1, 4))
    if draw.random() < 0.2:
        limits[HUGE] = draw.choice(("128Mi", "512Mi"))
    if draw.random() < 0.2:
        limits["ephemeral-storage"] = draw.choice(("1Gi", "1Ti"))
    spec: Object = {"containers": [{"name": "main", "image": "train:1", "resources": {"limits": limits}}]}
    labels = {"gang": gang}
    for chance, add in _PARTS:
        if draw.random() < chance:
            add(draw, spec)
    if draw.random() < 0.15:
        labels |= _apart(draw, spec, gang)
    role = manifests.role(name, pods, **_extra(draw, pods, gpus))
    annotations = {"local.queuectl.dev/run-seconds": draw.choice(("0s", "1s", "2s"))}
    role["template"] = {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}
    return role


def _extra(draw: random.Random, pods: int, gpus: int) -> Object:
    """Return what a role itself asks for, beside its template."""
    extra: Object = {}
    if pods == 4 and draw.random() < 0.5:
        extra["topology"] = {"slices": {"level": "rack", "size": 2}}
    elif gpus and draw.random() < 0.25:
        extra["topology"] = {"required": "rack"}
    elif draw.random() < 0.15:
        extra["minReplicas"] = draw.randint(1, pods)
    return extra


def _selector(draw: random.Random, spec: Object) -> None:
    spec["nodeSelector"] = {"disk": draw.choice(("ssd", "ssd", "hdd"))}


def _affinity(draw: random.Random, spec: Object) -> None:
    terms = (
        {"matchExpressions": [{"key": "generation", "operator": "Gt", "values": ["2"]}]},
        {"matchExpressions": [{"key": "generation", "operator": "Lt", "values": ["4"]}]},
        {"matchExpressions": [{"key": "disk", "operator": "NotIn", "values": ["hdd"]}]},
        {"matchExpressions": [{"key": "disk", "operator": "DoesNotExist"}]},
        {"matchExpressions": [{"key": "kind", "operator": "In", "values": ["0", "3"]}]},
        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["stage-1-0"]}]},
    )
    required = {"nodeSelectorTerms": draw.sample(terms, draw.choice((1, 2)))}
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    affinity["requiredDuringSchedulingIgnoredDuringExecution"] = required


def _volumes(draw: random.Random, spec: Object) -> None:
    used = draw.sample(sorted(VOLUMES), draw.choice((1, 1, 2)))
    spec["volumes"] = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in used]


def _toleration(draw: random.Random, spec: Object) -> None:
    equal = {"key": "dedicated", "operator": "Equal", "value": "batch", "effect": "NoSchedule"}
    spec["tolerations"] = [draw.choice((equal, {"operator": "Exists"}, {**equal, "value": "other"}))]


def _sidecar(draw: random.Random, spec: Object) -> None:
    resources = {"requests": {"cpu": draw.choice(("250m", "1"))}}
    proxy = {"name": "proxy", "image": "proxy:1", "restartPolicy": "Always", "resources": resources}
    spec.setdefault("initContainers", []).append(proxy)


def _prepare(draw: random.Random, spec: Object) -> None:
    """Have something run before that asks for more than what follows, after a sidecar or before."""
    resources = {"requests": {"cpu": draw.choice(("3", "9")), "memory": "4Gi", "ephemeral-storage": "2Gi"}}
    prepare = {"name": "prepare", "image": "prepare:1", "resources": resources}
    spec.setdefault("initContainers", []).insert(draw.choice((0, 1)), prepare)


def _pod_level(draw: random.Random, spec: Object) -> None:
    spec["resources"] = {"requests": {"cpu": draw.choice(("10", "12")), "memory": "24Gi"}}


def _preferences(draw: random.Random, spec: Object) -> None:
    """Ask for what the pinned node may not have, and need not."""
    term = {"labelSelector": {"matchLabels": {"gang": f"gang-{draw.randrange(50)}"}}, "topologyKey": "rack"}
    wish = [{"weight": 1, "podAffinityTerm": term}]
    there = {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["hdd"]}]}
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    affinity = spec.setdefault("affinity", {})
    affinity.setdefault("nodeAffinity", {})[preferred] = [{"weight": 1, "preference": there}]
    affinity[draw.choice(("podAffinity", "podAntiAffinity"))] = {preferred: wish}
    spread = {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    spec["topologySpreadConstraints"] = [spread]


def _host_port(draw: random.Random, spec: Object) -> None:
    port = {"containerPort": 80, "hostPort": draw.choice((7001, 7002)), "protocol": draw.choice(("TCP", "TCP", "UDP"))}
    spec["containers"][0]["ports"] = [port]


def _host_network(draw: random.Random, spec: Object) -> None:
    spec["hostNetwork"] = True
    spec["containers"][0]["ports"] = [{"containerPort": draw.choice((7001, 7003))}]


def _apart(draw: random.Random, spec: Object, gang: str) -> dict[str, str]:
    """Have pods apart from all of their gang, or from all that ask for the same; return the label of these."""
    labels = draw.choice(({"gang": gang}, {"alone": "yes"}))
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    spec.setdefault("affinity", {}).setdefault("podAntiAffinity", {}).update(required)
    return labels


_PARTS: tuple[tuple[float, Callable[[random.Random, Object], None]], ...] = (
    (0.25, _selector),
    (0.25, _affinity),
    (0.35, _toleration),
    (0.15, _sidecar),
    (0.15, _prepare),
    (0.1, _pod_level),
    (0.15, _preferences),
    (0.15, _host_port),
    (0.05, _host_network),
    (0.15, _volumes),
)
