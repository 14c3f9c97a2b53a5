"""What the core decides. Nothing else leaves it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from queuectl.model.objects import MoveRequest
from queuectl.model.policy import Cause, Cell
from queuectl.model.reasons import Reason, Why, counted, why
from queuectl.model.resources import CARD, CARDS, times, total
from queuectl.model.work import NO_WORK, Work

NAMED = 10  # victims that are named
PodKey = tuple[str, int]  # role, index


@dataclass(frozen=True, slots=True)
class Placement:
    """``pods`` pods of one role on one node, with what each of them requests."""

    role: str
    flavor: str
    node: str
    pods: int
    requests: tuple[tuple[str, int], ...]  # per pod, sorted by resource
    cards: int = 0  # what a pod's GPUs count as in the flavor, in amounts of cards
    first: int = 0  # index of the role with which its pods began: neighbours get neighbouring ones


@dataclass(frozen=True, slots=True)
class Portion:
    """Some of an attempt's pods: where they are, and what they are charged."""

    placements: tuple[Placement, ...]
    quota: Mapping[Cell, int] = field(default_factory=dict)

    @property
    def pods(self) -> int:
        """How many pods these are."""
        return sum(placement.pods for placement in self.placements)

    def plus(self, other: "Portion") -> "Portion":
        """Return both parts as one; they have no place in common."""
        return Portion(self.placements + other.placements, total((self.quota, other.quota)))

    def has(self, other: "Portion") -> bool:
        """Tell whether all of another part is in this one."""
        here = {place(p): p.pods for p in self.placements}
        return all(p.pods <= here.get(place(p), 0) for p in other.placements) and all(
            amount <= self.quota.get(cell, 0) for cell, amount in other.quota.items()
        )

    def without(self, other: "Portion") -> "Portion":
        """Return what is left when some of it, or all, is gone."""
        gone = {place(p): p.pods for p in other.placements}
        left = [replace(p, pods=p.pods - gone.get(place(p), 0)) for p in self.placements]
        quota = {cell: amount - other.quota.get(cell, 0) for cell, amount in self.quota.items()}
        return Portion(tuple(p for p in left if p.pods), {cell: amount for cell, amount in quota.items() if amount})


def held(placements: Iterable[Placement]) -> dict[str, int]:
    """Return what all pods of placements hold, and of cards what their GPUs count as."""
    return total(times({**dict(p.requests), CARDS: p.cards}, p.pods) for p in placements)


def gpus_of(placements: Iterable[Placement]) -> int:
    """Return how many GPUs placements have, parts of cards rounded up together."""
    return -(-held(placements).get(CARDS, 0) // CARD)


def place(placement: Placement) -> tuple[str, str, str, int]:
    """Return what a placement is known by among those of an attempt: role, node, flavor, index of its first pod."""
    return (placement.role, placement.node, placement.flavor, placement.first)


def by_index(placements: Iterable[Placement]) -> list[Placement]:
    """Return placements in the order in which the pods of a role are numbered, from index 0."""
    return sorted(placements, key=lambda p: (p.role, p.first, p.node, p.flavor))


@dataclass(frozen=True, slots=True)
class Admission:
    """Reserve this place for the whole gang."""

    uid: str
    placements: tuple[Placement, ...]
    quota: Mapping[Cell, int] = field(default_factory=dict)  # amounts charged to the queue
    flavors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # role → resource → flavor
    pods: Mapping[str, int] = field(default_factory=dict)  # role → pods that it starts with

    def per_node(self) -> dict[tuple[str, str], int]:
        """Return (node, resource) → amount."""
        return total({(p.node, resource): amount * p.pods for resource, amount in p.requests} for p in self.placements)


@dataclass(frozen=True, slots=True)
class Eviction:
    """Who gives way, why it may be taken, and what it loses."""

    uid: str
    cause: Cause
    name: str = ""  # namespace/name
    queue: str = ""
    priority: int = 0
    lost: Work = NO_WORK
    since: float | None = None  # Unix seconds of its last checkpoint or start; None: it had not started
    part: Portion | None = None  # only this, and the rest runs on
    overtaken: bool = False  # its claim is taken over; it has no room yet, so there is nothing to wait for
    to: tuple[Placement, ...] = ()  # where room is kept for it, if it moves
    asked_by: str = ""  # who asked for that

    def __str__(self) -> str:
        """Return who it is and what it loses, or gives up."""
        costs = f"gives up {counted(self.part.pods, 'pod')}" if self.part else f"loses {self.lost}"
        return f"{self.name} (queue {self.queue}, priority {self.priority}, {costs})"


@dataclass(frozen=True, slots=True)
class Preempt:
    """Evict the victims, and hold this place, theirs included, for the gang until they are gone."""

    admission: Admission
    victims: tuple[Eviction, ...]

    @property
    def why(self) -> Why:
        """Why the gang waits then."""
        return waiting_for([victim for victim in self.victims if not victim.overtaken])


def waiting_for(victims: Sequence[Eviction]) -> Why:
    """Say whom a gang waits for; the first ``NAMED`` by name."""
    told = [str(victim) for victim in victims[:NAMED]]
    if len(victims) > NAMED:
        told.append(f"and {len(victims) - NAMED} more")
    names = f": {'; '.join(told)}" if told else ""
    return why(Reason.WAITING_FOR_VICTIMS, count=len(victims), victims=names)


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Why a gang goes back to its queue for nobody's sake; or only gives up a part, and the rest runs on."""

    why: Why
    part: Portion | None = None


@dataclass(frozen=True, slots=True)
class Repair:
    """Pods of a running gang that are replaced, each under its name; the gang is charged what it was.

    Of those that are in no place of ``left`` the place is good still, and stays theirs.
    """

    pods: frozenset[PodKey]
    left: tuple[Placement, ...]  # places that are lost
    found: tuple[Placement, ...]  # those instead
    why: Why


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions of one admission cycle."""

    admissions: tuple[Admission, ...] = ()
    preemptions: tuple[Preempt, ...] = ()
    waits: Mapping[str, Why] = field(default_factory=dict)  # uid → why it waits
    positions: Mapping[str, int] = field(default_factory=dict)  # uid → place in its queue, from 1
    wake_at: float | None = None  # Unix seconds at which planning is due again, for a time limit ends
    evictions: tuple[tuple[str, TakeBack], ...] = ()  # uid → what it gives back, for nobody's sake
    blocked: Mapping[str, Why] = field(default_factory=dict)  # queue → why not all of it goes back that should
    growths: Mapping[str, Portion] = field(default_factory=dict)  # uid → what a running gang gets beside what it has
    refusals: Mapping[MoveRequest, Why] = field(default_factory=dict)  # why moves are not made that were asked for
    repairs: Mapping[str, Repair] = field(default_factory=dict)  # uid → which of its pods are replaced, and where
    irreparable: frozenset[str] = frozenset()  # uids of gangs for whose lost pods there is no place
