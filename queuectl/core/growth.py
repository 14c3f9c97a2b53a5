"""Growth of running elastic gangs: pods that they asked for and did not get, once there is quota and room for them.

Growth takes only what is free, for good, and that nobody waits for: it comes after all that a cycle has decided, and not
at all where a job waits that could use the flavor. So it costs nobody a start, and evicts nobody.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import replace

from queuectl.core.backlog import pending_key
from queuectl.core.elastic import alike, last, numbered, pods_of
from queuectl.core.limits import stopped
from queuectl.core.repair import as_placements, places_for_missing
from queuectl.core.snapshot import Elastic, Snapshot
from queuectl.core.windows import bounded, ends_at
from queuectl.model.objects import Gang, Role
from queuectl.model.plan import Placement, Portion, held
from queuectl.model.reasons import Reason, Why
from queuectl.model.resources import CARDS

# Whoever waits for something else than room and quota takes neither in the next cycle.
_WANTS = {
    Reason.PENDING, Reason.BEHIND_HEAD, Reason.WAITING_FOR_QUOTA, Reason.WAITING_FOR_OWN_QUOTA,
    Reason.WAITING_FOR_NODES, Reason.MAINTENANCE_AHEAD, Reason.WAITING_BEFORE_PREEMPTION, Reason.VICTIMS_PROTECTED,
    Reason.DISRUPTION_FORBIDDEN, Reason.WAITING_FOR_VICTIMS_OF_OTHERS,
}  # fmt: skip


def growths(snapshot: Snapshot, waits: Mapping[str, Why], elastic: Iterable[Elastic], most: int) -> dict[str, Portion]:
    """Return by workload what gangs get in addition: their next pods, and what these are charged.

    ``snapshot``: as a cycle has left it, all that it decided assumed; it is used up. ``waits``: why others wait then,
    by uid. ``most``: placements at most. Of several gangs those come first that would in a queue's line; each gets as
    many pods as can be had.
    """
    found: dict[str, Portion] = {}
    those = sorted(elastic, key=lambda one: pending_key(one.gang))
    wanted = _wanted(snapshot, waits) if those else set()
    for one in those:
        if most > 0 and wanted.isdisjoint(p.flavor for p in one.has.placements) and _is_open(snapshot, one.gang.queue):
            part = _growth(snapshot, one)
            if part.placements:
                found[one.gang.uid] = part
                most -= len(part.placements)
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


def _growth(snapshot: Snapshot, one: Elastic) -> Portion:
    """Return the most that one gang can have, all its roles growing alike, and count it in the snapshot."""
    like = {p.role: p for p in one.has.placements}
    there = pods_of(one.has.placements)
    missing = {r.name: max(0, r.pods - there[r.name]) for r in one.gang.roles if r.name in like}

    def grown(number: int) -> Portion | None:
        more = alike(missing, number)
        roles = tuple(_whole_slices(role, there.get(role.name, 0), more.get(role.name, 0)) for role in one.gang.roles)
        return _places(snapshot, one, replace(one.gang, roles=roles), like)

    most = sum(missing.values())
    number = bisect_left(range(1, most + 1), True, key=lambda number: grown(number) is None)  # noqa: FBT003
    found = (grown(number) if number else None) or Portion(())
    _count(snapshot, one.gang, found)
    return found


def _whole_slices(role: Role, there: int, more: int) -> Role:
    """Return the role with so many more pods, or as few less as keep its slices whole."""
    pods, size = there + more, role.topology.slice_size
    return replace(role, pods=pods if pods == role.pods else max(there, pods - pods % size))


def _places(snapshot: Snapshot, one: Elastic, grown: Gang, like: Mapping[str, Placement]) -> Portion | None:
    """Return what a gang gets in addition, or None if quotas, limits or nodes hold less. ``like``: a role's pods."""
    fleet = snapshot.fleet
    if fleet is None or not all(p.flavor in snapshot.flavors for p in like.values()):
        return None
    there = pods_of(one.has.placements)
    more = [replace(role, pods=role.pods - there.get(role.name, 0)) for role in grown.roles]
    queue = snapshot.queues[grown.queue]
    asked = [replace(like[role.name], pods=role.pods) for role in more if role.pods]
    usage = _charged(one, asked).quota
    if snapshot.held.over(queue, grown, more, held(asked).get(CARDS, 0), starts=False) is not None:
        return None
    if not snapshot.tree.fits(queue.name, usage) or not snapshot.fits_later(grown, usage):
        return None
    stay = {key: p.node for key, p in numbered(one.has.placements).items()}
    grown = bounded(fleet, grown, ends_at(fleet, one.until, stay.values()))
    found = places_for_missing(fleet, grown, {role: snapshot.flavors[p.flavor] for role, p in like.items()}, stay)
    return None if found is None else _charged(one, as_placements(found, like))


def _charged(one: Elastic, placements: Iterable[Placement]) -> Portion:
    """Return placements with what they are charged, in the cells in which the gang is charged already."""
    part = Portion(tuple(placements), one.has.quota)
    return last(part, pods_of(part.placements))


def _count(snapshot: Snapshot, gang: Gang, found: Portion) -> None:
    snapshot.tree.add(gang.queue, found.quota)
    snapshot.later.add(gang.queue, found.quota)
    # Of which only the amounts count from now on.
    snapshot.held.add(snapshot.queues[gang.queue], gang.namespace, gang.user, held(found.placements))
    if snapshot.fleet is not None:
        for p in found.placements:
            snapshot.fleet.reserve(p.node, p.requests, p.pods)
