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


@dataclass(frozen=True, slots=True)
class Preemption:
    """A queue's rules for taking from others."""

    within_queue: Within = Within.NEVER
    reclaim: Reclaim = Reclaim.NEVER
    borrow: bool = False  # take lower priorities in other queues although it will itself borrow
    borrow_max_priority: int | None = None  # and these only up to here


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
