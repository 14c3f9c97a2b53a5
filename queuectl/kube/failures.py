"""``spec.podFailurePolicy`` of a TrainingJob, in the words of batch/v1 Jobs, and what pods say about their failures."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from queuectl.kube.fields import LabelName, QualifiedName, RoleName, rule, rules
from queuectl.kube.parts import Int32, Part
from queuectl.model.failures import Action, FailurePolicy, FailureRule

MAX_RULES = 20  # as for Jobs, and so the others
MAX_CODES = 255

_ONE_OF_BOTH = "a rule goes by onExitCodes or by onPodConditions; give one of them"
_NO_ZERO = "exit code 0 is no failure; leave it out"
_TWICE = "an exit code is there twice; give each once"
NO_ROLE = "podFailurePolicy names a role that the job does not have; use a name of spec.roles"
NO_CONTAINER = "podFailurePolicy names a container that no pod of the role has; use a name of its template"
NO_RESTARTS = (
    "podFailurePolicy is about pods that fail, and with restartPolicy: OnFailure their containers are started again;"
    " set it to Never in the roles that its rules are about"
)


class Operator(StrEnum):
    """How an exit code is compared."""

    IN = "In"
    NOT_IN = "NotIn"


class OnExitCodes(Part):
    """Exit codes of failed containers."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("self.operator != 'In' || !self.values.exists(v, v == 0)", _NO_ZERO, field=".values"),
            rule("self.values.all(v, self.values.exists_one(w, w == v))", _TWICE, field=".values"),
        )
    )

    container_name: LabelName | None = Field(
        None, description="The container, or init container, that has failed; any when absent."
    )
    operator: Operator = Field(description="In: the exit code is one of values; NotIn: it is none of them, nor 0.")
    values: list[Annotated[Int32, Field(ge=0, le=255)]] = Field(
        min_length=1,
        max_length=MAX_CODES,
        description="The exit codes.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.operator is Operator.IN and 0 in self.values:
            raise ValueError(_NO_ZERO)
        if len(set(self.values)) < len(self.values):
            raise ValueError(_TWICE)
        return self


class OnPodCondition(Part):
    """A condition of the failed pod."""

    type: QualifiedName = Field(description="The condition's type, such as DisruptionTarget.")
    status: Literal["True", "False", "Unknown"] = Field("True", description="The status that it has.")


class PodFailureRule(Part):
    """What follows from a failed pod that the rule matches."""

    model_config = ConfigDict(
        json_schema_extra=rules(rule("has(self.onExitCodes) != has(self.onPodConditions)", _ONE_OF_BOTH))
    )

    action: Action = Field(
        description="FailJob: the job fails at once. Ignore: the gang starts again after a pause, and backoffLimit does"
        " not count it. Count: backoffLimit counts it. AvoidNode: as Ignore, and the pod's node, which is to blame, is"
        " avoided for a while."
    )
    role: RoleName | None = Field(None, description="The role whose pods it is about; those of all roles when absent.")
    on_exit_codes: OnExitCodes | None = Field(None, description="The exit codes that it matches.")
    on_pod_conditions: list[OnPodCondition] | None = Field(
        None,
        min_length=1,
        max_length=MAX_RULES,
        description="The conditions of which the pod has one.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.on_exit_codes is None) == (self.on_pod_conditions is None):
            raise ValueError(_ONE_OF_BOTH)
        return self


class PodFailurePolicy(Part):
    """What follows from failed pods."""

    rules: list[PodFailureRule] = Field(
        min_length=1,
        max_length=MAX_RULES,
        description="The rules, of which the first that matches counts; without one a failure counts for backoffLimit.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
    ignore_limit: Int32 = Field(
        20,
        ge=1,
        le=1000,
        description="How many failures in a row are tried again that backoffLimit does not count, before the job fails;"
        " a checkpoint with a higher step than ever begins the count anew.",
    )

    def problem(self, containers: Mapping[str, Iterable[str]], restarting: Iterable[str]) -> str:
        """Return what is wrong with it in a job with these containers by role, and roles whose containers restart."""
        for one in self.rules:
            if one.role not in {None, *containers}:
                return NO_ROLE
            mine = [one.role] if one.role else [*containers]
            named = one.on_exit_codes.container_name if one.on_exit_codes else None
            if named and not any(named in containers[role] for role in mine):
                return NO_CONTAINER
            if set(mine) & set(restarting):
                return NO_RESTARTS
        return ""


_ABOUT = "(!has(f.role) || f.role == r.name)"
_HAS = " || ".join(
    f"{there}r.template.spec.{kind}.exists(c, c.name == f.onExitCodes.containerName)"
    for there, kind in (("", "containers"), ("has(r.template.spec.initContainers) && ", "initContainers"))
)
_RULES = "!has(self.podFailurePolicy) || self.podFailurePolicy.rules.all(f, {})"
IN_SPEC = tuple(
    rule(_RULES.format(cel), problem, field=".podFailurePolicy")
    for cel, problem in (
        ("!has(f.role) || self.roles.exists(r, r.name == f.role)", NO_ROLE),
        (
            f"!has(f.onExitCodes) || !has(f.onExitCodes.containerName) || self.roles.exists(r, {_ABOUT} && ({_HAS}))",
            NO_CONTAINER,
        ),
        (f"self.roles.all(r, !{_ABOUT} || r.template.spec.restartPolicy == 'Never')", NO_RESTARTS),
    )
)


def policy(given: Mapping[str, Any] | None) -> FailurePolicy:
    """Decode a job's rules."""
    if not given:
        return FailurePolicy()
    return FailurePolicy(tuple(_rule(one) for one in given["rules"]), given.get("ignoreLimit") or 20)


def _rule(given: Mapping[str, Any]) -> FailureRule:
    codes = given.get("onExitCodes") or {}
    return FailureRule(
        action=Action(given["action"]),
        role=given.get("role") or "",
        codes=frozenset(codes.get("values") or ()),
        among=codes.get("operator") != Operator.NOT_IN,
        container=codes.get("containerName") or "",
        conditions=tuple((one["type"], one.get("status") or "True") for one in given.get("onPodConditions") or ()),
    )
