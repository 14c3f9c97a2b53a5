"""The mirror: what the API server shows and what the ledger holds, joined and kept incrementally in memory.

Informers tell it of changes; the engine tells it what the ledger has committed. It decides nothing: it remembers
what has changed since the last look, so that a cycle costs what changed and not what exists.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from queuectl.control.budgets import Budgets
from queuectl.control.devices import Devices
from queuectl.control.faults import Faults
from queuectl.control.gangs import Gangs
from queuectl.control.holdings import Holdings
from queuectl.control.moves import Moves
from queuectl.control.nodes import Nodes
from queuectl.control.pods import Pods
from queuectl.control.saves import Saves
from queuectl.control.suspects import Suspects
from queuectl.control.upkeep import Upkeep
from queuectl.control.volumes import JobVolumes
from queuectl.core.backlog import Backlog
from queuectl.core.checkpoint import answered
from queuectl.core.fleet import Fleet
from queuectl.core.fragmentation import Mix
from queuectl.core.lifecycle import GIVING_BACK, BackOff, Loss, View, deadline
from queuectl.core.limits import Held, limited
from queuectl.core.made import Made, alike
from queuectl.core.snapshot import Policy, Snapshot
from queuectl.core.tree import broken_queues
from queuectl.core.usage import History
from queuectl.model.checkpoint import Checkpoint, Report
from queuectl.model.devices import DeviceClaim, Slice
from queuectl.model.faults import DEFAULT_RULES, FaultRules
from queuectl.model.lifecycle import (
    LEAVING,
    Attempt,
    AttemptKey,
    AttemptState,
    Done,
    End,
    Move,
    Outcome,
    Shrink,
    Workload,
    WorkloadState,
    active,
)
from queuectl.model.objects import (
    Budget,
    Flavor,
    Gang,
    Job,
    Namespace,
    Node,
    Pod,
    PriorityClass,
    Queue,
)
from queuectl.model.plan import Plan, PodKey, Portion, Repair, held
from queuectl.model.reasons import FOR_OTHERS, Reason
from queuectl.model.resources import Resources
from queuectl.model.suspects import Healing
from queuectl.model.volumes import Claim, StorageClass, Volume

# Ends that follow from decisions alone, not from anything outside.
_OF_OURS = FOR_OTHERS | {Reason.PROMISE_LOST, Reason.QUOTA_TAKEN_BACK, Reason.QUEUE_DRAINED}


@dataclass
class Changes:
    """What the ledger has not been told yet. Sets are of names."""

    nodes: set[str] = field(default_factory=set)
    queues: set[str] = field(default_factory=set)
    submissions: set[str] = field(default_factory=set)
    candidates: bool = False  # whether more may be taken than before, which the ledger does not keep

    def __bool__(self) -> bool:
        """Tell whether there is anything."""
        return bool(self.nodes or self.queues or self.submissions or self.candidates)


class World:
    """One leader's view, made anew for each term."""

    def __init__(
        self,
        back_off: BackOff,
        policy: Policy = Policy(),  # noqa: B008 - frozen
        healing: Healing = Healing(),  # noqa: B008
        fault_rules: FaultRules = DEFAULT_RULES,
    ) -> None:
        """Start empty; informers fill it before ``load``."""
        self.fleet = Fleet()
        self.queues: dict[str, Queue] = {}
        self.flavors: dict[str, Flavor] = {}
        self.namespaces: dict[str, Mapping[str, str]] = {}  # their labels
        self.jobs: dict[str, Job] = {}
        self.workloads: dict[str, Workload] = {}
        self.standing = {state: Counter[str]() for state in WorkloadState}  # how many workloads of each queue
        self.attempts: dict[str, Attempt] = {}  # active ones, by workload uid
        self.made = Made()
        self.pods = Pods(self.fleet, self.attempts, self.made)
        self.budgets = Budgets(self.jobs, self.attempts, self.pods)
        self.saves = Saves(self.attempts, self.jobs, self.workloads)
        self.plan = Plan()  # the latest, for waits and positions
        self.changes = Changes()
        self.touched: set[str] = set()  # workloads whose next move must be looked at
        self.restated: set[str] = set()  # workloads whose status may have changed
        self.holdings = Holdings(self.fleet)
        self.devices = Devices(self.fleet)
        self.suspects = Suspects(healing)
        self.faults = Faults(fault_rules)
        self.nodes = Nodes(
            self.fleet,
            self.devices,
            flavors=self.flavors,
            suspects=self.suspects,
            faults=self.faults,
            made=self.made,
            changed=self._changed_nodes,
        )
        self.gangs = Gangs(self.jobs, self.workloads, self.attempts, self.pods, self.nodes)
        self.upkeep = Upkeep(
            self.attempts, self.workloads, pods=self.pods, gangs=self.gangs, budgets=self.budgets, nodes=self.nodes
        )
        self.history = History(policy.usage_half_life if policy.fair_sharing else 0.0)
        self.policy = policy
        self._held = Held()  # of queues with limits
        self._counted_in: dict[str, tuple[Queue, str, str, Resources]] = {}  # what is counted there, by workload uid
        self._seq = 0
        self._back_off = back_off
        self._replant = True
        self.mix = Mix()  # of what waits and runs
        self.waiting = Backlog(mix=self.mix)
        self._placed: dict[str, Gang] = {}  # those of it that wait no more, by uid
        self._edition = 0  # of what queues, flavors and nodes are
        self._stirs: dict[str, int] = {}  # jobs that came, went or changed, by the root of their queue's tree
        self.moves = Moves()
        self.volumes = JobVolumes()
        self.losses: dict[str, Loss] = {}  # what workloads wait to have replaced
        self._irreparable: set[str] = set()  # workloads for whose lost pods there is no place
        self._stale: set[str] = set()  # workloads that wait, or that wait no more, unlike what the backlog says

    # What informers tell

    def on_node(self, old: Node | None, new: Node | None) -> None:
        """Take in a changed node."""
        name = (new or old).name  # type: ignore[union-attr]  # one of both is given
        if old is None or (new is not None and new.uid != old.uid):
            for uid in self.holdings.on(name) & self.attempts.keys():
                self.suspects.compare(self.attempts[uid], new)
        if (old and old.unready_since) != (new and new.unready_since):
            self.restated |= self.holdings.on(name)
        self.nodes.on_node(old, new)

    def on_slice(self, old: Slice | None, new: Slice | None) -> None:
        """Take in a changed ResourceSlice."""
        self._changed_nodes(self.devices.on_slice(old, new))

    def on_device_claim(self, old: DeviceClaim | None, new: DeviceClaim | None) -> None:
        """Take in a changed ResourceClaim, ours or another's."""
        for node in self.devices.on_claim(old, new):
            self._crowd(node)
        self.touched |= {claim.workload for claim in (old, new) if claim is not None and claim.workload}

    def on_pod(self, old: Pod | None, new: Pod | None) -> None:
        """Take in a changed pod, ours or another's."""
        for node in self.pods.on_pod(old, new):
            self._crowd(node)
        if new is not None and new.workload:
            self._read(old, new)
        for pod in (old, new):
            if pod is not None and pod.workload:
                self._look_at(pod.workload)
                if old is None or new is None or (old.ready, old.phase) != (new.ready, new.phase):
                    self._ready_or_not(pod.workload)

    def on_queue(self, old: Queue | None, new: Queue | None) -> None:
        """Take in a changed queue."""
        name = (new or old).name  # type: ignore[union-attr]
        if new is not None:
            self.queues[name] = new
            if new == old:
                return  # only its status changed
        else:
            self.queues.pop(name, None)
        if (old and old.max_grace_seconds) != (new and new.max_grace_seconds):
            for uid in [uid for uid, job in self.jobs.items() if job.gang.queue == name]:
                self.jobs[uid] = self._judged(self.jobs[uid])
                self.restated.add(uid)
        self.changes.queues.add(name)
        self._edition += 1
        self._replant = True

    def on_flavor(self, old: Flavor | None, new: Flavor | None) -> None:
        """Take in a changed flavor."""
        if new is not None:
            self.flavors[new.name] = new
        elif old is not None:
            self.flavors.pop(old.name, None)
        if new == old:
            return
        self._changed_nodes(self.devices.on_flavor(old, new))
        self.fleet.forget_masks()
        self._edition += 1
        self.touched |= self.attempts.keys()
        name = (new or old).name  # type: ignore[union-attr]
        self.changes.queues |= {queue.name for queue in self.queues.values() if any(f == name for f, _ in queue.quotas)}

    def on_namespace(self, old: Namespace | None, new: Namespace | None) -> None:
        """Take in a changed namespace."""
        if new is not None:
            self.namespaces[new.name] = new.labels
        elif old is not None:
            self.namespaces.pop(old.name, None)
            self.made.forget(old.name)
        if new != old:
            self.changes.queues |= {queue.name for queue in self.queues.values() if queue.namespaces is not None}

    def on_budget(self, old: Budget | None, new: Budget | None) -> None:
        """Take in a changed PodDisruptionBudget."""
        if self.budgets.change(old, new):
            self.changes.candidates = True
            self._edition += 1
        self.holdings.look_again()

    def on_priority_class(self, old: PriorityClass | None, new: PriorityClass | None) -> None:
        """Take in a changed PriorityClass."""
        concerned = self.gangs.on_priority_class(old, new)
        self.changes.submissions |= concerned
        self._stale |= concerned
        self.holdings.look_again(concerned)

    def on_job(self, old: Job | None, new: Job | None) -> None:
        """Take in a changed TrainingJob."""
        uid = (new or old).gang.uid  # type: ignore[union-attr]
        if new is None:
            self.jobs.pop(uid, None)
            self.volumes.forget(uid)
        else:
            self.keep_job(new)
        self.touched.add(uid)
        self._stale.add(uid)
        self.moves.changed(uid)
        if old is None or new is None or old.generation != new.generation or old.deleting != new.deleting:
            self.changes.submissions.add(uid)
            self.restated.add(uid)
            self.holdings.look_again((uid,))
            self._stir((new or old).gang.queue)  # type: ignore[union-attr]
        move = new.move if new else None
        if move != (old.move if old else None):
            self.moves.ask(uid, move)
            self.changes.candidates = self.changes.candidates or move is not None

    def keep_job(self, job: Job) -> None:
        """Have a job as it was read or written last, with what its claims, its queue and the API server mean for it."""
        uid = job.gang.uid
        known = self.jobs.get(uid)
        if known is not None and int(known.resource_version) > int(job.resource_version):
            return  # the watch is behind what was written, or an answer behind the watch
        self.jobs[uid] = self._judged(self.volumes.keep(job))
        _ = self.jobs[uid].gang.shape  # worked out as jobs arrive, and not for all of them by the first cycle

    def on_volume_claim(self, old: Claim | None, new: Claim | None) -> None:
        """Take in a changed PersistentVolumeClaim."""
        self._judge_again(self.volumes.again(self.volumes.on_claim(old, new)))

    def on_volume(self, old: Volume | None, new: Volume | None) -> None:
        """Take in a changed PersistentVolume."""
        self._judge_again(self.volumes.again(self.volumes.on_volume(old, new)))

    def on_storage_class(self, old: StorageClass | None, new: StorageClass | None) -> None:
        """Take in a changed StorageClass."""
        self._judge_again(self.volumes.again(self.volumes.on_storage_class(old, new)))

    def volumes_are_known(self) -> None:
        """Take in that all claims, volumes and storage classes have been read."""
        self._judge_again(self.volumes.again(self.volumes.are_known()))

    # What the ledger says

    def load(self, workloads: Iterable[Workload], attempts: Iterable[Attempt], max_seq: int) -> None:
        """Take in the ledger as it is at the start of a term."""
        self._seq = max_seq
        for workload in workloads:
            self._keep(workload)
            if workload.state is WorkloadState.QUEUED and workload.last_end is not None:
                self.moves.keep(workload.uid, workload.queue, workload.last_end)
        for attempt in attempts:
            self.admitted(attempt)
            if attempt.end is not None:
                self.moves.keep(attempt.uid, self.workloads[attempt.uid].queue, attempt.end)
        self.changes = Changes(set(self.fleet.node_names()), set(self.queues), set(self.jobs))
        self.touched = set(self.jobs) | set(self.workloads)
        self._stale |= self.touched

    def admitted(self, attempt: Attempt) -> None:
        """Count a new attempt's reservations."""
        self.moves.drop(attempt.uid)
        workload = self.workloads[attempt.uid]
        first = attempt.admitted_at if workload.first_admitted_at is None else workload.first_admitted_at
        if workload.saved is not None and workload.saved.attempt == attempt.number:
            attempt = replace(attempt, saved_at=workload.saved.at)
        self._keep(replace(workload, state=WorkloadState.ACTIVE, attempt=attempt.number, first_admitted_at=first))
        self.attempts[attempt.uid] = attempt
        self.made.begin(attempt)
        self._count_held(attempt.uid)
        self.holdings.add(self.workloads[attempt.uid], attempt)
        if attempt.holds:
            for part in attempt.parts:
                self.history.begin(workload.queue, part.quota, attempt.admitted_at)
        else:
            self.gangs.won(attempt.uid, self._state(workload.queue))
        if attempt.uid in self.jobs:
            self._placed[attempt.uid] = self.jobs[attempt.uid].gang
            self.mix.add(self._placed[attempt.uid])
        self._recount(attempt)
        for pod in self.pods.get(attempt.key, {}).values():  # they may be older than this term
            self._read(None, pod)
        for placement in attempt.held:
            self.suspects.compare(attempt, self.nodes.known.get(placement.node))
        self._ready_or_not(attempt.uid)
        self._stale.add(attempt.uid)
        self._look_at(attempt.uid)

    def moved(self, move: Move, now: float) -> None:
        """Take in a move that the ledger has committed."""
        if move.shrink is not None:
            self.shrinks(move.uid, move.shrink)
            return
        attempt, workload = self.attempts[move.uid], self.workloads[move.uid]
        if move.asked is not None:
            self.attempts[move.uid] = replace(attempt, ask=None)
            self._look_at(move.uid)
            return
        if move.done is not None:
            self._done(attempt, move.done, now)
            return
        if move.to is AttemptState.RESERVED:
            self.history.begin(workload.queue, attempt.quota, now)
        attempt = attempt.moved(move, now)
        before = self.attempts[move.uid]
        self._have(attempt)
        if before.leaving and not attempt.leaving:
            self._gave_back(before, before.leaving, now)
            self._leave_claims(attempt.key)
            self.touched |= self.holdings.claims
        if move.to is AttemptState.RUNNING:
            self.made.start(move.uid)
            self._keep(replace(workload, late_starts=0))
            self.changes.candidates = self.changes.candidates or bool(before.leaving or before.coming)
            self._ready_or_not(move.uid)
        if move.to is AttemptState.RESERVED:
            self.changes.candidates = True  # nobody takes a claim, but a higher priority may take what has its room
        if move.to is AttemptState.ENDED:
            self._ended(workload, attempt, now, move.interruption.lost.gpu_seconds if move.interruption else 0)
        self._look_at(move.uid)

    def evicted(self, uid: str, end: End, now: float) -> None:
        """Take in that the ledger has promised a workload's room to somebody and ends its attempt for it."""
        attempt = self.attempts[uid]
        if attempt.state not in LEAVING:
            ending_at = now if end.first is AttemptState.ENDING else None
            attempt = replace(attempt, state=end.first, end=end, ending_at=ending_at)
        self._have(replace(attempt, claimed=True))
        self.moves.keep(uid, self.workloads[uid].queue, end)
        self._look_at(uid)

    def shrinks(self, uid: str, shrink: Shrink) -> None:
        """Take in that a workload gives up a part of its room; the rest runs on."""
        self._have(self.attempts[uid].shrinking(shrink))
        self._look_at(uid)

    def grows(self, uid: str, part: Portion, now: float) -> None:
        """Take in that a workload has room for further pods; those that it has run on."""
        self._have(self.attempts[uid].growing(part, now))
        self.history.begin(self.workloads[uid].queue, part.quota, now)
        self._count_held(uid)
        self._look_at(uid)

    def repairs(self, uid: str, repair: Repair, now: float) -> None:
        """Take in that lost pods of a workload are replaced; the others run on."""
        self._have(self.attempts[uid].repairing(repair, now))
        del self.losses[uid]
        self.pods.forget_done(self.attempts[uid].key, repair.pods)
        self.suspects.struck.pop(self.attempts[uid].key, None)
        self._count_held(uid)
        self._look_at(uid)

    def irreparable(self, uids: Iterable[str]) -> None:
        """Take in that there is no place for pods that these workloads have lost."""
        for uid in uids:
            self._irreparable.add(uid)
            self.touched.add(uid)

    def lost(self, uid: str, loss: Loss | None) -> None:
        """Take in which pods a workload waits to have replaced."""
        if loss is None:
            self.losses.pop(uid, None)
            self._irreparable.discard(uid)
        elif self.losses.get(uid) != loss:
            self.losses[uid] = loss
            self.changes.candidates = True

    def saved(self, uid: str, checkpoint: Checkpoint) -> None:
        """Take in that the ledger knows of a new checkpoint of an active attempt."""
        self._keep(replace(self.workloads[uid], saved=checkpoint))
        self._have(replace(self.attempts[uid], saved_at=checkpoint.at))
        self.restated.add(uid)

    def heard(self, key: AttemptKey, pod: PodKey, report: Report) -> None:
        """Take in what a pod of an active attempt says that it has saved."""
        if self.saves.hear(key, pod, report):
            self._look_at(key[0])

    def forget(self, uid: str) -> None:
        """Forget a workload that is over, its object gone or going."""
        self.moves.drop(uid)
        known = self.workloads.pop(uid, None)
        if known is not None:
            self.standing[known.state][known.queue] -= 1
        self._stale.add(uid)

    # What the engine asks

    def take_changes(self) -> Changes:
        """Return what the ledger has not been told, and take it as told."""
        taken, self.changes = self.changes, Changes()
        return taken

    def answers(self, attempt: Attempt) -> int:
        """Return how many of an attempt's pods have done what they are asked for before it goes, or a part of it."""
        job = self.jobs.get(attempt.uid)
        if job is None or attempt.asking is None:
            return 0
        return len(answered(attempt, job, self.pods.seen(attempt), self.saves.of(attempt.key), attempt.asking))

    def submissions(self, uids: Iterable[str]) -> list[Workload]:
        """Return those workloads that the ledger does not know as they are, new ones with their place in time."""
        result = []
        for uid in sorted(uids, key=self._arrival):
            job, known = self.jobs.get(uid), self.workloads.get(uid)
            if job is None or (job.deleting and known is None):
                continue
            gang = job.gang
            if known is None and job.status.get("phase") in {"Succeeded", "Failed"}:
                continue  # it ended under a ledger that is lost
            if known is None:
                self._seq += 1
                known = Workload(uid, gang.namespace, gang.name, "", 0, gang.submitted_at, self._seq)
                # Pods of attempts that only a lost ledger knew must not pass for those of the next.
                known = replace(known, attempt=int(job.status.get("attempt") or 0))
            elif known.state is not WorkloadState.QUEUED:
                continue
            workload = replace(known, queue=gang.queue, priority=self.gangs.priority(job))
            if self.workloads.get(uid) != workload:
                self._keep(workload)
                self._stale.add(uid)
                result.append(workload)
        return result

    def snapshot(self, now: float) -> Snapshot:
        """Return what the next cycle decides upon."""
        broken = broken_queues(self.queues)
        if self._replant:
            self.holdings.plant(self.queues, broken)
            self._replant = False
            for uid in self.attempts:  # other limits may hold now
                self._count_held(uid)
            self.touched |= self.holdings.claims  # quotas may no longer hold what they were promised
        at = self.waiting.wake_at()
        over = at is not None and at <= now  # the end of a back-off comes from outside, too
        stale, self._stale = self._stale | self.gangs.forgive(self._state, all_of_them=over), set()
        waiting = [self.gangs.of(uid) for uid in stale if self.gangs.waits(uid)]
        self.waiting.update(waiting, gone=stale)
        return Snapshot(
            queues=self.queues,
            flavors=self.flavors,
            waiting=self.waiting,
            fleet=self.fleet.snapshot(),
            tree=self.holdings.now,
            later=self.holdings.later,
            running=self.holdings.running(
                self.workloads, self.gangs.preemptible, self.budgets.covering, self.gangs.elastic
            ),
            departing=self.holdings.departing(self.workloads),
            version=self._version(),
            versions=dict(self.holdings.versions),
            broken_queues=broken,
            budgets=self.budgets.allowed(),
            past=self.history.past(now),
            policy=self.policy,
            namespaces=self.namespaces,
            held=self._held,
            elastic=self.gangs.lacking(),
            orders=self.moves.orders(self.attempts, self.gangs.to_move),
            moving=self.moves.kept(now, lambda uid: uid in self.attempts or self.waiting.get(uid) is not None),
            broken=[self.gangs.broken(uid, loss, now) for uid, loss in self.losses.items() if uid in self.jobs],
            mix=self.mix,
        )

    def view(self, uid: str, now: float) -> View | None:
        """Return what the next move of the workload's active attempt depends on; None without an attempt."""
        attempt = self.attempts.get(uid)
        if attempt is None:
            return None
        pods = self.pods.seen(attempt)
        told = pods.items() if attempt.state in GIVING_BACK else ()
        stuck = frozenset(key for key, pod in told if self.nodes.stuck_from(pod) <= now)
        return View(
            workload=self.workloads[uid],
            attempt=attempt,
            job=self.jobs.get(uid),
            pods=pods,
            places=self.nodes.places(attempt, self.jobs.get(uid), now),
            victims=[victim for victim, _ in attempt.victims],
            kept=attempt.holds or self._replant or self.holdings.keeps(uid, self.workloads),
            now=now,
            back_off=self._back_off,
            irreparable=uid in self._irreparable,
            reports=self.saves.of(attempt.key),
            leave=self.nodes.leave(attempt),
            allocated=bool(attempt.going) and self.devices.allocated(attempt, besides=stuck),
            unready=self.nodes.silent(attempt),
            not_ready_seconds=self.nodes.patience(),
            stuck=stuck,
            struck=self.suspects.struck.get(attempt.key),
        )

    def overdue(self, now: float) -> set[str]:
        """Return the workloads whose deadline has passed."""
        result = set()
        for uid, attempt in self.attempts.items():
            job = self.jobs.get(uid)
            at = deadline(attempt, job) if job else None
            if at is not None and at <= now:
                result.add(uid)
        return result.union(*(uids for at, uids in self.given_up() if at <= now))

    def given_up(self) -> Iterator[tuple[float, AbstractSet[str]]]:
        """Yield times (Unix seconds) at which nobody waits for a node or pod any longer, and the workloads concerned."""
        patience = self.nodes.patience()
        for node, since in self.suspects.unready.items():
            yield since + patience, self.holdings.on(node)
        for uid, attempt in self.attempts.items():
            if attempt.state in GIVING_BACK:
                for pod in self.pods.get(attempt.key, {}).values():
                    yield self.nodes.stuck_from(pod), {uid}

    def waits_in_vain(self, uid: str) -> bool:
        """Tell whether the workload waits although its job is deleted."""
        workload, job = self.workloads.get(uid), self.jobs.get(uid)
        return workload is not None and workload.state is WorkloadState.QUEUED and (job is None or job.deleting)

    def is_over(self, uid: str) -> bool:
        """Tell whether the workload holds nothing and never will."""
        workload = self.workloads.get(uid)
        return workload is None or workload.state is WorkloadState.FINISHED

    # Inside

    def _learn(self, pod: Pod) -> None:
        """Take in what the API server has made of a gated pod; jobs of that template in its namespace will have the like."""
        job = self.jobs.get(pod.workload)
        if job and job.generation == self.attempts[pod.workload].generation and self.made.learn(job, pod):
            mine, [role] = job.gang.namespace, [one for one in job.gang.roles if one.name == pod.role]
            there = (one for one in self.jobs.values() if one.gang.namespace == mine)
            self._judge_again([one for one in there if any(alike(role, other) for other in one.gang.roles)])

    def _judge_again(self, jobs: Iterable[Job]) -> None:
        """Have jobs with what is known of them now."""
        for job in map(self._judged, jobs):
            uid = job.gang.uid
            if job != self.jobs.get(uid):
                self.jobs[uid] = job
                self._stale.add(uid)
                self._look_at(uid)
                self.changes.candidates = True

    def _judged(self, job: Job) -> Job:
        """Return a job with what its queue lets it take to leave, and what its pods will request."""
        job = self.made.judge(job)
        queue = self.queues.get(job.gang.queue)
        most = queue.max_grace_seconds if queue else None
        return job if job.max_grace_seconds == most else replace(job, max_grace_seconds=most)

    def _arrival(self, uid: str) -> tuple[float, int]:
        """Order of first sight: creation times have whole seconds only, versions grow with each write."""
        job = self.jobs.get(uid)
        return (job.gang.submitted_at, int(job.resource_version)) if job else (0.0, 0)

    def _done(self, attempt: Attempt, done: Done, now: float) -> None:
        """Take in that pods of an attempt are done and hold nothing any more."""
        self._have(attempt.without(done))
        self._gave_back(attempt, done.part, now)
        self.pods.forget_done(attempt.key, done.pods)
        self.changes.candidates = True  # there is more room, and less that can be taken
        self._look_at(attempt.uid)

    def _gave_back(self, before: Attempt, part: Portion, now: float) -> None:
        """Take in that an attempt holds a part no longer."""
        self.history.end(self.workloads[before.uid].queue, part.quota, now)
        self._count_held(before.uid)
        self._hold_devices(self.attempts[before.uid])

    def _read(self, old: Pod | None, pod: Pod) -> None:
        """Take in what a pod of ours reports, where that is new; and of one that is gated, what it is like."""
        if self.saves.read(old, pod):
            self._look_at(pod.workload)
        attempt = active(self.attempts, (pod.workload, pod.attempt))
        if attempt is None:
            return
        if pod.gated:
            self._learn(pod)
        if pod.disrupted:
            self.suspects.on_disrupted(attempt, pod)

    def _ended(self, workload: Workload, attempt: Attempt, now: float, lost: int) -> None:
        end = attempt.end
        if end is None:
            raise ValueError(f"attempt {attempt.number} of {workload.uid} ended without an end")
        self._keep(workload.after(attempt, end, now, lost))
        if end.ignored is not None:
            self.faults.blame(self.workloads[workload.uid])
            self.nodes.judge_faults(now)
        del self.attempts[workload.uid]
        self.made.end(workload.uid)
        self.gangs.ended(workload.uid)
        self._count_held(workload.uid)
        self.pods.forget_done(attempt.key)
        self.saves.drop(attempt.key)
        self.suspects.struck.pop(attempt.key, None)
        if workload.uid in self._placed:
            self.mix.add(self._placed.pop(workload.uid), -1)
        self._stale.add(workload.uid)
        if attempt.holds:
            for part in attempt.parts:
                self.history.end(workload.queue, part.quota, now)
        self.holdings.remove(workload.uid)
        self._recount(attempt)
        self._leave_claims(attempt.key)
        self.touched |= self.holdings.claims
        self.restated |= self.holdings.claims  # they say for whom they wait
        if end.outcome is not Outcome.REQUEUE:
            self.moves.drop(workload.uid)
        if end.why.reason not in _OF_OURS:
            self._stir(workload.queue)
        self.changes.submissions.add(workload.uid)  # its queue may have been edited meanwhile

    def _leave_claims(self, victim: AttemptKey) -> None:
        """Nobody waits for a victim any longer that has ended, or shrunk."""
        for uid in self.holdings.claims:
            claim = self.attempts[uid]
            if victim in claim.victims:
                self._have(replace(claim, victims=tuple(v for v in claim.victims if v != victim)))
                self.restated.add(uid)

    def _recount(self, attempt: Attempt) -> None:
        """Its pods, and their devices, are covered by its reservation, or not any longer."""
        self._hold_devices(attempt)
        for node in self.pods.recount(attempt):
            self._crowd(node)

    def _hold_devices(self, attempt: Attempt) -> None:
        for node in self.devices.hold(attempt, ended=active(self.attempts, attempt.key) is None):
            self._crowd(node)

    def _changed_nodes(self, names: Iterable[str]) -> None:
        for name in names:
            self._edition += 1
            self._crowd(name)

    def _crowd(self, node: str) -> None:
        self.changes.nodes.add(node)
        self.touched |= self.holdings.on(node)

    def _look_at(self, uid: str) -> None:
        """Have a workload's next move and its status looked at."""
        self.touched.add(uid)
        self.restated.add(uid)

    def _have(self, attempt: Attempt) -> None:
        """Have an active attempt as it is now."""
        self.attempts[attempt.uid] = attempt
        self.holdings.update(attempt)

    def _keep(self, workload: Workload) -> None:
        """Have a workload as it is now."""
        before = self.workloads.get(workload.uid)
        if before is not None:
            self.standing[before.state][before.queue] -= 1
        self.workloads[workload.uid] = workload
        self.standing[workload.state][workload.queue] += 1

    def _count_held(self, uid: str) -> None:
        """Count anew what a workload's job holds, or is promised, of a queue with limits."""
        if uid in self._counted_in:
            self._held.remove(*self._counted_in.pop(uid))
        workload, attempt, job = self.workloads[uid], self.attempts.get(uid), self.jobs.get(uid)
        queue = self.queues.get(workload.queue)
        if attempt is not None and queue is not None and limited(queue):
            placements = attempt.placements if attempt.replaces else attempt.held  # lost places count no more
            counted = (queue, workload.namespace, job.gang.user if job else "", held(placements))
            self._counted_in[uid] = counted
            self._held.add(*counted)

    def _ready_or_not(self, uid: str) -> None:
        """Take in that a gang may have pods to spare now, or has none any more."""
        attempt = self.attempts.get(uid)
        if attempt is not None and self.gangs.measure(attempt):
            self.holdings.look_again((uid,))
            if self.gangs.whole(attempt):
                self.changes.candidates = True

    def _version(self) -> int:
        """Return what grows with all that makes a plan another one, but who waits and what queues hold."""
        return self._edition + self.moves.version

    def _state(self, queue: str) -> tuple[int, int]:
        """Return what tells a state of things from others, as far as it comes from outside."""
        return (self._version(), self._stirs.get(self.holdings.root(queue), 0))

    def _stir(self, queue: str) -> None:
        root = self.holdings.root(queue)
        self._stirs[root] = self._stirs.get(root, 0) + 1
