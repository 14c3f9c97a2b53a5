"""Which of the nodes that would do a gang goes to: the one where it takes the least room from the others.

The others are the pods that wait and run, for such will come. A node has so many places for each kind of them, in parts
too: 24 cpus are one and a half places for pods that ask for 16. A place is worth its part of all that the cluster has for
the kind, times the kind's part of all pods. So that is kept free which others would hardly find elsewhere, whatever makes
it rare: GPUs of a model that some insist on, GPUs with enough cpu beside them, whole nodes. To take the least is the
steepest ascent of the product of all kinds' places, each to the power of its part: proportional fairness among kinds.

After the fragmentation gradient of Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with
Fragmentation Gradient Descent" (USENIX ATC 2023), which counts GPUs of no use to typical pods instead of places.
"""

import heapq
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from queuectl.core.fleet import Base, Fleet, Mask, Matrix, Room
from queuectl.model.objects import Constraints, Flavor, Gang

KINDS = 128  # looked at, the most frequent ones
_UNIT = 2**40  # the whole of what can be lost: so finely losses are told apart
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, power, 2**64) for power in range(1, 257)], np.uint64).view(np.int64)

Places = npt.NDArray[np.float64]  # (nodes, kinds)


class Kind(NamedTuple):
    """What matters for where a pod may go."""

    models: frozenset[str]  # of GPUs, that its gang would take; empty: any
    constraints: Constraints
    requests: tuple[tuple[str, int], ...]


class Mix:
    """How many pods of each kind wait and run."""

    def __init__(self) -> None:
        """Start without any."""
        self._pods: Counter[Kind] = Counter()

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return bool(self._pods)

    def add(self, gang: Gang, gangs: int = 1) -> None:
        """Count so many gangs of the shape of one; negative: stop counting them."""
        models = frozenset(gang.gpu_models)
        if models:
            models = models.union(*(other.models for other in gang.alternatives))
        for role in gang.roles:
            kind = Kind(models, role.constraints, role.requests)
            self._pods[kind] += role.pods * gangs
            if not self._pods[kind]:
                del self._pods[kind]

    def of(self, flavor: Flavor) -> list[tuple[Kind, int]]:
        """Return the most frequent kinds of pods that may go to a flavor, with their numbers."""
        able = ((kind, n) for kind, n in self._pods.items() if not kind.models or flavor.gpu_model in kind.models)
        return heapq.nlargest(KINDS, able, key=lambda one: (one[1], one[0].requests))


def places(room: Matrix, asked: Matrix) -> Places:
    """Return how many places, parts counted, each row of room has for each row of requests, by the same columns."""
    found = np.full((len(room), len(asked)), np.inf)
    for column in np.flatnonzero(asked.any(axis=0)):
        amounts = asked[:, column]
        asking = np.flatnonzero(amounts)
        part = room[:, column, None] / amounts[asking]
        if len(asking) == len(amounts):
            np.minimum(found, part, out=found)
        else:
            found[:, asking] = np.minimum(found[:, asking], part)
    found[(found < 1) | np.isinf(found)] = 0
    return found


def weights(pods: Matrix, total: Places) -> Places:
    """Return what a place for each kind is worth. ``total``: places for them that there are in all."""
    worth: Places = np.divide(pods * _UNIT / pods.sum(), total, out=np.zeros(len(pods)), where=total > 0)
    return worth


def value(found: Places, worth: Places) -> Places:
    """Return what all places of each node are worth together, in parts of 2**40."""
    result: Places = (found * worth).sum(axis=1)
    return result


@dataclass(frozen=True, slots=True)
class _Kinds:
    """The kinds that may go to a flavor."""

    asked: Matrix  # (kinds, columns of the fleet)
    masks: list[Mask]  # by rows of the fleet, of each constraints
    which: Matrix  # (kinds,) whose mask is theirs
    worth: Places  # (kinds,)

    def places(self, room: Matrix, open_to: Mask) -> Places:
        """Return their places. ``open_to``: of the rows of room, for each of the masks."""
        return places(room[:, : self.asked.shape[1]], self.asked) * open_to[:, self.which]


class Others:
    """What pods that come later lose by one that is placed now. What places are worth is kept as it was when first asked."""

    def __init__(self, mix: Mix, fleet: Fleet) -> None:
        """Look at a mix and a fleet."""
        self._mix = mix
        self._fleet = fleet
        self._kinds: dict[Flavor, _Kinds | None] = {}

    def lose(
        self, room: Room, rows: Matrix, flavor: Flavor, requests: tuple[tuple[str, int], ...], pods: int
    ) -> Matrix:
        """Return what is lost, in parts of 2**40, if so many pods go to each of some rows, which have room for them."""
        kinds = self._of(flavor)
        if kinds is None:
            return np.zeros(len(rows), np.int64)
        free, open_to, _, which = _distinct(room.rows(rows), [mask[rows] for mask in kinds.masks])
        before = value(kinds.places(free, open_to), kinds.worth)
        columns, amounts = self._fleet.columns(requests) or ([], np.zeros(0, np.int64))
        free[:, columns] -= amounts * pods
        after = value(kinds.places(free, open_to), kinds.worth)
        return np.rint(before - after).astype(np.int64)[which]  # rounded, so that losses which are equal compare so

    def _of(self, flavor: Flavor) -> _Kinds | None:
        if flavor not in self._kinds:
            self._kinds[flavor] = self._count(flavor)
        return self._kinds[flavor]

    def _count(self, flavor: Flavor) -> _Kinds | None:
        fleet = self._fleet
        known = [
            (kind, pods, wanted) for kind, pods in self._mix.of(flavor) if (wanted := fleet.columns(kind.requests))
        ]
        if not known:
            return None
        room = fleet.matrix(Base.FREE)
        asked = np.zeros((len(known), room.shape[1]), np.int64)
        for row, (_, _, (columns, amounts)) in enumerate(known):
            asked[row, columns] = amounts
        constraints = list(dict.fromkeys(kind.constraints for kind, _, _ in known))
        masks = [fleet.mask(flavor, one) for one in constraints]
        which = np.array([constraints.index(kind.constraints) for kind, _, _ in known])
        kinds = _Kinds(asked, masks, which, np.zeros(len(known)))
        free, open_to, times, _ = _distinct(room, masks)
        total = (kinds.places(free, open_to) * times[:, None]).sum(axis=0)
        return replace(kinds, worth=weights(np.array([pods for _, pods, _ in known]), total))


def _distinct(room: Matrix, masks: list[Mask]) -> tuple[Matrix, Mask, Matrix, Matrix]:
    """Return rows of room, with what they are open to, that differ; how often each is there; which of them each row is."""
    open_to = np.stack(masks, axis=1)
    table = np.concatenate([room, open_to], axis=1)
    keys = (table * _FACTORS[: table.shape[1]]).sum(axis=1)  # wraps around: a hash
    _, first, which, times = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    if not np.array_equal(table[first][which], table):  # two differ with the same hash
        return room.copy(), open_to, np.ones(len(room), np.int64), np.arange(len(room))
    return room[first], open_to[first], times, which
