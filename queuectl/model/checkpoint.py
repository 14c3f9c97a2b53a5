"""Checkpoints: how a job's pods are asked to save their work, what they report, and what an interruption costs."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from queuectl.model.reasons import Reason, Why, why
from queuectl.model.work import NO_WORK, Work


class Signal(StrEnum):
    """How a pod is asked to save its work."""

    SIG_TERM = "SigTerm"  # it is deleted, and has the grace to save and exit
    ANNOTATION = "Annotation"
    HTTP = "HTTP"
    EXEC = "Exec"


class Answer(StrEnum):
    """How a pod says that it has saved its work."""

    EXIT = "Exit"  # of the pod after SIGTERM, or of the command with exit code 0
    ANNOTATION = "Annotation"
    REPLY = "Reply"
    FILE = "File"


ANSWERS = {
    Signal.SIG_TERM: (Answer.EXIT,),
    Signal.ANNOTATION: (Answer.ANNOTATION, Answer.FILE),
    Signal.HTTP: (Answer.REPLY, Answer.ANNOTATION, Answer.FILE),
    Signal.EXEC: (Answer.EXIT, Answer.ANNOTATION, Answer.FILE),
}  # the first is the default


@dataclass(frozen=True, slots=True)
class Saving:
    """How a job saves its work when it is asked to."""

    signal: Signal = Signal.SIG_TERM
    answer: Answer = Answer.EXIT
    grace_seconds: int = 120
    interval_seconds: int | None = None  # between two asks while it runs
    role: str = ""  # whose pods are asked; empty: those that must succeed
    path: str = ""  # where its checkpoints are
    port: int = 0
    url_path: str = "/"
    container: str = ""  # in which commands run; empty: the first
    command: tuple[str, ...] = ()
    file: str = ""  # whose time of modification is the answer


@dataclass(frozen=True, slots=True)
class Ask:
    """That pods are to save their work."""

    at: float  # Unix seconds
    until: float  # the deadline, or when it was over
    pods: int = 0  # how many are waited for; none where deleting them is the asking
    answered: int = 0  # how many of them did

    def id(self, attempt: int) -> str:
        """Return the name of the ask, the same however often it is repeated."""
        return f"{attempt}-{self._ms}"

    def answered_by(self, name: str, attempt: int) -> bool:
        """Tell whether a report that answers the ask of that name answers this one of the attempt: it or a later one."""
        number, ms = _numbers(name)
        return number == attempt and ms >= self._ms

    @property
    def _ms(self) -> int:
        return round(self.at * 1000)

    @property
    def outcome(self) -> Why:
        """What has come of it, once it is over."""
        facts = {"pods": self.pods, "seconds": max(0, round(self.until - self.at))}
        if self.answered >= self.pods:
            return why(Reason.CHECKPOINTED, **facts)
        return why(Reason.CHECKPOINT_MISSED, answered=self.answered, **facts)


def _numbers(name: str) -> tuple[int, int]:
    """Return attempt and milliseconds of an ask's name; of what is none, as of asks by others than queuectl, less."""
    attempt, _, ms = name.partition("-")
    return (int(attempt), int(ms)) if attempt.isdecimal() and ms.isdecimal() else (-1, -1)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Work that is saved."""

    at: float  # Unix seconds
    step: int | None = None  # None: its writer doesn't say
    path: str = ""
    attempt: int = 0  # that has saved it

    def follows(self, other: "Checkpoint | None") -> bool:
        """Tell whether it takes the other's place: it is of a later attempt, or newer and no step back."""
        if other is None or self.attempt != other.attempt:
            return other is None or self.attempt > other.attempt
        back = self.step is not None and other.step is not None and self.step < other.step
        return self.at > other.at and not back


@dataclass(frozen=True, slots=True)
class Report:
    """What a pod says of its work: which ask it answers, if any, and what it has saved, if it says."""

    ask: str = ""
    saved: Checkpoint | None = None

    def after(self, earlier: "Report | None") -> Self:
        """Return what is known after this report. Of asks the latest counts."""
        if earlier is None:
            return self
        new = self.saved is not None and self.saved.follows(earlier.saved)
        return type(self)(max(self.ask, earlier.ask, key=_numbers), self.saved if new else earlier.saved)


@dataclass(frozen=True, slots=True)
class Interruption:
    """A running attempt that ended although the job goes on, and what that cost."""

    at: float  # Unix seconds: when it was told to go, after its pods had saved or had the time to
    cause: str  # the reason's code
    saved_at: float | None = None  # Unix seconds; None: no checkpoint of the attempt is known
    saved_step: int | None = None
    lost: Work = NO_WORK
    answered: bool | None = None  # whether all pods that were asked to save did; None: nobody was asked
