"""Nodes onto which nobody new goes for now, each by whom and why; who runs there stays, or has to leave."""

from collections.abc import Mapping
from dataclasses import dataclass

from queuectl.model.reasons import Why


@dataclass(frozen=True, slots=True)
class Avoidance:
    """Why a node is avoided."""

    why: str  # for people
    leave: Why | None = None  # why those who are there leave, once they have saved their work; None: they stay


class Avoided:
    """What several sources say of nodes; each of them says all that it has to say at once."""

    def __init__(self) -> None:
        """Start with none."""
        self._by: dict[str, Mapping[str, Avoidance]] = {}  # source → node → what it says

    def say(self, source: str, nodes: Mapping[str, Avoidance]) -> set[str]:
        """Take in what a source says now; return the nodes for which that is new."""
        before, self._by[source] = self._by.get(source, {}), dict(nodes)
        return {name for name in before.keys() | nodes.keys() if before.get(name) != nodes.get(name)}

    def why(self, node: str) -> str:
        """Return why a node is avoided; empty: it is not."""
        return "; ".join(one.why for one in self._of(node))

    def leave(self, node: str) -> Why | None:
        """Return why those who are on a node have to leave, if they have to."""
        return next((one.leave for one in self._of(node) if one.leave), None)

    def _of(self, node: str) -> list[Avoidance]:
        return [nodes[node] for _, nodes in sorted(self._by.items()) if node in nodes]
