"""The nodes as one integer matrix, kept incrementally and copied cheaply for each cycle.

Rows are nodes, columns are resources, both in order of first appearance; a forgotten node's row is used again.
"""

from collections.abc import Iterable
from typing import Self

import numpy as np
import numpy.typing as npt

from queuectl.core.nodes import eligible
from queuectl.model.objects import Constraints, Flavor, Node, Place
from queuectl.model.plan import Placement

Matrix = npt.NDArray[np.int64]  # (nodes, resources)
Mask = npt.NDArray[np.bool_]  # (nodes,)
Requests = Iterable[tuple[str, int]]
Part = tuple[int, list[int], Matrix]  # row, columns, amounts

AMOUNT_LIMIT = 2**52  # amounts saturate here, so that the sum of 2,000 pods on a node can't overflow
MAX_MASKS = 4096  # kept at most, a byte per node each


class Fleet:
    """What nodes have, what others' pods use of it and what is reserved."""

    def __init__(self) -> None:
        """Start without nodes."""
        self._rows: dict[str, int] = {}
        self._columns: dict[str, int] = {}
        self._nodes: list[Node | None] = []  # by row; None: a name known only from pods or reservations, or unused
        self._unused: list[int] = []
        self._allocatable: Matrix = np.zeros((0, 0), np.int64)
        self._others: Matrix = np.zeros((0, 0), np.int64)
        self._reserved: Matrix = np.zeros((0, 0), np.int64)  # by gangs that are there
        self._promised: Matrix = np.zeros((0, 0), np.int64)  # as it will be once all victims are gone
        self._masks: dict[tuple[Flavor, Constraints], Mask] = {}
        self._by_name: Matrix | None = None  # rows in order of name; None when names have come or gone

    def snapshot(self) -> Self:
        """Return a copy in which reserving changes nothing here; what nodes have is shared, so use it at once."""
        self.by_name()  # for the copy too
        copy = type(self)()
        # Kept masks stay shared: what one finds out serves the other.
        copy.__dict__.update(
            self.__dict__,
            _rows=self._rows.copy(),
            _columns=self._columns.copy(),
            _nodes=self._nodes.copy(),
            _unused=self._unused.copy(),
            _reserved=self._reserved.copy(),
            _promised=self._promised.copy(),
        )
        return copy

    def set_node(self, node: Node) -> None:
        """Add a node or replace what is known of it."""
        row = self._row(node.name)
        self._nodes[row] = node
        columns = [self._column(resource) for resource in node.allocatable]  # may replace the matrices
        self._allocatable[row] = 0
        self._allocatable[row, columns] = [max(0, min(amount, AMOUNT_LIMIT)) for amount in node.allocatable.values()]
        for (flavor, constraints), mask in self._masks.items():
            mask[row] = eligible(node, flavor, constraints)

    def remove_node(self, name: str) -> None:
        """Take a node's room away; pods and reservations still counted there stay counted."""
        row = self._rows.get(name)
        if row is None:
            return
        self._nodes[row] = None
        self._allocatable[row] = 0
        for mask in self._masks.values():
            mask[row] = False
        self._forget_if_unused(name)

    def use(self, node: str, requests: Requests, sign: int) -> None:
        """Count (+1) or stop counting (-1) another's pod on a node."""
        row, columns, amounts = self._at(node, requests, sign)
        self._others[row, columns] += amounts
        self._forget_if_unused(node)

    def reserve(self, node: str, requests: Requests, count: int, *, now: bool = True, later: bool = True) -> None:
        """Reserve ``count`` times the requests on a node; a negative count frees.

        ``now``: among what is there; ``later``: among what will be there once all victims are gone.
        """
        row, columns, amounts = self._at(node, requests, count)
        if now:
            self._reserved[row, columns] += amounts
        if later:
            self._promised[row, columns] += amounts
        self._forget_if_unused(node)

    def free(self, gone: Iterable[tuple[str, Requests, int]] = ()) -> Matrix:
        """Return the room that nobody has, neither now nor once all victims are gone.

        ``gone`` are (node, requests, count) that would be freed. Negative where a room shrank below what is reserved.
        """
        room: Matrix = np.maximum(self._allocatable - self._others, 0)
        reserved, promised = self._reserved, self._promised
        gone = list(gone)
        if gone:
            reserved, promised = reserved.copy(), promised.copy()
        for node, requests, count in gone:
            row, columns, amounts = self._at(node, requests, count)
            reserved[row, columns] -= amounts
            promised[row, columns] -= amounts
        return room - np.maximum(reserved, promised)

    def parts(self, placements: Iterable[Placement]) -> list[Part]:
        """Return what placements take of the rows of ``free``."""
        return [self._at(p.node, p.requests, p.pods) for p in placements]

    def free_later(self) -> Matrix | None:
        """Return the room that nobody will have once all victims are gone; None when none are on their way out."""
        if not (self._reserved > self._promised).any():
            return None
        room: Matrix = np.maximum(self._allocatable - self._others, 0)
        return room - self._promised

    def has_room(
        self, wanted: Iterable[tuple[str, Requests, int]], gone: Iterable[tuple[str, Requests, int]] = ()
    ) -> bool:
        """Tell whether all of ``wanted`` fits where it is asked for, with ``gone`` freed."""
        free = self.free(gone)
        for node, requests, count in wanted:
            row, columns, amounts = self._at(node, requests, count)
            free[row, columns] -= amounts
            if (free[row, columns] < 0).any():
                return False
        return True

    def allocatable(self) -> Matrix:
        """Return the room of nodes that nobody uses; not to be written."""
        return self._allocatable

    def mask(self, flavor: Flavor, constraints: Constraints) -> Mask:
        """Return which rows pods of these constraints may use; kept, so not to be written."""
        key = (flavor, constraints)
        if key not in self._masks:
            if len(self._masks) >= MAX_MASKS:
                del self._masks[next(iter(self._masks))]
            self._masks[key] = np.array(
                [node is not None and eligible(node, flavor, constraints) for node in self._nodes], np.bool_
            )
        return self._masks[key]

    def forget_masks(self) -> None:
        """Drop kept masks, for flavors have changed."""
        self._masks.clear()

    def columns(self, requests: Requests) -> tuple[list[int], Matrix] | None:
        """Return columns and amounts, above zero, of a request; None when no node ever offered a resource of it."""
        wanted = {resource: _saturated(amount) for resource, amount in requests if amount > 0}
        if not wanted.keys() <= self._columns.keys():
            return None
        return [self._columns[resource] for resource in wanted], np.array(list(wanted.values()), np.int64)

    def by_name(self) -> Matrix:
        """Return the rows in order of their nodes' names, so that a plan does not depend on the order of events."""
        if self._by_name is None:
            self._by_name = np.array([row for _, row in sorted(self._rows.items())], np.int64)
        return self._by_name

    def name(self, row: int) -> str:
        """Return the name of the node in a row that a mask allows."""
        node = self._nodes[row]
        if node is None:
            raise LookupError(f"row {row} holds no node")
        return node.name

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
            if resource in node.allocatable
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
        self._by_name = None
        return row

    def _column(self, resource: str) -> int:
        column = self._columns.setdefault(resource, len(self._columns))
        if column == self._reserved.shape[1]:
            self._resize(len(self._nodes), max(8, 2 * column))
        return column

    def _resize(self, rows: int, columns: int) -> None:
        old_rows, old_columns = self._reserved.shape
        shape = ((0, rows - old_rows), (0, columns - old_columns))
        self._allocatable = np.pad(self._allocatable, shape)
        self._others = np.pad(self._others, shape)
        self._reserved = np.pad(self._reserved, shape)
        self._promised = np.pad(self._promised, shape)
        self._nodes.extend([None] * (rows - old_rows))
        self._unused.extend(range(rows - 1, old_rows - 1, -1))
        self._masks = {}  # they are too short now

    def _forget_if_unused(self, name: str) -> None:
        row = self._rows[name]
        if self._nodes[row] is None and not any(m[row].any() for m in (self._others, self._reserved, self._promised)):
            del self._rows[name]
            self._unused.append(row)
            self._by_name = None


def _saturated(amount: int) -> int:
    return min(amount, AMOUNT_LIMIT + 1)  # more than any node has
