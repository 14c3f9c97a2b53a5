"""Gangs as a cycle sees them: jobs, with what PriorityClasses, the ledger and their pods make of them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

from queuectl.control.nodes import Nodes
from queuectl.control.pods import Pods
from queuectl.core.elastic import as_reserved, last, pods_of, spare
from queuectl.core.lifecycle import Loss, all_ready
from queuectl.core.snapshot import Broken, Elastic
from queuectl.model.lifecycle import Attempt, AttemptState, Workload, WorkloadState, active
from queuectl.model.objects import Gang, Job, Place, PriorityClass
from queuectl.model.plan import Eviction, Portion
from queuectl.model.policy import Cause
from queuectl.model.reasons import Reason, Why, why
from queuectl.model.work import Work

MAX_LATE_STARTS = 3  # in a row, after which a job takes from nobody until it has run
State = tuple[int, int]  # of things, as far as it comes from outside


class Gangs:
    """Who waits, and for whom; who may be taken; who could grow, be repaired or move."""

    def __init__(
        self,
        jobs: Mapping[str, Job],
        workloads: Mapping[str, Workload],
        attempts: Mapping[str, Attempt],
        pods: Pods,
        nodes: Nodes,
    ) -> None:
        """Start without any. All by workload uid; ``attempts``: the active ones."""
        self._jobs = jobs
        self._workloads = workloads
        self._attempts = attempts
        self._pods = pods
        self._nodes = nodes
        self.priorities: dict[str, PriorityClass] = {}
        self._winners: dict[str, State] = {}  # who has preempted, and in which state of things
        self._small: set[str] = set()  # workloads of attempts with fewer pods than they ask for

    def on_priority_class(self, old: PriorityClass | None, new: PriorityClass | None) -> set[str]:
        """Take in a changed PriorityClass; return the workloads that it concerns."""
        if new is not None:
            self.priorities[new.name] = new
        elif old is not None:
            self.priorities.pop(old.name, None)
        name = (new or old).name  # type: ignore[union-attr]  # one of both is given
        return {uid for uid, job in self._jobs.items() if job.priority_class == name}

    def of(self, uid: str) -> Gang:
        """Return the gang of a job that the ledger knows."""
        job, workload = self._jobs[uid], self._workloads[uid]
        given = self._class_of(job)
        return job.gang.but(
            priority=workload.priority,
            preemptible=given.preemptible,
            preempts=given.preempts and uid not in self._winners and workload.late_starts < MAX_LATE_STARTS,
            waits_since=workload.requeued_at,
            seq=workload.seq,
            submitted_at=workload.submitted_at,
            not_before=workload.not_before,
            last_end=str(workload.last_end.why) if workload.last_end else "",
        )

    def priority(self, job: Job) -> int:
        """Return a job's priority, by its class or its own word."""
        return self._class_of(job).value

    def preemptible(self, attempt: Attempt) -> bool:
        """Tell whether others may take from an attempt: by the spec that it was planned for, not by a later one."""
        job = self._jobs.get(attempt.uid)
        return job is None or job.generation != attempt.generation or self._class_of(job).preemptible

    def problem(self, uid: str) -> Why | None:
        """Return what keeps a waiting job out of the cycle altogether, if anything."""
        job = self._jobs.get(uid)
        if job is None or job.deleting:
            return why(Reason.DELETED)
        if job.priority_class and job.priority_class not in self.priorities:
            return why(
                Reason.MISCONFIGURED,
                field="spec.priorityClassName",
                problem=f"PriorityClass {job.priority_class} does not exist; create it or name another",
            )
        workload = self._workloads.get(uid)
        end = workload.last_end if workload else None
        if end is not None and end.barred == job.generation:
            return end.why
        return job.problem

    def waits(self, uid: str) -> bool:
        """Tell whether a workload is for the cycle to let in."""
        workload = self._workloads.get(uid)
        return workload is not None and workload.state is WorkloadState.QUEUED and self.problem(uid) is None

    def won(self, uid: str, state: State) -> None:
        """Take in that a workload preempts others."""
        self._winners[uid] = state

    def forgive(self, state: Callable[[str], State], *, all_of_them: bool) -> set[str]:
        """Let those preempt again for whom something has changed from outside since they did; return who does so.

        Else rules that don't agree could have gangs evict each other in a circle for ever: one takes back what its
        queue owns, a higher priority of its own queue takes that, and a third takes it by its fair share.

        ``state``: as it is now for a queue.
        """
        forgiven = set()
        for uid, before in self._winners.items():
            workload = self._workloads.get(uid)
            if all_of_them or workload is None or state(workload.queue) != before:
                forgiven.add(uid)
        for uid in forgiven:
            del self._winners[uid]
        return forgiven

    def measure(self, attempt: Attempt) -> bool:
        """Look how many pods an attempt has; tell whether that can change, for it is elastic."""
        job = self._jobs.get(attempt.uid)
        if job is None or all(role.least is None for role in job.gang.roles):
            return False
        small = attempt.whole.pods < sum(role.pods for role in job.gang.roles)
        (self._small.add if small else self._small.discard)(attempt.uid)
        return True

    def ended(self, uid: str) -> None:
        """Take in that a workload's attempt has ended."""
        self._small.discard(uid)

    def whole(self, attempt: Attempt) -> Job | None:
        """Return the job of an attempt if it is an elastic one that runs, and all of its pods are ready."""
        job = self._jobs.get(attempt.uid) if attempt.state is AttemptState.RUNNING else None
        if job is None or all(role.least is None for role in job.gang.roles):
            return None
        return job if all_ready(attempt, self._pods.seen(attempt)) else None

    def elastic(self, attempt: Attempt) -> Portion | None:
        """Return the pods of an attempt that it can give up and run on; only when all of its pods are ready."""
        job = self.whole(attempt)
        if job is None:
            return None
        part = last(attempt.whole, spare(job.gang.roles, attempt))
        return part if part.placements else None

    def lacking(self) -> list[Elastic]:
        """Return who could grow: who lacks pods of those that it asks for, and has not tried in vain.

        Not where some are done already, or others would do instead: then nobody can say how many it should have.
        """
        found = []
        for uid in self._small:
            attempt, job = self._attempts[uid], self.whole(self._attempts[uid])
            if job is None or job.deleting or job.generation != attempt.generation or attempt.done or attempt.claimed:
                continue
            failed = attempt.shrunk is not None and attempt.shrunk.reason is Reason.GROWTH_FAILED
            if not failed and not job.gang.alternatives:
                gang = self.of(uid)
                gang = gang.but(roles=as_reserved(gang.roles, attempt.placements))
                found.append(Elastic(gang, attempt.whole, _over_at(attempt, job)))
        return found

    def broken(self, uid: str, loss: Loss, now: float) -> Broken:
        """Return a gang that has lost pods. ``now``: Unix seconds."""
        attempt, job, gang = self._attempts[uid], self._jobs[uid], self.of(uid)
        pods, places = pods_of(attempt.placements), self._nodes.places(attempt, job)
        roles = as_reserved((role for role in gang.roles if role.name in pods), attempt.placements)
        roles = tuple(replace(role, pods=pods[role.name]) for role in roles)
        good = frozenset(node for node, place in places.items() if place is Place.GOOD)
        closed = frozenset(node for node, place in places.items() if place in {Place.CLOSED, Place.GONE})
        until, starts_by = _over_at(attempt, job), now + gang.lifetime.start
        return Broken(replace(gang, roles=roles), attempt.whole, loss.pods, good, closed, loss.why, until, starts_by)

    def leaving(self, attempt: Attempt) -> list[Eviction]:
        """Return those whom a claim still waits for, as far as it is known of them."""
        result = []
        for uid, number in attempt.victims:
            victim, workload = active(self._attempts, (uid, number)), self._workloads.get(uid)
            if victim is None or workload is None:
                continue
            facts = victim.end.why.facts if victim.end else {}
            lost = Work(int(str(facts.get("gpu_seconds", 0))), int(str(facts.get("pod_seconds", 0))))
            name = f"{workload.namespace}/{workload.name}"
            part = victim.leaving
            result.append(Eviction(uid, Cause.QUEUE, name, workload.queue, workload.priority, lost, part=part))
        return result

    def movable(self) -> dict[str, Gang]:
        """Return the gangs that could move, by uid: with an attempt that was planned for the spec that they have now.

        A new attempt starts with all pods again, so those are left out of whose pods some are done; it costs what is
        not saved, so those are too that can't be asked to.
        """
        found = ((uid, self.to_move(uid, attempt.number)) for uid, attempt in self._attempts.items())
        return {uid: gang for uid, gang in found if gang is not None}

    def to_move(self, uid: str, number: int) -> Gang | None:
        """Return the gang of an attempt if that could move, as above."""
        job, attempt = self._jobs.get(uid), active(self._attempts, (uid, number))
        if job is None or attempt is None or attempt.done or job.saving is None:
            return None
        return job.gang if attempt.generation == job.generation else None

    def _class_of(self, job: Job) -> PriorityClass:
        """Return what holds for the job, by its class and its own word."""
        named = self.priorities.get(job.priority_class) if job.priority_class else None
        given = named or PriorityClass(job.priority_class, 0 if job.priority_class else job.gang.priority)
        return given if job.gang.preemptible or not given.preemptible else replace(given, preemptible=False)


def _over_at(attempt: Attempt, job: Job) -> float:
    """Return when a running attempt is over by its own limits, in Unix seconds."""
    return inf if job.max_run_seconds is None else (attempt.running_at or attempt.admitted_at) + job.max_run_seconds
