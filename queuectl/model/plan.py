"""What the core decides. Nothing else leaves it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from queuectl.model.policy import Cause, Cell
from queuectl.model.reasons import Why
from queuectl.model.resources import total


@dataclass(frozen=True, slots=True)
class Placement:
    """``pods`` pods of one role on one node, with what each of them requests."""

    role: str
    flavor: str
    node: str
    pods: int
    requests: tuple[tuple[str, int], ...]  # per pod, sorted by resource


@dataclass(frozen=True, slots=True)
class Admission:
    """Reserve this place for the whole gang."""

    uid: str
    placements: tuple[Placement, ...]
    quota: Mapping[Cell, int] = field(default_factory=dict)  # amounts charged to the queue
    flavors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # role → resource → flavor
    pods: Mapping[str, int] = field(default_factory=dict)  # role → pods that it starts with

    def per_node(self) -> dict[tuple[str, str], int]:
        """Return (node, resource) → amount."""
        return total({(p.node, resource): amount * p.pods for resource, amount in p.requests} for p in self.placements)


@dataclass(frozen=True, slots=True)
class Preempt:
    """Evict the victims, and hold this place, theirs included, for the gang until they are gone."""

    admission: Admission
    victims: tuple[tuple[str, Cause], ...]  # workload uid, why it may be taken


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions of one admission cycle."""

    admissions: tuple[Admission, ...] = ()
    preemptions: tuple[Preempt, ...] = ()
    waits: Mapping[str, Why] = field(default_factory=dict)  # uid → why it waits
    positions: Mapping[str, int] = field(default_factory=dict)  # uid → place in its queue, from 1
    wake_at: float | None = None  # Unix seconds at which a back-off ends and planning is due again
