"""Runs a scenario in virtual time: the leader's rounds as they are, against a virtual cluster and the ledger's checks."""

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from queuectl.control import status, turn
from queuectl.control.world import World
from queuectl.core.defrag import proposals
from queuectl.core.lifecycle import BackOff, deadline, members
from queuectl.core.snapshot import Policy
from queuectl.model.checkpoint import Checkpoint
from queuectl.model.lifecycle import (
    LEAVING,
    STEP_OF,
    UP,
    Attempt,
    AttemptState,
    End,
    Leave,
    Move,
    Outcome,
    Shrink,
    Workload,
    WorkloadState,
)
from queuectl.model.objects import MoveRequest
from queuectl.model.plan import Admission, Portion, Repair
from queuectl.model.policy import Amounts
from queuectl.model.reasons import Why
from queuectl.model.suspects import Healing, Offence
from queuectl.simulate.accounts import Accounts, OverbookedError
from queuectl.simulate.cluster import Cluster
from queuectl.simulate.form import EventForm, JobForm, Scenario

MAX_ROUNDS = 500  # in one instant; a round admits hundreds
MAX_INSTANTS = 100_000

PAYS_WITHIN = 3600.0  # seconds, of moves that are asked for; what queuectl defrag takes by default

OVERTAKEN = "Overtaken"  # it had not started yet, so nobody is evicted
PREEMPTED = "Preempted"  # somebody takes its room
EVICTED = "Evicted"  # nobody does
SHRUNK = "Shrunk"  # it gives up a part of its room
GROWING = "Growing"  # it gets a part of its room in addition
GROWN = "Grown"  # and has it
REPAIRING = "Repairing"  # pods that it has lost are replaced
REPAIRED = "Repaired"  # and it is whole again
DONE = "Done"  # some of its pods
ASKED = "Asked"  # its pods, before some of them go; what came of it
REFUSED = "Refused"  # nobody moves to make room for it
REQUEUED = "Requeued"
RUNNING = "Running"


class RestlessError(Exception):
    """Decisions follow upon decisions without end. A defect, never the user's fault."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the timeline. ``job`` is empty for what happens to the cluster."""

    at: float
    job: str
    what: str
    why: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """Where a job is: its phase, why, and how many pods of it are ready."""

    phase: str
    code: str
    why: str
    pods: int


@dataclass
class Run:
    """What became of a scenario."""

    timeline: list[Entry] = field(default_factory=list)
    looks: dict[float, dict[str, State]] = field(default_factory=dict)  # at the times that are asked for
    faults: list[str] = field(default_factory=list)  # defects that showed

    def of(self, *what: str) -> list[Entry]:
        """Return the lines of these kinds."""
        return [entry for entry in self.timeline if entry.what in what]


def run(scenario: Scenario) -> Run:
    """Run a scenario to its end: ``until``, or when nothing is left to happen."""
    return Clockwork(scenario).run()


class Clockwork:
    """One scenario on its way."""

    def __init__(self, scenario: Scenario) -> None:
        """Write down what is to happen; nothing has yet."""
        self.now = 0.0
        self.result = Run()
        self._until = scenario.until
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._look_at: set[float] = set()
        self._policy = Policy(
            fair_sharing=tuple(scenario.policy.fair_sharing), usage_half_life=scenario.policy.usage_half_life_seconds
        )
        self._healing = Healing(first=scenario.policy.suspect_seconds)
        self.cluster = Cluster(scenario, lambda seconds, action: self.at(self.now + seconds, action))
        self.accounts = Accounts()
        self.world = World(BackOff(), self._policy, self._healing)
        self.cluster.connect(self.world)
        self._finished: dict[str, Workload] = {}  # those that the world has forgotten
        self._held: list[tuple[str, Amounts, float, float]] = []  # queue, what of its quota, since and until when
        self._offences: list[Offence] = []
        self._reported: dict[str, Move] = {}
        self._steps: dict[str, None] = {}
        self._ancestors: Mapping[str, Sequence[str]] = {}  # of the queues to which the last cycle admits
        self._plan_again = True
        self._told: dict[str, str] = {}  # job → the last reason that it was told to wait for
        for event in scenario.events:
            self.at(event.at, lambda event=event: self._happen(event))  # type: ignore[misc]
        for form in scenario.jobs:
            for name in form.names:
                self.at(form.at, lambda form=form, name=name: self._submit(form, name))  # type: ignore[misc]
        for want in scenario.want:
            if want.at is not None:
                self._look_at.add(want.at)
                self.at(want.at, lambda: None)
            for second in range(want.cycles) if want.rest_after is not None else ():
                self.at((want.rest_after or 0.0) + second + 1, self.plan_again)

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Let something happen at a time, after all that was written down for it before."""
        heapq.heappush(self._agenda, (time, next(self._order), action))

    def plan_again(self) -> None:
        """Have a cycle although nothing has changed."""
        self._plan_again = True

    def run(self) -> Run:
        """Go on until the end."""
        for _ in range(MAX_INSTANTS):
            due = self._next()
            if due is None or (self._until is not None and due > self._until):
                break
            self.now = max(self.now, due)
            while self._agenda and self._agenda[0][0] <= self.now:
                heapq.heappop(self._agenda)[2]()
            try:
                self.settle()
            except (OverbookedError, RestlessError) as error:
                self.result.faults.append(f"{self.now:g} s: {error}")
                break
            if self.now in self._look_at:
                self.result.looks[self.now] = self.states()
        else:
            self.result.faults.append(f"{self.now:g} s: it does not come to an end by itself; add until")
        last = self.states()
        for time in self._look_at - self.result.looks.keys():
            self.result.looks[time] = last
        return self.result

    def states(self) -> dict[str, State]:
        """Return where each job is that was ever submitted."""
        workloads = {**self._finished, **self.world.workloads}
        return {uid: self._state(workload) for uid, workload in workloads.items()}

    def settle(self) -> None:
        """Let the controller do all that is due now. Raises OverbookedError or RestlessError."""
        self.world.nodes.judge_faults(self.now)
        self.world.touched |= self.world.overdue(self.now)
        for _ in range(MAX_ROUNDS):
            self._round()
            if not (self.world.touched or self.world.changes or self._reported or self._plan_again):
                break
        else:
            raise RestlessError(f"no rest after {MAX_ROUNDS} rounds")
        self._tell_waits()

    def restart(self) -> None:
        """Begin a new term with what the ledger and the API server hold, and nothing else."""
        workloads = [
            w
            for w in self.world.workloads.values()
            if w.state is not WorkloadState.FINISHED or w.uid in self.cluster.jobs
        ]
        attempts = list(self.world.attempts.values())
        self._keep_finished()
        self.world = World(BackOff(), self._policy, self._healing)
        self.cluster.connect(self.world)
        for queue, amounts, since, until in self._held:
            self.world.history.begin(queue, amounts, since)
            self.world.history.end(queue, amounts, until)
        self.world.faults.recall({}, workloads)
        self.world.load(workloads, attempts, max((w.seq for w in workloads), default=0))
        self.world.suspects.load(self._offences)
        self._reported = {}
        self._steps = dict.fromkeys(self.world.attempts)
        self._plan_again = True

    # One round

    def _round(self) -> None:
        reported, self._reported = self._reported, {}
        for uid, checkpoint in self.world.saves.take(self.now).items():
            self.world.saved(uid, checkpoint)
        moves, leaving = turn.due(self.world, reported, self.now)
        offences, _ = self.world.suspects.take()
        self.world.suspects.keep(offences)
        self._offences += offences
        if self.world.suspects.due(self.now):
            self.world.nodes.judge_suspects(self.now)
        for move in moves:
            self._move(move)
        for uid, end in leaving.items():
            self._log(uid, "Deleted", end.why)
            self._finished[uid] = replace(
                self.world.workloads[uid], state=WorkloadState.FINISHED, last_end=end, finished_at=self.now
            )
            self.world.forget(uid)
        wake_at = self.world.plan.wake_at
        if self.world.changes or self._plan_again or (wake_at is not None and wake_at <= self.now):
            self._cycle()
        steps, self._steps = self._steps, {}
        for uid in steps:
            self._step(uid)
        for uid in [uid for uid, job in self.cluster.jobs.items() if job.deleting and self.world.is_over(uid)]:
            self._keep_finished()
            self.cluster.forget(uid)

    def _move(self, move: Move, leaves: str = "Stopping") -> None:
        before = self.world.attempts[move.uid]
        if move.to is AttemptState.RESERVED and not self.accounts.arrive(before):
            return
        self.world.moved(move, self.now)
        self._steps[move.uid] = None
        if move.done is not None or move.asked is not None:
            self._go_on(before, move)
            return
        match move.to:
            case AttemptState.RESERVED:
                self._log(move.uid, "Admitted", self._state(self.world.workloads[move.uid]).why, "Admitted")
            case AttemptState.SHRINKING if move.shrink is not None:
                self.accounts.give_up(move.uid, move.shrink.part)
                self._log(move.uid, SHRUNK, move.shrink.why)
            case AttemptState.RUNNING | AttemptState.GROWING if before.leaving:
                self.accounts.shrink(move.uid)
                self._has_held(before, before.leaving)
            case AttemptState.RUNNING:
                what = REPAIRED if before.replaces else GROWN if before.coming else RUNNING
                self._log(move.uid, what, self._state(self.world.workloads[move.uid]).why, "Running")
                self.cluster.started(before)
            case AttemptState.CHECKPOINTING | AttemptState.ENDING if move.end is not None:
                self._log(move.uid, leaves, move.end.told(before.end))
            case AttemptState.ENDED:
                self.accounts.end(before, move.left)
                for part in before.parts if before.holds else ():
                    self._has_held(before, part)
                self._log_end(move.uid, before.end)

    def _go_on(self, before: Attempt, move: Move) -> None:
        """Tell of a move that leaves an attempt in its state."""
        if move.done is not None:
            self.accounts.give_back(move.uid, move.done.part)
            self._has_held(before, move.done.part)
            self._log(move.uid, DONE, self.world.attempts[move.uid].progress)
        elif move.asked is not None:
            self._log(move.uid, ASKED, move.asked.outcome)

    def _has_held(self, attempt: Attempt, part: Portion) -> None:
        """Keep on record what an attempt holds no more."""
        if self._policy.usage_half_life:
            queue = self.world.workloads[attempt.uid].queue
            self._held.append((queue, part.quota, attempt.admitted_at, self.now))

    def _cycle(self) -> None:
        self._plan_again = False
        self._save()
        cycle = turn.prepare(self.world, self.now)
        decided = turn.decide(self.world, cycle, self.now)
        self.accounts.observe(cycle, decided.nodes)
        self._ancestors = decided.ancestors
        for move in decided.evictions:
            self._move(move, EVICTED)
        for uid, repair in decided.plan.repairs.items():
            self._repair(uid, repair)
        for preempt, generation, leaves in decided.preemptions:
            self._claim(self._attempt(preempt.admission, generation, victims=leaves), leaves)
        for admission, generation in decided.admissions:
            attempt = self._attempt(admission, generation)
            self.accounts.begin(attempt, self._charged(attempt))
            self.world.admitted(attempt)
            self._steps[attempt.uid] = None
            self._log(attempt.uid, "Admitted", self._state(self.world.workloads[attempt.uid]).why, "Admitted")
        for uid, part in decided.plan.growths.items():
            self._grow(uid, part)
        for request, cause in decided.plan.refusals.items():
            self._log(request.uid, REFUSED, cause)
            for uid in self.world.moves.refuse(request):
                self.cluster.answer(uid)
        self._plan_again = turn.plan_again(self.world, decided.plan, ())
        self.world.plan = decided.plan
        self.world.irreparable(decided.plan.irreparable)

    def _repair(self, uid: str, repair: Repair) -> None:
        self.accounts.repair(uid, repair)
        self.world.repairs(uid, repair, self.now)
        self._steps[uid] = None
        self._log(uid, REPAIRING, repair.why)

    def _grow(self, uid: str, part: Portion) -> None:
        self.accounts.grow(uid, part)
        self._has_held(self.world.attempts[uid], Portion((), {cell: -amount for cell, amount in part.quota.items()}))
        self.world.grows(uid, part, self.now)
        self._steps[uid] = None
        self._log(uid, GROWING, self._state(self.world.workloads[uid]).why, "Growing")

    def _save(self) -> None:
        """Take in the checkpoints that running jobs have made since the last cycle."""
        for uid, attempt in list(self.world.attempts.items()):
            every = self.cluster.checkpoints(uid)
            if every and attempt.state in UP and attempt.running_at is not None:
                at = attempt.running_at + (self.now - attempt.running_at) // every * every
                self.world.saved(uid, Checkpoint(at, attempt=attempt.number))

    def _claim(self, attempt: Attempt, leaves: Mapping[str, Leave]) -> None:
        victims = [
            (self.world.attempts[uid], leave.part if isinstance(leave, Shrink) else None)
            for uid, leave in leaves.items()
        ]
        self.accounts.begin(attempt, self._charged(attempt), victims)
        for victim, _ in victims:
            leave = leaves[victim.uid]
            if isinstance(leave, Shrink):
                self._log(victim.uid, SHRUNK, leave.why)
                self.world.shrinks(victim.uid, leave)
            else:
                if victim.state not in LEAVING:
                    self._log(victim.uid, PREEMPTED if victim.holds else OVERTAKEN, leave.why)
                self.world.evicted(victim.uid, leave, self.now)
            self._steps[victim.uid] = None
        self.world.admitted(attempt)
        self._log(attempt.uid, "Promised", self._state(self.world.workloads[attempt.uid]).why, "WaitingForVictims")

    def _charged(self, attempt: Attempt) -> list[str]:
        queue = self.world.workloads[attempt.uid].queue
        return [queue, *self._ancestors.get(queue, ())]

    def _attempt(self, admission: Admission, generation: int, victims: Mapping[str, Leave] | None = None) -> Attempt:
        """Return an attempt as the ledger would begin it."""
        taken = [self.world.attempts[uid] for uid in victims or ()]
        return Attempt(
            uid=admission.uid,
            number=self.world.workloads[admission.uid].attempt + 1,
            state=AttemptState.CLAIMED if victims else AttemptState.RESERVED,
            generation=generation,
            placements=admission.placements,
            admitted_at=self.now,
            quota=admission.quota,
            holds=not victims,
            victims=tuple(sorted((one.uid, one.number) for one in taken if one.holds)),
        )

    def _step(self, uid: str) -> None:
        view = self.world.view(uid, self.now)
        step = STEP_OF.get(view.attempt.state) if view else None
        if view is None or step is None:
            return
        move = self.cluster.carry_out(step, view)
        if move is not None:
            self._reported[uid] = move

    # Inside

    def _next(self) -> float | None:
        """Return when something is due next."""
        times = [self._agenda[0][0]] if self._agenda else []
        if self.world.suspects.wake_at is not None:
            times.append(self.world.suspects.wake_at)
        if self.world.plan.wake_at is not None:
            times.append(self.world.plan.wake_at)
        if (at := self.world.faults.ends(self.now)) is not None:
            times.append(at)
        for uid, attempt in self.world.attempts.items():
            job = self.world.jobs.get(uid)
            at = deadline(attempt, job) if job else None
            if at is not None:
                times.append(at)
        times += [at for at, _ in self.world.given_up() if self.now < at < inf]
        return min(times, default=None)

    def _submit(self, form: JobForm, name: str) -> None:
        self.cluster.submit(form, name, self.now)
        self.result.timeline.append(
            Entry(self.now, name, "Submitted", f"queue {form.queue}, priority {form.priority or 0}")
        )

    def _happen(self, event: EventForm) -> None:
        if event.verb == "controller_restart":
            self.restart()
            done = True
        elif event.defrag is not None:
            done = self._defrag(event.defrag)
        elif event.window is not None:
            done = self.cluster.announce(event.window, self.now)
        else:
            done = self.cluster.happen(event, self.now)
        told = event.model_dump(by_alias=True, exclude_none=True, exclude={"at"}, mode="json")
        [(verb, value)] = told.items()
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        text = verb if value is True else f"{verb} {value}"
        self.result.timeline.append(
            Entry(
                self.now, "", "Event" if done else "Ignored", text if done else f"{text}: there is nothing to do it to"
            )
        )

    def _defrag(self, name: str) -> bool:
        """Ask for the moves that make room for a waiting job; False when there are none."""
        self._save()
        snapshot, gangs = self.world.snapshot(self.now), self.world.gangs.movable()
        found = proposals(snapshot, gangs, self.now, PAYS_WITHIN, only={name})
        for proposal in found:
            moves = tuple(sorted((move.gang.uid, move.gang.attempt) for move in proposal.moves))
            job = f"{proposal.gang.namespace}/{name}"
            self.cluster.ask(MoveRequest(name, job, moves, PAYS_WITHIN, until=self.now + 1, by="an admin"))
        return bool(found)

    def _state(self, workload: Workload) -> State:
        uid = workload.uid
        attempt = self.world.attempts.get(uid)
        wait = self.world.gangs.problem(uid) or self.world.plan.waits.get(uid)
        pods = self.world.pods.get((uid, attempt.number), {}) if attempt else {}
        cause = status.reason(
            workload,
            attempt,
            wait,
            self.world.gangs.leaving(attempt) if attempt else (),
            self.world.answers(attempt) if attempt else 0,
            pods=pods,
        )
        there = members(attempt, pods) if attempt else ()
        return State(status.phase(workload, attempt), cause.code, str(cause), sum(pod.ready for pod in there))

    def _tell_waits(self) -> None:
        for uid, workload in self.world.workloads.items():
            if workload.state is not WorkloadState.QUEUED:
                self._told.pop(uid, None)
                continue
            state = self._state(workload)
            if self._told.get(uid) != state.code:
                self._told[uid] = state.code
                self._log(uid, "Waiting", state.why, state.code)

    def _log_end(self, uid: str, end: End | None) -> None:
        if end is not None:
            self._log(uid, REQUEUED if end.outcome is Outcome.REQUEUE else end.outcome.value, end.why)

    def _log(self, job: str, what: str, cause: Why | str, code: str = "") -> None:
        code = cause.code if isinstance(cause, Why) else code
        self.result.timeline.append(Entry(self.now, job, what, str(cause), code))

    def _keep_finished(self) -> None:
        self._finished |= {
            uid: workload for uid, workload in self.world.workloads.items() if workload.state is WorkloadState.FINISHED
        }
