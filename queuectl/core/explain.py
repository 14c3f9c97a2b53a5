"""The facts of reasons: what of a quota is missing, what says so, and who has it."""

from collections.abc import Iterable, Iterator, Sequence

from queuectl.core.preemption import Running
from queuectl.core.tree import Node, Tree
from queuectl.model.policy import Cell
from queuectl.model.reasons import NAMED, Reason, Why, listed, why
from queuectl.model.resources import format_quantity


def short_of_quota(
    tree: Tree, queue: str, cell: Cell, amount: int, *, running: Sequence[Running], fixed: Sequence[Running]
) -> Why:
    """Say what of its quota a queue lacks to use ``amount`` more, and who has it.

    ``running``: the queue's. ``fixed``: those of them who would give way, were they preemptible.
    """
    flavor, resource = cell
    node = tree.nodes[queue]
    by = node.narrowest(cell)

    def told(number: int) -> str:
        return format_quantity(resource, number)

    shared, taken, borrowing = by.subtree.get(cell, 0), by.usage.get(cell, 0), by.quota(cell).borrowing_limit
    limit = "" if by is node else f"; of the {told(shared)} that {by.name} has for its queues, {told(taken)} are in use"
    if by.parent is not None and borrowing is not None:
        limit += f", and it may borrow {told(borrowing)} (borrowingLimit)"
    holders = "" if by is node and not node.children else _users(tree, by, cell)
    if fixed:
        holders += f" Not preemptible: {listed([gang.name for gang in fixed])}."
    return why(
        Reason.WAITING_FOR_QUOTA, queue=queue, flavor=flavor, resource=resource, wanted=told(amount),
        missing=told(amount - node.available(cell)), used=told(node.usage.get(cell, 0)),
        nominal=told(node.subtree.get(cell, 0)), limit=limit, holders=holders,
        jobs=largest(tree, queue, cell, running),
    )  # fmt: skip


def largest(tree: Tree, queue: str, cell: Cell, running: Sequence[Running]) -> str:
    """Say which jobs of a queue hold most. ``running``: the queue's."""
    key = (queue, cell, Running)
    if key not in tree.told:  # many gangs wait for the same, and a queue may run many
        amounts = ((gang.usage.get(cell, 0), gang.name) for gang in running if not gang.goes)
        hold = sorted((-amount, name) for amount, name in amounts if amount)
        names = [f"{name} ({format_quantity(cell[1], -amount)})" for amount, name in hold[:NAMED]]
        names += [name for _, name in hold[NAMED:]]  # not told, but counted
        tree.told[key] = f" Jobs of {queue}: {listed(names)}." if names else ""
    return tree.told[key]


def _users(tree: Tree, top: Node, cell: Cell) -> str:
    """Say which queues below ``top`` use most."""
    key = (top.name, cell, Node)
    if key not in tree.told:  # many gangs wait for the same, and a cohort may be large
        users = sorted(_using(top, cell), key=lambda user: (-user[1], user[0]))
        amounts = [(name, *(format_quantity(cell[1], n) for n in (used, borrowed))) for name, used, borrowed in users]
        names = [f"{name} ({used}{f', {more} borrowed' * (more != '0')})" for name, used, more in amounts]
        tree.told[key] = f" Used by: {listed(names)}." if names else ""
    return tree.told[key]


def _using(node: Node, cell: Cell, kept: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yield the queues whose own jobs use any, beyond what is kept: how much, and how much of it is not their own."""
    own = node.direct(cell)
    used = min(own, node.usage.get(cell, 0) - kept)
    if used > 0:
        yield node.name, used, max(0, own - node.quota(cell).nominal)
    for child in node.children:
        yield from _using(child, cell, child.kept(cell))


def waiting_for_others(leaving: Iterable[Running]) -> Why:
    """Say whose room a gang waits for, all of whom leave without it."""
    names = listed([f"{gang.name} (queue {gang.queue})" for gang in leaving])
    return why(Reason.WAITING_FOR_VICTIMS_OF_OTHERS, victims=f": {names}" if names else "")
