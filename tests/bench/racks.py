"""Big gangs under load on a real inventory laid into racks: what topology does to waiting, spread and fragmentation.

The inventory is read from a path (of alibaba/clusterdata, Duan et al., ASPLOS 2026); it says
nothing of racks. Here its nodes of 8 A100 and of 8 H800 are laid, by model and in the order of the file, into racks of 8
nodes and blocks of 8 racks. Gangs come at random so that they ask for 85 % of the GPUs' time on average, half of it in
gangs of 64 to 512 GPUs, pods of 8 GPUs each, and half in pods of 1 to 8. Whoever fits starts, in order of arrival.
"""

import csv
import gzip
import heapq
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import fmean

from queuectl.core import fit
from queuectl.core.fleet import Base, Fleet
from queuectl.model.gpus import Gpus
from queuectl.model.objects import Flavor, Level, Node, Role, Topology
from queuectl.model.plan import Placement
from tests.bench.shown import percentile

INVENTORY = "nodes-spot2026.csv.gz"
GPU = "nvidia.com/gpu"
RACK, BLOCK = 8, 8  # nodes, racks
MODELS = ("A100-SXM4-80GB", "H800")
LOAD = 0.85
SIZES = ((64, 128, 256, 512), (1, 2, 4, 8))  # GPUs of big gangs, and of small ones
HOURS = (1.0, 8.0)  # shortest and longest run time, log-uniform
GANGS = 300  # big ones
LEVELS = (Level("block", "block"), Level("rack", "rack"))


@dataclass
class Outcome:
    """What one way of placing comes to, over the big gangs; means over time are of the middle of the run."""

    name: str
    waits: list[float] = field(default_factory=list)  # hours
    racks: list[float] = field(default_factory=list)  # used, for each that is needed at least
    blocks: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)  # share of all GPUs, at each arrival
    broken: list[float] = field(default_factory=list)  # share of free GPUs that are not on wholly free nodes


@dataclass(frozen=True, slots=True)
class _Gang:
    at: float  # hours
    hours: float
    role: Role
    big: bool


def measure(inventory: Path, seed: int = 1) -> list[Outcome]:
    """Run the same gangs in each of the ways."""
    nodes = list(_nodes(inventory))
    gangs = _gangs(8 * len(nodes), random.Random(seed))
    ways = {
        "no levels known": (Flavor("any"), Topology()),
        "levels known, nothing asked": (Flavor("any", levels=LEVELS), Topology()),
        "big gangs prefer a block": (Flavor("any", levels=LEVELS), Topology(preferred="block")),
        "big gangs require a block": (Flavor("any", levels=LEVELS), Topology(required="block")),
    }
    return [_Cluster(name, nodes, *way).run(gangs) for name, way in ways.items()]


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as text."""
    rows = [
        (
            one.name, f"{fmean(one.waits):.2f}", f"{percentile(one.waits, 90):.2f}", f"{fmean(one.racks):.2f}",
            f"{fmean(one.blocks):.2f}", f"{fmean(one.used):.1%}", f"{fmean(one.broken):.1%}",
        )
        for one in outcomes
    ]  # fmt: skip
    heads = ("", "wait mean, h", "wait p90, h", "racks/least", "blocks/least", "GPUs in use", "free on broken nodes")
    wide = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    return "\n".join(
        "  ".join([row[0].ljust(wide[0]), *(text.rjust(width) for text, width in zip(row[1:], wide[1:], strict=True))])
        for row in (heads, *rows)
    )


def _nodes(inventory: Path) -> Iterator[Node]:
    with gzip.open(inventory, "rt", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["gpus"] == "8" and row["gpu_model"] in MODELS]
    for model in MODELS:
        for number, row in enumerate(row for row in rows if row["gpu_model"] == model):
            rack = number // RACK
            labels = {"block": f"{model}-{rack // BLOCK:02}", "rack": f"{rack:03}"}
            yield Node(row["node"], labels, allocatable={GPU: 8, "pods": 110}, gpus=Gpus(model))


def _gangs(gpus: int, dice: random.Random) -> list[_Gang]:
    """Return gangs in order of arrival."""
    mean_hours = _mean_hours()
    big = [_gang(dice, dice.choice(SIZES[0]), big=True) for _ in range(GANGS)]
    span = sum(_gpus(one) for one in big) * mean_hours / (LOAD / 2 * gpus)
    small: list[_Gang] = []
    while sum(map(_gpus, small)) < sum(map(_gpus, big)):
        small += [_gang(dice, dice.choice(SIZES[1]), big=False) for _ in range(1_000)]
    return sorted((replace(one, at=dice.uniform(0, span)) for one in (*big, *small)), key=lambda one: one.at)


def _gang(dice: random.Random, gpus: int, *, big: bool) -> _Gang:
    pods, each = (gpus // 8, 8) if big else (1, gpus)
    hours = HOURS[0] * (HOURS[1] / HOURS[0]) ** dice.random()
    return _Gang(0.0, hours, Role("worker", pods, ((GPU, each), ("pods", 1))), big)


def _mean_hours() -> float:
    steps = [HOURS[0] * (HOURS[1] / HOURS[0]) ** (i / 1000) for i in range(1001)]
    return fmean(steps)


def _gpus(one: _Gang) -> int:
    return one.role.pods * dict(one.role.requests)[GPU]


class _Cluster:
    """Nodes on which gangs start as soon as they fit, in order of arrival, and end by themselves."""

    def __init__(self, name: str, nodes: Sequence[Node], flavor: Flavor, asked: Topology) -> None:
        self.outcome = Outcome(name)
        self._fleet = Fleet()
        for node in nodes:
            self._fleet.set_node(node)
        self._labels = {node.name: node.labels for node in nodes}
        self._flavor = flavor
        self._asked = asked
        self._waiting: list[_Gang] = []
        self._ends: list[tuple[float, int, tuple[Placement, ...]]] = []
        self._order = count()
        self._counted_from = 0.0

    def run(self, gangs: Sequence[_Gang]) -> Outcome:
        """Let all arrive; the first tenth fills the cluster and is not counted."""
        self._counted_from = gangs[len(gangs) // 10].at
        for one in gangs:
            while self._ends and self._ends[0][0] <= one.at:
                now, _, placed = heapq.heappop(self._ends)
                for p in placed:
                    self._fleet.reserve(p.node, p.requests, -p.pods)
                self._start(now)
            self._waiting.append(one)
            self._start(one.at)
            if one.at >= self._counted_from:
                self._look()
        return self.outcome

    def _start(self, now: float) -> None:
        failed: set[Role] = set()
        for one in self._waiting[:]:
            role = replace(one.role, topology=self._asked) if one.big else one.role
            placed = None if role in failed else fit.place(self._fleet, [role], {role.name: self._flavor})
            if placed is None or isinstance(placed, fit.Short):
                failed.add(role)
                continue
            self._waiting.remove(one)
            for p in placed:
                self._fleet.reserve(p.node, p.requests, p.pods)
            heapq.heappush(self._ends, (now + one.hours, next(self._order), placed))
            if one.big and one.at >= self._counted_from:
                self._count(one, now, {tuple(self._labels[p.node].values()) for p in placed})

    def _count(self, one: _Gang, now: float, racks: Collection[tuple[str, ...]]) -> None:
        self.outcome.waits.append(now - one.at)
        self.outcome.racks.append(len(racks) / -(-one.role.pods // RACK))
        self.outcome.blocks.append(len({block for block, _ in racks}) / -(-one.role.pods // (RACK * BLOCK)))

    def _look(self) -> None:
        columns, _ = self._fleet.columns(((GPU, 1),)) or ([], None)
        free = self._fleet.matrix(Base.FREE)[self._fleet.domains().order][:, columns].sum(axis=1)
        self.outcome.used.append(1 - float(free.sum()) / (8 * len(free)))
        self.outcome.broken.append(float(free[free < 8].sum()) / max(1, int(free.sum())))
