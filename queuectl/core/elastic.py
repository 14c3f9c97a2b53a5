"""Parts of a gang, without which it runs on: its elastic part, the pods above the fewest of each role; pods that are done."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import count, islice

from queuectl.model.lifecycle import Attempt, Done
from queuectl.model.objects import Role
from queuectl.model.plan import Placement, PodKey, Portion, by_index, held, place
from queuectl.model.policy import Cell
from queuectl.model.resources import is_device, total


def spare(roles: Iterable[Role], attempt: Attempt) -> dict[str, int]:
    """Return how many pods of each role are more than it needs.

    Pods that are done are some of those that it needs; but one that runs stays, for its end is the gang's.
    """
    pods, done = pods_of(attempt.placements), Counter(role for role, _ in attempt.done)
    return {role.name: max(0, pods.get(role.name, 0) - max(1, least(role) - done[role.name])) for role in roles}


def least(role: Role) -> int:
    """Return with how few pods of the role a gang may run."""
    return role.pods if role.least is None else role.least


def alike(spare: Mapping[str, int], number: int) -> dict[str, int]:
    """Share a number of pods to go among the roles by what each can spare, at most that many in all."""
    everything = sum(spare.values())
    return {role: pods * number // everything if everything else 0 for role, pods in spare.items()}


def as_reserved(roles: Iterable[Role], placements: Iterable[Placement]) -> tuple[Role, ...]:
    """Return roles that request what is reserved for pods of theirs, and so will be for others that join these.

    What pods are made to request may be known no more, or be another now. Devices have names for each pod of its own.
    """
    reserved = {p.role: tuple((r, n) for r, n in p.requests if not is_device(r)) for p in placements}
    return tuple(replace(role, requests=reserved.get(role.name, role.requests)) for role in roles)


def pods_of(placements: Iterable[Placement]) -> dict[str, int]:
    """Return the pods of each role."""
    return total({placement.role: placement.pods} for placement in placements)


def keys(placements: Iterable[Placement], done: Collection[PodKey] = ()) -> list[PodKey]:
    """Return the roles and indexes of these pods, in order: of each role the first that are not done.

    That is so however pods come to be done, or are given up, which are always the last of their role.
    """
    roles = pods_of(placements)
    return [
        key
        for role in sorted(roles)
        for key in islice(((role, index) for index in count() if (role, index) not in done), roles[role])
    ]


def numbered(placements: Collection[Placement], done: Collection[PodKey] = ()) -> dict[PodKey, Placement]:
    """Return where each of these pods is, by role and index, in order."""
    places = (p for p in by_index(placements) for _ in range(p.pods))
    return dict(zip(keys(placements, done), places, strict=True))


def finished(attempt: Attempt, pods: Collection[PodKey]) -> Done:
    """Return what these of its pods held, which are done."""
    at = numbered(attempt.placements, attempt.done)
    counts = Counter(place(at[key]) for key in pods)
    placements = tuple(replace(p, pods=counts[place(p)]) for p in attempt.placements if counts[place(p)])
    return Done(frozenset(pods), Portion(placements, _charged(placements, attempt.quota)))


def last(part: Portion, pods: Mapping[str, int]) -> Portion:
    """Return so many pods of each role, those with the highest indexes, so that those that stay count from 0 on."""
    left = dict(pods)
    placements = []
    for p in reversed(by_index(part.placements)):
        number = min(p.pods, left.get(p.role, 0))
        if number:
            left[p.role] -= number
            placements.append(replace(p, pods=number))
    return Portion(tuple(reversed(placements)), _charged(placements, part.quota))


def fewest(part: Portion, are_enough: Callable[[Portion], bool]) -> Portion:
    """Return the fewest pods of a part that are enough, of each role as it can spare them; all when no fewer are."""
    most = pods_of(part.placements)

    def some(number: int) -> Portion:
        return last(part, alike(most, number))

    return some(bisect_left(range(part.pods), True, key=lambda number: are_enough(some(number))))  # noqa: FBT003


def _charged(placements: Iterable[Placement], quota: Mapping[Cell, int]) -> dict[Cell, int]:
    """Return what these pods are charged: the requests that count in their flavor, and their cards."""
    amounts = total({(p.flavor, resource): n for resource, n in held([p]).items()} for p in placements)
    return {cell: amount for cell, amount in amounts.items() if amount and cell in quota}
