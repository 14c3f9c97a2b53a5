"""What a queue owns and whom it may take from: quotas and rules as frozen values."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

Cell = tuple[str, str]  # flavor, resource
Amounts = Mapping[Cell, int]


@dataclass(frozen=True, slots=True)
class Quota:
    """A queue's own amount of a flavor's resource; limits of None do not limit."""

    nominal: int = 0
    borrowing_limit: int | None = None  # how much more than its subtree's the queue may use
    lending_limit: int | None = None  # how much of its subtree's others may use


class Within(StrEnum):
    """Whom of its own queue a gang may take."""

    NEVER = "Never"
    LOWER_PRIORITY = "LowerPriority"
    LOWER_OR_NEWER_EQUAL_PRIORITY = "LowerOrNewerEqualPriority"


class Reclaim(StrEnum):
    """Whom of other queues, that use more than their own, a gang may take."""

    NEVER = "Never"
    LOWER_PRIORITY = "LowerPriority"
    ANY = "Any"


class FairRule(StrEnum):
    """When fair sharing lets a queue take from another, by their shares."""

    FINAL = "LessThanOrEqualToFinalShare"  # the newcomer's share <= the victim's without the victim
    INITIAL = "LessThanInitialShare"  # the newcomer's share < the victim's before


class Cause(StrEnum):
    """Why a victim was taken."""

    QUEUE = "InQueue"
    RECLAIM = "InCohortReclamation"
    RECLAIM_WHILE_BORROWING = "InCohortReclaimWhileBorrowing"
    FAIR_SHARE = "InCohortFairSharing"
    DEFRAGMENTATION = "Defragmentation"  # by no rule: somebody asked for it


class VictimChoice(StrEnum):
    """Which of the victim sets that the rules allow is taken."""

    LEAST_WORK_LOST = "LeastWorkLost"  # since their last checkpoints, in GPU-seconds
    LOWEST_PRIORITY = "LowestPriority"  # then the latest admitted: the order of Kueue


@dataclass(frozen=True, slots=True)
class Preemption:
    """A queue's rules for taking from others, and for being taken from."""

    within_queue: Within = Within.NEVER
    reclaim: Reclaim = Reclaim.NEVER
    borrow: bool = False  # take lower priorities in other queues although it will itself borrow
    borrow_max_priority: int | None = None  # and these only up to here
    victims: VictimChoice = VictimChoice.LEAST_WORK_LOST
    wait_seconds: int = 0  # since its submission or requeue, before a gang of the queue takes from anybody
    min_run_seconds: int = 0  # that a gang of the queue has run before anybody takes from it


class Stop(StrEnum):
    """What to do with a flavor that fits in a less than perfect way."""

    STOP = "Stop"  # use it
    NEXT = "TryNext"  # look whether a later one is better


class Prefer(StrEnum):
    """Which imperfection is the lesser one."""

    BORROWING = "BorrowingOverPreemption"
    PREEMPTION = "PreemptionOverBorrowing"


@dataclass(frozen=True, slots=True)
class FlavorChoice:
    """A queue's rules for choosing among its flavors."""

    when_can_borrow: Stop = Stop.STOP
    when_can_preempt: Stop = Stop.NEXT
    prefer: Prefer = Prefer.BORROWING


class StopPolicy(StrEnum):
    """Whether a queue admits."""

    NONE = "None"
    HOLD = "Hold"  # nothing new
    HOLD_AND_DRAIN = "HoldAndDrain"  # and what runs goes back to the queue


class OverQuota(StrEnum):
    """What becomes of running gangs that a lowered quota no longer covers."""

    KEEP = "Keep"  # they run on; the queue starts nothing new until it fits
    TAKE_BACK = "TakeBack"  # they go back to the queue, as few and as little work lost as can be


@dataclass(frozen=True, slots=True)
class Cap:
    """What one user, or one namespace, may hold of a queue at a time; None does not limit."""

    max_running: int | None = None  # gangs
    max_resources: tuple[tuple[str, int], ...] = ()  # resource, amount over all flavors

    def __bool__(self) -> bool:
        """Tell whether it limits anything."""
        return self.max_running is not None or bool(self.max_resources)
