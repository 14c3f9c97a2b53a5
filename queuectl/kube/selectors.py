"""Selectors of labels and nodes, as the API server writes them."""

from collections.abc import Mapping
from typing import Any

from queuectl.model.objects import NodeTerm, Requirement


def selector(given: Mapping[str, Any] | None) -> tuple[Requirement, ...] | None:
    """Return what a label selector asks for; None, which selects nothing, for none."""
    if given is None:
        return None
    labels = sorted((given.get("matchLabels") or {}).items())
    return (
        *(Requirement(key, "In", (value,)) for key, value in labels),
        *requirements(given.get("matchExpressions")),
    )


def requirements(expressions: Any) -> tuple[Requirement, ...]:
    """Return what match expressions ask for."""
    return tuple(Requirement(e["key"], e["operator"], tuple(e.get("values") or ())) for e in expressions or ())


def node_terms(given: Mapping[str, Any]) -> tuple[NodeTerm, ...]:
    """Return the alternatives of a node selector."""
    return tuple(
        NodeTerm(requirements(term.get("matchExpressions")), requirements(term.get("matchFields")))
        for term in given.get("nodeSelectorTerms") or ()
    )
