"""Who requires a domain takes victims that make room in one, held against all sets that there are."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

from queuectl.core import fit
from queuectl.core.nominate import nominate
from queuectl.core.preemption import Running
from queuectl.core.snapshot import Snapshot
from queuectl.model.objects import Flavor, Gang, Level, Topology
from queuectl.model.plan import Placement
from queuectl.model.policy import Preemption, Within
from tests.support.builders import GPU, fleet, gang, node, queue, requests, role, snapshot

CELL = ("any", GPU)
RACKS = Flavor("any", levels=(Level("rack", "example.com/rack"),))
NOW = 100.0
CASES = 120


def test_victims_are_found_where_there_are_any_and_are_nearly_the_cheapest() -> None:
    """In small random racks: each set makes room in one rack, and all together cost at most a twentieth too much."""
    paid = least = found = 0
    for seed in range(CASES):
        view, new = _case(Random(seed))
        entry = nominate(view, frozenset(), new, NOW)
        if entry.fits:
            continue
        cheapest = _cheapest(view, new)
        victims = [victim.gang for victim in entry.victims]
        assert bool(victims) == (cheapest is not None), f"case {seed}"
        if cheapest is None:
            continue
        assert _fits_without(view, new, victims)
        paid, least, found = paid + _lost(victims), least + cheapest, found + 1
    assert found > CASES // 4
    assert paid <= 1.05 * least


def _case(random: Random) -> tuple[Snapshot, Gang]:
    """Return racks that gangs of several priorities use, and one that needs several nodes of one rack."""
    nodes = [
        node(f"n{rack}-{i}", labels={"example.com/rack": f"r{rack}"})
        for rack in range(random.randint(2, 4))
        for i in range(random.randint(2, 3))
    ]
    left = {one.name: 8 for one in nodes}
    running = []
    for number in range(random.randint(4, 9)):
        gpus, pods = random.choice([2, 4, 8]), random.randint(1, 2)
        names = [name for name in left if left[name] >= gpus]
        if len(names) < pods:
            continue
        chosen = random.sample(names, pods)
        for name in chosen:
            left[name] -= gpus
        places = tuple(Placement("worker", "any", name, 1, requests(gpu=gpus)) for name in chosen)
        began = random.randint(-5000, 0)
        running.append(
            Running(
                f"u{number}", "q", random.choice([0, 0, 0, 5]), 0.0, began, {CELL: gpus * pods}, places,
                gpus=gpus * pods, pods=pods, ready_at=began,
            )
        )  # fmt: skip
    busy = fleet(nodes, reserved=[(p.node, p.requests, p.pods) for one in running for p in one.placements])
    usage = {("q", *CELL): sum(one.usage[CELL] for one in running)}
    rules = replace(queue(), preemption=Preemption(Within.LOWER_PRIORITY))
    worker = replace(role(pods=random.randint(2, 3), gpu=random.choice([4, 8])), topology=Topology(required="rack"))
    new = gang("new", worker, priority=3)
    view = snapshot([new], nodes=busy, queues=[rules], flavors=[RACKS], usage=usage)
    return replace(view, running={"q": running}), new


def _cheapest(view: Snapshot, new: Gang) -> int | None:
    lower = [one for one in view.running["q"] if one.priority < new.priority]
    sets = (some for size in range(1, len(lower) + 1) for some in combinations(lower, size))
    return min((_lost(some) for some in sets if _fits_without(view, new, some)), default=None)


def _fits_without(view: Snapshot, new: Gang, gone: Sequence[Running]) -> bool:
    assert view.fleet is not None
    places = [place for one in gone for place in one.placements]
    return not isinstance(fit.place(view.fleet, new.roles, {"worker": RACKS}, new.together, places), fit.Short)


def _lost(gangs: Sequence[Running]) -> int:
    return sum(one.price(NOW).gpu_seconds for one in gangs)
