"""What pods say that they have saved."""

from collections.abc import Mapping

from queuectl.core.checkpoint import Reports, by_exit, saved
from queuectl.model.checkpoint import Checkpoint, Report
from queuectl.model.lifecycle import Attempt, AttemptKey, Workload, active
from queuectl.model.objects import Job, Pod
from queuectl.model.plan import PodKey
from queuectl.model.reasons import Reason, Why, why

MAX_SAVES = 500  # that one round takes in; the rest is for the next


class Saves:
    """The reports of active attempts' pods, and what the ledger and people have yet to be told of them."""

    def __init__(
        self, attempts: Mapping[str, Attempt], jobs: Mapping[str, Job], workloads: Mapping[str, Workload]
    ) -> None:
        """Start with none. All by workload uid; ``attempts``: the active ones."""
        self._attempts = attempts
        self._jobs = jobs
        self._workloads = workloads
        self._of: dict[AttemptKey, dict[PodKey, Report]] = {}
        self._new: dict[str, None] = {}  # workloads whose pods have reported something new, the oldest first
        self._unreadable: dict[str, Why] = {}  # workloads whose reports can't be read, which nobody has told yet

    def hear(self, key: AttemptKey, pod: PodKey, report: Report) -> bool:
        """Take in what a pod of an active attempt says; tell whether that is new."""
        if active(self._attempts, key) is None:
            return False
        before = self._of.setdefault(key, {}).get(pod)
        known = self._of[key][pod] = report.after(before)
        if known == before:
            return False
        self._new.setdefault(key[0])
        return True

    def read(self, old: Pod | None, pod: Pod) -> bool:
        """Take in what a pod of ours reports, or its exit code; tell whether that is new."""
        key, index = (pod.workload, pod.attempt), (pod.role, pod.index)
        new = False
        if pod.report is not None and (old is None or old.report != pod.report):
            new = self.hear(key, index, pod.report)
        attempt = active(self._attempts, key)
        if attempt is None:
            return new
        if pod.ended and not (old and old.ended):
            said = by_exit(attempt, pod, self.of(key).get(index))
            new = (said is not None and self.hear(key, index, said)) or new
        if pod.report_problem and not (old and old.report_problem):
            cause = why(Reason.REPORT_UNREADABLE, pod=pod.name, problem=pod.report_problem)
            self._unreadable.setdefault(pod.workload, cause)
        return new

    def of(self, key: AttemptKey) -> Reports:
        """Return what the pods of an attempt say, by role and index."""
        return self._of.get(key, {})

    def take(self, now: float) -> dict[str, Checkpoint]:
        """Return the checkpoints that active attempts have made since the last time; of those that leave first."""
        found: dict[str, Checkpoint] = {}
        attempts = self._attempts
        for uid in sorted(self._new, key=lambda uid: uid not in attempts or not attempts[uid].going):
            if len(found) == MAX_SAVES:
                break
            del self._new[uid]
            attempt, job = attempts.get(uid), self._jobs.get(uid)
            checkpoint = saved(attempt, job, self.of(attempt.key), now) if attempt and job else None
            if checkpoint is not None and checkpoint.follows(self._workloads[uid].saved):
                found[uid] = checkpoint
        return found

    def take_unreadable(self) -> dict[str, Why]:
        """Return the workloads whose reports can't be read, with why, which people have not been told."""
        taken, self._unreadable = self._unreadable, {}
        return taken

    def drop(self, key: AttemptKey) -> None:
        """Forget an attempt that has ended."""
        self._of.pop(key, None)
