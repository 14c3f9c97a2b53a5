"""One cycle's view of the world."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from queuectl.core.fleet import Fleet
from queuectl.model.objects import Flavor, Gang, Queue
from queuectl.model.plan import Admission

QuotaKey = tuple[str, str, str]  # queue, flavor, resource


@dataclass(frozen=True)
class Snapshot:
    """What ``plan`` decides upon. A cycle works on copies of ``fleet`` and ``usage``, in which it assumes gangs."""

    queues: Mapping[str, Queue]
    flavors: Mapping[str, Flavor]
    waiting: Sequence[Gang]
    fleet: Fleet
    usage: dict[QuotaKey, int]  # reserved amounts
    broken_queues: Mapping[str, str]  # queue → what is wrong with its spec

    def assume(self, gang: Gang, admission: Admission) -> None:
        """Count the gang as reserved for the rest of the cycle."""
        for placement in admission.placements:
            self.fleet.reserve(placement.node, placement.requests, placement.pods)
        for (flavor, resource), amount in admission.quota.items():
            key = (gang.queue, flavor, resource)
            self.usage[key] = self.usage.get(key, 0) + amount
