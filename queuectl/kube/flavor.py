"""The kind ResourceFlavor: which nodes are meant, what their GPUs are, and how close nodes are to each other."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, StrictStr, model_validator

from queuectl.kube.fields import (
    LevelName,
    Name,
    QualifiedName,
    Weight,
    rule,
    rules,
)
from queuectl.kube.parts import (
    Int32,
    Int64,
    Labels,
    ObjectMeta,
    Part,
    Text,
    list_map,
)
from queuectl.model.objects import NODE_LEVEL

_EMPTY_KEY = "a toleration without a key must have operator Exists"
_EXISTS_VALUE = "a toleration with operator Exists has no value; remove it, or write operator Equal"
_SECONDS = "only a toleration of effect NoExecute can have tolerationSeconds; remove them, or write effect NoExecute"


class FlavorToleration(Part):
    """A toleration, as of a pod."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("has(self.key) || (has(self.operator) && self.operator == 'Exists')", _EMPTY_KEY),
            rule("!has(self.value) || !has(self.operator) || self.operator != 'Exists'", _EXISTS_VALUE),
            rule("!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')", _SECONDS),
        )
    )

    key: QualifiedName | None = Field(None, description="The taint's key; every key when absent.")
    operator: Literal["Equal", "Exists"] | None = Field(None, description="How the value is compared; Equal if absent.")
    value: Annotated[StrictStr, Field(max_length=63)] | None = Field(None, description="The taint's value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="The taint's effect; every effect when absent."
    )
    toleration_seconds: Int64 | None = Field(
        None,
        description="For NoExecute: seconds that pods stay that are there already; for ever when absent. No gang goes"
        " onto a node from which it would be evicted after these.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.key is None and self.operator != "Exists":
            raise ValueError(_EMPTY_KEY)
        if self.value is not None and self.operator == "Exists":
            raise ValueError(_EXISTS_VALUE)
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError(_SECONDS)
        return self


class TopologyLevel(Part):
    """A level of topology: nodes of one value of its label form a domain."""

    name: LevelName = Field(description="The level's name, by which jobs ask for it, such as rack.")
    node_label: QualifiedName = Field(description="The label whose value tells the domain of a node.")


class InsideLevel(Part):
    """A level inside a node."""

    name: LevelName = Field(description="The level's name, by which jobs ask for it, such as nvlink or pcie.")
    gpus: Int32 = Field(ge=1, le=1024, description="How many GPUs of a node share a domain.")
    attribute: QualifiedName | None = Field(
        None,
        description="With devices: the attribute whose value tells a device's domain, such as"
        " resource.kubernetes.io/pcieRoot; when absent, the number in a device's name does: of 4 GPUs, gpu-0 to gpu-3.",
    )


_NODE_NAMED = f"no level can be named {NODE_LEVEL}: every flavor has that level, below the others"


class FlavorTopology(Part):
    """How nodes of this kind are connected."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(f"!has(self.levels) || self.levels.all(l, l.name != '{NODE_LEVEL}')", _NODE_NAMED, field=".levels"),
            rule(f"!has(self.insideNode) || self.insideNode.all(l, l.name != '{NODE_LEVEL}')", _NODE_NAMED),
        )
    )

    levels: list[TopologyLevel] | None = Field(
        None,
        max_length=8,
        description="Levels above the node, the widest first, such as block, then rack.",
        json_schema_extra=list_map("name"),
    )
    inside_node: list[InsideLevel] | None = Field(
        None,
        max_length=4,
        description="Levels inside a node, the largest first, such as nvlink of 4 GPUs, then pcie of 2.",
        json_schema_extra=list_map("name"),
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(level.name == NODE_LEVEL for level in (*(self.levels or ()), *(self.inside_node or ()))):
            raise ValueError(_NODE_NAMED)
        return self


class FlavorGpu(Part):
    """A resource by which nodes of this kind offer GPUs."""

    resource: QualifiedName = Field(description="The resource's name, such as nvidia.com/gpu or example.com/a100.")
    weight: Weight | None = Field(
        None,
        description="What part of a card one of it counts as, such as 1/7; when absent, a MIG slice by its number of"
        " sevenths, anything else as a card.",
    )


class FlavorDevices(Part):
    """GPUs that a driver for dynamic resource allocation offers."""

    driver: Name = Field(description="The driver's name in ResourceSlices, such as gpu.nvidia.com.")
    device_class_name: Name = Field(description="The DeviceClass that claims name, such as gpu.nvidia.com.")
    resource: QualifiedName = Field(
        description="The name by which jobs ask for these devices and quotas count them, such as nvidia.com/gpu."
    )
    identity: QualifiedName = Field(
        "uuid",
        description="The attribute, a text, that tells each device of a node from the others; without a domain, one of"
        " the driver.",
    )
    attributes: Annotated[dict[QualifiedName, Text], Field(max_length=16)] | None = Field(
        None, description="Attributes that a device must have to be one of these, such as type: gpu; all when absent."
    )


class ResourceFlavorSpec(Part):
    """Which nodes are of this kind, and what their pods need."""

    node_labels: Labels | None = Field(None, description="Labels that nodes of this kind have; all nodes when empty.")
    tolerations: list[FlavorToleration] | None = Field(
        None,
        max_length=32,
        description="Tolerations that are added to pods on these nodes.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
    gpu_model: Annotated[StrictStr, Field(min_length=1, max_length=63)] | None = Field(
        None, description="The model of these nodes' GPUs, as jobs name it in gpu.models."
    )
    gpus: list[FlavorGpu] | None = Field(
        None,
        max_length=32,
        description="Resources by which these nodes offer GPUs, where their name does not tell it or they count for"
        " less than a card in quotas for queuectl.dev/gpu.",
        json_schema_extra=list_map("resource"),
    )
    devices: FlavorDevices | None = Field(
        None,
        description="GPUs that claims name, by dynamic resource allocation (Kubernetes 1.34 or newer); when absent, a"
        " device plugin offers them.",
    )
    topology: FlavorTopology | None = Field(None, description="How nodes of this kind are connected.")


class ResourceFlavor(Part):
    """A kind of node."""

    api_version: Literal["queuectl.dev/v1alpha1"] = "queuectl.dev/v1alpha1"
    kind: Literal["ResourceFlavor"] = "ResourceFlavor"
    metadata: ObjectMeta
    spec: ResourceFlavorSpec = Field(
        default_factory=lambda: ResourceFlavorSpec.model_validate({}),
        description="Which nodes are of this kind, and what their pods need.",
    )
