"""Nodes as they were read, joined with why nobody new goes onto them, and when maintenance takes them."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from math import inf

from queuectl.control.avoided import Avoidance, Avoided
from queuectl.control.devices import Devices
from queuectl.control.faults import Faults
from queuectl.control.suspects import SOURCE, News, Suspects, nodes_of
from queuectl.core.fleet import Fleet
from queuectl.core.healing import stuck_from
from queuectl.core.made import Made
from queuectl.model.lifecycle import Attempt
from queuectl.model.objects import Constraints, Flavor, Job, Node, Place, Pod
from queuectl.model.reasons import Why
from queuectl.model.suspects import Offence


class Nodes:
    """All nodes; a fleet has them as is decided here, by way of their devices."""

    def __init__(
        self,
        fleet: Fleet,
        devices: Devices,
        *,
        flavors: Mapping[str, Flavor],
        suspects: Suspects,
        faults: Faults,
        made: Made,
        changed: Callable[[Iterable[str]], None],
    ) -> None:
        """Start with none. ``changed`` is told the names of those that are others in the fleet now."""
        self._fleet = fleet
        self._devices = devices
        self._flavors = flavors
        self._suspects = suspects
        self._faults = faults
        self._made = made
        self._changed = changed
        self.known: dict[str, Node] = {}  # as they were read
        self._avoided = Avoided()
        self._windows: Mapping[str, float] = {}  # when maintenance takes nodes

    def on_node(self, old: Node | None, new: Node | None) -> None:
        """Take in a changed node."""
        name = (new or old).name  # type: ignore[union-attr]  # one of both is given
        self._suspects.on_node(name, new)
        if old is not None and old == new:
            return  # a heartbeat
        if new is None:
            self.known.pop(name, None)
        else:
            self.known[name] = new
        self._faults.on_node(name, new)
        self._judge(name)

    def avoid(self, source: str, nodes: Mapping[str, Avoidance]) -> set[str]:
        """Have nobody new go onto these nodes, each for its reason; what the source said before is over.

        Return the nodes for which that is new.
        """
        changed = self._avoided.say(source, nodes)
        for name in changed & self.known.keys():
            self._judge(name)
        return changed

    def judge_faults(self, now: float) -> dict[str, str]:
        """Look which nodes are at fault by now; return why, for those for which that is new; empty: they are no more."""
        faulty = self._faults.avoided(now)
        return {name: faulty[name].why if name in faulty else "" for name in self.avoid("faults", faulty)}

    def take_at(self, nodes: Mapping[str, float]) -> None:
        """Have maintenance windows take these nodes at these times, in Unix seconds, and no others."""
        before, self._windows = self._windows, dict(nodes)
        for name in self.known.keys() & (before.keys() | nodes.keys()):
            if before.get(name) != nodes.get(name):
                self._judge(name)

    def offend(self, offences: Collection[Offence]) -> None:
        """Take in what nodes have done; of one that is cordoned somebody knows already."""
        cordoned = {name for one in offences if (node := self.known.get(name := one.node)) and node.unschedulable}
        self._suspects.offend(one for one in offences if one.node not in cordoned)

    def judge_suspects(self, now: float) -> list[News]:
        """Find out which nodes are avoided for what they have done; return what is new of them."""
        news = self._suspects.judge(now, lambda: nodes_of(self._flavors.values(), self.known))
        self.avoid(SOURCE, self._suspects.avoidances())
        return news

    def patience(self) -> float:
        """Return the seconds that gangs stay on a node that is not ready."""
        return self._suspects.patience(len(self.known))

    def silent(self, attempt: Attempt) -> dict[str, float]:
        """Return the nodes of the attempt that are not Ready, and since when, in Unix seconds."""
        return self._suspects.unready_of(p.node for p in attempt.held)

    def leave(self, attempt: Attempt) -> Why | None:
        """Return why an attempt has to leave a node of its, if it has to."""
        return next((leave for p in attempt.held if (leave := self._avoided.leave(p.node))), None)

    def stuck_from(self, pod: Pod) -> float:
        """Return the Unix seconds from which on nobody waits for a pod that was told to go, inf if it was not."""
        node = self.known.get(pod.node)
        return stuck_from(pod, unreachable=node is None or not node.ready)

    def places(self, attempt: Attempt, job: Job | None, now: float | None = None) -> dict[str, Place]:
        """Return what an attempt's nodes are worth to it; before it holds them, at a time in Unix seconds, as to others."""
        constraints = {role.name: role.constraints for role in job.gang.roles} if job else {}
        places: dict[str, Place] = {}
        for placement in attempt.held:
            flavor = self._flavors.get(placement.flavor, Flavor(placement.flavor))
            known = constraints.get(placement.role)
            place = self._fleet.place(placement.node, flavor, known or Constraints(), placement.requests)
            if places.get(placement.node, Place.GOOD) is Place.GOOD:
                outgrown = place is Place.GOOD and attempt.uid in self._made.outgrown
                places[placement.node] = Place.OUTGROWN if outgrown else place
        if now is not None and job is not None and not attempt.holds and not job.gang.lifetime.movable:
            taken = (node for node in places if self._fleet.taken_at(node) < now + (job.max_run_seconds or inf))
            places |= {node: Place.TAKEN for node in taken if places[node] is Place.GOOD}
        return places

    def _judge(self, name: str) -> None:
        """Have a node as it was read last, with why it is avoided, and when maintenance takes it."""
        node = self.known.get(name)
        why_not, at = self._avoided.why(name), self._windows.get(name)
        self._devices.on_node(name, node and replace(node, avoided=why_not, taken_at=at))
        self._changed({name})
