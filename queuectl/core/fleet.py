"""The nodes as one integer matrix, kept incrementally and copied cheaply for each cycle.

Rows are nodes, columns are resources, both in order of first appearance; a forgotten node's row is used again.
How many pods of a kind each node holds is counted once, and then again only where something has changed.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from queuectl.core.devices import Shape, shapes
from queuectl.core.nodes import eligible
from queuectl.core.topology import Domains
from queuectl.model.objects import Constraints, Flavor, GpuNeed, Node, Place
from queuectl.model.plan import Placement
from queuectl.model.resources import ALONE, is_alone, is_device, is_unannounced

Matrix = npt.NDArray[np.int64]  # (nodes, resources)
Mask = npt.NDArray[np.bool_]  # (nodes,)
Requests = Iterable[tuple[str, int]]
Part = tuple[int, list[int], Matrix]  # row, columns, amounts

AMOUNT_LIMIT = 2**52  # amounts saturate here, so that the sum of 2,000 pods on a node can't overflow
MAX_MASKS = 4096  # kept at most, a byte per node each
MAX_COUNTS = 256  # kept at most, 8 bytes per node each
MAX_CHANGES = 4096  # remembered at most; after so many, everything is counted anew
MANY = 2**30  # pods that a node could hold at most, so that sums over nodes can't overflow


_Kind = tuple["Base", Flavor, Constraints, tuple[tuple[str, int], ...]]


class Base(Enum):
    """Which room is looked at."""

    FREE = "Free"  # that nobody has, neither now nor once all victims are gone
    ALLOCATABLE = "Allocatable"  # of nodes that nobody uses


@dataclass(frozen=True, slots=True)
class _Counted:
    """Pods of a kind that each node holds, and how many changes it takes into account."""

    pods: Matrix
    total: int
    seen: int


class Fleet:
    """What nodes have, what others' pods use of it and what is reserved."""

    def __init__(self) -> None:
        """Start without nodes."""
        self._rows: dict[str, int] = {}
        self._columns: dict[str, int] = {}
        self._nodes: list[Node | None] = []  # by row; None: a name known only from pods or reservations, or unused
        self._closed: set[str] = set()  # names of nodes
        self._unused: list[int] = []
        self._spare: list[int] = []  # columns that are free again
        self._perhaps_spare: set[str] = set()  # host ports and the like that nobody may use any more
        self._shares = False  # whether what nodes have is the same matrix as another fleet's
        self._allocatable: Matrix = np.zeros((0, 0), np.int64)
        self._others: Matrix = np.zeros((0, 0), np.int64)
        self._reserved: Matrix = np.zeros((0, 0), np.int64)  # by gangs that are there
        self._promised: Matrix = np.zeros((0, 0), np.int64)  # as it will be once all victims are gone
        self._masks: dict[tuple[Flavor, Constraints], Mask] = {}
        self._domains: dict[tuple[str, ...], Domains] = {}  # by what tells them apart
        self._free: Matrix = np.zeros((0, 0), np.int64)
        self._leaving: set[int] = set()  # rows with victims that are on their way out
        # Of devices that claims name: the distinct shapes, and by row which of them the node has; 0: none.
        self._shapes: dict[tuple[Shape, ...], int] = {(): 0}
        self._shape: Matrix = np.zeros(0, np.int64)
        self._taken_at: npt.NDArray[np.float64] = np.zeros(0)  # by row, when a maintenance window takes the node
        self._windows: Counter[float] = Counter()  # how many nodes are taken when
        self._counted: dict[_Kind, _Counted] = {}
        self._changes: list[int] = []  # rows, in the order in which they changed
        self._shared: dict[_Kind, _Counted] | None = None  # of the fleet whose snapshot this is, while they are alike
        self.told: dict[object, Any] = {}  # what others have worked out, which holds until any room changes
        self.told_of_nodes: dict[object, Any] = {}  # likewise, until nodes or flavors do

    def snapshot(self) -> Self:
        """Return a copy in which reserving changes nothing here; what nodes have is shared, so use it at once."""
        self._drop_spare()
        self._shares = True
        copy = type(self)()
        # Kept masks stay shared: what one finds out serves the other.
        copy.__dict__.update(
            self.__dict__,
            _rows=self._rows.copy(),
            _columns=self._columns.copy(),
            _nodes=self._nodes.copy(),
            _closed=self._closed.copy(),
            _unused=self._unused.copy(),
            _spare=self._spare.copy(),
            _perhaps_spare=set(),
            _reserved=self._reserved.copy(),
            _promised=self._promised.copy(),
            _free=self._free.copy(),
            _leaving=self._leaving.copy(),
            _shape=self._shape.copy(),
            _counted=self._counted.copy(),
            _changes=self._changes.copy(),
            _shared=self._counted,
            told={},
        )
        return copy

    def set_node(self, node: Node) -> None:
        """Add a node or replace what is known of it."""
        self.told_of_nodes = {}
        row = self._row(node.name)
        known = self._nodes[row]
        if known is None or (known.labels, known.gpus) != (node.labels, node.gpus):
            self._domains = {}
        self._nodes[row] = node
        self._take(row, node.taken_at)
        (self._closed.add if node.closed else self._closed.discard)(node.name)
        columns = [self._column(resource) for resource in node.allocatable]  # may replace the matrices
        self._allocatable[row] = 0
        self._allocatable[row, columns] = [max(0, min(amount, AMOUNT_LIMIT)) for amount in node.allocatable.values()]
        self._allocatable[row, [column for resource, column in self._columns.items() if is_alone(resource)]] = ALONE
        self._shape[row] = self._shapes.setdefault(shapes(node.devices, self._columns), len(self._shapes))
        for (flavor, constraints), mask in self._masks.items():
            mask[row] = eligible(node, flavor, constraints)
        self._changed(row)

    def remove_node(self, name: str) -> None:
        """Take a node's room away; pods and reservations still counted there stay counted."""
        row = self._rows.get(name)
        if row is None:
            return
        self._nodes[row] = None
        self._take(row, None)
        self._closed.discard(name)
        self._domains = {}
        self.told_of_nodes = {}
        self._allocatable[row] = 0
        self._shape[row] = 0
        for mask in self._masks.values():
            mask[row] = False
        self._changed(row)
        self._forget_if_unused(name)

    def use(self, node: str, requests: Requests, sign: int) -> None:
        """Count (+1) or stop counting (-1) another's pod on a node."""
        if sign < 0:
            self._perhaps_spare |= {resource for resource, _ in requests if is_alone(resource)}
        row, columns, amounts = self._at(node, requests, sign)
        self._others[row, columns] += amounts
        self._changed(row)
        self._forget_if_unused(node)

    def reserve(self, node: str, requests: Requests, count: int, *, now: bool = True, later: bool = True) -> None:
        """Reserve ``count`` times the requests on a node; a negative count frees.

        ``now``: among what is there; ``later``: among what will be there once all victims are gone.
        """
        if count < 0:
            self._perhaps_spare |= {resource for resource, _ in requests if is_alone(resource)}
        row, columns, amounts = self._at(node, requests, count)
        if now:
            self._reserved[row, columns] += amounts
        if later:
            self._promised[row, columns] += amounts
        self._changed(row)
        self._forget_if_unused(node)

    def free(self, gone: Iterable[tuple[str, Requests, int]] = ()) -> "Room":
        """Return the room that nobody has, neither now nor once all victims are gone.

        ``gone`` are (node, requests, count) that would be freed. Negative where a room shrank below what is reserved.
        """
        freed = [self._at(*one) for one in gone]  # before any row is copied: it may add columns
        room = Room(self, Base.FREE)
        for row, columns, amounts in freed:
            room.use(row, columns, -amounts)
        return room

    def parts(self, placements: Iterable[Placement]) -> list[Part]:
        """Return what placements take of the rows of a room."""
        return [self._at(p.node, p.requests, p.pods) for p in placements]

    @property
    def leaving(self) -> bool:
        """Tell whether any victims are on their way out."""
        return bool(self._leaving)

    def free_later(self) -> "Room | None":
        """Return the room that nobody will have once all victims are gone; None when none are on their way out."""
        if not self._leaving:
            return None
        room = Room(self, Base.FREE)
        for row in self._leaving:
            room.set(row, np.maximum(self._allocatable[row] - self._others[row], 0) - self._promised[row])
        return room

    def emptied(self) -> "Room":
        """Return the room of nodes that nobody uses."""
        return Room(self, Base.ALLOCATABLE)

    def has_room(
        self, wanted: Iterable[tuple[str, Requests, int]], gone: Iterable[tuple[str, Requests, int]] = ()
    ) -> bool:
        """Tell whether all of ``wanted`` fits where it is asked for, with ``gone`` freed."""
        asked = [self._at(*one) for one in wanted]
        room = self.free(gone)
        for row, columns, amounts in asked:
            room.use(row, columns, amounts)
            if (room.of(row)[columns] < 0).any():
                return False
        return True

    def matrix(self, base: Base) -> Matrix:
        """Return the room, a row for each node and a column for each resource; not to be written."""
        return self._free if base is Base.FREE else self._allocatable

    def pods(
        self, base: Base, flavor: Flavor, constraints: Constraints, requests: tuple[tuple[str, int], ...]
    ) -> tuple[Matrix, int]:
        """Return how many pods of a kind each row has room for, kept, so not to be written; and all rows together."""
        key = (base, flavor, constraints, requests)
        known = self._counted.get(key)
        if known is not None and known.seen == len(self._changes):
            return known.pods, known.total
        mask = self.mask(flavor, constraints)
        if known is None:
            pods = self.count(slice(None), self.matrix(base), mask, requests, constraints.gpu)
        else:
            rows = np.array(sorted(set(self._changes[known.seen :])), np.int64)
            pods = known.pods.copy()
            pods[rows] = self.count(rows, self.matrix(base)[rows], mask[rows], requests, constraints.gpu)
        total = int(pods.sum())
        for kept in (self._counted, self._shared):
            if kept is not None:
                if key not in kept and len(kept) >= MAX_COUNTS:
                    del kept[next(iter(kept))]
                kept[key] = _Counted(pods, total, len(self._changes))
        return pods, total

    def count(self, rows: Matrix | slice, room: Matrix, mask: Mask, requests: Requests, gpu: GpuNeed | None) -> Matrix:
        """Return how many pods of a kind each of some rows holds. ``room``: what these rows have."""
        wanted = self.columns(requests)
        if wanted is None:
            return np.zeros(len(mask), np.int64)
        columns, amounts = wanted
        counts = np.where(mask, np.maximum((room[:, columns] // amounts).min(axis=1, initial=MANY), 0), 0)
        asked = dict(requests)
        for known, number in self._shapes.items():
            named = [shape for shape in known if asked.get(shape.resource)]
            at = np.flatnonzero((self._shape[rows] == number) & (counts > 0)) if named else ()
            for shape in named if len(at) else ():
                held = shape.holds(room[at], asked[shape.resource], gpu or GpuNeed())
                counts[at] = np.minimum(counts[at], held)
        return counts

    def devices(
        self, row: int, room: Matrix, requests: tuple[tuple[str, int], ...], pods: int, gpu: GpuNeed | None
    ) -> list[tuple[tuple[tuple[str, int], ...], int]]:
        """Return (requests, pods) of so many pods on a node: one by one with their devices, where claims name them.

        ``room``: what the row has, devices for all of them.
        """
        asked, each = dict(requests), [requests] * pods
        for shape in self._shapes_of(row):
            if asked.get(shape.resource):
                chosen = shape.choose(room, asked[shape.resource], pods, gpu or GpuNeed())
                each = [
                    tuple(sorted((*one, *((name, 1) for name in names))))
                    for one, names in zip(each, chosen, strict=True)
                ]
        return [(requests, pods)] if each == [requests] * pods else [(one, 1) for one in each]

    def roomiest(self, room: Matrix, mask: Mask, resource: str, level: str) -> int:
        """Return how many devices are free in that domain of a level inside a node that has most."""
        return max(
            (
                shape.most(room[(self._shape == number) & mask], level)
                for known, number in self._shapes.items()
                for shape in known
                if shape.resource == resource
            ),
            default=0,
        )

    def _shapes_of(self, row: int) -> tuple[Shape, ...]:
        return next(known for known, number in self._shapes.items() if number == self._shape[row])

    def mask(self, flavor: Flavor, constraints: Constraints) -> Mask:
        """Return which rows pods of these constraints may use; kept, so not to be written."""
        if constraints.until > 0:  # few, and of passing times, so they are not kept
            return self.mask(flavor, replace(constraints, until=0.0)) & (self._taken_at >= constraints.until)
        key = (flavor, constraints)
        if key not in self._masks:
            if len(self._masks) >= MAX_MASKS:
                del self._masks[next(iter(self._masks))]
            self._masks[key] = np.array(
                [node is not None and eligible(node, flavor, constraints) for node in self._nodes], np.bool_
            )
        return self._masks[key]

    @property
    def has_windows(self) -> bool:
        """Tell whether maintenance windows take any node."""
        return bool(self._windows)

    @property
    def windows(self) -> list[float]:
        """The times, in Unix seconds and in order, at which maintenance windows take nodes."""
        return sorted(self._windows)

    def taken_at(self, name: str) -> float:
        """Return the Unix seconds at which a maintenance window takes a node; infinite if none is known."""
        row = self._rows.get(name)
        return inf if row is None else float(self._taken_at[row])

    def taken_before(self, end: float) -> float:
        """Return a time of which it is true that the same nodes are taken before it as before ``end``; 0.0: none.

        It is the same for many ends, so that gangs that end at different times can be looked at together.
        """
        windows = self.windows
        index = bisect_left(windows, end)
        return 0.0 if not index else windows[index] if index < len(windows) else inf

    def closed(self, flavor: Flavor, constraints: Constraints) -> list[Node]:
        """Return the nodes that such pods could use if these were not closed: avoided, cordoned or not Ready. By name."""
        if not self._closed:
            return []
        mask = self.mask(flavor, replace(constraints, closed=True, until=0.0))
        rows = map(self._rows.__getitem__, sorted(self._closed))
        return [node for row in rows if mask[row] and (node := self._nodes[row])]

    def offers(self, mask: Mask, resource: str) -> bool:
        """Tell whether any of the nodes in these rows has the resource for pods."""
        column = self._columns.get(resource)
        return column is not None and bool((mask & (self._allocatable[:, column] > 0)).any())

    def offered(self, mask: Mask) -> set[str]:
        """Return the resources that any of the nodes in these rows has for pods."""
        most = self._allocatable[mask].max(axis=0, initial=0)
        return {resource for resource, column in self._columns.items() if most[column] > 0}

    def forget_masks(self) -> None:
        """Drop kept masks, for flavors have changed."""
        self._masks.clear()
        self.told_of_nodes = {}
        self._forget_counts()

    def columns(self, requests: Requests) -> tuple[list[int], Matrix] | None:
        """Return columns and amounts, above zero, of a request; None when no node ever offered a resource of it."""
        wanted = {resource: _saturated(amount) for resource, amount in requests if amount > 0}
        if not wanted.keys() <= self._columns.keys():
            return None
        return [self._columns[resource] for resource in wanted], np.array(list(wanted.values()), np.int64)

    def meet(self, requests: Requests) -> None:
        """Have columns for those host ports and the like that are among these requests, and as few more as can be.

        To be called before any room is asked for: one that was made before does not have them.
        """
        alone = {resource for resource, _ in requests if is_alone(resource)}
        if not alone <= self._columns.keys():
            self._drop_spare()
            for resource in alone:
                self._column(resource)
        self._perhaps_spare |= alone

    def domains(self, *keys: str) -> Domains:
        """Return the nodes by domains; see ``Domains.of``. Kept, and made anew when nodes or labels have changed."""
        if keys not in self._domains:
            nodes = [(row, node) for row, node in enumerate(self._nodes) if node is not None]
            self._domains[keys] = Domains.of(nodes, keys)
        return self._domains[keys]

    def name(self, row: int) -> str:
        """Return the name of the node in a row that a mask allows."""
        node = self._nodes[row]
        if node is None:
            raise LookupError(f"row {row} holds no node")
        return node.name

    def row(self, name: str) -> int | None:
        """Return the row of a node; None if it does not exist."""
        row = self._rows.get(name)
        return row if row is not None and self._nodes[row] is not None else None

    def node_names(self) -> list[str]:
        """Return the names of all nodes that exist."""
        return [node.name for node in self._nodes if node is not None]

    def room(self, name: str) -> dict[str, int]:
        """Return the node's room per resource as the ledger keeps it; empty for a node that is gone."""
        row = self._rows.get(name)
        node = self._nodes[row] if row is not None else None
        if row is None or node is None:
            return {}
        return {
            resource: max(0, int(self._allocatable[row, column] - self._others[row, column]))
            for resource, column in self._columns.items()
            if (resource in node.allocatable and not is_device(resource))
            or (is_unannounced(resource) and self._is_used(row, column))
        }

    def place(self, name: str, flavor: Flavor, constraints: Constraints, requests: Requests) -> Place:
        """Tell what a reserved place is worth to pods of these requests that are not bound there yet."""
        row = self._rows.get(name)
        node = self._nodes[row] if row is not None else None
        if row is None or node is None:
            return Place.GONE
        if not self.mask(flavor, constraints)[row]:
            return Place.CLOSED
        # Only what they ask for: a shortage of anything else is a matter of those who hold that, and planning them
        # anew would bring them back here.
        columns = [self._columns[resource] for resource, _ in requests if resource in self._columns]
        most = np.maximum(self._reserved[row, columns], self._promised[row, columns])
        short = self._allocatable[row, columns] < self._others[row, columns] + most
        return Place.CROWDED if bool(short.any()) else Place.GOOD

    def _at(self, name: str, requests: Requests, count: int) -> Part:
        wanted = {resource: _saturated(amount) for resource, amount in requests}
        row, columns = self._row(name), [self._column(resource) for resource in wanted]  # may replace the matrices
        return row, columns, np.array(list(wanted.values()), np.int64) * count

    def _row(self, name: str) -> int:
        row = self._rows.get(name)
        if row is not None:
            return row
        if not self._unused:
            self._resize(max(16, 2 * len(self._nodes)), self._reserved.shape[1])
        row = self._rows[name] = self._unused.pop()
        return row

    def _column(self, resource: str) -> int:
        column = self._columns.get(resource)
        if column is not None:
            return column
        column = self._columns[resource] = self._spare.pop() if self._spare else len(self._columns)
        if column == self._reserved.shape[1]:
            self._resize(len(self._nodes), max(8, 2 * column))
        if is_alone(resource):
            self._own()
            self._allocatable[:, column] = [ALONE if node is not None else 0 for node in self._nodes]
            self._free[:, column] = self._allocatable[:, column]
        else:
            self._forget_counts()  # who asks for it had nowhere to go
        return column

    def _drop_spare(self) -> None:
        """Have columns of host ports and the like, which nobody uses any more, for others."""
        for resource in self._perhaps_spare & self._columns.keys():
            column = self._columns[resource]
            if not self._is_used(slice(None), column):
                self._spare.append(self._columns.pop(resource))
                self._own()
                self._allocatable[:, column] = self._free[:, column] = 0
        self._perhaps_spare = set()

    def _own(self) -> None:
        if self._shares:
            self._allocatable, self._shares = self._allocatable.copy(), False

    def _is_used(self, rows: int | slice, column: int) -> bool:
        return any(bool(matrix[rows, column].any()) for matrix in (self._others, self._reserved, self._promised))

    def _resize(self, rows: int, columns: int) -> None:
        old_rows, old_columns = self._reserved.shape
        shape = ((0, rows - old_rows), (0, columns - old_columns))
        self._allocatable = np.pad(self._allocatable, shape)
        self._others = np.pad(self._others, shape)
        self._reserved = np.pad(self._reserved, shape)
        self._promised = np.pad(self._promised, shape)
        self._free = np.pad(self._free, shape)
        self._shape = np.pad(self._shape, shape[0])
        self._taken_at = np.pad(self._taken_at, shape[0], constant_values=inf)
        self._forget_counts()
        self._nodes.extend([None] * (rows - old_rows))
        self._unused.extend(range(rows - 1, old_rows - 1, -1))
        self._masks = {}  # they are too short now

    def _take(self, row: int, at: float | None) -> None:
        """Take in when a maintenance window takes a row's node."""
        before, self._taken_at[row] = self._taken_at[row], inf if at is None else at
        for time, sign in ((float(before), -1), (float(self._taken_at[row]), +1)):
            if time < inf:
                self._windows[time] += sign
                if not self._windows[time]:
                    del self._windows[time]

    def _changed(self, row: int) -> None:
        """Take in that a row's room has changed."""
        room = np.maximum(self._allocatable[row] - self._others[row], 0)
        self._free[row] = room - np.maximum(self._reserved[row], self._promised[row])
        (self._leaving.add if (self._reserved[row] > self._promised[row]).any() else self._leaving.discard)(row)
        self._shared = None
        self.told.clear()
        self._changes.append(row)
        if len(self._changes) > MAX_CHANGES:
            self._forget_counts()

    def _forget_counts(self) -> None:
        self.told.clear()
        self._counted = {}
        self._changes = []
        self._shared = None

    def _forget_if_unused(self, name: str) -> None:
        row = self._rows[name]
        if self._nodes[row] is None and not any(m[row].any() for m in (self._others, self._reserved, self._promised)):
            del self._rows[name]
            self._unused.append(row)


class Room:
    """Room on the nodes of a fleet, used up while it is handed out. Only rows that differ from the fleet's are kept."""

    def __init__(self, fleet: Fleet, base: Base) -> None:
        """Start with what the fleet has."""
        self._fleet = fleet
        self._base = base
        self._rows: dict[int, Matrix] = {}  # row → amounts by column

    @property
    def told(self) -> dict[object, Any] | None:
        """What is known of it and can be added to; None where it isn't the fleet's own free room."""
        return None if self._rows or self._base is not Base.FREE else self._fleet.told

    def copy(self) -> Self:
        """Return a room that can be used up for itself."""
        other = type(self)(self._fleet, self._base)
        other._rows = {row: amounts.copy() for row, amounts in self._rows.items()}  # noqa: SLF001 - its own kind
        return other

    def matrix(self) -> Matrix:
        """Return all of it, a row for each node and a column for each resource, to be written."""
        matrix = self._fleet.matrix(self._base).copy()
        for row, amounts in self._rows.items():
            matrix[row] = amounts
        return matrix

    def of(self, row: int) -> Matrix:
        """Return a row's amounts by column; not to be written."""
        known = self._rows.get(row)
        return self._fleet.matrix(self._base)[row] if known is None else known

    def rows(self, rows: Matrix) -> Matrix:
        """Return some rows, to be written."""
        return (self.matrix() if self._rows else self._fleet.matrix(self._base))[rows]

    def set(self, row: int, amounts: Matrix) -> None:
        """Give a row other amounts."""
        self._rows[row] = amounts

    def use(self, row: int, columns: list[int], amounts: Matrix) -> None:
        """Take amounts out of some columns of a row; negative ones are put in."""
        known = self._rows.get(row)
        if known is None:
            known = self._rows[row] = self._fleet.matrix(self._base)[row].copy()
        known[columns] -= amounts

    def pods(self, flavor: Flavor, constraints: Constraints, requests: tuple[tuple[str, int], ...]) -> Matrix:
        """Return how many pods of a kind each row has room for; not to be written."""
        pods, _ = self._fleet.pods(self._base, flavor, constraints, requests)
        if self._rows:
            pods = pods.copy()
            rows, counts = self._changed(flavor, constraints, requests)
            pods[rows] = counts
        return pods

    def total(self, flavor: Flavor, constraints: Constraints, requests: tuple[tuple[str, int], ...]) -> int:
        """Return how many pods of a kind all rows together have room for."""
        pods, total = self._fleet.pods(self._base, flavor, constraints, requests)
        if self._rows:
            rows, counts = self._changed(flavor, constraints, requests)
            total += int(counts.sum()) - int(pods[rows].sum())
        return total

    def roomiest(self, flavor: Flavor, constraints: Constraints, resource: str, level: str) -> int:
        """Return how many devices are free in that domain of a level inside nodes that has most."""
        return self._fleet.roomiest(self.matrix(), self._fleet.mask(flavor, constraints), resource, level)

    def _changed(
        self, flavor: Flavor, constraints: Constraints, requests: tuple[tuple[str, int], ...]
    ) -> tuple[Matrix, Matrix]:
        rows, mask = np.array(list(self._rows), np.int64), self._fleet.mask(flavor, constraints)
        return rows, self._fleet.count(rows, np.stack(list(self._rows.values())), mask[rows], requests, constraints.gpu)


def _saturated(amount: int) -> int:
    return min(amount, AMOUNT_LIMIT + 1)  # more than any node has
