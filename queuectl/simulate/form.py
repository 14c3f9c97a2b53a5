"""The form of a scenario: a cluster, what happens when, and what is wanted of it. docs/scenarios.md describes it."""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import Field, StrictBool, StrictStr, ValidationError, field_validator, model_validator

from queuectl.kube.crds import RoleGpu, RoleTopology, TrainingJob
from queuectl.kube.failures import PodFailurePolicy
from queuectl.kube.fields import MAX_SECONDS, Name, QualifiedName, Quantity, RoleName
from queuectl.kube.flavor import ResourceFlavorSpec
from queuectl.kube.names import API_VERSION, SUBMITTED_BY
from queuectl.kube.parts import Int32, Labels, Part, Text
from queuectl.kube.problems import nearest, problems
from queuectl.kube.queue import QueueSpec
from queuectl.model.checkpoint import Signal
from queuectl.model.plan import PodKey
from queuectl.model.policy import FairRule, StopPolicy
from queuectl.model.reasons import BY_CODE
from queuectl.model.suspects import Healing

GPU = "nvidia.com/gpu"
ROLE = "worker"  # of a job that does not name its roles
MAX_CYCLES = 100_000

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
Names = list[StrictStr]
Count = Annotated[Int32, Field(ge=1, le=100_000)]


class NodeForm(Part):
    """A node, or with ``count`` that many, named ``<name>-0`` and so on."""

    name: Name
    count: Count | None = None
    gpus: Annotated[Int32, Field(ge=0)] = 0
    cpu: Quantity = 64
    memory: Quantity = "512Gi"
    pods: Annotated[Int32, Field(ge=0)] = 110
    resources: dict[QualifiedName, Quantity] = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of the nodes."""
        return _numbered(self.name, self.count)


class NamespaceForm(Part):
    """A namespace with labels; one that is only named by jobs has none."""

    name: Name
    labels: Labels = Field(default_factory=dict)


class FlavorForm(ResourceFlavorSpec):
    """A ResourceFlavor: its name and the fields of its spec."""

    name: Name

    def manifest(self) -> dict[str, Any]:
        """Return the object."""
        return _object("ResourceFlavor", self.name, self)


class QueueForm(QueueSpec):
    """A Queue: its name and the fields of its spec."""

    name: Name

    def manifest(self) -> dict[str, Any]:
        """Return the object."""
        return _object("Queue", self.name, self)


class Asks(Part):
    """Pods that are alike: how many, and what each of them requests."""

    pods: Annotated[Int32, Field(ge=1)] = 1
    min_pods: Annotated[Int32, Field(ge=1)] | None = None
    gpus: Annotated[Int32, Field(ge=0)] = 0
    cpu: Quantity | None = None
    memory: Quantity | None = None
    requests: dict[QualifiedName, Quantity] = Field(default_factory=dict)
    node_selector: Labels | None = None
    host_ports: list[Annotated[Int32, Field(ge=1, le=65535)]] = Field(default_factory=list)
    gpu: RoleGpu | None = None
    topology: RoleTopology | None = None
    runs: list[Seconds] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _check_pods(self) -> Self:
        if self.runs is not None and len(self.runs) > self.pods:
            raise ValueError(f"runs has {len(self.runs)} times for {self.pods} pods; write at most one for each")
        if self.min_pods is not None and self.min_pods > self.pods:
            raise ValueError(f"minPods of {self.min_pods} is more than pods, {self.pods}; write at most that")
        return self

    def role(self, name: str) -> dict[str, Any]:
        """Return it as a role of a TrainingJob."""
        given = {GPU: self.gpus or None, "cpu": self.cpu, "memory": self.memory, **self.requests}
        requests = {resource: amount for resource, amount in given.items() if amount is not None}
        container: dict[str, Any] = {
            "name": "main",
            "image": "scenario",
            "resources": {"requests": requests, "limits": requests},
        }
        spec: dict[str, Any] = {"containers": [container]}
        if self.host_ports:
            container["ports"] = [{"containerPort": port, "hostPort": port} for port in self.host_ports]
        if self.node_selector:
            spec["nodeSelector"] = self.node_selector
        role: dict[str, Any] = {"name": name, "replicas": self.pods, "template": {"spec": spec}}
        if self.min_pods is not None:
            role["minReplicas"] = self.min_pods
        return role | self.model_dump(by_alias=True, exclude_unset=True, include={"topology", "gpu"})

    def run_times(self, otherwise: float | None) -> list[float | None]:
        """Return for each pod after how many seconds of running it succeeds."""
        given: list[float | None] = list(self.runs) if self.runs else [otherwise]
        return [*given, *(given[-1:] * (self.pods - len(given)))]


class RoleForm(Asks):
    """A role of a job."""

    name: RoleName
    must_succeed: StrictBool = True


class JobForm(Asks):
    """A TrainingJob, or with ``count`` that many, named ``<name>-0`` and so on: when it comes and how it behaves."""

    name: Name
    count: Count | None = None
    at: Seconds = 0.0
    namespace: Name = "default"
    user: Text = ""
    queue: Name
    priority: Int32 | None = None
    preemptible: StrictBool | None = None
    roles: list[RoleForm] | None = Field(None, min_length=1)
    gpu_models: list[StrictStr] | None = Field(None, min_length=1)
    homogeneous: StrictBool | None = None
    same_driver: StrictBool | None = None
    run: Seconds | None = None
    checkpoints: Annotated[Seconds, Field(gt=0)] | None = None
    saves: Seconds | None = None
    save_grace: Annotated[Int32, Field(ge=1, le=86_400)] | None = None
    start_seconds: Seconds = 0.0
    grace: Seconds = 0.0
    hold: StrictBool | None = None
    start_deadline_seconds: Int32 | None = None
    backoff_limit: Int32 | None = None
    pod_failure_policy: PodFailurePolicy | None = None
    fails: Seconds | None = None
    exit_code: Annotated[Int32, Field(ge=1, le=255)] = 1
    replace_lost_pods: StrictBool | None = None
    max_run_seconds: Int32 | None = None

    @property
    def names(self) -> list[str]:
        """The names of the jobs."""
        return _numbered(self.name, self.count)

    @property
    def pod_ends(self) -> dict[float, set[PodKey]]:
        """Which pods succeed by themselves when, in seconds from when all are ready."""
        ends: dict[float, set[PodKey]] = {}
        roles: list[tuple[str, Asks, bool]] = [(role.name, role, role.must_succeed) for role in self.roles or ()]
        for name, role, must_succeed in roles or [(ROLE, self, True)]:
            for index, seconds in enumerate(role.run_times(self.run if must_succeed else None)):
                if seconds is not None:
                    ends.setdefault(seconds, set()).add((name, index))
        return ends

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.roles is not None:
            alone = Asks.model_fields.keys() & self.model_fields_set - {"topology"}
            if alone:
                raise ValueError(f"{', '.join(sorted(alone))} and roles exclude each other; move it into the roles")
        try:
            TrainingJob.model_validate(self.manifest(self.names[-1]))
        except ValidationError as error:
            raise ValueError("; ".join(": ".join(pair) for pair in problems(error, TrainingJob))) from error
        return self

    def manifest(self, name: str) -> dict[str, Any]:
        """Return one of the jobs as an object."""
        roles = [{**role.role(role.name), "mustSucceed": role.must_succeed} for role in self.roles or ()]
        passed = {
            "queue", "priority", "preemptible", "hold", "start_deadline_seconds", "backoff_limit", "max_run_seconds",
            "replace_lost_pods", "pod_failure_policy",
        }  # fmt: skip
        spec = self.model_dump(by_alias=True, exclude_none=True, include=passed)
        spec["roles"] = roles or [self.role(ROLE)]
        if roles:
            spec |= self.model_dump(by_alias=True, exclude_unset=True, include={"topology"})
        given = {"models": self.gpu_models, "homogeneous": self.homogeneous, "sameDriver": self.same_driver}
        if any(value is not None for value in given.values()):
            spec["gpu"] = {name: value for name, value in given.items() if value is not None}
        if self.saves is not None or self.save_grace is not None:
            spec["checkpoint"] = {"signal": Signal.ANNOTATION.value, "graceSeconds": self.save_grace or 120}
        meta = {"name": name, "namespace": self.namespace, "annotations": {SUBMITTED_BY: self.user}}
        return {"apiVersion": API_VERSION, "kind": "TrainingJob", "metadata": meta, "spec": spec}


class QuotaEdit(Part):
    """New limits of one quota of a queue; flavor and resource may be left out where the queue has one quota only."""

    queue: StrictStr
    flavor: StrictStr | None = None
    resource: StrictStr | None = None
    nominal: Quantity | None = None
    borrowing_limit: Quantity | None = None
    lending_limit: Quantity | None = None


class StopEdit(Part):
    """A new stop policy of a queue."""

    queue: StrictStr
    stop_policy: StopPolicy


class WindowForm(Part):
    """A maintenance window, announced at the event's time: it takes nodes from one time to another."""

    nodes: list[StrictStr] = Field(min_length=1)
    start: Seconds
    end: Seconds

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.end <= self.start:
            raise ValueError(f"end of {self.end:g} is not after start, {self.start:g}; write a later one")
        return self


class EventForm(Part):
    """Something that happens: exactly one of the fields beside ``at``."""

    at: Seconds
    finish: StrictStr | None = None
    fail: StrictStr | None = None
    delete: StrictStr | None = None
    hold: StrictStr | None = None
    release: StrictStr | None = None
    defrag: StrictStr | None = None
    node_down: StrictStr | None = None
    node_up: StrictStr | None = None
    node_silent: StrictStr | None = None
    node_fault: StrictStr | None = None
    node_healed: StrictStr | None = None
    cordon: StrictStr | None = None
    uncordon: StrictStr | None = None
    drain: StrictStr | None = None
    window: WindowForm | None = None
    set_quota: QuotaEdit | None = None
    set_stop_policy: StopEdit | None = None
    controller_restart: StrictBool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = self.model_fields_set - {"at"}
        if len(given) != 1:
            known = [field.alias for name, field in type(self).model_fields.items() if name != "at"]
            told = f"{', '.join(sorted(given))} are several things at once; write each as an event of its own"
            raise ValueError(told if given else f"nothing happens; add one of {', '.join(map(str, known))}")
        return self

    def check_names(self, field: str, jobs: set[str], nodes: set[str], queues: set[str]) -> None:
        """Raise ValueError if it happens to something that does not exist. ``field``: where the event stands."""
        if self.target:
            _known(field, self.target, nodes if self.verb in _OF_NODES else jobs)
        for node in self.window.nodes if self.window else ():
            _known(f"{field}.window.nodes", node, nodes)
        if self.queue:
            _known(f"{field}.{type(self).model_fields[self.verb].alias}.queue", self.queue, queues)

    @property
    def verb(self) -> str:
        """What happens, by the name of its field."""
        return next(iter(self.model_fields_set - {"at"}))

    @property
    def target(self) -> str:
        """The job or node that it happens to; empty for what is of neither kind."""
        value = getattr(self, self.verb)
        return value if isinstance(value, str) else ""

    @property
    def queue(self) -> str:
        """The queue that is edited; empty for other events."""
        edit = self.set_quota or self.set_stop_policy
        return edit.queue if edit else ""


_OF_A_TIME = (
    "pending",
    "starting",
    "running",
    "checkpointing",
    "stopping",
    "succeeded",
    "failed",
    "finished",
    "reason",
    "pods",
)


class WantForm(Part):
    """What must be so: states at a time, or of the whole run."""

    at: Seconds | None = None
    pending: Names | None = None
    starting: Names | None = None
    running: Names | None = None
    checkpointing: Names | None = None
    stopping: Names | None = None
    succeeded: Names | None = None
    failed: Names | None = None
    finished: Names | None = None
    reason: dict[str, StrictStr] | None = None
    pods: dict[str, Int32] | None = None
    evictions: Int32 | None = None
    evictions_of: dict[str, Int32] | None = None
    never_moved: Names | None = None
    started_by: dict[str, Seconds] | None = None
    started_after: dict[str, Seconds] | None = None
    rest_after: Seconds | None = None
    cycles: Annotated[Int32, Field(ge=1, le=MAX_CYCLES)] = 100

    @field_validator("reason")
    @classmethod
    def _check_reasons(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        for code in (value or {}).values():
            if code not in BY_CODE:
                raise ValueError(f'"{code}" is not a reason; {nearest(code, BY_CODE)}')
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        timed = [name for name in _OF_A_TIME if getattr(self, name) is not None]
        if timed and self.at is None:
            raise ValueError(f"{', '.join(timed)} is of a time; add at, in seconds")
        if not self.model_fields_set - {"at", "cycles"}:
            raise ValueError("nothing is wanted; add running, evictions, neverMoved or the like")
        return self

    def jobs(self) -> Iterator[str]:
        """Yield the names of the jobs that it is about."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, list | dict):
                yield from value


class PolicyForm(Part):
    """Rules of the whole cluster."""

    fair_sharing: list[FairRule] = Field(default_factory=list)
    usage_half_life_seconds: Seconds = 0.0
    suspect_seconds: Seconds = Healing().first


class Scenario(Part):
    """A cluster, what happens when, and what is wanted."""

    name: StrictStr = ""
    nodes: list[NodeForm] = Field(default_factory=list)
    flavors: list[FlavorForm] = Field(default_factory=lambda: [FlavorForm.model_validate({"name": "default"})])
    queues: list[QueueForm]
    namespaces: list[NamespaceForm] = Field(default_factory=list)
    policy: PolicyForm = Field(default_factory=PolicyForm)
    jobs: list[JobForm] = Field(default_factory=list)
    events: list[EventForm] = Field(default_factory=list)
    want: list[WantForm] = Field(default_factory=list)
    until: Seconds | None = None

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        jobs = _unique("jobs", [name for job in self.jobs for name in job.names])
        nodes = _unique("nodes", [name for node in self.nodes for name in node.names])
        queues = _unique("queues", [queue.name for queue in self.queues])
        flavors = _unique("flavors", [flavor.name for flavor in self.flavors])
        _unique("namespaces", [namespace.name for namespace in self.namespaces])
        for i, queue in enumerate(self.queues):
            for j, quota in enumerate(queue.quotas or ()):
                _known(f"queues[{i}].quotas[{j}].flavor", quota.flavor, flavors)
            if queue.parent is not None:
                _known(f"queues[{i}].parent", queue.parent, queues - {queue.name})
        for i, job in enumerate(self.jobs):
            _known(f"jobs[{i}].queue", job.queue, queues)
        for i, event in enumerate(self.events):
            event.check_names(f"events[{i}]", jobs, nodes, queues)
        for i, want in enumerate(self.want):
            for name in want.jobs():
                _known(f"want[{i}]", name, jobs)
        return self

    def objects(self) -> list[dict[str, Any]]:
        """Return flavors and queues as objects, parents not necessarily first."""
        return [*(flavor.manifest() for flavor in self.flavors), *(queue.manifest() for queue in self.queues)]


_OF_NODES = {"node_down", "node_up", "node_silent", "node_fault", "node_healed", "cordon", "uncordon", "drain"}


def edited(queue: QueueForm, edit: QuotaEdit) -> QueueForm:
    """Return the queue with a quota changed. Raises ValueError when it is not clear which one."""
    found = [
        quota
        for quota in queue.quotas or ()
        if edit.flavor in {None, quota.flavor} and edit.resource in {None, quota.resource}
    ]
    if len(found) != 1:
        raise ValueError(
            f"setQuota: so many quotas of queue {queue.name} may be meant: {len(found)}; name flavor and resource of one"
        )
    limits = edit.model_dump(include={"nominal", "borrowing_limit", "lending_limit"}, exclude_none=True)
    changed = found[0].model_copy(update=limits)
    quotas = [changed if quota is found[0] else quota for quota in queue.quotas or ()]
    return queue.model_copy(update={"quotas": quotas})


def read(data: Mapping[str, Any]) -> Scenario:
    """Return a scenario; raises ValueError with a line for each problem: the field, its value and the remedy."""
    try:
        scenario = Scenario.model_validate(data)
        for i, event in enumerate(scenario.events):
            if event.set_quota is not None:
                queue = next(queue for queue in scenario.queues if queue.name == event.set_quota.queue)
                try:
                    edited(queue, event.set_quota)
                except ValueError as error:
                    raise ValueError(f"events[{i}].{error}") from error
    except ValidationError as error:
        lines = (": ".join(filter(None, pair)) for pair in problems(error, Scenario))
        raise ValueError("\n".join(lines)) from error
    return scenario


def _numbered(name: str, count: int | None) -> list[str]:
    return [name] if count is None else [f"{name}-{i}" for i in range(count)]


def _object(kind: str, name: str, spec: Part) -> dict[str, Any]:
    body = spec.model_dump(by_alias=True, exclude_none=True, exclude={"name"}, mode="json")
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": body}


def _unique(field: str, names: list[str]) -> set[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f'{field}: two are named "{name}"; give each a name of its own')
        seen.add(name)
    return seen


def _known(field: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f'{field}: there is no "{name}"; {nearest(name, known)}')
