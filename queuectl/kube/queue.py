"""The kind Queue: quotas, and the rules by which jobs are admitted and give way."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, StrictStr, model_validator

from queuectl.kube.fields import (
    MAX_SECONDS,
    Name,
    QualifiedName,
    Quantity,
    ResourceName,
    check_whole,
    rule,
    rules,
)
from queuectl.kube.parts import (
    Conditions,
    Int32,
    Int64,
    Labels,
    ObjectMeta,
    Part,
    Quantities,
    Text,
    list_map,
)
from queuectl.model.objects import QueueOrder
from queuectl.model.policy import OverQuota, Prefer, Reclaim, Stop, StopPolicy, VictimChoice, Within


class Quota(Part):
    """How much of a flavor's resource a queue owns."""

    flavor: Name = Field(description="The ResourceFlavor.")
    resource: ResourceName = Field(description="The resource, such as nvidia.com/gpu, cpu or memory.")
    nominal: Quantity = Field(description="The queue's own quota, such as 8 or 64Gi.")
    borrowing_limit: Quantity | None = Field(
        None, description="How much more than that the queue may use out of its cohort; no limit when absent."
    )
    lending_limit: Quantity | None = Field(
        None, description="How much of it others of the cohort may use while it is free; all of it when absent."
    )

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        limits = {"borrowingLimit": self.borrowing_limit, "lendingLimit": self.lending_limit}
        check_whole(self.resource, nominal=self.nominal, **limits)
        return self


class BorrowWithinCohort(Part):
    """Take lower priorities in other queues although the job's own queue will itself borrow."""

    max_priority: Int32 | None = Field(None, description="Only jobs of at most this priority are taken.")


class PreemptionRules(Part):
    """Whom a job of the queue may preempt when it doesn't fit."""

    within_queue: Within = Field(
        Within.NEVER,
        description="Of its own queue: nobody, lower priorities, or these and newer jobs of the same priority.",
    )
    reclaim_from_cohort: Reclaim = Field(
        Reclaim.NEVER,
        description="Of other queues of the cohort that use more than their own quota: nobody, lower priorities, or any.",
    )
    borrow_within_cohort: BorrowWithinCohort | None = Field(
        None, description="Set to also take lower priorities of other queues while the job's own queue borrows."
    )
    victims: VictimChoice = Field(
        VictimChoice.LEAST_WORK_LOST,
        description="Of those that may be taken, whom: who loses the least work since the last checkpoint, or the"
        " lowest priority and of these the latest admitted.",
    )
    wait_seconds: Int32 = Field(
        0, ge=0, le=MAX_SECONDS, description="Seconds that a job of the queue waits before it preempts anybody."
    )
    min_run_seconds: Int32 = Field(
        0,
        ge=0,
        le=MAX_SECONDS,
        description="Seconds that a job of the queue may run before anybody preempts it.",
    )


class FlavorChoiceRules(Part):
    """What to do with a flavor that fits in a less than perfect way."""

    when_can_borrow: Stop = Field(
        Stop.STOP, description="On a flavor that fits by borrowing: use it, or see whether a later one is better."
    )
    when_can_preempt: Stop = Field(
        Stop.NEXT, description="On a flavor that fits by preemption: use it, or see whether a later one is better."
    )
    prefer: Prefer = Field(Prefer.BORROWING, description="Which of the two is the lesser evil.")


class Cap(Part):
    """What one user, or one namespace, may hold of the queue at a time."""

    max_running: Int32 | None = Field(None, ge=0, description="Jobs that hold capacity; no limit when absent.")
    max_resources: Annotated[Quantities, Field(min_length=1)] | None = Field(
        None, max_length=16, description="Amounts per resource, over all flavors; no limit for a resource left out."
    )


class LabelRequirement(Part):
    """A requirement on labels, as in any label selector."""

    key: QualifiedName = Field(description="The label's key.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(description="How its value is compared.")
    values: Annotated[list[Annotated[StrictStr, Field(max_length=63)]], Field(max_length=64)] | None = Field(
        None,
        description="The values of In and NotIn.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )


class LabelSelector(Part):
    """Labels that an object must have; an empty selector takes every object."""

    match_labels: Labels | None = Field(None, description="Labels with these values.")
    match_expressions: list[LabelRequirement] | None = Field(
        None,
        max_length=16,
        description="Requirements that must all hold.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )


class ReservedQuota(Part):
    """How much of a quota is in use."""

    flavor: Text = Field(description="The ResourceFlavor.")
    resource: Text = Field(description="The resource.")
    amount: Text = Field(
        description="What jobs hold of it: those of the queue and, but for what they don't lend, of the queues below."
    )
    total: Text | None = Field(None, description="What that is out of: the queue's own quota and what is lent below.")
    nominal: Text = Field(description="The queue's own quota.")


_QUOTA_LIST = list_map("flavor", "resource")


class QueueSpec(Part):
    """Quotas of the queue and its place among the others."""

    parent: Name | None = Field(None, description="The Queue above this one.")
    order: QueueOrder = Field(
        QueueOrder.BEST_EFFORT_FIFO,
        description="StrictFIFO: nobody passes the head; BestEffortFIFO: what fits may pass a head that does not.",
    )
    weight: Quantity | None = Field(
        None, description="The queue's weight in fair sharing, 1 when absent; with 0 it borrows only what nobody wants."
    )
    preemption: PreemptionRules | None = Field(None, description="Whom jobs of the queue may preempt.")
    flavor_choice: FlavorChoiceRules | None = Field(None, description="How jobs of the queue choose among flavors.")
    namespace_selector: LabelSelector | None = Field(
        None, description="Labels of the namespaces whose jobs may use the queue; all namespaces when absent."
    )
    stop_policy: StopPolicy = Field(
        StopPolicy.NONE,
        description="None: admit; Hold: admit nothing new; HoldAndDrain: also send what runs back to the queue.",
    )
    when_over_quota: OverQuota = Field(
        OverQuota.KEEP,
        description="What happens to running jobs that a lowered quota no longer covers: they run on and nothing new"
        " starts, or as few as needed go back to the queue.",
    )
    max_waiting: Int32 | None = Field(
        None, ge=0, description="Jobs that may wait in the queue; further ones are refused when they are submitted."
    )
    max_running: Int32 | None = Field(None, ge=0, description="Jobs of the queue that may hold capacity at a time.")
    max_grace_seconds: Int32 | None = Field(
        None,
        ge=1,
        le=86_400,
        description="Seconds that a job may take to leave: to save its work once it is asked to, and from SIGTERM to"
        " SIGKILL. A job that asks for more gets these.",
    )
    per_user: Cap | None = Field(None, description="What each user may hold of the queue.")
    per_namespace: Cap | None = Field(None, description="What the jobs of each namespace may hold of the queue.")
    quotas: list[Quota] | None = Field(
        None,
        max_length=128,
        description="Quotas per flavor and resource; flavors are tried in this order.",
        json_schema_extra=_QUOTA_LIST,
    )

    @model_validator(mode="after")
    def _check_quotas(self) -> Self:
        seen: set[tuple[str, str]] = set()
        for quota in self.quotas or ():
            if (quota.flavor, quota.resource) in seen:
                raise ValueError(
                    f"two quotas are for {quota.resource} of flavor {quota.flavor}; give each pair one quota"
                )
            seen.add((quota.flavor, quota.resource))
        return self


class QueueStatus(Part):
    """What waits and runs in the queue."""

    conditions: Conditions | None = None
    observed_generation: Int64 | None = Field(
        None, ge=0, description="The metadata.generation that this status is about."
    )
    pending: Int32 | None = Field(None, ge=0, description="Jobs that wait.")
    running: Int32 | None = Field(None, ge=0, description="Jobs that hold capacity.")
    reserved: list[ReservedQuota] | None = Field(
        None, max_length=128, description="What is in use of each quota.", json_schema_extra=_QUOTA_LIST
    )


class Queue(Part):
    """Where jobs wait; it has quotas."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.spec.parent) || self.spec.parent != self.metadata.name",
                says="'queue ' + self.metadata.name + ' is its own parent; name another Queue or remove parent'",
                field=".spec.parent",
            )
        )
    )

    api_version: Literal["queuectl.dev/v1alpha1"] = "queuectl.dev/v1alpha1"
    kind: Literal["Queue"] = "Queue"
    metadata: ObjectMeta
    spec: QueueSpec = Field(description="Quotas of the queue and its place among the others.")
    status: QueueStatus | None = Field(None, description="What waits and runs in the queue, written by queuectl.")

    @model_validator(mode="after")
    def _check_parent(self) -> Self:
        name = self.metadata.name
        if name and self.spec.parent == name:
            raise ValueError(f"queue {name} is its own parent; name another Queue or remove parent")
        return self
