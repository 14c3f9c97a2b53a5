"""How much of a real cluster of shared GPUs ends up in use, by the rule that picks node and device.

Pods of the trace come in random order, drawn with replacement, until what they ask for is 1.2 times the GPUs there are.
Nobody leaves. A pod that fits nowhere is refused; one that fits is placed, whatever the rule thinks of it. A GPU is a
device of 1000 thousandths: a pod with a share takes it from one device, a pod without takes whole free devices. GPU
models that a pod allows are heeded, and so are cpu and memory.
"""

import csv
import gzip
import multiprocessing
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from queuectl.core import fragmentation
from queuectl.core.fragmentation import Kind, Mix
from queuectl.model.objects import Constraints, Flavor, Gang, NodeTerm, Requirement, Role

DEMAND = 120  # percent of the GPUs that there are
SEEDS = 20
SHORT = 0.1  # percent of the GPUs: rows of the table in which no rule has refused more are left out
WHOLE = 1000  # thousandths of a device
MOST_CPU, MOST_GPU = 128_000, 8_000  # of a node, by which peers' scores are scaled
_UNKNOWN = -2
TYPICAL = 0.95  # of all pods: so many are of the kinds that the fragmentation gradient looks at

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.bool_]


class Ask(NamedTuple):
    """What a pod asks for: milli-cpus, MiB, devices, and thousandths of each."""

    cpu: int
    memory: int
    devices: int
    share: int
    models: tuple[str, ...]  # empty: any

    @property
    def gpu(self) -> int:
        return self.devices * self.share


class State(NamedTuple):
    """What is left of a node. Devices that have the same left are alike, and so are nodes of the same state."""

    model: str
    cpu: int
    memory: int
    left: tuple[int, ...]  # thousandths of each device, ascending

    def after(self, ask: Ask, device: int) -> "State":
        """Return what is left then. ``device``: the one that gives the share; of whole ones all are alike."""
        left = list(self.left)
        for _ in range(ask.devices):
            at = device if ask.share < WHOLE else left.index(WHOLE)
            left[at] -= ask.share
        return State(self.model, self.cpu - ask.cpu, self.memory - ask.memory, tuple(sorted(left)))


class Trace(NamedTuple):
    """A cluster, its nodes in order of name, and pods."""

    nodes: list[State]
    pods: list[Ask]

    @property
    def gpus(self) -> int:
        """Thousandths of all devices."""
        return sum(sum(node.left) for node in self.nodes)


def read(folder: Path) -> Trace:
    """Read nodes-openb2023.csv.gz and pods-openb2023.csv.gz."""
    nodes = sorted(_rows(folder / "nodes-openb2023.csv.gz"), key=lambda row: row["node"])
    pods = _rows(folder / "pods-openb2023.csv.gz")
    return Trace(
        [
            State(row["gpu_model"], int(row["cpu_milli"]), int(row["memory_mib"]), (WHOLE,) * int(row["gpus"]))
            for row in nodes
        ],
        [
            Ask(
                int(row["cpu_milli"]),
                int(row["memory_mib"]),
                int(row["gpus"]),
                int(row["gpu_milli"] or 0) if int(row["gpus"]) else 0,
                tuple(sorted(set(row["gpu_models"].split("|")) - {""})),
            )
            for row in pods
        ],
    )


def _rows(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


def arrivals(trace: Trace, seed: int, demand: int = DEMAND) -> list[Ask]:
    """Return pods in the order in which they come."""
    dice, result, asked = random.Random(seed), [], 0
    while 100 * asked < demand * trace.gpus:
        result.append(dice.choice(trace.pods))
        asked += result[-1].gpu
    return result


class Cluster:
    """The nodes, and by numbers the states that they are in or could get into."""

    def __init__(self, trace: Trace) -> None:
        self.states: list[State] = []
        self._numbers: dict[State, int] = {}
        self.at: Ints = np.array([self.number(node) for node in trace.nodes])
        self.cpu: Ints = np.array([node.cpu for node in trace.nodes])
        self.memory: Ints = np.array([node.memory for node in trace.nodes])
        self.left: Ints = devices(trace.nodes)
        self._open: dict[tuple[str, ...], Bits] = {
            ask.models: np.array([not ask.models or node.model in ask.models for node in trace.nodes])
            for ask in trace.pods
        }
        self._had: dict[int, int] = {}  # states that nodes have had, as rows of tables
        self._rows: Ints = np.array([self._had.setdefault(number, len(self._had)) for number in self.at.tolist()])
        self._tables: dict[Ask, Ints] = {}

    def number(self, state: State) -> int:
        known = self._numbers.get(state)
        if known is None:
            known = self._numbers[state] = len(self.states)
            self.states.append(state)
        return known

    def fits(self, ask: Ask) -> Ints:
        """Return the nodes that a pod fits on."""
        fits = (self.cpu >= ask.cpu) & (self.memory >= ask.memory)
        if ask.devices:
            fits &= (self.left[:, -ask.devices] >= ask.share) & self._open[ask.models]
        return np.flatnonzero(fits)

    def becomes(self, ask: Ask, number: int) -> list[int]:
        """Return what a state can become when a pod goes there that fits, the fullest device first."""
        state, after = self.states[number], dict[int, None]()
        for device, left in enumerate(state.left) if 0 < ask.share < WHOLE else [(0, WHOLE)]:
            if left >= ask.share:
                after[self.number(state.after(ask, device))] = None
        return list(after)

    def moves(self, ask: Ask, nodes: Ints) -> "Moves":
        """Return all that can become of nodes that a pod fits on; reckoned once for each state."""
        table = self._tables.get(ask)
        if table is None or len(table) < len(self._had):
            more = np.full((2 * len(self._had), MOST_GPU // WHOLE if 0 < ask.share < WHOLE else 1), _UNKNOWN)
            table = self._tables[ask] = more if table is None else np.concatenate([table, more])
        rows = self._rows[nodes]
        new = table[rows, 0] == _UNKNOWN
        for row, number in dict(zip(rows[new].tolist(), self.at[nodes[new]].tolist(), strict=True)).items():
            after = self.becomes(ask, number)
            table[row] = -1
            table[row, : len(after)] = after
        which, device = np.nonzero(table[rows] >= 0)
        return Moves(ask, nodes[which], table[rows[which], device])

    def become(self, node: int, number: int) -> None:
        state = self.states[number]
        self.at[node] = number
        self._rows[node] = self._had.setdefault(number, len(self._had))
        self.cpu[node], self.memory[node], self.left[node] = state.cpu, state.memory, devices([state])


def devices(states: Sequence[State]) -> Ints:
    """Return what is left of each device, ascending, as if all nodes had eight."""
    return np.array([(0,) * (MOST_GPU // WHOLE - len(state.left)) + state.left for state in states])


class Moves(NamedTuple):
    """What could be done with a pod: to each of these nodes it could go, and the node then be of that state."""

    ask: Ask
    nodes: Ints
    after: Ints  # empty where the device is the one that fits tightest


class Rule(ABC):
    """Picks a node and a device. Among equals the first node by name is taken, on it the fullest device."""

    best_fit_device = True  # else the score says which device, too

    def __init__(self, trace: Trace, seed: int) -> None:
        self.cluster = Cluster(trace)
        self.trace = trace
        self.dice = random.Random(f"ties {seed}")

    @abstractmethod
    def scores(self, moves: Moves) -> Floats:
        """Return what is against each."""

    def put(self, ask: Ask) -> bool:
        """Place a pod if it fits."""
        cluster, nodes = self.cluster, self.cluster.fits(ask)
        if not len(nodes):
            return False
        moves = Moves(ask, nodes, nodes[:0]) if self.best_fit_device else cluster.moves(ask, nodes)
        best = self.choose(self.scores(moves), moves.nodes)
        node = int(moves.nodes[best])
        after = cluster.becomes(ask, int(cluster.at[node]))[0] if self.best_fit_device else int(moves.after[best])
        cluster.become(node, after)
        return True

    def choose(self, scores: Floats, nodes: Ints) -> int:  # noqa: ARG002 - for those who choose otherwise
        """Return which move is made."""
        return int(np.argmin(scores))


class FirstFit(Rule):
    """The first node by name."""

    def scores(self, moves: Moves) -> Floats:
        return np.zeros(len(moves.nodes))


class BestFit(Rule):
    """The node where the least is left, cpu and GPUs counting half each as parts of the largest node's."""

    def scores(self, moves: Moves) -> Floats:
        cpu = self.cluster.cpu[moves.nodes] - moves.ask.cpu
        gpu = self.cluster.left[moves.nodes].sum(axis=1) - moves.ask.gpu
        found: Floats = np.round(cpu / MOST_CPU + gpu / MOST_GPU, 9)
        return found


class DotProduct(Rule):
    """The node with the least product of what it has left and what is asked for (after Tetris, SIGCOMM 2014)."""

    def scores(self, moves: Moves) -> Floats:
        cpu = self.cluster.cpu[moves.nodes] / MOST_CPU * moves.ask.cpu / MOST_CPU
        gpu = self.cluster.left[moves.nodes].sum(axis=1) / MOST_GPU * moves.ask.gpu / MOST_GPU
        found: Floats = np.round(cpu + gpu, 9)
        return found


class Kept:
    """A row of figures for each state, reckoned once."""

    def __init__(self, cluster: Cluster, width: int) -> None:
        self.cluster = cluster
        self._rows: Floats = np.zeros((1024, width))
        self._known = np.zeros(1024, np.bool_)

    def of(self, numbers: Ints, columns: Sequence[int] | None = None) -> Floats:
        more = len(self.cluster.states) - len(self._known)
        if more > 0:
            more = max(more, len(self._known))
            self._rows = np.concatenate([self._rows, np.zeros((more, self._rows.shape[1]))])
            self._known = np.concatenate([self._known, np.zeros(more, np.bool_)])
        new = np.unique(numbers[~self._known[numbers]])
        if len(new):
            self._rows[new] = self.reckon(new)
            self._known[new] = True
        return self._rows[numbers] if columns is None else self._rows[numbers[:, None], columns]

    def reckon(self, numbers: Ints) -> Floats:
        raise NotImplementedError


class _Kinds:
    """Kinds of pods as columns. What a device is worth to them is looked up by what is left of it."""

    def __init__(self, kinds: Sequence[Ask]) -> None:
        self.models = [frozenset(ask.models) for ask in kinds]
        self.room: Ints = np.array([(ask.cpu, ask.memory) for ask in kinds])
        self.devices: Ints = np.array([ask.devices for ask in kinds])
        share = np.array([max(ask.share, 1) for ask in kinds])
        left = np.arange(WHOLE + 1)[:, None]
        self.pods = (left // share).astype(np.int16)  # that a device holds
        self.holds = (left >= share).astype(np.int8)
        self.useless = (left * (left < share)).astype(np.int16)
        self._open: dict[str, Bits] = {}

    def on(self, states: Sequence[State], table: npt.NDArray[np.signedinteger[Any]]) -> Ints:
        """Return the sum of a table over the devices of each state."""
        left = devices(states)
        return sum((table[left[:, at]] for at in range(left.shape[1])), np.zeros((1, 1), np.int64))

    def open_to(self, states: Sequence[State]) -> Bits:
        """Tell whose models the kinds allow."""
        for model in {state.model for state in states} - self._open.keys():
            self._open[model] = np.array([not models or model in models for models in self.models])
        return np.array([self._open[state.model] for state in states])


class _Fragments(Kept):
    """How many thousandths of devices are of no use to a typical pod."""

    def __init__(self, cluster: Cluster, typical: Mapping[Ask, float]) -> None:
        super().__init__(cluster, 1)
        self._kinds = _Kinds(list(typical))
        self._parts = np.array(list(typical.values()))

    def reckon(self, numbers: Ints) -> Floats:
        kinds, states = self._kinds, [self.cluster.states[number] for number in numbers.tolist()]
        cpu = np.array([[state.cpu] for state in states])
        able = (kinds.on(states, kinds.holds) >= kinds.devices) & (kinds.devices > 0) & (cpu >= kinds.room[:, 0])
        total = devices(states).sum(axis=1, keepdims=True)
        useless = np.where(able & kinds.open_to(states), kinds.on(states, kinds.useless), total)
        found: Floats = (useless * self._parts).sum(axis=1, keepdims=True)
        return found


class Gradient(Rule):
    """The fragmentation gradient: the node and device by which the fragments that a typical pod sees grow least.

    Typical are the kinds of pods of the whole trace, known beforehand, that make up 95 % of it; memory aside.
    """

    best_fit_device = False

    def __init__(self, trace: Trace, seed: int) -> None:
        super().__init__(trace, seed)
        kinds = Counter(ask._replace(memory=0) for ask in trace.pods)
        typical, pods = {}, 0
        for ask, number in sorted(kinds.items(), key=lambda one: (-one[1], one[0])):
            if pods < TYPICAL * len(trace.pods):
                typical[ask] = number
                pods += number
        self._fragments = _Fragments(self.cluster, {ask: number / pods for ask, number in typical.items()})

    def scores(self, moves: Moves) -> Floats:
        before = self.cluster.at[moves.nodes]
        return np.round(self._fragments.of(moves.after) - self._fragments.of(before), 6)[:, 0]


class RoundedGradient(Gradient):
    """The same as its authors' simulator does it: whole scores from 0 to 100, and one of the best nodes at random."""

    def scores(self, moves: Moves) -> Floats:
        return -np.floor(100 / (1 + np.exp(super().scores(moves) / 1000)))

    def choose(self, scores: Floats, nodes: Ints) -> int:
        best = np.flatnonzero(scores == scores.min())
        _, first = np.unique(nodes[best], return_index=True)
        return int(best[self.dice.choice(first.tolist())])


class _Places(Kept):
    """How many places a node has for each kind of pod; cpu and memory as the core counts them."""

    def __init__(self, cluster: Cluster, kinds: Sequence[Ask]) -> None:
        super().__init__(cluster, len(kinds))
        self._kinds = _Kinds(kinds)

    def reckon(self, numbers: Ints) -> Floats:
        kinds, states = self._kinds, [self.cluster.states[number] for number in numbers.tolist()]
        found = fragmentation.places(np.array([(state.cpu, state.memory) for state in states]), kinds.room)
        on_devices = kinds.on(states, kinds.pods) / np.maximum(kinds.devices, 1)
        found = np.where(kinds.devices, np.minimum(found, on_devices), found)
        closed = (kinds.devices > 0) & ~kinds.open_to(states)
        return np.where(closed | (found < 1), 0, found)


class LeastLost(Rule):
    """The core's own: the node, and the device, by which the others lose the least.

    The others are all that have come so far, placed or not. What places are worth is reckoned in each cycle, for which
    every tenth pod stands.
    """

    best_fit_device = False

    def __init__(self, trace: Trace, seed: int) -> None:
        super().__init__(trace, seed)
        kinds = sorted(set(trace.pods))
        self._columns = {_kind(ask): column for column, ask in enumerate(kinds)}
        self._places = _Places(self.cluster, kinds)
        self._mix = Mix()
        self._came = 0
        self._value = _Value(self._places, [], np.zeros(0))

    def put(self, ask: Ask) -> bool:
        kind = _kind(ask)
        self._mix.add(Gang("", "", "", "", 0, 0.0, (Role("", 1, kind.requests, kind.constraints),)))
        if self._came % 10 == 0:
            known = self._mix.of(Flavor("openb"))
            columns = [self._columns[kind] for kind, _ in known]
            total = self._places.of(self.cluster.at, columns).sum(axis=0)
            worth = fragmentation.weights(np.array([pods for _, pods in known]), total)
            self._value = _Value(self._places, columns, worth)
        self._came += 1
        return super().put(ask)

    def scores(self, moves: Moves) -> Floats:
        return np.rint(self._value.of(self.cluster.at[moves.nodes]) - self._value.of(moves.after))[:, 0]


class _Value(Kept):
    """What the places of a node are worth, in one cycle."""

    def __init__(self, places: _Places, columns: list[int], worth: Floats) -> None:
        super().__init__(places.cluster, 1)
        self._places = places
        self._columns = columns
        self._worth = worth

    def reckon(self, numbers: Ints) -> Floats:
        return fragmentation.value(self._places.of(numbers, self._columns), self._worth)[:, None]


def _kind(ask: Ask) -> Kind:
    terms = (NodeTerm((Requirement("gpu-model", "In", ask.models),)),) if ask.models else ()
    requests = (("cpu", ask.cpu), ("memory", ask.memory), ("devices", ask.devices), ("share", ask.share))
    return Kind(frozenset(), Constraints(terms=terms), requests)


RULES: Mapping[str, type[Rule]] = {
    "first-fit": FirstFit,
    "best-fit": BestFit,
    "dot-product": DotProduct,
    "gradient": Gradient,
    "gradient, rounded": RoundedGradient,
    "queuectl": LeastLost,
}


@dataclass(frozen=True)
class Filled:
    """One run: the part of all GPUs in use at each percent of demand, and milliseconds of CPU for each pod."""

    rule: str
    seed: int
    shares: list[float]
    milliseconds: float


def fill(trace: Trace, seed: int, rule: str, demand: int = DEMAND) -> Filled:
    picker, pods = RULES[rule](trace, seed), arrivals(trace, seed, demand)
    shares: list[float] = []
    asked = used = 0
    began = time.process_time()
    for ask in pods:
        asked += ask.gpu
        used += ask.gpu if picker.put(ask) else 0
        while len(shares) < demand and 100 * asked >= (len(shares) + 1) * trace.gpus:
            shares.append(used / trace.gpus)
    return Filled(rule, seed, shares, (time.process_time() - began) * 1000 / len(pods))


def measure(folder: Path, seeds: int = SEEDS, demand: int = DEMAND) -> Iterator[Filled]:
    """Fill the cluster by each rule, with the same pods for all."""
    trace = read(folder)
    runs = [(seed, rule) for seed in range(seeds) for rule in RULES]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(partial(_fill, trace, demand), runs)


def _fill(trace: Trace, demand: int, run: tuple[int, str]) -> Filled:
    return fill(trace, *run, demand)


def table(found: Sequence[Filled]) -> str:
    """Return mean and range of all seeds, in percent of all GPUs, for each percent of demand that not all rules could place."""
    by_rule = {rule: np.array([one.shares for one in found if one.rule == rule]) * 100 for rule in RULES}
    lines = ["| demand | " + " | ".join(RULES) + " |", "| --: " * (len(RULES) + 1) + "|"]
    for at in range(len(found[0].shares)):
        if min(shares[:, at].mean() for shares in by_rule.values()) > at + 1 - SHORT:
            continue
        cells = [f"{s[:, at].mean():.2f} ({s[:, at].min():.2f}-{s[:, at].max():.2f})" for s in by_rule.values()]
        lines.append(f"| {at + 1} % | " + " | ".join(cells) + " |")
    spent = [np.mean([one.milliseconds for one in found if one.rule == rule]) for rule in RULES]
    lines.append("| ms a pod | " + " | ".join(f"{one:.1f}" for one in spent) + " |")
    return "\n".join(lines)
