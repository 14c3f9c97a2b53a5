"""Nodes that are not ready, or suspect: what is known of them, what the ledger has yet to be told, what is new to people."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from queuectl.control.avoided import Avoidance
from queuectl.core.elastic import keys
from queuectl.core.healing import patience
from queuectl.core.nominate import clock
from queuectl.core.suspects import BY_KUBELET, REMEMBERED, avoided, key, repeats, suspicions
from queuectl.model.lifecycle import Attempt, AttemptKey, AttemptState
from queuectl.model.objects import Flavor, Node, Pod
from queuectl.model.reasons import Reason, Why, why
from queuectl.model.suspects import Healing, Offence, Suspicion

MAX_TOLD = 1024  # characters of a condition's message
MAX_KNOWN = 1000  # failures of pods, and other offences; the oldest are forgotten first

SOURCE = "suspects"  # as a node's avoidance has it


@dataclass(frozen=True, slots=True)
class News:
    """What people are told of a node."""

    node: str
    why: Why


class Suspects:
    """Offences of nodes, and who is suspect by them."""

    def __init__(self, healing: Healing) -> None:
        """Start with none."""
        self._healing = healing
        self.struck: dict[AttemptKey, Why] = {}  # what nodes have done to pods of active attempts; the first counts
        self.unready: dict[str, float] = {}  # node → Unix seconds, since when it is not ready
        self._known: list[Offence] = []
        self._last: dict[tuple[object, ...], Offence] = {}  # of each key, the new ones among them
        self._new: list[Offence] = []  # that the ledger has not been told
        self._forgiven: dict[str, float] = {}  # node → Unix seconds, as its annotation has it
        self._to_forgive: dict[str, float] = {}  # likewise, that the ledger has not been told
        self._dirty = True
        self.now: dict[str, Suspicion] = {}  # those in force
        self.avoided: dict[str, Suspicion] = {}  # those of them because of which a node is avoided
        self._there: set[str] = set()  # nodes
        self._told: dict[str, str] = {}  # node → why it is suspect, as it stands in the API server

    # What others tell

    def load(self, offences: Iterable[Offence]) -> None:
        """Take in what the ledger knows."""
        self._known = list(offences)
        self._last = {key(one): one for one in self._known}
        for node, at in self._forgiven.items():
            self._forgive(node, at)

    def on_node(self, name: str, node: Node | None) -> None:
        """Take in a changed node."""
        self._told.pop(name, None)
        self._there.discard(name)
        self.unready.pop(name, None)
        if node is not None and node.unready_since is not None:
            self.unready[name] = node.unready_since
        if node is None:
            self._forgiven.pop(name, None)
            return
        self._there.add(name)
        if node.suspect:
            self._told[name] = node.suspect
        if node.forgiven_at > self._forgiven.get(name, 0.0):
            self._forgiven[name] = node.forgiven_at
            self._forgive(name, node.forgiven_at)

    def compare(self, attempt: Attempt, node: Node | None) -> None:
        """Take in a node of an active attempt. If it is younger than what runs there, there was another of its name.

        What becomes of nodes that it leaves is no matter.
        """
        since = inf if attempt.running_at is None else max(attempt.running_at, attempt.growing_at or 0.0)
        if node is not None and node.created_at > since and any(p.node == node.name for p in attempt.placements):
            self.struck.setdefault(attempt.key, why(Reason.NODE_REPLACED, node=node.name))

    def on_disrupted(self, attempt: Attempt, pod: Pod) -> None:
        """Take in a disrupted pod of an active attempt, which may be gone before its peers are found to have failed of it.

        Those that the gang gives up, has lost or would grow by are no matter: it runs on without them.
        """
        key = (pod.role, pod.index)
        replaces = attempt.replaces and attempt.state is AttemptState.GROWING
        if pod.disrupted_by not in BY_KUBELET or (key in attempt.coming and not replaces):
            return
        if key in keys(attempt.placements, attempt.done):
            cause = why(Reason.POD_DISRUPTED, pod=pod.name, problem=pod.disrupted, node=pod.node)
            self.struck.setdefault(attempt.key, cause)

    def offend(self, offences: Iterable[Offence]) -> None:
        """Take in what nodes have done; what is known already, or forgiven, is no matter."""
        for one in offences:
            if one.at > self._forgiven.get(one.node, 0.0) and not repeats(one, self._last.get(key(one))):
                self._new.append(one)
                self._last[key(one)] = one

    # What is asked

    def unready_of(self, nodes: Iterable[str]) -> dict[str, float]:
        """Return which of the nodes are not ready, and since when (Unix seconds)."""
        return {node: self.unready[node] for node in nodes if node in self.unready} if self.unready else {}

    def patience(self, nodes: int) -> float:
        """Return the seconds that gangs stay on a node that is not ready. ``nodes``: how many there are."""
        return patience(self._healing, len(self.unready), nodes)

    def take(self) -> tuple[list[Offence], dict[str, float]]:
        """Return what the ledger is to be told: offences, and nodes that were forgiven with the time until which."""
        new, self._new = self._new, []
        forgiven, self._to_forgive = self._to_forgive, {}
        return new, forgiven

    def keep(self, offences: Collection[Offence]) -> None:
        """Take in that the ledger knows of offences."""
        self._known += offences
        self._dirty = self._dirty or bool(offences)

    def due(self, now: float) -> bool:
        """Tell whether it has to be judged anew who is suspect."""
        return self._dirty or (self.wake_at is not None and self.wake_at <= now)

    @property
    def wake_at(self) -> float | None:
        """Unix seconds at which the next suspicion ends."""
        return min((one.until for one in self.now.values()), default=None)

    def judge(self, now: float, flavors: Callable[[], Sequence[Collection[str]]]) -> list[News]:
        """Find out who is suspect, and who is avoided for it; return what is new. ``flavors``: the nodes of each."""
        self._known = list(_remembered(self._known, now))
        self._last = {key(one): one for one in (*self._known, *self._new)}
        self._dirty = False
        before, were_avoided = self.now, self.avoided
        self.now = {name: s for name, s in suspicions(self._known, self._healing.first).items() if s.until > now}
        self.avoided = avoided(self.now, self._known, flavors()) if self.now else {}
        news = [
            News(name, self.cause(name))
            for name, one in sorted(self.now.items())
            if before.get(name) != one or (name in self.avoided) != (name in were_avoided)
        ]
        return news + [News(name, why(Reason.NODE_TRUSTED)) for name in sorted(before.keys() - self.now.keys())]

    def worst(self, most: int) -> list[Suspicion]:
        """Return those that have been suspect most often in a row, at most so many."""
        return sorted(self.now.values(), key=lambda one: (-one.times, one.node))[:most]

    def cause(self, node: str) -> Why:
        """Return why a node is suspect."""
        one = self.now[node]
        if node in self.avoided:
            return why(Reason.NODE_SUSPECT, until=clock(one.until), times=one.times, cause=one.why)
        return why(Reason.NODE_SUSPECT_ONLY, times=one.times, cause=one.why)

    def untold(self) -> dict[str, str]:
        """Return the nodes of which the API server does not say why they are suspect, with why; empty: they are not."""
        wanted = {name: str(self.cause(name))[:MAX_TOLD] for name in self.now if name in self._there}
        nodes = sorted(wanted.keys() | self._told.keys())
        return {name: cause for name in nodes if (cause := wanted.get(name, "")) != self._told.get(name, "")}

    def avoidances(self) -> dict[str, Avoidance]:
        """Return the nodes that are avoided, with why."""
        return {name: Avoidance(f"until {clock(one.until)}, {one.why}") for name, one in self.avoided.items()}

    def _forgive(self, node: str, at: float) -> None:
        rest = [one for one in self._known if one.node != node or one.at > at]
        if len(rest) < len(self._known):
            self._known, self._dirty = rest, True
            self._to_forgive[node] = at


def _remembered(known: Iterable[Offence], now: float) -> Iterable[Offence]:
    """Yield those that are still of any matter, in order."""
    room = Counter({True: MAX_KNOWN, False: MAX_KNOWN})
    kept = []
    for one in sorted(known, key=lambda one: -one.at):
        of_a_pod = one.why.reason is Reason.POD_FAILED
        if one.at > now - REMEMBERED and room[of_a_pod] > 0:
            room[of_a_pod] -= 1
            kept.append(one)
    return reversed(kept)


def nodes_of(flavors: Iterable[Flavor], nodes: Mapping[str, Node]) -> list[set[str]]:
    """Return the nodes of each flavor."""
    return [
        {name for name, node in nodes.items() if all(node.labels.get(k) == value for k, value in flavor.node_labels)}
        for flavor in flavors
    ]
