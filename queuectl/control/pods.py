"""Pods as they were read: those of each attempt, and what all the others take of nodes."""

from collections.abc import Iterable, Iterator, Mapping

from queuectl.core.fleet import Fleet
from queuectl.core.made import Made
from queuectl.model.lifecycle import Attempt, AttemptKey, AttemptState, active
from queuectl.model.objects import Pod
from queuectl.model.plan import PodKey


class Pods(Mapping[AttemptKey, Mapping[PodKey, Pod]]):
    """Our pods by attempt; others' are counted in a fleet, as is whatever of ours no reservation covers."""

    def __init__(self, fleet: Fleet, attempts: Mapping[str, Attempt], made: Made) -> None:
        """Start without any. ``attempts``: the active ones, by workload uid. ``made``: what is reserved for their pods."""
        self._fleet = fleet
        self._attempts = attempts
        self._made = made
        self._of: dict[AttemptKey, dict[PodKey, Pod]] = {}
        self._cleared: dict[AttemptKey, dict[PodKey, Pod]] = {}  # succeeded and removed before the ledger was told
        self._counted: dict[str, tuple[str, tuple[tuple[str, int], ...]]] = {}  # others' pod uid → node, requests

    def __getitem__(self, key: AttemptKey) -> Mapping[PodKey, Pod]:
        """Return the pods of an attempt that are there, by role and index."""
        return self._of[key]

    def __iter__(self) -> Iterator[AttemptKey]:
        """Yield the attempts that have pods, active or not."""
        return iter(self._of)

    def __len__(self) -> int:
        """Return how many attempts have pods."""
        return len(self._of)

    def on_pod(self, old: Pod | None, new: Pod | None) -> set[str]:
        """Take in a changed pod, ours or another's; return the nodes whose room changed with it."""
        if new is not None and new.workload:
            self._of.setdefault((new.workload, new.attempt), {})[new.role, new.index] = new
        if old is not None and old.workload and (new is None or _identity(new) != _identity(old)):
            key = (old.workload, old.attempt)
            peers = self._of.get(key, {})
            peers.pop((old.role, old.index), None)
            if not peers:
                self._of.pop(key, None)
            attempt = active(self._attempts, key)
            if old.phase == "Succeeded" and attempt is not None and not _replaced(old, attempt):
                self._cleared.setdefault(key, {})[old.role, old.index] = old
        changed = self._uncount(old) if old is not None and (new is None or new.uid != old.uid) else set()
        return changed | self._count(new) if new is not None else changed

    def seen(self, attempt: Attempt) -> Mapping[PodKey, Pod]:
        """Return an attempt's pods. One that was removed after it had succeeded is still done, not lost."""
        pods, cleared = self._of.get(attempt.key, {}), self._cleared.get(attempt.key)
        return {**cleared, **pods} if cleared and attempt.state is not AttemptState.ENDING else pods

    def forget_done(self, key: AttemptKey, pods: Iterable[PodKey] | None = None) -> None:
        """Take in that the ledger knows which of these pods of an attempt are done, or of all of them."""
        if pods is None:
            self._cleared.pop(key, None)
            return
        cleared = self._cleared.get(key, {})
        for pod in pods:
            cleared.pop(pod, None)

    def recount(self, attempt: Attempt) -> set[str]:
        """Take in that an attempt's pods are covered by its reservation, or not any longer; return nodes as above."""
        return {node for pod in self._of.get(attempt.key, {}).values() for node in self._count(pod)}

    def orphans(self) -> list[Pod]:
        """Return pods of ours that no active attempt owns and that nobody has told to stop."""
        return [pod for pod in self.left_behind() if not pod.deleting]

    def left_behind(self) -> Iterator[Pod]:
        """Yield pods of ours that no active attempt owns and that may still run."""
        for key, pods in self._of.items():
            if active(self._attempts, key) is None:
                yield from (pod for pod in pods.values() if not pod.ended)

    def _count(self, pod: Pod) -> set[str]:
        """Count a pod as another's, unless it has ended or is not bound; of ours what is not reserved for it."""
        reserved = bool(pod.workload) and active(self._attempts, (pod.workload, pod.attempt)) is not None
        asks = self._made.beyond(pod) if reserved else pod.requests  # it may have been resized in place
        now = (pod.node, asks) if pod.node and asks else None
        if now == self._counted.get(pod.uid):
            return set()
        changed = self._uncount(pod)
        if now is not None:
            self._counted[pod.uid] = now
            self._fleet.use(*now, +1)
            changed.add(pod.node)
        return changed

    def _uncount(self, pod: Pod) -> set[str]:
        before = self._counted.pop(pod.uid, None)
        if before is None:
            return set()
        self._fleet.use(*before, -1)
        return {before[0]}


def _identity(pod: Pod) -> tuple[str, int, str, int]:
    """Return what our labels say, which anybody may change."""
    return pod.workload, pod.attempt, pod.role, pod.index


def _replaced(pod: Pod, attempt: Attempt) -> bool:
    """Tell whether a pod of an active attempt is a lost one that has to go before another has its name."""
    return attempt.state is AttemptState.REPAIRING and (pod.role, pod.index) in attempt.coming
