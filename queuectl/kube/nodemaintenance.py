"""The kind NodeMaintenance: nodes that somebody works on, in an order and with care for the jobs there."""

import re
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AwareDatetime,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StrictStr,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from queuectl.kube.fields import LabelName, Name, rule, rules
from queuectl.kube.parts import (
    Conditions,
    Int32,
    Int64,
    Labels,
    Message,
    ObjectMeta,
    Part,
    PodTemplate,
    Text,
    list_map,
)
from queuectl.model.maintenance import MAX_NODES, Drain, NodePhase, NodeWork, Phase

TEST_NAMESPACE = "queuectl-system"
_SHARE = "^([1-9][0-9]?|100)%$"
_NOT_A_SHARE = "is not a number of nodes; write 1 or more, or a part of them such as 25%"
_ONE_OF_NODES = "give either nodes or nodeSelector, and one of them with at least one entry"
_END_FIRST = "window.end is not after window.start; give a later end, or remove one of them"


class ShareMarker:
    """Marks a number of nodes, or percents of them."""

    def check(self, value: object) -> int | str:
        """Return the value as written; raises ValueError when it is neither."""
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"{value!r} {_NOT_A_SHARE}")  # noqa: TRY004 - pydantic's way
        if value < 1 if isinstance(value, int) else not re.fullmatch(_SHARE, value):
            raise ValueError(f"{value} {_NOT_A_SHARE}")
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Keep the value as the user wrote it."""
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Say the same in CEL."""
        number = "type(self) == int ? self >= 1 : self.matches('" + _SHARE + "')"
        says = f"(type(self) == int ? string(self) : string(self)) + ' {_NOT_A_SHARE}'"
        return {"x-kubernetes-int-or-string": True, **rules(rule(number, says=says))}


class Window(Part):
    """When the nodes may be worked on."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("!has(self.start) || !has(self.end) || self.start < self.end", _END_FIRST, field=".end")
        )
    )

    start: AwareDatetime | None = Field(
        None, description="Until then jobs run on, and none is admitted that may run longer; at once when absent."
    )
    end: AwareDatetime | None = Field(
        None,
        description="Nodes whose turn has not come by then are left out, and the others released; never if absent.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.start is not None and self.end is not None and self.start >= self.end:
            raise ValueError(_END_FIRST)
        return self


class NodeTestRules(Part):
    """The pod that verifies a node once the work on it is done."""

    namespace: LabelName = Field(TEST_NAMESPACE, description="The namespace in which it runs.")
    timeout_seconds: Int32 = Field(
        900, ge=1, le=86_400, description="Seconds from the end of the work in which it has to succeed."
    )
    template: PodTemplate = Field(
        description="The pod. It gets onto the node although that is cordoned, and its success is the node's."
    )


class NodeMaintenanceSpec(Part):
    """Which nodes are worked on, by whom, when, and how many at a time."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "has(self.nodes) != has(self.nodeSelector) && (!has(self.nodes) || size(self.nodes) > 0) && "
                "(!has(self.nodeSelector) || size(self.nodeSelector) > 0)",
                _ONE_OF_NODES,
            )
        )
    )

    nodes: list[Name] | None = Field(
        None,
        max_length=MAX_NODES,
        description="The nodes, by name.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    node_selector: Labels | None = Field(
        None, description="Labels that the nodes have; those that get them later belong to it as well."
    )
    reason: Annotated[StrictStr, Field(max_length=256)] | None = Field(
        None, description="Why, for people: jobs that have to leave are told."
    )
    work: NodeWork = Field(
        NodeWork.MANUAL,
        description="Manual: somebody works on a node that is Safe, and says that it is done; DriverUpgrade: the GPU"
        " Operator upgrades its driver, and its label says so. Until its turn comes the node is held back from that.",
    )
    window: Window | None = Field(None, description="When the nodes may be worked on; at any time when absent.")
    max_unavailable: Annotated[int | str, ShareMarker()] = Field(
        1, description="How many of the nodes are under maintenance at a time, or what part of them, such as 25%."
    )
    canary: Int32 = Field(
        1, ge=0, le=MAX_NODES, description="How many nodes go first; the others wait until these are released."
    )
    test: NodeTestRules | None = Field(
        None, description="A pod that verifies each node before it is released; the first that fails halts the rest."
    )
    drain: Drain = Field(
        Drain.CHECKPOINT,
        description="What becomes of jobs on a node whose turn has come: they save their work and go back to their"
        " queues, or they are waited for.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.nodes) == bool(self.node_selector) or (self.nodes is None) == (self.node_selector is None):
            raise ValueError(_ONE_OF_NODES)
        return self


class NodeStanding(Part):
    """How far a node has come."""

    name: Text = Field(description="The node.")
    phase: NodePhase = Field(description="Where it is.")
    since: datetime = Field(description="Since when.")
    reason: Text | None = Field(None, description="Why, as a code of the closed list of reasons.")
    message: Annotated[StrictStr, Field(max_length=1024)] | None = Field(None, description="Why, in a sentence.")
    canary: bool | None = Field(None, description="Whether it is one of those that go first.")


class NodeMaintenanceStatus(Part):
    """How far it has come."""

    conditions: Conditions | None = None
    observed_generation: Int64 | None = Field(
        None, ge=0, description="The metadata.generation that this status is about."
    )
    phase: Phase | None = Field(None, description="Where it is, in one word.")
    message: Message | None = Field(None, description="Why, in a sentence.")
    done: Text | None = Field(None, description="How many of its nodes are done, such as 3/16.")
    nodes: list[NodeStanding] | None = Field(
        None, max_length=MAX_NODES, description="How far each node has come.", json_schema_extra=list_map("name")
    )


class NodeMaintenance(Part):
    """Work on nodes: jobs leave them with their work saved, a few nodes at a time, the first ones verified."""

    api_version: Literal["queuectl.dev/v1alpha1"] = "queuectl.dev/v1alpha1"
    kind: Literal["NodeMaintenance"] = "NodeMaintenance"
    metadata: ObjectMeta
    spec: NodeMaintenanceSpec = Field(description="Which nodes are worked on, by whom, when, and how many at a time.")
    status: NodeMaintenanceStatus | None = Field(None, description="How far it has come, written by queuectl.")
