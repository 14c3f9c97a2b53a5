"""Nodes onto which nobody new goes for now, each by whom and why; what runs there runs on."""

from collections.abc import Mapping


class Avoided:
    """What several sources say of nodes; each of them says all that it has to say at once."""

    def __init__(self) -> None:
        """Start with none."""
        self._by: dict[str, Mapping[str, str]] = {}  # source → node → why

    def say(self, source: str, nodes: Mapping[str, str]) -> set[str]:
        """Take in what a source says now, by node the reason for people; return the nodes for which that is new."""
        before, self._by[source] = self._by.get(source, {}), dict(nodes)
        return {name for name in before.keys() | nodes.keys() if before.get(name) != nodes.get(name)}

    def why(self, node: str) -> str:
        """Return why a node is avoided; empty: it is not."""
        return "; ".join(nodes[node] for _, nodes in sorted(self._by.items()) if node in nodes)
