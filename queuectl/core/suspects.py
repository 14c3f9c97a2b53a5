"""Nodes on which something bad happened to gangs, and for how long nobody new goes there. Pure.

Suspicion follows from the offences alone, so whoever knows these comes to the same:

1. What only a pod shows (it failed, was evicted, did not start, does not stop) may be its job's fault. If one job shows
   such on several nodes within a day, it is: none of it counts.
2. A pod that failed counts only where another did within an hour, of this job or another.
3. A node is avoided for ``Healing.first``, doubled for each time in a row, at most a day. What happens while it is avoided
   anyway is no further time, and prolongs it from then on. After a day without suspicion it begins anew.
4. Of a flavor at most a tenth of the nodes is avoided, but one may be if there are others: those that have been suspect
   most often first. Nodes that only pods speak against are all trusted if they would be more: then it is not the nodes.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from queuectl.core.lifecycle import View, members, still_there
from queuectl.model.lifecycle import Attempt, AttemptState, Move
from queuectl.model.objects import Pod
from queuectl.model.reasons import Reason, Why, why
from queuectl.model.suspects import Offence, Suspicion

DAY = 86_400.0  # seconds: the longest suspicion, and how long offences are compared
TOGETHER = 3600.0  # seconds within which failures on a node speak against it
REMEMBERED = 30 * DAY  # longer than it takes to come to the longest suspicion, so older offences change nothing
SHARE = 10  # one node of so many is avoided at most

# What a pod shows, and its job may have caused.
_OF_PODS = frozenset(
    {Reason.POD_FAILED, Reason.POD_DISRUPTED, Reason.POD_STUCK, Reason.PODS_READY_TIMEOUT}
)  # fmt: skip
_FAILURES = frozenset(
    {Reason.POD_FAILED, Reason.BACKOFF_LIMIT_EXCEEDED, Reason.NODE_BLAMED, Reason.FAILURE_IGNORED}
)  # fmt: skip
_OF_NODES = frozenset({Reason.NODE_LOST, Reason.NODE_REPLACED, Reason.NODE_NOT_READY})
# Why kubelets end, refuse or miss pods by themselves; all else is somebody's decision.
BY_KUBELET = frozenset({"TerminationByKubelet", "UnexpectedAdmissionError", "ContainerStatusUnknown", "Unknown"})


def offences(view: View, move: Move | None, cause: Why | None) -> list[Offence]:
    """Return what nodes have done to a gang that ends or loses pods by ``cause``; ``move``: the one that is due, if any.

    That pods failed counts only in the end: until then it may turn out that a node was lost, of which its peers fail.
    """
    if move is not None and move.to is AttemptState.ENDED:
        stuck = [view.pods[key] for key in sorted(view.stuck)]
        end = move.end or view.attempt.end
        found = _by(view, end.why) if end is not None and (move.end or end.why.reason in _FAILURES) else []
        return found + [
            _offence(view, pod.node, still_there(view, pod)) for pod in stuck if pod.node not in view.unready
        ]
    return [] if cause is None or cause.reason in _FAILURES else _by(view, cause)


def _by(view: View, cause: Why) -> list[Offence]:
    pods = members(view.attempt, view.pods)
    found: dict[str, Why] = {}
    if "node" in cause.facts and cause.reason in _OF_NODES | {Reason.POD_DISRUPTED}:  # of a pod that is gone
        found = {str(cause.facts["node"]): cause}
    elif cause.reason is Reason.POD_DISRUPTED:
        found = {pod.node: cause for pod in pods if pod.node and pod.disrupted_by in BY_KUBELET}
    elif cause.reason is Reason.PODS_READY_TIMEOUT:
        found = dict.fromkeys(_only_node_not_ready(view.attempt, pods), cause)
    elif cause.reason in _FAILURES:
        failed = (pod for pod in pods if pod.node and pod.phase == "Failed" and not pod.disrupted)
        found = {pod.node: why(Reason.POD_FAILED, pod=pod.name, code=pod.exit_code) for pod in failed}
        found = dict(sorted(found.items())[:2])  # two tell as well as all that it is the job's own doing
    return [_offence(view, node, because) for node, because in sorted(found.items())]


def repeats(offence: Offence, before: Offence | None) -> bool:
    """Tell whether an offence is the one before it, of the same key, seen again."""
    return before is not None and abs(offence.at - before.at) < TOGETHER


def key(offence: Offence) -> tuple[object, ...]:
    """Return what tells offences apart, but for their time."""
    return offence.node, offence.uid, offence.attempt, offence.why.reason


def suspicions(known: Iterable[Offence], first: float) -> dict[str, Suspicion]:
    """Return the last suspicion of each node, in force or over. ``first``: seconds of the first one in a row."""
    found: dict[str, Suspicion] = {}
    for one in _counted(sorted(known, key=lambda one: (one.at, one.node, one.uid, one.attempt))):
        last = found.get(one.node)
        again = last is not None and one.at < last.until
        in_a_row = last is not None and one.at < last.until + DAY
        times = (last.times + (not again)) if last is not None and in_a_row else 1
        until = one.at + min(DAY, first * 2.0 ** min(times - 1, 30))
        since = last.since if last is not None and again else one.at
        found[one.node] = Suspicion(one.node, since, max(until, last.until if last else 0.0), one.why, times)
    return found


def avoided(
    suspects: Mapping[str, Suspicion], known: Iterable[Offence], flavors: Sequence[Collection[str]]
) -> dict[str, Suspicion]:
    """Return those of the suspect nodes that are avoided. ``flavors``: the nodes of each flavor."""
    last = ((one, suspects.get(one.node)) for one in known if one.why.reason not in _OF_PODS)
    hard = {one.node for one, suspicion in last if suspicion is not None and one.at >= suspicion.since}
    order = sorted(suspects.values(), key=lambda one: (one.node not in hard, -one.times, one.since, one.node))
    room = [most(len(nodes)) for nodes in flavors]
    soft = [one for one in order if one.node not in hard]
    for limit, nodes in zip(room, flavors, strict=True):
        of_it = {one.node for one in soft if one.node in nodes}
        if len(of_it) > limit:
            order = [one for one in order if one.node not in of_it]
    chosen = {}
    for one in order:
        mine = [i for i, nodes in enumerate(flavors) if one.node in nodes]
        if all(room[i] > 0 for i in mine):
            chosen[one.node] = one
            for i in mine:
                room[i] -= 1
    return chosen


def most(nodes: int) -> int:
    """Return how many of so many nodes of a flavor are avoided at most."""
    return min(max(1, nodes // SHARE), max(0, nodes - 1))


def _counted(known: Sequence[Offence]) -> Iterable[Offence]:
    """Yield those that speak against their node, in order."""
    by_job: defaultdict[str, list[Offence]] = defaultdict(list)
    for one in known:
        if one.uid and one.why.reason in _OF_PODS:
            by_job[one.uid].append(one)
    last_failure: dict[str, float] = {}
    for one in known:
        if one.why.reason in _OF_PODS and any(
            other.node != one.node and abs(other.at - one.at) < DAY for other in by_job[one.uid]
        ):
            continue
        if one.why.reason is Reason.POD_FAILED:
            before, last_failure[one.node] = last_failure.get(one.node), one.at
            if before is None or one.at - before >= TOGETHER:
                continue
        yield one


def _only_node_not_ready(attempt: Attempt, pods: Sequence[Pod]) -> list[str]:
    """Return the node whose pods alone did not get ready, if there is one, and others whose pods did."""
    late = {pod.node for pod in pods if not (pod.ready or pod.phase == "Succeeded")}
    others = {placement.node for placement in attempt.placements} - late
    return [] if len(late) != 1 or "" in late or not others else sorted(late)


def _offence(view: View, node: str, because: Why) -> Offence:
    return Offence(node, view.now, because, view.attempt.uid, view.attempt.number)
