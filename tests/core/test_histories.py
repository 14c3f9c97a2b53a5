"""Any history of a gang: whatever happens, it keeps to the arrows of its life and comes to an end."""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from queuectl.core.checkpoint import give_up, leave
from queuectl.core.elastic import last
from queuectl.core.lifecycle import View, all_ready, coming, deadline, holding, loss, members, next_move, refused
from queuectl.model.checkpoint import Answer, Ask, Checkpoint, Report, Saving, Signal
from queuectl.model.lifecycle import UNDER_WAY, Attempt, AttemptState, Done, Move, Outcome, Workload
from queuectl.model.objects import Job, Place, Pod
from queuectl.model.plan import Placement, PodKey, Portion, Repair
from queuectl.model.reasons import Reason, why
from tests.support.builders import gang, requests, role

CLAIMED, RESERVED, CREATED, UNGATED, RUNNING, SHRINKING, REPAIRING, GROWING, CHECKPOINTING, ENDING, ENDED = AttemptState
ARROWS = {
    RESERVED: {CREATED, ENDING},
    CREATED: {UNGATED, ENDING},
    UNGATED: {RUNNING, ENDING},
    RUNNING: {ENDING},
    CHECKPOINTING: {ENDING},
    SHRINKING: {RUNNING, ENDING},
    REPAIRING: {GROWING, ENDING},
    GROWING: {RUNNING, SHRINKING, ENDING},
    ENDING: {ENDED},
}
EIGHT = requests(gpu=8)
PLACEMENTS = (
    Placement("a", "any", "n1", 1, EIGHT),
    Placement("a", "any", "n2", 1, EIGHT, first=1),
    Placement("b", "any", "n1", 1, EIGHT),
)
KEYS: list[PodKey] = [("a", 0), ("a", 1), ("b", 0)]
NODE = dict(zip(KEYS, ["n1", "n2", "n1"], strict=True))
keys = st.sampled_from(KEYS)


class GangMachine(RuleBasedStateMachine):
    """A gang, its executor, and a cluster in which anything may happen."""

    def __init__(self) -> None:
        super().__init__()
        self.workload = Workload("g", "team", "g", "q", 0, 0.0, 1)
        self.pods: dict[PodKey, Pod] = {}
        self.places = dict.fromkeys(["n1", "n2", "n3"], Place.GOOD)
        self.now = 1000.0
        self.over: Outcome | None = None
        self.moves = 0

    @initialize(
        limit=st.integers(0, 2), longest=st.sampled_from([None, 500]), b_counts=st.booleans(), replaces=st.booleans()
    )
    def submit(self, limit: int, longest: int | None, b_counts: bool, replaces: bool) -> None:  # noqa: FBT001
        roles = role("a", 2, gpu=8), role("b", 1, gpu=8, must_succeed=b_counts)
        saving = Saving(Signal.ANNOTATION, Answer.ANNOTATION, grace_seconds=200)
        self.job: Job | None = Job(
            gang("g", *roles),
            1,
            "1",
            backoff_limit=limit,
            max_run_seconds=longest,
            replaces_lost_pods=replaces,
            saving=saving,
        )
        self.admit()

    def admit(self) -> None:
        generation = self.job.generation if self.job else 0
        self.workload = replace(self.workload, attempt=self.workload.attempt + 1)
        self.attempt = Attempt("g", self.workload.attempt, RESERVED, generation, PLACEMENTS, self.now)
        self.pods, self.moves, self.shrinks, self.growths, self.repairs = {}, 0, 0, 0, 0
        self.home = dict(NODE)
        self.irreparable = False
        self.reports: dict[PodKey, Report] = {}

    @property
    def view(self) -> View:
        return View(
            self.workload, self.attempt, self.job, self.pods, self.places, self.now, irreparable=self.irreparable,
            reports=self.reports,
        )  # fmt: skip

    def apply(self, move: Move) -> None:
        """Do as the ledger does, and hold the move against the rules."""
        assert (move.uid, move.attempt) == ("g", self.attempt.number)
        if move.done is not None:
            self.finish(move.done)
            return
        if move.asked is not None:
            assert move.to is self.attempt.state is SHRINKING
            self.saved(self.attempt.asking, move.asked)
            self.attempt = replace(self.attempt, ask=None)
            return
        assert move.to in ARROWS[self.attempt.state]
        assert (move.end is not None) == (move.to is ENDING)
        self.moves += 1
        most = 5 + self.shrinks + 2 * self.growths + 3 * self.repairs
        assert self.moves <= most, "five arrows at most, one for each time it shrinks, two for growth, three for repair"
        if self.attempt.state is CHECKPOINTING:
            self.leaves(move)
        before = self.attempt
        if move.shrink is not None:
            assert [p.node for p in move.shrink.part.placements] == [NODE["a", 1]], "only what comes is given back"
            self.attempt = before.shrinking(move.shrink)
            return
        assert move.to is not RUNNING or before.asking is None, "what leaves goes before all have saved"
        self.attempt = replace(before, state=move.to, end=move.end or before.end, ask=None)
        if move.to is RUNNING:
            self.attempt = replace(
                self.attempt, running_at=self.now if before.running_at is None else before.running_at, leaving=None,
                coming=frozenset(), shrunk=None if before.replaces else before.shrunk,
            )  # fmt: skip
            assert len(members(self.attempt, self.pods)) == self.attempt.whole.pods
        self.on_repair(before, move)
        if before.state is SHRINKING:
            assert move.to is ENDING or not holding(replace(self.view, attempt=before)), "what leaves is still there"
            assert move.end is None or "g-a-1" not in str(move.end.why), "what leaves decides nothing"
        if before.state is UNGATED and move.to is RUNNING:
            assert self.pods.keys() | self.attempt.done == set(KEYS)
            self.workload = replace(self.workload, late_starts=0)
        if move.end is not None:
            assert not (move.end.not_before and move.end.outcome is not Outcome.REQUEUE)
            assert move.end.not_before == 0 or self.now < move.end.not_before <= self.now + 360
        if move.to is ENDED:
            self.ended()

    def on_repair(self, before: Attempt, move: Move) -> None:
        gone = before.state is not REPAIRING or move.to is ENDING or ("a", 1) not in self.pods
        assert gone, "what is left of the lost pod has the name of the one that comes"
        if move.to is GROWING:
            self.attempt = replace(self.attempt, growing_at=self.now, leaving=None)
        else:
            self.attempt = replace(self.attempt, coming=frozenset())

    def leaves(self, move: Move) -> None:
        """Nobody goes before its work is saved, or its time is over, but whoever can't save it any more."""
        told = self.attempt.end
        assert told is not None
        assert move.end is not None
        if move.end.why != told.why:
            assert move.end.outcome in {Outcome.SUCCEEDED, Outcome.DELETED}
            return
        assert (move.end.outcome, move.end.charged, move.end.not_before) == (Outcome.REQUEUE, False, 0.0)
        self.saved(told.ask, move.end.ask)

    def saved(self, told: Ask | None, over: Ask | None) -> None:
        assert told is not None
        assert over is not None
        broken = any(key not in self.pods for key in KEYS if key not in self.attempt.done) or any(
            pod.deleting or pod.phase == "Failed" or self.places[NODE[key]] is Place.GONE
            for key, pod in self.pods.items()
        )
        assert over.answered == told.pods or self.now >= told.until or broken

    def finish(self, done: Done) -> None:
        assert done.pods
        assert all(self.pods[key].phase == "Succeeded" for key in done.pods), "only these are done"
        assert sorted(NODE[key] for key in done.pods) == sorted(
            p.node for p in done.part.placements for _ in range(p.pods)
        )
        self.attempt = self.attempt.without(done)
        assert self.attempt.placements, "it never holds nothing"

    def ended(self) -> None:
        end = self.attempt.end
        assert end is not None
        assert not holding(self.view)
        failures, late = self.workload.failures + end.charged, self.workload.late_starts + end.late
        self.workload = replace(self.workload, failures=failures, late_starts=late, not_before=end.not_before)
        if end.outcome is not Outcome.REQUEUE:
            self.over = end.outcome
        if end.why.reason is Reason.BACKOFF_LIMIT_EXCEEDED and self.job is not None:
            assert end.outcome is Outcome.FAILED
            assert self.workload.failures == self.job.backoff_limit + 1

    def look(self) -> None:
        """Make all moves that are due."""
        for _ in range(4):
            move = next_move(self.view)
            if move is None:
                return
            assert next_move(self.view) == move
            self.apply(move)
        assert next_move(self.view) is None

    def state(self) -> AttemptState:
        return self.attempt.state

    def change(self, key: PodKey, **changes: object) -> None:
        if key in self.pods and not self.pods[key].ended:
            self.pods[key] = replace(self.pods[key], **changes)  # type: ignore[arg-type]
        self.look()

    # The executor

    @precondition(lambda self: self.state() is RESERVED)
    @rule(key=keys)
    def create(self, key: PodKey) -> None:
        pod = Pod(
            f"{self.attempt.number}{key}", "team", f"g-{key[0]}-{key[1]}", "1", gated=True, role=key[0], index=key[1]
        )
        self.pods.setdefault(key, pod)
        self.look()

    @precondition(lambda self: self.state() is RESERVED)
    @rule()
    def create_all(self) -> None:
        for key in KEYS:
            self.create(key)
        if self.state() is RESERVED:
            self.apply(Move("g", self.attempt.number, CREATED))
            self.look()

    @precondition(lambda self: self.state() is RESERVED)
    @rule(permanent=st.booleans())
    def refuse(self, permanent: bool) -> None:  # noqa: FBT001
        self.apply(Move("g", self.attempt.number, ENDING, refused(self.view, "g-a-0", "no", permanent=permanent)))
        self.look()

    @precondition(lambda self: self.state() is CREATED)
    @rule()
    def ungate_all(self) -> None:
        for key in KEYS:
            self.change(key, gated=False)
        if self.state() is CREATED:
            self.apply(Move("g", self.attempt.number, UNGATED))
            self.look()

    @precondition(lambda self: self.state() is RESERVED)
    @rule()
    def come_up(self) -> None:
        """Start all the way, which chance alone seldom does."""
        self.create_all()
        if self.state() is CREATED:
            self.ungate_all()
        self.all_get_ready()

    @precondition(lambda self: self.state() is ENDING)
    @rule(key=keys)
    def remove(self, key: PodKey) -> None:
        self.pods.pop(key, None)
        self.look()

    @precondition(lambda self: self.state() is RUNNING and not self.shrinks and all_ready(self.attempt, self.pods))
    @precondition(lambda self: not {("a", 0), ("a", 1)} & self.attempt.done)
    @rule()
    def shrink(self) -> None:
        """A preemptor takes the second pod of the first role."""
        self.shrinks += 1
        part = last(self.attempt.whole, {"a": 1})
        assert [p.node for p in part.placements] == [NODE["a", 1]]
        self.attempt = self.attempt.shrinking(
            give_up(self.attempt, self.job, why(Reason.RUNNING, pods=3), part, self.now)
        )
        self.look()

    @precondition(lambda self: self.state() is RUNNING)
    @rule()
    def evict(self) -> None:
        """Somebody needs its room."""
        end = leave(self.attempt, self.job, why(Reason.QUEUE_DRAINED, queue="q"), self.now)
        self.attempt = replace(self.attempt, state=end.first, end=end)
        self.look()

    @rule(key=keys, late=st.booleans())
    def report(self, key: PodKey, late: bool) -> None:  # noqa: FBT001
        """A pod has saved its work, for this ask or for an earlier one."""
        ask = self.attempt.asking
        name = ask.id(self.attempt.number) if ask and not late else ""
        self.reports[key] = Report(name, Checkpoint(self.now)).after(self.reports.get(key))
        self.look()

    @precondition(lambda self: self.state() is SHRINKING)
    @rule()
    def remove_what_leaves(self) -> None:
        self.pods.pop(("a", 1), None)
        self.look()

    @precondition(lambda self: self.state() is RUNNING and self.shrinks > self.growths)
    @precondition(lambda self: not {("a", 0), ("a", 1)} & self.attempt.done)
    @rule()
    def grow(self) -> None:
        """It gets that pod back; the one that it had may be there still, if it has ended."""
        self.growths += 1
        self.attempt = self.attempt.growing(Portion((PLACEMENTS[1],)), self.now)
        assert coming(self.attempt) == {("a", 1): NODE["a", 1]}
        self.look()

    @precondition(lambda self: self.state() is RUNNING and self.job is not None and self.job.replaces_lost_pods)
    @rule(place=st.sampled_from([Place.GOOD, Place.CLOSED, Place.GONE]), found=st.booleans())
    def lose_the_second(self, place: Place, found: bool) -> None:  # noqa: FBT001
        self.places[self.home["a", 1]] = place
        self.change(("a", 1), deleting=True, disrupted="drained")
        if loss(self.view) is not None:
            self.repair(found or place is Place.GOOD)

    @precondition(lambda self: loss(self.view) is not None)
    @rule(found=st.booleans())
    def repair(self, found: bool) -> None:  # noqa: FBT001
        """A cycle has a place for the lost pods, on a node of their own or the one that they had, or has none."""
        lost = loss(self.view)
        assert lost is not None
        assert self.state() is RUNNING
        assert lost.pods < set(KEYS), "some run on"
        if not found or lost.pods != {("a", 1)}:
            self.irreparable = True
            self.look()
            assert self.state() is not RUNNING, "then it goes back whole"
            return
        self.repairs += 1
        [place] = [p for p in self.attempt.placements if (p.role, p.node) == ("a", self.home["a", 1])]
        left = () if self.places[place.node] is Place.GOOD else (place,)
        new = tuple(replace(p, node="n3" if p.node == "n2" else "n2", first=1) for p in left)
        told = why(Reason.REPLACING, there=2, pods=3, nodes=place.node, cause=str(lost.why))
        self.attempt = self.attempt.repairing(Repair(lost.pods, left, new, told), self.now)
        self.home |= dict.fromkeys(lost.pods, new[0].node) if new else {}
        self.look()

    @precondition(lambda self: self.state() is REPAIRING)
    @rule()
    def remove_what_is_left(self) -> None:
        for pod in holding(self.view):
            self.pods.pop((pod.role, pod.index))
        self.look()
        assert self.state() is not REPAIRING

    @precondition(lambda self: self.state() is GROWING)
    @rule()
    def create_what_comes(self) -> None:
        self.pods.setdefault(("a", 1), Pod(f"{self.growths}{self.repairs}a1", "team", "g-a-1", "1", role="a", index=1))
        self.look()

    @precondition(lambda self: self.state() is ENDED and self.over is None)
    @rule()
    def start_again(self) -> None:
        self.places = dict.fromkeys(self.places, Place.GOOD)
        self.now = max(self.now, self.workload.not_before)
        self.admit()
        self.look()

    # The cluster

    @rule(key=keys)
    def bind(self, key: PodKey) -> None:
        if key in self.pods and not self.pods[key].gated:
            self.change(key, node=self.home[key])

    @rule()
    def all_get_ready(self) -> None:
        for key, pod in list(self.pods.items()):
            if not pod.gated and not pod.ended:
                self.pods[key] = replace(pod, node=self.home[key], phase="Running", ready=True)
        self.look()

    @rule(key=keys, phase=st.sampled_from(["Succeeded", "Failed"]))
    def end(self, key: PodKey, phase: str) -> None:
        if key in self.pods and self.pods[key].node:
            self.change(key, phase=phase, ready=False, exit_code=int(phase == "Failed"))

    @rule(key=keys)
    def delete_pod(self, key: PodKey) -> None:
        self.change(key, deleting=True)

    @rule(key=keys)
    def lose_pod(self, key: PodKey) -> None:
        self.pods.pop(key, None)
        self.look()

    @rule(key=keys)
    def disrupt(self, key: PodKey) -> None:
        self.change(key, disrupted="drained", deleting=True)

    @rule(name=st.sampled_from(["n1", "n2"]), place=st.sampled_from(Place))
    def turn(self, name: str, place: Place) -> None:
        self.places[name] = place
        self.look()

    @rule(seconds=st.sampled_from([1.0, 100.0, 300.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.look()

    @rule()
    def edit(self) -> None:
        if self.job is not None:
            self.job = replace(self.job, generation=self.job.generation + 1)
        self.look()

    @rule(gone=st.booleans())
    def delete_job(self, gone: bool) -> None:  # noqa: FBT001
        self.job = None if gone or self.job is None else replace(self.job, deleting=True)
        self.look()

    @invariant()
    def nothing_is_overdue(self) -> None:
        if self.state() not in {ENDING, ENDED} and self.job is not None and not self.job.deleting:
            due = deadline(self.attempt, self.job)
            assert due is None or due > self.now

    @invariant()
    def what_is_done_is_given_back_and_no_longer_missed(self) -> None:
        if self.state() in UNDER_WAY and self.attempt.whole.pods > 1 and loss(self.view) is None:
            there = members(self.attempt, self.pods)
            assert len(there) == self.attempt.whole.pods - len(coming(self.attempt))
            assert not any(pod.phase == "Succeeded" for pod in there)

    @invariant()
    def the_room_is_held_while_pods_run(self) -> None:
        if self.state() is ENDED and self.attempt.end is not None:
            assert all(pod.ended for pod in self.pods.values())

    def teardown(self) -> None:
        """Delete the job: it comes to its end as soon as its pods are gone."""
        if hasattr(self, "attempt") and self.state() is not ENDED:
            self.job = None
            self.look()
            self.pods = {}
            self.look()
            assert self.state() is ENDED


GangMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestAnyHistory = GangMachine.TestCase
