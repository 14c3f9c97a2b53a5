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
from queuectl.model.plan import Placement, PodKey, Repair
from queuectl.model.reasons import Reason, listed, why


def repairs(snapshot: Snapshot, broken: Iterable[Broken], most: int) -> tuple[dict[str, Repair], frozenset[str]]:
    """Return by workload how lost pods are replaced, and the workloads for whose lost pods there is no place.

    What is found is counted in ``snapshot``. ``most``: placements at most; gangs beyond that are in neither.
    """
    found: dict[str, Repair] = {}
    irreparable = set()
    for one in sorted(broken, key=lambda one: pending_key(one.gang)):
        if most <= 0:
            break
        repair = _repair(snapshot, one)
        if repair is None:
            irreparable.add(one.gang.uid)
            continue
        found[one.gang.uid] = repair
        most -= len(repair.found)
    return found, frozenset(irreparable)


def _repair(snapshot: Snapshot, one: Broken) -> Repair | None:
    """Return how one gang is repaired, if it can be, and count it in the snapshot.

    If there is room for these too, it leaves all of its nodes that take no new pods: better to stop once than again soon.
    """
    at, fleet = numbered(one.has.placements), snapshot.fleet
    if fleet is None:
        return None
    more = one.pods.union(key for key, p in at.items() if p.node in one.closed)
    wider = _replaced(snapshot, fleet, replace(one, pods=more)) if one.pods < more < at.keys() else None
    repair = wider or _replaced(snapshot, fleet, one)
    for p in repair.left if repair else ():
        fleet.reserve(p.node, p.requests, -p.pods, now=False)
    for p in repair.found if repair else ():
        fleet.reserve(p.node, p.requests, p.pods)
    return repair


def _replaced(snapshot: Snapshot, fleet: Fleet, one: Broken) -> Repair | None:
    like = {p.role: p for p in one.has.placements}
    if not all(p.flavor in snapshot.flavors for p in like.values()):
        return None
    before = numbered(one.has.placements)
    nodes = {before[key].node for key in one.pods}
    left = tuple(p for p in one.has.placements if p.node in nodes - one.good)
    stay = {key: p.node for key, p in before.items() if p not in left}
    flavors = {role: snapshot.flavors[p.flavor] for role, p in like.items()}
    places = places_for_missing(fleet, one.gang, flavors, stay)
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
