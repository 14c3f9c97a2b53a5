"""What a job says about failures of its pods, and those that were not charged to it."""

from dataclasses import dataclass
from enum import StrEnum

MAX_BLAMED = 4  # nodes that one job may blame at a time


class Action(StrEnum):
    """What follows from a failed pod that a rule matches; but for AvoidNode the words of batch/v1 Jobs."""

    FAIL_JOB = "FailJob"  # the job fails at once
    IGNORE = "Ignore"  # the gang starts again, and backoffLimit does not count it
    COUNT = "Count"  # the gang starts again, and backoffLimit counts it
    AVOID_NODE = "AvoidNode"  # as Ignore, and on other nodes than the pod's


@dataclass(frozen=True, slots=True)
class FailureRule:
    """One rule. It goes by exit codes or by conditions of the pod."""

    action: Action
    role: str = ""  # whose pods it is about; empty: those of all
    codes: frozenset[int] = frozenset()
    among: bool = True  # whether the exit code has to be among these, or to be none of them
    container: str = ""  # whose exit code; empty: that of any
    conditions: tuple[tuple[str, str], ...] = ()  # type and status, of which the pod has one


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Rules for failed pods, of which the first that matches counts."""

    rules: tuple[FailureRule, ...] = ()
    ignore_limit: int = 20  # failures in a row that are not charged


@dataclass(frozen=True, slots=True)
class Ignored:
    """Failures of a job that were not charged, in a row: one before which it got further than ever begins a new row."""

    times: int = 0
    step: int | None = None  # the furthest that it had saved by then
    nodes: tuple[tuple[str, float], ...] = ()  # that were blamed, and when (Unix seconds), the latest last

    def then(self, step: int | None, node: str, at: float) -> "Ignored":
        """Return what there is to know after another one.

        ``step``: that of the job's last checkpoint. Only a higher one than ever is progress: a time is not, for what
        runs long and saves nothing is lost, nor is any other checkpoint, for an attempt may begin where it began before.
        """
        further = step is not None and (self.step is None or step > self.step)
        nodes = tuple(one for one in self.nodes if one[0] != node)
        if node:
            nodes = (*nodes, (node, at))[-MAX_BLAMED:]
        return Ignored(1 if further else self.times + 1, step if further else self.step, nodes)


NONE_IGNORED = Ignored()
NO_RULES = FailurePolicy()
