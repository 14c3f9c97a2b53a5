"""Which nodes are at fault, and whether those who run there have to leave. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from queuectl.core.nominate import clock
from queuectl.model.faults import HARDWARE_XIDS, OTHER_XIDS, Fault, FaultRules, Reading, Xid

# As EKS' node repair does, which stops when more than a fifth of a group's nodes are unhealthy.
MOST_EMPTIED = 5  # one of so many nodes may be emptied at a time
MOST_BLAMED = 10  # one of so many may be avoided for what jobs say alone, for anybody may submit one
AT_LEAST = 3  # nodes, also of a cluster with few
NAMED = 4  # problems of a node, for its GPUs may have hundreds


@dataclass(frozen=True, slots=True)
class Faulty:
    """A node that is at fault."""

    problem: str
    leaves: bool


def look(before: Reading | None, shown: Collection[Xid], now: float, rules: FaultRules) -> tuple[Reading, list[Xid]]:
    """Return what is known of a node's GPUs after its exporter was read, and the errors that are new.

    Exporters show the last error of each GPU until they are started anew, or how many there were within some minutes
    or ever. New is what they show more of than the last time. So nothing is new that is there when a node is read for
    the first time (``before`` is None), nor when another leader goes on from where the one before stopped. What they
    show no more begins anew. An error that comes again on the same GPU can't be told by the last error alone.
    """
    new = [xid for xid in shown if before is not None and xid.level > before.levels.get(xid.key, 0)]
    new = [*{(xid.uuid or xid.gpu, xid.code): xid for xid in new}.values()]
    faults = {key: at for key, at in (before.faults if before else {}).items() if now < at + rules.seconds}
    faults |= {(xid.gpu, xid.code): now for xid in new if xid.code in rules.xids}
    return Reading({xid.key: xid.level for xid in shown}, faults), new


def of_gpus(node: str, reading: Reading) -> list[Fault]:
    """Return the faults of a node's GPUs."""
    return [Fault(node, f"{told(gpu, code)} at {clock(at)}", at) for (gpu, code), at in reading.faults.items()]


def told(gpu: str, code: int) -> str:
    """Return an error in words."""
    words = HARDWARE_XIDS.get(code) or OTHER_XIDS.get(code)
    return f"GPU {gpu} reported XID {code}{f' ({words})' if words else ''}"


def judge(
    conditions: Mapping[str, Collection[str]],
    faults: Iterable[Fault],
    blames: Iterable[Fault],
    *,
    nodes: int,
    now: float,
    rules: FaultRules,
) -> dict[str, Faulty]:
    """Return the nodes that are at fault.

    ``conditions``: what others say of them that counts. ``blames``: what jobs blame them for, which nobody has to leave
    for. ``nodes``: how many there are. When so many are at fault that it is more likely whoever says so, nobody has to
    leave; of those that jobs blame the latest count.
    """
    problems = {node: [*said] for node, said in conditions.items() if said}
    for fault in faults:
        problems.setdefault(fault.node, []).extend(_lasting(fault, now, rules))
    emptied = {node for node, found in problems.items() if found}
    leaves = len(emptied) <= max(AT_LEAST, nodes // MOST_EMPTIED)
    blamed: set[str] = set()
    for fault in sorted(blames, key=lambda fault: -fault.at):
        if fault.node in blamed or len(blamed) < max(AT_LEAST, nodes // MOST_BLAMED):
            found = _lasting(fault, now, rules)
            problems.setdefault(fault.node, []).extend(found)
            blamed |= {fault.node} if found else set()
    return {node: Faulty(_few(found), leaves and node in emptied) for node, found in problems.items() if found}


def _few(problems: Sequence[str]) -> str:
    """Return the first ones, and how many more there are."""
    more = len(problems) - NAMED
    return "; ".join((*problems[:NAMED], *([f"and {more} more"] if more > 0 else ())))


def _lasting(fault: Fault, now: float, rules: FaultRules) -> list[str]:
    """Return a fault in words, if it is not over."""
    until = fault.at + rules.seconds
    return [f"{fault.problem}, avoided until {clock(until)}"] if now < until else []
