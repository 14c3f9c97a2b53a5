"""Moves of running gangs that make room where there is enough of it in all, and not together.

No cycle thinks of it by itself: an eviction by no rule is for people to order, who see what it costs (``core.moves``).
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from queuectl.core import fit
from queuectl.core.backlog import pending_key
from queuectl.core.elastic import pods_of
from queuectl.core.fleet import Fleet
from queuectl.core.freed import Freed
from queuectl.core.limits import not_for, stopped
from queuectl.core.nominate import Entry, entry_key, flavors_of, nominate
from queuectl.core.preemption import Field, Running, victim_order
from queuectl.core.snapshot import Moving, Snapshot
from queuectl.core.windows import bounded
from queuectl.model.objects import Flavor, Gang, QueueOrder
from queuectl.model.plan import Admission, Placement, by_index, gpus_of
from queuectl.model.policy import VictimChoice
from queuectl.model.resources import is_extended
from queuectl.model.work import NO_WORK, RESTART_SECONDS, Work

MAX_PROPOSALS = 20
TRIES = 16  # sets of gangs of which it is looked whether all find another place, for each order of taking
REGIONS = 8  # domains at most that are looked at, for a gang that has to be in one
CHAIN = 64  # gangs at most among whom it is looked whether one could go where another has been


@dataclass(frozen=True, slots=True)
class Relocation:
    """A running gang that would go elsewhere, with as many pods as it has."""

    gang: Running
    to: tuple[Placement, ...]
    lost: Work  # its work since its last checkpoint or start

    @property
    def cost(self) -> Work:
        """What the move counts for: the work lost, and a restart."""
        return self.lost.plus(Work.of(self.gang.gpus, self.gang.pods, RESTART_SECONDS))


@dataclass(frozen=True, slots=True)
class Proposal:
    """Moves after which a waiting gang can start."""

    entry: Entry  # what it gets then, and who gives way to it by the rules of its queue
    moves: tuple[Relocation, ...]

    @property
    def gang(self) -> Gang:
        """The one that waits."""
        return self.entry.gang

    @property
    def admission(self) -> Admission:
        """What it gets."""
        return self.entry.admission()

    @property
    def victims(self) -> tuple[Running, ...]:
        """Who gives way to it, and does not only move."""
        return tuple(victim.gang for victim in self.entry.victims)

    @property
    def lost(self) -> Work:
        """The work that all who move lose."""
        return reduce(Work.plus, (move.lost for move in self.moves), NO_WORK)

    @property
    def cost(self) -> Work:
        """What all moves count for."""
        return reduce(Work.plus, (move.cost for move in self.moves), NO_WORK)

    @property
    def pays_after(self) -> float:
        """After how many seconds of running the gang has done more work than the moves cost."""
        gpus = gpus_of(self.admission.placements)
        cost = self.cost
        if gpus:
            return cost.gpu_seconds / gpus
        return float("inf") if cost.gpu_seconds else cost.pod_seconds / sum(self.admission.pods.values())


def proposals(
    snapshot: Snapshot, gangs: Mapping[str, Gang], now: float, within: float, only: Collection[str] | None = None
) -> list[Proposal]:
    """Return moves that let waiting gangs start which have the quota for it, or may take it, and lack nodes.

    The gangs come in the order in which a cycle would look at them, one of each shape; each proposal is made with those
    before it carried out. ``gangs``: those that run, by uid. ``now``: Unix seconds. ``within``: seconds of running
    after which a gang must have made up for what the moves for it cost. ``only``: uids of gangs that room is wanted
    for; None for all.
    """
    found: list[Proposal] = []
    snapshot = snapshot.copy()
    for moving in snapshot.moving.values():
        keep(snapshot, moving)
    for gang in _lacking_nodes(snapshot, now):
        if only is not None and gang.uid not in only:
            continue
        proposal = make_room(snapshot, gang, gangs, now)
        if proposal is not None and proposal.moves and proposal.pays_after <= within:
            found.append(proposal)
            snapshot = _carried_out(snapshot, proposal)
            if len(found) == MAX_PROPOSALS:
                break
    return found


def make_room(snapshot: Snapshot, gang: Gang, gangs: Mapping[str, Gang], now: float) -> Proposal | None:
    """Return the moves that cost least, of those that are found, after which a waiting gang can start; None for none.

    Whoever moves has another place at once. Moved are only those that others could take if their queues' rules were
    asked: preemptible ones that have run as long as their queue lets them, within their disruption budgets.
    """
    by_quota = _by_quota(snapshot, gang, now)
    if by_quota.wait is not None:
        return None
    return _Search(snapshot, gang, gangs, now, by_quota).best()


def _lacking_nodes(snapshot: Snapshot, now: float) -> list[Gang]:
    """Return of each shape of waiting gangs the first, if only nodes keep it waiting."""
    backlog = snapshot.waiting
    backlog.wake(now)
    snapshot.tell_apart()
    firsts = [gang for queue in backlog.lines for gang in first_in_line(snapshot, queue)]
    entries = [entry for gang in firsts for entry in [lacks_nodes(snapshot, gang, now)] if entry]
    return [entry.gang for entry in sorted(entries, key=entry_key)]


def first_in_line(snapshot: Snapshot, name: str) -> list[Gang]:
    """Return of a queue whom others of the same shape do not go before; none of one that starts nobody."""
    backlog, queue = snapshot.waiting, snapshot.queues.get(name)
    if queue is None or name in snapshot.broken_queues or stopped(snapshot.queues, name) or name not in backlog.lines:
        return []
    firsts = sorted((group.gangs[0] for group in backlog.lines[name].groups.values()), key=pending_key)
    return firsts[:1] if queue.order is QueueOrder.STRICT_FIFO else firsts


def lacks_nodes(snapshot: Snapshot, gang: Gang, now: float) -> Entry | None:
    """Return what a waiting gang would get if only nodes keep it waiting."""
    entry, queue = _by_quota(snapshot, gang, now), snapshot.queues[gang.queue]
    allowed = not_for(queue, gang.namespace, snapshot.namespaces.get(gang.namespace, {})) is None
    lacks = allowed and entry.wait is None and nominate(snapshot, (), gang, now).wait is not None
    return entry if lacks else None


def keep(snapshot: Snapshot, moving: Moving, sign: int = +1) -> None:
    """Count what is kept for a gang that moves as if it were there, or stop (-1)."""
    for tree in (snapshot.tree, snapshot.later):
        if moving.queue in tree.nodes:
            (tree.add if sign > 0 else tree.remove)(moving.queue, moving.room.quota)
    if snapshot.fleet is not None:
        for p in moving.room.placements:
            snapshot.fleet.reserve(p.node, p.requests, sign * p.pods)


def _by_quota(snapshot: Snapshot, gang: Gang, now: float) -> Entry:
    return nominate(replace(snapshot, fleet=None), (), bounded(snapshot.fleet, gang, gang.lifetime.end(now)), now)


class _Search:
    def __init__(self, snapshot: Snapshot, gang: Gang, gangs: Mapping[str, Gang], now: float, by_quota: Entry) -> None:
        self.snapshot = snapshot
        self.gang = gang
        self.gangs = gangs
        self.now = now
        self.by_quota = by_quota
        self.movable = self._movable()
        self._by_peers = snapshot.rules[gang.queue].victims is VictimChoice.LOWEST_PRIORITY

    def best(self) -> Proposal | None:
        """Try orders of taking, as preemption does, and return the cheapest."""
        copy = self.snapshot.copy()
        roles, usage = self.by_quota.roles, self.by_quota.assignment.usage
        flavors, together = flavors_of(copy, self.by_quota), self.gang.together
        freed = Freed(copy, self.gang.queue, usage, roles, flavors=flavors, together=together)
        if not self._is_enough(flavors):
            return None
        for victim in self.by_quota.victims:
            freed.take(victim.gang)
        orders = (order for some in self._regions(flavors) for order in self._orders(some))
        found = [proposal for order in orders for proposal in [self._in_order(order, freed)] if proposal]
        return min(found, key=self._preference, default=None)

    def _preference(self, proposal: Proposal) -> tuple[object, ...]:
        """Order of proposals: those that move whom the peers' order takes earlier, or those that cost less, in fewer moves."""
        if self._by_peers:
            most = [victim_order(move.gang, self.gang.queue) for move in proposal.moves]
            return tuple(sorted(most, reverse=True))
        return (proposal.cost, len(proposal.moves))

    def _is_enough(self, flavors: Mapping[str, Flavor]) -> bool:
        """Tell whether there are devices enough for each role in what is free, and what victims leave, all together."""
        fleet = self.snapshot.fleet
        if fleet is None:
            return False
        free = fleet.free((p.node, p.requests, p.pods) for v in self.by_quota.victims for p in v.gang.placements)
        return all(
            free.total(flavors[role.name], role.constraints, ((resource, 1),)) >= amount * role.pods
            for role in self.by_quota.roles
            for resource, amount in role.requests
            if is_extended(resource)
        )

    def _movable(self) -> list[Running]:
        leaving = {victim.gang.uid for victim in self.by_quota.victims}
        rules = Field(self.snapshot.tree, {}, self.snapshot.rules, now=self.now)
        return [
            running
            for some in self.snapshot.running.values()
            for running in some
            if running.preemptible
            and not running.evicting
            and running.instead is None
            and running.uid not in leaving
            and running.uid in self.gangs
            and all(p.flavor in self.snapshot.flavors for p in running.placements)
            and rules.protected_until(running) is None
        ]

    def _regions(self, flavors: Mapping[str, Flavor]) -> Iterator[list[Running]]:
        """Yield who could move of each domain that could take all the gang, those with most room; of everywhere, else."""
        fleet, bound = self.snapshot.fleet, fit.bound_roles(self.by_quota.roles, flavors)
        if fleet is None:
            return
        role = min(bound, key=fit.largest_first)
        layout = fit.Layout.of(role, flavors[role.name], self.gang.together, bound)
        level, domains = max(layout.need.within, layout.shared), fleet.domains(*layout.keys)
        if level < 0 or len(domains.starts[level]) == 1:
            yield self.movable
            return
        there: dict[int, list[Running]] = {}
        for running in self.movable:
            rows = [row for p in running.placements if (row := fleet.row(p.node)) is not None]
            for domain in sorted(set(domains.containing(level, rows))):
                there.setdefault(domain, []).append(running)
        unit = next(((name, 1) for name, _ in role.requests if is_extended(name)), ("pods", 1))
        free = fleet.free().pods(flavors[role.name], role.constraints, (unit,))[domains.order]
        room = np.add.reduceat(free, domains.starts[level])
        for domain in sorted(there, key=lambda domain: (-room[domain], domain))[:REGIONS]:
            yield there[domain]

    def _orders(self, movable: Sequence[Running]) -> list[list[Running]]:
        if self._by_peers:
            return [sorted(movable, key=lambda running: victim_order(running, self.gang.queue))]
        cheapest = sorted(movable, key=self._price)
        nodes: dict[str, list[Running]] = {}
        for running in cheapest:
            nodes.setdefault(running.placements[0].node, []).append(running)
        costs = {node: reduce(Work.plus, map(self._price, some), NO_WORK) for node, some in nodes.items()}
        return [[running for node in sorted(nodes, key=lambda n: (costs[n], n)) for running in nodes[node]], cheapest]

    def _price(self, running: Running) -> Work:
        return running.price(self.now)

    def _in_order(self, order: Sequence[Running], freed: Freed) -> Proposal | None:
        """Return the moves that are found if gangs are taken away in this order."""
        found = self._few(order, freed) or self._more(order, freed)
        return found and self._fewer(found)

    def _few(self, order: Sequence[Running], freed: Freed) -> Proposal | None:
        """Take gangs away until the waiting one fits, as few as need be; who finds no other place stays where it is."""
        taken: dict[str, Running] = {}
        left, budgets = deque(order), dict(self.snapshot.budgets)
        try:
            for _ in range(TRIES):
                step = 1
                while not freed.fits():
                    if not left:
                        return None
                    for running in [left.popleft() for _ in range(min(step, len(left)))]:
                        if _spend(budgets, running):
                            taken[running.uid] = running
                            freed.take(running)
                    step *= 2  # who is taken too many is given back
                spared = self._give_back(taken, freed, budgets)
                found = self._all_fit(taken.values())
                if isinstance(found, Proposal):
                    return found
                for running in found:
                    freed.put_back(taken.pop(running.uid))
                    _spend(budgets, running, back=True)
                left.extendleft(reversed(spared))
            return None
        finally:
            for running in reversed(taken.values()):
                freed.put_back(running)

    def _give_back(self, taken: dict[str, Running], freed: Freed, budgets: dict[str, int]) -> list[Running]:
        """Put back, the dearest first, whoever is not needed, and return them in the order of taking."""
        dearest = list(reversed(taken.values()))
        if not self._by_peers:
            dearest.sort(key=self._price, reverse=True)
        spared: set[str] = set()
        at, size = 0, 1
        while at < len(dearest):  # several at once where that goes well
            some = dearest[at : at + size]
            for running in some:
                freed.put_back(running)
            if freed.fits():
                spared |= {running.uid for running in some}
                at, size = at + len(some), 2 * size
                continue
            for running in some:
                freed.take(running)
            at, size = (at + 1, 1) if len(some) == 1 else (at, len(some) // 2)
        back = [running for uid, running in taken.items() if uid in spared]
        for running in back:
            del taken[running.uid]
            _spend(budgets, running, back=True)
        return back

    def _more(self, order: Sequence[Running], freed: Freed) -> Proposal | None:
        """Take one after the other away until all find a place, so that one may go where another has been."""
        taken: list[Running] = []
        budgets, tries = dict(self.snapshot.budgets), 0
        try:
            for running in order:
                if len(taken) == CHAIN or not _spend(budgets, running):
                    continue
                taken.append(running)
                freed.take(running)
                if freed.fits():
                    found, tries = self._all_fit(taken), tries + 1
                    if isinstance(found, Proposal):
                        return found
                    if tries == TRIES:
                        break
            return None
        finally:
            for running in reversed(taken):
                freed.put_back(running)

    def _fewer(self, found: Proposal) -> Proposal:
        """Let stay, the dearest first, those without whom it can be done."""
        dearest = sorted(found.moves, key=lambda move: (move.cost, move.gang.uid), reverse=True)
        for move in dearest[:TRIES]:
            others = [other.gang for other in found.moves if other.gang.uid != move.gang.uid]
            fewer = self._all_fit(others) if len(others) < len(found.moves) else None
            found = fewer if isinstance(fewer, Proposal) else found
        return found

    def _all_fit(self, away: Collection[Running]) -> Proposal | list[Running]:
        """Return what becomes of gangs that are taken away and of the one that waits, if all have a place.

        Else those that have none; all of them if the one that waits has none.
        """
        trial = self.snapshot.copy()
        fleet = trial.fleet
        if fleet is None:
            return list(away)
        for p in (p for running in away for p in running.placements):
            fleet.reserve(p.node, p.requests, -p.pods)
        entry = nominate(trial, {running.uid for running in away}, self.gang, self.now)
        if entry.wait is not None:
            return list(away)
        trial.assume(self.gang, entry.admission(), [victim.gang for victim in entry.victims])
        moves, homeless = [], []
        for running in sorted(away, key=lambda running: (-running.gpus, -running.pods, running.uid)):
            places = _place_anew(trial, fleet, self.gangs[running.uid], running, self.now)
            if isinstance(places, fit.Short):
                homeless.append(running)
                continue
            for p in places:
                fleet.reserve(p.node, p.requests, p.pods)
            if by_index(places) != by_index(running.placements):
                moves.append(Relocation(running, places, running.lost(self.now)))
        return homeless or Proposal(entry, tuple(moves))


def _spend(budgets: dict[str, int], running: Running, *, back: bool = False) -> bool:
    """Take a gang's pods from the disruption budgets that cover them, or give them back; False if one is too small."""
    sign = 1 if back else -1
    if any(budgets.get(key, 0) + sign * pods < 0 for key, pods in running.covered):
        return False
    for key, pods in running.covered:
        budgets[key] += sign * pods
    return True


def _place_anew(
    snapshot: Snapshot, fleet: Fleet, gang: Gang, running: Running, now: float
) -> tuple[Placement, ...] | fit.Short:
    """Return another place for the pods that a gang has, on nodes of the flavors that they have."""
    pods = pods_of(running.placements)
    flavors = {p.role: snapshot.flavors[p.flavor] for p in running.placements}
    kept = bounded(fleet, gang, gang.lifetime.end(now))
    roles = [replace(role, pods=pods[role.name]) for role in kept.roles if role.name in pods]
    return fit.place(fleet, roles, flavors, gang.together)


def _carried_out(snapshot: Snapshot, proposal: Proposal) -> Snapshot:
    """Return the snapshot in which it is done. Who has moved, or gives way, is not asked again."""
    gone = {running.uid for running in (*proposal.victims, *(move.gang for move in proposal.moves))}
    after = snapshot.copy()
    if after.fleet is not None:
        _relocate(after.fleet, proposal.moves)
    after.assume(proposal.gang, proposal.admission, proposal.victims)
    running = {queue: [one for one in some if one.uid not in gone] for queue, some in snapshot.running.items()}
    return replace(after, running=running)


def _relocate(fleet: Fleet, moves: Iterable[Relocation]) -> None:
    for move in moves:
        for sign, placements in ((-1, move.gang.placements), (+1, move.to)):
            for p in placements:
                fleet.reserve(p.node, p.requests, sign * p.pods)
