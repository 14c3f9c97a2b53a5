"""What there is to say of a gang that runs, and of which not all pods are ready."""

from collections.abc import Mapping
from dataclasses import replace

from queuectl.core.lifecycle import members, ready, unready, waits
from queuectl.core.nominate import clock
from queuectl.model.lifecycle import Attempt
from queuectl.model.objects import Pod
from queuectl.model.plan import PodKey
from queuectl.model.reasons import NAMED, Reason, Why, listed, why


def as_nodes_are(pods: Mapping[PodKey, Pod], silent: Mapping[str, float]) -> Mapping[PodKey, Pod]:
    """Return the pods, those on nodes that are not Ready as not ready: it takes a while until they say so themselves."""
    return {key: replace(pod, ready=False) if pod.node in silent else pod for key, pod in pods.items()}


def starting(attempt: Attempt, pods: Mapping[PodKey, Pod]) -> Why:
    """Say how far the pods are that were told to start."""
    there, done = members(attempt, pods), len(attempt.done)
    facts = {"bound": sum(1 for pod in there if pod.node) + done, "ready": ready(there) + done, "waits": waits(there)}
    return why(Reason.STARTING, pods=attempt.whole.pods + done, **facts)


def lacking(attempt: Attempt, pods: Mapping[PodKey, Pod], silent: Mapping[str, float]) -> Why | None:
    """Say how many pods are ready, and what the matter is; None if all are that the gang must have.

    ``silent``: its nodes that are not Ready, and since when, in Unix seconds.
    """
    missing = unready(attempt, pods)
    if not missing:
        return None
    late = [pod for pod in members(attempt, pods) if not pod.ready and pod.phase != "Succeeded"]
    nodes = sorted({pod.node for pod in late}.intersection(silent))
    told = [f"node {node} has not been Ready since {clock(silent[node])}" for node in nodes]
    told = told or [f"pod {pod.name} is not{pod.waits and ': '}{pod.waits}" for pod in late]
    wanted = attempt.whole.pods - len(attempt.coming) + len(attempt.done)
    problem = listed(told, most=1 if any(pod.waits for pod in late) else NAMED) or "the others are gone"
    return why(Reason.PODS_NOT_READY, ready=wanted - missing, pods=wanted, problem=problem)
