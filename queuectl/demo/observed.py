"""What the observer reads of an object, decoded by itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from queuectl.kube.names import ATTEMPT_LABEL, GATE, QUEUE_LABEL, WORKLOAD_LABEL
from queuectl.model.resources import is_gpu, parse_quantity, pod_requests

Object = Mapping[str, Any]
AttemptKey = tuple[str, str]  # workload uid, number of the attempt
QuotaKey = tuple[str, str]  # flavor, resource

DEFAULT_START_DEADLINE_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod, anybody's. ``attempt`` and ``queue`` are set on those of a gang."""

    uid: str
    name: str
    attempt: AttemptKey | None
    queue: str
    gated: bool
    node: str  # empty until bound
    target: str  # the node it is bound or pinned to, else empty
    phase: str
    deleting: bool
    requests: Mapping[str, int]

    @property
    def finished(self) -> bool:
        """Tell whether it has stopped by itself and holds nothing any more."""
        return self.phase in {"Succeeded", "Failed"}

    @property
    def holds(self) -> bool:
        """Tell whether it takes room of its node."""
        return bool(self.node) and not self.finished

    @property
    def uses_quota(self) -> bool:
        """Tell whether it counts against its queue's quota."""
        return self.attempt is not None and not self.gated and not self.finished

    @property
    def gpus(self) -> int:
        """How many GPUs it asks for."""
        return sum(amount for resource, amount in self.requests.items() if is_gpu(resource))


@dataclass(frozen=True, slots=True)
class Gang:
    """What a TrainingJob's spec demands of its pods."""

    name: str
    pods: int  # with which it may run: the fewest, if it is elastic
    start_deadline: float  # seconds
    repair: float = 0.0  # seconds that it may take to replace lost pods, while the others run


@dataclass(slots=True)
class Attempt:
    """The pods of one try at running a gang, by what was seen of them."""

    first_seen: float
    pods: dict[str, Pod] = field(default_factory=dict)  # those that exist, by uid
    most: int = 0  # existed at one time
    succeeded: set[str] = field(default_factory=set)
    short_since: float | None = None  # past the deadline with pods missing


class History:
    """Amounts by key as they were in force over time."""

    def __init__(self) -> None:
        """Start without any."""
        self._steps: list[tuple[float, Mapping[Any, int]]] = []

    def put(self, now: float, amounts: Mapping[Any, int]) -> None:
        """Say what is in force from now on."""
        if not self._steps or self._steps[-1][1] != amounts:
            self._steps.append((now, amounts))

    @property
    def latest(self) -> Mapping[Any, int]:
        """What is in force."""
        return self._steps[-1][1] if self._steps else {}

    def since(self, moment: float) -> list[Mapping[Any, int]]:
        """Return what was in force at the moment or later; the oldest known where nothing is known of then."""
        before = sum(1 for at, _ in self._steps if at <= moment)
        return [amounts for _, amounts in self._steps[max(0, before - 1) :]]


def pod(item: Object) -> Pod:
    """Read a Pod."""
    meta, spec = item["metadata"], item["spec"]
    labels = meta.get("labels") or {}
    uid = labels.get(WORKLOAD_LABEL)
    node = spec.get("nodeName") or ""
    return Pod(
        uid=meta["uid"],
        name=meta["name"],
        attempt=(uid, labels.get(ATTEMPT_LABEL, "")) if uid else None,
        queue=labels.get(QUEUE_LABEL, ""),
        gated=any(gate["name"] == GATE for gate in spec.get("schedulingGates") or ()),
        node=node,
        target=node or _pin(spec),
        phase=(item.get("status") or {}).get("phase", ""),
        deleting=bool(meta.get("deletionTimestamp")),
        requests=pod_requests(spec),
    )


def gang(item: Object) -> Gang:
    """Read a TrainingJob."""
    spec = item["spec"]
    deadline = spec.get("startDeadlineSeconds") or DEFAULT_START_DEADLINE_SECONDS
    return Gang(
        name=item["metadata"]["name"],
        pods=sum(role.get("minReplicas", role["replicas"]) for role in spec["roles"]),
        start_deadline=deadline,
        repair=2 * deadline if spec.get("replaceLostPods") else 0.0,
    )


def quotas(item: Object, field: str = "nominal") -> dict[QuotaKey, int]:
    """Read a limit of each of a Queue's quotas that has it."""
    return {
        (quota["flavor"], quota["resource"]): parse_quantity(quota["resource"], quota[field])
        for quota in item["spec"].get("quotas") or ()
        if quota.get(field) is not None
    }


def allocatable(item: Object) -> dict[str, int]:
    """Read what a Node has."""
    has = (item.get("status") or {}).get("allocatable") or {}
    return {resource: parse_quantity(resource, amount) for resource, amount in has.items()}


def _pin(spec: Object) -> str:
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    for term in required.get("nodeSelectorTerms") or ():
        for wanted in term.get("matchFields") or ():
            if wanted["key"] == "metadata.name" and len(wanted["values"]) == 1:
                return str(wanted["values"][0])
    return ""
