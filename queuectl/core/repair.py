"""Places for the pods that a running gang lacks, because nodes were lost or it grows; the others stay where they are."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from queuectl.core import fit
from queuectl.core.fleet import Fleet
from queuectl.core.topology import Domains, Need, Rooms
from queuectl.model.objects import Flavor, Gang, Role
from queuectl.model.plan import Placement, PodKey

Inside = tuple[int, int] | None  # level, domain; None: everywhere


def places_for_missing(
    fleet: Fleet, gang: Gang, flavors: Mapping[str, Flavor], stays: Mapping[PodKey, str]
) -> dict[PodKey, str] | None:
    """Return a node for each pod of the gang's roles that does not stay; None if they can't all be had.

    ``stays``: pods and their nodes, which count as reserved in ``fleet``. Lost nodes must have no room there: they are
    gone or not ready. ``flavors``: by role, the one it has. What the gang asks of its topology holds for all of its
    pods together: a slice of which some stay is made whole in its domain; the rest goes where the others are if they
    have to share a domain, and if that is only preferred, as near to them as there is room. None too where claims name
    devices, for none are chosen here.
    """
    if any(fit.named_devices(role, flavors[role.name]) for role in gang.roles if role.name in flavors):
        return None
    return _Repair(fleet, gang, flavors, stays).run()


def as_placements(nodes: Mapping[PodKey, str], like: Mapping[str, Placement]) -> list[Placement]:
    """Return pods by role and index as placements, neighbours on one node as one. ``like``: one of each role."""
    result: list[Placement] = []
    for (role, index), node in sorted(nodes.items()):
        before = result[-1] if result else None
        if before and (before.role, before.node, before.first + before.pods) == (role, node, index):
            result[-1] = replace(before, pods=before.pods + 1)
        else:
            result.append(replace(like[role], node=node, pods=1, first=index))
    return result


class _Repair:
    def __init__(self, fleet: Fleet, gang: Gang, flavors: Mapping[str, Flavor], stays: Mapping[PodKey, str]) -> None:
        self._fleet = fleet
        fleet.meet(asked for role in gang.roles for asked in role.requests)
        self._room = fleet.free()
        self._gang = gang
        self._flavors = flavors
        self._stays = stays
        self._bound = fit.bound_roles(gang.roles, flavors)  # roles that are kept together
        self._found: dict[PodKey, str] = {}

    def run(self) -> dict[PodKey, str] | None:
        anew = [] if any(self._rows(role) for role in self._bound) else self._bound
        if anew and not self._place_anew(anew):
            return None
        others = [role for role in sorted(self._gang.roles, key=fit.largest_first) if role not in anew]
        return self._found if all(self._place_missing(role) for role in others) else None

    def _place_anew(self, roles: Sequence[Role]) -> bool:
        placed = fit.place(self._fleet, roles, self._flavors, self._gang.together)
        if isinstance(placed, fit.Short):
            return False
        for role in roles:
            rows = [(self._fleet.row(p.node), p.pods) for p in placed if p.role == role.name]
            self._take(role, range(role.pods), [(row, pods) for row, pods in rows if row is not None])
        return True

    def _place_missing(self, role: Role) -> bool:
        """Place the pods of a role of which others stay, or others of the roles that are kept together."""
        missing = [index for index in range(role.pods) if (role.name, index) not in self._stays]
        flavor = self._flavors[role.name]
        layout = fit.Layout.of(role, flavor, self._gang.together, self._bound)
        domains = self._fleet.domains(*layout.keys)
        own = self._rows(role)
        mates = [row for mate in self._bound for row in self._rows(mate).values()] if role in self._bound else []
        for some, wanted, tries in _parts(missing, own, mates, domains, layout):
            counts = self._room.pods(flavor, fit.closely(role, flavor), role.requests)
            for inside in tries:
                need = wanted.inside(inside[0]) if inside else wanted
                chosen = Rooms(domains, counts, need).place(len(some), inside)
                if chosen is not None:
                    self._take(role, some, chosen)
                    break
            else:
                return False
        return True

    def _rows(self, role: Role) -> dict[int, int]:
        """Return the rows of the nodes on which pods of a role stay, by index."""
        nodes = ((index, self._stays.get((role.name, index))) for index in range(role.pods))
        return {index: row for index, node in nodes if node and (row := self._fleet.row(node)) is not None}

    def _take(self, role: Role, indexes: Sequence[int], chosen: Sequence[tuple[int, int]]) -> None:
        columns, amounts = self._fleet.columns(role.requests) or ([], None)
        left = iter(indexes)
        for row, pods in chosen:
            if amounts is not None:
                self._room.use(row, columns, amounts * pods)
            self._found |= {(role.name, next(left)): self._fleet.name(row) for _ in range(pods)}


def _parts(
    missing: Sequence[int], own: Mapping[int, int], mates: Sequence[int], domains: Domains, layout: fit.Layout
) -> Iterator[tuple[list[int], Need, list[Inside]]]:
    """Yield indexes of a role's pods, how close to each other they have to be, and the domains to try.

    ``own``: by index, the rows of those that stay; ``mates``: of all that are kept together.
    """
    need, rest = layout.need, list(missing)
    if need.slice_level is not None:
        there = zip(own, domains.containing(need.slice_level, own.values()), strict=True)
        homes = {index // need.slice_size: home for index, home in there}  # of each slice of which some stay
        for number, home in homes.items():
            some = [index for index in missing if index // need.slice_size == number]
            if some:
                yield some, need, [(need.slice_level, home)]
        rest = [index for index in missing if index // need.slice_size not in homes]
    if rest:
        yield rest, need, list(_near(own, mates, domains, layout))


def _near(own: Mapping[int, int], mates: Sequence[int], domains: Domains, layout: fit.Layout) -> Iterator[Inside]:
    """Yield the domains to try: those preferred around the pods that stay, then the one that they have to share."""
    rows = list(own.values()) or mates
    shared = max(layout.need.within, layout.shared) if own else layout.shared
    if rows and layout.need.aim is not None:
        for level in range(layout.need.aim, shared, -1):
            homes = Counter(domains.containing(level, rows))
            yield from ((level, home) for home in sorted(homes, key=lambda home: (-homes[home], home)))
    yield (shared, domains.containing(shared, rows)[0]) if rows and shared >= 0 else None
