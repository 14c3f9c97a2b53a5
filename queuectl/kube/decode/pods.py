"""Pods, from the API server's bytes."""

from collections.abc import Iterable
from typing import Any

import msgspec

from queuectl.kube import reports
from queuectl.kube.alone import alone
from queuectl.kube.decode.common import Bytes, Condition, Meta, number
from queuectl.kube.informer import Item
from queuectl.kube.names import (
    ASK,
    ATTEMPT_LABEL,
    GATE,
    INDEX_LABEL,
    REPORT,
    ROLE_LABEL,
    WORKLOAD_LABEL,
)
from queuectl.kube.waiting import Waiting, obstacle
from queuectl.model.checkpoint import Report
from queuectl.model.objects import Pod
from queuectl.model.resources import most, pod_requests


class _Gate(msgspec.Struct):
    name: str


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    scheduling_gates: list[_Gate] = []
    containers: list[dict[str, Any]] = []
    init_containers: list[dict[str, Any]] = []
    overhead: dict[str, str] = {}
    resources: dict[str, Any] = {}
    affinity: dict[str, Any] | None = None
    host_network: bool = False
    node_selector: dict[str, str] = {}


class _Terminated(msgspec.Struct, rename="camel"):
    exit_code: int = 0
    reason: str = ""
    message: str = ""


class _ContainerState(msgspec.Struct):
    terminated: _Terminated | None = None
    waiting: Waiting | None = None


class _ContainerStatus(msgspec.Struct, rename="camel"):
    name: str = ""
    resources: dict[str, Any] | None = None
    allocated_resources: dict[str, str] = {}
    state: _ContainerState = msgspec.field(default_factory=_ContainerState)
    last_state: _ContainerState = msgspec.field(default_factory=_ContainerState)  # before it was started anew


class _PodStatus(msgspec.Struct, rename="camel"):
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: list[Condition] = []
    container_statuses: list[_ContainerStatus] = []
    init_container_statuses: list[_ContainerStatus] = []


class _Pod(msgspec.Struct):
    metadata: Meta
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


# By kubelets, and by containerd, of containers that were there before the machine started again.
PERISHED = {"ContainerStatusUnknown", "Unknown"}

_decode_pod = msgspec.json.Decoder(_Pod).decode


def pod(raw: Bytes) -> Item[Pod]:
    """Decode a pod, ours or another's."""
    seen = _decode_pod(raw)
    meta, labels = seen.metadata, seen.metadata.labels
    conditions = {c.type: c for c in seen.status.conditions if c.status == "True"}
    disrupted = conditions.get("DisruptionTarget") or _refused(seen.status) or _perished(seen.status)
    stops_by = meta.deletion_timestamp.timestamp() if meta.deletion_timestamp else None
    report, problem = _report(seen) if WORKLOAD_LABEL in labels else (None, "")
    gated = any(gate.name == GATE for gate in seen.spec.scheduling_gates)
    counts = gated or (seen.spec.node_name and seen.status.phase not in {"Succeeded", "Failed"})
    failed = WORKLOAD_LABEL in labels and seen.status.phase == "Failed"
    value = Pod(
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        resource_version=meta.resource_version,
        node=seen.spec.node_name,
        phase=seen.status.phase,
        ready="Ready" in conditions,
        gated=gated,
        deleting=meta.deletion_timestamp is not None,
        told_at=(stops_by or 0.0) - (meta.deletion_grace_period_seconds or 0),
        stops_by=stops_by,
        exit_code=_exit_code(seen.status),
        exits=_exits(seen.status) if failed else (),
        conditions=tuple((c.type, c.status) for c in seen.status.conditions) if failed else (),
        disrupted=(disrupted.message or disrupted.reason or "DisruptionTarget") if disrupted else "",
        disrupted_by=disrupted.reason if disrupted else "",
        workload=labels.get(WORKLOAD_LABEL, ""),
        attempt=number(labels.get(ATTEMPT_LABEL)),
        role=labels.get(ROLE_LABEL, ""),
        index=number(labels.get(INDEX_LABEL)),
        requests=_requests(seen) if counts else (),
        selector=tuple(sorted(seen.spec.node_selector.items())) if gated else (),
        ip=seen.status.pod_ip,
        waits=_waits(seen.status) if WORKLOAD_LABEL in labels else "",
        container=seen.spec.containers[0]["name"] if seen.spec.containers else "",
        ask=meta.annotations.get(ASK, ""),
        report=report,
        report_problem=problem,
    )
    return Item(meta.key, meta.resource_version, value)


def _refused(status: _PodStatus) -> Condition | None:
    """Return why a kubelet did not take a pod that was bound to its node, if that is so."""
    if status.phase != "Failed" or not status.reason or status.container_statuses or status.init_container_statuses:
        return None
    return Condition("", "True", f"{status.reason}: {status.message}", status.reason)


def _perished(status: _PodStatus) -> Condition | None:
    """Return why a pod failed of which its kubelet found nothing any more, as after a restart of the machine."""
    for c in status.container_statuses if status.phase == "Failed" else ():
        end = c.state.terminated
        if end is not None and end.reason in PERISHED:
            return Condition("", "True", f"container {c.name}: {end.message or end.reason}", end.reason)
    return None


def _report(pod: _Pod) -> tuple[Report | None, str]:
    """Return what a pod says that it has saved, or what is wrong with that: by annotation, and with its last words."""
    ends = (state.terminated for c in pod.status.container_statuses for state in (c.last_state, c.state))
    texts = [line for end in ends if end for line in reports.lines(end.message)]
    if annotation := pod.metadata.annotations.get(REPORT):
        texts.insert(0, annotation)
    found, problem = None, ""
    for text in texts:
        try:
            found = reports.read(text).after(found)
        except ValueError as error:
            problem = str(error)
    return found, problem


def _requests(pod: _Pod) -> tuple[tuple[str, int], ...]:
    spec, meta, status = pod.spec, pod.metadata, pod.status
    parts: dict[str, Any] = {
        "containers": _resized(spec.containers, status.container_statuses, status),
        "initContainers": _resized(spec.init_containers, status.init_container_statuses, status),
        "overhead": spec.overhead,
        "resources": spec.resources,
        "affinity": spec.affinity,
        "hostNetwork": spec.host_network,
    }
    [by_itself] = alone([(parts, meta.labels)], meta.namespace)
    return tuple(sorted((pod_requests(parts) | by_itself).items()))


def _resized(
    containers: list[dict[str, Any]], statuses: Iterable[_ContainerStatus], pod: _PodStatus
) -> list[dict[str, Any]]:
    """Return containers with what kube-scheduler counts of those that are resized in place: the most of wanted and had."""
    had = {
        one.name: (one.resources.get("requests") or {}, one.allocated_resources) for one in statuses if one.resources
    }
    never = any(c.type == "PodResizePending" and c.reason == "Infeasible" for c in pod.conditions)

    def counted(container: dict[str, Any]) -> dict[str, Any]:
        wanted = (container.get("resources") or {}).get("requests") or {}
        others = [one for one in had.get(container["name"], ()) if one and one != wanted]
        return (
            {**container, "resources": {"requests": most((*others, {} if never else wanted))}} if others else container
        )

    return [counted(container) for container in containers]


def _exit_code(status: _PodStatus) -> int | None:
    codes = [
        c.state.terminated.exit_code
        for c in (*status.init_container_statuses, *status.container_statuses)
        if c.state.terminated
    ]
    return next((code for code in codes if code), codes[0] if codes else None)


def _waits(status: _PodStatus) -> str:
    return obstacle(c.state.waiting for c in (*status.init_container_statuses, *status.container_statuses))


def _exits(status: _PodStatus) -> tuple[tuple[str, int], ...]:
    return tuple(
        (c.name, c.state.terminated.exit_code)
        for c in (*status.init_container_statuses, *status.container_statuses)
        if c.state.terminated and c.state.terminated.exit_code
    )
