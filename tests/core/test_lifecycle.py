"""From what is observed to the next move: every state, every observation."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from queuectl.core.elastic import finished, last, pods_of
from queuectl.core.lifecycle import BackOff, Loss, View, deadline, holding, loss, next_move, not_grown, ready, refused
from queuectl.model.checkpoint import Answer, Ask, Saving, Signal
from queuectl.model.lifecycle import Attempt, AttemptState, End, Move, Outcome, Shrink, Workload
from queuectl.model.objects import Job, Place, Pod
from queuectl.model.plan import Placement, PodKey, Repair
from queuectl.model.reasons import Reason, why
from tests.support.builders import gang, requests, role

CLAIMED, RESERVED, CREATED, UNGATED, RUNNING, SHRINKING, REPAIRING, GROWING, CHECKPOINTING, ENDING, ENDED = AttemptState
ADMITTED_AT, RUNNING_AT, GROWING_AT, NOW = 1000.0, 1010.0, 1015.0, 1020.0
EIGHT = requests(gpu=8)
PLACEMENTS = (
    Placement("worker", "any", "n1", 1, EIGHT), Placement("worker", "any", "n2", 1, EIGHT, first=1), Placement("ps", "any", "n2", 1, EIGHT),
)  # fmt: skip
JOB = Job(
    gang("g", role("worker", 2, gpu=8), role("ps", 1, gpu=8, must_succeed=False)), generation=1, resource_version="7",
    start_deadline_seconds=300, backoff_limit=1, max_run_seconds=600,
)  # fmt: skip
WORKLOAD = Workload("g", "team", "g", "q", 0, 0.0, 1, attempt=3)
KEYS: list[PodKey] = [("ps", 0), ("worker", 0), ("worker", 1)]
NODES = {("ps", 0): "n2", ("worker", 0): "n1", ("worker", 1): "n2"}
GONE_END = End(why(Reason.NODE_LOST, node="n1"), Outcome.REQUEUE)


def pods(keys: Iterable[PodKey] = KEYS, **every: Any) -> dict[PodKey, Pod]:
    """Return the gang's pods, bound to their nodes; what is given goes for each."""
    return {
        key: Pod(
            **{
                "uid": f"{key}", "namespace": "team", "name": f"g-{key[0]}-{key[1]}", "resource_version": "1", "role": key[0],
                "index": key[1], "node": NODES[key], "phase": "Running", "ready": True, **every,
            }
        )
        for key in keys
    }  # fmt: skip


def but(peers: Mapping[PodKey, Pod], role: str, index: int, **changes: Any) -> dict[PodKey, Pod]:
    """Return the pods, one of them changed."""
    return {**peers, (role, index): replace(peers[role, index], **changes)}


REPLACING = why(Reason.REPLACING, there=2, pods=3, nodes="n1", cause="Node n1 is gone.")
GATED = pods(node="", phase="Pending", ready=False, gated=True)
UNBOUND = pods(node="", phase="Pending", ready=False)
BOUND = pods(phase="Pending", ready=False)
UP = pods()
DONE = pods(phase="Succeeded", ready=False, exit_code=0)
DONE_0 = frozenset({("worker", 0)})
REPLACES = replace(JOB, replaces_lost_pods=True)


def test_an_attempt_ends_when_its_claims_have_no_device_any_more() -> None:
    """Else who comes next would find its devices taken."""
    ending = View(WORKLOAD, Attempt("g", 3, ENDING, 1, PLACEMENTS, ADMITTED_AT, end=GONE_END), JOB, DONE, {}, NOW)

    assert next_move(replace(ending, allocated=True)) is None
    assert next_move(ending) == Move("g", 3, ENDED)


@dataclass(frozen=True)
class Case:
    state: AttemptState
    pods: Mapping[PodKey, Pod] = field(default_factory=dict)
    want: AttemptState | Outcome | frozenset[PodKey] | None = None
    says: str = ""
    later: float = 0.0  # seconds until it may be tried again
    charged: bool = False
    late: bool = False
    exit_code: int | None = None
    job: Job | None = JOB
    places: Mapping[str, Place] = field(default_factory=dict)
    now: float = NOW
    workload: Workload = WORKLOAD
    end: End | None = None
    running_at: float | None = RUNNING_AT
    done: frozenset[PodKey] = frozenset()  # on record
    replaced: frozenset[PodKey] = frozenset()  # lost ones that come

    @property
    def view(self) -> View:
        running_at = self.running_at if self.state in {RUNNING, SHRINKING, REPAIRING, GROWING, ENDING} else None
        attempt = Attempt("g", 3, self.state, 1, PLACEMENTS, ADMITTED_AT, running_at, self.end)
        if self.done:
            attempt = attempt.without(finished(attempt, self.done))
        if self.state is SHRINKING:
            attempt = attempt.shrinking(Shrink(why(Reason.RUNNING, pods=3), last(attempt.whole, {"worker": 1})))
        if self.state is GROWING:
            attempt = replace(attempt, coming=frozenset({("worker", 1)}), growing_at=GROWING_AT)
        if self.replaced:
            left = tuple(
                p for p in PLACEMENTS if p.role == "worker" and NODES["worker", next(iter(self.replaced))[1]] == p.node
            )
            found = tuple(replace(p, node="n3", first=next(iter(self.replaced))[1]) for p in left)
            attempt = replace(attempt, state=RUNNING).repairing(
                Repair(self.replaced, left, found, REPLACING), GROWING_AT
            )
            attempt = replace(attempt, state=self.state, leaving=attempt.leaving if self.state is REPAIRING else None)
        places = {"n1": Place.GOOD, "n2": Place.GOOD, "n3": Place.GOOD, **self.places}
        return View(self.workload, attempt, self.job, self.pods, places, self.now)


STAYS = {
    "reserved, pods are being created": Case(RESERVED, pods(KEYS[:2], node="", phase="Pending", ready=False)),
    "reserved, all pods exist: the executor says so": Case(RESERVED, GATED),
    "reserved, a pod is being removed: it will be created again or refused": Case(RESERVED, but(GATED, "ps", 0, deleting=True)),
    "created, gates are being removed": Case(CREATED, but(GATED, "ps", 0, gated=False)),
    "ungated, not bound": Case(UNGATED, UNBOUND),
    "ungated, bound": Case(UNGATED, BOUND),
    "ungated, one is not ready": Case(UNGATED, but(UP, "ps", 0, ready=False)),
    "ungated, one more pod with the gang's labels doesn't count": Case(
        UNGATED, but(UP, "ps", 0, ready=False) | {("ps", 9): replace(UP["ps", 0], index=9)}
    ),
    "running": Case(RUNNING, UP),
    "running, one is no longer ready": Case(RUNNING, but(UP, "worker", 0, ready=False)),
    "running, a label changed": Case(RUNNING, UP, places={"n1": Place.CLOSED, "n2": Place.CROWDED}),
    "running, marked for disruption that has not come": Case(RUNNING, but(UP, "ps", 0, disrupted="Eviction: drained")),
    "running, the spec was edited": Case(RUNNING, UP, job=replace(JOB, generation=2)),
    "ungated, the spec was edited": Case(UNGATED, UP | {("ps", 0): UNBOUND["ps", 0]}, job=replace(JOB, generation=2)),
    "running past the start deadline": Case(RUNNING, UP, now=ADMITTED_AT + 300),
    "running without a limit": Case(RUNNING, UP, job=replace(JOB, max_run_seconds=None), now=1e9),
    "running since nobody knows when": Case(RUNNING, UP, running_at=None, now=1e9),
    "running, one is done and what it held is given back": Case(RUNNING, but(UP, "worker", 0, phase="Succeeded"), done=DONE_0),
    "running, one that is done was removed since": Case(RUNNING, pods([KEYS[0], KEYS[2]]), done=DONE_0),
    "running, one that is done was removed since, and its node is gone": Case(
        RUNNING, pods([KEYS[0], KEYS[2]]), done=DONE_0, places={"n1": Place.GONE}
    ),
    "ungated, one is done and not all others are ready": Case(UNGATED, but(UP, "ps", 0, ready=False), done=DONE_0),
    "reserved, a pod that ended is no matter yet": Case(RESERVED, but(GATED, "worker", 0, phase="Succeeded")),
    "ending, a pod that is done is not given back before": Case(
        ENDING, but(UP, "worker", 0, phase="Succeeded"), end=GONE_END
    ),
    "bound before its place was closed": Case(UNGATED, BOUND, places={"n1": Place.CLOSED}),
    "bound before its place was crowded": Case(UNGATED, but(UNBOUND, "worker", 0, node="n1"), places={"n1": Place.CROWDED}),
    "shrinking, the pod that goes is still there": Case(SHRINKING, UP),
    "shrinking, it is being removed": Case(SHRINKING, but(UP, "worker", 1, deleting=True, ready=False)),
    "shrinking, it is evicted": Case(SHRINKING, but(UP, "worker", 1, deleting=True, disrupted="Eviction: preempted")),
    "shrinking, it is going, and one that stays is not ready": Case(SHRINKING, but(UP, "worker", 0, ready=False)),
    "growing, the pod that comes has yet to be created": Case(GROWING, pods(KEYS[:2])),
    "growing, it is gated": Case(GROWING, UP | {KEYS[2]: GATED[KEYS[2]]}),
    "growing, it is not ready": Case(GROWING, but(UP, "worker", 1, ready=False)),
    "growing, it was removed by others and is created again": Case(GROWING, but(UP, "worker", 1, deleting=True, ready=False)),
    "growing, a place of the others takes no new pods": Case(
        GROWING, UP | {KEYS[2]: UNBOUND[KEYS[2]]}, places={"n1": Place.CLOSED}
    ),
    "ending, a pod still runs": Case(ENDING, but(DONE, "ps", 0, phase="Running", deleting=True), end=GONE_END),
    "ending, deleted, a pod that has ended is still there": Case(
        ENDING, DONE, end=End(why(Reason.DELETED), Outcome.DELETED), job=None
    ),
    "ended": Case(ENDED, UP, end=GONE_END),
    "ended, job deleted": Case(ENDED, {}, end=GONE_END, job=None),
}  # fmt: skip

FINISHES = {
    "one is done": Case(RUNNING, but(UP, "worker", 0, phase="Succeeded", ready=False), DONE_0),
    "one that is done is being removed": Case(RUNNING, but(UP, "worker", 0, phase="Succeeded", deleting=True), DONE_0),
    "one that nobody waits for is done": Case(RUNNING, but(UP, "ps", 0, phase="Succeeded"), frozenset({("ps", 0)})),
    "one is done, and its node is gone": Case(RUNNING, but(UP, "worker", 0, phase="Succeeded"), DONE_0, places={"n1": Place.GONE}),
    "several are done together": Case(
        RUNNING, but(but(UP, "worker", 0, phase="Succeeded"), "ps", 0, phase="Succeeded"), frozenset({("ps", 0), ("worker", 0)})
    ),
    "another one is done": Case(
        RUNNING, but(pods([KEYS[0], KEYS[2]]), "ps", 0, phase="Succeeded"), frozenset({("ps", 0)}), done=DONE_0
    ),
    "one is done before all others are ready": Case(
        UNGATED, but(but(UP, "worker", 0, phase="Succeeded"), "ps", 0, ready=False), DONE_0
    ),
    "one that stays is done while another goes": Case(SHRINKING, but(UP, "ps", 0, phase="Succeeded"), frozenset({("ps", 0)})),
}  # fmt: skip

MOVES = {
    "all pods are ready": Case(UNGATED, UP, RUNNING),
    "all pods are ready or done": Case(UNGATED, but(UP, "ps", 0, phase="Succeeded", ready=False), RUNNING),
    "shrinking, the pod that goes is gone": Case(SHRINKING, pods(KEYS[:2]), RUNNING),
    "shrinking, it has failed": Case(SHRINKING, but(UP, "worker", 1, phase="Failed", exit_code=1), RUNNING),
    "shrinking, it is done": Case(SHRINKING, but(UP, "worker", 1, phase="Succeeded"), RUNNING),
    "shrinking, a pod with the gang's labels holds nothing up": Case(
        SHRINKING, pods(KEYS[:2]) | {("worker", 7): replace(UP["worker", 1], index=7)}, RUNNING
    ),
    "growing, all are ready": Case(GROWING, UP, RUNNING),
    "ending, all pods are gone": Case(ENDING, {}, ENDED, end=GONE_END),
    "ending, those that ended stay for their logs": Case(ENDING, DONE, ENDED, end=GONE_END),
    "ending, the job is gone": Case(ENDING, {}, ENDED, end=GONE_END, job=None),
    "ending, deleted, all pods are gone": Case(ENDING, {}, ENDED, end=End(why(Reason.DELETED), Outcome.DELETED), job=None),
}  # fmt: skip

DELETED = "Deleted by its user."
CROWDED = "The place on node n1 was lost before the gang was bound: others' pods took its room."
ENDS = {
    **{
        f"deleted when {state.value}": Case(state, seen, Outcome.DELETED, DELETED, job=job)
        for state, seen in ((RESERVED, {}), (CREATED, GATED), (UNGATED, BOUND), (RUNNING, UP), (SHRINKING, UP))
        for job in (replace(JOB, deleting=True),)
    },
    **{
        f"gone from the API server when {state.value}": Case(state, seen, Outcome.DELETED, DELETED, job=None)
        for state, seen in ((RESERVED, {}), (CREATED, GATED), (UNGATED, BOUND), (RUNNING, DONE))
    },
    "deleted goes before done": Case(RUNNING, DONE, Outcome.DELETED, DELETED, job=replace(JOB, deleting=True)),
    "reserved, the spec was edited": Case(
        RESERVED, {}, Outcome.REQUEUE, "The spec was changed between the decision and the start.", job=replace(JOB, generation=2)
    ),
    "created, the spec was edited": Case(
        CREATED, GATED, Outcome.REQUEUE, "The spec was changed between the decision and the start.", job=replace(JOB, generation=2)
    ),
    "all are done": Case(RUNNING, DONE, Outcome.SUCCEEDED, "All pods that must succeed did.", exit_code=0),
    "the last one is done": Case(
        RUNNING, but(UP, "worker", 1, phase="Succeeded"), Outcome.SUCCEEDED, "All pods that must succeed did.", exit_code=0, done=DONE_0
    ),
    "one that runs has failed, others are done": Case(
        RUNNING, but(UP, "worker", 1, phase="Failed", exit_code=3), Outcome.REQUEUE, "Pod g-worker-1 failed with exit code 3.", 10, charged=True, exit_code=3,
        done=DONE_0,
    ),
    "one that runs was removed, others are done": Case(
        RUNNING, pods([KEYS[0]]), Outcome.REQUEUE, "Pod worker-1 was removed by others.", 10, late=True, done=DONE_0
    ),
    "not ready in time, one is done": Case(
        UNGATED, but(UP, "ps", 0, ready=False), Outcome.REQUEUE, "Only 2 of 3 pods got ready within 300 s of the start.", 10, late=True, now=ADMITTED_AT + 300,
        done=DONE_0,
    ),
    "all that must succeed did": Case(RUNNING, UP | pods(KEYS[1:], phase="Succeeded"), Outcome.SUCCEEDED, "All pods that must succeed did.", exit_code=0),
    "they did, another has failed": Case(RUNNING, but(DONE, "ps", 0, phase="Failed"), Outcome.SUCCEEDED, "All pods that must succeed did.", exit_code=0),
    "they did, another is gone": Case(RUNNING, pods(KEYS[1:], phase="Succeeded"), Outcome.SUCCEEDED, "All pods that must succeed did.", exit_code=0),
    "done before anyone saw them ready": Case(UNGATED, DONE, Outcome.SUCCEEDED, "All pods that must succeed did.", exit_code=0),
    "done in time, seen too late": Case(RUNNING, DONE, Outcome.SUCCEEDED, "All pods that must succeed did.", exit_code=0, now=1e9),
    "those that stay are done": Case(
        SHRINKING, but(UP, "worker", 0, phase="Succeeded"), Outcome.SUCCEEDED, "All pods that must succeed did.", exit_code=0
    ),
    "one that stays has failed while others go": Case(
        SHRINKING, but(UP, "worker", 0, phase="Failed", exit_code=3), Outcome.REQUEUE, "Pod g-worker-0 failed with exit code 3.", 10, charged=True, exit_code=3
    ),
    "one that stays is gone, and so is one that goes": Case(
        SHRINKING, pods([KEYS[0]]), Outcome.REQUEUE, "Pod worker-0 was removed by others.", 10, late=True
    ),
    "ran too long while others go": Case(
        SHRINKING, UP, Outcome.FAILED, "Ran longer than maxRunSeconds of 600.", exit_code=124, now=RUNNING_AT + 600
    ),
    "ran too long": Case(RUNNING, UP, Outcome.FAILED, "Ran longer than maxRunSeconds of 600.", exit_code=124, now=RUNNING_AT + 600),
    "failed": Case(RUNNING, but(UP, "worker", 1, phase="Failed", exit_code=3), Outcome.REQUEUE, "Pod g-worker-1 failed with exit code 3.", 10, charged=True, exit_code=3),
    "deleted by others, and failed of it before anybody looked, as did its peers": Case(
        RUNNING, but(pods(phase="Failed", exit_code=143), "worker", 1, deleting=True), Outcome.REQUEUE, "Pod g-worker-1 was removed by others.", 10, late=True,
    ),
    "failed before all were ready": Case(UNGATED, but(BOUND, "ps", 0, phase="Failed", exit_code=1), Outcome.REQUEUE, "Pod g-ps-0 failed with exit code 1.", 10, charged=True, exit_code=1),
    "failed without a word": Case(RUNNING, but(UP, "ps", 0, phase="Failed"), Outcome.REQUEUE, "Pod g-ps-0 failed with exit code unknown.", 10, charged=True),
    "failed once more": Case(
        RUNNING, but(UP, "ps", 0, phase="Failed", exit_code=9), Outcome.REQUEUE, "Pod g-ps-0 failed with exit code 9.", 40, charged=True, exit_code=9,
        job=replace(JOB, backoff_limit=9), workload=replace(WORKLOAD, failures=2),
    ),
    "failed too often": Case(
        RUNNING, but(UP, "ps", 0, phase="Failed", exit_code=9), Outcome.FAILED, "Failed 2 times, backoffLimit is 1; last: Pod g-ps-0 failed with exit code 9.",
        charged=True, exit_code=9, workload=replace(WORKLOAD, failures=1),
    ),
    "no second try allowed": Case(
        RUNNING, but(UP, "ps", 0, phase="Failed", exit_code=9), Outcome.FAILED, "Failed 1 time, backoffLimit is 0; last: Pod g-ps-0 failed with exit code 9.",
        charged=True, exit_code=9, job=replace(JOB, backoff_limit=0),
    ),
    "preempted by others": Case(
        RUNNING, but(UP, "worker", 0, phase="Failed", exit_code=143, disrupted="preempted by kube-system/dns"), Outcome.REQUEUE,
        "Pod g-worker-0 was disrupted: preempted by kube-system/dns", 10, late=True,
    ),
    "evicted, still going": Case(RUNNING, but(UP, "worker", 0, deleting=True, disrupted="drained"), Outcome.REQUEUE, "Pod g-worker-0 was disrupted: drained", 10, late=True),
    "peers fail because one was disrupted": Case(
        RUNNING, but(but(UP, "ps", 0, phase="Failed", exit_code=1), "worker", 1, phase="Failed", disrupted="drained"), Outcome.REQUEUE,
        "Pod g-worker-1 was disrupted: drained", 10, late=True,
    ),
    "peers fail because one was removed": Case(
        RUNNING, but(but(UP, "ps", 0, phase="Failed", exit_code=1), "worker", 1, deleting=True), Outcome.REQUEUE, "Pod g-worker-1 was removed by others.", 10, late=True,
    ),
    "removed by others": Case(RUNNING, pods(KEYS[1:]), Outcome.REQUEUE, "Pod ps-0 was removed by others.", 10, late=True),
    "removed by others, for the fourth time": Case(
        RUNNING, pods(KEYS[1:]), Outcome.REQUEUE, "Pod ps-0 was removed by others.", 80, late=True, workload=replace(WORKLOAD, late_starts=3)
    ),
    "removed while gated": Case(CREATED, pods(KEYS[:2], node=""), Outcome.REQUEUE, "Pod worker-1 was removed by others.", 10, late=True),
    "being removed": Case(UNGATED, but(BOUND, "worker", 0, deleting=True), Outcome.REQUEUE, "Pod g-worker-0 was removed by others.", 10, late=True),
    "a pod with the gang's labels stands in for none": Case(
        UNGATED, pods(KEYS[1:]) | {("ps", 9): UP["ps", 0]}, Outcome.REQUEUE, "Pod ps-0 was removed by others.", 10, late=True
    ),
    "a node is gone": Case(RUNNING, UP, Outcome.REQUEUE, "Node n1 is gone.", places={"n1": Place.GONE}),
    "a node is gone and its pod with it": Case(RUNNING, pods([KEYS[0], KEYS[2]]), Outcome.REQUEUE, "Node n1 is gone.", places={"n1": Place.GONE}),
    "reserved, the place is crowded": Case(RESERVED, {}, Outcome.REQUEUE, CROWDED, places={"n1": Place.CROWDED}, late=True),
    "created, the place is crowded": Case(CREATED, GATED, Outcome.REQUEUE, CROWDED, places={"n1": Place.CROWDED}, late=True),
    "ungated, the place is crowded before all are bound": Case(
        UNGATED, but(UNBOUND, "ps", 0, node="n2"), Outcome.REQUEUE, CROWDED.replace("n1", "n2"), places={"n2": Place.CROWDED}, late=True
    ),
    "the place is closed": Case(
        UNGATED, UNBOUND, Outcome.REQUEUE, "The place on node n2 was lost before the gang was bound: it takes no new pods.", places={"n2": Place.CLOSED}, late=True
    ),
    "the place is gone": Case(
        CREATED, GATED, Outcome.REQUEUE, "The place on node n1 was lost before the gang was bound: it is gone.", places={"n1": Place.GONE, "n2": Place.CLOSED}, late=True
    ),
    "the second place in a row is lost": Case(
        CREATED, GATED, Outcome.REQUEUE, CROWDED, places={"n1": Place.CROWDED}, late=True, later=10, workload=replace(WORKLOAD, late_starts=1)
    ),
    "the third place in a row is lost": Case(
        CREATED, GATED, Outcome.REQUEUE, CROWDED, places={"n1": Place.CROWDED}, late=True, later=20, workload=replace(WORKLOAD, late_starts=2)
    ),
    "not ready in time, as a pod can't start": Case(
        UNGATED, but(UP, "ps", 0, ready=False, waits="ImagePullBackOff (no such image)"), Outcome.REQUEUE,
        "Only 2 of 3 pods got ready within 300 s of the start. Pod g-ps-0 waits: ImagePullBackOff (no such image).", 10, late=True, now=ADMITTED_AT + 300,
    ),
    "not created in time": Case(RESERVED, {}, Outcome.REQUEUE, "Only 0 of 3 pods got ready within 300 s of the start.", 10, late=True, now=ADMITTED_AT + 300),
    "not ungated in time": Case(CREATED, GATED, Outcome.REQUEUE, "Only 0 of 3 pods got ready within 300 s of the start.", 10, late=True, now=ADMITTED_AT + 300),
    "not ready in time": Case(
        UNGATED, but(UP, "ps", 0, ready=False), Outcome.REQUEUE, "Only 2 of 3 pods got ready within 300 s of the start.", 20, late=True, now=ADMITTED_AT + 301,
        workload=replace(WORKLOAD, late_starts=1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STAYS.values(), ids=STAYS.keys())
def test_nothing_is_due(case: Case) -> None:
    assert next_move(case.view) is None


@pytest.mark.parametrize("case", MOVES.values(), ids=MOVES.keys())
def test_an_attempt_moves_on(case: Case) -> None:
    assert next_move(case.view) == Move("g", 3, AttemptState(str(case.want)))


@pytest.mark.parametrize("case", FINISHES.values(), ids=FINISHES.keys())
def test_what_is_done_is_given_back(case: Case) -> None:
    move = next_move(case.view)
    assert move is not None
    assert move.done is not None
    assert (move.uid, move.attempt, move.to, move.end) == ("g", 3, case.state, None)
    assert move.done.pods == case.want
    nodes = [p.node for p in move.done.part.placements for _ in range(p.pods)]
    assert sorted(nodes) == sorted(NODES[key] for key in move.done.pods)


@pytest.mark.parametrize("case", ENDS.values(), ids=ENDS.keys())
def test_an_attempt_ends(case: Case) -> None:
    move = next_move(case.view)
    assert move is not None
    assert move.end is not None
    assert (move.uid, move.attempt, move.to) == ("g", 3, ENDING)
    assert (move.end.outcome, str(move.end.why)) == (case.want, case.says)
    assert move.end.not_before == (case.now + case.later if case.later else 0.0)
    assert (move.end.charged, move.end.late, move.end.exit_code) == (case.charged, case.late, case.exit_code)


def test_a_gang_of_which_nothing_must_succeed_does_not_succeed_by_that() -> None:
    job = replace(JOB, gang=gang("g", role("worker", 2, must_succeed=False), role("ps", 1, must_succeed=False)))
    assert next_move(Case(RUNNING, UP, job=job).view) is None
    assert next_move(Case(RUNNING, DONE, job=job).view) is None, "nor does it ever hold nothing"


@pytest.mark.parametrize(
    ("state", "want"),
    [
        (RESERVED, 1300),
        (CREATED, 1300),
        (UNGATED, 1300),
        (RUNNING, 1610),
        (SHRINKING, 1610),
        (GROWING, GROWING_AT + 300),
        (ENDING, None),
        (ENDED, None),
    ],
)
def test_when_time_alone_makes_a_move_due(state: AttemptState, want: float | None) -> None:
    view = Case(state).view
    assert deadline(view.attempt, JOB) == want
    assert deadline(replace(view.attempt, running_at=None), replace(JOB, max_run_seconds=None)) == (
        None if want == 1610 else want
    )


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (Case(GROWING, but(UP, "worker", 1, phase="Failed", ready=False)), "pod g-worker-1 failed"),
        (Case(GROWING, but(UP, "worker", 1, disrupted="Eviction: drained")), "pod g-worker-1 was disrupted"),
        (Case(GROWING, UP | {KEYS[2]: UNBOUND[KEYS[2]]}, places={"n2": Place.CROWDED}), "node n2 was lost, others' pods took its room"),
        (Case(GROWING, pods(KEYS[:2]), job=replace(JOB, generation=2)), "the spec was changed"),
        (Case(GROWING, but(UP, "worker", 1, ready=False), now=GROWING_AT + 300), "they were not ready within 300 s"),
    ],
    ids=["failed", "disrupted", "place lost", "spec changed", "too late"],
)  # fmt: skip
def test_a_gang_whose_growth_comes_to_nothing_gives_back_only_that(case: Case, problem: str) -> None:
    move = next_move(case.view)
    assert move is not None
    assert move.shrink is not None
    assert (move.to, move.end, pods_of(move.shrink.part.placements)) == (SHRINKING, None, {"worker": 1})
    assert str(move.shrink.why) == f"Gave 1 pod back by which it was to grow: {problem}. The other 2 run on."


def test_a_growing_gang_of_which_another_pod_fails_ends_whole() -> None:
    move = next_move(Case(GROWING, but(pods(KEYS[:2]), "worker", 0, phase="Failed", exit_code=1)).view)
    assert move is not None
    assert move.to is ENDING


def test_who_is_ready() -> None:
    assert ready(but(UP, "ps", 0, ready=False).values()) == 2
    assert ready(DONE.values()) == 3
    assert ready([]) == 0


def test_what_holds_room() -> None:
    mixed = but(but(UP, "ps", 0, phase="Succeeded"), "worker", 0, phase="Failed")
    deleted = End(why(Reason.DELETED), Outcome.DELETED)
    assert [pod.name for pod in holding(Case(ENDING, mixed, end=GONE_END).view)] == ["g-worker-1"]
    assert len(holding(Case(ENDING, mixed, end=deleted).view)) == 3
    assert len(holding(Case(RUNNING, mixed).view)) == 1
    assert [pod.name for pod in holding(Case(SHRINKING, UP).view)] == ["g-worker-1"]


def test_a_node_that_is_gone_with_what_leaves_is_no_loss() -> None:
    view = Case(SHRINKING, UP, places={"n2": Place.GONE}).view
    elsewhere = tuple(replace(p, node="n1") for p in view.attempt.placements)
    there = {key: replace(pod, node="n2" if key == ("worker", 1) else "n1") for key, pod in UP.items()}
    moved = replace(view, attempt=replace(view.attempt, placements=elsewhere), pods=there)
    assert next_move(moved) is None
    lost = replace(moved, pods={key: there[key] for key in KEYS[:1]})
    assert (move := next_move(lost)) is not None
    assert move.end is not None
    assert str(move.end.why) == "Pod worker-0 was removed by others."


@pytest.mark.parametrize(
    ("permanent", "want"),
    [
        (True, End(why(Reason.MISCONFIGURED, field="pod g-ps-0", problem="no"), Outcome.REQUEUE, barred=1)),
        (False, End(why(Reason.PODS_REFUSED, pod="g-ps-0", problem="no"), Outcome.REQUEUE, NOW + 10, late=True)),
    ],
)
def test_a_refused_pod_ends_the_attempt(permanent: bool, want: End) -> None:  # noqa: FBT001
    assert refused(Case(RESERVED).view, "g-ps-0", "no", permanent=permanent) == want


def test_back_off_doubles_up_to_its_longest() -> None:
    back_off = BackOff(first=10, longest=60)
    assert [back_off.until(100, times) for times in (1, 2, 3, 4, 5, 10_000)] == [110, 120, 140, 160, 160, 160]


LOSSES = {
    "a node is gone": (Case(RUNNING, UP, job=REPLACES, places={"n1": Place.GONE}), {("worker", 0)}, "Node n1 is gone."),
    "a node is gone and its pod with it": (
        Case(RUNNING, pods([KEYS[0], KEYS[2]]), job=REPLACES, places={"n1": Place.GONE}), {("worker", 0)}, "Node n1 is gone."
    ),
    "a pod is drained, and its neighbours leave the node too": (
        Case(RUNNING, but(UP, "worker", 1, deleting=True, disrupted="drained"), job=REPLACES, places={"n2": Place.CLOSED}),
        {("worker", 1), ("ps", 0)}, "Pod g-worker-1 was disrupted: drained",
    ),
    "a pod was removed from a good node": (
        Case(RUNNING, pods(KEYS[1:]), job=REPLACES), {("ps", 0)}, "Pod ps-0 was removed by others."
    ),
    "a pod failed for its node's sake": (
        Case(RUNNING, but(UP, "worker", 0, phase="Failed", disrupted="node shutdown"), job=REPLACES), {("worker", 0)},
        "Pod g-worker-0 was disrupted: node shutdown",
    ),
    "a drained pod ended well": (
        Case(RUNNING, but(UP, "worker", 0, phase="Succeeded", deleting=True, disrupted="drained"), job=REPLACES),
        {("worker", 0)}, "Pod g-worker-0 was disrupted: drained",
    ),
    "a pod is being removed": (
        Case(RUNNING, but(UP, "worker", 0, deleting=True), job=REPLACES), {("worker", 0)}, "Pod g-worker-0 was removed by others."
    ),
}  # fmt: skip


@pytest.mark.parametrize(("case", "lost", "says"), LOSSES.values(), ids=LOSSES.keys())
def test_a_gang_that_may_have_lost_pods_replaced_waits_for_that(case: Case, lost: set[PodKey], says: str) -> None:
    found = loss(case.view)
    assert found is not None
    assert (found.pods, str(found.why)) == (frozenset(lost), says)
    assert next_move(case.view) is None
    for whole in (replace(case.view, irreparable=True), replace(case.view, job=JOB)):
        move = next_move(whole)
        assert move is not None
        assert move.end is not None
        assert str(move.end.why) == says


@pytest.mark.parametrize(
    "case",
    [
        Case(RUNNING, but(but(UP, "ps", 0, phase="Failed", exit_code=1), "worker", 1, phase="Failed", disrupted="drained"), job=REPLACES),
        Case(RUNNING, pods([KEYS[0]]), job=REPLACES, done=DONE_0),
        Case(RUNNING, UP, job=REPLACES, places={"n1": Place.GONE, "n2": Place.GONE}),
        Case(RUNNING, UP, job=replace(REPLACES, generation=2), places={"n1": Place.GONE}),
        Case(UNGATED, UP, job=REPLACES, places={"n1": Place.GONE}),
        Case(GROWING, UP, job=REPLACES, places={"n1": Place.GONE}),
    ],
    ids=["a peer failed of it", "others are done", "none is left", "spec changed", "not all have started", "it grows"],
)  # fmt: skip
def test_it_goes_back_whole_all_the_same(case: Case) -> None:
    assert loss(case.view) is None
    move = next_move(case.view)
    assert move is not None
    assert move.end is not None
    assert (move.end.outcome, move.end.charged) == (Outcome.REQUEUE, False)


def test_a_pod_that_fails_by_itself_is_not_replaced() -> None:
    move = next_move(Case(RUNNING, but(UP, "worker", 1, phase="Failed", exit_code=3), job=REPLACES).view)
    assert move is not None
    assert move.end is not None
    assert move.end.charged


FAILED_END = End(why(Reason.POD_FAILED, pod="g-worker-1", code=1), Outcome.REQUEUE, NOW + 10, charged=True, exit_code=1)
OVER_END = replace(
    FAILED_END, why=why(Reason.BACKOFF_LIMIT_EXCEEDED, failures=1, limit=0, cause="x"), outcome=Outcome.FAILED
)


@pytest.mark.parametrize("end", [FAILED_END, OVER_END], ids=["tried again", "given up"])
def test_peers_that_failed_before_anybody_knew_of_their_lost_node_are_no_failure_of_the_gang(end: End) -> None:
    failed = Case(ENDING, but(UP, "worker", 1, phase="Failed", exit_code=1), end=end)
    assert next_move(failed.view) is None, "a pod is there yet"
    left = pods([("worker", 1)], phase="Failed", exit_code=1)
    assert next_move(replace(failed, pods=left).view) == Move("g", 3, ENDED)
    assert next_move(replace(failed, pods=left, places={"n1": Place.GONE}).view) == Move("g", 3, ENDED, GONE_END)


FIRST = frozenset({("worker", 0)})
ON_N3 = but(UP, "worker", 0, node="n3")


def test_replacements_are_created_when_all_that_is_left_of_the_lost_pods_is_gone() -> None:
    gone = {"n1": Place.GONE}
    for left in (UP, but(UP, "worker", 0, deleting=True), but(UP, "worker", 0, phase="Failed", disrupted="drained")):
        view = Case(REPAIRING, left, job=REPLACES, places=gone, replaced=FIRST).view
        assert next_move(view) is None
        assert [pod.name for pod in holding(view)] == ["g-worker-0"]
    view = Case(REPAIRING, pods([KEYS[0], KEYS[2]]), job=REPLACES, places=gone, replaced=FIRST).view
    assert next_move(view) == Move("g", 3, GROWING)
    assert next_move(Case(GROWING, ON_N3, job=REPLACES, places=gone, replaced=FIRST).view) == Move("g", 3, RUNNING)
    assert deadline(view.attempt, JOB) == GROWING_AT + 300


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (Case(REPAIRING, UP, now=GROWING_AT + 300), "they were not gone within 300 s"),
        (Case(REPAIRING, UP, places={"n3": Place.CLOSED}), "node n3 was lost, it takes no new pods"),
        (Case(GROWING, ON_N3, places={"n3": Place.GONE}), "node n3 was lost, it is gone"),
        (Case(GROWING, but(ON_N3, "worker", 0, ready=False), now=GROWING_AT + 300), "they were not ready within 300 s"),
        (Case(GROWING, but(ON_N3, "worker", 0, disrupted="drained")), "pod g-worker-0 was disrupted"),
        (Case(GROWING, ON_N3, job=replace(REPLACES, generation=2)), "the spec was changed"),
    ],
    ids=["not gone", "place lost before", "place lost", "too late", "disrupted", "spec changed"],
)
def test_a_gang_whose_lost_pods_are_not_replaced_after_all_goes_back_whole(case: Case, problem: str) -> None:
    job = case.job if case.job is not JOB else REPLACES
    move = next_move(replace(case, job=job, replaced=FIRST).view)
    assert move is not None
    assert move.end is not None
    assert (move.to, str(move.end.why)) == (ENDING, f"The lost pods could not be replaced: {problem}.")
    assert (move.end.outcome, move.end.not_before, move.end.late) == (Outcome.REQUEUE, case.now + 10, True)


def test_a_replacement_that_fails_by_itself_is_a_failure_of_the_gang() -> None:
    move = next_move(
        Case(GROWING, but(ON_N3, "worker", 0, phase="Failed", exit_code=3), job=REPLACES, replaced=FIRST).view
    )
    assert move is not None
    assert move.end is not None
    assert (str(move.end.why), move.end.charged) == ("Pod g-worker-0 failed with exit code 3.", True)


def test_the_others_come_to_no_end_before_all_are_there_again() -> None:
    rest = but(UP, "worker", 0, ready=False) | pods(KEYS[2:], phase="Succeeded", ready=False)
    move = next_move(Case(GROWING, rest, job=REPLACES, replaced=FIRST).view)
    assert move is not None
    assert (move.end, move.done and move.done.pods) == (None, frozenset(KEYS[2:]))


def test_an_elastic_gang_runs_on_without_replacements_of_its_last_pods() -> None:
    elastic = replace(REPLACES, gang=gang("g", role("worker", 2, gpu=8, least=1), role("ps", 1, gpu=8)))
    for index, to in ((0, ENDING), (1, SHRINKING)):
        case = Case(GROWING, UP, job=elastic, replaced=frozenset({("worker", index)}))
        assert not_grown(case.view, "no").to is to
    assert loss(Case(RUNNING, UP, job=elastic, places={"n1": Place.GONE}).view) == Loss(FIRST, GONE_END.why)


FAULTY = why(Reason.NODE_FAULTY, node="n1", problem="GPU 3 has fallen off the bus")
SAVES = replace(JOB, saving=Saving(Signal.HTTP, Answer.REPLY, grace_seconds=60))


@pytest.mark.parametrize(("state", "job", "to"), [
    (RUNNING, SAVES, CHECKPOINTING), (RUNNING, JOB, ENDING), (UNGATED, SAVES, ENDING), (GROWING, SAVES, ENDING), (CREATED, SAVES, ENDING),
])  # fmt: skip
def test_who_has_to_leave_a_node_saves_its_work_before(state: AttemptState, job: Job, to: AttemptState) -> None:
    move = next_move(
        replace(
            Case(state, GATED if state is CREATED else BOUND if state is UNGATED else UP, job=job).view, leave=FAULTY
        )
    )
    assert move is not None
    assert move.to is to
    assert move.end is not None
    assert (move.end.why, move.end.outcome, move.end.charged, move.end.disrupts) == (
        FAULTY,
        Outcome.REQUEUE,
        False,
        True,
    )


@pytest.mark.parametrize("state", [CHECKPOINTING, ENDING, ENDED])
def test_who_leaves_already_is_not_told_again(state: AttemptState) -> None:
    case = Case(
        state,
        UP,
        end=GONE_END if state is not CHECKPOINTING else replace(GONE_END, ask=Ask(NOW, NOW + 60, 2)),
        job=SAVES,
    )
    assert next_move(replace(case.view, leave=FAULTY)) is None
