"""What the statuses of jobs and queues should say. Pure; ``control.report`` writes it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from queuectl.control.readiness import as_nodes_are, lacking, starting
from queuectl.core.grace import cut
from queuectl.core.lifecycle import members, ready
from queuectl.core.nominate import clock
from queuectl.core.tree import Node
from queuectl.model.checkpoint import Ask, Checkpoint
from queuectl.model.lifecycle import UP, Attempt, AttemptState, Outcome, Workload, WorkloadState
from queuectl.model.objects import Job, Pod, Queue
from queuectl.model.plan import Eviction, Placement, PodKey, by_index, waiting_for
from queuectl.model.reasons import FOR_OTHERS, Reason, Why, listed, why
from queuectl.model.resources import format_quantity, is_device

Status = dict[str, Any]
_HAS_RUN = UP | {AttemptState.CHECKPOINTING}
FIRST = 10  # places in a line that are told which jobs are in the way: these change with every job that comes or goes
MAX_QUOTAS = 128  # that the API takes in a queue's status
# Of conditions with one cause (the same object), one says it and the others refer to that: the first of these that
# holds, else the first that does not.
_TELLS = (
    "Finished", "Checkpointing", "Shrunk", "QuotaReserved", "PodsReady", "Preempted", "Evicted", "Requeued", "Admitted",
    "PlaceUncertain", "GraceCut",
)  # fmt: skip


def phase(workload: Workload, attempt: Attempt | None) -> str:
    """Return where the workload is, in one word."""
    if workload.state is WorkloadState.FINISHED:
        outcome = workload.last_end.outcome if workload.last_end else Outcome.FAILED
        return {Outcome.SUCCEEDED: "Succeeded", Outcome.DELETED: "Stopping"}.get(outcome, "Failed")
    if attempt is None:
        return "Pending"
    words = {AttemptState.CLAIMED: "Pending", AttemptState.ENDING: "Stopping"} | dict.fromkeys(UP, "Running")
    words[AttemptState.CHECKPOINTING] = "Checkpointing"
    return words.get(attempt.state, "Starting")


def reason(
    workload: Workload,
    attempt: Attempt | None,
    wait: Why | None,
    leaving: Sequence[Eviction],
    answers: int = 0,
    *,
    pods: Mapping[PodKey, Pod] = MappingProxyType({}),
) -> Why:
    """Return why the workload is in its phase.

    ``leaving``: those whom its claim still waits for. ``answers``: how many of its pods have saved, of those asked. ``pods``: its own.
    """
    if attempt is None:
        end = workload.last_end
        finished = workload.state is WorkloadState.FINISHED and end is not None
        return end.why if finished and end is not None else wait or why(Reason.PENDING)
    leaves = attempt.end.why if attempt.end else attempt.shrunk if attempt.leaving else None
    if leaves is not None:
        return _asked(attempt.asking, answers, leaves) if attempt.asking else leaves
    match attempt.state:
        case AttemptState.CLAIMED:
            return waiting_for(leaving)
        case AttemptState.RUNNING | AttemptState.REPAIRING | AttemptState.GROWING:
            return attempt.progress
        case AttemptState.UNGATED:
            return starting(attempt, pods)
        case _:
            return _reserved(Reason.ADMITTED, attempt)


def _reserved(reason: Reason, attempt: Attempt) -> Why:
    pods = attempt.whole.pods + len(attempt.done)
    return why(reason, pods=pods, nodes=len({placement.node for placement in attempt.placements}))


def _asked(ask: Ask, answers: int, cause: Why) -> Why:
    return why(Reason.CHECKPOINTING, answered=answers, pods=ask.pods, until=clock(ask.until), cause=str(cause))


def desired(
    job: Job,
    workload: Workload,
    attempt: Attempt | None,
    *,
    pods: Mapping[PodKey, Pod],
    wait: Why | None,
    leaving: Sequence[Eviction],
    answers: int = 0,
    position: int | None,
    now: float,
    silent: Mapping[str, float] = MappingProxyType({}),
) -> Status:
    """Return the whole status; fields without a value are left out.

    ``silent``: its nodes that are not Ready, and since when, in Unix seconds.
    """
    pods = as_nodes_are(pods, silent) if silent else pods
    if wait is not None and wait.facts.get("jobs") and position is not None and position > FIRST:
        wait = replace(wait, facts={**wait.facts, "jobs": ""})
    cause = reason(workload, attempt, wait, leaving, answers, pods=pods)
    lacks = lacking(attempt, pods, silent) if attempt and attempt.state in _HAS_RUN else None
    if attempt and attempt.state is AttemptState.RUNNING:
        cause = lacks or cause
    end = attempt.end if attempt and attempt.end else workload.last_end
    running_at = attempt.running_at if attempt else None
    before = job.status
    status: dict[str, Any] = {
        "phase": phase(workload, attempt),
        "reason": cause.code,
        "message": str(cause),
        "observedGeneration": job.generation,
        "attempt": workload.attempt,
        "failures": workload.failures,
        "pods": _pods(job, workload, attempt, pods),
        "queuePosition": position if attempt is None and workload.state is WorkloadState.QUEUED else None,
        # Who is only promised its room has nothing there yet.
        "assignments": _assignments(attempt.placements) if attempt and attempt.holds else None,
        "admittedAt": _admitted_at(attempt) if attempt else before.get("admittedAt"),
        "startedAt": timestamp(running_at) if running_at else before.get("startedAt") if not attempt else None,
        "finishedAt": timestamp(workload.finished_at) if workload.finished_at else None,
        "exitCode": end.exit_code if workload.state is WorkloadState.FINISHED and end else None,
        "lastCheckpoint": _checkpoint(workload.saved) if workload.saved else None,
        "lostSeconds": workload.lost or None,
        "conditions": conditions(job, workload, attempt, cause, now, lacks=lacks),
    }
    return {key: value for key, value in status.items() if value is not None}


def _checkpoint(saved: Checkpoint) -> Status:
    told = {"time": timestamp(saved.at), "attempt": saved.attempt, "step": saved.step, "path": saved.path or None}
    return {key: value for key, value in told.items() if value is not None}


def _assignments(placements: Iterable[Placement]) -> list[dict[str, Any]]:
    """Return who is where: an entry for each role, flavor and node."""
    result: dict[tuple[str, ...], dict[str, Any]] = {}
    for p in by_index(placements):
        entry = result.setdefault(
            (p.role, p.flavor, p.node), {"role": p.role, "flavor": p.flavor, "node": p.node, "pods": 0}
        )
        entry["pods"] += p.pods
        devices = [name.rpartition(":")[2] for name, _ in p.requests if is_device(name)]
        if devices:
            entry.setdefault("devices", []).extend(devices)
    return list(result.values())


def _admitted_at(attempt: Attempt) -> str | None:
    return timestamp(attempt.admitted_at) if attempt.holds else None


def says(written: Mapping[str, Any], wanted: Status) -> bool:
    """Tell whether a written status says what is wanted, a position to within a tenth: the first ten are exact."""
    before, now = written.get("queuePosition"), wanted.get("queuePosition")
    if before and now and abs(now - before) <= now // 10:
        return {**written, "queuePosition": now} == wanted
    return written == wanted


def _pods(job: Job, workload: Workload, attempt: Attempt | None, pods: Mapping[PodKey, Pod]) -> str:
    """Return pods ready or done of pods wanted; of a finished job as they were at its end, whoever cleans up later."""
    finished = workload.state is WorkloadState.FINISHED
    if finished and job.status.get("phase") in {"Succeeded", "Failed"} and "pods" in job.status:
        return str(job.status["pods"])
    count = ready(pods.values()) if finished else 0
    if attempt is not None:
        count = ready(members(attempt, pods)) + len(attempt.done)
    return f"{count}/{sum(role.pods for role in job.gang.roles)}"


def uncertain(job: Job) -> Why:
    """Say which fields of its pods may keep kube-scheduler from the nodes that are reserved."""
    return why(Reason.NOT_PROMISED, fields=listed(job.unpromised))


def conditions(
    job: Job, workload: Workload, attempt: Attempt | None, cause: Why, now: float, *, lacks: Why | None = None
) -> list[dict[str, Any]]:
    """Return the conditions of a job. ``lacks``: why not all pods of a gang that runs are ready."""
    told = list(_told(job, workload, attempt, cause, lacks))
    texts = {key: str(each) for key, each in {id(each): each for _, _, each in told}.items()}
    tells = {id(each): kind for kind, _, each in sorted(told, key=lambda one: (one[1], -_TELLS.index(one[0])))}

    def message(kind: str, each: Why) -> str:
        return texts[id(each)] if tells[id(each)] == kind else f"See condition {tells[id(each)]}."

    return [
        _condition(job.status, job.generation, kind, each.code, message(kind, each), holds=holds, now=now)
        for kind, holds, each in told
    ]


def _told(
    job: Job, workload: Workload, attempt: Attempt | None, cause: Why, lacks: Why | None
) -> Iterator[tuple[str, bool, Why]]:
    """Yield each condition: its type, whether it holds, and why."""
    finished = workload.state is WorkloadState.FINISHED and phase(workload, attempt) != "Stopping"
    up = attempt is not None and attempt.state in _HAS_RUN
    running = attempt is not None and up and not attempt.replaces
    reserved = _reserved(Reason.RESERVED, attempt) if attempt is not None and attempt.holds else None
    yield "QuotaReserved", reserved is not None, reserved or cause
    yield "Admitted", reserved is not None, reserved or cause
    yield "PodsReady", running and lacks is None, lacks or cause
    if job.unpromised:
        yield "PlaceUncertain", True, uncertain(job)
    if (shorter := cut(job)) is not None:
        yield "GraceCut", True, shorter
    if attempt is not None and attempt.shrunk is not None and not attempt.replaces:
        yield "Shrunk", True, attempt.shrunk
    end = attempt.end if attempt else workload.last_end
    if attempt is not None and attempt.asking:
        yield "Checkpointing", True, cause
    elif end is not None and end.ask is not None and end.ask.pods:
        yield "Checkpointing", False, end.ask.outcome
    if end is not None and end.outcome is Outcome.REQUEUE:
        yield "Evicted", True, end.why
        yield "Requeued", attempt is None, end.why
    elif workload.attempt > 1:
        yield "Evicted", False, cause
        yield "Requeued", False, cause
    preempted = end is not None and end.why.reason in FOR_OTHERS and not finished
    if preempted or workload.preemptions:
        yield "Preempted", preempted, end.why if preempted and end is not None else cause
    if finished:
        yield "Finished", True, cause


def of_queue(
    queue: Queue,
    *,
    pending: int,
    running: int,
    node: Node | None,
    problem: Why | None,
    blocked: Why | None,
    now: float,
) -> Status:
    """Return the whole status of a queue.

    ``node``: the queue in the tree. ``problem``: why none of its jobs is admitted. ``blocked``: why some stay that should go back to it.
    """
    told = [("Ready", problem is None, problem or why(Reason.QUEUE_READY))]
    if blocked is not None:
        told.append(("EvictionBlocked", True, blocked))
    return {
        "observedGeneration": queue.generation,
        "pending": pending,
        "running": running,
        "reserved": [
            {
                "flavor": flavor,
                "resource": resource,
                "amount": format_quantity(resource, node.usage.get((flavor, resource), 0) if node else 0),
                "total": format_quantity(resource, amount),
                "nominal": format_quantity(resource, queue.nominal.get((flavor, resource), 0)),
            }
            for (flavor, resource), amount in ({**queue.nominal, **(node.subtree if node else {})}).items()
        ][:MAX_QUOTAS],
        "conditions": [
            _condition(queue.status, queue.generation, kind, cause.code, str(cause), holds=holds, now=now)
            for kind, holds, cause in told
        ],
    }


def _condition(
    before: Mapping[str, Any], generation: int, kind: str, code: str, message: str, *, holds: bool, now: float
) -> dict[str, Any]:
    """Return a condition; it keeps its transition time as long as its status stays the same."""
    old: Mapping[str, Any] = next((c for c in before.get("conditions") or () if c.get("type") == kind), {})
    value = "True" if holds else "False"
    return {
        "type": kind,
        "status": value,
        "reason": code,
        "message": message,
        "observedGeneration": generation,
        "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == value else timestamp(now),
    }


def timestamp(unix: float) -> str:
    """Return Unix seconds as Kubernetes writes them."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
