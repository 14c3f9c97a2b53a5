"""How an attempt goes on: from its state and its pods to the next move, if one is due. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from queuectl.model.lifecycle import Attempt, AttemptState, End, Move, Outcome, Workload
from queuectl.model.objects import Job, Place, Pod
from queuectl.model.reasons import Reason, Why, why
from queuectl.model.resources import total

PodKey = tuple[str, int]  # role, index

_LOST = {
    Place.CROWDED: "others' pods took its room",
    Place.CLOSED: "it takes no new pods",
    Place.GONE: "it is gone",
}
_STARTING = {AttemptState.RESERVED, AttemptState.CREATED, AttemptState.UNGATED}


@dataclass(frozen=True, slots=True)
class BackOff:
    """Seconds before a workload is tried again: ``first``, doubled each time, at most ``longest``."""

    first: float = 10.0
    longest: float = 360.0

    def until(self, now: float, times: int) -> float:
        """Return the Unix seconds until which to wait after the ``times``-th time in a row, from 1."""
        return now + min(self.longest, self.first * 2.0 ** min(times - 1, 30))


@dataclass(frozen=True, slots=True)
class View:
    """All that the next move depends on. ``job`` is None once the object is gone from the API server."""

    workload: Workload
    attempt: Attempt
    job: Job | None
    pods: Mapping[PodKey, Pod]  # of this attempt
    places: Mapping[str, Place]  # by node of the attempt
    now: float  # Unix seconds
    back_off: BackOff = BackOff()


def next_move(view: View) -> Move | None:
    """Return the move that is due, or None.

    RESERVED and CREATED are left forwards by the executor only, which has just written all pods; every other
    move follows from what is observed.
    """
    attempt = view.attempt
    if attempt.state is AttemptState.ENDING:
        return Move(attempt.uid, attempt.number, AttemptState.ENDED) if not holding(view) else None
    end = _deleted(view) or _changed(view) or _finished(view) or _pod_fault(view) or _place_lost(view) or _late(view)
    if end is not None:
        return Move(attempt.uid, attempt.number, AttemptState.ENDING, end)
    if attempt.state is AttemptState.UNGATED and len(view.pods) == _wanted(attempt) == ready(view.pods.values()):
        return Move(attempt.uid, attempt.number, AttemptState.RUNNING)
    return None


def deadline(attempt: Attempt, job: Job) -> float | None:
    """Return the Unix seconds at which a move falls due by time alone; None for never."""
    if attempt.state in _STARTING:
        return attempt.admitted_at + job.start_deadline_seconds
    if attempt.state is AttemptState.RUNNING and job.max_run_seconds and attempt.running_at is not None:
        return attempt.running_at + job.max_run_seconds
    return None


def ready(pods: Iterable[Pod]) -> int:
    """Count the pods that are ready or have already succeeded."""
    return sum(1 for pod in pods if pod.ready or pod.phase == "Succeeded")


def holding(view: View) -> list[Pod]:
    """Return the pods that must go before the attempt's room is free.

    Pods that stopped by themselves stay for their logs, unless the whole job is deleted.
    """
    everything = view.attempt.end is not None and view.attempt.end.outcome is Outcome.DELETED
    return [pod for pod in view.pods.values() if everything or not pod.ended]


def refused(view: View, pod: str, problem: str, *, permanent: bool) -> End:
    """Return the end of an attempt one of whose pods the API server refused.

    ``permanent`` refusals (an invalid template) bar the job until its spec changes; others (a ResourceQuota) are
    tried again.
    """
    if permanent:
        return End(why(Reason.MISCONFIGURED, field=f"pod {pod}", problem=problem), Outcome.REQUEUE)
    return _again_later(view, why(Reason.PODS_REFUSED, pod=pod, problem=problem))


def _deleted(view: View) -> End | None:
    if view.job is None or view.job.deleting:
        return End(why(Reason.DELETED), Outcome.DELETED)
    return None


def _changed(view: View) -> End | None:
    gated = view.attempt.state in {AttemptState.RESERVED, AttemptState.CREATED}
    if gated and view.job is not None and view.job.generation != view.attempt.generation:
        return End(why(Reason.SPEC_CHANGED), Outcome.REQUEUE)
    return None


def _finished(view: View) -> End | None:
    if view.job is None or view.attempt.state not in {AttemptState.UNGATED, AttemptState.RUNNING}:
        return None
    needed = {role.name: role.pods for role in view.job.gang.roles if role.must_succeed}
    done = sum(1 for (role, _), pod in view.pods.items() if role in needed and pod.phase == "Succeeded")
    if needed and done == sum(needed.values()):
        return End(why(Reason.SUCCEEDED), Outcome.SUCCEEDED, exit_code=0)
    limit = view.job.max_run_seconds
    if limit and view.attempt.running_at is not None and view.now >= view.attempt.running_at + limit:
        return End(why(Reason.MAX_RUN_SECONDS_EXCEEDED, seconds=limit), Outcome.FAILED, exit_code=124)
    return None


def _pod_fault(view: View) -> End | None:
    if view.attempt.state is AttemptState.RESERVED:
        return None
    gone = {node for node, place in view.places.items() if place is Place.GONE}
    for pod in sorted(view.pods.values(), key=lambda pod: (pod.role, pod.index)):
        if pod.disrupted and (pod.phase == "Failed" or pod.deleting):
            return _again_later(view, why(Reason.POD_DISRUPTED, pod=pod.name, problem=pod.disrupted))
        if pod.phase == "Failed":
            return _failed(view, why(Reason.POD_FAILED, pod=pod.name, code=pod.exit_code), pod.exit_code)
        if pod.node in gone and not pod.ended:
            return End(why(Reason.NODE_LOST, node=pod.node), Outcome.REQUEUE)
        if pod.deleting and not pod.ended:
            return _again_later(view, why(Reason.POD_LOST, pod=pod.name))
    missing = _missing(view)
    return _again_later(view, why(Reason.POD_LOST, pod=missing)) if missing else None


def _place_lost(view: View) -> End | None:
    if view.attempt.state not in _STARTING:
        return None
    unbound = {placement.node for placement in view.attempt.placements}
    if view.attempt.state is AttemptState.UNGATED:
        unbound -= {node for node in unbound if _bound(view, node)}
    for node in sorted(unbound):
        if (place := view.places[node]) is not Place.GOOD:
            return End(why(Reason.PLACE_LOST, node=node, problem=_LOST[place]), Outcome.REQUEUE)
    return None


def _late(view: View) -> End | None:
    if view.job is None or view.attempt.state not in _STARTING:
        return None
    seconds = view.job.start_deadline_seconds
    if view.now < view.attempt.admitted_at + seconds:
        return None
    facts = {"ready": ready(view.pods.values()), "pods": _wanted(view.attempt), "seconds": seconds}
    return _again_later(view, why(Reason.PODS_READY_TIMEOUT, **facts))


def _failed(view: View, cause: Why, exit_code: int | None) -> End:
    failures, limit = view.workload.failures + 1, view.job.backoff_limit if view.job else 0
    if failures > limit:
        facts = {"failures": failures, "limit": limit, "cause": str(cause)}
        return End(why(Reason.BACKOFF_LIMIT_EXCEEDED, **facts), Outcome.FAILED, charged=True, exit_code=exit_code)
    not_before = view.back_off.until(view.now, failures)
    return End(cause, Outcome.REQUEUE, not_before, charged=True, exit_code=exit_code)


def _again_later(view: View, cause: Why) -> End:
    not_before = view.back_off.until(view.now, view.workload.late_starts + 1)
    return End(cause, Outcome.REQUEUE, not_before, late=True)


def _wanted(attempt: Attempt) -> int:
    return sum(placement.pods for placement in attempt.placements)


def _bound(view: View, node: str) -> bool:
    wanted = sum(p.pods for p in view.attempt.placements if p.node == node)
    return sum(1 for pod in view.pods.values() if pod.node == node) >= wanted


def _missing(view: View) -> str | None:
    if len(view.pods) == _wanted(view.attempt):
        return None
    roles = total({placement.role: placement.pods} for placement in view.attempt.placements)
    lost = ((role, index) for role, pods in roles.items() for index in range(pods) if (role, index) not in view.pods)
    return "-".join(map(str, next(lost, ("unknown",))))
