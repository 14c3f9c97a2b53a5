"""One cycle's view of the world."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Self

from queuectl.core.backlog import Backlog
from queuectl.core.claims import Idle
from queuectl.core.fleet import Fleet
from queuectl.core.fragmentation import Mix, Others
from queuectl.core.limits import Held, particular, requested
from queuectl.core.preemption import Running, there
from queuectl.core.tree import Tree
from queuectl.core.usage import Past
from queuectl.model.objects import Flavor, Gang, MoveRequest, Queue
from queuectl.model.plan import Admission, PodKey, Portion, TakeBack, held
from queuectl.model.policy import Amounts, FairRule, Preemption
from queuectl.model.reasons import Why
from queuectl.model.resources import CARDS


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules of the whole cluster."""

    fair_sharing: tuple[FairRule, ...] = ()  # none: shares do not matter
    one_head: bool = False  # look at one gang of each queue only, as Kueue's cycle does
    usage_half_life: float = 0.0  # seconds, with fair sharing: how long past use counts against a queue; 0: not at all
    resource_groups: bool = False  # let resources of one role take different flavors, as Kueue's groups do


@dataclass(frozen=True, slots=True)
class Elastic:
    """A gang that runs with fewer pods than it asks for, all of them ready and none done."""

    gang: Gang
    has: Portion
    until: float = inf  # Unix seconds at which it is over by its own limits


@dataclass(frozen=True, slots=True)
class Moving:
    """A gang that makes room for another: what is kept for it until it is there, or a time has come."""

    queue: str
    room: Portion
    until: float  # Unix seconds


@dataclass(frozen=True, slots=True)
class MoveOrder:
    """Moves that somebody asks for. ``gangs``: those that run as they did then, by uid."""

    request: MoveRequest
    gangs: Mapping[str, Gang]
    whole: bool = True  # False: not all who are to move bear the request yet


@dataclass(frozen=True, slots=True)
class Broken:
    """A gang that runs on without pods that it has lost; its roles have as many pods as it has."""

    gang: Gang
    has: Portion
    pods: frozenset[PodKey]  # the lost ones
    good: frozenset[str]  # nodes on which their places are still good
    closed: frozenset[str]  # its nodes that take no new pods, of which others may be lost soon
    why: Why
    until: float = inf  # Unix seconds at which it is over by its own limits
    starts_by: float = 0.0  # Unix seconds until which its new pods may take to be ready


@dataclass(frozen=True)
class Snapshot:
    """What ``plan`` decides upon. A cycle works on a copy, in which it assumes gangs.

    ``tree`` counts what is there, ``later`` what will be once all victims that are on their way out are gone and
    those who wait for them are there. Without such they are alike.
    """

    queues: Mapping[str, Queue]
    flavors: Mapping[str, Flavor]
    waiting: Backlog
    fleet: Fleet | None  # None: quota alone decides
    tree: Tree
    later: Tree
    running: Mapping[str, Sequence[Running]] = field(default_factory=dict)  # by queue; who may be taken
    departing: Sequence[Running] = ()  # who, or which part of whom, leaves for others already
    broken_queues: Mapping[str, str] = field(default_factory=dict)  # queue → what is wrong with its spec
    budgets: dict[str, int] = field(default_factory=dict)  # disruption budget → pods that may be evicted now
    past: Past = field(default_factory=dict)  # what queues have used on average; only the order of heads depends on it
    policy: Policy = Policy()
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # their labels
    held: Held = field(default_factory=Held)
    elastic: Sequence[Elastic] = ()  # who could grow
    orders: Sequence[MoveOrder] = ()
    moving: Mapping[str, Moving] = field(default_factory=dict)  # by uid: who leaves to move, or is to start again
    broken: Sequence[Broken] = ()  # who waits for lost pods to be replaced
    mix: Mix = field(default_factory=Mix)  # of what waits and runs; without it the tightest node is taken
    # Counts changes of what queues, flavors and nodes are, and by the root of its tree, of what queues hold. With
    # these, what is known of waiting gangs from the cycle before is used again where nothing has changed.
    version: int = 0
    versions: Mapping[str, int] | None = None

    @cached_property
    def rules(self) -> dict[str, Preemption]:
        """Each queue's rules of preemption."""
        return {name: queue.preemption for name, queue in self.queues.items()}

    @cached_property
    def others(self) -> Others | None:
        """Who loses by a gang that is placed; None: nobody is known."""
        return Others(self.mix, self.fleet) if self.fleet and self.mix else None

    @cached_property
    def going(self) -> list[Running]:
        """Those of the running who are on their way out anyway."""
        return [gang for gangs in self.running.values() for gang in gangs if gang.evicting and gang.goes]

    def leaving(self, back: Mapping[str, TakeBack]) -> Self:
        """Return it with these workloads on their way out, or with the parts that they give up.

        A copy in which gangs can be assumed, which holds as long as nothing changes here.
        """
        view = self._copy(self.tree.view(), self.later.view())
        if not back:
            return view
        running: dict[str, list[Running]] = {}
        for queue, gangs in self.running.items():
            running[queue] = []
            for gang in gangs:
                if gang.uid not in back:
                    running[queue].append(gang)
                    continue
                part = back[gang.uid].part
                for key, pods in gang.covered if part is None else gang.elastic_covered:
                    view.budgets[key] = view.budgets.get(key, 0) - pods
                if part is None:
                    running[queue].append(replace(gang, evicting=True))
                    continue
                view.later.remove(queue, part.quota)  # nobody takes any more of it until these pods are gone
                if view.fleet is not None:
                    for p in part.placements:
                        view.fleet.reserve(p.node, p.requests, -p.pods, now=False)
        return replace(view, running=running, versions=None)  # what is known was with them

    def without(self, uids: Collection[str]) -> Self:
        """Return it with these workloads not to be taken."""
        if not uids:
            return self
        running = {queue: [one for one in gangs if one.uid not in uids] for queue, gangs in self.running.items()}
        return replace(self, running=running)

    def tell_apart(self) -> None:
        """Keep those waiting gangs in groups of their own that can't be told the same."""
        queues = {name for name, queue in self.queues.items() if particular(queue)}
        self.waiting.tell_apart(queues, by_lifetime=self.fleet is not None and self.fleet.has_windows)

    def copy(self) -> Self:
        """Return a snapshot in which gangs can be assumed."""
        return self._copy(self.tree.copy(), self.later.copy())

    def _copy(self, tree: Tree, later: Tree) -> Self:
        fleet = self.fleet.snapshot() if self.fleet else None
        return replace(self, fleet=fleet, tree=tree, later=later, held=self.held.copy(), budgets=self.budgets.copy())

    def fits_later(self, gang: Gang, usage: Amounts) -> bool:
        """Tell whether the gang's queue may use that much more, without borrowing if the gang does not."""
        node = self.later.nodes[gang.queue]
        borrows = any(node.exceeds_own(cell, amount) for cell, amount in usage.items())
        return self.later.fits(gang.queue, usage) and (gang.preemptible or not borrows)

    def assume(
        self, gang: Gang, admission: Admission, victims: Iterable[Running] = (), inherited: Iterable[Running] = ()
    ) -> None:
        """Count a gang as reserved, or as waiting for its victims' room, for the rest of the cycle.

        ``inherited``: those for whom victims have waited, and for whom the gang now waits instead.
        """
        roles = [replace(role, pods=admission.pods[role.name]) for role in gang.roles]
        asked = requested(roles) | {CARDS: held(admission.placements).get(CARDS, 0)}
        self.held.add(self.queues[gang.queue], gang.namespace, gang.user, asked)
        leaving, queue = list(victims), gang.queue
        kept_free = [one for one in there(leaving) if not one.uid]
        waits_for = [*(victim for victim in leaving if victim.instead is None), *inherited]
        for victim in leaving:
            self.later.remove(victim.queue, victim.usage)
            for key, pods in victim.covered if not victim.evicting else ():
                self.budgets[key] = self.budgets.get(key, 0) - pods
        for one in kept_free:
            self.tree.remove(one.queue, one.usage)
        self.later.add(queue, admission.quota)
        idle = Idle.of(
            Portion(admission.placements, admission.quota), [Portion(v.placements, v.usage) for v in waits_for]
        )
        self.tree.add(queue, idle.quota)
        if self.fleet is None:
            return
        for victim in leaving:
            for p in victim.placements:
                self.fleet.reserve(p.node, p.requests, -p.pods, now=False)
        for p in (p for one in kept_free for p in one.placements):
            self.fleet.reserve(p.node, p.requests, -p.pods, later=False)
        for p in admission.placements:
            self.fleet.reserve(p.node, p.requests, p.pods, now=False)
        for node, requests in idle.nodes.items():
            self.fleet.reserve(node, requests, 1, later=False)
