"""Moves of running gangs that make room where there is enough of it in all, and not together.

Nothing here is decided by a cycle: an eviction for nobody's sake is for people to order, who see what it costs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from queuectl.core import fit
from queuectl.core.cycle import entry_key
from queuectl.core.elastic import pods_of
from queuectl.core.freed import Freed
from queuectl.core.nominate import Entry, flavors_of, nominate
from queuectl.core.preemption import Field, Running, victim_order
from queuectl.core.snapshot import Snapshot
from queuectl.model.objects import Flavor, Gang, Role
from queuectl.model.plan import Admission, Placement, by_index
from queuectl.model.policy import VictimChoice
from queuectl.model.resources import is_gpu
from queuectl.model.work import NO_WORK, RESTART_SECONDS, Work

MAX_PROPOSALS = 20
TRIES = 32  # sets of gangs of which it is looked whether all find another place, for each order of taking


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

    gang: Gang
    admission: Admission  # what it gets then
    moves: tuple[Relocation, ...]
    victims: tuple[Running, ...] = ()  # who gives way to it then, by the rules of its queue

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


def proposals(snapshot: Snapshot, gangs: Mapping[str, Gang], now: float, within: float) -> list[Proposal]:
    """Return moves that let waiting gangs start which have the quota for it, or may take it, and lack nodes.

    The gangs come in the order in which a cycle would look at them, one of each shape; each proposal is made with those
    before it carried out. ``gangs``: those that run, by uid. ``now``: Unix seconds. ``within``: seconds of running
    after which a gang must have made up for what the moves for it cost.
    """
    found: list[Proposal] = []
    for gang in _lacking_nodes(snapshot, now):
        proposal = make_room(snapshot, gang, gangs, now)
        if proposal is not None and proposal.pays_after <= within:
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


def gpus_of(placements: Iterable[Placement]) -> int:
    """Return how many GPUs placements have."""
    return sum(amount * p.pods for p in placements for resource, amount in p.requests if is_gpu(resource))


def _lacking_nodes(snapshot: Snapshot, now: float) -> list[Gang]:
    """Return of each shape of waiting gangs the first, if only nodes keep it waiting."""
    snapshot.waiting.wake(now)
    entries = []
    for queue, line in snapshot.waiting.lines.items():
        for group in line.groups.values() if queue in snapshot.queues else ():
            gang = group.gangs[0]
            entry = _by_quota(snapshot, gang, now)
            if entry.wait is None and nominate(snapshot, (), gang, now).wait is not None:
                entries.append(entry)
    return [entry.gang for entry in sorted(entries, key=entry_key)]


def _by_quota(snapshot: Snapshot, gang: Gang, now: float) -> Entry:
    return nominate(replace(snapshot, fleet=None), (), gang, now)


class _Search:
    def __init__(
        self, snapshot: Snapshot, gang: Gang, gangs: Mapping[str, Gang], now: float, by_quota: Entry
    ) -> None:
        self.snapshot = snapshot
        self.gang = gang
        self.gangs = gangs
        self.now = now
        self.by_quota = by_quota
        self.movable = self._movable()

    def best(self) -> Proposal | None:
        """Try orders of taking, as preemption does, and return the cheapest."""
        copy = self.snapshot.copy()
        roles, usage = self.by_quota.roles, self.by_quota.assignment.usage
        freed = Freed(copy, self.gang.queue, usage, roles, flavors_of(copy, self.by_quota))
        for victim in self.by_quota.victims:
            freed.take(victim.gang)
        found = [proposal for order in self._orders(freed) for proposal in [self._in_order(order, freed)] if proposal]
        return min(found, key=lambda proposal: (proposal.cost, len(proposal.moves)), default=None)

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

    def _orders(self, freed: Freed) -> list[list[Running]]:
        peers = sorted(self.movable, key=lambda running: victim_order(running, self.gang.queue))
        if self.snapshot.rules[self.gang.queue].victims is VictimChoice.LOWEST_PRIORITY:
            return [peers]
        cheapest = sorted(self.movable, key=self._price)
        return [freed.cheapest_first(cheapest, self._price), cheapest]

    def _price(self, running: Running) -> Work:
        return running.price(self.now)

    def _in_order(self, order: Sequence[Running], freed: Freed) -> Proposal | None:
        """Take gangs away until the waiting one fits and they all fit elsewhere; then keep as many as can stay."""
        taken: list[Running] = []
        budgets, tries = dict(self.snapshot.budgets), 0
        found = None
        for running in order:
            if any(budgets.get(key, 0) < pods for key, pods in running.covered):
                continue
            for key, pods in running.covered:
                budgets[key] -= pods
            taken.append(running)
            freed.take(running)
            if freed.fits():
                found, tries = self._all_fit(taken), tries + 1
            if found is not None or tries == TRIES:
                break
        for running in reversed(taken):
            freed.put_back(running)
        return found and self._fewer(found)

    def _fewer(self, found: Proposal) -> Proposal:
        """Let stay, the dearest first, everybody without whom it can be done."""
        for move in sorted(found.moves, key=lambda move: (move.cost, move.gang.uid), reverse=True):
            others = [other.gang for other in found.moves if other.gang.uid != move.gang.uid]
            if len(others) < len(found.moves):
                found = self._all_fit(others) or found
        return found

    def _all_fit(self, away: Sequence[Running]) -> Proposal | None:
        """Return what becomes of gangs that are taken away and of the one that waits, if all have a place."""
        trial = self.snapshot.copy()
        fleet = trial.fleet
        if fleet is None:
            return None
        for p in (p for running in away for p in running.placements):
            fleet.reserve(p.node, p.requests, -p.pods)
        entry = nominate(trial, {running.uid for running in away}, self.gang, self.now)
        if entry.wait is not None:
            return None
        trial.assume(self.gang, entry.admission(), [victim.gang for victim in entry.victims])
        moves = []
        for running in sorted(away, key=lambda running: (-running.gpus, -running.pods, running.uid)):
            gang = self.gangs[running.uid]
            places = fit.place(fleet, *_as_it_is(trial, gang, running))
            if isinstance(places, fit.Short):
                return None
            for p in places:
                fleet.reserve(p.node, p.requests, p.pods)
            if by_index(places) != by_index(running.placements):
                moves.append(Relocation(running, places, running.lost(self.now)))
        victims = tuple(victim.gang for victim in entry.victims)
        return Proposal(self.gang, entry.admission(), tuple(moves), victims)


def _as_it_is(snapshot: Snapshot, gang: Gang, running: Running) -> tuple[list[Role], dict[str, Flavor]]:
    """Return a gang's roles with the pods that it has, and the flavors that these are of."""
    pods = pods_of(running.placements)
    flavors = {p.role: snapshot.flavors[p.flavor] for p in running.placements}
    return [replace(role, pods=pods[role.name]) for role in gang.roles if role.name in pods], flavors


def _carried_out(snapshot: Snapshot, proposal: Proposal) -> Snapshot:
    """Return the snapshot in which it is done. Who has moved, or gives way, is not asked again."""
    gone = {running.uid for running in (*proposal.victims, *(move.gang for move in proposal.moves))}
    after = snapshot.copy()
    for move in proposal.moves if after.fleet else ():
        for sign, placements in ((-1, move.gang.placements), (+1, move.to)):
            for p in placements:
                after.fleet.reserve(p.node, p.requests, sign * p.pods)
    after.assume(proposal.gang, proposal.admission, proposal.victims)
    running = {queue: [one for one in some if one.uid not in gone] for queue, some in snapshot.running.items()}
    return replace(after, running=running)
