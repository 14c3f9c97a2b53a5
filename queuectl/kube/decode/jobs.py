"""TrainingJobs, from the API server's bytes."""

from collections.abc import Iterable, Mapping
from typing import Any

from queuectl.kube import failures, moves
from queuectl.kube.alone import alone, unpromised
from queuectl.kube.decode.common import Bytes, Meta, decode_object, seconds, tolerations
from queuectl.kube.informer import Item
from queuectl.kube.names import (
    FINALIZER,
    JOB_LABEL,
    QUEUE_LABEL,
    ROLE_LABEL,
    SAVE_ASKED,
    SUBMITTED_BY,
    WORKLOAD_LABEL,
)
from queuectl.kube.selectors import node_terms
from queuectl.kube.volumes import uses
from queuectl.model.checkpoint import ANSWERS, Answer, Saving, Signal
from queuectl.model.objects import (
    Alternative,
    Constraints,
    Gang,
    GpuNeed,
    Job,
    Lifetime,
    Role,
    Together,
    Topology,
    VolumeUse,
)
from queuectl.model.reasons import Reason, Why, why
from queuectl.model.resources import CARDS, is_extended, parse_quantity, pod_requests


def job(raw: Bytes) -> Item[Job]:
    """Decode a TrainingJob; a spec that can't be used becomes its ``problem``, never an error."""
    seen = decode_object(raw)
    meta, spec = seen.metadata, seen.spec
    problem: Why | None = None
    roles: tuple[Role, ...] = ()
    left_open: tuple[str, ...] = ()
    volumes: tuple[VolumeUse, ...] = ()
    try:
        kinds = [(role["template"]["spec"], _labels(role, spec, meta)) for role in spec["roles"]]
        by_itself = alone(kinds, meta.namespace)
        roles = tuple(_role(role, own) for role, own in zip(spec["roles"], by_itself, strict=True))
        left_open = tuple(
            f"spec.roles[{role.name}].template.spec.{name}"
            for role, kind in zip(roles, kinds, strict=True)
            for name in unpromised(*kind)
        )
        volumes = tuple(
            use for role, (template, _) in zip(roles, kinds, strict=True) for use in uses(role.name, template)
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = why(Reason.MISCONFIGURED, field="spec.roles", problem=str(error))
    gpu, topology = spec.get("gpu") or {}, spec.get("topology") or {}
    saving = _saving(spec["checkpoint"]) if spec.get("checkpoint") else None
    lifetime = Lifetime(spec.get("startDeadlineSeconds") or 300, spec.get("maxRunSeconds"), saves=saving is not None)
    gang = Gang(
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        queue=spec.get("queue") or "",
        priority=spec.get("priority") or 0,
        submitted_at=meta.creation_timestamp.timestamp() if meta.creation_timestamp else 0.0,
        roles=roles,
        gpu_models=tuple(gpu.get("models") or ()),
        alternatives=tuple(
            Alternative(tuple(other["models"]), tuple(sorted((other.get("replicas") or {}).items())))
            for other in gpu.get("alternatives") or ()
        ),
        together=Together(
            required=topology.get("required") or "",
            preferred=topology.get("preferred") or "",
            same_model=gpu.get("homogeneous", True),
            same_driver=bool(gpu.get("sameDriver")),
        ),
        user=meta.annotations.get(SUBMITTED_BY, ""),
        preemptible=spec.get("preemptible", True),
        hold=bool(spec.get("hold")),
        lifetime=lifetime,
    )
    value = Job(
        gang=gang,
        generation=meta.generation,
        resource_version=meta.resource_version,
        priority_class=spec.get("priorityClassName") or "",
        deleting=meta.deletion_timestamp is not None,
        has_finalizer=FINALIZER in meta.finalizers,
        start_deadline_seconds=lifetime.start,
        backoff_limit=spec.get("backoffLimit", 3),
        failures=failures.policy(spec.get("podFailurePolicy")),
        replaces_lost_pods=spec.get("replaceLostPods") or False,
        max_run_seconds=lifetime.run,
        ttl_seconds=spec.get("ttlSecondsAfterFinished"),
        templates={role["name"]: role["template"] for role in spec["roles"]} if problem is None else {},
        status=seen.status,
        unpromised=left_open,
        volumes=volumes,
        move=moves.read(meta.annotations),
        problem=problem,
        saving=saving,
        save_asked_at=seconds(meta.annotations.get(SAVE_ASKED)),
    )
    return Item(meta.uid, meta.resource_version, value)


def _saving(given: Mapping[str, Any]) -> Saving:
    signal = Signal(given.get("signal") or Signal.SIG_TERM)
    http, command = given.get("http") or {}, given.get("exec") or {}
    return Saving(
        signal=signal,
        answer=Answer(given.get("answer") or ANSWERS[signal][0]),
        grace_seconds=given.get("graceSeconds") or 120,
        interval_seconds=given.get("intervalSeconds"),
        role=given.get("role") or "",
        path=given.get("path") or "",
        port=http.get("port") or 0,
        url_path=http.get("path") or "/checkpoint",
        container=command.get("container") or "",
        command=tuple(command.get("command") or ()),
        file=given.get("file") or "",
    )


def _labels(role: Mapping[str, Any], spec: Mapping[str, Any], meta: Meta) -> dict[str, str]:
    """Return the labels by which a role's pods will be selected."""
    own = (role["template"].get("metadata") or {}).get("labels") or {}
    ours = {WORKLOAD_LABEL: meta.uid, ROLE_LABEL: role["name"], JOB_LABEL: meta.name}
    return own | ours | {QUEUE_LABEL: spec.get("queue") or ""}


def _role(role: Mapping[str, Any], by_itself: dict[str, int]) -> Role:
    spec = role["template"]["spec"]
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    gates = spec.get("schedulingGates")
    if gates is not None and not isinstance(gates, list):
        raise ValueError(
            f"schedulingGates of role {role['name']} is {gates!r}; write a list, such as [{{name: ready}}]"
        )
    requests = tuple(sorted((pod_requests(spec) | by_itself).items()))
    constraints = Constraints(
        selector=tuple(sorted((spec.get("nodeSelector") or {}).items())),
        terms=node_terms(affinity),
        tolerations=tolerations(spec.get("tolerations")),
        gpu=_gpu_need(role.get("gpu") or {}, requests),
    )
    return Role(
        name=role["name"],
        pods=role["replicas"],
        requests=requests,
        constraints=constraints,
        least=role.get("minReplicas"),
        must_succeed=role.get("mustSucceed", True),
        topology=_topology(role.get("topology") or {}),
    )


def _gpu_need(gpu: Mapping[str, Any], requests: Iterable[tuple[str, int]]) -> GpuNeed | None:
    devices = tuple(resource for resource, amount in requests if amount and is_extended(resource))
    if CARDS in devices:
        raise ValueError(f"{CARDS} is what quotas count; request what nodes offer, such as nvidia.com/gpu")
    if not devices:
        return None
    least = parse_quantity("memory", gpu.get("minMemory") or 0)
    return GpuNeed(devices, least, bool(gpu.get("shared")), gpu.get("slice") or "")


def _topology(topology: Mapping[str, Any]) -> Topology:
    slices = topology.get("slices") or {}
    return Topology(
        required=topology.get("required") or "",
        preferred=topology.get("preferred") or "",
        slice_level=slices.get("level") or "",
        slice_size=slices.get("size") or 1,
        balanced=bool(topology.get("balanced")),
    )
