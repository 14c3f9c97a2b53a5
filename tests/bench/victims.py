"""How long the search for victims takes, and how far from the optimum it ends.

One gang wants whole nodes of a cluster that is full; everybody who runs there is a candidate. Then small random
cases, each against the best of all sets that may be taken.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from queuectl.core.backlog import Backlog
from queuectl.core.nominate import nominate
from queuectl.core.preemption import Running
from queuectl.core.snapshot import Snapshot
from queuectl.core.tree import Tree
from queuectl.model.objects import Flavor, Queue
from queuectl.model.plan import Placement
from queuectl.model.policy import Preemption, Quota, Reclaim, VictimChoice, Within
from tests.support.builders import fleet, gang, node, requests, role
from tests.support.victims import CELL, NOW, draw, losses, total

SIZES = (250, 500, 1_000, 2_000, 4_000)  # candidates
NODES = 500  # whole ones that the newcomer asks for, at most
CASES = 2_000


@dataclass(frozen=True)
class Search:
    """One size. Seconds of CPU."""

    candidates: int
    nodes: int
    wanted: int  # whole nodes
    peers: float  # in the peers' order alone
    least: float  # by the default
    victims: int
    saved: float  # of the work that the peers' order would lose


def searches(sizes: Sequence[int] = SIZES) -> Iterator[Search]:
    for candidates in sizes:
        for share in (100, 2):
            yield _search(candidates, share)


def _search(candidates: int, share: int) -> Search:
    dice = random.Random(candidates)
    nodes = candidates // 4
    running = []
    cluster = fleet(node(f"n{i:05}") for i in range(nodes))
    for number in range(candidates):
        ready_at = NOW - dice.randint(0, 9_000)
        place = Placement("worker", "any", f"n{number // 4:05}", 1, requests(gpu=2))
        cluster.reserve(place.node, place.requests, 1)
        running.append(
            Running(
                f"g{number}", dice.choice("ab"), dice.randint(0, 2), float(number), ready_at, {CELL: 2}, (place,),
                gpus=2, ready_at=ready_at,
            )
        )  # fmt: skip
    rules = Preemption(Within.LOWER_PRIORITY, Reclaim.ANY)
    wanted = max(1, nodes // share)
    newcomer = gang("newcomer", role(pods=wanted, gpu=8), queue="a", priority=3)

    def once(choice: VictimChoice) -> tuple[float, list[Running]]:
        queues = {
            "top": Queue("top"),
            "a": Queue("a", "top", quotas={CELL: Quota(8 * nodes)}, preemption=Preemption(
                rules.within_queue, rules.reclaim, victims=choice)),
            "b": Queue("b", "top", quotas={CELL: Quota(0)}, preemption=rules),
        }  # fmt: skip
        tree = Tree.of(queues.values())
        for one in running:
            tree.add(one.queue, one.usage)
        by_queue = {name: [one for one in running if one.queue == name] for name in "ab"}
        snapshot = Snapshot(queues, {"any": Flavor("any")}, Backlog(), cluster, tree, tree.copy(), by_queue)
        began = time.process_time()
        entry = nominate(snapshot, frozenset(), newcomer, NOW)
        return time.process_time() - began, [victim.gang for victim in entry.victims]

    (peers, theirs), (least, ours) = once(VictimChoice.LOWEST_PRIORITY), once(VictimChoice.LEAST_WORK_LOST)
    before, after = (total(one.lost(NOW) for one in some).gpu_seconds for some in (theirs, ours))
    return Search(candidates, nodes, wanted, peers, least, len(ours), 1 - after / before if before else 0.0)


def distances(cases: int = CASES) -> dict[str, list[float]]:
    """Return loss / optimum of both choices over random cases with up to 9 candidates of one priority, sorted."""
    found: dict[str, list[float]] = {"least work lost": [], "lowest priority": []}
    for seed in range(cases):
        case = draw(random.Random(seed), alike=True)
        price = losses(case)
        best = case.least(price)
        if best is None or not case.victims(VictimChoice.LOWEST_PRIORITY):
            continue  # it fits, or never will
        for name, choice in zip(found, VictimChoice, strict=True):
            lost = total(price[one.uid] for one in case.victims(choice))
            found[name].append((lost.gpu_seconds + 1) / (best.gpu_seconds + 1))
    return {name: sorted(ratios) for name, ratios in found.items()}


def table(found: Sequence[Search]) -> str:
    lines = [
        "| candidates | nodes | wanted | peers' order | least work lost | victims | work saved |",
        "| --: " * 7 + "|",
    ]
    lines += [
        f"| {s.candidates} | {s.nodes} | {s.wanted} | {s.peers * 1000:.0f} ms | {s.least * 1000:.0f} ms"
        f" | {s.victims} | {s.saved:.0%} |"
        for s in found
    ]
    return "\n".join(lines)


def distance_table(found: dict[str, list[float]]) -> str:
    lines = ["| choice | cases | optimal | 90 % | 99 % | worst |", "| --- " + "| --: " * 5 + "|"]
    for name, ratios in found.items():
        optimal = sum(ratio == 1 for ratio in ratios) / len(ratios)
        p90, p99 = (ratios[int(part * len(ratios))] for part in (0.9, 0.99))
        lines.append(f"| {name} | {len(ratios)} | {optimal:.1%} | {p90:.2f} | {p99:.2f} | {ratios[-1]:.0f} |")
    return "\n".join(lines)
