"""Any history of a virtual cluster keeps the promises of the design: the decisions are checked by counting anew."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from fractions import Fraction
from math import inf
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from queuectl.core.backlog import Backlog, Waits, pending_key
from queuectl.core.cycle import plan
from queuectl.core.elastic import numbered
from queuectl.core.lifecycle import members
from queuectl.core.usage import STEPS
from queuectl.model.lifecycle import (
    LEAVING,
    UNDER_WAY,
    Attempt,
    AttemptState,
    Leave,
    Move,
    Outcome,
    Shrink,
    Workload,
    WorkloadState,
)
from queuectl.model.objects import ANYWHERE, Place, QueueOrder
from queuectl.model.plan import Placement, Portion, Repair
from queuectl.model.policy import OverQuota, StopPolicy, VictimChoice, Within
from queuectl.model.reasons import Reason
from queuectl.model.resources import is_device, is_unannounced
from queuectl.simulate.clockwork import EVICTED, Clockwork
from queuectl.simulate.cluster import _key
from queuectl.simulate.form import GPU, ROLE, EventForm, JobForm, QuotaEdit, read
from tests.support.virtual import FLAVORS, QUEUES, clusters, jobs

STAYS_OUT = {Reason.QUOTA_TAKEN_BACK, Reason.QUEUE_DRAINED, Reason.MISCONFIGURED}
LIMITED = {Reason.EXCEEDS_LIMIT, Reason.MAX_RUNNING_REACHED, Reason.MAX_RESOURCES_REACHED}
NEVER = {Reason.EXCEEDS_MAX_QUOTA, Reason.EXCEEDS_OWN_QUOTA, Reason.NO_MATCHING_FLAVOR}
PASSED = NEVER | {Reason.HELD, Reason.BACK_OFF} | LIMITED
HOPELESS = NEVER | {Reason.EXCEEDS_CLUSTER, Reason.EXCEEDS_LIMIT}
Sums = Counter[tuple[str, str]]
Cell = tuple[str, str]


MOST_JOBS = 16  # of a history, and a few: what it takes to end grows with their square


class Watched(Clockwork):
    """Looks at each decision when it is made."""

    def _cycle(self) -> None:
        before = dict(self.world.attempts)
        self.taken: list[tuple[str, set[Cell]]] = []  # queue of a victim of another queue, where room was lacking
        self.used = {queue: in_queue(self, queue, later=True) for queue in self.world.queues}
        losses, places = dict(self.world.losses), {uid: self.places_left(uid) for uid in self.world.losses}
        super()._cycle()
        anywhere = [
            uid
            for uid in losses
            if self.world.jobs[uid].gang.roles[0].topology == ANYWHERE and not self._names_devices(uid)
        ]
        alone = len(losses) == 1 and not self.cluster._windows
        for uid in self.world._irreparable.intersection(anywhere) if alone else ():
            at = numbered(self.world.attempts[uid].placements)
            lost = [
                key
                for key in losses[uid].pods
                if self.world.nodes.places(self.world.attempts[uid], self.world.jobs[uid])[at[key].node] != Place.GOOD
            ]
            assert places[uid] < len(lost), "what can be replaced is"
        for uid in self.world.attempts.keys() - before.keys():
            self._assert_it_passed_nobody(uid)
            self._assert_it_borrows_only_if_it_may_be_taken(uid)
            life = self.world.jobs[uid].gang.lifetime
            self._assert_no_window_overlaps(uid, self.world.attempts[uid], self.now + life.start)
            self.used[self.world.workloads[uid].queue].update(self.world.attempts[uid].quota)
        self._assert_what_is_known_is_true()
        for queue, cells in self.taken:
            own = self.world.queues[queue].nominal
            assert any(self.used[queue][cell] > own.get(cell, 0) for cell in cells), f"{queue} uses only what it owns"

    def taken_at(self, node: str) -> float:
        """When maintenance takes a node; a time that is past while it has it."""
        return min((window.start for window in self.cluster._windows if node in window.nodes), default=inf)

    def _assert_no_window_overlaps(self, uid: str, part: Attempt | Portion, since: float, last: float = inf) -> None:
        """Maintenance takes no node before a job that runs ``since`` then is over, or has to stop anyway."""
        job = self.world.jobs[uid]
        end = min(inf if job.max_run_seconds is None else since + job.max_run_seconds, last)
        if job.gang.lifetime.movable:  # it is asked to save, and goes on elsewhere
            end = min(end, max(since, self.now))
        assert all(self.taken_at(p.node) >= end for p in part.placements), (uid, end)

    def _names_devices(self, uid: str) -> bool:
        """Tell whether claims name a gang's devices; then it is not repaired."""
        return any(is_device(name) for p in self.world.attempts[uid].placements for name, _ in p.requests)

    def _assert_what_is_known_is_true(self) -> None:
        """What a cycle takes over from the one before is what it would find out by itself."""
        snapshot = self.world.snapshot(self.now)
        anew = replace(snapshot, waiting=Backlog(snapshot.waiting), versions=None)
        kept = plan(snapshot, self.now)
        assert kept == plan(anew, self.now)
        assert isinstance(kept.waits, Waits)
        assert kept.waits.codes().total() == len(kept.waits)
        if not any(queue.preemption.wait_seconds for queue in self.world.queues.values()):
            assert kept.waits.codes() == Counter(wait.code for wait in kept.waits.values())

    def _assert_it_borrows_only_if_it_may_be_taken(self, uid: str) -> None:
        world = self.world
        queue = world.workloads[uid].queue
        kept: Sums = Counter()
        for attempt in world.attempts.values():
            mine = world.workloads[attempt.uid].queue == queue and not attempt.claimed
            if mine and attempt.uid in world.jobs and not world.jobs[attempt.uid].gang.preemptible:
                kept.update(attempt.quota)
        if not world.jobs[uid].gang.preemptible:
            own = world.queues[queue].nominal
            assert all(kept[cell] <= own.get(cell, 0) for cell in world.attempts[uid].quota)

    def _move(self, move: Move, leaves: str = "Stopping") -> None:
        if leaves == EVICTED:
            assert (move.end is None) is not (move.shrink is None), "it goes whole, or gives up a part"
            queue = self.world.queues[self.world.workloads[move.uid].queue]
            assert self.world.attempts[move.uid].state not in LEAVING, "nobody is told to go twice"
            assert queue.over_quota is OverQuota.TAKE_BACK or queue.stop is StopPolicy.HOLD_AND_DRAIN
        if move.to is AttemptState.RESERVED:
            self._assert_no_window_overlaps(move.uid, self.world.attempts[move.uid], self.now)
        if self.world.attempts[move.uid].state is AttemptState.CHECKPOINTING:
            self._assert_it_has_saved_or_cannot(move)
        super()._move(move, leaves)

    def _assert_it_has_saved_or_cannot(self, move: Move) -> None:
        told = self.world.attempts[move.uid].end
        assert told is not None
        assert told.ask is not None
        assert move.end is not None
        if move.end.why == told.why:
            assert move.end.ask is not None
            pods = self.world.pods.get((move.uid, move.attempt), {})
            lost = len(pods) < self.world.attempts[move.uid].whole.pods or any(
                pod.phase == "Failed" for pod in pods.values()
            )
            gone = any(p.node not in self.world.fleet.node_names() for p in self.world.attempts[move.uid].placements)
            assert move.end.ask.answered == told.ask.pods or self.now >= told.ask.until or lost or gone
        else:
            assert move.end.outcome in {Outcome.SUCCEEDED, Outcome.DELETED}

    def _assert_it_passed_nobody(self, uid: str) -> None:
        """Of a strict queue, only those who can't start whatever ends are passed."""
        world = self.world
        mine = world.workloads[uid]
        if world.queues[mine.queue].order is not QueueOrder.STRICT_FIFO:
            return
        for other in world.workloads.values():
            waits = other.state is WorkloadState.QUEUED and other.queue == mine.queue and other.uid in world.plan.waits
            if waits and pending_key(world.gangs.of(other.uid)) < pending_key(world.gangs.of(uid)):
                assert world.plan.waits[other.uid].reason in PASSED, (other, mine)

    def places_left(self, uid: str) -> int:
        """How many further pods of a job's only role there is room for in the flavor that it has."""
        job, flavor = self.world.jobs[uid], self.world.attempts[uid].placements[0].flavor
        [role] = job.gang.roles
        counts = self.world.fleet.free().pods(self.world.flavors[flavor], role.constraints, role.requests)
        return int(counts.sum())

    def _repair(self, uid: str, repair: Repair) -> None:
        attempt, job = self.world.attempts[uid], self.world.jobs[uid]
        assert attempt.state is AttemptState.RUNNING
        assert not attempt.claimed, "nobody waits for its room"
        assert job.replaces_lost_pods
        before, there = numbered(attempt.placements), self.world.pods.get((uid, attempt.number), {})
        self._assert_no_window_overlaps(uid, Portion(repair.found), *self._runs(uid, repair.left))
        super()._repair(uid, repair)
        now = self.world.attempts[uid]
        after, places = (
            numbered(now.placements),
            self.world.nodes.places(self.world.attempts[uid], self.world.jobs[uid]),
        )
        assert now.quota == attempt.quota, "it is charged what it was"
        assert repair.pods < before.keys() == after.keys()
        for key, p in before.items():
            if key not in repair.pods:
                assert after[key].node == p.node == there[key].node, "the others stay"
                assert not there[key].deleting
        assert all(places[after[key].node] is Place.GOOD for key in repair.pods)

    def _grow(self, uid: str, part: Portion) -> None:
        attempt, queue = self.world.attempts[uid], self.world.workloads[uid].queue
        assert attempt.state is AttemptState.RUNNING
        assert not attempt.claimed, "nobody waits for its room"
        assert all(self.world.queues[name].stop is StopPolicy.NONE for name in self.line(queue))
        since, last = self._runs(uid, ())
        end = min(last, since + (self.world.jobs[uid].max_run_seconds or inf))
        assert all(self.taken_at(p.node) >= end for p in part.placements)
        super()._grow(uid, part)
        after = numbered(self.world.attempts[uid].placements)
        before = numbered(attempt.placements)
        assert {key: after[key].node for key in before} == {key: p.node for key, p in before.items()}, "they stay"

    def _runs(self, uid: str, left: Collection[Placement]) -> tuple[float, float]:
        """Since when a gang runs, and when maintenance takes the first of its nodes on which any of its pods stay."""
        attempt = self.world.attempts[uid]
        assert attempt.running_at is not None
        stay = {p.node for p in attempt.placements} - {p.node for p in left}
        return attempt.running_at, min(map(self.taken_at, stay), default=inf)

    def _claim(self, attempt: Attempt, leaves: Mapping[str, Leave]) -> None:
        world = self.world
        mine = world.workloads[attempt.uid]
        victims = [world.attempts[uid] for uid in leaves]
        assert victims
        taken = [v for v in victims if not v.claimed and (v.holds or v.state is AttemptState.CLAIMED)]
        inherited = {key for claim in taken if not claim.holds for key in claim.victims}
        rest = [(victim.uid, victim.number) for victim in victims if victim not in taken]
        assert inherited.issuperset(rest), "two preemptors share no victim"
        assert not any(victim.leaving for victim in victims), "nor a part of one"
        for victim in taken:
            theirs = world.workloads[victim.uid]
            self._assert_it_may_be_taken(victim, mine)
            if self._goes_anyway(victim, mine):
                assert not isinstance(leaves[victim.uid], Shrink)
                continue
            if theirs.queue == mine.queue:
                newer = theirs.submitted_at >= mine.submitted_at
                equal = world.queues[mine.queue].preemption.within_queue is Within.LOWER_OR_NEWER_EQUAL_PRIORITY
                assert theirs.priority < mine.priority or (equal and newer and theirs.priority == mine.priority)
            else:
                self.taken.append((theirs.queue, set(attempt.quota)))
            leave = leaves[victim.uid]
            if isinstance(leave, Shrink):
                assert world.queues[mine.queue].preemption.victims is VictimChoice.LEAST_WORK_LOST
                assert victim.state is AttemptState.RUNNING
                assert victim.whole.has(leave.part)
        super()._claim(attempt, leaves)
        assert {uid for uid, _ in attempt.victims} == {victim.uid for victim in victims if victim.holds}
        assert self.waits_for_all_in_its_room(attempt)
        # With the victims gone it fits, on nodes and in quotas.
        room, on_node = self.node_room(), on_nodes(self, later=True)
        assert all(on_node[key] <= room[key] for key in node_parts(attempt))
        for queue in self.line(mine.queue):
            used = in_queue(self, queue, later=True)
            assert all(used[cell] <= self.most(queue, cell) for cell in attempt.quota), queue

    def _assert_it_may_be_taken(self, victim: Attempt, mine: Workload) -> None:
        """What was told to go for another reason may be; anybody else only when nothing protects it."""
        world = self.world
        if victim.state in LEAVING | {AttemptState.CLAIMED}:
            return
        job = world.jobs[victim.uid]
        assert job.gang.preemptible or job.generation != victim.generation
        protected = world.queues[world.workloads[victim.uid].queue].preemption.min_run_seconds
        since = self.now if victim.running_at is None else victim.running_at
        assert since + protected <= self.now
        waits_since = mine.submitted_at if mine.requeued_at is None else mine.requeued_at
        assert waits_since + world.queues[mine.queue].preemption.wait_seconds <= self.now

    def _goes_anyway(self, attempt: Attempt, mine: Workload) -> bool:
        """Tell whether an attempt is on its way out, and its gang does not stand in line before mine then."""
        end, theirs = attempt.end, self.world.workloads[attempt.uid]
        if attempt.state not in LEAVING or end is None:
            return False
        ahead = (-theirs.priority, theirs.submitted_at) <= (-mine.priority, mine.submitted_at)
        return not ahead or end.outcome is not Outcome.REQUEUE or end.why.reason in STAYS_OUT

    def waits_for_all_in_its_room(self, attempt: Attempt) -> bool:
        """Tell whether it fits on its nodes, beside all that are there or kept free, once those have gone it waits for."""
        world, mine = self.world, node_parts(attempt)
        used: Sums = Counter()
        for other in world.attempts.values():
            theirs = node_parts(other)
            for uid, number in other.victims if not other.holds else ():
                victim = world.attempts.get(uid)
                theirs.subtract(node_parts(victim) if victim is not None and victim.number == number else {})
            waits_for = (other.uid, other.number) in attempt.victims
            if other.uid != attempt.uid and not waits_for and (other.holds or not other.claimed):
                used.update(+theirs)
        return all(used[key] + mine[key] <= self.node_room()[key] for key in mine)

    def line(self, queue: str) -> list[str]:
        result = [queue]
        while parent := self.world.queues[result[-1]].parent:
            result.append(parent)
        return result

    def below(self, queue: str) -> list[str]:
        return [name for name in self.world.queues if queue in self.line(name)]

    def owned(self, queue: str) -> Sums:
        result: Sums = Counter()
        for name in self.below(queue):
            result.update(self.world.queues[name].nominal)
        return result

    def most(self, queue: str, cell: tuple[str, str]) -> int:
        """What the queue and all below it may use at most."""
        root = self.line(queue)[-1]
        limit = self.world.queues[queue].quotas.get(cell)
        borrowing = limit.borrowing_limit if limit else None
        everything = self.owned(root)[cell]
        return (
            everything if borrowing is None or queue == root else min(everything, self.owned(queue)[cell] + borrowing)
        )

    def node_room(self) -> Sums:
        return Counter({(name, GPU): self.world.fleet.room(name)[GPU] for name in self.world.fleet.node_names()})


def node_parts(part: Attempt | Portion) -> Sums:
    parts: Sums = Counter()
    for p in part.placements:
        parts[p.node, GPU] += p.pods * dict(p.requests)[GPU]
    return parts


def counted(attempt: Attempt, *, later: bool) -> list[Portion]:
    """What of an attempt is there, or will be once all who leave are gone."""
    if later:
        return [] if attempt.claimed else [attempt.whole]
    return [part for part in (attempt.whole, attempt.leaving) if part is not None] if attempt.holds else []


def on_nodes(clock: Watched, *, later: bool) -> Sums:
    result: Sums = Counter()
    for attempt in clock.world.attempts.values():
        for part in counted(attempt, later=later):
            result.update(node_parts(part))
    return result


def in_queue(clock: Watched, queue: str, *, later: bool) -> Sums:
    result: Sums = Counter()
    below = set(clock.below(queue))
    for attempt in clock.world.attempts.values():
        if clock.world.workloads[attempt.uid].queue in below:
            for part in counted(attempt, later=later):
                result.update(part.quota)
    return result


def idle_in_queue(clock: Watched, queue: str) -> Sums:
    """What is kept free for claims of the queue, for none of their victims has it any more."""
    world = clock.world
    result: Sums = Counter()
    for attempt in world.attempts.values():
        if not attempt.holds and not attempt.claimed and world.workloads[attempt.uid].queue == queue:
            mine: Sums = Counter(attempt.quota)
            for uid, number in attempt.victims:
                victim = world.attempts.get(uid)
                if victim is not None and victim.number == number:
                    mine.subtract((victim.leaving or victim.whole).quota)
            result.update(+mine)
    return result


class ClusterMachine(RuleBasedStateMachine):
    """A small cluster in which anything may happen."""

    @initialize(cluster=clusters(), elastic=st.booleans())
    def begin(self, cluster: dict[str, Any], elastic: bool) -> None:  # noqa: FBT001
        """``elastic``: in every queue gangs may take others' spare pods, and all have some."""
        self.elastic = elastic
        for queue in cluster["queues"] if elastic else ():
            if "preemption" in queue:
                queue["preemption"] |= {"withinQueue": "LowerOrNewerEqualPriority", "victims": "LeastWorkLost"}
        self.clock = Watched(read(cluster))
        self.forms = {form.name: form for form in read(cluster).queues}
        self.nodes = [node["name"] for node in cluster["nodes"]]
        self.submitted = 0
        self.before: dict[str, Sums] = {}
        self.nodes_before: Sums = Counter()
        self.clock.settle()

    def happens(self, verb: str, value: Any) -> None:
        self.clock._happen(EventForm.model_validate({"at": self.clock.now, verb: value}))
        self.clock.settle()

    def job(self, number: int) -> str:
        return f"j{number % self.submitted}"

    @precondition(lambda self: self.submitted < MOST_JOBS)
    @rule(job=jobs("j", ends=True))
    def submit(self, job: dict[str, Any]) -> None:
        job = {**job, "name": f"j{self.submitted}"} | ({"minPods": 1, "pods": job["pods"] + 1} if self.elastic else {})
        self.submitted += 1
        self.clock._submit(JobForm.model_validate(job), job["name"])
        self.clock.settle()

    @precondition(lambda self: self.submitted < MOST_JOBS)
    @rule(batch=st.lists(jobs("j", ends=True), min_size=3, max_size=6), seconds=st.sampled_from([0, 1, 5]))
    def submit_more(self, batch: list[dict[str, Any]], seconds: int) -> None:
        for job in batch:
            self.submit(job)
            self.wait(seconds)

    @precondition(lambda self: self.submitted < MOST_JOBS)
    @rule(batch=st.lists(jobs("j", ends=True), min_size=2, max_size=4))
    def submit_together(self, batch: list[dict[str, Any]]) -> None:
        for job in batch:
            self.clock._submit(JobForm.model_validate({**job, "name": f"j{self.submitted}"}), f"j{self.submitted}")
            self.submitted += 1
        self.clock.settle()

    @precondition(lambda self: self.submitted < MOST_JOBS)
    @rule(queue=st.sampled_from(QUEUES), pods=st.integers(2, 6), wants=st.integers(1, 3), grace=st.sampled_from([0, 7]))
    def press(self, queue: str, pods: int, wants: int, grace: int) -> None:
        """Have an elastic gang in the way of a more important one."""
        job = {"name": "j", "queue": queue, "gpus": 1, "user": "ann"}
        self.submit({**job, "pods": pods, "minPods": 1, "priority": 0, "grace": grace})
        self.wait(1)
        self.submit({**job, "pods": wants, "priority": 2})

    @rule(seconds=st.sampled_from([1, 3, 10, 60]))
    def wait(self, seconds: int) -> None:
        self.clock._until = self.clock.now + seconds
        self.clock.run()
        self.clock.now = self.clock._until

    @precondition(lambda self: self.submitted)
    @rule(number=st.integers(0, 40), verb=st.sampled_from(["finish", "finish", "fail", "delete", "hold", "release"]))
    def to_a_job(self, number: int, verb: str) -> None:
        self.happens(verb, self.job(number))

    @precondition(lambda self: self.submitted)
    @rule(number=st.integers(0, 40), indexes=st.sets(st.integers(0, 6), min_size=1, max_size=4), removed=st.booleans())
    def pods_finish(self, number: int, indexes: set[int], removed: bool) -> None:  # noqa: FBT001
        """Have some pods of a gang succeed, and perhaps have others clean them up at once."""
        clock, name = self.clock, self.job(number)
        attempt = clock.world.attempts.get(name)
        if attempt is None or attempt.state not in UNDER_WAY:
            return
        keys = {(ROLE, index) for index in indexes}
        clock.cluster.succeed(name, keys)
        for key in keys if removed else ():
            pod = clock.world.pods.get((name, attempt.number), {}).get(key)
            if pod is not None and pod.ended:
                clock.cluster._remove_pod((name, attempt.number, *key))
        before = clock.world.history.past(clock.now)
        happened = len(clock.result.timeline)
        clock.settle()
        assert all(entry.code != Reason.POD_LOST.code for entry in clock.result.timeline[happened:]), "that is no fault"
        assert clock.world.history.past(clock.now) == before, "what was held before is not forgotten"

    @rule(
        queue=st.sampled_from(QUEUES), pods=st.integers(2, 4), gpus=st.integers(1, 3), index=st.integers(0, 3),
        how=st.sampled_from(["node gone", "node gone", "drained", "removed"]), start=st.sampled_from([0, 2]),
        others=st.lists(jobs("j"), max_size=2), wait=st.sampled_from([0, 1, 3]), saves=st.sampled_from([{}, {"saves": 1}]),
    )  # fmt: skip
    def lose_a_pod(
        self,
        *,
        queue: str,
        pods: int,
        gpus: int,
        index: int,
        how: str,
        start: int,
        others: list[dict[str, Any]],
        wait: int,
        saves: dict[str, int],
    ) -> None:
        """Have a gang lose a pod that it may replace, while others come."""
        job = {"name": "j", "queue": queue, "pods": pods, "minPods": 2, "gpus": gpus, "priority": 2, "user": "bob"}
        self.submit({**job, "replaceLostPods": True, "startSeconds": start, **saves})
        self.wait(3)
        clock, name = self.clock, f"j{self.submitted - 1}"
        attempt = clock.world.attempts.get(name)
        pod = clock.world.pods.get((name, attempt.number), {}).get((ROLE, index)) if attempt else None
        if pod is None or not pod.node:
            return
        for other in others:
            clock._submit(JobForm.model_validate({**other, "name": f"j{self.submitted}"}), f"j{self.submitted}")
            self.submitted += 1
        if how == "node gone":
            self.happens("nodeDown", pod.node)
        elif how == "drained":
            told = replace(pod, deleting=True, disrupted="drained", told_at=clock.now, stops_by=clock.now + 2)
            clock.cluster._set_pod(told)
            clock.at(clock.now + 2, lambda: clock.cluster._remove_pod(_key(pod)))
            self.happens("cordon", pod.node)
        else:
            clock.cluster._remove_pod(_key(pod))
            clock.settle()
        self.wait(wait)

    @precondition(lambda self: self.submitted < MOST_JOBS)
    @rule(
        job=jobs("j", ends=True),
        index=st.integers(0, 6),
        others=st.lists(jobs("j"), max_size=2),
        replaces=st.booleans(),
    )
    def fall_silent(self, job: dict[str, Any], index: int, others: list[dict[str, Any]], replaces: bool) -> None:  # noqa: FBT001
        """Have a node of a gang fall silent until nobody waits for its pods, while others come."""
        self.submit({**job, "replaceLostPods": replaces, "startSeconds": 0})
        attempt = self.clock.world.attempts.get(f"j{self.submitted - 1}")
        if attempt is None:
            return
        self.happens("nodeSilent", attempt.placements[index % len(attempt.placements)].node)
        for other in others:
            self.clock._submit(JobForm.model_validate({**other, "name": f"j{self.submitted}"}), f"j{self.submitted}")
            self.submitted += 1
        self.wait(60)
        self.wait(60)

    @rule(
        number=st.integers(0, 5),
        verb=st.sampled_from(
            [
                "nodeDown",
                "nodeSilent",
                "nodeSilent",
                "nodeUp",
                "nodeUp",
                "nodeUp",
                "cordon",
                "drain",
                "uncordon",
                "uncordon",
            ]
        ),
    )
    def to_a_node(self, number: int, verb: str) -> None:
        self.happens(verb, self.nodes[number % len(self.nodes)])

    @precondition(lambda self: self.submitted < MOST_JOBS)
    @rule(
        batch=st.lists(jobs("j", ends=True), min_size=1, max_size=3), longest=st.sampled_from([1, 10, 30, 100]),
        start=st.sampled_from([3, 20]), numbers=st.sets(st.integers(0, 5), min_size=1),
        ahead=st.sampled_from([0, 5, 20, 60]), seconds=st.sampled_from([3, 30]),
    )  # fmt: skip
    def maintain(
        self, *, batch: list[dict[str, Any]], longest: int, start: int, numbers: set[int], ahead: int, seconds: int
    ) -> None:
        """Announce a window, and have jobs come that may be over before it, or not."""
        nodes, begin = sorted({self.nodes[n % len(self.nodes)] for n in numbers}), self.clock.now + ahead
        self.happens("window", {"nodes": nodes, "start": begin, "end": begin + seconds})
        for job in batch:
            self.submit({**job, "maxRunSeconds": longest, "startDeadlineSeconds": start})

    @rule(queue=st.sampled_from(QUEUES), flavor=st.sampled_from(FLAVORS), nominal=st.integers(0, 4))
    def set_quota(self, queue: str, flavor: str, nominal: int) -> None:
        if any(quota.flavor == flavor for quota in self.forms[queue].quotas or ()):
            edit = QuotaEdit(queue=queue, flavor=flavor, resource=GPU, nominal=nominal)
            self.happens("setQuota", edit.model_dump(by_alias=True, exclude_none=True))

    @rule(queue=st.sampled_from(QUEUES), policy=st.sampled_from(["None", "None", "Hold", "HoldAndDrain"]))
    def stop(self, queue: str, policy: str) -> None:
        self.happens("setStopPolicy", {"queue": queue, "stopPolicy": policy})

    @rule()
    def restart(self) -> None:
        before = self.clock.world.history.past(self.clock.now)
        self.happens("controllerRestart", True)  # noqa: FBT003 - a field's value
        after = self.clock.world.history.past(self.clock.now)
        for queue in before.keys() | after.keys():
            was, now = Counter(before.get(queue, {})), Counter(after.get(queue, {}))
            assert all(abs(was[cell] - now[cell]) <= Fraction(1, STEPS) for cell in was | now), "used before"

    @invariant()
    def no_defect_has_shown(self) -> None:
        if hasattr(self, "clock"):
            assert self.clock.result.faults == []

    @invariant()
    def a_gang_runs_whole_or_not_at_all(self) -> None:
        for attempt in self.attempts():
            pods = self.clock.world.pods.get((attempt.uid, attempt.number), {})
            if attempt.state in UNDER_WAY:
                there = members(attempt, pods)
                at = numbered(attempt.placements, attempt.done)
                runs = [p for key, p in at.items() if key not in attempt.coming]
                assert len(there) == len(runs)
                assert all(pod.node and not pod.deleting and not pod.ended for pod in there)
                held = Counter((p.node, p.role) for p in runs)
                assert held == Counter((pod.node, pod.role) for pod in there), "it holds what its pods need that run"
                if not attempt.leaving and not attempt.coming:
                    assert all(pod.ended for pod in pods.values() if pod not in there), "what it gave up is gone"
            elif attempt.state is AttemptState.CHECKPOINTING:
                there = members(attempt, pods)
                gone = numbered(attempt.placements, attempt.done).keys() - {(pod.role, pod.index) for pod in there}
                assert gone <= self.clock.world.saves.of(attempt.key).keys(), "it is whole while it saves its work"
                assert not any((pod.deleting and not pod.told_at) or pod.phase == "Failed" for pod in there)
            elif attempt.state is not AttemptState.ENDING:
                assert not any(pod.node for pod in pods.values())
            job = self.clock.world.jobs.get(attempt.uid)
            for role in job.gang.roles if job else ():
                placed = sum(p.pods for p in attempt.placements if p.role == role.name)
                had = placed + sum(name == role.name for name, _ in attempt.done)
                assert (role.pods if role.least is None else role.least) <= had <= role.pods

    @invariant()
    def nothing_is_booked_beyond_its_room(self) -> None:
        """What is there may be more than the room only when the room has shrunk; then it does not grow."""
        if not hasattr(self, "clock"):
            return
        room = self.clock.node_room()
        used = on_nodes(self.clock, later=False)
        assert all(amount <= max(room[key], self.nodes_before[key]) for key, amount in used.items())
        self.nodes_before = used
        for queue in self.clock.world.queues:
            used = in_queue(self.clock, queue, later=False)
            before = self.before.get(queue, Counter())
            for cell, amount in used.items():
                assert amount <= max(self.clock.most(queue, cell), before[cell]), (queue, cell)
            self.before[queue] = used

    @invariant()
    def no_node_runs_more_than_it_has(self) -> None:
        """Pods on silent nodes among it, whose attempts may be over."""
        if not hasattr(self, "clock"):
            return
        runs: Counter[tuple[str, str]] = Counter()
        for pod in self.clock.cluster._pods.values():
            if pod.node and not pod.ended:
                runs.update({(pod.node, name): amount for name, amount in pod.requests})
        for (node, name), amount in runs.items():
            assert is_unannounced(name) or amount <= self.clock.cluster._known[node].allocatable[name], (node, name)

    @invariant()
    def what_is_counted_in_memory_is_what_is_held(self) -> None:
        if not hasattr(self, "clock"):
            return
        holdings = self.clock.world.holdings
        for name in QUEUES:
            now, later = in_queue(self.clock, name, later=False), in_queue(self.clock, name, later=True)
            now.update(idle_in_queue(self.clock, name))
            assert +Counter(holdings.now.nodes[name].usage) == +now
            assert +Counter(holdings.later.nodes[name].usage) == +later

    @invariant()
    def no_limit_is_exceeded(self) -> None:
        held: dict[tuple[str, str], list[Attempt]] = {}
        for attempt in self.attempts():
            workload = self.clock.world.workloads[attempt.uid]
            job = self.clock.world.jobs.get(attempt.uid)
            for who in ("", job.gang.user if job else "gone"):
                held.setdefault((workload.queue, who), []).append(attempt)
        for (name, who), attempts in held.items():
            queue = self.clock.world.queues[name]
            most = queue.per_user.max_running if who else queue.max_running
            assert most is None or len(attempts) <= most, (name, who)
            gpus = sum(amount for attempt in attempts for amount in node_parts(attempt).values())
            assert not who or gpus <= dict(queue.per_user.max_resources).get(GPU, gpus), (name, who)

    def attempts(self) -> list[Attempt]:
        return list(self.clock.world.attempts.values()) if hasattr(self, "clock") else []

    def teardown(self) -> None:
        """All nodes come back, nothing is held: whoever could ever start does, as the others end."""
        if not hasattr(self, "clock"):
            return
        clock = self.clock
        for node in self.nodes:
            self.happens("nodeUp", node)
            self.happens("uncordon", node)
            clock.world.suspects.on_node(node, replace(clock.world.nodes.known[node], forgiven_at=clock.now))
        for queue in QUEUES:
            self.happens("setStopPolicy", {"queue": queue, "stopPolicy": "None"})
        for number in range(self.submitted):
            self.happens("release", f"j{number}")
        for _ in range(self.submitted + 1):
            self.wait(400)
            for uid in list(clock.world.attempts):
                self.happens("finish", uid)
        self.wait(400)
        for uid, state in clock.states().items():
            reason = clock.world.plan.waits[uid].reason if state.phase == "Pending" else None
            assert reason in HOPELESS | {None, Reason.BEHIND_HEAD}, (uid, state)
        assert clock.world.attempts == {}
        assert not any(on_nodes(clock, later=True).values())


class NamedMachine(ClusterMachine):
    """The same where claims name the GPUs, and gangs want them close to each other inside their nodes."""

    @initialize(cluster=clusters(), elastic=st.booleans())
    def begin(self, cluster: dict[str, Any], elastic: bool) -> None:  # noqa: FBT001
        devices = {"driver": "gpu.example.com", "deviceClassName": "gpu.example.com", "resource": GPU}
        inside = [{"name": "group", "gpus": 4}, {"name": "switch", "gpus": 2}]
        for flavor in cluster["flavors"]:
            flavor |= {"devices": devices, "topology": {"insideNode": inside}}
        super().begin(cluster, elastic)

    @precondition(lambda self: self.submitted < MOST_JOBS)
    @rule(job=jobs("j", ends=True))
    def submit(self, job: dict[str, Any]) -> None:
        asked = (None, {"required": "group"}, {"slices": {"level": "switch", "size": 1}})[self.submitted % 3]
        super().submit({**job, **({"topology": asked} if asked else {})})

    @invariant()
    def no_device_has_two_holders(self) -> None:
        for later in (False, True):
            holders: Counter[tuple[str, str]] = Counter()
            for attempt in self.attempts():
                for part in counted(attempt, later=later):
                    for p in part.placements:
                        names = [name for name, _ in p.requests if is_device(name)]
                        assert p.pods == 1
                        assert len(names) == dict(p.requests)[GPU]
                        holders.update((p.node, name) for name in names)
            assert set(holders.values()) <= {1}

    @invariant()
    def gpus_are_as_close_as_they_were_asked_for(self) -> None:
        for attempt in self.attempts():
            job = self.clock.world.jobs.get(attempt.uid)
            for role in job.gang.roles if job else ():
                pods = [p for part in attempt.parts for p in part.placements if p.role == role.name]
                if role.topology.required == "group":
                    assert len({(p.node, group) for p in pods for group in _domains(p, 4)}) == 1
                elif role.topology.slice_level == "switch":
                    assert all(len(_domains(p, 2)) == 1 for p in pods)


def _domains(placement: Placement, gpus: int) -> set[int]:
    return {int(name.rpartition("-")[2]) // gpus for name, _ in placement.requests if is_device(name)}


NamedMachine.TestCase.settings = settings(
    max_examples=10, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAnyHistoryOfDevices = NamedMachine.TestCase
ClusterMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAnyHistory = ClusterMachine.TestCase
