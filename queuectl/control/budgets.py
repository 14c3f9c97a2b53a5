"""PodDisruptionBudgets: how many pods of whom may be evicted now."""

from collections.abc import Iterable, Mapping

from queuectl.control.pods import Pods
from queuectl.core.elastic import pods_of
from queuectl.core.nodes import selects
from queuectl.kube.pods import labels
from queuectl.model.lifecycle import Attempt
from queuectl.model.objects import Budget, Job
from queuectl.model.plan import Placement


class Budgets:
    """All budgets, by namespace."""

    def __init__(self, jobs: Mapping[str, Job], attempts: Mapping[str, Attempt], pods: Pods) -> None:
        """Start without any. By workload uid; ``attempts``: the active ones."""
        self._jobs = jobs
        self._attempts = attempts
        self._pods = pods
        self._of: dict[str, dict[str, Budget]] = {}

    def change(self, old: Budget | None, new: Budget | None) -> bool:
        """Take in a changed budget; tell whether more may be evicted now, or others."""
        if new is not None:
            self._of.setdefault(new.namespace, {})[new.key] = new
        elif old is not None:
            self._of.get(old.namespace, {}).pop(old.key, None)
        less = old is None or (new is not None and new.selector == old.selector and new.allowed <= old.allowed)
        return not less

    def covering(self, attempt: Attempt, placements: Iterable[Placement]) -> tuple[tuple[str, int], ...]:
        """Return the budgets that cover these pods of an attempt, and how many."""
        job = self._jobs.get(attempt.uid)
        budgets = self._of.get(job.gang.namespace) if job else None
        if job is None or not budgets:
            return ()
        pods = pods_of(placements)
        counts = {}
        for key, budget in sorted(budgets.items()):
            if budget.selector is not None:
                covered = (n for role, n in pods.items() if selects(budget.selector, labels(job, attempt, role)))
                counts[key] = sum(covered)
        return tuple((key, count) for key, count in counts.items() if count)

    def allowed(self) -> dict[str, int]:
        """Return how many pods each lets go; those that were told to go and are still there count as well.

        The API server counts them too, soon; until then it is safer to count some twice than none.
        """
        left = {key: budget.allowed for budgets in self._of.values() for key, budget in budgets.items()}
        for attempt in self._attempts.values() if left else ():
            if attempt.going and self._pods.get(attempt.key):
                for key, count in self.covering(attempt, attempt.going):
                    left[key] -= count
        return left
