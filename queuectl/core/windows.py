"""Maintenance windows: a gang goes onto no node that one takes before the gang is over by its own limits. Pure.

As in Slurm, whose jobs start before a reservation only if their time limit ends before it. A gang without a limit has no
end, so it stays off all nodes with a window ahead, unless it can be asked to save its work and go on elsewhere: then a
window costs it a restart and no work, and nodes would else stand idle from the day on which their window is announced.
"""

from collections.abc import Iterable
from dataclasses import replace

from queuectl.core.fleet import Fleet
from queuectl.model.objects import Gang, Role


def clear_of(roles: Iterable[Role], until: float) -> tuple[Role, ...]:
    """Return roles that stay off nodes that are taken before ``until``, in Unix seconds; 0.0: off none."""
    return tuple(
        role if role.constraints.until == until else replace(role, constraints=replace(role.constraints, until=until))
        for role in roles
    )


def bounded(fleet: Fleet | None, gang: Gang, end: float) -> Gang:
    """Return a gang as it may be placed if it is over by ``end``, in Unix seconds: itself, if no node is taken before."""
    until = fleet.taken_before(end) if fleet is not None and fleet.has_windows else 0.0
    return gang.but(roles=clear_of(gang.roles, until)) if until else gang


def ends_at(fleet: Fleet, until: float, nodes: Iterable[str]) -> float:
    """Return when a running gang is over, in Unix seconds: by its own limits, or when one of its nodes is taken."""
    return min([until, *map(fleet.taken_at, nodes)])
