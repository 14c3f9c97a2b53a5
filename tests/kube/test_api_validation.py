"""What the API refuses: by the API server and, before that, by the models, with field, value and remedy."""

import asyncio
import json
import ssl
from copy import deepcopy
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError

from queuectl.kube.client import JSON, ApiError, KubeClient
from queuectl.kube.crds import KINDS
from queuectl.kube.problems import problems
from queuectl.local.controlplane import Running
from tests.support.manifests import (
    Manifest,
    collection,
    container,
    flavor,
    job,
    maintenance,
    queue,
    quota,
    role,
    with_pod,
)

MODELS = {model.__name__: model for model in KINDS}


@dataclass(frozen=True)
class Refused:
    """``words`` are in both messages: the field, its value, what would be right; the rest in one of them."""

    manifest: Manifest
    words: tuple[str, ...]
    server: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    code: int = field(default=422)


def on(*values: int, **more: str) -> Manifest:
    """Return exit codes of a rule."""
    return {"onExitCodes": {"operator": "In", "values": [*values], **more}}


REFUSED = {
    "unknown field": Refused(
        job(proirity=3), ("spec.proirity", "unknown field"), model=("did you mean priority?",), code=400
    ),
    "unknown field of a role": Refused(
        job("a", role(replicaz=1)), ("spec.roles[0].replicaz",), model=("did you mean replicas?",), code=400
    ),
    "unknown field of a queue": Refused(
        queue(limit=3), ("spec.limit", "unknown field"), model=("known here are parent, order, weight",), code=400
    ),
    "more pods to start with than there are": Refused(
        job("a", role(minReplicas=3)), ("minReplicas is 3", "replicas, 2", "at most that many")
    ),
    "a weight that is no quantity": Refused(queue(weight="heavy"), ("spec.weight", "heavy")),
    "a limit that is no quantity": Refused(
        queue(quotas=[quota() | {"borrowingLimit": "8 GPUs"}]), ("borrowingLimit", "8 GPUs", "write")
    ),
    "a lending limit below zero": Refused(queue(quotas=[quota() | {"lendingLimit": "-1"}]), ("lendingLimit", "-1")),
    "a resource that is none": Refused(
        queue(quotas=[quota() | {"resource": "gpu"}]),
        ("spec.quotas[0].resource", '"gpu" is not a resource; write cpu, memory', "such as nvidia.com/gpu"),
    ),
    "a resource of a user's limit that is none": Refused(
        queue(perUser={"maxResources": {"gpus": 8}}), ("perUser", '"gpus" is not a resource; write cpu, memory')
    ),
    "a request for a resource that is none": Refused(
        job("a", role("worker", 2, container(resources={"requests": {"gpu": 8}}))),
        ("resources.requests", '"gpu" is not a resource; write cpu, memory'),
    ),
    "a part of a device": Refused(
        queue(quotas=[quota("500m")]), ("nominal: 500m is not a whole number, and devices come in whole ones",)
    ),
    "a limit of a part of a device": Refused(
        queue(quotas=[quota() | {"borrowingLimit": "1.5"}]), ("borrowingLimit: 1.5 is not a whole number",)
    ),
    "a request for a part of a device": Refused(
        job("a", role("worker", 2, container(gpu="0.5"))), ("nvidia.com/gpu", "0.5 is not a whole number")
    ),
    "a rule that there is not": Refused(
        queue(preemption={"withinQueue": "Always"}), ("withinQueue", "Always", "LowerPriority")
    ),
    "a queue that is no name": Refused(
        job(queue="Team A"), ("spec.queue", '"Team A"', "use lower-case letters, digits, - and .")
    ),
    "a user's limit that is no quantity": Refused(
        queue(perUser={"maxResources": {"nvidia.com/gpu": "8 GPUs"}}), ("perUser", '"8 GPUs" is not a quantity; write')
    ),
    "maintenance of nothing": Refused(maintenance(nodes=None), ("spec", "either nodes or nodeSelector")),
    "maintenance of nodes by name and by label": Refused(
        maintenance(nodeSelector={"a": "b"}), ("spec", "either nodes or nodeSelector")
    ),
    "a window that ends before it begins": Refused(
        maintenance(window={"start": "2026-12-02T00:00:00Z", "end": "2026-12-01T00:00:00Z"}),
        ("spec.window", "window.end is not after window.start"),
    ),
    "no node at a time": Refused(maintenance(maxUnavailable=0), ("spec.maxUnavailable", "0 is not a number of nodes")),
    "a part that is none": Refused(
        maintenance(maxUnavailable="0%"), ("spec.maxUnavailable", "0% is not a number of nodes", "such as 25%")
    ),
    "a word for what becomes of jobs that there is not": Refused(
        maintenance(drain="Kill"), ("spec.drain", "Kill", "Checkpoint")
    ),
    "an empty queue": Refused(job(queue=""), ("spec.queue", '""', "use lower-case")),
    "a class that is no name": Refused(job(priorityClassName="High!"), ("spec.priorityClassName", '"High!"')),
    "class and number": Refused(
        job(priority=1, priorityClassName="high"),
        ("spec", "priority and priorityClassName exclude each other; keep one"),
    ),
    "priority too high": Refused(
        job(priority=2_000_000_000), ("spec.priority", "2000000000", "less than or equal to 1000000000")
    ),
    "priority as text": Refused(
        job(priority="5"), ("spec.priority",), server=("expected numeric",), model=("integer",), code=403
    ),
    "no roles": Refused(job(roles=[]), ("spec.roles", "at least 1 item"), server=("should have at least 1 items",)),
    "too many roles": Refused(job("a", *(role(f"r{n}") for n in range(17))), ("spec.roles", "16", "17")),
    "two roles of one name": Refused(
        job("a", role(), role()), ("spec", 'two roles are named "worker"; give each role a name of its own')
    ),
    "a role that is no name": Refused(
        job("a", role("Worker_1")), ("spec.roles[0].name", '"Worker_1"', "such as worker")
    ),
    "a role's name too long": Refused(job("a", role("w" * 31)), ("spec.roles[0].name", "30")),
    "names too long for pods": Refused(
        job("a" * 44, role()), ("a" * 44, "worker", "too long for its pods: together at most 49 characters")
    ),
    "negative replicas": Refused(
        job("a", role("worker", -1)), ("spec.roles[0].replicas", "-1", "greater than or equal to 1")
    ),
    "no replicas": Refused(job("a", role("worker", 0)), ("spec.roles[0].replicas", "0", "greater than or equal to 1")),
    "too many replicas": Refused(
        job("a", role("worker", 10_001)), ("spec.roles[0].replicas", "10001", "less than or equal to 10000")
    ),
    "too many pods": Refused(
        job("a", role("x", 6000), role("y", 6000)), ("spec", "add up to 12000; at most 10000 pods make a gang")
    ),
    "nobody must succeed": Refused(
        job("a", role(mustSucceed=False)), ("spec", "no role has mustSucceed: true", "set it for at least one role")
    ),
    "an answer that does not go with the signal": Refused(
        job(checkpoint={"signal": "Exec", "exec": {"command": ["save"]}, "answer": "Reply"}),
        ("spec.checkpoint", "answer Reply is not possible with signal Exec; give one of Exit, Annotation, File"),
    ),
    "an answer after the end": Refused(
        job(checkpoint={"answer": "Annotation"}),
        ("spec.checkpoint", "answer Annotation is not possible with signal SigTerm; give one of Exit"),
    ),
    "a signal that there is not": Refused(
        job(checkpoint={"signal": "USR1"}), ("spec.checkpoint.signal", "USR1", "SigTerm")
    ),
    "HTTP without an address": Refused(
        job(checkpoint={"signal": "HTTP"}), ("spec.checkpoint", "http goes with signal HTTP", "give both or neither")
    ),
    "an address without HTTP": Refused(
        job(checkpoint={"http": {"port": 80}}), ("spec.checkpoint", "http goes with signal HTTP")
    ),
    "a command without Exec": Refused(
        job(checkpoint={"signal": "Annotation", "exec": {"command": ["save"]}}),
        ("spec.checkpoint", "exec goes with signal Exec"),
    ),
    "a file that is no answer": Refused(
        job(checkpoint={"signal": "Annotation", "file": "/c/latest"}), ("spec.checkpoint", "file goes with answer File")
    ),
    "reminders by SIGTERM": Refused(
        job(checkpoint={"intervalSeconds": 60}),
        ("spec.checkpoint", "nobody is asked while the job runs; remove intervalSeconds"),
    ),
    "no time to save": Refused(job(checkpoint={"graceSeconds": 0}), ("spec.checkpoint.graceSeconds", "0")),
    "a folder that is no path": Refused(
        job(checkpoint={"path": "checkpoints"}), ("spec.checkpoint.path", '"checkpoints" is not a path; write it from')
    ),
    "a role that there is not to ask": Refused(
        job(checkpoint={"role": "chief"}), ("spec", "checkpoint.role names a role that the job does not have")
    ),
    "a rule for failures that goes by nothing": Refused(
        job(podFailurePolicy={"rules": [{"action": "Ignore"}]}),
        ("spec.podFailurePolicy.rules[0]", "a rule goes by onExitCodes or by onPodConditions; give one of them"),
    ),
    "a rule for failures that goes by both": Refused(
        job(podFailurePolicy={"rules": [{"action": "Ignore", **on(1), "onPodConditions": [{"type": "A"}]}]}),
        ("spec.podFailurePolicy.rules[0]", "give one of them"),
    ),
    "a rule for failures with an action that there is not": Refused(
        job(podFailurePolicy={"rules": [{"action": "FailIndex", **on(1)}]}),
        ("spec.podFailurePolicy.rules[0].action", "FailIndex", "AvoidNode"),
    ),
    "a rule for success": Refused(
        job(podFailurePolicy={"rules": [{"action": "Ignore", **on(0, 1)}]}),
        ("spec.podFailurePolicy.rules[0].onExitCodes", "exit code 0 is no failure; leave it out"),
    ),
    "an exit code twice": Refused(
        job(podFailurePolicy={"rules": [{"action": "Ignore", **on(1, 1, operator="NotIn")}]}),
        ("spec.podFailurePolicy.rules[0].onExitCodes", "give each once"),
    ),
    "an exit code that can't be": Refused(
        job(podFailurePolicy={"rules": [{"action": "Ignore", **on(256)}]}),
        ("spec.podFailurePolicy.rules[0].onExitCodes.values[0]", "255"),
    ),
    "no rules for failures": Refused(job(podFailurePolicy={"rules": []}), ("spec.podFailurePolicy.rules", "1 item")),
    "failures without end": Refused(
        job(podFailurePolicy={"rules": [{"action": "Ignore", **on(1)}], "ignoreLimit": 0}),
        ("spec.podFailurePolicy.ignoreLimit", "0"),
    ),
    "a rule for a role that there is not": Refused(
        job(podFailurePolicy={"rules": [{"action": "Ignore", "role": "chief", **on(1)}]}),
        ("spec", "podFailurePolicy names a role that the job does not have"),
    ),
    "a rule for a container that there is not": Refused(
        job(
            "a",
            role("worker", 1),
            role("chief", 1, container("first")),
            podFailurePolicy={"rules": [{"action": "Ignore", "role": "worker", **on(1, containerName="first")}]},
        ),
        ("spec", "podFailurePolicy names a container that no pod of the role has"),
    ),
    "rules for failures where the kubelet restarts containers": Refused(
        with_pod(job(podFailurePolicy={"rules": [{"action": "Ignore", **on(1)}]}), restartPolicy="OnFailure"),
        ("spec", "with restartPolicy: OnFailure their containers are started again; set it to Never"),
    ),
    "a model but no GPU": Refused(
        job("a", role("worker", 2, container(gpu=None)), gpu={"models": ["H100"]}),
        ("gpu is given", "no container requests a GPU", "add a request such as nvidia.com/gpu: 1"),
    ),
    "a role with GPU memory but no GPU": Refused(
        job("a", role("worker", 2, container(gpu=None), gpu={"minMemory": "40Gi"})),
        ("no container of the role requests a GPU",),
    ),
    "slices that do not divide the role": Refused(
        job("a", role("worker", 6, topology={"slices": {"level": "rack", "size": 4}})),
        ("6 replicas do not divide into slices of 4", "give a multiple"),
    ),
    "a level that is no name": Refused(
        job("a", topology={"required": "Rack!"}), ('"Rack!" is not the name of a level',)
    ),
    "an alternative that cuts slices": Refused(
        job(
            "a",
            role("worker", 8, topology={"slices": {"level": "rack", "size": 4}}),
            gpu={"alternatives": [{"models": ["A100"], "replicas": {"worker": 6}}]},
        ),
        ("replicas of an alternative do not divide into the slices of their role", "a multiple of its slices.size"),
    ),
    "an alternative of too many pods": Refused(
        job(
            "a", role("x", 4000), role("y", 6000), gpu={"alternatives": [{"models": ["A100"], "replicas": {"x": 4001}}]}
        ),
        ("more than the 10000 pods of a gang", "give fewer"),
    ),
    "an alternative for a role that is not there": Refused(
        job("a", gpu={"alternatives": [{"models": ["A100"], "replicas": {"chief": 2}}]}),
        ("replicas of an alternative name a role that the job does not have", "use names of spec.roles"),
    ),
    "a level named like that of every flavor": Refused(
        flavor(topology={"levels": [{"name": "node", "nodeLabel": "example.com/node"}]}),
        ("no level can be named node",),
    ),
    "a model but zero GPUs": Refused(
        job("a", role("worker", 2, container(gpu="0")), gpu={"models": ["H100"]}), ("no container requests a GPU",)
    ),
    "a memory that is no quantity": Refused(
        job("a", role(gpu={"minMemory": "80 GB"})), ("gpu.minMemory", '"80 GB" is not a quantity; write 8 or 64Gi')
    ),
    "a slice that is no profile": Refused(
        job("a", role(gpu={"slice": "mig-1g"})),
        ("spec.roles[0].gpu.slice", '"mig-1g" is not a profile of slices', "such as 1g.10gb"),
    ),
    "no model": Refused(job(gpu={"models": []}), ("spec.gpu.models", "at least 1 item")),
    "no containers": Refused(
        with_pod(job(), containers=[]), ("spec.roles[0].template.spec.containers", "at least 1 item")
    ),
    "restart always": Refused(
        with_pod(job(), restartPolicy="Always"),
        ("spec.roles[0].template.spec.restartPolicy", "Always", "Never", "OnFailure"),
    ),
    "a request that is no quantity": Refused(
        job("a", role("worker", 2, container(gpu="8 GPUs"))),
        ("resources.requests", "nvidia.com/gpu", '"8 GPUs" is not a quantity; write 8 or 64Gi'),
    ),
    "a limit below zero": Refused(
        job("a", role("worker", 2, container(resources={"limits": {"memory": "-1Gi"}}))),
        ("resources.limits", "memory", "-1Gi is below zero; write 0 or more"),
    ),
    "half a GPU": Refused(
        job("a", role("worker", 2, container(resources={"limits": {"nvidia.com/gpu": 0.5}}))),
        ("resources.limits", "nvidia.com/gpu"),
        server=("integer,string",),
        model=("0.5", "of devices such as GPUs there are only whole ones"),
    ),
    "an init container's request": Refused(
        with_pod(job(), initContainers=[container("prepare", gpu="one")]),
        ("initContainers", '"one" is not a quantity'),
    ),
    "start deadline zero": Refused(job(startDeadlineSeconds=0), ("spec.startDeadlineSeconds", "0", "to 1")),
    "start deadline of two days": Refused(job(startDeadlineSeconds=172_800), ("spec.startDeadlineSeconds", "86400")),
    "backoff limit below zero": Refused(job(backoffLimit=-1), ("spec.backoffLimit", "-1", "to 0")),
    "run time zero": Refused(job(maxRunSeconds=0), ("spec.maxRunSeconds", "0", "to 1")),
    "ttl below zero": Refused(job(ttlSecondsAfterFinished=-1), ("spec.ttlSecondsAfterFinished", "-1", "to 0")),
    "hold as text": Refused(job(hold="yes"), ("spec.hold", "boolean", "yes"), code=403),
    "quota below zero": Refused(
        queue(quotas=[quota(-8)]),
        ("spec.quotas[0].nominal", "-8"),
        server=("greater than or equal to 0",),
        model=("is below zero; write 0 or more",),
    ),
    "quota below zero as text": Refused(
        queue(quotas=[quota("-8Gi")]), ("spec.quotas[", "nominal", "-8Gi is below zero; write 0 or more")
    ),
    "quota with a word": Refused(
        queue(quotas=[quota("8 GPUs")]), ("spec.quotas[", "nominal", '"8 GPUs" is not a quantity; write 8 or 64Gi')
    ),
    "quota with a space": Refused(queue(quotas=[quota(" 8")]), ("nominal", '" 8" is not a quantity')),
    "quota as a fraction": Refused(
        queue(quotas=[quota(0.5)]), ("spec.quotas[0].nominal",), server=("integer,string",), model=("0.5", "500m")
    ),
    "quota of no resource": Refused(
        queue(quotas=[quota(resource="gpu!")]), ("spec.quotas[0].resource", '"gpu!"', "nvidia.com/gpu")
    ),
    "quota of no flavor": Refused(queue(quotas=[quota(flavor="H100")]), ("spec.quotas[0].flavor", '"H100"')),
    "two quotas for one thing": Refused(
        queue(quotas=[quota(1), quota(2)]), ("spec", "nvidia.com/gpu", "h100"), server=("Duplicate value",)
    ),
    "own parent": Refused(
        queue("team-a", parent="team-a"), ("queue team-a is its own parent; name another Queue or remove parent",)
    ),
    "an order that doesn't exist": Refused(queue(order="FIFO"), ("spec.order", "FIFO", "StrictFIFO", "BestEffortFIFO")),
    "a toleration of everything by accident": Refused(
        flavor(tolerations=[{"effect": "NoSchedule"}]), ("spec.tolerations[0]", "must have operator Exists")
    ),
    "a toleration with a value too many": Refused(
        flavor(tolerations=[{"key": "gpu", "operator": "Exists", "value": "x"}]),
        ("spec.tolerations[0]", "has no value; remove it"),
    ),
    "seconds for what evicts nobody": Refused(
        flavor(tolerations=[{"key": "gpu", "operator": "Exists", "tolerationSeconds": 60}]),
        ("spec.tolerations[0]", "can have tolerationSeconds; remove them"),
    ),
    "an effect that doesn't exist": Refused(
        flavor(tolerations=[{"key": "gpu", "effect": "Never"}]), ("spec.tolerations[0].effect", "Never", "NoExecute")
    ),
    "a weight that is no fraction": Refused(
        flavor(gpus=[{"resource": "nvidia.com/gpu", "weight": "0.2"}]),
        ("spec.gpus[0].weight", '"0.2" is not a weight; write it as a fraction, such as 1/7'),
    ),
}

ACCEPTED = {
    "rules for failures": job(
        "a",
        role("worker", 1, container("first"), container("second")),
        podFailurePolicy={
            "rules": [
                {"action": "FailJob", "role": "worker", **on(42, containerName="second")},
                {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget"}]},
                {"action": "AvoidNode", **on(80, 81)},
                {"action": "Ignore", **on(0, 1, operator="NotIn")},
            ],
            "ignoreLimit": 5,
        },
    ),
    "rules for failures of a role, beside one whose containers are restarted": with_pod(
        job(
            "a",
            role("helper", 1, mustSucceed=False),
            role("worker", 1),
            podFailurePolicy={"rules": [{"action": "Ignore", "role": "worker", **on(1)}]},
        ),
        restartPolicy="OnFailure",
    ),
    "saves by SIGTERM": job(checkpoint={}),
    "saves when its file says so": job(
        checkpoint={
            "signal": "Exec",
            "answer": "File",
            "exec": {"command": ["save"]},
            "file": "/c/latest",
            "path": "/c",
            "role": "worker",
            "graceSeconds": 600,
            "intervalSeconds": 60,
        }
    ),
    "saves by HTTP": job(checkpoint={"signal": "HTTP", "http": {"port": 8080}}),
    "the smallest job": job(),
    "all of a job": job(
        "full",
        role("leader", 1, container(), mustSucceed=True),
        role("worker", 10, container(), container("log", gpu=None), mustSucceed=False),
        priority=-5,
        gpu={"models": ["H100", "A100"]},
        startDeadlineSeconds=86_400,
        backoffLimit=0,
        maxRunSeconds=3600,
        hold=True,
        ttlSecondsAfterFinished=0,
    ),
    "names just short enough": job("a" * 43, role()),
    "a name with dots": job("llm.v2"),
    "a sliced GPU for a model": job(
        "mig",
        role("worker", 1, container(resources={"limits": {"nvidia.com/mig-1g.10gb": 1}})),
        gpu={"models": ["H100"]},
    ),
    "a GPU by a name of the cluster's own, for a model": job(
        "own",
        role("worker", 1, container(resources={"limits": {"example.com/a100": 1}}), gpu={"minMemory": "40Gi"}),
        gpu={"models": ["A100"]},
    ),
    "a slice that is called a GPU": job("slices", role(gpu={"slice": "1g.10gb.me", "shared": True})),
    "quotas of cards": queue("cards", quotas=[quota("1.5", resource="queuectl.dev/gpu")]),
    "names and weights of GPUs": flavor(
        "weights", gpus=[{"resource": "nvidia.com/gpu", "weight": "1/5"}, {"resource": "example.com/a100"}]
    ),
    "a GPU of a sidecar for a model": with_pod(
        job("side", role("worker", 1, container(gpu=None)), gpu={"models": ["H100"]}),
        initContainers=[container("helper", gpu=1, restartPolicy="Always")],
    ),
    "parts of a pod that we don't read": with_pod(
        job("open"), volumes=[{"name": "data", "emptyDir": {"sizeLimit": "1Gi"}}], hostNetwork=True
    ),
    "quantities of every form": queue(
        "forms",
        quotas=[
            *(quota(value, flavor=f"f{n}") for n, value in enumerate((0, 8, "8", "8.0", "1k", "64Gi", "1e3"))),
            *(quota(value, flavor=f"f{n}") | {"resource": "cpu"} for n, value in enumerate(("500m", "1.5"))),
        ],
    ),
    "nulls are as good as nothing": job("nulls", priority=None, hold=None, gpu=None),
    "closeness of all kinds": job(
        "close",
        role("worker", 8, topology={"preferred": "rack", "slices": {"level": "rack", "size": 4}, "balanced": True}),
        topology={"required": "block"},
        gpu={"sameDriver": True, "alternatives": [{"models": ["A100"], "replicas": {"worker": 16}}]},
    ),
    "an empty queue": queue("empty"),
    "a queue below another": queue("child", parent="team-a", order="StrictFIFO", quotas=[quota()]),
    "an empty flavor": flavor("any"),
    "a flavor whose GPUs claims name": flavor(
        devices={
            "driver": "gpu.nvidia.com",
            "deviceClassName": "gpu.nvidia.com",
            "resource": "nvidia.com/gpu",
            "identity": "resource.kubernetes.io/pciBusID",
            "attributes": {"type": "gpu"},
        },
        topology={"insideNode": [{"name": "pcie", "gpus": 2, "attribute": "resource.kubernetes.io/pcieRoot"}]},
    ),
    "a flavor": flavor(
        nodeLabels={"nvidia.com/gpu.product": "NVIDIA-H100"},
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}, {"operator": "Exists"}],
        gpuModel="H100",
        topology={
            "levels": [{"name": "rack", "nodeLabel": "topology.example.com/rack"}],
            "insideNode": [{"name": "nvlink", "gpus": 8}],
        },
    ),
}


async def create(kube: KubeClient, manifest: Manifest) -> Manifest:
    params = {"dryRun": "All", "fieldValidation": "Strict"}
    created: Manifest = await kube.request("POST", collection(manifest), params=params, body=manifest)
    return created


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
async def test_the_api_server_refuses(kube: KubeClient, case: Refused) -> None:
    with pytest.raises(ApiError) as error:
        await create(kube, case.manifest)

    assert error.value.status == case.code
    for word in (*case.words, *case.server):
        assert word in error.value.message


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_the_model_refuses(case: Refused) -> None:
    model = MODELS[case.manifest["kind"]]
    with pytest.raises(ValidationError) as error:
        model.model_validate(case.manifest)

    text = "; ".join(f"{path}: {problem}" for path, problem in problems(error.value, model))
    for word in (*case.words, *case.model):
        assert word in text


@pytest.mark.parametrize("manifest", ACCEPTED.values(), ids=ACCEPTED)
async def test_server_and_model_accept(kube: KubeClient, manifest: Manifest) -> None:
    created = await create(kube, manifest)
    model = MODELS[manifest["kind"]]

    assert model.model_validate(created).model_dump(mode="json", by_alias=True, exclude_unset=True) == created
    # Defaults of the model are those of the server.
    local = model.model_validate(manifest).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert local["spec"] == created["spec"]


QUANTITIES = [
    *("0", "8", "+8", "8.", ".5", "0.5", "500m", "1n", "1u", "64Gi", "1Ki", "2Ei", "1k", "1e3", "1E3", "1e-3", "1E"),
    *(
        "",
        ".",
        "8 ",
        " 8",
        "8GB",
        "8 Gi",
        "Gi",
        "1gi",
        "1K",
        "1e",
        "1e3Gi",
        "0x8",
        "8_0",
        "1,5",
        "-",
        "-0",
        "-1",
        "8\n",
    ),
    *("99999999999999999999999999", "NaN", "Inf", "1Ei1", "--1", "٣"),
]


@pytest.mark.parametrize("text", QUANTITIES)
async def test_server_and_model_agree_on_quantities(kube: KubeClient, text: str) -> None:
    manifest = queue(quotas=[quota(text)])
    try:
        await create(kube, manifest)
        server = True
    except ApiError:
        server = False
    try:
        MODELS["Queue"].model_validate(manifest)
        model = True
    except ValidationError:
        model = False

    assert model == server


async def test_the_api_server_refuses_a_template_of_10_megabytes(kube: KubeClient, control_plane: Running) -> None:
    # By hand, since the server answers and hangs up before it has read it all.
    manifest = of_size(10_000_000)
    body = json.dumps(manifest).encode()
    server = urlsplit(control_plane.server)
    head = (
        f"POST {collection(manifest)} HTTP/1.1",
        f"Host: {server.netloc}",
        f"Authorization: Bearer {control_plane.token}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "",
        "",
    )
    tls = ssl.create_default_context(cadata=control_plane.authority)
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(server.hostname, server.port, ssl=tls)
        try:
            writer.write("\r\n".join(head).encode() + body)
            answer = await reader.readuntil(b"}\n")
        finally:
            writer.transport.abort()

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"Request entity too large: limit is 3145728" in answer


async def test_a_lending_limit_above_what_the_queue_owns_gets_a_warning(kube: KubeClient) -> None:
    manifest = queue("lends", quotas=[quota(8) | {"lendingLimit": 9}])
    async with kube._session.post(
        kube.host + collection(manifest), params={"dryRun": "All"}, json=manifest, headers=await kube._headers(JSON)
    ) as response:
        assert response.status == 201
        told = response.headers.getall("Warning")
    assert any("lendingLimit: 9 is more than nominal, 8; it limits nothing unless" in one for one in told), told


def test_the_model_refuses_what_etcd_would() -> None:
    model = MODELS["TrainingJob"]
    with pytest.raises(ValidationError) as refused:
        model.model_validate(of_size(1_500_000))
    ((_, problem),) = problems(refused.value, model)
    assert "spec takes 15002" in problem
    assert "at most 1000000 can be stored; move data out of the template" in problem


def of_size(size: int) -> Manifest:
    return with_pod(job(), containers=[container(args=["x" * size])])


def test_validation_leaves_the_manifest_alone() -> None:
    manifest = job("nulls", priority=None)
    before = deepcopy(manifest)

    MODELS["TrainingJob"].model_validate(manifest)

    assert json.dumps(manifest) == json.dumps(before)
