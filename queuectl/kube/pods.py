"""A gang's pods as the API server gets them: created gated, then pinned and ungated by one patch each."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from queuectl.core.elastic import numbered
from queuectl.core.grace import of_pods
from queuectl.kube.claims import with_claim
from queuectl.kube.client import ApiError
from queuectl.kube.names import (
    API_VERSION,
    ASK,
    ATTEMPT_LABEL,
    GATE,
    INDEX_LABEL,
    JOB_LABEL,
    QUEUE_LABEL,
    ROLE_LABEL,
    WORKLOAD_LABEL,
    pod_name,
)
from queuectl.model.checkpoint import Checkpoint, Signal
from queuectl.model.lifecycle import Attempt
from queuectl.model.objects import DeviceKind, Flavor, Job, Toleration
from queuectl.model.plan import PodKey
from queuectl.model.resources import is_device

Manifest = dict[str, Any]

_ASK_VOLUME = "queuectl-ask"
_ASK_FOLDER = "/etc/queuectl"


def priority_class_name(priority: int) -> str:
    """Return the name of the PriorityClass that gives pods this priority without letting kube-scheduler preempt."""
    return f"queuectl-{priority}" if priority >= 0 else f"queuectl-minus-{-priority}"


def priority_class(priority: int) -> Manifest:
    """Return that PriorityClass."""
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": priority_class_name(priority)},
        "value": priority,
        "preemptionPolicy": "Never",
        "description": f"Pods of TrainingJobs of priority {priority}; queuectl alone preempts for them.",
    }


def lacks_priority_class(error: ApiError) -> bool:
    """Tell whether a pod was refused since its PriorityClass is missing; one just made may not be known everywhere."""
    return error.status == HTTPStatus.FORBIDDEN and "no PriorityClass with name" in error.message


def nodes_of(attempt: Attempt) -> dict[PodKey, tuple[str, str]]:
    """Return (role, index) → (node, flavor), the same however the placements are ordered."""
    return {key: (p.node, p.flavor) for key, p in numbered(attempt.placements, attempt.done).items()}


def devices_of(attempt: Attempt, flavors: Mapping[str, Flavor]) -> dict[PodKey, tuple[str, DeviceKind, list[str]]]:
    """Return (role, index) → node, kind and names of the devices that a claim names; pods without such are left out."""
    found = {}
    for key, p in numbered(attempt.placements, attempt.done).items():
        kind = flavors[p.flavor].devices if p.flavor in flavors else None
        devices = [name for name, _ in p.requests if is_device(name)]
        if kind is not None and devices:
            found[key] = (p.node, kind, devices)
    return found


def labels(job: Job, attempt: Attempt, role: str) -> dict[str, str]:
    """Return the labels that all pods of a role have."""
    metadata = (job.templates.get(role) or {}).get("metadata") or {}
    return (metadata.get("labels") or {}) | {
        WORKLOAD_LABEL: job.gang.uid,
        ATTEMPT_LABEL: str(attempt.number),
        ROLE_LABEL: role,
        JOB_LABEL: job.gang.name,
        QUEUE_LABEL: job.gang.queue,
    }


def manifests(
    job: Job, attempt: Attempt, priority: int, flavors: Mapping[str, Flavor], saved: Checkpoint | None = None
) -> dict[PodKey, Manifest]:
    """Return the gang's pods by role and index, gated. ``saved``: the checkpoint that they may go on from."""
    result: dict[PodKey, Manifest] = {}
    places, devices = nodes_of(attempt), devices_of(attempt, flavors)
    roles = list(job.templates)
    ranks = {key: rank for rank, key in enumerate(sorted(places, key=lambda key: (roles.index(key[0]), key)))}
    for (role, index), (_, flavor) in places.items():
        template = job.templates[role]
        metadata = template.get("metadata") or {}
        spec = template["spec"]
        name = pod_name(job.gang.name, role, attempt.number, index)
        tolerations = [_toleration(t) for t in flavors[flavor].tolerations] if flavor in flavors else []
        result[role, index] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": job.gang.namespace,
                "annotations": metadata.get("annotations") or {},
                "labels": labels(job, attempt, role) | {INDEX_LABEL: str(index)},
                "ownerReferences": [
                    {
                        "apiVersion": API_VERSION,
                        "kind": "TrainingJob",
                        "name": job.gang.name,
                        "uid": job.gang.uid,
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
            "spec": {
                "restartPolicy": "Never",
                **{key: value for key, value in spec.items() if key not in {"priority", "preemptionPolicy"}},
                **of_pods(job, role),
                **_told(job, attempt, (role, index), ranks, saved),
                "priorityClassName": priority_class_name(priority),
                "schedulingGates": [*(spec.get("schedulingGates") or ()), {"name": GATE}],
                "tolerations": [*(spec.get("tolerations") or ()), *tolerations],
            },
        }
        if (role, index) in devices:
            result[role, index] = with_claim(result[role, index], devices[role, index][1])
    return result


def _told(job: Job, attempt: Attempt, key: PodKey, ranks: Mapping[PodKey, int], saved: Checkpoint | None) -> Manifest:
    """Return the parts of a pod's spec by which it learns which one it is; what the template says itself stays."""
    spec = job.templates[key[0]]["spec"]
    name, subdomain = pod_name(job.gang.name, key[0], attempt.number, key[1]), spec.get("subdomain")
    first, _ = min(ranks.items(), key=lambda item: item[1])
    env = {
        "QUEUECTL_ROLE": key[0],
        "QUEUECTL_INDEX": str(key[1]),
        "QUEUECTL_RANK": str(ranks[key]),
        "QUEUECTL_WORLD_SIZE": str(len(ranks)),
        "QUEUECTL_ATTEMPT": str(attempt.number),
        "QUEUECTL_POD": name,
        "QUEUECTL_WORKLOAD_UID": job.gang.uid,
        **_resumes(job, saved),
    }
    if subdomain:  # the user's headless Service; without one there is no name by which a pod could be found
        env["QUEUECTL_MASTER_ADDR"] = f"{pod_name(job.gang.name, first[0], attempt.number, first[1])}.{subdomain}"
    told: Manifest = {"hostname": name} if subdomain and "hostname" not in spec else {}
    more: Manifest = {}
    if job.saving is not None and job.saving.signal is Signal.ANNOTATION:
        field = {"fieldPath": f"metadata.annotations['{ASK}']"}
        volume = {"name": _ASK_VOLUME, "downwardAPI": {"items": [{"path": "ask", "fieldRef": field}]}}
        told["volumes"] = [*(spec.get("volumes") or ()), volume]
        more = {"name": _ASK_VOLUME, "mountPath": _ASK_FOLDER, "readOnly": True}
    for kind in ("containers", "initContainers"):
        if spec.get(kind):
            told[kind] = [{**each, "env": _with(each.get("env") or [], env)} for each in spec[kind]]
        for each in told.get(kind, ()) if more else ():
            each["volumeMounts"] = [*(each.get("volumeMounts") or ()), more]
    return told


def _resumes(job: Job, saved: Checkpoint | None) -> dict[str, str]:
    """Return what a pod is told of where its checkpoints are, and how it hears that it is to make one."""
    if job.saving is None:
        return {}
    told = {
        "QUEUECTL_CHECKPOINT_DIR": job.saving.path,
        "QUEUECTL_RESUME_STEP": "" if saved is None or saved.step is None else str(saved.step),
        "QUEUECTL_RESUME_PATH": saved.path if saved else "",
        "QUEUECTL_ASK_FILE": f"{_ASK_FOLDER}/ask" if job.saving.signal is Signal.ANNOTATION else "",
    }
    return {name: value for name, value in told.items() if value}


def _with(given: list[Manifest], env: Mapping[str, str]) -> list[Manifest]:
    known = {each["name"] for each in given}
    # First, so that what is given may refer to them: $(QUEUECTL_RANK).
    return [*({"name": name, "value": value} for name, value in env.items() if name not in known), *given]


def ungate_patch(job: Job, role: str, node: str, uid: str) -> list[Manifest]:
    """Return the JSON patch that pins a pod to its node and takes the gate away, if it is still the same pod."""
    spec = job.templates[role]["spec"]
    gates = spec.get("schedulingGates") or []
    return [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "test", "path": f"/spec/schedulingGates/{len(gates)}/name", "value": GATE},
        {"op": "add", "path": "/spec/affinity", "value": pinned(spec.get("affinity") or {}, node)},
        {"op": "remove", "path": f"/spec/schedulingGates/{len(gates)}"}
        if gates
        else {"op": "remove", "path": "/spec/schedulingGates"},
    ]


def pinned(affinity: Mapping[str, Any], node: str) -> Manifest:
    """Return the affinity with every alternative narrowed to one node."""
    node_affinity = affinity.get("nodeAffinity") or {}  # null stands for absent
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    pin = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = [
        {**term, "matchFields": [*(term.get("matchFields") or ()), pin]}
        for term in required.get("nodeSelectorTerms") or [{}]
    ]
    required = {**required, "nodeSelectorTerms": terms}
    return {**affinity, "nodeAffinity": {**node_affinity, "requiredDuringSchedulingIgnoredDuringExecution": required}}


def _toleration(toleration: Toleration) -> Manifest:
    parts = {
        "key": toleration.key,
        "operator": toleration.operator,
        "value": toleration.value,
        "effect": toleration.effect,
        "tolerationSeconds": toleration.seconds,
    }
    return {key: value for key, value in parts.items() if value not in {None, ""}}
