"""The mirror: what the API server shows and what the ledger holds, joined and kept incrementally in memory.

Informers tell it of changes; the engine tells it what the ledger has committed. It decides nothing: it remembers
what has changed since the last look, so that a cycle costs what changed and not what exists.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from queuectl.control.avoided import Avoidance, Avoided
from queuectl.control.budgets import Budgets
from queuectl.control.devices import Devices
from queuectl.control.faults import Faults
from queuectl.control.holdings import Holdings
from queuectl.control.suspects import SOURCE, News, Suspects, nodes_of
from queuectl.control.upkeep import Upkeep
from queuectl.control.volumes import JobVolumes
from queuectl.core.backlog import Backlog
from queuectl.core.checkpoint import Reports, answered, by_exit, saved
from queuectl.core.elastic import last, pods_of, spare
from queuectl.core.fleet import Fleet
from queuectl.core.fragmentation import Mix
from queuectl.core.healing import stuck_from
from queuectl.core.lifecycle import BackOff, Loss, View, all_ready, deadline
from queuectl.core.limits import Held, limited
from queuectl.core.made import Made
from queuectl.core.moves import kept_for
from queuectl.core.snapshot import Broken, Elastic, MoveOrder, Moving, Policy, Snapshot
from queuectl.core.tree import broken_queues
from queuectl.core.usage import History
from queuectl.model.checkpoint import Checkpoint, Report
from queuectl.model.devices import DeviceClaim, Slice
from queuectl.model.faults import DEFAULT_RULES, FaultRules
from queuectl.model.lifecycle import (
    LEAVING,
    Attempt,
    AttemptState,
    Done,
    End,
    Move,
    Outcome,
    Shrink,
    Workload,
    WorkloadState,
)
from queuectl.model.objects import (
    Budget,
    Constraints,
    Flavor,
    Gang,
    Job,
    MoveRequest,
    Namespace,
    Node,
    Place,
    Pod,
    PriorityClass,
    Queue,
)
from queuectl.model.plan import Eviction, Placement, Plan, PodKey, Portion, Repair, held
from queuectl.model.policy import Cause
from queuectl.model.reasons import FOR_OTHERS, Reason, Why, why
from queuectl.model.resources import Resources
from queuectl.model.suspects import Healing, Offence
from queuectl.model.volumes import Claim, StorageClass, Volume
from queuectl.model.work import Work

AttemptKey = tuple[str, int]  # workload uid, number
MAX_SAVES = 500  # that one round takes in; the rest is for the next
MAX_LATE_STARTS = 3  # in a row, after which a job takes from nobody until it has run

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
        self.priorities: dict[str, PriorityClass] = {}
        self.budgets = Budgets()
        self.jobs: dict[str, Job] = {}
        self.workloads: dict[str, Workload] = {}
        self.standing = {state: Counter[str]() for state in WorkloadState}  # how many workloads of each queue
        self.attempts: dict[str, Attempt] = {}  # active ones, by workload uid
        self.pods: dict[AttemptKey, dict[PodKey, Pod]] = {}
        self._cleared: dict[AttemptKey, dict[PodKey, Pod]] = {}  # succeeded and removed before the ledger was told
        self._reports: dict[AttemptKey, dict[PodKey, Report]] = {}  # of active attempts
        self._saving: dict[str, None] = {}  # workloads whose pods have reported something new, the oldest first
        self.unreadable: dict[str, Why] = {}  # workloads whose reports can't be read, which nobody has told yet
        self.plan = Plan()  # the latest, for waits and positions
        self.changes = Changes()
        self.touched: set[str] = set()  # workloads whose next move must be looked at
        self.restated: set[str] = set()  # workloads whose status may have changed
        self.holdings = Holdings(self.fleet)
        self.devices = Devices(self.fleet)
        self._nodes: dict[str, Node] = {}  # as they were read
        self._avoided = Avoided()
        self._windows: Mapping[str, float] = {}  # when maintenance takes nodes
        self.upkeep = Upkeep()
        self.suspects = Suspects(healing)
        self.faults = Faults(fault_rules)
        self.history = History(policy.usage_half_life if policy.fair_sharing else 0.0)
        self.policy = policy
        self._counted: dict[str, tuple[str, tuple[tuple[str, int], ...]]] = {}  # others' pod uid → node, requests
        self._on_node: dict[str, set[str]] = {}  # node → workloads with a reservation there
        self._held = Held()  # of queues with limits
        self._counted_in: dict[str, tuple[Queue, str, str, Resources]] = {}  # what is counted there, by workload uid
        self._seq = 0
        self._back_off = back_off
        self._replant = True
        self.mix = Mix()  # of what waits and runs
        self.waiting = Backlog(mix=self.mix)
        self._placed: dict[str, Gang] = {}  # those of it that wait no more, by uid
        self._version = 0  # of what queues, flavors and nodes are
        self._stirs: dict[str, int] = {}  # jobs that came, went or changed, by the root of their queue's tree
        self._winners: dict[str, tuple[int, int]] = {}  # who has preempted, and in which state of things
        self._small: set[str] = set()  # workloads of attempts with fewer pods than they ask for
        self._asked: dict[str, MoveRequest] = {}  # moves, by uid of who is to move
        self._moving: dict[str, Moving] = {}  # what is kept for those who make room, by uid
        self.volumes, self.made = JobVolumes(), Made()
        self.losses: dict[str, Loss] = {}  # what workloads wait to have replaced
        self._irreparable: set[str] = set()  # workloads for whose lost pods there is no place
        self._stale: set[str] = set()  # workloads that wait, or that wait no more, unlike what the backlog says

    # What informers tell

    def on_node(self, old: Node | None, new: Node | None) -> None:
        """Take in a changed node."""
        name = (new or old).name  # type: ignore[union-attr]  # one of both is given
        self.suspects.on_node(name, new)
        if old is not None and old == new:
            return  # a heartbeat
        if (old and old.unready_since) != (new and new.unready_since):
            self.restated |= self._on_node.get(name, set())
        if new is None:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = new
        self.faults.on_node(name, new)
        self._judge_node(name)

    def avoid(self, source: str, nodes: Mapping[str, Avoidance]) -> set[str]:
        """Have nobody new go onto these nodes, each for its reason; what the source said before is over.

        Return the nodes for which that is new.
        """
        changed = self._avoided.say(source, nodes)
        for name in changed & self._nodes.keys():
            self._judge_node(name)
        return changed

    def judge_faults(self, now: float) -> dict[str, str]:
        """Look which nodes are at fault by now; return why, for those for which that is new; empty: they are no more."""
        faulty = self.faults.avoided(now)
        return {name: faulty[name].why if name in faulty else "" for name in self.avoid("faults", faulty)}

    def take_at(self, nodes: Mapping[str, float]) -> None:
        """Have maintenance windows take these nodes at these times, in Unix seconds, and no others."""
        before, self._windows = self._windows, dict(nodes)
        for name in self._nodes.keys() & (before.keys() | nodes.keys()):
            if before.get(name) != nodes.get(name):
                self._judge_node(name)

    def offend(self, offences: Collection[Offence]) -> None:
        """Take in what nodes have done; of one that is cordoned somebody knows already."""
        cordoned = {name for one in offences if (node := self._nodes.get(name := one.node)) and node.unschedulable}
        self.suspects.offend(one for one in offences if one.node not in cordoned)

    def judge_suspects(self, now: float) -> list[News]:
        """Find out which nodes are avoided for what they have done; return what is new of them."""
        news = self.suspects.judge(now, lambda: nodes_of(self.flavors.values(), self._nodes))
        self.avoid(SOURCE, self.suspects.avoidances())
        return news

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
        if new is not None and new.workload:
            self.pods.setdefault((new.workload, new.attempt), {})[new.role, new.index] = new
            self._read(old, new)
        if old is not None and old.workload and (new is None or _identity(new) != _identity(old)):
            key = (old.workload, old.attempt)
            peers = self.pods.get(key, {})
            peers.pop((old.role, old.index), None)
            if not peers:
                self.pods.pop(key, None)
            if old.phase == "Succeeded" and self._active(key) and not self._replaced(old):
                self._cleared.setdefault(key, {})[old.role, old.index] = old
        for pod in (old, new):
            if pod is not None and pod.workload:
                self.touched.add(pod.workload)
                self.restated.add(pod.workload)
                if old is None or new is None or (old.ready, old.phase) != (new.ready, new.phase):
                    self._ready_or_not(pod.workload)
        if old is not None and (new is None or new.uid != old.uid):
            self._uncount(old)
        if new is not None:
            self._count(new)

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
        self._version += 1
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
        self._version += 1
        self.touched |= self.attempts.keys()
        name = (new or old).name  # type: ignore[union-attr]
        self.changes.queues |= {queue.name for queue in self.queues.values() if any(f == name for f, _ in queue.quotas)}

    def on_namespace(self, old: Namespace | None, new: Namespace | None) -> None:
        """Take in a changed namespace."""
        if new is not None:
            self.namespaces[new.name] = new.labels
        elif old is not None:
            self.namespaces.pop(old.name, None)
        if new != old:
            self.changes.queues |= {queue.name for queue in self.queues.values() if queue.namespaces is not None}

    def on_budget(self, old: Budget | None, new: Budget | None) -> None:
        """Take in a changed PodDisruptionBudget."""
        if self.budgets.change(old, new):
            self.changes.candidates = True
            self._version += 1
        self.holdings.look_again()

    def on_priority_class(self, old: PriorityClass | None, new: PriorityClass | None) -> None:
        """Take in a changed PriorityClass."""
        if new is not None:
            self.priorities[new.name] = new
        elif old is not None:
            self.priorities.pop(old.name, None)
        name = (new or old).name  # type: ignore[union-attr]
        concerned = {uid for uid, job in self.jobs.items() if job.priority_class == name}
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
        if uid in self._moving:
            self._version += 1  # it may be that it can't start again now, or can
        if old is None or new is None or old.generation != new.generation or old.deleting != new.deleting:
            self.changes.submissions.add(uid)
            self.restated.add(uid)
            self.holdings.look_again((uid,))
            self._stir((new or old).gang.queue)  # type: ignore[union-attr]
        move = new.move if new else None
        if move != (old.move if old else None):
            self._asked.pop(uid, None)
            if move is not None:
                self._asked[uid] = move
                self.changes.candidates = True

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
                self._keep_room(workload.uid, workload.last_end)
        for attempt in attempts:
            self.admitted(attempt)
            if attempt.end is not None:
                self._keep_room(attempt.uid, attempt.end)
        self.changes = Changes(set(self.fleet.node_names()), set(self.queues), set(self.jobs))
        self.touched = set(self.jobs) | set(self.workloads)
        self._stale |= self.touched

    def admitted(self, attempt: Attempt) -> None:
        """Count a new attempt's reservations."""
        self._drop_room(attempt.uid)
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
            self._winners[attempt.uid] = self._state(workload.queue)
        for placement in attempt.held:
            self._on_node.setdefault(placement.node, set()).add(attempt.uid)
        if attempt.uid in self.jobs:
            self._placed[attempt.uid] = self.jobs[attempt.uid].gang
            self.mix.add(self._placed[attempt.uid])
        self._recount(attempt)
        for pod in self.pods.get((attempt.uid, attempt.number), {}).values():  # they may be older than this term
            self._read(None, pod)
        self._ready_or_not(attempt.uid)
        self._stale.add(attempt.uid)
        self.touched.add(attempt.uid)
        self.restated.add(attempt.uid)

    def moved(self, move: Move, now: float) -> None:
        """Take in a move that the ledger has committed."""
        if move.shrink is not None:
            self.shrinks(move.uid, move.shrink)
            return
        attempt, workload = self.attempts[move.uid], self.workloads[move.uid]
        if move.asked is not None:
            self.attempts[move.uid] = replace(attempt, ask=None)
            self.touched.add(move.uid)
            self.restated.add(move.uid)
            return
        if move.done is not None:
            self._done(attempt, move.done, now)
            return
        if move.to is AttemptState.RESERVED:
            self.history.begin(workload.queue, attempt.quota, now)
        attempt = replace(
            attempt,
            state=move.to,
            end=move.end or attempt.end,
            running_at=now if move.to is AttemptState.RUNNING and attempt.running_at is None else attempt.running_at,
            admitted_at=now if move.to is AttemptState.RESERVED else attempt.admitted_at,
            holds=attempt.holds or move.to is AttemptState.RESERVED,
            leaving=None if move.to in {AttemptState.RUNNING, AttemptState.GROWING} else attempt.leaving,
            shrunk=None if attempt.replaces and move.to is AttemptState.RUNNING else attempt.shrunk,
            coming=attempt.coming if move.to is AttemptState.GROWING else frozenset(),
            growing_at=now if move.to is AttemptState.GROWING else attempt.growing_at,
            ask=None,
            ending_at=now if move.to is AttemptState.ENDING else attempt.ending_at,
        )
        before, self.attempts[move.uid] = self.attempts[move.uid], attempt
        self.holdings.update(attempt)
        if before.leaving and not attempt.leaving:
            self._gave_back(before, before.leaving, now)
            self._leave_claims((attempt.uid, attempt.number))
            self.touched |= self.holdings.claims
        if move.to is AttemptState.RUNNING:
            self.made.outgrown.discard(move.uid)
            self._keep(replace(workload, late_starts=0))
            self.changes.candidates = self.changes.candidates or bool(before.leaving or before.coming)
            self._ready_or_not(move.uid)
        if move.to is AttemptState.RESERVED:
            self.changes.candidates = True  # nobody takes a claim, but a higher priority may take what has its room
        if move.to is AttemptState.ENDED:
            self._ended(workload, attempt, now, move.interruption.lost.gpu_seconds if move.interruption else 0)
        self.touched.add(move.uid)
        self.restated.add(move.uid)

    def evicted(self, uid: str, end: End, now: float) -> None:
        """Take in that the ledger has promised a workload's room to somebody and ends its attempt for it."""
        attempt = self.attempts[uid]
        if attempt.state not in LEAVING:
            ending_at = now if end.first is AttemptState.ENDING else None
            attempt = replace(attempt, state=end.first, end=end, ending_at=ending_at)
        self.attempts[uid] = replace(attempt, claimed=True)
        self.holdings.update(self.attempts[uid])
        self._keep_room(uid, end)
        self.touched.add(uid)
        self.restated.add(uid)

    def refused(self, request: MoveRequest) -> list[str]:
        """Take in that moves are not made that were asked for; return the workloads that bear the request."""
        uids = [uid for uid, asked in self._asked.items() if asked == request]
        for uid in uids:
            del self._asked[uid]
        return uids

    def shrinks(self, uid: str, shrink: Shrink) -> None:
        """Take in that a workload gives up a part of its room; the rest runs on."""
        self.attempts[uid] = self.attempts[uid].shrinking(shrink)
        self.holdings.update(self.attempts[uid])
        self.touched.add(uid)
        self.restated.add(uid)

    def grows(self, uid: str, part: Portion, now: float) -> None:
        """Take in that a workload has room for further pods; those that it has run on."""
        self.attempts[uid] = self.attempts[uid].growing(part, now)
        self.holdings.update(self.attempts[uid])
        self.history.begin(self.workloads[uid].queue, part.quota, now)
        for placement in part.placements:
            self._on_node.setdefault(placement.node, set()).add(uid)
        self._count_held(uid)
        self.touched.add(uid)
        self.restated.add(uid)

    def repairs(self, uid: str, repair: Repair, now: float) -> None:
        """Take in that lost pods of a workload are replaced; the others run on."""
        self.attempts[uid] = self.attempts[uid].repairing(repair, now)
        self.holdings.update(self.attempts[uid])
        del self.losses[uid]
        cleared = self._cleared.get((uid, self.attempts[uid].number), {})
        for key in repair.pods:
            cleared.pop(key, None)
        for placement in repair.found:
            self._on_node.setdefault(placement.node, set()).add(uid)
        self._count_held(uid)
        self.touched.add(uid)
        self.restated.add(uid)

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
        self.attempts[uid] = replace(self.attempts[uid], saved_at=checkpoint.at)
        self.holdings.update(self.attempts[uid])
        self.restated.add(uid)

    def heard(self, key: AttemptKey, pod: PodKey, report: Report) -> None:
        """Take in what a pod of an active attempt says that it has saved."""
        if not self._active(key):
            return
        before = self._reports.setdefault(key, {}).get(pod)
        known = self._reports[key][pod] = report.after(before)
        if known != before:
            self._saving.setdefault(key[0])
            self.touched.add(key[0])
            self.restated.add(key[0])

    def reports(self, attempt: Attempt) -> Reports:
        """Return what an attempt's pods say that they have saved."""
        return self._reports.get((attempt.uid, attempt.number), {})

    def forget(self, uid: str) -> None:
        """Forget a workload that is over, its object gone or going."""
        self._drop_room(uid)
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
        return len(answered(attempt, job, self._pods_of(attempt), self.reports(attempt), attempt.asking))

    def take_saves(self, now: float) -> dict[str, Checkpoint]:
        """Return the checkpoints that active attempts have made since the last time; of those that leave first."""
        found: dict[str, Checkpoint] = {}
        for uid in sorted(self._saving, key=lambda uid: uid not in self.attempts or not self.attempts[uid].going):
            if len(found) == MAX_SAVES:
                break
            del self._saving[uid]
            attempt, job = self.attempts.get(uid), self.jobs.get(uid)
            checkpoint = saved(attempt, job, self.reports(attempt), now) if attempt and job else None
            if checkpoint is not None and checkpoint.follows(self.workloads[uid].saved):
                found[uid] = checkpoint
        return found

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
            workload = replace(known, queue=gang.queue, priority=self._priority(job))
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
        self._forgive(all_of_them=at is not None and at <= now)  # the end of a back-off comes from outside, too
        stale, self._stale = self._stale, set()
        waiting = [self._gang(self.jobs[uid], self.workloads[uid]) for uid in stale if self._waits(uid)]
        self.waiting.update(waiting, gone=stale)
        return Snapshot(
            queues=self.queues,
            flavors=self.flavors,
            waiting=self.waiting,
            fleet=self.fleet.snapshot(),
            tree=self.holdings.now,
            later=self.holdings.later,
            running=self.holdings.running(self.workloads, self.preemptible, self.covered, self._elastic),
            departing=self.holdings.departing(self.workloads),
            version=self._version,
            versions=dict(self.holdings.versions),
            broken_queues=broken,
            budgets=self.budgets.allowed(self.departures()),
            past=self.history.past(now),
            policy=self.policy,
            namespaces=self.namespaces,
            held=self._held,
            elastic=self._lacking(),
            orders=self._orders(),
            moving=self._kept(now),
            broken=[self._broken(uid, loss, now) for uid, loss in self.losses.items() if uid in self.jobs],
            mix=self.mix,
        )

    def gangs(self) -> dict[str, Gang]:
        """Return the gangs that could move, by uid: with an attempt that was planned for the spec that they have now.

        A new attempt starts with all pods again, so those are left out of whose pods some are done; it costs what is
        not saved, so those are too that can't be asked to.
        """
        return {
            uid: self.jobs[uid].gang for uid, attempt in self.attempts.items() if self._can_move(uid, attempt.number)
        }

    def _waits(self, uid: str) -> bool:
        workload = self.workloads.get(uid)
        return workload is not None and workload.state is WorkloadState.QUEUED and self.problem(uid) is None

    def problem(self, uid: str) -> Why | None:
        """Return what keeps a waiting job out of the cycle altogether, if anything."""
        job = self.jobs.get(uid)
        if job is None or job.deleting:
            return why(Reason.DELETED)
        if job.priority_class and job.priority_class not in self.priorities:
            return why(
                Reason.MISCONFIGURED,
                field="spec.priorityClassName",
                problem=f"PriorityClass {job.priority_class} does not exist; create it or name another",
            )
        workload = self.workloads.get(uid)
        end = workload.last_end if workload else None
        if end is not None and end.barred == job.generation:
            return end.why
        return job.problem

    def view(self, uid: str, now: float) -> View | None:
        """Return what the next move of the workload's active attempt depends on; None without an attempt."""
        attempt = self.attempts.get(uid)
        if attempt is None:
            return None
        pods = self._pods_of(attempt)
        told = pods.items() if attempt.state is AttemptState.ENDING else ()
        stuck = frozenset(key for key, pod in told if self._stuck_from(pod) <= now)
        return View(
            workload=self.workloads[uid],
            attempt=attempt,
            job=self.jobs.get(uid),
            pods=pods,
            places=self._places(attempt, now),
            victims=[victim for victim, _ in attempt.victims],
            kept=attempt.holds or self._replant or self.holdings.keeps(uid, self.workloads),
            now=now,
            back_off=self._back_off,
            irreparable=uid in self._irreparable,
            reports=self.reports(attempt),
            leave=next((leave for p in attempt.held if (leave := self._avoided.leave(p.node))), None),
            allocated=bool(attempt.going) and self.devices.allocated(attempt, besides=stuck),
            unready=self.silent(attempt),
            not_ready_seconds=self.suspects.patience(len(self._nodes)),
            stuck=stuck,
        )

    def silent(self, attempt: Attempt) -> dict[str, float]:
        """Return the nodes of the attempt that are not Ready, and since when, in Unix seconds."""
        return self.suspects.unready_of(p.node for p in attempt.held)

    def leaving(self, attempt: Attempt) -> list[Eviction]:
        """Return those whom a claim still waits for, as far as it is known of them."""
        result = []
        for uid, number in attempt.victims:
            victim, workload = self.attempts.get(uid), self.workloads.get(uid)
            if victim is None or victim.number != number or workload is None:
                continue
            facts = victim.end.why.facts if victim.end else {}
            lost = Work(int(str(facts.get("gpu_seconds", 0))), int(str(facts.get("pod_seconds", 0))))
            name = f"{workload.namespace}/{workload.name}"
            part = victim.leaving
            result.append(Eviction(uid, Cause.QUEUE, name, workload.queue, workload.priority, lost, part=part))
        return result

    def overdue(self, now: float) -> set[str]:
        """Return the workloads whose deadline has passed."""
        result = set()
        for uid, attempt in self.attempts.items():
            job = self.jobs.get(uid)
            at = deadline(attempt, job) if job else None
            if at is not None and at <= now:
                result.add(uid)
        return result.union(*(uids for at, uids in self.given_up() if at <= now))

    def _stuck_from(self, pod: Pod) -> float:
        node = self._nodes.get(pod.node)
        return stuck_from(pod, unreachable=node is None or not node.ready)

    def given_up(self) -> Iterator[tuple[float, set[str]]]:
        """Yield times (Unix seconds) at which nobody waits for a node or pod any longer, and the workloads concerned."""
        patience = self.suspects.patience(len(self._nodes))
        for node, since in self.suspects.unready.items():
            yield since + patience, self._on_node.get(node, set())
        for uid, attempt in self.attempts.items():
            if attempt.state is AttemptState.ENDING:
                for pod in self.pods.get((uid, attempt.number), {}).values():
                    yield self._stuck_from(pod), {uid}

    def waits_in_vain(self, uid: str) -> bool:
        """Tell whether the workload waits although its job is deleted."""
        workload, job = self.workloads.get(uid), self.jobs.get(uid)
        return workload is not None and workload.state is WorkloadState.QUEUED and (job is None or job.deleting)

    def is_over(self, uid: str) -> bool:
        """Tell whether the workload holds nothing and never will."""
        workload = self.workloads.get(uid)
        return workload is None or workload.state is WorkloadState.FINISHED

    def whose(self, node: str, pod: str) -> str | None:
        """Return whose a pod on a node is, by its namespace and name; without these, who is alone there."""
        there = self._on_node.get(node, set())
        if not pod:
            return next(iter(there)) if len(there) == 1 else None
        for uid in there:
            pods = self.pods.get((uid, self.attempts[uid].number), {}).values() if uid in self.attempts else ()
            if any(f"{one.namespace}/{one.name}" == pod for one in pods):
                return uid
        return None

    def orphans(self) -> list[Pod]:
        """Return pods of ours that no active attempt owns and that may still run."""
        return [
            pod
            for key, pods in self.pods.items()
            if not self._active(key)
            for pod in pods.values()
            if not pod.ended and not pod.deleting
        ]

    # Inside

    def _keep_room(self, uid: str, end: End) -> None:
        """Keep room for a workload that moves."""
        moving = kept_for(self.workloads[uid].queue, end.why)
        if moving is not None:
            self._moving[uid] = moving
            self._version += 1

    def _drop_room(self, uid: str) -> None:
        if self._moving.pop(uid, None) is not None:
            self._version += 1

    def _kept(self, now: float) -> dict[str, Moving]:
        """Return the room that is kept for those who leave to move, and for those who wait to start again."""
        for uid in [uid for uid, moving in self._moving.items() if moving.until <= now]:
            self._drop_room(uid)
        return {uid: one for uid, one in self._moving.items() if uid in self.attempts or self.waiting.get(uid)}

    def _orders(self) -> list[MoveOrder]:
        """Return the moves that are asked for; of those for somebody who has room by now, nothing is left to do."""
        requests = dict.fromkeys(self._asked.values())
        for request in requests:
            if request.uid in self.attempts:
                self.refused(request)
        return [
            MoveOrder(
                request,
                {uid: self.jobs[uid].gang for uid, number in request.moves if self._can_move(uid, number)},
                whole=all(self._asked.get(uid) == request for uid, _ in request.moves),
            )
            for request in requests
            if request.uid not in self.attempts
        ]

    def _can_move(self, uid: str, number: int) -> bool:
        """Tell whether this attempt is there as its job's spec is now, none of its pods done, and can save its work."""
        job, attempt = self.jobs.get(uid), self.attempts.get(uid)
        if job is None or attempt is None or attempt.done or job.saving is None:
            return False
        return attempt.number == number and attempt.generation == job.generation

    def _learn(self, pod: Pod) -> None:
        """Take in what the API server has made of a gated pod; jobs of that shape in its namespace will have the like."""
        job = self.jobs.get(pod.workload)
        if job and job.generation == self.attempts[pod.workload].generation and self.made.learn(job, pod):
            mine, shape = job.gang.namespace, job.gang.shape
            like = [one for one in self.jobs.values() if one.gang.namespace == mine and one.gang.shape == shape]
            self._judge_again(like)

    def _judge_again(self, jobs: Iterable[Job]) -> None:
        """Have jobs with what is known of them now."""
        for job in map(self._judged, jobs):
            uid = job.gang.uid
            if job != self.jobs.get(uid):
                self.jobs[uid] = job
                self._stale.add(uid)
                self.touched.add(uid)
                self.restated.add(uid)
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
        self.attempts[attempt.uid] = attempt.without(done)
        self.holdings.update(self.attempts[attempt.uid])
        self._gave_back(attempt, done.part, now)
        for key in done.pods:
            self._cleared.get((attempt.uid, attempt.number), {}).pop(key, None)
        self.changes.candidates = True  # there is more room, and less that can be taken
        self.touched.add(attempt.uid)
        self.restated.add(attempt.uid)

    def _gave_back(self, before: Attempt, part: Portion, now: float) -> None:
        """Take in that an attempt holds a part no longer."""
        self.history.end(self.workloads[before.uid].queue, part.quota, now)
        for placement in before.held:
            self._on_node[placement.node].discard(before.uid)
        for placement in self.attempts[before.uid].held:
            self._on_node[placement.node].add(before.uid)
        self._count_held(before.uid)
        self._hold_devices(self.attempts[before.uid])

    def _pods_of(self, attempt: Attempt) -> Mapping[PodKey, Pod]:
        """Return an attempt's pods. One that was removed after it had succeeded is still done, not lost."""
        key = (attempt.uid, attempt.number)
        pods, cleared = self.pods.get(key, {}), self._cleared.get(key)
        return {**cleared, **pods} if cleared and attempt.state is not AttemptState.ENDING else pods

    def _read(self, old: Pod | None, pod: Pod) -> None:
        """Take in what a pod of ours reports, where that is new; and of one that is gated, what it is like."""
        key = (pod.workload, pod.attempt)
        if pod.gated and self._active(key):
            self._learn(pod)
        if pod.report is not None and (old is None or old.report != pod.report):
            self.heard(key, (pod.role, pod.index), pod.report)
        if pod.ended and not (old and old.ended) and self._active(key):
            known = self._reports.get(key, {}).get((pod.role, pod.index))
            if (said := by_exit(self.attempts[pod.workload], pod, known)) is not None:
                self.heard(key, (pod.role, pod.index), said)
        if pod.report_problem and not (old and old.report_problem) and self._active(key):
            cause = why(Reason.REPORT_UNREADABLE, pod=pod.name, problem=pod.report_problem)
            self.unreadable.setdefault(pod.workload, cause)

    def _ended(self, workload: Workload, attempt: Attempt, now: float, lost: int) -> None:
        end = attempt.end
        if end is None:
            raise ValueError(f"attempt {attempt.number} of {workload.uid} ended without an end")
        requeued = end.outcome is Outcome.REQUEUE
        self._keep(
            replace(
                workload,
                state=WorkloadState.QUEUED if requeued else WorkloadState.FINISHED,
                failures=workload.failures + end.charged,
                late_starts=workload.late_starts + end.late,
                ignored=end.ignored or workload.ignored,
                not_before=end.not_before,
                preemptions=workload.preemptions + (attempt.holds and end.why.reason in FOR_OTHERS),
                requeued_at=now,
                last_end=end,
                finished_at=None if requeued else now,
                lost=workload.lost + lost,
            )
        )
        if end.ignored is not None:
            self.faults.blame(self.workloads[workload.uid])
            self.judge_faults(now)
        del self.attempts[workload.uid]
        self.made.end(workload.uid)
        self._small.discard(workload.uid)
        self._count_held(workload.uid)
        self._cleared.pop((workload.uid, attempt.number), None)
        self._reports.pop((workload.uid, attempt.number), None)
        if workload.uid in self._placed:
            self.mix.add(self._placed.pop(workload.uid), -1)
        self._stale.add(workload.uid)
        if attempt.holds:
            for part in attempt.parts:
                self.history.end(workload.queue, part.quota, now)
        self.holdings.remove(workload.uid)
        for placement in attempt.held:
            self._on_node.get(placement.node, set()).discard(workload.uid)
        self._recount(attempt)
        self._leave_claims((attempt.uid, attempt.number))
        self.touched |= self.holdings.claims
        self.restated |= self.holdings.claims  # they say for whom they wait
        if not requeued:
            self._drop_room(workload.uid)
        if end.why.reason not in _OF_OURS:
            self._stir(workload.queue)
        self.changes.submissions.add(workload.uid)  # its queue may have been edited meanwhile

    def _leave_claims(self, victim: AttemptKey) -> None:
        """Nobody waits for a victim any longer that has ended, or shrunk."""
        for uid in self.holdings.claims:
            claim = self.attempts[uid]
            if victim in claim.victims:
                self.attempts[uid] = replace(claim, victims=tuple(v for v in claim.victims if v != victim))
                self.holdings.update(self.attempts[uid])
                self.restated.add(uid)

    def _recount(self, attempt: Attempt) -> None:
        """Its pods, and their devices, are covered by its reservation, or not any longer."""
        self._hold_devices(attempt)
        for pod in self.pods.get((attempt.uid, attempt.number), {}).values():
            self._count(pod)

    def _replaced(self, pod: Pod) -> bool:
        """Tell whether a pod of an active attempt is a lost one that has to go before another has its name."""
        attempt = self.attempts[pod.workload]
        return attempt.state is AttemptState.REPAIRING and (pod.role, pod.index) in attempt.coming

    def _judge_node(self, name: str) -> None:
        """Have a node as it was read last, with why it is avoided, and when maintenance takes it."""
        node = self._nodes.get(name)
        why_not, at = self._avoided.why(name), self._windows.get(name)
        self.devices.on_node(name, node and replace(node, avoided=why_not, taken_at=at))
        self._changed_nodes({name})

    def _hold_devices(self, attempt: Attempt) -> None:
        for node in self.devices.hold(attempt, ended=not self._active((attempt.uid, attempt.number))):
            self._crowd(node)

    def _changed_nodes(self, names: Iterable[str]) -> None:
        for name in names:
            self._version += 1
            self._crowd(name)

    def _active(self, key: AttemptKey) -> bool:
        attempt = self.attempts.get(key[0])
        return attempt is not None and attempt.number == key[1]

    def _count(self, pod: Pod) -> None:
        """Count a pod as another's, unless it has ended or is not bound; of ours what is not reserved for it."""
        reserved = bool(pod.workload) and self._active((pod.workload, pod.attempt))
        asks = self.made.beyond(pod) if reserved else pod.requests  # it may have been resized in place
        now = (pod.node, asks) if pod.node and asks else None
        before = self._counted.get(pod.uid)
        if now == before:
            return
        if before is not None:
            self._uncount(pod)
        if now is not None:
            self._counted[pod.uid] = now
            self.fleet.use(*now, +1)
            self._crowd(pod.node)

    def _uncount(self, pod: Pod) -> None:
        before = self._counted.pop(pod.uid, None)
        if before is not None:
            self.fleet.use(*before, -1)
            self._crowd(before[0])

    def _crowd(self, node: str) -> None:
        self.changes.nodes.add(node)
        self.touched |= self._on_node.get(node, set())

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

    def _places(self, attempt: Attempt, now: float | None = None) -> dict[str, Place]:
        """Return what an attempt's nodes are worth to it; before it holds them, at a time in Unix seconds, as to others."""
        job = self.jobs.get(attempt.uid)
        constraints = {role.name: role.constraints for role in job.gang.roles} if job else {}
        places: dict[str, Place] = {}
        for placement in attempt.held:
            flavor = self.flavors.get(placement.flavor, Flavor(placement.flavor))
            known = constraints.get(placement.role)
            place = self.fleet.place(placement.node, flavor, known or Constraints(), placement.requests)
            if places.get(placement.node, Place.GOOD) is Place.GOOD:
                outgrown = place is Place.GOOD and attempt.uid in self.made.outgrown
                places[placement.node] = Place.OUTGROWN if outgrown else place
        if now is not None and job is not None and not attempt.holds and not job.gang.lifetime.movable:
            taken = (node for node in places if self.fleet.taken_at(node) < now + (job.max_run_seconds or inf))
            places |= {node: Place.TAKEN for node in taken if places[node] is Place.GOOD}
        return places

    def preemptible(self, attempt: Attempt) -> bool:
        """Tell whether others may take from an attempt: by the spec that it was planned for, not by a later one."""
        job = self.jobs.get(attempt.uid)
        return job is None or job.generation != attempt.generation or self._class_of(job).preemptible

    def _class_of(self, job: Job) -> PriorityClass:
        """Return what holds for the job, by its class and its own word."""
        named = self.priorities.get(job.priority_class) if job.priority_class else None
        given = named or PriorityClass(job.priority_class, 0 if job.priority_class else job.gang.priority)
        return given if job.gang.preemptible or not given.preemptible else replace(given, preemptible=False)

    def _ready_or_not(self, uid: str) -> None:
        """Take in that a gang may have pods to spare now, or has none any more."""
        attempt, job = self.attempts.get(uid), self.jobs.get(uid)
        if attempt is None or job is None or all(role.least is None for role in job.gang.roles):
            return
        self.holdings.look_again((uid,))
        small = attempt.whole.pods < sum(role.pods for role in job.gang.roles)
        (self._small.add if small else self._small.discard)(uid)
        if self._whole(attempt):
            self.changes.candidates = True

    def _whole(self, attempt: Attempt) -> Job | None:
        """Return the job of an attempt if it is an elastic one that runs, and all of its pods are ready."""
        job = self.jobs.get(attempt.uid) if attempt.state is AttemptState.RUNNING else None
        if job is None or all(role.least is None for role in job.gang.roles):
            return None
        return job if all_ready(attempt, self._pods_of(attempt)) else None

    def _lacking(self) -> list[Elastic]:
        """Return who could grow: who lacks pods of those that it asks for, and has not tried in vain.

        Not where some are done already, or others would do instead: then nobody can say how many it should have.
        """
        found = []
        for uid in self._small:
            attempt, job = self.attempts[uid], self._whole(self.attempts[uid])
            if job is None or job.deleting or job.generation != attempt.generation or attempt.done or attempt.claimed:
                continue
            failed = attempt.shrunk is not None and attempt.shrunk.reason is Reason.GROWTH_FAILED
            if not failed and not job.gang.alternatives:
                found.append(Elastic(self._gang(job, self.workloads[uid]), attempt.whole, _over_at(attempt, job)))
        return found

    def _broken(self, uid: str, loss: Loss, now: float) -> Broken:
        attempt, gang = self.attempts[uid], self._gang(self.jobs[uid], self.workloads[uid])
        pods, places = pods_of(attempt.placements), self._places(attempt)
        roles = tuple(replace(role, pods=pods[role.name]) for role in gang.roles if role.name in pods)
        good = frozenset(node for node, place in places.items() if place is Place.GOOD)
        closed = frozenset(node for node, place in places.items() if place in {Place.CLOSED, Place.GONE})
        until, starts_by = _over_at(attempt, self.jobs[uid]), now + gang.lifetime.start
        return Broken(replace(gang, roles=roles), attempt.whole, loss.pods, good, closed, loss.why, until, starts_by)

    def _elastic(self, attempt: Attempt) -> Portion | None:
        """Return the pods of an attempt that it can give up and run on; only when all of its pods are ready."""
        job = self._whole(attempt)
        if job is None:
            return None
        part = last(attempt.whole, spare(job.gang.roles, attempt))
        return part if part.placements else None

    def covered(self, attempt: Attempt, placements: Iterable[Placement]) -> tuple[tuple[str, int], ...]:
        """Return the disruption budgets that cover these pods of an attempt, and how many."""
        return self.budgets.covering(self.jobs.get(attempt.uid), attempt, placements)

    def departures(self) -> Iterator[tuple[Job | None, Attempt]]:
        """Yield attempts that were told to go, or to give up some of their pods, and have these yet."""
        for attempt in self.attempts.values():
            if attempt.going and self.pods.get((attempt.uid, attempt.number)):
                yield self.jobs.get(attempt.uid), attempt

    def _gang(self, job: Job, workload: Workload) -> Gang:
        given = self._class_of(job)
        return job.gang.but(
            priority=workload.priority,
            preemptible=given.preemptible,
            preempts=given.preempts and workload.uid not in self._winners and workload.late_starts < MAX_LATE_STARTS,
            waits_since=workload.requeued_at,
            seq=workload.seq,
            submitted_at=workload.submitted_at,
            not_before=workload.not_before,
            last_end=str(workload.last_end.why) if workload.last_end else "",
        )

    def _state(self, queue: str) -> tuple[int, int]:
        """Return what tells a state of things from others, as far as it comes from outside."""
        return (self._version, self._stirs.get(self._root(queue), 0))

    def _stir(self, queue: str) -> None:
        root = self._root(queue)
        self._stirs[root] = self._stirs.get(root, 0) + 1

    def _root(self, queue: str) -> str:
        node = self.holdings.later.nodes.get(queue)
        return node.root.name if node else queue

    def _forgive(self, *, all_of_them: bool) -> None:
        """Let those preempt again for whom something has changed from outside since they did.

        Else rules that don't agree could have gangs evict each other in a circle for ever: one takes back what its
        queue owns, a higher priority of its own queue takes that, and a third takes it by its fair share.
        """
        for uid, state in list(self._winners.items()):
            workload = self.workloads.get(uid)
            if all_of_them or workload is None or self._state(workload.queue) != state:
                del self._winners[uid]
                self._stale.add(uid)

    def _priority(self, job: Job) -> int:
        return self._class_of(job).value


def _identity(pod: Pod) -> tuple[str, int, str, int]:
    """Return what our labels say, which anybody may change."""
    return pod.workload, pod.attempt, pod.role, pod.index


def _over_at(attempt: Attempt, job: Job) -> float:
    """Return when a running attempt is over by its own limits, in Unix seconds."""
    return inf if job.max_run_seconds is None else (attempt.running_at or attempt.admitted_at) + job.max_run_seconds
