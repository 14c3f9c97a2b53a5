"""Fit a whole gang onto nodes: all of it or nothing."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from queuectl.core.cards import cards, weigh
from queuectl.core.fleet import Fleet, Room
from queuectl.core.fragmentation import Others
from queuectl.core.topology import DRIVER, MODEL, Loss, Need, Rooms
from queuectl.core.windows import clear_of
from queuectl.model.objects import ALIKE, NODE_LEVEL, Constraints, Flavor, GpuNeed, Role, Together
from queuectl.model.plan import Placement
from queuectl.model.reasons import Reason, Why, counted, listed, why
from queuectl.model.resources import APART, HOST_PORT, format_quantity, is_extended

_SAME = {MODEL: "GPU model", DRIVER: "version of the GPU driver"}
MAX_TRIES = 8  # domains of a level in which a gang of several roles is tried, where a wider one would do


MAX_TOLD = 4096  # shapes of which it is kept whether the nodes would ever hold them


@dataclass(frozen=True, slots=True)
class Short:
    """How far the placing of a gang came: it ended at ``role``, of which not all pods fit on ``nodes`` nodes."""

    role: Role
    flavor: Flavor
    nodes: int
    found: int
    lacks: str
    anywhere: bool = False  # there are too few places for the role, wherever they are

    def because(self, reason: Reason) -> Why:
        """Return it as a reason."""
        return why(
            reason, role=self.role.name, flavor=self.flavor.name, nodes=self.nodes, found=self.found,
            need=self.role.pods, short=self.lacks,
        )  # fmt: skip


def place(
    fleet: Fleet,
    roles: Sequence[Role],
    flavors: Mapping[str, Flavor],
    together: Together = ALIKE,
    gone: Iterable[Placement] = (),
    *,
    others: Others | None = None,
) -> tuple[Placement, ...] | Short:
    """Return a place for every pod of the roles, or how far it came. ``gone``: placements that would be freed.

    Roles are placed one by one, those with the largest pods first, each as ``Rooms.place`` says. ``flavors``: by role,
    the one it goes to, which must have the levels of topology that the role and the gang name. ``others``: who loses the
    least by the last role, where one node holds all of it.
    """
    fleet.meet(asked for role in roles for asked in role.requests)
    room = fleet.free((p.node, p.requests, p.pods) for p in gone)
    return _place_in(fleet, room, roles, flavors, together, others=others)


def fits_later(fleet: Fleet, roles: Sequence[Role], flavors: Mapping[str, Flavor], together: Together) -> bool:
    """Tell whether every pod would fit once all victims that are on their way out are gone, if there are any."""
    room = fleet.free_later()
    return room is not None and holds(fleet, room, roles, flavors, together)


def holds(fleet: Fleet, room: Room, roles: Sequence[Role], flavors: Mapping[str, Flavor], together: Together) -> bool:
    """Tell whether every pod of the roles fits into ``room``, by the same rules as ``place``."""
    return not isinstance(_place_in(fleet, room, roles, flavors, together, tell=True), Short)


def exceeds_cluster(
    fleet: Fleet, roles: Sequence[Role], flavors: Mapping[str, Flavor], together: Together = ALIKE
) -> Why | None:
    """Say why the gang would not even fit if nobody else used the nodes; None if it would.

    Maintenance windows end, so they are no reason why it can never fit.
    """
    roles = clear_of(roles, 0.0)
    key = (tuple(roles), tuple(flavors[role.name].name for role in roles), together)
    if key not in fleet.told_of_nodes:
        if len(fleet.told_of_nodes) >= MAX_TOLD:
            fleet.told_of_nodes.clear()
        fleet.told_of_nodes[key] = _exceeds(fleet, roles, flavors, together)
    found: Why | None = fleet.told_of_nodes[key]
    return found


def _exceeds(fleet: Fleet, roles: Sequence[Role], flavors: Mapping[str, Flavor], together: Together) -> Why | None:
    room = fleet.emptied()
    if only_counts(fleet, roles, flavors, together):
        role = roles[0]
        if room.total(flavors[role.name], role.constraints, role.requests) >= role.pods:
            return None
    found = _place_in(fleet, room, roles, flavors, together, tell=True)
    if not isinstance(found, Short):
        return None
    if any(fleet.closed(flavors[role.name], role.constraints) for role in roles):
        later = [replace(role, constraints=replace(role.constraints, closed=True)) for role in roles]
        if holds(fleet, room, later, flavors, together):
            return None  # that ends by itself
    return found.because(Reason.EXCEEDS_CLUSTER)


def only_counts(fleet: Fleet, roles: Sequence[Role], flavors: Mapping[str, Flavor], together: Together) -> bool:
    """Tell whether the roles fit as soon as there are places enough, wherever they are."""
    if len(roles) != 1 or named_devices(roles[0], flavors[roles[0].name]):
        return False
    layout = Layout.of(roles[0], flavors[roles[0].name], together, bound=bound_roles(roles, flavors))
    need = layout.need
    return need.slice_level is None and (
        need.within < 0 or (not need.named and len(fleet.domains(*layout.keys).starts[need.within]) <= 1)
    )


def named_devices(role: Role, flavor: Flavor) -> int:
    """Return how many devices of the flavor's nodes a claim names for each pod of the role."""
    return dict(role.requests).get(flavor.devices.resource, 0) if flavor.devices else 0


def closely(role: Role, flavor: Flavor) -> Constraints:
    """Return where pods of the role may go on the flavor's nodes, with how close their devices have to be there.

    Where no claim names them the kubelet picks them, so those that share a domain are all that the node has.
    """
    own, inside = role.topology, {level.name: level.gpus for level in flavor.inside}
    asked = [
        (lv, mates) for lv, mates in ((own.required, role.pods), (own.slice_level, own.slice_size)) if lv in inside
    ]
    if not asked:
        return role.constraints
    need = role.constraints.gpu or GpuNeed(
        tuple(resource for resource, n in role.requests if n and is_extended(resource))
    )
    if named_devices(role, flavor):
        level, mates = asked[0]
        return replace(role.constraints, gpu=replace(need, level=level, mates=mates))
    gpus = sum(n for resource, n in role.requests if weigh(resource, flavor))
    most = min((inside[level] for level, mates in asked if gpus * mates > 1), default=0)
    return replace(role.constraints, gpu=replace(need, most=most)) if most else role.constraints


@dataclass(frozen=True, slots=True)
class Layout:
    """What tells domains apart for a role, and how close its pods have to be."""

    keys: tuple[str, ...]
    levels: tuple[str, ...]  # what the levels are called, the node's among them
    need: Need
    shared: int  # the level of which the pods of all bound roles share a domain; -1: none
    shared_aim: int | None
    named: tuple[int, ...]  # that level, if nodes must have its label

    @classmethod
    def of(cls, role: Role, flavor: Flavor, together: Together, bound: Sequence[Role]) -> Self:
        """Look up the levels that a role and its gang name. ``bound``: the roles that are kept together."""
        same: list[str] = []
        if role in bound and cards(role.requests, flavor):
            same = [key for key, asked in ((MODEL, together.same_model), (DRIVER, together.same_driver)) if asked]
        levels = (*(_SAME[key] for key in same), *(level.name for level in flavor.levels), NODE_LEVEL)
        inside = {level.name: NODE_LEVEL for level in flavor.inside}

        def index(name: str) -> int | None:
            return levels.index(inside.get(name, name)) if name else None

        own = role.topology
        shared, shared_aim = len(same) - 1, None
        if role in bound:
            shared = _deeper(index(together.required), shared)
            shared_aim = index(together.preferred)
        within = _deeper(index(own.required), shared if len(bound) == 1 else -1)
        sliced = index(own.slice_level)
        asked = {index(own.required), sliced, index(together.required) if role in bound else None}
        aim = index(own.preferred)
        need = Need(
            within=within,
            aim=shared_aim if aim is None else aim,
            slice_level=sliced,
            slice_size=1 if sliced is None else own.slice_size,
            balanced=own.balanced,
            named=tuple(at for at in asked if at is not None and at >= len(same)),
        )
        keys = (*same, *(level.label for level in flavor.levels))
        return cls(
            keys, levels, need.inside(within), shared, shared_aim, named=(shared,) if shared >= len(same) else ()
        )


def _deeper(level: int | None, other: int) -> int:
    return other if level is None else max(level, other)


def bound_roles(roles: Sequence[Role], flavors: Mapping[str, Flavor]) -> list[Role]:
    """Return the roles that a gang keeps together: those with GPUs, or all if none has."""
    return [role for role in roles if cards(role.requests, flavors[role.name])] or list(roles)


def _place_in(
    fleet: Fleet,
    room: Room,
    roles: Sequence[Role],
    flavors: Mapping[str, Flavor],
    together: Together,
    *,
    tell: bool = False,
    others: Others | None = None,
) -> tuple[Placement, ...] | Short:
    """Place into a room, which stays as it is; with ``tell`` only as far as is needed to tell if they fit."""
    in_order = sorted(roles, key=largest_first)
    for role in in_order:
        short = _short(fleet, room, role, flavors[role.name])
        if short is not None:
            return short
    found: Short | None = None
    fewest = sorted(in_order, key=lambda role: _choice(room, role, flavors[role.name]))
    for order in dict.fromkeys(map(tuple, (in_order, sorted(in_order, key=_freedom), fewest))):
        bound = bound_roles(order, flavors)
        free = [role for role in order if role not in bound]
        for inside in _windows(fleet, room, bound, flavors, together) if len(bound) > 1 else [None]:
            attempt = _Placed(
                fleet, room.copy() if len(roles) > 1 else room, flavors, together, bound, last=[*bound, *free][-1],
                others=others,
            )  # fmt: skip
            found = attempt.add(bound, inside, tell=tell) or attempt.add(free, None, tell=tell)
            if found is None:
                return tuple(attempt.placements)
    if found is not None:
        return found
    bound = bound_roles(in_order, flavors)
    layout = Layout.of(bound[0], flavors[bound[0].name], together, bound)
    nodes = int(fleet.mask(flavors[bound[0].name], bound[0].constraints).sum())
    lacks = f"one {layout.levels[layout.shared]} with room for all roles"
    return Short(bound[0], flavors[bound[0].name], nodes, 0, lacks)


def _windows(
    fleet: Fleet, room: Room, bound: Sequence[Role], flavors: Mapping[str, Flavor], together: Together
) -> Iterator[tuple[int, int] | None]:
    """Yield domains, as (level, domain), in which each of the roles would fit by itself; None stands for everywhere."""
    layouts = [Layout.of(role, flavors[role.name], together, bound) for role in bound]
    first = layouts[0]
    if any(layout.keys != first.keys for layout in layouts):
        yield None
        return
    domains = fleet.domains(*first.keys)
    need = Need(named=first.named)
    kinds = [(flavors[role.name], closely(role, flavors[role.name]), role.requests) for role in bound]
    rooms = [Rooms(domains, room.pods(*kind), need) for kind in kinds]
    aim = domains.nodes if first.shared_aim is None else first.shared_aim
    for level in range(max(aim, first.shared), max(first.shared, 0) - 1, -1):
        enough = np.logical_and.reduce([r.of(level) >= role.pods for r, role in zip(rooms, bound, strict=True)])
        homes = np.flatnonzero(enough)
        ranked = homes[np.argsort(rooms[0].of(level)[homes], kind="stable")].tolist()
        for home in ranked if level == first.shared else ranked[:MAX_TRIES]:
            yield level, home
    if first.shared < 0:
        yield None


class _Placed:
    """Places of a gang's roles so far."""

    def __init__(
        self,
        fleet: Fleet,
        room: Room,
        flavors: Mapping[str, Flavor],
        together: Together,
        bound: Sequence[Role],
        *,
        last: Role,
        others: Others | None,
    ) -> None:
        """Start with none. ``room`` is used up on the way, but for the ``last`` role."""
        self._fleet = fleet
        self._room = room
        self._flavors = flavors
        self._together = together
        self._bound = bound
        self._last = last
        self._others = others
        self.placements: list[Placement] = []

    def add(self, roles: Sequence[Role], inside: tuple[int, int] | None, *, tell: bool) -> Short | None:
        """Place roles, or return how far it came."""
        for role in roles:
            flavor = self._flavors[role.name]
            layout = Layout.of(role, flavor, self._together, self._bound)
            constraints = closely(role, flavor)
            counts = self._room.pods(flavor, constraints, role.requests)
            need = layout.need if inside is None else layout.need.inside(inside[0])
            rooms = Rooms(self._fleet.domains(*layout.keys), counts, need)
            last = role is self._last
            if tell and last:
                if rooms.holds(role.pods, inside):
                    continue
                return self._short(role, layout, rooms, inside)
            chosen = rooms.place(role.pods, inside, self._loss(role, flavor) if last else None)
            if chosen is None:
                return self._short(role, layout, rooms, inside)
            each, first = cards(role.requests, flavor), 0
            for row, number in chosen:
                node, room = self._fleet.name(row), self._room.of(row)
                for requests, pods in self._fleet.devices(row, room, role.requests, number, constraints.gpu):
                    if not last:
                        columns, amounts = self._fleet.columns(requests) or ([], np.zeros(0, np.int64))
                        self._room.use(row, columns, amounts * pods)
                    self.placements.append(Placement(role.name, flavor.name, node, pods, requests, each, first))
                    first += pods
        return None

    def _loss(self, role: Role, flavor: Flavor) -> Loss | None:
        others = self._others
        if others is None:
            return None
        return lambda rows: others.lose(self._room, rows, flavor, role.requests, role.pods)

    def _short(self, role: Role, layout: Layout, rooms: Rooms, inside: tuple[int, int] | None) -> Short:
        flavor = self._flavors[role.name]
        short = _short(self._fleet, self._room, role, flavor)
        if short is not None:
            return short
        nodes = int(self._fleet.mask(flavor, closely(role, flavor)).sum())
        if inside is not None:
            return Short(role, flavor, nodes, 0, f"one {layout.levels[inside[0]]} with room for all roles")
        need, (name, most) = layout.need, rooms.roomiest()
        if need.slice_level is not None:
            size, level = need.slice_size, layout.levels[need.slice_level]
            lacks = f"room for {size} pods in one {level}, {role.pods // size} times; there is for {most // size}"
        else:
            untold = (
                ", which no label tells, has" if layout.keys[need.within : need.within + 1] == (DRIVER,) else " has"
            )
            roomiest = f"the roomiest, {name}, has" if name else f"the roomiest{untold}"
            lacks = f"one {layout.levels[need.within]} with room for all of them; {roomiest} room for {most}"
        return Short(role, flavor, nodes, most, lacks)


def still(fleet: Fleet, short: Short) -> Short | None:
    """Return how far it comes now, if there are too few places for a role yet; None if it has to be placed to tell.

    Those who leave, and windows that come nearer, change what is there by themselves.
    """
    if not short.anywhere or fleet.leaving or fleet.has_windows:
        return None
    return _short(fleet, fleet.free(), short.role, short.flavor)


def _short(fleet: Fleet, room: Room, role: Role, flavor: Flavor) -> Short | None:
    """Tell whether there are too few places for a role, wherever they are."""
    told, key = room.told, (role, flavor.name)
    if told is None:
        return _count_short(fleet, room, role, flavor)
    if key not in told:
        told[key] = _count_short(fleet, room, role, flavor)
    known: Short | None = told[key]
    return known


def _count_short(fleet: Fleet, room: Room, role: Role, flavor: Flavor) -> Short | None:
    constraints = closely(role, flavor)
    found = room.total(flavor, constraints, role.requests)
    if found >= role.pods:
        return None
    nodes = int(fleet.mask(flavor, constraints).sum())
    unsuited = (
        *_taken(fleet, role, flavor), *_out_of_reach(fleet, role, flavor), *_closed(fleet, role, flavor),
        *_unsuited(fleet, role, flavor),
    )  # fmt: skip
    lacks = "; ".join((_lacks(room, flavor, role, found), *unsuited))
    return Short(role, flavor, nodes, found, lacks, anywhere=True)


def _taken(fleet: Fleet, role: Role, flavor: Flavor) -> Iterator[str]:
    """Say how many more nodes there are that maintenance takes before the gang would be over."""
    [anyway] = clear_of([role], 0.0)
    if more := int(fleet.mask(flavor, closely(anyway, flavor)).sum() - fleet.mask(flavor, closely(role, flavor)).sum()):
        yield f"maintenance takes {counted(more, 'more node')} before it is over"


def _out_of_reach(fleet: Fleet, role: Role, flavor: Flavor) -> Iterator[str]:
    """Say from how many more nodes the role's volumes can't be reached."""
    if not role.constraints.volumes:
        return
    here = closely(role, flavor)
    anywhere = replace(here, volumes=())
    if more := int(fleet.mask(flavor, anywhere).sum() - fleet.mask(flavor, here).sum()):
        yield f"its volumes can't be reached from {counted(more, 'other node')} that it could use"


def _closed(fleet: Fleet, role: Role, flavor: Flavor) -> Iterator[str]:
    """Say how many more nodes it could use if they were not closed; and of those that are avoided, which and why."""
    told: dict[str, list[str]] = {"not Ready": [], "cordoned": [], "avoided": []}
    for node in fleet.closed(flavor, closely(role, flavor)):
        if node.avoided:
            told["avoided"].append(f"{node.name} ({node.avoided.rstrip('.')})")
        else:
            told["cordoned" if node.ready else "not Ready"].append(node.name)
    for what, nodes in told.items():
        if nodes:
            are = "is" if len(nodes) == 1 else "are"
            yield f"{counted(len(nodes), 'node')} that it could use {are} {what}: {listed(nodes)}"


def _unsuited(fleet: Fleet, role: Role, flavor: Flavor) -> Iterator[str]:
    """Say of how many more nodes the GPUs are not what the role needs, and which ones they have by other names."""
    constraints = closely(role, flavor)
    need = constraints.gpu
    if need is None:
        return

    def nodes(**other: Any) -> int:
        """Return how many nodes there would be if it needed something else."""
        return int(fleet.mask(flavor, replace(constraints, gpu=replace(need, **other))).sum())

    all_of_them = fleet.mask(flavor, replace(role.constraints, gpu=None))
    if (now := nodes()) < int(all_of_them.sum()):
        known, least = nodes(min_memory=min(1, need.min_memory)), format_quantity("memory", need.min_memory)
        kind = f"slices other than {need.slice}, or whole" if need.slice else "slices for"
        for count, what in (
            (nodes(shared=True) - now, "GPUs that pods share, and gpu.shared of the role is not true"),
            (nodes(slice=None) - now, f"{kind} GPUs, see gpu.slice of the role"),
            (known - now, f"GPUs of less memory than its gpu.minMemory, {least}"),
            (nodes(min_memory=0) - known, f"GPUs of whose memory no label tells, and its gpu.minMemory is {least}"),
            (
                nodes(most=0) - now,
                f"more than the {need.most} GPUs that share a domain, and the kubelet picks which a pod gets",
            ),
        ):
            if count:
                yield f"{count} more {'node has' if count == 1 else 'nodes have'} {what}"
    for resource, amount in role.requests:
        if amount and weigh(resource, flavor) and not fleet.offers(all_of_them, resource):
            others = ", ".join(sorted(other for other in fleet.offered(all_of_them) if weigh(other, flavor)))
            if others:
                yield f"none of flavor {flavor.name} offers {resource}, their GPUs are {others}"


def largest_first(role: Role) -> tuple[int, int, int, str]:
    """Order in which roles are placed: 1. more devices 2. more cpu 3. more memory a pod 4. name."""
    asks = dict(role.requests)
    devices = sum(amount for resource, amount in role.requests if is_extended(resource))
    return -devices, -asks.get("cpu", 0), -asks.get("memory", 0), role.name


def _freedom(role: Role) -> tuple[bool, bool]:
    """Order in which roles are placed where largest first leaves one out: those first that have to be close."""
    return not role.topology.required, not role.topology.slice_level


def _choice(room: Room, role: Role, flavor: Flavor) -> tuple[int, int]:
    """Order in which roles are placed where that leaves one out as well: 1. fewer places to spare 2. on fewer nodes."""
    places = room.pods(flavor, closely(role, flavor), role.requests)
    return int(places.sum()) - role.pods, int(np.count_nonzero(places))


def _lacks(room: Room, flavor: Flavor, role: Role, found: int) -> str:
    """Say what keeps the missing pods out: the resource that is good for the fewest pods, or their combination."""
    worth = {
        resource: room.total(flavor, role.constraints, ((resource, amount),)) for resource, amount in role.requests
    }
    scarcest = min(worth, key=lambda resource: (worth[resource], not is_extended(resource), resource))
    missing = role.pods - worth[scarcest]
    need, named = closely(role, flavor).gpu, flavor.devices
    if (
        need is not None
        and need.level
        and named is not None
        and room.total(flavor, role.constraints, role.requests) >= role.pods
    ):
        most = room.roomiest(flavor, role.constraints, named.resource, need.level)
        count = -(-(role.pods - found) // need.mates)
        asked = f"{named_devices(role, flavor) * need.mates} {named.resource} in one {need.level}"
        return f"{_places(count)} with {asked}; the roomiest has {most} free"
    if missing <= 0:
        return f"{_places(role.pods - found)} with all that a pod requests on one node"
    if scarcest.startswith(HOST_PORT):
        return f"{_places(missing)} where host port {scarcest.removeprefix(HOST_PORT)} is free"
    if scarcest.startswith(APART):
        return f"{_places(missing)} apart from other pods, by podAntiAffinity, with {scarcest.removeprefix(APART)}"
    return f"{_places(missing)} with {format_quantity(scarcest, dict(role.requests)[scarcest])} {scarcest}"


def _places(count: int) -> str:
    return "1 place" if count == 1 else f"{count} places"
