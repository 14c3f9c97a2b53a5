"""What the core knows of a cluster: nodes, flavors, queues and gangs as frozen values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Taint:
    """A node's taint; only ``NoSchedule`` and ``NoExecute`` keep pods away."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class Toleration:
    """A pod's toleration, with the API server's meaning of empty fields."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One expression of a node selector term."""

    key: str
    operator: str  # In, NotIn, Exists, DoesNotExist, Gt, Lt
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeTerm:
    """Expressions that must all hold; the terms of an affinity are alternatives."""

    labels: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()


@dataclass(frozen=True, slots=True)
class Constraints:
    """Where a role's pods may go. Hashable: equal constraints share one eligibility mask."""

    selector: tuple[tuple[str, str], ...] = ()
    terms: tuple[NodeTerm, ...] = ()
    tolerations: tuple[Toleration, ...] = ()


@dataclass(frozen=True, slots=True)
class Role:
    """Pods of a gang that share a template. ``requests`` is per pod, sorted by resource."""

    name: str
    pods: int
    requests: tuple[tuple[str, int], ...]
    constraints: Constraints = Constraints()
    must_succeed: bool = True


@dataclass(frozen=True)
class Gang:
    """A workload as the core sees it: all of its pods start together or none does."""

    uid: str
    namespace: str
    name: str
    queue: str
    priority: int
    submitted_at: float  # Unix seconds of the first submission; a requeue keeps it
    roles: tuple[Role, ...]
    seq: int = 0  # order of arrival in the ledger, for submissions of the same second
    gpu_models: tuple[str, ...] = ()
    hold: bool = False
    not_before: float = 0.0  # Unix seconds; a requeued gang backs off until then

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """Gangs of one shape fit or fail alike."""
        return (self.queue, self.gpu_models, self.roles)

    @property
    def pods(self) -> int:
        """Number of pods of the whole gang."""
        return sum(role.pods for role in self.roles)


@dataclass(frozen=True, slots=True)
class Flavor:
    """A kind of node: those that carry all of ``node_labels``."""

    name: str
    node_labels: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    gpu_model: str = ""


class QueueOrder(StrEnum):
    """What a gang at the head that can't start means for those behind it."""

    STRICT_FIFO = "StrictFIFO"
    BEST_EFFORT_FIFO = "BestEffortFIFO"


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue with its nominal quota per (flavor, resource), flavors in the order they are tried."""

    name: str
    parent: str = ""
    order: QueueOrder = QueueOrder.BEST_EFFORT_FIFO
    nominal: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Node:
    """A node as kube-scheduler would see it."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    allocatable: Mapping[str, int] = field(default_factory=dict)
    unschedulable: bool = False
    ready: bool = True
