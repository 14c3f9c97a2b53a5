"""Which nodes a role's pods may use: by kube-scheduler's own rules, and by what their GPUs are."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from queuectl.core.cards import weigh
from queuectl.model.gpus import SHARED, is_slice
from queuectl.model.objects import Constraints, Flavor, Node, NodeTerm, Requirement, Taint, Toleration
from queuectl.model.resources import CARD

_BY_KUBERNETES = "node.kubernetes.io/"  # taints of nodes that are cordoned, not ready or out of reach
_INTEGER = re.compile("[+-]?[0-9]+")  # as Go parses it: no blanks, no underscores, and 64 bits


def eligible(node: Node, flavor: Flavor, constraints: Constraints) -> bool:
    """Tell whether kube-scheduler would let such a pod onto the node, room aside, and the GPUs there are what it needs.

    Flavor labels, node selector, required node affinity, where volumes can be reached, and taints.
    Stricter in two things: a node that is cordoned,
    not ready or avoided gets no gang, whatever the pods tolerate; nor does one that would evict them after a while.
    """
    if node.closed:
        if not constraints.closed:
            return False
        node = back(node)
    return (
        all(node.labels.get(key) == value for key, value in flavor.node_labels)
        and all(node.labels.get(key) == value for key, value in constraints.selector)
        and (not constraints.terms or any(_term_matches(term, node) for term in constraints.terms))
        and all(any(_term_matches(term, node) for term in terms) for terms in constraints.volumes)
        and all(_tolerated(taint, (*constraints.tolerations, *flavor.tolerations)) for taint in node.taints)
        and _gpus_suit(node, flavor, constraints)
    )


def back(node: Node) -> Node:
    """Return a closed node as it will be once it is not: repaired, uncordoned, or given back by maintenance."""
    taints = tuple(taint for taint in node.taints if not taint.key.startswith(_BY_KUBERNETES))
    return replace(node, taints=taints, unschedulable=False, ready=True, avoided="")


def _gpus_suit(node: Node, flavor: Flavor, constraints: Constraints) -> bool:
    """Tell whether the GPUs that pods get there are whole, sliced or shared as they need it, with memory enough.

    A name that tells of slices or of sharing, such as nvidia.com/mig-1g.5gb, speaks for itself. Where the flavor says
    that a unit is less than a card and no label tells how, it is a shared one.
    """
    need = constraints.gpu
    for resource in need.resources if need else ():
        named = any(device.resource == resource for device in node.devices)
        if named and (flavor.devices is None or flavor.devices.resource != resource):
            return False  # no claim would be made for them
        counts = weigh(resource, flavor)
        if not counts or need is None:
            continue
        unit = node.gpus.of(resource)
        shared = unit.shared or (counts < CARD and not unit.slice and not is_slice(resource))
        if shared and not need.shared and not resource.endswith(SHARED):
            return False
        if need.slice is not None and not is_slice(resource) and unit.slice != need.slice:
            return False
        if unit.memory < need.min_memory:
            return False
        if need.most and node.allocatable.get(resource, 0) + node.broken.get(resource, 0) > need.most:
            return False
    return True


def selects(selector: Iterable[Requirement], labels: Mapping[str, str]) -> bool:
    """Tell whether a label selector matches; an empty one matches everything."""
    return all(holds(requirement, labels) for requirement in selector)


def _tolerated(taint: Taint, tolerations: tuple[Toleration, ...]) -> bool:
    return taint.effect not in {"NoSchedule", "NoExecute"} or any(_tolerates(t, taint) for t in tolerations)


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:  # an empty key stands for every key
        return False
    if toleration.seconds is not None and taint.effect == "NoExecute":
        return False
    # Gt and Lt are alpha and off: kube-scheduler then lets them match nothing.
    return toleration.operator == "Exists" or (toleration.operator == "Equal" and toleration.value == taint.value)


def _term_matches(term: NodeTerm, node: Node) -> bool:
    if not term.labels and not term.fields:  # an empty term matches no object
        return False
    return all(holds(r, node.labels) for r in term.labels) and all(
        holds(r, {"metadata.name": node.name}) for r in term.fields
    )


def holds(requirement: Requirement, labels: Mapping[str, str]) -> bool:
    """Tell whether labels meet a requirement."""
    value = labels.get(requirement.key)
    match requirement.operator:
        case "In":
            holds = value in requirement.values
        case "NotIn":
            holds = value not in requirement.values
        case "Exists":
            holds = value is not None
        case "DoesNotExist":
            holds = value is None
        case "Gt":
            holds = _difference(value, requirement.values) > 0
        case "Lt":
            holds = _difference(value, requirement.values) < 0
        case _:
            holds = False
    return holds


def _difference(label: str | None, bounds: tuple[str, ...]) -> int:
    """Return label minus bound; 0, which no operator accepts, unless both are integers and the bound is one."""
    texts = (label or "", *bounds)
    if len(texts) != 2 or not all(_INTEGER.fullmatch(text) for text in texts):  # noqa: PLR2004 - a label, a bound
        return 0
    number, bound = map(int, texts)
    return number - bound if max(abs(number), abs(bound)) < 2**63 else 0
