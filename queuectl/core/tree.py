"""Quota over a tree of queues: who owns how much, what is lent and borrowed, and how fair it is.

Each node of the tree owns its nominal quota and, through its children, what they lend. What a child uses beyond
the part that it does not lend is counted at its parent as well, and so on up to the root. Integers only.
The rules are those of Kueue's cohorts (KEP-79 hierarchical cohorts, KEP-1714 fair sharing).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from queuectl.model.objects import Queue
from queuectl.model.policy import Amounts, Cell, Quota


@dataclass(frozen=True)
class Share:
    """How much of what its parent can lend a node has borrowed, for its weight; larger is less fair.

    Ordered: a node of weight 0 that borrows is beyond every other.
    """

    borrowed: Fraction  # of the resource of which it is largest
    weight: Fraction
    cells: frozenset[Cell] = frozenset()  # where it borrows

    @property
    def borrowing(self) -> bool:
        """Tell whether the node uses more than its subtree's quota of anything."""
        return bool(self.cells)

    @cached_property
    def key(self) -> tuple[bool, Fraction]:
        """Return what shares are compared by."""
        if not self.borrowed:
            return (False, Fraction(0))
        return (True, self.borrowed) if not self.weight else (False, self.borrowed / self.weight)

    def key_after(self, past: "Share | None") -> tuple[bool, Fraction]:
        """Return what shares are compared by where what the node had before counts as well."""
        if past is None:
            return self.key
        return (self.key[0] or past.key[0], self.key[1] + past.key[1])


class Node:
    """A queue in the tree. Made by ``Tree``."""

    __slots__ = ("_lendable", "_share", "children", "name", "parent", "quotas", "subtree", "usage", "weight")

    def __init__(self, name: str, quotas: Mapping[Cell, Quota], weight: Fraction) -> None:
        """Make a node without relatives."""
        self.name = name
        self.quotas = quotas
        self.weight = weight
        self.parent: Node | None = None
        self.children: list[Node] = []
        self.subtree: dict[Cell, int] = {}  # own nominal and what the children lend
        self.usage: dict[Cell, int] = {}  # own, and what the children use beyond what they keep
        self._share: Share | None = None  # kept until usage changes
        self._lendable: dict[str, int] = {}  # kept for good, as quotas are

    def __repr__(self) -> str:
        """Return the name."""
        return f"<Node {self.name}>"

    def ancestors(self) -> Iterator["Node"]:
        """Yield parent, grandparent and so on."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def subtrees(self) -> Iterator["Node"]:
        """Yield the node and all below it."""
        yield self
        for child in self.children:
            yield from child.subtrees()

    @property
    def root(self) -> "Node":
        """The top of the tree."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def quota(self, cell: Cell) -> Quota:
        """Return the queue's own quota, all zero when it has none."""
        return self.quotas.get(cell, _NONE)

    def kept(self, cell: Cell) -> int:
        """Return what the subtree owns and does not lend."""
        limit = self.quota(cell).lending_limit
        return 0 if limit is None else max(0, self.subtree.get(cell, 0) - limit)

    def kept_free(self, cell: Cell) -> int:
        """Return what of that nobody uses."""
        return max(0, self.kept(cell) - self.usage.get(cell, 0))

    def available(self, cell: Cell) -> int:
        """Return how much more may be used here, by own quota and by borrowing; negative when too much is used."""
        used = self.usage.get(cell, 0)
        if self.parent is None:
            return self.subtree.get(cell, 0) - used
        above, bound = self.parent.available(cell), self.bound(cell)
        if bound is not None:
            above = min(above, bound - max(used, self.kept(cell)))
        return self.kept_free(cell) + above

    def bound(self, cell: Cell) -> int | None:
        """Return how much may be used here whatever is free above; None when only what is free above says."""
        owned, limit = self.subtree.get(cell, 0), self.quota(cell).borrowing_limit
        if self.parent is None:
            return owned
        return None if limit is None else owned + limit

    def narrowest(self, cell: Cell) -> "Node":
        """Return what says how much is available: the queue here or above whose borrowing limit does, or the top."""
        bound = self.bound(cell)
        if self.parent is None:
            return self
        if bound is not None and bound - max(self.usage.get(cell, 0), self.kept(cell)) <= self.parent.available(cell):
            return self
        return self.parent.narrowest(cell)

    def over(self, cell: Cell) -> int:
        """Return how much more is used than that: by nobody's admission, but after an edit of quotas."""
        bound = self.bound(cell)
        return 0 if bound is None else max(0, self.usage.get(cell, 0) - bound)

    def capacity(self, cell: Cell) -> int:
        """Return how much could be used here if nothing else were used in the tree."""
        if self.parent is None:
            return self.subtree.get(cell, 0)
        most, bound = self.kept(cell) + self.parent.capacity(cell), self.bound(cell)
        return most if bound is None else min(most, bound)

    def most(self, cell: Cell) -> int:
        """Return how much may ever be used here, by quota that is lent or not: the ledger's last line."""
        owned = self.owned(cell)
        if self.parent is None:
            return owned
        limit = self.quota(cell).borrowing_limit
        above = self.root.owned(cell)
        return above if limit is None else min(above, owned + limit)

    def owned(self, cell: Cell) -> int:
        """Return the sum of the nominal quotas of the queue and all below it."""
        return self.quota(cell).nominal + sum(child.owned(cell) for child in self.children)

    def add(self, cell: Cell, amount: int) -> None:
        """Count usage here and, beyond what is kept, above."""
        beyond = amount - self.kept_free(cell)
        self.usage[cell] = self.usage.get(cell, 0) + amount
        self._share = None
        if self.parent is not None and beyond > 0:
            self.parent.add(cell, beyond)

    def remove(self, cell: Cell, amount: int) -> None:
        """Stop counting usage here and above."""
        beyond = self.usage.get(cell, 0) - self.kept(cell)
        self.usage[cell] = self.usage.get(cell, 0) - amount
        self._share = None
        if self.parent is not None and beyond > 0:
            self.parent.remove(cell, min(amount, beyond))

    def borrows_with(self, cell: Cell, amount: int = 0) -> bool:
        """Tell whether the subtree uses more than its quota once ``amount`` is added."""
        return self.usage.get(cell, 0) + amount > self.subtree.get(cell, 0)

    def direct(self, cell: Cell) -> int:
        """Return what the queue's own gangs use, without those of the queues below."""
        below = sum(max(0, child.usage.get(cell, 0) - child.kept(cell)) for child in self.children)
        return self.usage.get(cell, 0) - below

    def own_used(self, cell: Cell) -> int:
        """Return how much of the queue's own quota its gangs and those below use; more than that is borrowed."""
        lent = self.subtree.get(cell, 0) - self.quota(cell).nominal  # by those below
        return max(self.direct(cell), self.usage.get(cell, 0) - lent)

    def exceeds_own(self, cell: Cell, amount: int) -> bool:
        """Tell whether that much more is beyond the queue's own quota, whatever those below lend."""
        return self.own_used(cell) + amount > self.quota(cell).nominal

    def within(self, cells: Iterable[Cell]) -> bool:
        """Tell whether the subtree uses no more than its quota of any of the cells."""
        return not any(self.borrows_with(cell) for cell in cells)

    def part(self, cells: Iterable[Cell]) -> Fraction:
        """Return how much of what it owns the subtree uses, of that one of the cells where it is most; at most 1."""
        owned = {cell: self.subtree.get(cell, 0) for cell in cells}
        used = (Fraction(self.usage.get(cell, 0), amount) if amount else Fraction(1) for cell, amount in owned.items())
        return min(max(used, default=Fraction(0)), Fraction(1))

    def lendable(self, resource: str) -> int:
        """Return how much of a resource, of all flavors, could be used here if nothing else were used in the tree."""
        if resource not in self._lendable:
            self._lendable[resource] = sum(self.capacity(cell) for cell in self.root.subtree if cell[1] == resource)
        return self._lendable[resource]

    def share(self) -> Share:
        """Return the node's weighted dominant share. A root, which borrows from nobody, has none."""
        if self._share is None:
            self._share = self.share_of(self.usage)
        return self._share

    def share_of(self, usage: Mapping[Cell, int | Fraction]) -> Share:
        """Return the share that the node would have if it used so much."""
        if self.parent is None:
            return Share(Fraction(0), self.weight)
        borrowed: dict[str, int | Fraction] = {}
        cells = set()
        for cell, amount in usage.items():
            over = amount - self.subtree.get(cell, 0)
            if over > 0:
                borrowed[cell[1]] = borrowed.get(cell[1], 0) + over
                cells.add(cell)
        lendable = {resource: self.parent.lendable(resource) for resource in borrowed}
        ratios = (Fraction(over, lendable[r]) for r, over in borrowed.items() if lendable[r] > 0)
        return Share(max(ratios, default=Fraction(0)), self.weight, frozenset(cells))

    def height(self) -> int:
        """Return the distance to the furthest leaf below."""
        return 1 + max(child.height() for child in self.children) if self.children else 0


_NONE = Quota()


class _Twins(Mapping[str, Node]):
    """Copies of nodes, made when one of their tree is first asked for: most cycles look into few of many trees."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes
        self._made: dict[str, Node] = {}

    def __getitem__(self, name: str) -> Node:
        if name not in self._made:
            self._copy(self._nodes[name].root, None)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def _copy(self, node: Node, parent: Node | None) -> Node:
        twin = self._made[node.name] = Node(node.name, node.quotas, node.weight)
        twin.parent, twin.subtree, twin.usage = parent, node.subtree, dict(node.usage)
        twin.children = [self._copy(child, twin) for child in node.children]
        return twin


class Tree:
    """All queues with their usage. Names of parents that do not exist count as no parent."""

    def __init__(self, queues: Iterable[tuple[str, str, Mapping[Cell, Quota], Fraction]]) -> None:
        """Build from (name, parent or "", quotas, weight); the parents must not form a cycle."""
        nodes: dict[str, Node] = {}
        self.nodes: Mapping[str, Node] = nodes
        # Which queues or gangs use what, in words, until that changes.
        self.told: dict[tuple[str, Cell, type], str] = {}
        parents: dict[str, str] = {}
        for name, parent, quotas, weight in queues:
            nodes[name] = Node(name, quotas, weight)
            parents[name] = parent
        for name, parent in parents.items():
            if parent in nodes:
                nodes[name].parent = nodes[parent]
                nodes[parent].children.append(nodes[name])
        for node in nodes.values():
            if node.parent is None:
                _sum_up(node)
        self.tops = {name: node.root.name for name, node in nodes.items()}  # of the queues' trees

    @classmethod
    def of(cls, queues: Iterable[Queue], cut: Collection[str] = ()) -> "Tree":
        """Build from queues; those in ``cut``, whose parents form a cycle, stand alone."""
        return cls((q.name, "" if q.name in cut else q.parent, q.quotas, q.weight) for q in queues)

    def view(self) -> "Tree":
        """Return a tree of the same queues whose usage can be changed. It holds as long as nothing changes here."""
        other = object.__new__(Tree)
        other.nodes, other.told, other.tops = _Twins(self.nodes), {}, self.tops
        return other

    def copy(self) -> "Tree":
        """Return such a tree for good."""
        other = self.view()
        other.nodes = dict(other.nodes)
        return other

    def grow(self, queue: str) -> None:
        """Add a queue without quota, for one that is gone and still used."""
        self.nodes = {**self.nodes, queue: Node(queue, {}, Fraction(1))}
        self.tops = {**self.tops, queue: queue}

    def add(self, queue: str, amounts: Amounts) -> None:
        """Count a workload's usage."""
        node = self.nodes[queue]
        self.told.clear()
        for cell, amount in amounts.items():
            node.add(cell, amount)

    def remove(self, queue: str, amounts: Amounts) -> None:
        """Stop counting a workload's usage."""
        node = self.nodes[queue]
        self.told.clear()
        for cell, amount in amounts.items():
            node.remove(cell, amount)

    def covers(self, queue: str, cells: Iterable[Cell]) -> bool:
        """Tell whether quotas hold what is used of these cells in the queue and above it."""
        return all(self.nodes[queue].available(cell) >= 0 for cell in cells)

    def fits(self, queue: str, amounts: Amounts) -> bool:
        """Tell whether the queue may use that much more now."""
        node = self.nodes[queue]
        return all(amount <= node.available(cell) for cell, amount in amounts.items())


def height_that_fits(node: Node, cell: Cell, amount: int) -> tuple[int, bool]:
    """Return the height of the lowest subtree around a queue whose own quota holds ``amount`` more, 0 for itself.

    And whether that subtree is smaller than the whole tree; the whole tree's height when none holds it.
    """
    if not node.borrows_with(cell, amount) or node.parent is None:
        return 0, node.parent is not None
    rest = amount - node.kept_free(cell)
    for ancestor in node.ancestors():
        if not ancestor.borrows_with(cell, rest):
            return ancestor.height(), ancestor.parent is not None
        rest -= ancestor.kept_free(cell)
    return node.root.height(), False


def _sum_up(node: Node) -> None:
    """Fill in what each subtree owns, from the leaves up."""
    node.subtree = {cell: quota.nominal for cell, quota in node.quotas.items()}
    for child in node.children:
        _sum_up(child)
        for cell, amount in child.subtree.items():
            node.subtree[cell] = node.subtree.get(cell, 0) + amount - child.kept(cell)


def broken_queues(queues: Mapping[str, Queue]) -> dict[str, str]:
    """Return queues whose chain of parents does not end, with what is wrong."""
    broken = {}
    for name in queues:
        chain = [name]
        while (parent := queues[chain[-1]].parent) and name not in broken:
            if parent not in queues:
                broken[name] = f"parent {parent} does not exist; create it or remove spec.parent"
                break
            if parent in chain:
                broken[name] = f"its parents form a cycle, {' -> '.join([*chain, parent])}; change one spec.parent"
                break
            chain.append(parent)
    return broken
