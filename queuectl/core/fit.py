"""Fit a whole gang onto nodes: all of it or nothing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from queuectl.core.fleet import Fleet, Matrix, Room
from queuectl.model.objects import Flavor, Role
from queuectl.model.plan import Placement
from queuectl.model.reasons import Reason, Why, why
from queuectl.model.resources import format_quantity, is_extended


@dataclass(frozen=True, slots=True)
class Short:
    """How far the placing of a gang came: it ended at ``role``, of which not all pods fit on ``nodes`` nodes."""

    role: Role
    flavor: Flavor
    nodes: int
    found: int
    lacks: str

    def because(self, reason: Reason) -> Why:
        """Return it as a reason."""
        return why(
            reason, role=self.role.name, flavor=self.flavor.name, nodes=self.nodes, found=self.found,
            need=self.role.pods, short=self.lacks,
        )  # fmt: skip


def place(
    fleet: Fleet, roles: Sequence[Role], flavors: Mapping[str, Flavor], gone: Iterable[Placement] = ()
) -> tuple[Placement, ...] | Short:
    """Return a place for every pod of the roles, or how far it came. ``gone``: placements that would be freed.

    Roles are placed one by one, those with the largest pods first. A role goes to as few nodes as possible: the
    emptiest first, the last one as tight as possible (largest-first bin covering with a best-fit tail), so that
    small gangs fill up broken nodes and whole nodes stay whole. Of equal nodes the first by name is taken.
    """
    return _place_in(fleet, fleet.free((p.node, p.requests, p.pods) for p in gone), roles, flavors)


def fits_later(fleet: Fleet, roles: Sequence[Role], flavors: Mapping[str, Flavor]) -> bool:
    """Tell whether every pod would fit once all victims that are on their way out are gone, if there are any."""
    room = fleet.free_later()
    return room is not None and not isinstance(_place_in(fleet, room, roles, flavors, tell=True), Short)


def holds(fleet: Fleet, room: Room, roles: Sequence[Role], flavors: Mapping[str, Flavor]) -> bool:
    """Tell whether every pod of the roles fits into ``room``, by the same rules as ``place``."""
    room = room if len(roles) == 1 else room.copy()
    return not isinstance(_place_in(fleet, room, roles, flavors, tell=True), Short)


def exceeds_cluster(fleet: Fleet, roles: Sequence[Role], flavors: Mapping[str, Flavor]) -> Why | None:
    """Say why the gang would not even fit if nobody else used the nodes; None if it would."""
    found = _place_in(fleet, fleet.emptied(), roles, flavors, tell=True)
    return found.because(Reason.EXCEEDS_CLUSTER) if isinstance(found, Short) else None


def _place_in(
    fleet: Fleet, room: Room, roles: Sequence[Role], flavors: Mapping[str, Flavor], *, tell: bool = False
) -> tuple[Placement, ...] | Short:
    """Place into ``room``, which is used up on the way; with ``tell`` only as far as is needed to tell if they fit."""
    placements: list[Placement] = []
    in_order = sorted(roles, key=largest_first)
    for role in in_order:
        flavor = flavors[role.name]
        found = room.total(flavor, role.constraints, role.requests)
        if found < role.pods:
            nodes = int(fleet.mask(flavor, role.constraints).sum())
            return Short(role, flavor, nodes, found, _lacks(room, flavor, role, found))
        if tell and role is in_order[-1]:
            break
        counts = room.pods(flavor, role.constraints, role.requests)
        columns, amounts = fleet.columns(role.requests) or ([], np.zeros(0, np.int64))
        for row, pods in _choose(counts, fleet.by_name(), role.pods):
            room.use(row, columns, amounts * pods)
            placements.append(Placement(role.name, flavor.name, fleet.name(row), pods, role.requests))
    return tuple(placements)


def largest_first(role: Role) -> tuple[int, int, int, str]:
    """Order in which roles are placed: 1. more devices 2. more cpu 3. more memory a pod 4. name."""
    asks = dict(role.requests)
    devices = sum(amount for resource, amount in role.requests if is_extended(resource))
    return -devices, -asks.get("cpu", 0), -asks.get("memory", 0), role.name


def _choose(counts: Matrix, by_name: Matrix, pods: int) -> list[tuple[int, int]]:
    """Return (row, pods there) for counts that suffice."""
    order = by_name[np.argsort(-counts[by_name], kind="stable")]
    ordered = counts[order]
    before = np.cumsum(ordered) - ordered  # pods on the nodes ahead
    # The first node that could take all that is left ends the series; a tighter one may take its part.
    last = int(np.argmax(ordered >= pods - before))
    rest = pods - int(before[last])
    tight = ordered[last:][ordered[last:] >= rest][-1]
    tail = last + int(np.argmax(ordered[last:] == tight))
    return [*zip(order[:last].tolist(), ordered[:last].tolist(), strict=True), (int(order[tail]), rest)]


def _lacks(room: Room, flavor: Flavor, role: Role, found: int) -> str:
    """Say what keeps the missing pods out: the resource that is good for the fewest pods, or their combination."""
    worth = {
        resource: room.total(flavor, role.constraints, ((resource, amount),)) for resource, amount in role.requests
    }
    scarcest = min(worth, key=lambda resource: (worth[resource], not is_extended(resource), resource))
    missing = role.pods - worth[scarcest]
    if missing <= 0:
        return f"{_places(role.pods - found)} with all that a pod requests on one node"
    return f"{_places(missing)} with {format_quantity(scarcest, dict(role.requests)[scarcest])} {scarcest}"


def _places(count: int) -> str:
    return "1 place" if count == 1 else f"{count} places"
