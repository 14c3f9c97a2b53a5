"""Which flavor each role's resources take: by quota that is free, by borrowing, or by preemption.

Resources that share a flavor in a queue's quotas form a group and take their flavor together. Flavors of a group
are tried in order; the rules for when to stop are those of Kueue's flavor fungibility (KEP-582).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from queuectl.core.tree import Node, height_that_fits
from queuectl.model.policy import Cell, FlavorChoice, Prefer, Stop
from queuectl.model.resources import total


class Mode(IntEnum):
    """How an amount can be had; larger is better."""

    NEVER = 0  # more than the tree could ever give
    NOBODY = 1  # somebody would have to give way, and nobody may be taken
    PREEMPT = 2  # somebody of the own queue gives way
    RECLAIM = 3  # only others' borrowed room is taken back
    WAIT = 4  # those who have it are on their way out anyway
    FIT = 5


@dataclass(frozen=True, slots=True)
class Way:
    """How an amount can be had, and from how far away: the height of the subtree that it is borrowed in."""

    mode: Mode
    height: int = 0


def better(choice: FlavorChoice, one: Way, other: Way) -> bool:
    """Tell whether one way is strictly better than the other."""
    return _rank(choice, one) > _rank(choice, other)


def _rank(choice: FlavorChoice, way: Way) -> tuple[int, int, int]:
    possible = 0 if way.mode is Mode.NEVER else 1 if way.mode is Mode.NOBODY else 2
    if choice.prefer is Prefer.PREEMPTION:
        return possible, -way.height, way.mode
    return possible, way.mode, -way.height


def _goes_on(choice: FlavorChoice, way: Way) -> bool:
    """Tell whether later flavors are to be tried as well."""
    if way.mode in {Mode.NEVER, Mode.NOBODY, Mode.WAIT}:
        return True
    if way.mode is not Mode.FIT and choice.when_can_preempt is Stop.NEXT:
        return True
    return way.height > 0 and choice.when_can_borrow is Stop.NEXT


@dataclass(frozen=True, slots=True)
class Group:
    """Resources that take their flavor together, and the flavors to try, in order."""

    resources: frozenset[str]
    flavors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What roles that take their flavors together ask for in all: resource → amount of all their pods."""

    roles: tuple[str, ...]
    amounts: Mapping[str, int]


Charge = Callable[[Mapping[str, int], str], Mapping[str, int]]  # amounts, flavor → amounts that quotas count


@dataclass
class Assignment:
    """A flavor for each resource of each role, and how that can be had."""

    flavors: dict[str, Mapping[str, str]] = field(default_factory=dict)  # role → resource → flavor
    uncounted: dict[str, str] = field(default_factory=dict)  # role that nothing is counted of → flavor
    usage: dict[Cell, int] = field(default_factory=dict)
    way: Way = Way(Mode.FIT)  # the worst of all
    contested: set[Cell] = field(default_factory=set)  # where somebody has to give way
    missing: tuple[Wanted, str] | None = None  # what asks for a resource for which there is no flavor

    @property
    def mode(self) -> Mode:
        """How the whole can be had."""
        return self.way.mode


def groups_of(cells: Iterable[Cell]) -> list[Group]:
    """Return the groups that a queue's quotas form; flavors and groups in order of first appearance."""
    groups: list[tuple[set[str], list[str]]] = []
    for flavor, resource in cells:
        touching = [group for group in groups if resource in group[0] or flavor in group[1]]
        if not touching:
            groups.append(({resource}, [flavor]))
            continue
        first, *rest = touching
        for other in rest:
            first[0].update(other[0])
            first[1].extend(f for f in other[1] if f not in first[1])
            groups.remove(other)
        first[0].add(resource)
        if flavor not in first[1]:
            first[1].append(flavor)
    return [Group(frozenset(resources), tuple(flavors)) for resources, flavors in groups]


def assign(
    node: Node,
    groups: Callable[[Wanted], Sequence[Group]],
    choice: FlavorChoice,
    wanted: Sequence[Wanted],
    *,
    suits: Callable[[Wanted, str], bool],
    charge: Charge,
    try_preemption: Callable[[Cell, int, bool], Way],
    may_preempt_and_borrow: bool,
    may_borrow: bool,
) -> Assignment:
    """Choose flavors for all roles.

    ``suits(wanted, flavor)`` tells whether these pods may run on the flavor's nodes at all; ``charge(amounts, flavor)``
    what they are charged there; ``try_preemption(cell, amount, may)`` how that amount could be had once those who leave
    anyway are gone or, if it ``may`` be had so, others gave way.
    """
    result = Assignment()
    for part in wanted:
        chosen: dict[str, str] = {}
        for resource in sorted(part.amounts):
            if resource in chosen or not part.amounts[resource]:
                continue
            group = next((group for group in groups(part) if resource in group.resources), None)
            found = None
            if group is not None:
                found = _best(
                    node, group, choice, part, result.usage,
                    suits=suits, charge=charge, try_preemption=try_preemption,
                    may_preempt_and_borrow=may_preempt_and_borrow, may_borrow=may_borrow,
                )  # fmt: skip
            if found is None:
                result.way, result.missing = Way(Mode.NEVER), (part, resource)
                return result
            flavor, ways = found
            chosen |= dict.fromkeys(group.resources & part.amounts.keys() if group else (), flavor)
            for name, way in ways.items():
                if way.mode < Mode.FIT:
                    result.contested.add((flavor, name))
                mode = min(result.way.mode, way.mode)
                result.way = Way(mode, max(result.way.height, way.height))
        result.flavors |= dict.fromkeys(part.roles, chosen)
        charged = _charged(part, chosen, charge)
        result.usage = total((result.usage, {cell: n for cell, n in charged.items() if cell in node.quotas}))
    return result


def _charged(wanted: Wanted, flavors: Mapping[str, str], charge: Charge) -> dict[Cell, int]:
    """Return what is charged once each resource has its flavor."""
    return {
        (flavor, resource): amount
        for flavor in dict.fromkeys(flavors.values())
        for resource, amount in charge(
            {r: wanted.amounts[r] for r, f in flavors.items() if f == flavor}, flavor
        ).items()
    }


def _best(
    node: Node,
    group: Group,
    choice: FlavorChoice,
    wanted: Wanted,
    used: Mapping[Cell, int],
    *,
    suits: Callable[[Wanted, str], bool],
    charge: Charge,
    try_preemption: Callable[[Cell, int, bool], Way],
    may_preempt_and_borrow: bool,
    may_borrow: bool,
) -> tuple[str, dict[str, Way]] | None:
    best: tuple[str, dict[str, Way]] | None = None
    best_way = Way(Mode.NEVER)
    for flavor in group.flavors:
        if not suits(wanted, flavor):
            continue
        ways: dict[str, Way] = {}
        worst = Way(Mode.FIT)
        mine = {resource: wanted.amounts[resource] for resource in group.resources & wanted.amounts.keys()}
        for resource, amount in sorted(charge(mine, flavor).items()):
            cell = (flavor, resource)
            if cell not in node.quotas:
                continue  # not counted in this flavor
            way = _way(
                node, cell, used.get(cell, 0) + amount,
                try_preemption=try_preemption, may_preempt_and_borrow=may_preempt_and_borrow, may_borrow=may_borrow,
            )  # fmt: skip
            ways[resource] = way
            if better(choice, worst, way):
                worst = way
        if worst.mode is Mode.NEVER:
            continue
        if not _goes_on(choice, worst):
            return flavor, ways
        if better(choice, worst, best_way):
            best, best_way = (flavor, ways), worst
    return best


def _way(
    node: Node,
    cell: Cell,
    amount: int,
    *,
    try_preemption: Callable[[Cell, int, bool], Way],
    may_preempt_and_borrow: bool,
    may_borrow: bool,
) -> Way:
    if amount > node.capacity(cell) or (not may_borrow and amount > node.quota(cell).nominal):
        return Way(Mode.NEVER)
    if not may_borrow and node.exceeds_own(cell, amount):
        return try_preemption(cell, amount, True)  # noqa: FBT003
    height, smaller = height_that_fits(node, cell, amount)
    if amount <= node.available(cell):
        return Way(Mode.FIT, height)
    may = amount <= node.quota(cell).nominal or smaller or may_preempt_and_borrow
    way = try_preemption(cell, amount, may)
    return way if may or way.mode is Mode.WAIT else Way(Mode.NEVER, height)
