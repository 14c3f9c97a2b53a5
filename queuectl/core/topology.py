"""Which domains of a topology the pods of a role go to.

Domains nest: those of a level are the nodes that share the value of its label and the domain of the level above. In
the order of ``Domains.order`` every domain is one run of nodes, so the room of all domains of a level is one sum over
runs. The smallest domain that holds the pods is taken, of several the one with the least room (best fit), of equal ones
that with the least room around it; where none does, the fewest: the largest first, and the last as tight as possible.
So nodes, and racks, that are whole stay whole.
After KEP-2724 (Topology Aware Scheduling).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from queuectl.model.objects import Node

Counts = npt.NDArray[np.int64]
Allotment = list[tuple[int, int]]  # (which, how many)
MAX_COMPARED = 2048  # nodes, the tightest, by what others lose
Loss = Callable[[Counts], Counts]  # of rows of the fleet: what others lose if all pods go to one of them

MODEL = "gpu.model"  # not a label: levels above all others, of nodes whose GPUs are alike
DRIVER = "gpu.driver"
_ALONE = "\0"  # begins the domain of a node without the label: nobody is known to be near it


@dataclass(frozen=True)
class Domains:
    """Nodes in an order in which every domain of every level is one run."""

    order: Counts  # (nodes,) rows of the fleet; by domain, then by name
    starts: tuple[Counts, ...]  # by level, the widest first: where each domain begins; the last level is the node
    names: tuple[tuple[str, ...], ...]  # the same: what each is called; empty: nodes without the label; nodes left out

    @classmethod
    def of(cls, nodes: Sequence[tuple[int, Node]], keys: Sequence[str]) -> Self:
        """Sort (row, node) by levels. ``keys``: labels, ``MODEL`` or ``DRIVER``, the widest level first."""
        paths = sorted((tuple(_value(node, key) for key in keys), node.name, row) for row, node in nodes)
        starts, names = [], []
        for level in range(len(keys)):
            first = [i for i, path in enumerate(paths) if not i or path[0][: level + 1] != paths[i - 1][0][: level + 1]]
            starts.append(np.array(first, np.int64))
            names.append(tuple(paths[i][0][level].partition(_ALONE)[0] for i in first))
        order = np.array([row for _, _, row in paths], np.int64)
        return cls(order, (*starts, np.arange(len(order))), tuple(names))

    @cached_property
    def nodes(self) -> int:
        """The level of nodes."""
        return len(self.starts) - 1

    def run(self, level: int, domain: int) -> slice:
        """Return where in the order the nodes of a domain are."""
        starts = self.starts[level]
        return slice(int(starts[domain]), int(starts[domain + 1]) if domain + 1 < len(starts) else len(self.order))

    def containing(self, level: int, rows: Iterable[int]) -> list[int]:
        """Return for each of these rows of the fleet the domain of a level that its node is in."""
        positions = [self._positions[row] for row in rows]
        domains: list[int] = (np.searchsorted(self.starts[level], positions, side="right") - 1).tolist()
        return domains

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {row: position for position, row in enumerate(self.order.tolist())}

    @cached_property
    def named(self) -> tuple[npt.NDArray[np.bool_], ...]:
        """By level: which domains are of nodes that have the label. The others are none that a job could require."""
        return tuple(np.array([bool(name) for name in names], np.bool_) for names in self.names)


def _value(node: Node, key: str) -> str:
    if key == MODEL:
        return node.gpus.model
    if key == DRIVER:
        return node.gpus.driver or _ALONE + node.name
    return node.labels.get(key) or _ALONE + node.name


@dataclass(frozen=True, slots=True)
class Need:
    """How close pods have to be, by indexes of levels."""

    within: int = -1  # all in one domain of this level; -1: of the whole
    aim: int | None = None  # if it can be, in one of this level or a wider one; None: of the node
    slice_level: int | None = None  # each ``slice_size`` of them in one domain of this level
    slice_size: int = 1
    balanced: bool = False
    named: tuple[int, ...] = ()  # levels whose label the nodes must have

    def inside(self, level: int) -> "Need":
        """Return what is left to be asked for inside a domain of a level: slices that it keeps together are whole."""
        if self.slice_level is None or self.slice_level > level:
            return self
        return replace(self, slice_level=None, slice_size=1)


class Rooms:
    """How many pods, or slices of pods, each domain holds."""

    def __init__(self, domains: Domains, pods: Counts, need: Need) -> None:
        """Count. ``pods``: by row of the fleet, how many each node holds."""
        self.domains = domains
        self.need = need
        self._slices = domains.nodes if need.slice_level is None else need.slice_level
        self._pods = pods[domains.order]
        for level in need.named:
            if level < domains.nodes:
                known = np.repeat(domains.named[level], np.diff(domains.starts[level], append=len(self._pods)))
                self._pods = np.where(known, self._pods, 0)
        self._units: dict[int, Counts] = {}

    def of(self, level: int) -> Counts:
        """Return the room of each domain of a level, down to that of slices in slices, below it in pods."""
        known = self._units.get(level)
        if known is None:
            starts = self.domains.starts
            if level < self._slices:
                known = _sums(self.of(self._slices), np.searchsorted(starts[self._slices], starts[level]))
            else:
                known = self._pods if level == self.domains.nodes else _sums(self._pods, starts[level])
                known = known // self.need.slice_size if level == self._slices else known
            self._units[level] = known
        return known

    def holds(self, pods: int, inside: tuple[int, int] | None = None) -> bool:
        """Tell whether ``place`` would find places: whether the widest domain that it may take has room enough."""
        widest = max(self.need.within, inside[0] if inside else -1)
        if widest < 0:
            return int(self.of(0).sum()) >= self._in_units(pods)
        room, _ = self._children(widest, inside)
        return bool((room >= self._in_units(pods)).any())

    def roomiest(self) -> tuple[str, int]:
        """Return the domain of the required level that holds most, if one is required, and how many pods that are."""
        within = self.need.within
        if within < 0 or not len(self.domains.order):
            return "", int(self.of(0).sum()) * self.need.slice_size
        best = int(np.argmax(self.of(within)))
        name = "" if within == self.domains.nodes else self.domains.names[within][best]
        return name, int(self.of(within)[best]) * self.need.slice_size

    def place(self, pods: int, inside: tuple[int, int] | None = None, loss: Loss | None = None) -> Allotment | None:
        """Return (row, pods) in the closest places that hold all, neighbour by neighbour; None if there are none.

        ``inside``: (level, domain) to stay in. ``loss``: of several nodes that hold all, the one with the least is taken.
        """
        found = self._smallest(pods, inside, loss)
        if found is None:
            return None
        order, left, result = self.domains.order, pods, []
        for at, count in sorted(self._fill(*found, self._in_units(pods))):
            result.append((int(order[at]), min(count, left)))  # the last slice may be a smaller one
            left -= count
        return result

    def _in_units(self, pods: int) -> int:
        return -(-pods // self.need.slice_size)

    def _smallest(self, pods: int, inside: tuple[int, int] | None, loss: Loss | None = None) -> tuple[int, int] | None:
        """Return level and domain, (-1, 0) for the whole, from which on pods have to be spread."""
        wanted = self._in_units(pods)
        aim = self.domains.nodes if self.need.aim is None else self.need.aim
        widest = max(self.need.within, inside[0] if inside else -1)
        for level in range(max(min(aim, self._slices), widest), max(widest, 0) - 1, -1):
            room, first = self._children(level, inside)
            enough = first + np.flatnonzero(room >= wanted)
            if len(enough):
                if loss and level == self.domains.nodes and len(enough) > 1:
                    # The tightest are compared; there may be thousands.
                    enough = enough[np.argsort(self._pods[enough], kind="stable")[:MAX_COMPARED]]
                    lost = loss(self.domains.order[enough])
                    enough = enough[lost == lost.min()]
                return level, self._tightest(level, enough)
        return (-1, 0) if widest < 0 and int(self.of(0).sum()) >= wanted else None

    def _tightest(self, level: int, domains: Counts) -> int:
        """Return the domain with the least room; of equal ones that in the tightest domain of the level above."""
        room = self.of(level)[domains]
        tight = domains[room == room.min()]
        if len(tight) == 1 or not level:
            return int(tight[0])
        starts = self.domains.starts
        above = np.searchsorted(starts[level - 1], starts[level][tight], side="right") - 1
        return int(tight[np.argmin(self.of(level - 1)[above])])

    def _children(self, level: int, inside: tuple[int, int] | None) -> tuple[Counts, int]:
        """Return the room of the domains of a level inside a domain, and which of the level's is their first."""
        if inside is None or inside[0] < 0:  # the whole
            return self.of(level), 0
        run = self.domains.run(*inside)
        first, end = np.searchsorted(self.domains.starts[level], (run.start, run.stop))
        return self.of(level)[first:end], int(first)

    def _fill(self, level: int, domain: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield (position in the order, pods) for so many slices, or pods below their level, inside a domain."""
        if level == self._slices:
            count *= self.need.slice_size
        if level == self.domains.nodes:
            yield domain, count
            return
        room, first = self._children(level + 1, (level, domain))
        for child, share in shares(room, count, balanced=self.need.balanced):
            yield from self._fill(level + 1, first + child, share)


def _sums(values: Counts, starts: Counts) -> Counts:
    return np.add.reduceat(values, starts) if len(starts) else np.zeros(0, np.int64)


def shares(room: Counts, wanted: int, *, balanced: bool = False) -> Allotment:
    """Spread so much over rooms that suffice together: over as few as possible, the last as tight as possible.

    Of equal rooms the first is taken. ``balanced``: each of these few gets as equal a share as their rooms allow.
    """
    order = np.argsort(-room, kind="stable")
    ordered = room[order]
    before = np.cumsum(ordered) - ordered  # in the rooms ahead
    # The first that could take all that is left ends the series; a tighter one may take its part.
    last = int(np.argmax(ordered >= wanted - before))
    if balanced and last:
        return _level(order[: last + 1], ordered[: last + 1], wanted)
    rest = wanted - int(before[last])
    tight = ordered[last:][ordered[last:] >= rest][-1]
    tail = last + int(np.argmax(ordered[last:] == tight))
    return [*zip(order[:last].tolist(), ordered[:last].tolist(), strict=True), (int(order[tail]), rest)]


def _level(which: Counts, room: Counts, wanted: int) -> Allotment:
    """Share out evenly, the smallest room first: what it can't take is for the others."""
    allotted, left = [], wanted
    for at in range(len(which) - 1, -1, -1):
        share = min(int(room[at]), left // (at + 1))
        allotted.append((int(which[at]), share))
        left -= share
    return [(at, share) for at, share in reversed(allotted) if share]
