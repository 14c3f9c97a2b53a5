"""What a claim has already: the part of its room that none of its own victims is in any more.

That part is held for it from the decision on, as if it were there. Else others could take what its first victims
leave while it waits for the last, on the strength of room that still others will leave behind.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from queuectl.model.plan import Placement, Portion
from queuectl.model.policy import Cell
from queuectl.model.resources import total

Requests = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Idle:
    """Room of a claim that is free for it now: of quotas, and on nodes."""

    quota: Mapping[Cell, int] = field(default_factory=dict)
    nodes: Mapping[str, Requests] = field(default_factory=dict)

    @classmethod
    def of(cls, claim: Portion, there: Iterable[Portion]) -> Self:
        """Return what of a claim is beyond what its victims have, or leave to it, that is still ``there``."""
        left = list(there)
        used = total(part.quota for part in left)
        mine, theirs = _on_nodes(claim.placements), _on_nodes(p for part in left for p in part.placements)
        nodes: dict[str, list[tuple[str, int]]] = {}
        for (node, resource), amount in sorted(mine.items()):
            beyond = amount - theirs.get((node, resource), 0)
            if beyond > 0:
                nodes.setdefault(node, []).append((resource, beyond))
        return cls(
            {cell: amount - used.get(cell, 0) for cell, amount in claim.quota.items() if amount > used.get(cell, 0)},
            {node: tuple(requests) for node, requests in nodes.items()},
        )


def _on_nodes(placements: Iterable[Placement]) -> dict[tuple[str, str], int]:
    return total({(p.node, resource): amount * p.pods for resource, amount in p.requests} for p in placements)
