"""Fit a whole gang onto nodes: all of it or nothing."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from queuectl.core.fleet import Fleet, Mask, Matrix, Requests
from queuectl.model.objects import Flavor, Gang, Role
from queuectl.model.plan import Placement
from queuectl.model.reasons import Reason, Why, why
from queuectl.model.resources import format_quantity


@dataclass(frozen=True, slots=True)
class Short:
    """How far a role came: ``found`` of its pods would fit."""

    role: Role
    found: int


def place(fleet: Fleet, gang: Gang, flavors: Mapping[str, Flavor]) -> tuple[Placement, ...] | Why:
    """Return a place for every pod of the gang, or what is missing.

    Roles are placed one by one, those with the largest pods first. A role goes to as few nodes as possible: the
    emptiest first, the last one as tight as possible (largest-first bin covering with a best-fit tail), so that
    small gangs fill up broken nodes and whole nodes stay whole.
    """
    free = fleet.free()
    result = _place_in(fleet, free, gang, flavors)
    if not isinstance(result, Short):
        return result
    role, flavor = result.role, flavors[result.role.name]
    empty = _place_in(fleet, fleet.allocatable().copy(), gang, flavors)
    if isinstance(empty, Short):
        return why(
            Reason.EXCEEDS_CLUSTER, found=empty.found, need=empty.role.pods, role=empty.role.name,
            flavor=flavors[empty.role.name].name,
        )  # fmt: skip
    return why(
        Reason.WAITING_FOR_NODES, found=result.found, need=role.pods, role=role.name, flavor=flavor.name,
        short=_scarcest(fleet, free, fleet.mask(flavor, role.constraints), role),
    )  # fmt: skip


def _place_in(fleet: Fleet, free: Matrix, gang: Gang, flavors: Mapping[str, Flavor]) -> tuple[Placement, ...] | Short:
    """Place into ``free``, which is used up on the way."""
    placements: list[Placement] = []
    for role in sorted(gang.roles, key=_largest_first):
        flavor = flavors[role.name]
        counts = _pods_per_node(fleet, free, fleet.mask(flavor, role.constraints), role.requests)
        rows = _choose(counts, role.pods)
        if rows is None:
            return Short(role, int(counts.sum()))
        columns, amounts = fleet.columns(role.requests) or ([], np.zeros(0, np.int64))
        for row, pods in rows:
            free[row, columns] -= amounts * pods
            placements.append(Placement(role.name, flavor.name, fleet.name(row), pods, role.requests))
    return tuple(placements)


def _largest_first(role: Role) -> tuple[tuple[tuple[str, int], ...], str]:
    return tuple(sorted((resource, -amount) for resource, amount in role.requests if "/" in resource)), role.name


def _pods_per_node(fleet: Fleet, free: Matrix, mask: Mask, requests: Requests) -> Matrix:
    wanted = fleet.columns(requests)
    if wanted is None:
        return np.zeros(len(mask), np.int64)
    columns, amounts = wanted
    counts = (free[:, columns] // amounts).min(axis=1)
    return np.where(mask, np.maximum(counts, 0), 0)


def _choose(counts: Matrix, pods: int) -> list[tuple[int, int]] | None:
    """Return (row, pods there), or None when the counts don't suffice."""
    if int(counts.sum()) < pods:
        return None
    order = np.argsort(-counts, kind="stable")
    ordered = counts[order]
    before = np.concatenate(([0], np.cumsum(ordered)[:-1]))  # pods on the nodes ahead
    # The first node that could take all that is left ends the series; a tighter one may take its part.
    last = int(np.argmax(ordered >= pods - before))
    rest = pods - int(before[last])
    tightest = last + int(np.flatnonzero(ordered[last:] >= rest)[-1])
    rows = [(int(row), int(count)) for row, count in zip(order[:last], ordered[:last], strict=True)]
    return [*rows, (int(order[tightest]), rest)]


def _scarcest(fleet: Fleet, free: Matrix, mask: Mask, role: Role) -> str:
    """Say of which resource the nodes that the role may use have the fewest pods' worth."""
    worth = {
        resource: int(_pods_per_node(fleet, free, mask, [(resource, amount)]).sum())
        for resource, amount in role.requests
    }
    scarcest = min(worth, key=lambda resource: (worth[resource], "/" not in resource, resource))
    if worth[scarcest] >= role.pods:
        return "nodes with all of it free together"
    each = dict(role.requests)[scarcest]
    return f"{format_quantity(scarcest, each * (role.pods - worth[scarcest]))} {scarcest}"
