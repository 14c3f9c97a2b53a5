"""What queues have used before: an average over time that forgets with a half-life.

Each moment counts by 2^-(age / half-life), scaled so that the average is in the resource's own unit: a queue that has
held 8 GPUs for ever has used 8. (Slurm decays usage likewise, PriorityDecayHalfLife; Kueue, usageHalfLifeTime.)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from queuectl.core.tree import Node
from queuectl.model.policy import Amounts, Cell

Past = Mapping[str, Mapping[Cell, Fraction]]  # queue → what it has used on average
STEPS = 1000  # of a unit, to which an average is rounded, so that a plan is exact from here on
_GONE = 1000.0  # half-lives after which nothing is left, and before which no power underflows


@dataclass(slots=True)
class _Average:
    """Of one queue and cell: what is held, and how far the average was from that at a time."""

    held: int = 0
    gap: float = 0.0  # held - average; halves with each half-life
    at: float = 0.0


@dataclass(slots=True)
class History:
    """The averages of all queues, kept by what begins and ends. ``half_life`` in seconds; 0 keeps nothing."""

    half_life: float = 0.0
    _averages: dict[str, dict[Cell, _Average]] = field(default_factory=dict)

    def begin(self, queue: str, amounts: Amounts, at: float) -> None:
        """Count amounts as held since a time (Unix seconds)."""
        self._change(queue, amounts, at, +1)

    def end(self, queue: str, amounts: Amounts, at: float) -> None:
        """Count amounts as held no more since a time."""
        self._change(queue, amounts, at, -1)

    def recall(self, queue: str, averages: Mapping[Cell, float], at: float) -> None:
        """Add what was held before then, and is no longer, as it is in the average of that time."""
        for cell, amount in averages.items() if self.half_life else ():
            average = self._at(queue, cell, at)
            average.gap -= amount * self._left(average.at - at)

    def past(self, now: float) -> dict[str, dict[Cell, Fraction]]:
        """Return each queue's averages as of now, in thousandths of a unit; nothing of zero."""
        result: dict[str, dict[Cell, Fraction]] = {}
        for queue, averages in self._averages.items():
            for cell, one in averages.items():
                steps = round((one.held - one.gap * self._left(now - one.at)) * STEPS)
                if steps > 0:
                    result.setdefault(queue, {})[cell] = Fraction(steps, STEPS)
        return result

    def _change(self, queue: str, amounts: Amounts, at: float, sign: int) -> None:
        for cell, amount in amounts.items() if self.half_life else ():
            average = self._at(queue, cell, at)
            average.held += sign * amount
            average.gap += sign * amount * self._left(average.at - at)

    def _at(self, queue: str, cell: Cell, at: float) -> _Average:
        """Return the average as of a time, or as of a later one to which it has been brought already."""
        average = self._averages.setdefault(queue, {}).setdefault(cell, _Average(at=at))
        if at > average.at:
            average.gap *= self._left(at - average.at)
            average.at = at
        return average

    def _left(self, seconds: float) -> float:
        return float(2.0 ** -min(_GONE, max(0.0, seconds) / self.half_life))


def nested(roots: Iterable[Node], past: Past) -> dict[str, dict[Cell, Fraction]]:
    """Return for every queue what was used in it, and by those below it beyond what they keep for themselves."""
    result: dict[str, dict[Cell, Fraction]] = {}

    def add_up(node: Node) -> dict[Cell, Fraction]:
        used = result[node.name] = dict(past.get(node.name, {}))
        for child in node.children:
            for cell, amount in add_up(child).items():
                beyond = amount - child.kept(cell)
                if beyond > 0:
                    used[cell] = used.get(cell, Fraction(0)) + beyond
        return used

    for root in roots:
        add_up(root)
    return result
