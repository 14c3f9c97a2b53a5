"""Growth of running elastic gangs: pods that they asked for and did not get, once there is quota and room for them.

Growth takes only what is free, for good, and that nobody waits for: it comes after all that a cycle has decided, and not
at all where a job waits that could use the flavor. So it costs nobody a start, and evicts nobody.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from queuectl.core.backlog import pending_key
from queuectl.core.elastic import alike, last, pods_of
from queuectl.core.limits import stopped
from queuectl.core.repair import places_for_missing
from queuectl.core.snapshot import Snapshot
from queuectl.model.objects import Gang, Role
from queuectl.model.plan import Placement, PodKey, Portion, held
from queuectl.model.policy import Cell
from queuectl.model.reasons import Reason, Why
from queuectl.model.resources import CARDS

# Whoever waits for something else than room and quota takes neither in the next cycle.
_WANTS = {
    Reason.PENDING, Reason.BEHIND_HEAD, Reason.WAITING_FOR_QUOTA, Reason.WAITING_FOR_OWN_QUOTA,
    Reason.WAITING_FOR_NODES, Reason.WAITING_BEFORE_PREEMPTION, Reason.VICTIMS_PROTECTED,
    Reason.DISRUPTION_FORBIDDEN, Reason.WAITING_FOR_VICTIMS_OF_OTHERS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Elastic:
    """A gang that runs with fewer pods than it asks for, all of them ready: what it has, and where each pod is."""

    gang: Gang
    has: Portion
    pods: Mapping[PodKey, str]  # role and index → node


def growths(
    snapshot: Snapshot, waits: Mapping[str, Why], elastic: Iterable[Elastic]
) -> dict[str, dict[PodKey, Placement]]:
    """Return by workload the pods that gangs get in addition, with their roles and indexes, and the place of each.

    ``snapshot``: as a cycle has left it, all that it decided assumed; it is used up. ``waits``: why others wait then,
    by uid. Of several gangs those come first that would in a queue's line; each gets as many as can be had.
    """
    found = {}
    wanted = _wanted(snapshot, waits)
    for one in sorted(elastic, key=lambda one: pending_key(one.gang)):
        if wanted.isdisjoint(p.flavor for p in one.has.placements) and _is_open(snapshot, one.gang.queue):
            grown = _growth(snapshot, one)
            if grown:
                found[one.gang.uid] = grown
    return found


def _wanted(snapshot: Snapshot, waits: Mapping[str, Why]) -> set[str]:
    """Return the flavors that somebody waits for who could use them; gangs of one shape wait for the same."""
    flavors: set[str] = set()
    for queue, line in snapshot.waiting.lines.items():
        for group in line.groups.values() if queue in snapshot.queues else ():
            wait = next((wait for gang in group.gangs if (wait := waits.get(gang.uid))), None)
            if wait is not None and wait.reason in _WANTS:
                flavors |= {flavor for flavor, _ in snapshot.queues[queue].quotas}
    return flavors


def _is_open(snapshot: Snapshot, queue: str) -> bool:
    known = queue in snapshot.queues and queue not in snapshot.broken_queues
    return known and stopped(snapshot.queues, queue) is None


def _growth(snapshot: Snapshot, one: Elastic) -> dict[PodKey, Placement]:
    """Return the most that one gang can have, all its roles growing alike, and count it in the snapshot."""
    flavors = {p.role: p.flavor for p in one.has.placements}
    there = Counter(role for role, _ in one.pods)
    missing = {r.name: max(0, r.pods - there[r.name]) for r in one.gang.roles if r.name in flavors}

    def grown(number: int) -> dict[PodKey, Placement] | None:
        more = alike(missing, number)
        roles = tuple(_whole_slices(role, there[role.name], more.get(role.name, 0)) for role in one.gang.roles)
        return _places(snapshot, one, replace(one.gang, roles=roles), flavors)

    most = sum(missing.values())
    number = bisect_left(range(1, most + 1), True, key=lambda number: grown(number) is None)  # noqa: FBT003
    found = grown(number) if number else None
    if found:
        _count(snapshot, one, tuple(found.values()))
    return found or {}


def _whole_slices(role: Role, there: int, more: int) -> Role:
    """Return the role with so many more pods, or as few less as keep its slices whole."""
    pods, size = there + more, role.topology.slice_size
    return replace(role, pods=pods if pods == role.pods else max(there, pods - pods % size))


def _places(
    snapshot: Snapshot, one: Elastic, grown: Gang, flavors: Mapping[str, str]
) -> dict[PodKey, Placement] | None:
    """Return a place for each pod that a gang has more than before, or None if quotas, limits or nodes hold less."""
    fleet = snapshot.fleet
    if fleet is None or not all(name in snapshot.flavors for name in flavors.values()):
        return None
    there = Counter(role for role, _ in one.pods)
    more = [replace(role, pods=role.pods - there[role.name]) for role in grown.roles]
    queue, usage = snapshot.queues[grown.queue], _charge(_unplaced(more, one), one.has.quota)
    if snapshot.held.over(queue, grown, more, held(_unplaced(more, one)).get(CARDS, 0), starts=False) is not None:
        return None
    if not snapshot.tree.fits(queue.name, usage) or not snapshot.fits_later(grown, usage):
        return None
    found = places_for_missing(fleet, grown, {role: snapshot.flavors[name] for role, name in flavors.items()}, one.pods)
    if found is None:
        return None
    alike_ones = {p.role: p for p in one.has.placements}
    return {key: replace(alike_ones[key[0]], node=node, pods=1, first=0) for key, node in found.items()}


def _unplaced(roles: Iterable[Role], one: Elastic) -> tuple[Placement, ...]:
    """Return pods like those that it has, without a node."""
    alike_ones = {p.role: p for p in one.has.placements}
    return tuple(replace(alike_ones[r.name], node="", pods=r.pods, first=0) for r in roles if r.pods)


def _charge(placements: tuple[Placement, ...], has: Mapping[Cell, int]) -> Mapping[Cell, int]:
    """Return what pods are charged in the cells in which the gang is charged already."""
    return last(Portion(placements, has), pods_of(placements)).quota


def _count(snapshot: Snapshot, one: Elastic, found: tuple[Placement, ...]) -> None:
    gang, usage = one.gang, _charge(found, one.has.quota)
    snapshot.tree.add(gang.queue, usage)
    snapshot.later.add(gang.queue, usage)
    # Of which only amounts count now.
    snapshot.held.add(snapshot.queues[gang.queue], gang.namespace, gang.user, held(found))
    if snapshot.fleet is not None:
        for p in found:
            snapshot.fleet.reserve(p.node, p.requests, p.pods)
