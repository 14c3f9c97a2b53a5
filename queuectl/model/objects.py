"""What the core knows of a cluster: nodes, flavors, queues and gangs as frozen values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from math import inf
from typing import Any

from queuectl.model.checkpoint import Report, Saving
from queuectl.model.failures import NO_RULES, FailurePolicy
from queuectl.model.gpus import NO_GPUS, Gpus
from queuectl.model.policy import Cap, Cell, FlavorChoice, OverQuota, Preemption, Quota, StopPolicy
from queuectl.model.reasons import Why


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
    seconds: int | None = None  # of NoExecute, after which the pod is evicted all the same


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
class GpuNeed:
    """What a pod's GPUs have to be."""

    resources: tuple[str, ...] = ()  # extended ones that it requests; which of them are GPUs, the flavor tells
    min_memory: int = 0  # bytes
    shared: bool = False  # whether GPUs that several pods share will do
    slice: str | None = ""  # the profile of slices that are called GPUs; empty: whole ones; None: all the same
    level: str = ""  # inside a node, of which the devices of each ``mates`` pods share a domain; empty: none
    mates: int = 1
    most: int = 0  # that a node may have, so that all of them share a domain whichever pods get; 0: any number


@dataclass(frozen=True, slots=True)
class Constraints:
    """Where a role's pods may go. Hashable: equal constraints share one eligibility mask."""

    selector: tuple[tuple[str, str], ...] = ()
    terms: tuple[NodeTerm, ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    gpu: GpuNeed | None = None  # None: its GPUs, if it has any, may be anything
    volumes: tuple[tuple[NodeTerm, ...], ...] = ()  # from where its volumes can be reached: of each one term
    until: float = 0.0  # Unix seconds; not onto a node that a maintenance window takes before
    closed: bool = False  # whether nodes that are closed for now will do, too


@dataclass(frozen=True, slots=True)
class Topology:
    """How close the pods of a role have to be, by names of topology levels (KEP-2724)."""

    required: str = ""  # all pods in one domain of this level
    preferred: str = ""  # or, if that can't be had, in one of a wider level, or in as few of the widest as possible
    slice_level: str = ""  # each ``slice_size`` pods in one domain of this level
    slice_size: int = 1
    balanced: bool = False  # of several domains each gets equally many


ANYWHERE = Topology()


@dataclass(frozen=True, slots=True)
class Together:
    """What the pods of all roles of a gang have in common; of the roles with GPUs, if any has."""

    required: str = ""  # the level of which all are in one domain
    preferred: str = ""
    same_model: bool = True  # all GPUs of one model
    same_driver: bool = False


ALIKE = Together()


@dataclass(frozen=True, slots=True)
class Role:
    """Pods of a gang that share a template. ``requests`` is per pod, sorted by resource, ``pods`` among them."""

    name: str
    pods: int
    requests: tuple[tuple[str, int], ...]
    constraints: Constraints = Constraints()
    must_succeed: bool = True
    least: int | None = None  # pods with which the gang may start; None: all of them
    topology: Topology = ANYWHERE


@dataclass(frozen=True, slots=True)
class Alternative:
    """GPU models that will do, and how many pods of a role it then takes; of roles left out, as many as ever."""

    models: tuple[str, ...] = ()
    pods: tuple[tuple[str, int], ...] = ()


class Shape:
    """What two gangs have to have alike to be of one shape; hashed once, for it is looked up often."""

    __slots__ = ("_hash", "_values")

    def __init__(self, values: tuple[object, ...]) -> None:
        """Take the values."""
        self._values = values
        self._hash = hash(values)

    def __hash__(self) -> int:
        """Return the hash of the values."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Tell whether all values are equal."""
        if self is other:
            return True
        return isinstance(other, Shape) and self._hash == other._hash and self._values == other._values


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How long a gang may hold its places, by its own limits, and what an end before costs it."""

    start: int = 300  # seconds from its admission until all of its pods must be ready
    run: int | None = None  # seconds that it may run then; None: without end
    saves: bool = False  # whether it can be asked to save its work, and go on elsewhere

    @property
    def movable(self) -> bool:
        """Tell whether it has no end that could be waited for, but loses no work when it has to go."""
        return self.run is None and self.saves

    def end(self, now: float) -> float:
        """Return the Unix seconds at which it is over at the latest if it is admitted now."""
        return inf if self.run is None else now + self.start + self.run


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
    alternatives: tuple[Alternative, ...] = ()  # to these models and pods, the best first
    together: Together = ALIKE
    user: str = ""  # who submitted it, as the API server says
    preemptible: bool = True  # False: nobody takes from it, and it does not borrow
    preempts: bool = True  # False: it takes from nobody
    waits_since: float | None = None  # Unix seconds of its latest requeue; None: its submission
    hold: bool = False
    not_before: float = 0.0  # Unix seconds; a requeued gang backs off until then
    last_end: str = ""  # why the attempt before ended
    lifetime: Lifetime = Lifetime()  # with which gangs of one shape differ while maintenance windows are ahead

    @cached_property
    def shape(self) -> "Shape":
        """Gangs of one shape fit or fail alike."""
        return Shape(
            (self.queue, self.gpu_models, self.alternatives, self.together, self.roles, self.preemptible, self.preempts)
        )

    def but(self, **changes: object) -> "Gang":
        """Return the gang with other values, as ``replace`` does; faster, for a hundred thousand come at once."""
        other = object.__new__(Gang)
        values = self.__dict__ | changes
        if "shape" in values and any(values[name] != getattr(self, name) for name in _IN_SHAPE & changes.keys()):
            del values["shape"]
        object.__setattr__(other, "__dict__", values)
        return other


_IN_SHAPE = {"queue", "gpu_models", "alternatives", "together", "roles", "preemptible", "preempts"}


NODE_LEVEL = "node"  # the level below all others that every flavor has


@dataclass(frozen=True, slots=True)
class Level:
    """A level of topology: nodes of one value of the label, and of the labels of wider levels, form a domain."""

    name: str
    label: str


@dataclass(frozen=True, slots=True)
class Inside:
    """A level inside a node: so many GPUs of it share a fast interconnect."""

    name: str
    gpus: int
    attribute: str = ""  # of devices, whose value tells the domain; empty: the number in their names does


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Devices that claims name, by dynamic resource allocation, and what jobs call them."""

    driver: str
    device_class: str
    resource: str  # by which jobs ask for them, and quotas count them
    identity: str  # the attribute by whose value a claim selects one of them, with its domain
    attributes: tuple[tuple[str, str], ...] = ()  # others of the driver, without these values, are not meant


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a node that a claim can name."""

    name: str  # of the resource that stands for it
    resource: str  # that it counts as
    domains: tuple[tuple[str, str], ...] = ()  # (level inside the node, domain), the largest level first


@dataclass(frozen=True, slots=True)
class Flavor:
    """A kind of node: those that carry all of ``node_labels``."""

    name: str
    node_labels: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    gpu_model: str = ""
    levels: tuple[Level, ...] = ()  # the widest first
    inside: tuple[Inside, ...] = ()  # the largest first
    # Names that GPUs have here, and what a unit of each counts as, in amounts of cards; others count by their name.
    gpus: tuple[tuple[str, int], ...] = field(default=(), hash=False)
    devices: DeviceKind | None = None  # None: a device plugin announces them, and the kubelet picks


class QueueOrder(StrEnum):
    """What a gang at the head that can't start means for those behind it."""

    STRICT_FIFO = "StrictFIFO"
    BEST_EFFORT_FIFO = "BestEffortFIFO"


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue with its quota per (flavor, resource), flavors in the order they are tried."""

    name: str
    parent: str = ""
    order: QueueOrder = QueueOrder.BEST_EFFORT_FIFO
    quotas: Mapping[Cell, Quota] = field(default_factory=dict)
    weight: Fraction = Fraction(1)
    preemption: Preemption = field(default_factory=Preemption)
    choice: FlavorChoice = field(default_factory=FlavorChoice)
    namespaces: tuple[Requirement, ...] | None = None  # what labels of namespaces that may use it; None: all may
    stop: StopPolicy = StopPolicy.NONE
    over_quota: OverQuota = OverQuota.KEEP
    max_running: int | None = None  # gangs of the queue itself that hold room
    max_grace_seconds: int | None = None  # that its jobs may take to leave
    per_user: Cap = field(default_factory=Cap)
    per_namespace: Cap = field(default_factory=Cap)
    changed_by: str = ""  # who wrote the spec, as the API server says
    change_why: str = ""  # and why, in that person's words
    generation: int = field(default=0, compare=False)
    resource_version: str = field(default="", compare=False)
    status: Mapping[str, Any] = field(default_factory=dict, compare=False)  # as it stands in the API server

    @property
    def nominal(self) -> dict[Cell, int]:
        """Return the nominal quotas alone."""
        return {cell: quota.nominal for cell, quota in self.quotas.items()}


@dataclass(frozen=True, slots=True)
class Mark:
    """What queuectl has noted on a node: whose maintenance it is, and what of its state queuectl has made."""

    maintenance: str = ""
    cordoned: bool = False
    held: bool = False  # back from the GPU Operator
    done: bool = False  # somebody says that the work is


@dataclass(frozen=True, slots=True)
class Node:
    """A node as kube-scheduler would see it."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    allocatable: Mapping[str, int] = field(default_factory=dict)
    unschedulable: bool = False
    ready: bool = True
    gpus: Gpus = NO_GPUS
    devices: tuple[Device, ...] = ()  # its allocatable has them, too: 1 of each, and all of what they count as
    broken: Mapping[str, int] = field(default_factory=dict)  # what it has and does not offer, of device plugins'
    mark: Mark = Mark()
    faults: tuple[str, ...] = ()  # what conditions say of it that counts, for people
    avoided: str = ""  # why nobody new goes there for now, for people; empty: it is not avoided
    taken_at: float | None = None  # Unix seconds at which a maintenance window takes it; None: none is known
    unready_since: float | None = None  # Unix seconds; None: it is ready, or has never been
    uid: str = ""  # another one of its name has another
    created_at: float = 0.0  # Unix seconds
    forgiven_at: float = field(default=0.0, compare=False)  # Unix seconds: offences until then do not count
    suspect: str = field(default="", compare=False)  # why it is suspect, as it stands in the API server

    @property
    def closed(self) -> bool:
        """Tell whether nobody new goes there for now, whatever they tolerate; that ends by itself or by people."""
        return bool(self.avoided) or self.unschedulable or not self.ready


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """What a PriorityClass means for the jobs that name it."""

    name: str
    value: int
    preemptible: bool = True  # False: nobody takes from its jobs
    preempts: bool = True  # False: its jobs take from nobody


@dataclass(frozen=True, slots=True)
class Budget:
    """A PodDisruptionBudget: of the pods that it covers, ``allowed`` may be evicted now."""

    namespace: str
    name: str
    selector: tuple[Requirement, ...] | None  # None covers nothing
    allowed: int

    @property
    def key(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Namespace:
    """What is read of a namespace: its labels tell which queues its jobs may use."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


class Place(StrEnum):
    """What a reserved node is worth to a gang that is not yet bound there."""

    GOOD = "Good"
    CROWDED = "Crowded"  # others' pods took room that was reserved
    CLOSED = "Closed"  # unschedulable, not ready or newly tainted
    TAKEN = "Taken"  # a maintenance window takes it before the gang would be over
    GONE = "Gone"
    OUTGROWN = "Outgrown"  # the gang's pods request more than is reserved for them


@dataclass(frozen=True, slots=True)
class Pod:
    """What is read of a pod. ``workload``, ``attempt``, ``role`` and ``index`` are set on our own only."""

    uid: str
    namespace: str
    name: str
    resource_version: str
    node: str = ""  # empty until bound
    phase: str = "Pending"
    ready: bool = False
    gated: bool = False
    deleting: bool = False
    told_at: float = 0.0  # Unix seconds: since when it is being deleted
    stops_by: float | None = None  # Unix seconds: until when it may take to stop; None: it is not deleted
    exit_code: int | None = None
    exits: tuple[tuple[str, int], ...] = ()  # of one of ours that failed: containers, and their codes other than 0
    conditions: tuple[tuple[str, str], ...] = ()  # of the same: type and status
    disrupted: str = ""  # message of a DisruptionTarget condition, or why its kubelet did not take it
    disrupted_by: str = ""  # that condition's reason, or the kubelet's
    workload: str = ""
    attempt: int = 0
    role: str = ""
    index: int = 0
    requests: tuple[tuple[str, int], ...] = ()  # while it is bound to a node, and of ours while it is gated
    selector: tuple[tuple[str, str], ...] = ()  # of nodes, by their labels; of ours while it is gated
    waits: str = ""  # what keeps a container from starting, for people
    ip: str = ""
    container: str = ""  # its first
    ask: str = ""  # as it was asked to save its work, by annotation
    report: Report | None = None  # what it says that it has saved
    report_problem: str = ""  # why that can't be read

    @property
    def ended(self) -> bool:
        """Tell whether the pod has stopped by itself; it then holds no room."""
        return self.phase in {"Succeeded", "Failed"}


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """What somebody asks for with a running job: that it moves, with others, so that a waiting one can start."""

    uid: str = ""  # of the one that waits
    job: str = ""  # its namespace and name
    moves: tuple[tuple[str, int], ...] = ()  # uid and attempt of each that is to move
    within: float = 0.0  # seconds of running after which it must have made up for the moves
    until: float = 0.0  # Unix seconds; not carried out later
    by: str = ""  # who asks, as the API server says
    problem: str = ""  # what is wrong with the request itself


@dataclass(frozen=True, slots=True)
class VolumeUse:
    """A volume of a role's pods that is there by a claim."""

    role: str
    name: str
    claim: str = ""  # name of the claim; empty: each pod makes one of its own
    storage_class: str | None = None  # of what each pod makes; None: the cluster's default


@dataclass(frozen=True)
class Job:
    """A TrainingJob as the controller works with it. ``problem`` is set when its spec can't be used."""

    gang: Gang  # its priority is that of priorityClassName, once that is looked up
    generation: int
    resource_version: str
    priority_class: str = ""
    deleting: bool = False
    has_finalizer: bool = False
    start_deadline_seconds: int = 300
    backoff_limit: int = 3
    failures: FailurePolicy = NO_RULES
    replaces_lost_pods: bool = False  # whether a gang that lost some runs on until they are replaced
    max_run_seconds: int | None = None
    ttl_seconds: int | None = None
    templates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # role → pod template
    status: Mapping[str, Any] = field(default_factory=dict)  # as it stands in the API server
    unpromised: tuple[str, ...] = ()  # fields of its pods that no reservation takes into account
    volumes: tuple[VolumeUse, ...] = ()
    move: MoveRequest | None = None  # that it is asked for and has not been answered
    problem: Why | None = None
    saving: Saving | None = None  # how its pods are asked to save their work
    save_asked_at: float | None = None  # Unix seconds: when its user last asked for a checkpoint
    max_grace_seconds: int | None = None  # that its queue lets it take to leave
