"""Replacement of pods that running gangs have lost, by pods of the same names; the others run on.

It comes before all that a cycle decides: who runs already is not overtaken by whoever waits. It takes only what is free,
evicts nobody, and is charged nothing, for the quota of the lost pods is still the gang's.
"""

from collections.abc import Iterable
from dataclasses import replace

from queuectl.core.backlog import pending_key
from queuectl.core.elastic import numbered
from queuectl.core.fleet import Fleet
from queuectl.core.repair import as_placements, places_for_missing
from queuectl.core.snapshot import Broken, Snapshot
from queuectl.core.windows import bounded, ends_at
from queuectl.model.plan import Placement, PodKey, Repair
from queuectl.model.reasons import Reason, listed, why


def repairs(snapshot: Snapshot, broken: Iterable[Broken], most: int) -> tuple[dict[str, Repair], frozenset[str]]:
    """Return by workload how lost pods are replaced, and the workloads for whose lost pods there is no place.

    What is found is counted in ``snapshot``. ``most``: placements at most; gangs beyond that are in neither.
    """
    fleet, found, irreparable = snapshot.fleet, dict[str, Repair](), set[str]()
    if fleet is None:
        return found, frozenset(one.gang.uid for one in broken)
    those = sorted(broken, key=lambda one: pending_key(one.gang))
    for one in those:
        if most <= 0:
            break
        repair = _replaced(snapshot, fleet, one)
        if repair is None:
            irreparable.add(one.gang.uid)
            continue
        _count(fleet, repair)
        found[one.gang.uid] = repair
        most -= len(repair.found)
    for one in those:  # once each has what it can't be without
        if one.gang.uid in found and most > 0:
            found[one.gang.uid] = _wider(snapshot, fleet, one, found[one.gang.uid])
    return found, frozenset(irreparable)


def _wider(snapshot: Snapshot, fleet: Fleet, one: Broken, repair: Repair) -> Repair:
    """Return how one gang is repaired so that it leaves all of its nodes that take no new pods, if there is room for it.

    Better to stop once than again soon.
    """
    at = numbered(one.has.placements)
    more = one.pods.union(key for key, p in at.items() if p.node in one.closed)
    if not one.pods < more < at.keys():
        return repair
    _count(fleet, repair, -1)
    wider = _replaced(snapshot, fleet, replace(one, pods=more)) or repair
    _count(fleet, wider)
    return wider


def _count(fleet: Fleet, repair: Repair, sign: int = +1) -> None:
    """Count a repair as made, or stop (-1)."""
    for p in repair.left:
        fleet.reserve(p.node, p.requests, -sign * p.pods, now=False)
    for p in repair.found:
        fleet.reserve(p.node, p.requests, sign * p.pods)


def _replaced(snapshot: Snapshot, fleet: Fleet, one: Broken) -> Repair | None:
    like = {p.role: p for p in one.has.placements}
    if not all(p.flavor in snapshot.flavors for p in like.values()):
        return None
    before = numbered(one.has.placements)
    nodes = {before[key].node for key in one.pods}
    left = tuple(p for p in one.has.placements if p.node in nodes - one.good)
    stay = {key: p.node for key, p in before.items() if p not in left}
    flavors = {role: snapshot.flavors[p.flavor] for role, p in like.items()}
    kept = bounded(fleet, one.gang, ends_at(fleet, one.until, stay.values()))
    places = places_for_missing(fleet, kept, flavors, stay)
    if places is None and kept is not one.gang and one.gang.lifetime.movable:
        places = places_for_missing(fleet, bounded(fleet, one.gang, one.starts_by), flavors, stay)
    return None if places is None else _checked(one, left, stay, places, as_placements(places, like))


def _checked(
    one: Broken, left: tuple[Placement, ...], stay: dict[PodKey, str], places: dict[PodKey, str], found: list[Placement]
) -> Repair | None:
    """Return the repair, unless a lost node would be used again, or pods that stay be numbered anew by it."""
    after = numbered([*(p for p in one.has.placements if p not in left), *found])
    if {p.node for p in left}.intersection(places.values()):
        return None
    if {key: p.node for key, p in after.items()} != {**stay, **places}:
        return None
    nodes = sorted({p.node for key, p in numbered(one.has.placements).items() if key in one.pods})
    facts = {"there": len(after) - len(one.pods), "pods": len(after), "nodes": listed(nodes), "cause": str(one.why)}
    return Repair(one.pods, left, tuple(found), why(Reason.REPLACING, **facts))
