"""The API, ``queuectl.dev/v1alpha1``: TrainingJob; Queue, ResourceFlavor and NodeMaintenance are beside it.

These models are its only definition. ``queuectl.kube.schema`` makes the CRDs from them: docstrings and descriptions
become what ``kubectl explain`` shows, constraints become the schema, and a rule that stands in CEL has its Python
twin beside it, so that a manifest is refused alike before and by the API server.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StrictBool, StrictStr, model_validator

from queuectl.kube.failures import IN_SPEC, PodFailurePolicy
from queuectl.kube.fields import (
    MAX_SECONDS,
    FilePath,
    LevelName,
    Name,
    Quantity,
    RoleName,
    Slice,
    UrlPath,
    rule,
    rules,
)
from queuectl.kube.flavor import ResourceFlavor
from queuectl.kube.names import DEFAULT_QUEUE
from queuectl.kube.nodemaintenance import NodeMaintenance
from queuectl.kube.parts import (
    Conditions,
    Int32,
    Int64,
    Message,
    ObjectMeta,
    Part,
    PodTemplate,
    Text,
    list_map,
)
from queuectl.kube.queue import Queue
from queuectl.model.checkpoint import ANSWERS, Answer, Signal

__all__ = [
    "KINDS",
    "ConditionType",
    "Phase",
    "Queue",
    "ResourceFlavor",
    "TrainingJob",
]

MAX_PODS = 10_000  # of one gang: the ledger writes its reservations in one bounded transaction
MAX_NAME_AND_ROLE = 49  # pods are named <job>-<role>-<attempt>-<index>, which must fit a label's 63 characters
MAX_SPEC_BYTES = 1_000_000  # etcd stores 1.5 MiB an object; the rest is for status and managed fields
MAX_PRIORITY = 1_000_000_000  # as for PriorityClasses that users may create
INT32 = 2**31 - 1
DEVICE = "k.contains('/') && !k.contains('kubernetes.io/')"  # is_extended in CEL; GPUs may have any such name


class Phase(StrEnum):
    """Where a TrainingJob is, in one word."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    CHECKPOINTING = "Checkpointing"
    STOPPING = "Stopping"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class ConditionType(StrEnum):
    """The conditions that queuectl sets."""

    QUOTA_RESERVED = "QuotaReserved"
    ADMITTED = "Admitted"
    PODS_READY = "PodsReady"
    PLACE_UNCERTAIN = "PlaceUncertain"
    GRACE_CUT = "GraceCut"
    SHRUNK = "Shrunk"
    CHECKPOINTING = "Checkpointing"
    EVICTED = "Evicted"
    REQUEUED = "Requeued"
    PREEMPTED = "Preempted"
    FINISHED = "Finished"
    HALTED = "Halted"  # of a NodeMaintenance
    READY = "Ready"  # of a Queue
    EVICTION_BLOCKED = "EvictionBlocked"  # of a Queue


_NO_ROLE_GPU = "gpu is given, but no container of the role requests a GPU; add a request such as nvidia.com/gpu: 1"


def _asks_gpu(template: str) -> str:
    """Return the CEL expression that tells whether a template's containers request a GPU."""
    return " || ".join(
        f"has({template}.spec.{containers}) && {template}.spec.{containers}.exists(c, has(c.resources) && "
        f"has(c.resources.{kind}) && c.resources.{kind}.exists(k, {DEVICE} && "
        f"c.resources.{kind}[k] != 0 && c.resources.{kind}[k] != '0'))"
        for containers in ("containers", "initContainers")
        for kind in ("requests", "limits")
    )


_TEMPLATE_ASKS_GPU = _asks_gpu("self.template")
_LEVEL = "such as rack, as the ResourceFlavor's topology names it, or node"


class GangTopology(Part):
    """How close the pods of all roles have to be."""

    required: LevelName | None = Field(
        None, description=f"All pods in one domain of this level, {_LEVEL}; the job waits for that."
    )
    preferred: LevelName | None = Field(
        None, description=f"All pods in one domain of this level, {_LEVEL}, or else as close as possible."
    )


class Slices(Part):
    """Pods that have to be closer to each other than the role as a whole."""

    level: LevelName = Field(description=f"The level, {_LEVEL}, of which the pods of a slice share a domain.")
    size: Int32 = Field(
        ge=1,
        le=MAX_PODS,
        description="How many pods make a slice: indexes from 0 to size - 1, then the next as many. 1 is for levels"
        " inside a node: the GPUs of each pod share a domain.",
    )


class RoleTopology(GangTopology):
    """How close the pods of the role have to be."""

    slices: Slices | None = Field(None, description="Every so many pods in one domain of a level.")
    balanced: StrictBool = Field(
        False,  # noqa: FBT003
        description="Whether, where several domains are needed, each of them gets equally many pods.",
    )


class RoleGpu(Part):
    """What each pod of the role needs of its GPUs."""

    min_memory: Quantity | None = Field(
        None, description="The least memory of each GPU, such as 40G; nodes without a label that tells it are not used."
    )
    shared: StrictBool = Field(
        False,  # noqa: FBT003
        description="Whether GPUs that several pods share by time-slicing or MPS will do.",
    )
    slice: Slice | None = Field(
        None,
        description="The profile of slices, such as 1g.10gb, that nodes offer under the name of GPUs (strategy single);"
        " whole GPUs only when absent. A resource such as nvidia.com/mig-1g.10gb speaks for itself.",
    )


class Role(Part):
    """Pods of a job that share a template."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.minReplicas) || self.minReplicas <= self.replicas",
                says="'minReplicas is %d, more than replicas, %d; give at most that many'"
                ".format([self.minReplicas, self.replicas])",
                field=".minReplicas",
            ),
            rule(
                "!has(self.topology) || !has(self.topology.slices) || self.replicas % self.topology.slices.size == 0",
                says="'%d replicas do not divide into slices of %d; give a multiple'"
                ".format([self.replicas, self.topology.slices.size])",
                field=".replicas",
            ),
            rule(f"!has(self.gpu) || ({_TEMPLATE_ASKS_GPU})", _NO_ROLE_GPU),
        )
    )

    name: RoleName = Field(description="The role's name, unique in the job; it becomes part of the pods' names.")
    replicas: Int32 = Field(ge=1, le=MAX_PODS, description="How many pods of the role the gang has.")
    min_replicas: Int32 | None = Field(
        None,
        ge=1,
        le=MAX_PODS,
        description="With how few pods of the role the gang may start when not all fit, and run on when others are "
        "entitled to the room of the rest, which it gets once nobody waits for it; all of them when absent.",
    )
    must_succeed: StrictBool = Field(
        True,  # noqa: FBT003 - the default's place in every Field
        description="Whether the job waits for this role's pods to succeed; those of other roles are then stopped.",
    )
    gpu: RoleGpu | None = Field(None, description="What each pod of the role needs of its GPUs.")
    topology: RoleTopology | None = Field(None, description="How close the pods of the role have to be.")
    template: PodTemplate = Field(description="What each pod of the role looks like.")

    def asks_gpu(self) -> bool:
        """Tell whether any container requests a GPU."""
        spec = self.template.spec
        return any(
            container.resources is not None and container.resources.asks_gpu()
            for container in (*spec.containers, *(spec.init_containers or ()))
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gpu is not None and not self.asks_gpu():
            raise ValueError(_NO_ROLE_GPU)
        slices = self.topology.slices if self.topology else None
        if slices is not None and self.replicas % slices.size:
            raise ValueError(f"{self.replicas} replicas do not divide into slices of {slices.size}; give a multiple")
        if self.min_replicas is not None and self.min_replicas > self.replicas:
            raise ValueError(
                f"minReplicas is {self.min_replicas}, more than replicas, {self.replicas}; give at most that many"
            )
        return self


_Models = Annotated[
    list[Annotated[StrictStr, Field(min_length=1, max_length=63)]],
    Field(min_length=1, max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"}),
]


class Alternative(Part):
    """What will do as well when the GPUs that the job asks for first can't be had."""

    models: _Models = Field(description="GPU models of the alternative.")
    replicas: Annotated[dict[RoleName, Annotated[Int32, Field(ge=1, le=MAX_PODS)]], Field(max_length=16)] | None = (
        Field(None, description="How many pods of a role it then takes, by role; those left out keep their replicas.")
    )


class Gpu(Part):
    """What the gang needs of its GPUs."""

    models: _Models | None = Field(
        None, description="GPU models that will do: only flavors whose gpuModel is among them are used."
    )
    homogeneous: StrictBool = Field(
        True,  # noqa: FBT003
        description="Whether all GPUs of the gang must be of one model, as their nodes' labels say.",
    )
    same_driver: StrictBool = Field(
        False,  # noqa: FBT003
        description="Whether all nodes with GPUs of the gang must run the same version of the GPU driver.",
    )
    alternatives: list[Alternative] | None = Field(
        None,
        max_length=8,
        description="What will do as well, the best first.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )


_NO_INTERVAL = "with signal SigTerm nobody is asked while the job runs; remove intervalSeconds or choose another signal"


class HttpAsk(Part):
    """Where a pod is asked by HTTP."""

    port: Int32 = Field(ge=1, le=65_535, description="The port on which the pod listens.")
    path: UrlPath = Field("/checkpoint", description="The request is a POST of the ask as JSON; 200 is the answer.")


class ExecAsk(Part):
    """The command by which a pod is asked."""

    container: RoleName | None = Field(
        None, description="The container in which it runs; the pod's first one when absent."
    )
    command: list[Annotated[StrictStr, Field(max_length=1024)]] = Field(
        min_length=1,
        max_length=32,
        description="The command and its arguments; it saves and exits with 0. QUEUECTL_ASK_ID and"
        " QUEUECTL_ASK_DEADLINE are in its environment.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )


def _only_with(field: str, where: str) -> str:
    return f"{field} goes with {where} and with nothing else; give both or neither"


def _impossible(signal: Signal) -> str:
    return f"is not possible with signal {signal}; give one of {', '.join(ANSWERS[signal])}, or leave it out"


_ONLY_WITH = {
    "http": (_only_with("http", "signal HTTP"), "self.signal == 'HTTP'"),
    "exec": (_only_with("exec", "signal Exec"), "self.signal == 'Exec'"),
    "file": (_only_with("file", "answer File"), "has(self.answer) && self.answer == 'File'"),
}


class CheckpointRules(Part):
    """How the job saves its work: how its pods are asked to, before others get its room and in between."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            *(
                rule(
                    f"self.signal != '{signal}' || !has(self.answer) || self.answer in {[*map(str, answers)]}",
                    says=f"'answer ' + self.answer + ' {_impossible(signal)}'",
                    field=".answer",
                )
                for signal, answers in ANSWERS.items()
            ),
            *(
                rule(f"has(self.{name}) == ({where})", problem, field=f".{name}")
                for name, (problem, where) in _ONLY_WITH.items()
            ),
            rule("!has(self.intervalSeconds) || self.signal != 'SigTerm'", _NO_INTERVAL, field=".intervalSeconds"),
        )
    )

    signal: Signal = Field(
        Signal.SIG_TERM,
        description="How a pod is asked: by an annotation that it sees through the downward API, by HTTP, by a command,"
        " or by SIGTERM, when it is deleted.",
    )
    answer: Answer | None = Field(
        None,
        description="How it says that it has saved: by its exit or that of the command, by an annotation, by its reply,"
        " or by the time of a file. What goes with the signal when absent.",
    )
    grace_seconds: Int32 = Field(
        120, ge=1, le=86_400, description="Seconds from the ask in which it may save; then it is stopped anyway."
    )
    interval_seconds: Int32 | None = Field(
        None,
        ge=1,
        le=MAX_SECONDS,
        description="Seconds after the last checkpoint, or ask, at which it is asked again while it runs; never when"
        " absent.",
    )
    role: RoleName | None = Field(
        None, description="The role whose pods are asked; those of all roles with mustSucceed when absent."
    )
    path: FilePath | None = Field(
        None, description="The folder of its checkpoints, as its containers see it; they get QUEUECTL_CHECKPOINT_DIR."
    )
    http: HttpAsk | None = Field(None, description="With signal HTTP: where the pod is asked.")
    exec: ExecAsk | None = Field(None, description="With signal Exec: the command by which it is asked.")
    file: FilePath | None = Field(
        None,
        description="With answer File: a file whose time of modification, at or after the ask, is the answer; it is"
        " looked at with stat in the container of exec, or the first.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        possible = ANSWERS[self.signal]
        if self.answer is not None and self.answer not in possible:
            raise ValueError(f"answer {self.answer} {_impossible(self.signal)}")
        wanted = {
            "http": self.signal is Signal.HTTP,
            "exec": self.signal is Signal.EXEC,
            "file": (self.answer or possible[0]) is Answer.FILE,
        }
        for name, (problem, _) in _ONLY_WITH.items():
            if (getattr(self, name) is not None) != wanted[name]:
                raise ValueError(problem)
        if self.interval_seconds is not None and self.signal is Signal.SIG_TERM:
            raise ValueError(_NO_INTERVAL)
        return self


_ONE_PRIORITY = "priority and priorityClassName exclude each other; keep one of them"
_NO_QUEUE = (
    "queue is missing and the namespace has no default; name a Queue, or have an admin annotate the namespace with"
    f" {DEFAULT_QUEUE}"
)
_NO_WAIT = "no role has mustSucceed: true, so the job would be over at once; set it for at least one role"
_UNKNOWN_ROLE = "replicas of an alternative name a role that the job does not have; use names of spec.roles"
_CUT = "replicas of an alternative do not divide into the slices of their role; give a multiple of its slices.size"
_TOO_MANY = (
    f"with the replicas of an alternative all roles add up to more than the {MAX_PODS} pods of a gang; give fewer"
)
_NO_SUCH_ROLE = "checkpoint.role names a role that the job does not have; use a name of spec.roles"
_NO_GPU = "gpu is given, but no container requests a GPU; add a request such as nvidia.com/gpu: 1, or remove gpu"


class TrainingJobSpec(Part):
    """What is to run, and where it queues."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            # The namespace's default is in by now. The models don't know of it, so they let this pass.
            rule("has(self.queue)", _NO_QUEUE),
            rule("!(has(self.priority) && has(self.priorityClassName))", _ONE_PRIORITY),
            rule(
                "!has(self.gpu) || !has(self.gpu.alternatives) || self.gpu.alternatives.all(a, !has(a.replicas) || "
                "a.replicas.all(name, self.roles.exists(r, r.name == name)))",
                _UNKNOWN_ROLE,
                field=".gpu.alternatives",
            ),
            rule(
                "!has(self.gpu) || !has(self.gpu.alternatives) || self.gpu.alternatives.all(a, !has(a.replicas) || "
                "self.roles.all(r, !(r.name in a.replicas) || !has(r.topology) || !has(r.topology.slices) || "
                "a.replicas[r.name] % r.topology.slices.size == 0))",
                _CUT,
                field=".gpu.alternatives",
            ),
            rule(
                "!has(self.gpu) || !has(self.gpu.alternatives) || self.gpu.alternatives.all(a, !has(a.replicas) || "
                f"self.roles.map(r, r.name in a.replicas ? a.replicas[r.name] : r.replicas).sum() <= {MAX_PODS})",
                _TOO_MANY,
                field=".gpu.alternatives",
            ),
            rule(f"!has(self.gpu) || self.roles.exists(r, {_asks_gpu('r.template')})", _NO_GPU),
            rule(
                "!has(self.checkpoint) || !has(self.checkpoint.role) || self.roles.exists(r, r.name == self.checkpoint.role)",
                _NO_SUCH_ROLE,
                field=".checkpoint",
            ),
            *IN_SPEC,
        )
    )

    queue: Name | None = Field(
        None, description="The Queue that the job waits in; the namespace's default queue when absent."
    )
    priority_class_name: Name | None = Field(
        None, description="The PriorityClass whose value is the job's priority; give this or priority, not both."
    )
    priority: Int32 | None = Field(
        None,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="The job's priority, higher is earlier; 0 when neither this nor priorityClassName is given.",
    )
    roles: list[Role] = Field(
        min_length=1,
        max_length=16,
        description="The pods of the gang, by role; all of them start together.",
        json_schema_extra={
            **list_map("name"),
            **rules(
                rule(
                    "self.all(r, self.exists_one(s, s.name == r.name))",
                    says="'two roles are named \"%s\"; give each role a name of its own'"
                    ".format([self.filter(r, !self.exists_one(s, s.name == r.name))[0].name])",
                ),
                rule("self.exists(r, !has(r.mustSucceed) || r.mustSucceed)", _NO_WAIT),
                rule(
                    f"self.map(r, r.replicas).sum() <= {MAX_PODS}",
                    says=f"'the replicas of all roles add up to %d; at most {MAX_PODS} pods make a gang'"
                    ".format([self.map(r, r.replicas).sum()])",
                ),
            ),
        },
    )
    gpu: Gpu | None = Field(None, description="What the gang needs of its GPUs.")
    topology: GangTopology | None = Field(
        None,
        description="How close the pods of all roles have to be to each other; those with GPUs, where some have none.",
    )
    checkpoint: CheckpointRules | None = Field(
        None, description="How the job saves its work when it is asked to; it is never asked when absent."
    )
    start_deadline_seconds: Int32 = Field(
        300,
        ge=1,
        le=86_400,
        description="Seconds from admission within which all pods must be ready; else all go back to the queue.",
    )
    backoff_limit: Int32 = Field(
        3, ge=0, le=INT32, description="How many failed attempts are tried again before the job fails."
    )
    pod_failure_policy: PodFailurePolicy | None = Field(
        None, description="What follows from failed pods, by their exit codes and conditions; all count when absent."
    )
    replace_lost_pods: StrictBool = Field(
        False,  # noqa: FBT003
        description="Whether pods that are lost with their node, or removed by others, are replaced while the others"
        " run on; the trainer must be able to meet anew. Else the whole gang goes back to the queue.",
    )
    max_run_seconds: Int64 | None = Field(
        None, ge=1, description="Seconds that the job may run, after which it is stopped and fails."
    )
    hold: StrictBool = Field(False, description="Whether the job waits until it is released.")  # noqa: FBT003
    preemptible: StrictBool = Field(
        True,  # noqa: FBT003
        description="Whether others may preempt the job. A job that is not preemptible never borrows: it waits for"
        " its queue's own quota.",
    )
    ttl_seconds_after_finished: Int32 | None = Field(
        None, ge=0, le=INT32, description="Seconds after its end at which the job is deleted; never when absent."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.priority is not None and self.priority_class_name is not None:
            raise ValueError(_ONE_PRIORITY)
        names = [role.name for role in self.roles]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f'two roles are named "{twice}"; give each role a name of its own')
        if not any(role.must_succeed for role in self.roles):
            raise ValueError(_NO_WAIT)
        pods = sum(role.replicas for role in self.roles)
        if pods > MAX_PODS:
            raise ValueError(f"the replicas of all roles add up to {pods}; at most {MAX_PODS} pods make a gang")
        if self.gpu is not None and not self.asks_gpu():
            raise ValueError(_NO_GPU)
        if self.checkpoint is not None and self.checkpoint.role not in {None, *names}:
            raise ValueError(_NO_SUCH_ROLE)
        for other in (self.gpu and self.gpu.alternatives) or ():
            self._check_alternative(other.replicas or {})
        if self.pod_failure_policy is not None:
            specs = {role.name: role.template.spec for role in self.roles}
            named = {name: [c.name for c in (*s.containers, *(s.init_containers or ()))] for name, s in specs.items()}
            restarting = [name for name, s in specs.items() if s.restart_policy != "Never"]
            if problem := self.pod_failure_policy.problem(named, restarting):
                raise ValueError(problem)
        return self

    def _check_alternative(self, replicas: Mapping[str, int]) -> None:
        if not replicas.keys() <= {role.name for role in self.roles}:
            raise ValueError(_UNKNOWN_ROLE)
        sizes = {role.name: role.topology.slices.size for role in self.roles if role.topology and role.topology.slices}
        if any(pods % sizes.get(name, 1) for name, pods in replicas.items()):
            raise ValueError(_CUT)
        if sum(replicas.get(role.name, role.replicas) for role in self.roles) > MAX_PODS:
            raise ValueError(_TOO_MANY)

    def asks_gpu(self) -> bool:
        """Tell whether any container of any role requests a GPU."""
        return any(role.asks_gpu() for role in self.roles)


class RoleAssignment(Part):
    """Pods of one role on one node."""

    role: Text = Field(description="The role.")
    flavor: Text = Field(description="The ResourceFlavor whose quota is used.")
    node: Text = Field(description="The node.")
    pods: Int32 = Field(ge=0, description="How many pods of the role are there.")
    devices: Annotated[list[Text], Field(max_length=1024)] | None = Field(
        None,
        description="The devices that their claims name, in order of the pods, where the flavor has devices.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )


class LastCheckpoint(Part):
    """The last checkpoint that is known."""

    time: datetime = Field(description="When it was made.")
    attempt: Int32 = Field(ge=1, description="The attempt that made it.")
    step: Int64 | None = Field(None, description="The step of the training that it holds.")
    path: Annotated[StrictStr, Field(max_length=2048)] | None = Field(None, description="Where it is.")


class TrainingJobStatus(Part):
    """What became of it."""

    phase: Phase | None = Field(None, description="Where the job is, in one word.")
    conditions: Conditions | None = None
    observed_generation: Int64 | None = Field(
        None, ge=0, description="The metadata.generation that this status is about."
    )
    queue_position: Int32 | None = Field(None, ge=0, description="Place in the queue, from 1, while it waits.")
    reason: Text | None = Field(None, description="Why the job is in its phase, as a code.")
    message: Message | None = Field(None, description="Why the job is in its phase, in a sentence with the facts.")
    attempt: Int32 | None = Field(None, ge=0, description="The number of the latest try at running the job, from 1.")
    failures: Int32 | None = Field(None, ge=0, description="How many attempts failed so far.")
    pods: Text | None = Field(None, description="Pods ready of pods wanted, such as 3/8.")
    assignments: list[RoleAssignment] | None = Field(
        None,
        max_length=MAX_PODS,
        description="Where the pods of the latest attempt are.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
    admitted_at: datetime | None = Field(None, description="When capacity was reserved for the latest attempt.")
    started_at: datetime | None = Field(None, description="When all pods of the latest attempt were ready.")
    finished_at: datetime | None = Field(None, description="When the job ended.")
    exit_code: Int32 | None = Field(None, description="Exit code of the pod that decided the end.")
    last_checkpoint: LastCheckpoint | None = Field(
        None, description="The last checkpoint that the job's pods have reported, in this attempt or before."
    )
    lost_seconds: Int64 | None = Field(
        None, ge=0, description="GPUs times seconds of work that was done and lost by interruptions so far."
    )


class TrainingJob(Part):
    """A gang of pods that waits in a Queue and starts as a whole."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                f"self.spec.roles.all(r, size(self.metadata.name) + size(r.name) <= {MAX_NAME_AND_ROLE})",
                says="'the names of the job, %s, and of its role %s are too long for its pods: "
                f"together at most {MAX_NAME_AND_ROLE} characters'.format([self.metadata.name, self.spec.roles.filter(r, "
                f"size(self.metadata.name) + size(r.name) > {MAX_NAME_AND_ROLE})[0].name])",
            )
        )
    )

    api_version: Literal["queuectl.dev/v1alpha1"] = "queuectl.dev/v1alpha1"
    kind: Literal["TrainingJob"] = "TrainingJob"
    metadata: ObjectMeta
    spec: TrainingJobSpec = Field(description="What is to run, and where it queues.")
    status: TrainingJobStatus | None = Field(None, description="What became of it, written by queuectl.")

    @model_validator(mode="before")
    @classmethod
    def _limit_size(cls, data: Any) -> Any:
        spec = data.get("spec") if isinstance(data, dict) else None
        size = len(json.dumps(spec, default=str))
        if size > MAX_SPEC_BYTES:
            raise ValueError(
                f"spec takes {size} bytes and at most {MAX_SPEC_BYTES} can be stored;"
                " move data out of the template, into an image, a volume or a ConfigMap"
            )
        return data

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        name = self.metadata.name or self.metadata.generate_name + 5 * "x"
        for role in self.spec.roles:
            if len(name) + len(role.name) > MAX_NAME_AND_ROLE:
                raise ValueError(
                    f"the names of the job, {name}, and of its role {role.name}"
                    f" are too long for its pods: together at most {MAX_NAME_AND_ROLE} characters"
                )
        return self


KINDS: tuple[type[TrainingJob] | type[Queue] | type[ResourceFlavor] | type[NodeMaintenance], ...] = (
    TrainingJob, Queue, ResourceFlavor, NodeMaintenance,
)  # fmt: skip
