"""What the kinds of the API are made of: base models, metadata, conditions, and pod templates."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StrictInt, StrictStr, model_validator
from pydantic.alias_generators import to_camel

from queuectl.kube.fields import LabelName, Quantity, ResourceName, check_whole
from queuectl.model.resources import is_extended, parse_quantity

Int32 = Annotated[StrictInt, Field(json_schema_extra={"format": "int32"})]
Int64 = Annotated[StrictInt, Field(json_schema_extra={"format": "int64"})]
Text = Annotated[StrictStr, Field(max_length=253)]
Message = Annotated[StrictStr, Field(max_length=32768)]
Labels = Annotated[dict[StrictStr, Annotated[StrictStr, Field(max_length=63)]], Field(max_length=64)]
Annotations = Annotated[dict[StrictStr, Annotated[StrictStr, Field(max_length=262_144)]], Field(max_length=64)]


def _whole_devices(amounts: dict[str, int | str]) -> dict[str, int | str]:
    for resource, amount in amounts.items():
        check_whole(resource, **{resource: amount})
    return amounts


Quantities = Annotated[dict[ResourceName, Quantity], Field(max_length=32), AfterValidator(_whole_devices)]


def list_map(*keys: str) -> dict[str, JsonValue]:
    """Return what makes a list one of which no two items have the same keys."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


class Part(BaseModel):
    """Part of an object of ours: an unknown field is an error, a null one is as good as absent."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, use_attribute_docstrings=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        # The API server drops nulls before it fills in defaults; so do we.
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class OpenPart(Part):
    """Part of an object of which we read only some fields and keep all."""

    model_config = ConfigDict(extra="allow")


class ObjectMeta(OpenPart):
    """Kubernetes' standard metadata."""

    name: str = ""
    generate_name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    finalizers: list[str] = Field(default_factory=list)


class StatusCondition(Part):
    """One aspect of the state, as it was last observed."""

    type: Text = Field(description="What the condition is about, in CamelCase.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    observed_generation: Int64 | None = Field(None, ge=0, description="The metadata.generation that was looked at.")
    last_transition_time: datetime = Field(description="When the status last changed.")
    reason: Text = Field(description="Why, as a code of the closed list of reasons.")
    message: Message = Field(description="Why, in a sentence with the facts.")


Conditions = Annotated[
    list[StatusCondition],
    Field(
        max_length=16,
        description="The state in aspects, as 'kubectl wait' reads them.",
        json_schema_extra=list_map("type"),
    ),
]


class ContainerResources(OpenPart):
    """What a container asks for."""

    requests: Quantities | None = Field(None, description="What is reserved for the container.")
    limits: Quantities | None = Field(None, description="What the container may use; a request where none is given.")

    def asks_gpu(self) -> bool:
        """Tell whether a device is requested that may be a GPU: device plugins give them names of their own, too."""
        asked = {**(self.limits or {}), **(self.requests or {})}
        return any(is_extended(resource) and parse_quantity(resource, value) > 0 for resource, value in asked.items())


class Container(OpenPart):
    """A container as in any pod; fields that queuectl does not read are passed on."""

    name: LabelName = Field(description="The container's name, unique in the pod.")
    resources: ContainerResources | None = Field(None, description="What the container asks for.")


def _containers(description: str, **more: Any) -> Any:
    return Field(max_length=16, description=description, json_schema_extra=list_map("name"), **more)


class PodSpec(OpenPart):
    """A pod's spec; fields that queuectl does not read are passed on."""

    containers: list[Container] = _containers("The pod's containers.", min_length=1)
    init_containers: list[Container] | None = _containers("Containers that run first.", default=None)
    node_selector: Labels | None = Field(None, description="Labels that the pod's node must have.")
    restart_policy: Literal["Never", "OnFailure"] = Field(
        "Never", description="Never: a failed container fails its pod; OnFailure: the kubelet restarts it in place."
    )


class TemplateMeta(Part):
    """Metadata of the pods."""

    labels: Labels | None = Field(None, description="Labels of the pods.")
    annotations: Annotations | None = Field(None, description="Annotations of the pods.")


class PodTemplate(Part):
    """What each pod of a role looks like."""

    metadata: TemplateMeta | None = Field(None, description="Labels and annotations of the pods.")
    spec: PodSpec = Field(description="The pods' spec.")
