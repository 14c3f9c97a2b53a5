"""From the API server's bytes to the vocabulary; only fields that are used are read."""

import json
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from fractions import Fraction
from typing import Any

import msgspec

from queuectl.kube import failures, faults, moves, reports
from queuectl.kube.alone import alone, unpromised
from queuectl.kube.informer import Item
from queuectl.kube.maintenance import mark
from queuectl.kube.names import (
    ASK,
    ATTEMPT_LABEL,
    CHANGE_WHY,
    CHANGED_BY,
    EXTENDED_RESOURCE_CLAIM,
    FINALIZER,
    FORGIVEN,
    GATE,
    INDEX_LABEL,
    JOB_LABEL,
    PREEMPTIBLE,
    QUEUE_LABEL,
    REPORT,
    ROLE_LABEL,
    SAVE_ASKED,
    SUBMITTED_BY,
    SUSPECT,
    WORKLOAD_LABEL,
)
from queuectl.kube.selectors import node_terms, selector
from queuectl.kube.volumes import uses
from queuectl.kube.waiting import Waiting, obstacle
from queuectl.model import gpus
from queuectl.model.checkpoint import ANSWERS, Answer, Report, Saving, Signal
from queuectl.model.devices import Allocated, DeviceClaim, Listed, Slice, qualified
from queuectl.model.objects import (
    Alternative,
    Budget,
    Constraints,
    DeviceKind,
    Flavor,
    Gang,
    GpuNeed,
    Inside,
    Job,
    Level,
    Lifetime,
    Namespace,
    Node,
    Pod,
    PriorityClass,
    Queue,
    QueueOrder,
    Role,
    Taint,
    Together,
    Toleration,
    Topology,
    VolumeUse,
)
from queuectl.model.policy import (
    Cap,
    FlavorChoice,
    OverQuota,
    Preemption,
    Prefer,
    Quota,
    Reclaim,
    Stop,
    StopPolicy,
    VictimChoice,
    Within,
)
from queuectl.model.reasons import Reason, Why, why
from queuectl.model.resources import CARD, CARDS, is_extended, most, parse_quantity, pod_requests

Bytes = msgspec.Raw | bytes


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    deletion_grace_period_seconds: int | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: list[str] = []

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


class _Condition(msgspec.Struct, rename="camel"):
    type: str
    status: str
    message: str = ""
    reason: str = ""
    last_transition_time: datetime | None = None


# Nodes


class _Taint(msgspec.Struct):
    key: str
    effect: str
    value: str = ""


class _NodeSpec(msgspec.Struct):
    taints: list[_Taint] = []
    unschedulable: bool = False


class _NodeStatus(msgspec.Struct):
    allocatable: dict[str, str] = {}
    capacity: dict[str, str] = {}
    conditions: list[_Condition] = []


class _Node(msgspec.Struct):
    metadata: _Meta
    spec: _NodeSpec = msgspec.field(default_factory=_NodeSpec)
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)


_decode_node = msgspec.json.Decoder(_Node).decode


def node(raw: Bytes, faulty: Collection[tuple[str, str]] = ()) -> Item[Node]:
    """Decode a node; raises ValueError when it announces nonsense. ``faulty``: the conditions that count as faults."""
    seen = _decode_node(raw)
    held = {c.type: c for c in seen.status.conditions if c.status == "True"}
    since = next((c.last_transition_time for c in seen.status.conditions if c.type == "Ready"), None)
    offers = {resource: parse_quantity(resource, q) for resource, q in seen.status.allocatable.items()}
    has = {
        resource: parse_quantity(resource, q) for resource, q in seen.status.capacity.items() if is_extended(resource)
    }
    value = Node(
        name=seen.metadata.name,
        labels=seen.metadata.labels,
        taints=tuple(Taint(t.key, t.value, t.effect) for t in seen.spec.taints),
        allocatable=offers,
        broken={resource: n - offers.get(resource, 0) for resource, n in has.items() if n > offers.get(resource, 0)},
        unschedulable=seen.spec.unschedulable,
        ready="Ready" in held,
        unready_since=since.timestamp() if since is not None and "Ready" not in held else None,
        forgiven_at=_time(seen.metadata.annotations.get(FORGIVEN)) or 0.0,
        suspect=held[SUSPECT].message if SUSPECT in held else "",
        gpus=gpus.read(seen.metadata.labels),
        mark=mark(seen.metadata.annotations),
        faults=faults.of_node(seen.status.conditions, faulty),
    )
    return Item(seen.metadata.name, seen.metadata.resource_version, value)


# Pods


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
    conditions: list[_Condition] = []
    container_statuses: list[_ContainerStatus] = []
    init_container_statuses: list[_ContainerStatus] = []


class _Pod(msgspec.Struct):
    metadata: _Meta
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


_decode_pod = msgspec.json.Decoder(_Pod).decode


def pod(raw: Bytes) -> Item[Pod]:
    """Decode a pod, ours or another's."""
    seen = _decode_pod(raw)
    meta, labels = seen.metadata, seen.metadata.labels
    conditions = {c.type: c for c in seen.status.conditions if c.status == "True"}
    disrupted = conditions.get("DisruptionTarget") or _refused(seen.status)
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
        attempt=_number(labels.get(ATTEMPT_LABEL)),
        role=labels.get(ROLE_LABEL, ""),
        index=_number(labels.get(INDEX_LABEL)),
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


def _refused(status: _PodStatus) -> _Condition | None:
    """Return why a kubelet did not take a pod that was bound to its node, if that is so."""
    if status.phase != "Failed" or not status.reason or status.container_statuses or status.init_container_statuses:
        return None
    return _Condition("", "True", f"{status.reason}: {status.message}", status.reason)


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


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


# Priority classes


class _PriorityClass(msgspec.Struct, rename="camel"):
    metadata: _Meta
    value: int = 0
    preemption_policy: str = ""


_decode_priority_class = msgspec.json.Decoder(_PriorityClass).decode


def priority_class(raw: Bytes) -> Item[PriorityClass]:
    """Decode a PriorityClass."""
    seen = _decode_priority_class(raw)
    value = PriorityClass(
        seen.metadata.name,
        seen.value,
        preemptible=seen.metadata.annotations.get(PREEMPTIBLE) != "false",
        preempts=seen.preemption_policy != "Never",
    )
    return Item(seen.metadata.name, seen.metadata.resource_version, value)


# Devices


class _Device(msgspec.Struct, rename="camel"):
    name: str
    attributes: dict[str, dict[str, Any]] = {}  # name → type → value, or list of values
    capacity: dict[str, dict[str, Any]] = {}
    taints: list[_Taint] = []
    consumes_counters: list[Any] = []
    allow_multiple_allocations: bool = False


class _Pool(msgspec.Struct, rename="camel"):
    name: str
    generation: int = 0
    resource_slice_count: int = 1


class _SliceSpec(msgspec.Struct, rename="camel"):
    driver: str
    pool: _Pool
    node_name: str = ""
    devices: list[_Device] = []


class _Slice(msgspec.Struct):
    metadata: _Meta
    spec: _SliceSpec


_decode_slice = msgspec.json.Decoder(_Slice).decode


def resource_slice(raw: Bytes) -> Item[Slice]:
    """Decode a ResourceSlice; devices that are of no one node are left out."""
    seen = _decode_slice(raw)
    spec = seen.spec
    value = Slice(
        name=seen.metadata.name,
        node=spec.node_name,
        driver=spec.driver,
        pool=spec.pool.name,
        generation=spec.pool.generation,
        slices=spec.pool.resource_slice_count,
        devices=tuple(
            Listed(
                device.name,
                {qualified(name, spec.driver): _as_text(value) for name, value in device.attributes.items()},
                _memory(device, spec.driver),
                _unusable(device),
            )
            for device in (spec.devices if spec.node_name else ())
        ),
    )
    return Item(seen.metadata.name, seen.metadata.resource_version, value)


def _memory(device: _Device, driver: str) -> int:
    capacity = {qualified(name, driver): each for name, each in device.capacity.items()}
    return parse_quantity("memory", capacity.get(qualified("memory", driver), {}).get("value", 0))


def _as_text(attribute: Mapping[str, Any]) -> str:
    [value] = attribute.values()
    return value if isinstance(value, str) else json.dumps(value)


def _unusable(device: _Device) -> str:
    taint = next((taint for taint in device.taints if taint.effect in {"NoSchedule", "NoExecute"}), None)
    if taint is not None:
        return f"is tainted with {taint.key}"
    if device.allow_multiple_allocations:
        return "may be shared by several claims"
    return "shares counters with other devices" if device.consumes_counters else ""


class _Result(msgspec.Struct, rename="camel"):
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None


class _Results(msgspec.Struct):
    results: list[_Result] = []


class _Allocation(msgspec.Struct):
    devices: _Results = msgspec.field(default_factory=_Results)


class _ClaimStatus(msgspec.Struct):
    allocation: _Allocation | None = None


class _Claim(msgspec.Struct):
    metadata: _Meta
    status: _ClaimStatus = msgspec.field(default_factory=_ClaimStatus)


_decode_claim = msgspec.json.Decoder(_Claim).decode


def resource_claim(raw: Bytes) -> Item[DeviceClaim]:
    """Decode a ResourceClaim, ours or another's."""
    seen = _decode_claim(raw)
    meta, labels, allocation = seen.metadata, seen.metadata.labels, seen.status.allocation
    value = DeviceClaim(
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        deleting=meta.deletion_timestamp is not None,
        workload=labels.get(WORKLOAD_LABEL, ""),
        attempt=_number(labels.get(ATTEMPT_LABEL)),
        role=labels.get(ROLE_LABEL, ""),
        index=_number(labels.get(INDEX_LABEL)),
        devices=tuple(
            Allocated(result.driver, result.pool, result.device)
            for result in (allocation.devices.results if allocation else ())
            if not result.admin_access  # takes the device from nobody
        ),
        implied=EXTENDED_RESOURCE_CLAIM in meta.annotations,
    )
    return Item(meta.key, meta.resource_version, value)


# Disruption budgets


class _BudgetSpec(msgspec.Struct):
    selector: dict[str, Any] | None = None


class _BudgetStatus(msgspec.Struct, rename="camel"):
    disruptions_allowed: int = 0
    observed_generation: int = 0


class _Budget(msgspec.Struct):
    metadata: _Meta
    spec: _BudgetSpec = msgspec.field(default_factory=_BudgetSpec)
    status: _BudgetStatus = msgspec.field(default_factory=_BudgetStatus)


_decode_budget = msgspec.json.Decoder(_Budget).decode


def budget(raw: Bytes) -> Item[Budget]:
    """Decode a PodDisruptionBudget; one whose status is of an older spec allows nothing."""
    seen = _decode_budget(raw)
    meta, status = seen.metadata, seen.status
    allowed = status.disruptions_allowed if status.observed_generation >= meta.generation else 0
    value = Budget(meta.namespace, meta.name, selector(seen.spec.selector), allowed)
    return Item(meta.key, meta.resource_version, value)


# Namespaces


class _Named(msgspec.Struct):
    metadata: _Meta


_decode_named = msgspec.json.Decoder(_Named).decode


def namespace(raw: Bytes) -> Item[Namespace]:
    """Decode a namespace."""
    seen = _decode_named(raw)
    return Item(seen.metadata.name, seen.metadata.resource_version, Namespace(seen.metadata.name, seen.metadata.labels))


# Our own kinds


class _Object(msgspec.Struct):
    metadata: _Meta
    spec: dict[str, Any] = {}
    status: dict[str, Any] = {}


_decode_object = msgspec.json.Decoder(_Object).decode


def flavor(raw: Bytes) -> Item[Flavor]:
    """Decode a ResourceFlavor."""
    seen = _decode_object(raw)
    topology = seen.spec.get("topology") or {}
    value = Flavor(
        name=seen.metadata.name,
        node_labels=tuple(sorted((seen.spec.get("nodeLabels") or {}).items())),
        tolerations=_tolerations(seen.spec.get("tolerations")),
        gpu_model=seen.spec.get("gpuModel") or "",
        levels=tuple(Level(level["name"], level["nodeLabel"]) for level in topology.get("levels") or ()),
        inside=tuple(
            Inside(level["name"], level["gpus"], level.get("attribute") or "")
            for level in topology.get("insideNode") or ()
        ),
        gpus=tuple((gpu["resource"], _weight(gpu)) for gpu in seen.spec.get("gpus") or ()),
        devices=_devices(seen.spec.get("devices")),
    )
    return Item(seen.metadata.name, seen.metadata.resource_version, value)


def _devices(given: Mapping[str, Any] | None) -> DeviceKind | None:
    if not given:
        return None
    attributes = tuple(sorted((given.get("attributes") or {}).items()))
    identity = given.get("identity") or "uuid"
    return DeviceKind(given["driver"], given["deviceClassName"], given["resource"], identity, attributes)


def _weight(gpu: Mapping[str, Any]) -> int:
    """Return what a unit of a resource counts as, in amounts of cards; what doesn't come out even is rounded up."""
    if gpu.get("weight") is None:
        return gpus.weight(gpu["resource"]) or CARD
    part, _, parts = gpu["weight"].partition("/")
    return -(-CARD * int(part) // int(parts))


def queue(raw: Bytes) -> Item[Queue]:
    """Decode a Queue."""
    seen = _decode_object(raw)
    value = Queue(
        name=seen.metadata.name,
        parent=seen.spec.get("parent") or "",
        order=QueueOrder(seen.spec.get("order") or QueueOrder.BEST_EFFORT_FIFO),
        quotas={(quota["flavor"], quota["resource"]): _quota(quota) for quota in seen.spec.get("quotas") or ()},
        weight=Fraction(parse_quantity("cpu", seen.spec.get("weight", 1)), 1000),
        preemption=_preemption(seen.spec.get("preemption") or {}),
        choice=_choice(seen.spec.get("flavorChoice") or {}),
        namespaces=selector(seen.spec.get("namespaceSelector")),
        stop=StopPolicy(seen.spec.get("stopPolicy") or StopPolicy.NONE),
        over_quota=OverQuota(seen.spec.get("whenOverQuota") or OverQuota.KEEP),
        max_running=seen.spec.get("maxRunning"),
        max_grace_seconds=seen.spec.get("maxGraceSeconds"),
        per_user=_cap(seen.spec.get("perUser") or {}),
        per_namespace=_cap(seen.spec.get("perNamespace") or {}),
        changed_by=seen.metadata.annotations.get(CHANGED_BY, ""),
        change_why=seen.metadata.annotations.get(CHANGE_WHY, "").strip(),
        generation=seen.metadata.generation,
        resource_version=seen.metadata.resource_version,
        status=seen.status,
    )
    return Item(seen.metadata.name, seen.metadata.resource_version, value)


def _quota(quota: Mapping[str, Any]) -> Quota:
    amounts = {
        name: max(0, parse_quantity(quota["resource"], quota[name]))
        for name in ("nominal", "borrowingLimit", "lendingLimit")
        if quota.get(name) is not None
    }
    return Quota(amounts["nominal"], amounts.get("borrowingLimit"), amounts.get("lendingLimit"))


def _cap(cap: Mapping[str, Any]) -> Cap:
    amounts = {
        resource: parse_quantity(resource, amount) for resource, amount in (cap.get("maxResources") or {}).items()
    }
    return Cap(cap.get("maxRunning"), tuple(sorted(amounts.items())))


def _preemption(rules: Mapping[str, Any]) -> Preemption:
    borrow = rules.get("borrowWithinCohort")
    return Preemption(
        Within(rules.get("withinQueue") or Within.NEVER),
        Reclaim(rules.get("reclaimFromCohort") or Reclaim.NEVER),
        borrow=borrow is not None,
        borrow_max_priority=(borrow or {}).get("maxPriority"),
        victims=VictimChoice(rules.get("victims") or VictimChoice.LEAST_WORK_LOST),
        wait_seconds=rules.get("waitSeconds") or 0,
        min_run_seconds=rules.get("minRunSeconds") or 0,
    )


def _choice(rules: Mapping[str, Any]) -> FlavorChoice:
    return FlavorChoice(
        Stop(rules.get("whenCanBorrow") or Stop.STOP),
        Stop(rules.get("whenCanPreempt") or Stop.NEXT),
        Prefer(rules.get("prefer") or Prefer.BORROWING),
    )


def job(raw: Bytes) -> Item[Job]:
    """Decode a TrainingJob; a spec that can't be used becomes its ``problem``, never an error."""
    seen = _decode_object(raw)
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
        save_asked_at=_time(meta.annotations.get(SAVE_ASKED)),
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


def _time(text: str | None) -> float | None:
    """Return Unix seconds; None for what is no time, which asks for nothing."""
    try:
        at = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return at.timestamp() if at and at.tzinfo else None


def _labels(role: Mapping[str, Any], spec: Mapping[str, Any], meta: _Meta) -> dict[str, str]:
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
        tolerations=_tolerations(spec.get("tolerations")),
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


def _tolerations(tolerations: Any) -> tuple[Toleration, ...]:
    return tuple(
        Toleration(
            t.get("key") or "",
            t.get("operator") or "Equal",
            t.get("value") or "",
            t.get("effect") or "",
            t.get("tolerationSeconds"),
        )
        for t in tolerations or ()
    )
