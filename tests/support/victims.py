"""Random cases in which somebody has to give way, and the least that any allowed set of victims loses."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from queuectl.core.backlog import Backlog
from queuectl.core.freed import Freed
from queuectl.core.nominate import nominate
from queuectl.core.preemption import Running
from queuectl.core.snapshot import Policy, Snapshot
from queuectl.core.tree import Tree
from queuectl.model.objects import Flavor, Gang, Queue
from queuectl.model.plan import Placement
from queuectl.model.policy import FairRule, Preemption, Quota, Reclaim, VictimChoice, Within
from queuectl.model.work import NO_WORK, Work
from tests.support.builders import GPU, fleet, gang, node, requests, role

CELL = ("any", GPU)
NOW = 10_000.0
RULES = Preemption(Within.LOWER_PRIORITY, Reclaim.ANY)


@dataclass(frozen=True)
class Case:
    """A cluster that is full, and a gang that wants in."""

    snapshot: Snapshot
    newcomer: Gang

    def victims(self, choice: VictimChoice) -> list[Running]:
        queues = {
            name: replace(queue, preemption=replace(queue.preemption, victims=choice))
            for name, queue in self.snapshot.queues.items()
        }
        entry = nominate(replace(self.snapshot, queues=queues), frozenset(), self.newcomer, NOW)
        return [victim.gang for victim in entry.victims]

    def makes_room(self, gone: list[Running], *, at_home: bool | None = None) -> bool:
        """Tell whether the newcomer fits without these; ``at_home``: within what its queue owns."""
        at_home = self.at_home if at_home is None else at_home
        snapshot = self.snapshot.copy()
        usage, newcomer = self._usage, self.newcomer
        freed = Freed(
            snapshot, newcomer.queue, usage, newcomer.roles, flavors=self._flavors(), together=newcomer.together
        )
        for one in gone:
            snapshot.later.remove(one.queue, one.usage)
            freed.take(one)
        home = replace(self.newcomer, preemptible=not at_home)
        return snapshot.fits_later(home, usage) and freed.fits()

    @cached_property
    def at_home(self) -> bool:
        """Whether it must not borrow: others may be taken for what its queue owns only, and that goes first."""
        home, theirs = self.snapshot.later.nodes["a"], self.snapshot.later.nodes["b"]
        under = home.usage.get(CELL, 0) < home.quota(CELL).nominal
        others = bool(self.snapshot.running["b"]) and theirs.borrows_with(CELL)
        return under and others and any(self._fits_without(some, at_home=True) for some in _sets(self._candidates()))

    def least(self, price: Mapping[str, Work], most: Work | None = None) -> Work | None:
        """Return the lowest price of any set that may be taken and makes room; None when there is none.

        ``most``: what it may lose.
        """
        lost = losses(self)
        at_home = self.at_home
        candidates = [one for one in self._candidates() if at_home or one.queue == "a"]
        best = None
        for some in _sets(candidates):
            cost = total(price[one.uid] for one in some)
            if most is not None and total(lost[one.uid] for one in some) > most:
                continue
            if (best is None or cost < best) and self._fits_without(some, at_home=at_home):
                best = cost
        return best

    def may_be_first(self, one: Running) -> bool:
        """Tell whether one of the candidates may be taken, by fair sharing, while all others are there."""
        usage, tree = self._usage, self.snapshot.later.copy()
        home, theirs = tree.nodes["a"], tree.nodes["b"]
        if one.queue == "a" or not theirs.borrows_with(CELL):
            return one.queue == "a" and self._may_take(one)
        tree.add("a", usage)
        mine, before = home.share().key, theirs.share().key
        tree.remove("b", one.usage)
        allows = {FairRule.INITIAL: mine < before, FairRule.FINAL: mine <= theirs.share().key}
        return not home.borrows_with(CELL) or any(allows[rule] for rule in self.snapshot.policy.fair_sharing)

    def within_budgets(self, gone: list[Running]) -> bool:
        """Tell whether disruption budgets allow that all of these go."""
        pods = Counter[str]()
        for one in gone:
            pods.update(dict(one.covered))
        return all(count <= self.snapshot.budgets[key] for key, count in pods.items())

    def _candidates(self) -> list[Running]:
        return [one for gangs in self.snapshot.running.values() for one in gangs if self._may_take(one)]

    def _fits_without(self, some: list[Running], *, at_home: bool) -> bool:
        return self.within_budgets(some) and self._in_some_order(some) and self.makes_room(some, at_home=at_home)

    def _may_take(self, one: Running) -> bool:
        return one.queue != self.newcomer.queue or one.priority < self.newcomer.priority

    def _in_some_order(self, some: list[Running]) -> bool:
        """Tell whether the others' queue borrows until the last is taken, whoever that is."""
        theirs = [one for one in some if one.queue != self.newcomer.queue]
        if not theirs:
            return True
        node = self.snapshot.later.nodes["b"]
        used, own = node.usage.get(CELL, 0), node.quota(CELL).nominal
        gone = sum(one.usage[CELL] for one in theirs)
        return any(used - gone + last.usage[CELL] > own for last in theirs)

    @property
    def _usage(self) -> dict[tuple[str, str], int]:
        return {CELL: sum(part.pods * dict(part.requests)[GPU] for part in self.newcomer.roles)}

    def _flavors(self) -> dict[str, Flavor]:
        return {part.name: self.snapshot.flavors["any"] for part in self.newcomer.roles}


def _sets(candidates: list[Running]) -> Iterator[list[Running]]:
    for count in range(1, len(candidates) + 1):
        yield from map(list, combinations(candidates, count))


def total(works: Iterator[Work]) -> Work:
    result = NO_WORK
    for work in works:
        result = result.plus(work)
    return result


def losses(case: Case) -> dict[str, Work]:
    return {one.uid: one.lost(NOW) for gangs in case.snapshot.running.values() for one in gangs}


def draw(
    dice: random.Random,
    *,
    most: int = 9,
    alike: bool = False,
    history: bool = False,
    crowded: bool = False,
    budgets: bool = False,
    lasted: int = 5000,
    lent: bool = False,
) -> Case:
    """Return a case with up to ``most`` running gangs, for ``lasted`` seconds at most.

    ``alike``: of one priority, and of queues without history. ``history``: some have given way before.

    ``crowded``: most are of the other queue, and the newcomer wants whole nodes or half ones. ``budgets``: two
    disruption budgets cover about half of them each. ``lent``: both queues own little and borrow the rest.
    """
    nodes = [node(f"n{i}", gpu=dice.choice((4, 8))) for i in range(dice.randint(1, 4))]
    cluster = fleet(nodes)
    free = {one.name: one.allocatable[GPU] for one in nodes}
    running: dict[str, list[Running]] = {"a": [], "b": []}
    for number in range(dice.randint(1, most)):
        placements = _place(dice, free)
        if not placements:
            continue
        gpus = sum(p.pods * dict(p.requests)[GPU] for p in placements)
        ready_at = NOW - dice.randint(0, lasted)
        running[queue := dice.choice("abbb" if crowded else "ab")].append(
            Running(
                uid=f"g{number}",
                queue=queue,
                priority=0 if alike else dice.randint(0, 2),
                submitted_at=float(number),
                admitted_at=ready_at - dice.randint(1, 100),
                usage={CELL: gpus},
                placements=placements,
                gpus=gpus,
                pods=sum(p.pods for p in placements),
                ready_at=dice.choice((ready_at, ready_at, ready_at, None)),
                saved_at=dice.choice((None, ready_at + dice.random() * (NOW - ready_at))),
                preemptions=dice.choice((0, 0, 1, 5)) if history else 0,
            )
        )
        for p in placements:
            cluster.reserve(p.node, p.requests, p.pods)
    used = {name: sum(one.usage[CELL] for one in gangs) for name, gangs in running.items()}
    everything = sum(one.allocatable[GPU] for one in nodes)
    own = dice.choice((everything, everything, dice.randint(0, everything)))  # or nodes alone are short
    theirs = dice.randint(0, used["b"])
    own, theirs = (own // 4, theirs // 4) if lent else (own, theirs)
    queues = {
        "top": Queue("top", quotas={CELL: Quota(everything - own - theirs)} if lent else {}),
        "a": Queue("a", "top", quotas={CELL: Quota(own)}, preemption=RULES),
        "b": Queue("b", "top", quotas={CELL: Quota(theirs)}, preemption=RULES),
    }
    tree = Tree.of(queues.values())
    for gangs in running.values():
        for one in gangs:
            tree.add(one.queue, one.usage)
    allowed = {name: dice.randint(0, 4) for name in ("one", "two")} if budgets else {}
    for gangs in running.values():
        gangs[:] = [replace(g, covered=tuple((key, g.pods) for key in allowed if dice.random() < 0.5)) for g in gangs]
    sizes = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (3, 1))
    pods, size = dice.choice([one for one in sizes if one[1] >= 4] if crowded else sizes)
    return Case(
        Snapshot(
            queues=queues,
            flavors={"any": Flavor("any")},
            waiting=Backlog(),
            fleet=cluster,
            tree=tree,
            later=tree.copy(),
            running=running,
            budgets=allowed,
            policy=Policy(),
        ),
        gang("newcomer", role(pods=pods, gpu=size), queue="a", priority=3),
    )


def fair(case: Case, rules: tuple[FairRule, ...] = (FairRule.FINAL, FairRule.INITIAL)) -> Case:
    """Return the case under fair sharing."""
    return replace(case, snapshot=replace(case.snapshot, policy=Policy(fair_sharing=rules)))


def _place(dice: random.Random, free: dict[str, int]) -> tuple[Placement, ...]:
    size = dice.choice((1, 1, 2, 4))
    found = []
    for name in dice.sample(sorted(free), k=min(len(free), dice.choice((1, 1, 2)))):
        if free[name] >= size:
            free[name] -= size
            found.append(Placement("worker", "any", name, 1, requests(gpu=size)))
    return tuple(found)
