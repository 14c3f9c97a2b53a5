"""The elastic part of a gang: the pods above the fewest of each role, without which it runs on."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from queuectl.model.objects import Role
from queuectl.model.plan import Placement, Portion, by_index, held
from queuectl.model.policy import Cell
from queuectl.model.resources import total


def spare(roles: Iterable[Role], pods: Mapping[str, int]) -> dict[str, int]:
    """Return how many pods of each role are more than it needs, ``pods`` being those that it has."""
    return {role.name: max(0, pods.get(role.name, 0) - least(role)) for role in roles}


def least(role: Role) -> int:
    """Return with how few pods of the role a gang may run."""
    return role.pods if role.least is None else role.least


def alike(spare: Mapping[str, int], count: int) -> dict[str, int]:
    """Share ``count`` pods to go among the roles by what each can spare, at most ``count`` in all."""
    everything = sum(spare.values())
    return {role: pods * count // everything if everything else 0 for role, pods in spare.items()}


def pods_of(placements: Iterable[Placement]) -> dict[str, int]:
    """Return the pods of each role."""
    return total({placement.role: placement.pods} for placement in placements)


def last(part: Portion, pods: Mapping[str, int]) -> Portion:
    """Return so many pods of each role, those with the highest indexes, so that those that stay count from 0 on."""
    left = dict(pods)
    placements = []
    for p in reversed(by_index(part.placements)):
        count = min(p.pods, left.get(p.role, 0))
        if count:
            left[p.role] -= count
            placements.append(replace(p, pods=count))
    return Portion(tuple(reversed(placements)), _charged(placements, part.quota))


def _charged(placements: Iterable[Placement], quota: Mapping[Cell, int]) -> dict[Cell, int]:
    """Return what these pods are charged: the requests that count in their flavor, and their cards."""
    amounts = total({(p.flavor, resource): n for resource, n in held([p]).items()} for p in placements)
    return {cell: amount for cell, amount in amounts.items() if amount and cell in quota}
