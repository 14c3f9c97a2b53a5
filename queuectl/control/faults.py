"""What is known of faults of nodes: conditions, errors of GPUs, and what jobs blame nodes for."""

from collections.abc import Iterator, Mapping, Sequence

import structlog

from queuectl.control.avoided import Avoidance
from queuectl.core import faults
from queuectl.model.faults import Fault, FaultRules, Reading, Xid
from queuectl.model.lifecycle import Workload
from queuectl.model.objects import Node
from queuectl.model.reasons import Reason, why

MAX_SAVED = 500  # readings that one round writes down

log = structlog.get_logger()


class Faults:
    """The faults of all nodes, for one leader's term."""

    def __init__(self, rules: FaultRules) -> None:
        """Start with none."""
        self.rules = rules
        self.count = 0  # nodes that are at fault, as of the last look
        self._nodes: set[str] = set()
        self._conditions: dict[str, tuple[str, ...]] = {}  # of nodes that have such as count
        self._readings: dict[str, Reading] = {}  # of the GPUs of nodes
        self._blamed: dict[tuple[str, str], Fault] = {}  # by node and job
        self._told: dict[tuple[str, int], float] = {}  # by workload and code: Unix seconds at which its job was told
        self._unsaved: dict[str, None] = {}  # nodes whose reading the ledger does not know, the oldest first

    def on_node(self, name: str, node: Node | None) -> None:
        """Take in a changed node. What is known of the GPUs of one that is gone is of no use."""
        self._conditions.pop(name, None)
        if node is not None:
            self._nodes.add(name)
            if node.faults:
                self._conditions[name] = node.faults
            return
        self._nodes.discard(name)
        if self._readings.pop(name, None) is not None:
            self._unsaved.setdefault(name)

    def recall(self, readings: Mapping[str, Reading], workloads: Sequence[Workload]) -> None:
        """Take in what the ledger knows, once all nodes are known."""
        self._readings = {name: reading for name, reading in readings.items() if name in self._nodes}
        self._unsaved = dict.fromkeys(readings.keys() - self._nodes)
        for workload in workloads:
            self.blame(workload)

    def blame(self, workload: Workload) -> None:
        """Take in which nodes a job blames for its failures."""
        job = f"{workload.namespace}/{workload.name}"
        for node, at in workload.ignored.nodes:
            self._blamed[node, job] = Fault(node, f"a rule of {job} blames it for a failure", at)

    def read(self, node: str, shown: Sequence[Xid], now: float) -> list[Xid]:
        """Take in what a node's exporter shows; return the errors that are new and that the node is not blamed for."""
        if node not in self._nodes:
            return []
        before = self._readings.get(node)
        self._readings[node], new = faults.look(before, shown, now, self.rules)
        if self._readings[node] != before:
            self._unsaved.setdefault(node)
        for xid in new:
            log.warning("GPU error", node=node, gpu=xid.gpu, uuid=xid.uuid, xid=xid.code, pod=xid.pod)
        return [xid for xid in new if xid.code not in self.rules.xids]

    def is_news(self, uid: str, code: int, now: float) -> bool:
        """Tell whether a job has not been told of an error of this code for a while, and take it as told.

        A program's own error shows on all of its GPUs at once, and again and again.
        """
        if (uid, code) in self._told and now < self._told[uid, code] + self.rules.seconds:
            return False
        self._told = {key: at for key, at in self._told.items() if now < at + self.rules.seconds}
        self._told[uid, code] = now
        return True

    def take_unsaved(self) -> dict[str, Reading | None]:
        """Return what the ledger does not know, as much as goes into one transaction; None for what is gone."""
        taken = [name for name, _ in zip(self._unsaved, range(MAX_SAVED), strict=False)]
        for name in taken:
            del self._unsaved[name]
        return {name: self._readings.get(name) for name in taken}

    def avoided(self, now: float) -> dict[str, Avoidance]:
        """Return the nodes that are at fault, and who has to leave them."""
        for key in [key for key, fault in self._blamed.items() if now >= fault.at + self.rules.seconds]:
            del self._blamed[key]
        gpus, blamed = self._of_gpus(), self._blamed.values()
        found = faults.judge(self._conditions, gpus, blamed, nodes=len(self._nodes), now=now, rules=self.rules)
        result = {
            node: Avoidance(
                one.problem, why(Reason.NODE_FAULTY, node=node, problem=one.problem) if one.leaves else None
            )
            for node, one in found.items()
            if node in self._nodes
        }
        self.count = len(result)
        return result

    def ends(self, now: float) -> float | None:
        """Return when the next fault is over that nobody says to be over (Unix seconds)."""
        times = (fault.at + self.rules.seconds for fault in (*self._of_gpus(), *self._blamed.values()))
        return min((at for at in times if at > now), default=None)

    def _of_gpus(self) -> Iterator[Fault]:
        for name, reading in self._readings.items():
            if reading.faults:
                yield from faults.of_gpus(name, reading)
