"""The states of a workload and of its attempts, and the moves between them.

    workload   Queued ──admit──▶ Active ──▶ Queued (requeue) or Finished
    attempt    Claimed ─▶ Reserved ─▶ Created ─▶ Ungated ─▶ Running ─▶ Checkpointing ─▶ Ending ─▶ Ended
                  │          │          │          │          ▲ ▼                         ▲
                  │          │          │          │        Shrinking                     │
                  │          │          │          │        Repairing                     │
                  │          │          │          │        Growing                       │
                  └──────────┴──────────┴──────────┴────────────┴─────────────────────────┘

An attempt that preempts others begins Claimed and becomes Reserved when all of them are gone from its room; any other
begins Reserved. A Running one is Shrinking while it gives up its elastic part, and Growing while it gets pods back that
it lacks; those that do not start in time make it Shrinking. One that has lost pods is Repairing until what is left of
them is gone, and then Growing by those that replace them. One that has to go for somebody else is Checkpointing while
its pods are asked to save their work, if the job says how; one that is Shrinking asks all of its pods before the part
goes. Each arrow is one Move, written by the ledger in one
transaction together with the step that carries it out; only those from Running to Repairing and to Growing are a plan's,
as the first one is. A Move to where an attempt is already says that some of its pods are done while the others run on, or
what has come of asking them before a part goes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from queuectl.model.checkpoint import Ask, Checkpoint, Interruption
from queuectl.model.failures import NONE_IGNORED, Ignored
from queuectl.model.plan import Placement, PodKey, Portion, Repair
from queuectl.model.reasons import FOR_OTHERS, LEAVES_NODE, Reason, Why, why

AttemptKey = tuple[str, int]  # workload uid, number


class WorkloadState(StrEnum):
    """Where a workload is; it is in exactly one state."""

    QUEUED = "Queued"
    ACTIVE = "Active"
    FINISHED = "Finished"


class AttemptState(StrEnum):
    """How far an attempt has come."""

    CLAIMED = "Claimed"  # room is promised, its victims are still there
    RESERVED = "Reserved"  # room is reserved, pods are being created
    CREATED = "Created"  # every pod exists, gated
    UNGATED = "Ungated"  # every gate is gone
    RUNNING = "Running"  # every pod is ready
    SHRINKING = "Shrinking"  # the pods that it gives up are being removed, the others run on
    REPAIRING = "Repairing"  # room is reserved for pods in the stead of lost ones; what is left of these is removed
    GROWING = "Growing"  # room is reserved for further pods, they are being created and started, the others run on
    CHECKPOINTING = "Checkpointing"  # it has to go, and its pods are asked to save their work first
    ENDING = "Ending"  # pods are being removed; the room is still held
    ENDED = "Ended"  # the room is given back


class Step(StrEnum):
    """A row of the outbox: one step of one gang."""

    CREATE = "Create"
    UNGATE = "Ungate"
    SHRINK = "Shrink"
    GROW = "Grow"
    ASK = "Ask"
    REMOVE = "Remove"


STEP_OF = {
    AttemptState.RESERVED: Step.CREATE,
    AttemptState.CREATED: Step.UNGATE,
    AttemptState.SHRINKING: Step.SHRINK,
    AttemptState.REPAIRING: Step.SHRINK,
    AttemptState.GROWING: Step.GROW,
    AttemptState.CHECKPOINTING: Step.ASK,
    AttemptState.ENDING: Step.REMOVE,
}
# All pods have been ready, but those by which it grows.
UP = frozenset({AttemptState.RUNNING, AttemptState.SHRINKING, AttemptState.REPAIRING, AttemptState.GROWING})
# It has been told to go, and holds its room yet.
LEAVING = frozenset({AttemptState.CHECKPOINTING, AttemptState.ENDING})
# Some of its pods may have succeeded, and no other pod stands in for them.
UNDER_WAY = UP | {AttemptState.UNGATED}


class Outcome(StrEnum):
    """What becomes of the workload when an attempt has ended."""

    REQUEUE = "Requeue"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    DELETED = "Deleted"


_BY_OTHERS = {Reason.QUOTA_TAKEN_BACK, Reason.QUEUE_DRAINED, Reason.POD_DISRUPTED}


@dataclass(frozen=True, slots=True)
class End:
    """Why an attempt ends and what then."""

    why: Why
    outcome: Outcome
    not_before: float = 0.0  # Unix seconds; with REQUEUE: not admitted again earlier
    charged: bool = False  # counts against backoffLimit
    late: bool = False  # counts for the start back-off
    ignored: Ignored | None = None  # with a failure that is not charged: what is known of such by then
    exit_code: int | None = None  # of the pod that decided it
    barred: int | None = None  # the job's generation with which it is not tried again
    ask: Ask | None = None  # its pods are told to save their work before, or with SIGTERM

    @property
    def first(self) -> AttemptState:
        """The state that it begins with."""
        return AttemptState.CHECKPOINTING if self.ask and self.ask.pods else AttemptState.ENDING

    def told(self, before: "End | None") -> Why:
        """Return why, or what has come of the asking when that was told ``before`` already."""
        again = before is not None and before.why.reason is self.why.reason
        return self.ask.outcome if again and self.ask else self.why

    @property
    def disrupts(self) -> bool:
        """Tell whether it comes to the gang from outside, by decision, and not by anything that the gang did."""
        return self.why.reason in FOR_OTHERS | LEAVES_NODE | _BY_OTHERS


@dataclass(frozen=True, slots=True)
class Shrink:
    """Why an attempt gives up a part, and which; what remains runs on."""

    why: Why
    part: Portion
    ask: Ask | None = None  # all of its pods save their work before, or with SIGTERM those of the part


Leave = End | Shrink  # what becomes of a victim


@dataclass(frozen=True, slots=True)
class Done:
    """Pods that have succeeded while others run on, and what they held."""

    pods: frozenset[PodKey]
    part: Portion


@dataclass(frozen=True, slots=True)
class Move:
    """One arrow of an attempt's life.

    ``end`` is given with all moves to CHECKPOINTING and ENDING, and with one to ENDED whose cause turns out to be another;
    ``shrink`` with all to SHRINKING, ``done`` or ``asked`` with one to no other state, ``interruption`` with those to
    ENDED that cost work, ``left`` with those after which pods are there yet.
    """

    uid: str
    attempt: int
    to: AttemptState
    end: End | None = None
    shrink: Shrink | None = None
    done: Done | None = None
    asked: Ask | None = None  # and what came of it, before a part of it goes
    interruption: Interruption | None = None
    left: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()  # (node, requests) of each stuck pod


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at running a workload, as the ledger holds it."""

    uid: str
    number: int
    state: AttemptState
    generation: int  # metadata.generation that was planned for
    placements: tuple[Placement, ...]
    admitted_at: float  # Unix seconds; while Claimed, when it claimed its room
    running_at: float | None = None
    end: End | None = None
    quota: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (flavor, resource) → amount charged
    holds: bool = True  # False: its room is only promised to it, others are still there
    saved_at: float | None = None  # Unix seconds of its last checkpoint, when one is known
    victims: tuple[tuple[str, int], ...] = ()  # uid, attempt of those it still waits for
    claimed: bool = False  # its own room was promised to another
    leaving: Portion | None = None  # held beside what it has, until these pods are gone: promised to another, or lost
    shrunk: Why | None = None  # why it has fewer pods than it had
    ask: Ask | None = None  # while it shrinks: its pods are to save their work before the part goes, or with SIGTERM
    coming: frozenset[PodKey] = frozenset()  # which the gang runs without yet
    growing_at: float | None = None  # Unix seconds: since when it is repaired or grows, or last was or did
    done: frozenset[PodKey] = frozenset()  # pods that have succeeded, and hold nothing any more
    ending_at: float | None = None  # Unix seconds: when its pods were told to go

    @property
    def key(self) -> AttemptKey:
        """What tells it from all other attempts."""
        return self.uid, self.number

    @property
    def whole(self) -> Portion:
        """All that it has, what is leaving aside."""
        return Portion(self.placements, self.quota)

    @property
    def parts(self) -> tuple[Portion, ...]:
        """What it has, and what is leaving."""
        return (self.whole, self.leaving) if self.leaving else (self.whole,)

    @property
    def held(self) -> tuple[Placement, ...]:
        """Where its pods may still be."""
        return self.placements + (self.leaving.placements if self.leaving else ())

    @property
    def going(self) -> tuple[Placement, ...]:
        """Where pods are that have been told to go."""
        if self.state in LEAVING:
            return self.held
        return self.leaving.placements if self.leaving else ()

    @property
    def asking(self) -> Ask | None:
        """What its pods are asked and waited for, before it goes or a part of it."""
        if self.state is AttemptState.CHECKPOINTING:
            return self.end.ask if self.end else None
        return self.ask if self.ask and self.ask.pods else None

    @property
    def progress(self) -> Why:
        """How many of its pods run, and how many are done or have yet to start."""
        left, done = self.whole.pods, len(self.done)
        if self.coming:
            return self.shrunk or why(Reason.GROWING, there=left + done - len(self.coming), pods=left + done)
        if not done:
            return why(Reason.RUNNING, pods=left)
        return why(Reason.PARTLY_DONE, done=done, pods=left + done, left=left)

    @property
    def replaces(self) -> bool:
        """Tell whether the pods that come replace lost ones; else it grows by them."""
        return bool(self.coming) and self.shrunk is not None

    def moved(self, move: Move, now: float) -> "Attempt":
        """Return the attempt after a move to another state, at ``now`` (Unix seconds); one to Shrinking aside."""
        to = move.to
        return replace(
            self,
            state=to,
            end=move.end or self.end,
            running_at=now if to is AttemptState.RUNNING and self.running_at is None else self.running_at,
            admitted_at=now if to is AttemptState.RESERVED else self.admitted_at,
            holds=self.holds or to is AttemptState.RESERVED,
            leaving=None if to in {AttemptState.RUNNING, AttemptState.GROWING} else self.leaving,
            shrunk=None if self.replaces and to is AttemptState.RUNNING else self.shrunk,
            coming=self.coming if to is AttemptState.GROWING else frozenset(),
            growing_at=now if to is AttemptState.GROWING else self.growing_at,
            ask=None,
            ending_at=now if to is AttemptState.ENDING else self.ending_at,
        )

    def without(self, done: Done) -> "Attempt":
        """Return the attempt when further pods of it are done."""
        rest = self.whole.without(done.part)
        return replace(self, placements=rest.placements, quota=rest.quota, done=self.done | done.pods)

    def shrinking(self, shrink: Shrink) -> "Attempt":
        """Return the attempt while it gives up a part."""
        rest = self.whole.without(shrink.part)
        return replace(
            self,
            state=AttemptState.SHRINKING,
            placements=rest.placements,
            quota=rest.quota,
            leaving=shrink.part,
            shrunk=shrink.why,
            ask=shrink.ask,
            coming=frozenset(),
        )

    def repairing(self, repair: Repair, now: float) -> "Attempt":
        """Return the attempt while pods of it are replaced, from ``now`` (Unix seconds) on."""
        stay = self.whole.without(Portion(repair.left)).placements
        return replace(
            self,
            state=AttemptState.REPAIRING,
            placements=stay + repair.found,
            leaving=Portion(repair.left) if repair.left else None,
            shrunk=repair.why,
            coming=repair.pods,
            growing_at=now,
        )

    def growing(self, part: Portion, now: float) -> "Attempt":
        """Return the attempt while it gets a part in addition, from ``now`` (Unix seconds) on."""
        grown = self.whole.plus(part)
        return replace(
            self,
            state=AttemptState.GROWING,
            placements=grown.placements,
            quota=grown.quota,
            shrunk=None,
            coming=frozenset((p.role, p.first + i) for p in part.placements for i in range(p.pods)),
            growing_at=now,
        )


def active(attempts: Mapping[str, Attempt], key: AttemptKey) -> Attempt | None:
    """Return that attempt if it is among the active ones, which are given by workload uid."""
    attempt = attempts.get(key[0])
    return attempt if attempt is not None and attempt.number == key[1] else None


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload as the ledger holds it. ``attempt`` is the latest, 0 before the first."""

    uid: str
    namespace: str
    name: str
    queue: str
    priority: int
    submitted_at: float
    seq: int
    state: WorkloadState = WorkloadState.QUEUED
    attempt: int = 0
    failures: int = 0  # attempts that ended charged
    ignored: Ignored = NONE_IGNORED  # those that failed and were not charged
    late_starts: int = 0  # attempts that ended late, since the last that ran
    not_before: float = 0.0
    preemptions: int = 0  # attempts that ended for somebody else
    first_admitted_at: float | None = None  # Unix seconds; a requeue keeps it
    requeued_at: float | None = None  # Unix seconds
    last_end: End | None = None
    finished_at: float | None = None
    saved: Checkpoint | None = None  # the last that is known
    lost: int = 0  # GPU-seconds, over all interruptions

    def after(self, attempt: Attempt, end: End, now: float, lost: int) -> "Workload":
        """Return the workload when its attempt has ended, at ``now`` (Unix seconds), at the loss of so many GPU-seconds."""
        requeued = end.outcome is Outcome.REQUEUE
        return replace(
            self,
            state=WorkloadState.QUEUED if requeued else WorkloadState.FINISHED,
            failures=self.failures + end.charged,
            late_starts=self.late_starts + end.late,
            ignored=end.ignored or self.ignored,
            not_before=end.not_before,
            preemptions=self.preemptions + (attempt.holds and end.why.reason in FOR_OTHERS),
            requeued_at=now,
            last_end=end,
            finished_at=None if requeued else now,
            lost=self.lost + lost,
        )
