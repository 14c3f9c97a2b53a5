"""How an attempt goes on: from its state and its pods to the next move, if one is due. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from queuectl.core import failures
from queuectl.core.checkpoint import answered, asked, before_growth, interruption, leave
from queuectl.core.elastic import finished, keys, last, numbered, spare
from queuectl.model.checkpoint import Ask, Report
from queuectl.model.lifecycle import UNDER_WAY, UP, Attempt, AttemptState, End, Move, Outcome, Shrink, Workload
from queuectl.model.objects import Job, Place, Pod
from queuectl.model.plan import PodKey
from queuectl.model.reasons import Reason, Why, why

_LOST = {
    Place.CROWDED: "others' pods took its room",
    Place.CLOSED: "it takes no new pods",
    Place.TAKEN: "maintenance takes it before it would be over",
    Place.GONE: "it is gone",
    Place.OUTGROWN: "the API server made pods that request more than their template says, so more room is needed",
}
_STARTING = {AttemptState.RESERVED, AttemptState.CREATED, AttemptState.UNGATED}
_COMING = {AttemptState.REPAIRING, AttemptState.GROWING}
GIVING_BACK = {
    AttemptState.ENDING,
    AttemptState.SHRINKING,
    AttemptState.REPAIRING,
}  # pods have to stop before it goes on


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
    victims: Sequence[str] = ()  # workloads that are still in the room that it was promised
    kept: bool = True  # whether quotas still hold all that is promised to it and others
    back_off: BackOff = BackOff()
    allocated: bool = False  # whether claims of pods that it gives up still have devices
    irreparable: bool = False  # whether there is no place for the pods that it has lost
    reports: Mapping[PodKey, Report] = field(default_factory=dict)  # what its pods say that they have saved
    leave: Why | None = None  # why it has to leave a node of its own; None: it has not
    unready: Mapping[str, float] = field(default_factory=dict)  # its nodes not ready → Unix seconds since
    not_ready_seconds: float = 30.0  # after which nobody waits for such a node any longer
    stuck: frozenset[PodKey] = frozenset()  # pods that were told to go, and nobody waits for any longer
    struck: Why | None = None  # what nodes have done to pods of it, which may not show any more


@dataclass(frozen=True, slots=True)
class Loss:
    """Pods of a running gang that are to be replaced, and why."""

    pods: frozenset[PodKey]
    why: Why


def next_move(view: View) -> Move | None:
    """Return the move that is due, or None.

    RESERVED and CREATED are left forwards by the executor only, which has just written all pods; every other
    move follows from what is observed.
    """
    attempt, job = view.attempt, view.job
    end = None if attempt.state in {AttemptState.ENDING, AttemptState.ENDED} else _end(view, job)
    if end is None and job is not None and (move := _growth_failed(view, job)):
        return move
    if end is not None:
        to: AttemptState | None = end.first if attempt.state is AttemptState.RUNNING else AttemptState.ENDING
    elif attempt.state is AttemptState.SHRINKING and job is not None and attempt.asking:
        over = _asked_enough(view, job, attempt.asking)
        return Move(attempt.uid, attempt.number, attempt.state, asked=over) if over else _done(view)
    else:
        to = _onwards(view)
    if to is AttemptState.ENDED:
        end = _excuse(view)
        attempt = replace(attempt, end=end or attempt.end)
        lost = interruption(attempt, view.workload.saved.step if view.workload.saved else None)
        return Move(attempt.uid, attempt.number, to, end, interruption=lost, left=_left(view))
    return _done(view) if to is None else Move(attempt.uid, attempt.number, to, end)


def deadline(attempt: Attempt, job: Job) -> float | None:
    """Return the Unix seconds at which a move falls due by time alone; None for never."""
    if attempt.state in _STARTING:
        return attempt.admitted_at + job.start_deadline_seconds
    if attempt.state is AttemptState.CHECKPOINTING:
        return attempt.asking.until if attempt.asking else attempt.admitted_at
    times = [attempt.asking.until] if attempt.asking else []
    if attempt.state in UP and job.max_run_seconds and attempt.running_at is not None:
        times.append(attempt.running_at + job.max_run_seconds)
    if attempt.state in _COMING and attempt.growing_at is not None:
        times.append(_due(attempt, job))
    return min(times, default=None)


def _due(attempt: Attempt, job: Job) -> float:
    """Return the Unix seconds by which pods that come have to be ready, or lost ones gone."""
    ask = before_growth(attempt, job)
    return (ask.until if ask else attempt.growing_at or 0.0) + job.start_deadline_seconds


def ready(pods: Iterable[Pod]) -> int:
    """Count the pods that are ready or have already succeeded."""
    return sum(1 for pod in pods if pod.ready or pod.phase == "Succeeded")


def members(attempt: Attempt, pods: Mapping[PodKey, Pod]) -> list[Pod]:
    """Return those of the pods that the gang must have and that exist, in order.

    A pod that only bears its labels is none, nor is one that the gang gives up, or whose room it has given back.
    """
    return [pods[key] for key in _keys(attempt) if key in pods]


def all_ready(attempt: Attempt, pods: Mapping[PodKey, Pod]) -> bool:
    """Tell whether all pods that the gang has or is to have are ready, or have already succeeded."""
    there = keys(attempt.placements, attempt.done)
    return ready(pods[key] for key in there if key in pods) == len(there)


def waits(pods: Iterable[Pod]) -> str:
    """Return a sentence, with a blank before it, about the first pod that can't start; empty when there is none."""
    return next((f" Pod {pod.name} waits: {pod.waits}." for pod in pods if pod.waits and not pod.ready), "")


def unready(attempt: Attempt, pods: Mapping[PodKey, Pod]) -> int:
    """Count the pods that the gang must have and that are not ready, or not there."""
    return len(_keys(attempt)) - ready(members(attempt, pods))


def holding(view: View) -> list[Pod]:
    """Return the pods that must go before the attempt's room is free, or the part of it that it gives up or has lost.

    Pods that stopped by themselves stay for their logs, unless the whole job is deleted.
    """
    attempt, pods = view.attempt, view.pods
    if attempt.state is AttemptState.REPAIRING:  # those that replace them have their names
        return [pod for key, pod in pods.items() if key in attempt.coming]
    if attempt.state is AttemptState.SHRINKING:
        leaving = set(keys(attempt.held, attempt.done)).difference(_keys(attempt))
        pods = {key: pod for key, pod in pods.items() if key in leaving}
    everything = attempt.end is not None and attempt.end.outcome is Outcome.DELETED
    return [pod for pod in pods.values() if everything or not pod.ended]


def refused(view: View, pod: str, problem: str, *, permanent: bool) -> End:
    """Return the end of an attempt one of whose pods the API server refused.

    ``permanent`` refusals (an invalid template) bar the job until its spec changes; others (a ResourceQuota) are
    tried again.
    """
    if permanent:
        cause = why(Reason.MISCONFIGURED, field=f"pod {pod}", problem=problem)
        return End(cause, Outcome.REQUEUE, barred=view.attempt.generation)
    return _again_later(view, why(Reason.PODS_REFUSED, pod=pod, problem=problem))


def _end(view: View, job: Job | None) -> End | None:
    if job is None or job.deleting:
        return End(why(Reason.DELETED), Outcome.DELETED)
    if view.attempt.state is AttemptState.CHECKPOINTING:
        return _succeeded(view, job) or _has_saved(view, job)
    return (
        _changed(view, job)
        or _succeeded(view, job)
        or _overran(view, job)
        or _pod_fault(view, job)
        or _part_stuck(view)
        or _place_lost(view)
        or _told_to_leave(view, job)
        or _promise_lost(view)
        or _late(view, job)
    )


def _onwards(view: View) -> AttemptState | None:
    attempt = view.attempt
    match attempt.state:
        case AttemptState.CLAIMED if not view.victims:
            return AttemptState.RESERVED
        case AttemptState.UNGATED | AttemptState.GROWING if all_ready(attempt, view.pods):
            return AttemptState.RUNNING
        case AttemptState.SHRINKING if not holding(view) and not view.allocated:
            return AttemptState.RUNNING
        case AttemptState.REPAIRING if not holding(view) and not view.allocated:
            return AttemptState.GROWING
        case AttemptState.ENDING if not view.allocated and all(_key(pod) in view.stuck for pod in holding(view)):
            return AttemptState.ENDED
    return None


def _done(view: View) -> Move | None:
    """Give back what pods held that are done, all of them at once; but an attempt never holds nothing."""
    attempt = view.attempt
    if attempt.state not in UNDER_WAY or loss(view):  # that a lost one ended well is no matter
        return None
    gone = [key for key in _keys(attempt) if key in view.pods and view.pods[key].phase == "Succeeded"]
    if not gone or len(gone) == attempt.whole.pods:
        return None
    return Move(attempt.uid, attempt.number, attempt.state, done=finished(attempt, gone))


def _changed(view: View, job: Job) -> End | None:
    gated = view.attempt.state in {AttemptState.CLAIMED, AttemptState.RESERVED, AttemptState.CREATED}
    if gated and job.generation != view.attempt.generation:
        return End(why(Reason.SPEC_CHANGED), Outcome.REQUEUE)
    return None


def _has_saved(view: View, job: Job) -> End | None:
    """Return the end that a gang was told, once all have answered; or can't any more, or not in time."""
    end = view.attempt.end
    if end is None or end.ask is None:
        return end
    over = _asked_enough(view, job, end.ask)
    return replace(end, ask=over) if over else None


def _asked_enough(view: View, job: Job, ask: Ask) -> Ask | None:
    """Return what has come of asking once nobody waits for answers any longer."""
    done = answered(view.attempt, job, view.pods, view.reports, ask)
    missing = set(asked(view.attempt, job)).difference(done)
    if missing and view.now < ask.until and not _in_vain(view, {*_keys(view.attempt), *missing}.difference(done)):
        return None
    return replace(ask, until=min(view.now, ask.until), answered=max(0, ask.pods - len(missing)))


def _in_vain(view: View, unsaved: Collection[PodKey]) -> bool:
    """Tell whether any pod is gone or has failed before it had saved its work."""
    left = [view.pods.get(key) for key in unsaved]
    silent = {*_silent(view), *(node for node, place in view.places.items() if place is Place.GONE)}
    return any(pod is None or pod.phase == "Failed" or pod.node in silent for pod in left)


def _succeeded(view: View, job: Job) -> End | None:
    if view.attempt.state not in UNDER_WAY | {AttemptState.CHECKPOINTING}:
        return None
    roles = {role.name for role in job.gang.roles if role.must_succeed}
    needed = [view.pods.get(key) for key in _keys(view.attempt) if key[0] in roles]
    done = any(role in roles for role, _ in view.attempt.done)
    if not view.attempt.replaces and (needed or done) and all(pod and pod.phase == "Succeeded" for pod in needed):
        return End(why(Reason.SUCCEEDED), Outcome.SUCCEEDED, exit_code=0)
    return None


def _overran(view: View, job: Job) -> End | None:
    limit, since = job.max_run_seconds, view.attempt.running_at
    if limit and since is not None and view.now >= since + limit:
        return End(why(Reason.MAX_RUN_SECONDS_EXCEEDED, seconds=limit), Outcome.FAILED, exit_code=124)
    return None


def _pod_fault(view: View, job: Job) -> End | None:
    """Return the end that faulty pods cause. What was done to a pod goes before what it did: peers fail of it."""
    if view.attempt.state in {AttemptState.CLAIMED, AttemptState.RESERVED}:
        return None
    pods = [pod for pod in members(view.attempt, view.pods) if pod.phase == "Failed"]
    ruled = failures.disruption([pod for pod in pods if pod.disrupted], job)
    if ruled is not None:
        return _failed(view, job, ruled)
    lost = _lost(view)
    if lost is not None:
        return None if loss(view) else _saving_first(view, job, lost)
    return _failed(view, job, failures.decisive(pods, job)) if pods else None


def _lost(view: View) -> End | None:
    """Return the end of a gang that has lost pods."""
    pods, wanted = members(view.attempt, view.pods), _keys(view.attempt)
    for pod in pods:
        if _is_disrupted(pod):
            return _again_later(view, why(Reason.POD_DISRUPTED, pod=pod.name, problem=pod.disrupted))
    missing = len(pods) < len(wanted)
    for node in sorted({p.node for p in view.attempt.placements if view.places.get(p.node) is Place.GONE}):
        if missing or any(pod.node == node and not pod.ended for pod in pods):
            return End(why(Reason.NODE_LOST, node=node), Outcome.REQUEUE)
    for node in _silent(view):
        if any(pod.node == node and not pod.ended for pod in pods):
            return End(why(Reason.NODE_NOT_READY, node=node, seconds=_unready_for(view, node)), Outcome.REQUEUE)
    for role, index in wanted:
        one = view.pods.get((role, index))
        if _is_removed(one):
            return _again_later(view, why(Reason.POD_LOST, pod=one.name if one else f"{role}-{index}"))
    return None


def _saving_first(view: View, job: Job, lost: End) -> End:
    """Return the end of a gang that has lost pods: if all are there yet, as they have time to stop, they are to save first."""
    pods = members(view.attempt, view.pods)
    told = [pod for pod in pods if pod.deleting and not pod.ended and (pod.stops_by or 0.0) > view.now]
    of_pods = lost.why.reason in {Reason.POD_DISRUPTED, Reason.POD_LOST}
    if not told or not of_pods or len(pods) < len(_keys(view.attempt)):
        return lost
    since = max(min(pod.told_at for pod in told), view.attempt.saved_at or 0.0)  # asks are named in order of time
    by = min(pod.stops_by or 0.0 for pod in told)
    return replace(lost, ask=leave(view.attempt, job, lost.why, view.now, since=since, by=by).ask)


def _silent(view: View) -> list[str]:
    """Return the nodes that have not been ready for so long that nobody waits for them."""
    return sorted(node for node in view.unready if _unready_for(view, node) >= view.not_ready_seconds)


def _unready_for(view: View, node: str) -> int:
    return max(0, int(view.now - view.unready[node]))


def _left(view: View) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
    """Return what stuck pods hold on their nodes: (node, requests) of each that has not stopped."""
    at = numbered(view.attempt.placements, view.attempt.done)
    pods = [(key, view.pods[key]) for key in sorted(view.stuck)]
    return tuple(
        (pod.node, at[key].requests if key in at else pod.requests) for key, pod in pods if pod.node and not pod.ended
    )


def _key(pod: Pod) -> PodKey:
    return pod.role, pod.index


def _is_disrupted(pod: Pod) -> bool:
    return bool(pod.disrupted) and (pod.phase == "Failed" or pod.deleting)


def _is_removed(pod: Pod | None) -> bool:
    return pod is None or (pod.deleting and pod.phase != "Succeeded")  # that it failed may have come of that


def loss(view: View) -> Loss | None:
    """Return which pods a running gang has lost and waits to have replaced; None when it does not.

    A node of which one is lost and that takes no new pods is left by all of them.
    """
    attempt, job = view.attempt, view.job
    if job is None or not job.replaces_lost_pods or view.irreparable or job.generation != attempt.generation:
        return None
    end = _lost(view) if attempt.state is AttemptState.RUNNING and not attempt.done else None
    if end is None or failures.disruption([pod for pod in view.pods.values() if _is_disrupted(pod)], job):
        return None
    at = numbered(attempt.placements)

    def is_lost(pod: Pod | None, node: str) -> bool:
        gone = view.places.get(node) is Place.GONE or node in _silent(view)
        return pod is None or _is_disrupted(pod) or _is_removed(pod) or (gone and pod.phase != "Succeeded")

    pods = {key for key, p in at.items() if is_lost(view.pods.get(key), p.node)}
    left = {at[key].node for key in pods if view.places.get(at[key].node) is not Place.GOOD}
    pods |= {key for key, p in at.items() if p.node in left}
    stay = at.keys() - pods
    if not stay or any(view.pods[key].ended for key in stay):
        return None
    return Loss(frozenset(pods), end.why)


def _part_stuck(view: View) -> End | None:
    """Return the end of a gang that can't give up a part, for which somebody waits; on silent nodes nobody does."""
    if view.attempt.state is not AttemptState.SHRINKING:
        return None
    left = [pod for pod in holding(view) if _key(pod) in view.stuck and pod.node not in view.unready]
    return End(still_there(view, left[0]), Outcome.REQUEUE) if left else None


def still_there(view: View, pod: Pod) -> Why:
    """Say for how long a pod should have stopped."""
    return why(Reason.POD_STUCK, pod=pod.name, seconds=round(view.now - (pod.stops_by or view.now)))


def _place_lost(view: View) -> End | None:
    if view.attempt.state not in _STARTING | {AttemptState.CLAIMED}:
        return None
    waiting: Counter[str] = Counter()  # pods that have yet to be bound, by node
    for placement in view.attempt.placements:
        waiting[placement.node] += placement.pods
    if view.attempt.state is AttemptState.UNGATED:
        waiting.subtract(pod.node for pod in members(view.attempt, view.pods))
    for node, place in sorted(view.places.items()):
        if waiting[node] > 0 and place is not Place.GOOD:
            # Planned anew at once; only a gang that loses one place after the other waits, ever longer.
            losses = view.workload.late_starts
            not_before = view.back_off.until(view.now, losses) if losses else 0.0
            lost = why(Reason.PLACE_LOST, node=node, problem=_LOST[place])
            return End(lost, Outcome.REQUEUE, not_before, late=True)
    return None


def not_grown(view: View, problem: str) -> Move:
    """Return the move by which a gang gives back what does not come after all, for a reason that follows a colon.

    One that can't run on without goes back whole.
    """
    attempt = view.attempt
    if not _can_spare(view):
        end = _again_later(view, why(Reason.REPAIR_FAILED, problem=problem))
        return Move(attempt.uid, attempt.number, AttemptState.ENDING, end)
    part = last(attempt.whole, _coming(attempt))
    facts = {"gone": part.pods, "after": attempt.whole.pods - part.pods, "problem": problem}
    shrink = Shrink(why(Reason.GROWTH_FAILED, **facts), part)
    return Move(attempt.uid, attempt.number, AttemptState.SHRINKING, shrink=shrink)


def _can_spare(view: View) -> bool:
    """Tell whether a gang may run on without the pods that come: it grows, or they are its last and more than it needs."""
    attempt, job = view.attempt, view.job
    if not attempt.replaces:
        return True
    rest = keys(attempt.whole.without(last(attempt.whole, _coming(attempt))).placements, attempt.done)
    known = job is not None and job.generation == attempt.generation and attempt.state is AttemptState.GROWING
    most = spare(job.gang.roles, attempt) if job and known else {}
    return attempt.coming.isdisjoint(rest) and all(n <= most.get(role, 0) for role, n in _coming(attempt).items())


def _coming(attempt: Attempt) -> Counter[str]:
    return Counter(role for role, _ in attempt.coming)


def can_go(view: View, nodes: Mapping[PodKey, str]) -> bool:
    """Tell whether all of these pods are there, and their places as good as when they were reserved."""
    return all(key in view.pods and view.places.get(node) is Place.GOOD for key, node in nodes.items())


def still_asked(view: View) -> Ask | None:
    """Return what the pods of a gang that grows are asked, and waited for, before others join them; None: nothing more."""
    ask = before_growth(view.attempt, view.job) if view.job else None
    return ask if view.job and ask and _asked_enough(view, view.job, ask) is None else None


def coming(attempt: Attempt) -> dict[PodKey, str]:
    """Return the pods that come, by role and index, and their nodes."""
    return {key: p.node for key, p in numbered(attempt.placements, attempt.done).items() if key in attempt.coming}


def _growth_failed(view: View, job: Job) -> Move | None:
    """Return the move that is due when pods do not come after all; one that fails by itself is a failure of the gang."""
    attempt = view.attempt
    problem = _growth_problem(view, job) if attempt.state in _COMING else None
    if problem is None:
        return None
    pods = [view.pods[key] for key in sorted(attempt.coming) if key in view.pods]
    failed = [pod for pod in pods if pod.phase == "Failed" and not pod.disrupted]
    if failed and attempt.state is AttemptState.GROWING and not _can_spare(view):
        end = _failed(view, job, failures.decisive(failed, job))
        return Move(attempt.uid, attempt.number, AttemptState.ENDING, end)
    return not_grown(view, problem)


def _growth_problem(view: View, job: Job) -> str | None:
    """Say why pods do not come after all: one fails, a place is lost, the spec is another, or it takes too long."""
    attempt = view.attempt
    if job.generation != attempt.generation:
        return "the spec was changed"
    repairing = attempt.state is AttemptState.REPAIRING  # what is there yet are the lost ones
    for left in holding(view) if repairing else ():
        if _key(left) in view.stuck:
            return f"pod {left.name} does not stop on node {left.node}"
    for key, node in coming(attempt).items():
        pod, place = None if repairing else view.pods.get(key), view.places.get(node, Place.GOOD)
        if pod is not None and (pod.phase == "Failed" or pod.disrupted):
            return f"pod {pod.name} {'was disrupted' if pod.disrupted else 'failed'}"
        if place is Place.GONE or (place is not Place.GOOD and (pod is None or not pod.node)):
            return f"node {node} was lost, {_LOST[place]}"
    if attempt.growing_at is not None and view.now >= _due(attempt, job):
        return f"they were not {'gone' if repairing else 'ready'} within {job.start_deadline_seconds} s"
    return None


def _told_to_leave(view: View, job: Job) -> End | None:
    if view.leave is None or view.attempt.asking:  # what is being saved is saved first
        return None
    return leave(view.attempt, job, view.leave, view.now)


def _promise_lost(view: View) -> End | None:
    if view.attempt.state is AttemptState.CLAIMED and not view.kept:
        return End(why(Reason.PROMISE_LOST), Outcome.REQUEUE)
    return None


def _late(view: View, job: Job) -> End | None:
    due = deadline(view.attempt, job)
    if view.attempt.state not in _STARTING or due is None or view.now < due:
        return None
    done = len(view.attempt.done)
    facts = {
        "ready": ready(members(view.attempt, view.pods)) + done, "pods": view.attempt.whole.pods + done,
        "seconds": job.start_deadline_seconds, "waits": waits(members(view.attempt, view.pods)),
    }  # fmt: skip
    return _again_later(view, why(Reason.PODS_READY_TIMEOUT, **facts))


def _failed(view: View, job: Job, failure: failures.Failure) -> End:
    return failures.end(failure, view.workload, job, view.now, lambda times: view.back_off.until(view.now, times))


def _excuse(view: View) -> End | None:
    """Return the end of a gang of which a pod failed, and a node turns out to be at fault; None when it stays as it is.

    Peers of a pod often fail before anybody can know that its node is lost. No pod there goes before that is known.
    """
    if view.attempt.end is None or not (view.attempt.end.charged or view.attempt.end.ignored):
        return None
    gone = sorted(node for node, place in view.places.items() if place is Place.GONE)
    silent = [why(Reason.NODE_NOT_READY, node=node, seconds=_unready_for(view, node)) for node in _silent(view)]
    lost = [*(why(Reason.NODE_LOST, node=node) for node in gone), *silent]
    if lost:
        return End(lost[0], Outcome.REQUEUE)
    struck = view.struck
    if struck is not None and struck.reason is Reason.POD_DISRUPTED:
        return _again_later(view, struck)
    return End(struck, Outcome.REQUEUE) if struck is not None else None


def _again_later(view: View, cause: Why) -> End:
    not_before = view.back_off.until(view.now, view.workload.late_starts + 1)
    return End(cause, Outcome.REQUEUE, not_before, late=True)


def _keys(attempt: Attempt) -> list[PodKey]:
    """Return the keys of the pods that the gang must have, in order."""
    return [key for key in keys(attempt.placements, attempt.done) if key not in attempt.coming]
