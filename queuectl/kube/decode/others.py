"""PriorityClasses, PodDisruptionBudgets and namespaces, from the API server's bytes."""

from typing import Any

import msgspec

from queuectl.kube.decode.common import Bytes, Meta
from queuectl.kube.informer import Item
from queuectl.kube.names import PREEMPTIBLE
from queuectl.kube.selectors import selector
from queuectl.model.objects import Budget, Namespace, PriorityClass


class _PriorityClass(msgspec.Struct, rename="camel"):
    metadata: Meta
    value: int = 0
    preemption_policy: str = ""


_decode_priority_class = msgspec.json.Decoder(_PriorityClass).decode


def priority_class(raw: Bytes) -> Item[PriorityClass]:
    """Decode a PriorityClass."""
    seen = _decode_priority_class(raw)
    value = PriorityClass(
        seen.metadata.name,
        seen.value,
        preemptible=seen.metadata.annotations.get(PREEMPTIBLE) != "false",
        preempts=seen.preemption_policy != "Never",
    )
    return Item(seen.metadata.name, seen.metadata.resource_version, value)


class _BudgetSpec(msgspec.Struct):
    selector: dict[str, Any] | None = None


class _BudgetStatus(msgspec.Struct, rename="camel"):
    disruptions_allowed: int = 0
    observed_generation: int = 0


class _Budget(msgspec.Struct):
    metadata: Meta
    spec: _BudgetSpec = msgspec.field(default_factory=_BudgetSpec)
    status: _BudgetStatus = msgspec.field(default_factory=_BudgetStatus)


_decode_budget = msgspec.json.Decoder(_Budget).decode


def budget(raw: Bytes) -> Item[Budget]:
    """Decode a PodDisruptionBudget; one whose status is of an older spec allows nothing."""
    seen = _decode_budget(raw)
    meta, status = seen.metadata, seen.status
    allowed = status.disruptions_allowed if status.observed_generation >= meta.generation else 0
    value = Budget(meta.namespace, meta.name, selector(seen.spec.selector), allowed)
    return Item(meta.key, meta.resource_version, value)


class _Named(msgspec.Struct):
    metadata: Meta


_decode_named = msgspec.json.Decoder(_Named).decode


def namespace(raw: Bytes) -> Item[Namespace]:
    """Decode a namespace."""
    seen = _decode_named(raw)
    return Item(seen.metadata.name, seen.metadata.resource_version, Namespace(seen.metadata.name, seen.metadata.labels))
