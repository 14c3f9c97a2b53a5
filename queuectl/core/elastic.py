"""The elastic part of a gang: the pods above the fewest of each role, without which it runs on."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping

from queuectl.model.objects import Role
from queuectl.model.plan import Placement, Portion, by_index
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
            placements.append(Placement(p.role, p.flavor, p.node, count, p.requests))
    return Portion(tuple(reversed(placements)), _charged(placements, part.quota))


def fewest(part: Portion, are_enough: Callable[[Portion], bool]) -> Portion:
    """Return the fewest pods of a part that are enough, of each role as it can spare them; all when no fewer are."""
    most = pods_of(part.placements)

    def some(count: int) -> Portion:
        return last(part, alike(most, count))

    return some(bisect_left(range(part.pods), True, key=lambda count: are_enough(some(count))))  # noqa: FBT003


def _charged(placements: Iterable[Placement], quota: Mapping[Cell, int]) -> dict[Cell, int]:
    """Return what these pods are charged: the requests that count in their flavor."""
    amounts = total({(p.flavor, resource): n * p.pods for resource, n in p.requests} for p in placements)
    return {cell: amount for cell, amount in amounts.items() if amount and cell in quota}
