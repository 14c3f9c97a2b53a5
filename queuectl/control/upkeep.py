"""What is seen of maintenance: its objects, the nodes, who is there, and test pods."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping

from queuectl.control.avoided import Avoidance
from queuectl.control.budgets import Budgets
from queuectl.control.gangs import Gangs
from queuectl.control.nodes import Nodes
from queuectl.control.pods import Pods
from queuectl.core import maintenance as core
from queuectl.model.lifecycle import LEAVING, UP, Attempt, Workload
from queuectl.model.maintenance import CLOSED, Drain, Maintenance, NodePhase, NodeTest, Phase, There
from queuectl.model.objects import Mark, Node, Pod
from queuectl.model.resources import is_extended

_UNNOTED = Mark()


class Upkeep:
    """All maintenances, and what their decisions depend on."""

    def __init__(
        self,
        attempts: Mapping[str, Attempt],
        workloads: Mapping[str, Workload],
        *,
        pods: Pods,
        gangs: Gangs,
        budgets: Budgets,
        nodes: Nodes,
    ) -> None:
        """Start empty; informers fill it. By workload uid; ``attempts``: the active ones."""
        self._attempts = attempts
        self._workloads = workloads
        self._pods = pods
        self._gangs = gangs
        self._budgets = budgets
        self._mirrored = nodes
        self.maintenances: dict[str, Maintenance] = {}
        self.tests: dict[tuple[str, str], NodeTest] = {}  # by uid of the maintenance and node
        self.refused: dict[tuple[str, str], NodeTest] = {}  # those that could not be created yet
        self.nodes: dict[str, Node] = {}
        self.noted: set[str] = set()  # nodes that bear notes of ours
        self.changed = asyncio.Event()
        self._upgrading: set[str] = set()  # nodes whose driver the GPU Operator upgrades
        self._others: defaultdict[str, dict[str, str]] = defaultdict(dict)  # node → pods of others with devices, by uid

    def on_maintenance(self, old: Maintenance | None, new: Maintenance | None) -> None:
        """Take in a changed NodeMaintenance."""
        if old is not None and (new is None or new.uid != old.uid):
            self.maintenances.pop(old.name, None)
            self.refused = {key: test for key, test in self.refused.items() if test.maintenance != old.uid}
        if new is not None:
            self.maintenances[new.name] = new
        self.changed.set()

    def on_test(self, old: NodeTest | None, new: NodeTest | None) -> None:
        """Take in a changed test pod."""
        if old is not None:
            self.tests.pop((old.maintenance, old.node), None)
        if new is not None:
            self.tests[new.maintenance, new.node] = new
            self.refused.pop((new.maintenance, new.node), None)
        self.changed.set()

    def on_node(self, old: Node | None, new: Node | None) -> None:
        """Take in a changed node."""
        if old == new:
            return  # a heartbeat
        name = (new or old).name  # type: ignore[union-attr]  # one of both is given
        if new is None:
            self.nodes.pop(name, None)
        else:
            self.nodes[name] = new
        for which, belongs in (
            (self.noted, new is not None and new.mark != _UNNOTED),
            (self._upgrading, new is not None and core.is_being_upgraded(new)),
        ):
            (which.add if belongs else which.discard)(name)
        self.changed.set()

    def on_pod(self, old: Pod | None, new: Pod | None) -> None:
        """Take in a changed pod of others."""
        if old is not None and old.requests and not old.workload:
            there = self._others[old.node]
            there.pop(old.uid, None)
            if not there:
                del self._others[old.node]
        if new is not None and not new.workload and any(is_extended(resource) for resource, _ in new.requests):
            self._others[new.node][new.uid] = f"{new.namespace}/{new.name}"

    @property
    def idle(self) -> bool:
        """Tell whether there is nothing to do, and nothing to be said of any node."""
        over = all(one.phase is Phase.FINISHED for one in self.maintenances.values())
        return over and not self.noted and not self._upgrading

    def oldest_first(self) -> list[Maintenance]:
        """Return all maintenances."""
        return sorted(self.maintenances.values(), key=lambda one: (one.created_at, one.name))

    def tests_of(self, one: Maintenance) -> dict[str, NodeTest]:
        """Return the test pods of a maintenance by node."""
        return {node: test for (uid, node), test in self.tests.items() if uid == one.uid}

    def there(self) -> dict[str, There]:
        """Return all nodes, and who is there."""
        jobs: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for uid, attempt in self._attempts.items():
            workload = self._workloads[uid]
            for placement in attempt.held:
                jobs[placement.node][uid] = f"{workload.namespace}/{workload.name}"
        leaving = {uid for uid, attempt in self._attempts.items() if attempt.state in LEAVING}
        told = {
            state.name
            for one in self.maintenances.values()
            for state in one.states
            if state.phase in CLOSED and one.drain is Drain.CHECKPOINT and one.phase is not Phase.FINISHED
        }
        left: defaultdict[str, list[str]] = defaultdict(list)
        for pod in self._pods.left_behind():
            left[pod.node].append(f"{pod.namespace}/{pod.name}")
        stuck = self._stuck({uid for name in told | self._upgrading for uid in jobs.get(name, ())})
        return {
            name: There(
                node,
                jobs.get(name, {}),
                frozenset(leaving & jobs[name].keys()) if name in jobs else frozenset(),
                tuple(f"{job}, {stuck[uid]}" for uid, job in sorted(jobs.get(name, {}).items()) if uid in stuck),
                tuple(sorted(self._others.get(name, {}).values())),
                tuple(sorted(left.get(name, ()))),
            )
            for name, node in self.nodes.items()
        }

    def say(self, now: float) -> dict[str, There]:
        """Say which nodes are avoided, as the objects are; return all nodes and who is there, none when nobody asks."""
        there = {} if self.idle else self.there()
        self._mirrored.avoid("maintenance", self.avoided(there, now) if there else {})
        self._mirrored.take_at(core.taken_at(self.maintenances.values(), self.nodes) if there else {})
        return there

    def avoided(self, there: dict[str, There], now: float) -> dict[str, Avoidance]:
        """Return onto which nodes nobody new goes, why, and who has to leave them."""
        found = {}
        for name in self._upgrading:
            known = there[name]
            found[name] = Avoidance("the GPU Operator upgrades its driver", core.for_upgrade(known))
        owner = core.owners(self.maintenances.values(), self.nodes, now)
        for one in self.maintenances.values():
            phases = {state.name: state.phase for state in one.states}
            for name, problem in core.closed(one, there, owner, now).items():
                begun = phases.get(name, NodePhase.PENDING) in CLOSED and name in there
                found[name] = Avoidance(problem, core.has_to_leave(one, there[name]) if begun else None)
        return found

    def _stuck(self, uids: set[str]) -> dict[str, str]:
        """Return which of these workloads can't be told to leave, and why: by the rules for those who take from others."""
        found = {}
        left = self._budgets.allowed() if uids else {}
        for uid in sorted(uids):
            attempt = self._attempts[uid]
            if attempt.state not in UP:
                continue  # it goes already, or has nothing to lose
            if not self._gangs.preemptible(attempt):
                found[uid] = "which is not preemptible"
                continue
            needs = self._budgets.covering(attempt, attempt.placements)
            forbidden = [budget for budget, pods in needs if left.get(budget, 0) < pods]
            if forbidden:
                found[uid] = f"as PodDisruptionBudget {forbidden[0]} does not allow it now"
                continue
            for budget, pods in needs:
                left[budget] -= pods
        return found
