"""Cases of KAI's form: gangs on nodes in queues of a tree, and where they are once a few cycles have been run.

That peer's policy in the words of this one: a queue owns what it deserves; the tree's root owns what nobody deserves,
which is borrowed by weighted share; a queue above owns what it deserves beyond those below it. A higher priority of a
queue goes before any weight, and before any priority of a job. Of the same priority the latest gives way first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from queuectl.core.backlog import Backlog
from queuectl.core.cycle import plan
from queuectl.core.defrag import proposals
from queuectl.core.fleet import Fleet
from queuectl.core.lifecycle import View, next_move
from queuectl.core.preemption import Running
from queuectl.core.snapshot import Policy, Snapshot
from queuectl.core.tree import Tree
from queuectl.model.lifecycle import Attempt, AttemptState, Workload
from queuectl.model.objects import Flavor, Gang, Job, Level, Node, Pod, Queue, Role, Together
from queuectl.model.plan import Placement
from queuectl.model.policy import Cell, FairRule, Preemption, Quota, Reclaim, VictimChoice, Within

Case = Mapping[str, Any]

GPU = "nvidia.com/gpu"
FLAVOR = "default"
CELL: Cell = (FLAVOR, GPU)
ROOT = "everybody"
PLENTY = 10**15  # of what a case does not limit
USUAL_PRIORITY = 100  # of a queue
GOES_BEFORE = 10**6  # any weight, or any priority of a job, times this goes before any other
HARDLY = Fraction(1, 1000)  # weight of a queue of weight 0: it, too, may use what is idle
RULES = Preemption(Within.LOWER_PRIORITY, Reclaim.ANY, victims=VictimChoice.LOWEST_PRIORITY)
POLICY = Policy(fair_sharing=(FairRule.FINAL,))
AT_REST = 5  # further cycles, in which nothing may change
SECONDS = 600.0  # from one cycle to the next: longer than a start may take


def outcome(case: Case) -> dict[str, Any]:
    """Return which jobs run at the end, and five cycles later; with the node where the case names one."""
    world = _World(case)
    world.run(case["cycles"])
    found = {name: world.state(name, want) for name, want in case["expected"]["jobs"].items()}
    world.run(AT_REST)
    return found | {f"{name} at rest": world.state(name, want) for name, want in case["expected"]["jobs"].items()}


def expected(case: Case) -> dict[str, Any]:
    """Return the states that the case tells, which must last."""
    found = {
        name: want["state"] + (f" on {want['node']}" if "node" in want else "")
        for name, want in case["expected"]["jobs"].items()
    }
    return found | {f"{name} at rest": state for name, state in found.items()}


@dataclass
class _World:
    """A cluster in which pods start and leave at once, each cycle's decisions before the next."""

    case: Case
    now: float = 0.0
    gangs: dict[str, Gang] = field(default_factory=dict)
    attempts: dict[str, Attempt] = field(default_factory=dict)  # of those that hold room
    pods: dict[str, list[str]] = field(default_factory=dict)  # their phases, of those that run from the beginning

    def __post_init__(self) -> None:
        self.queues = _queues(self.case)
        for at, job in enumerate(self.case["jobs"]):
            gang = self.gangs[job["name"]] = _gang(job, self.case, at)
            if any(pod["state"] == "Running" for pod in job["pods"]):
                self.pods[gang.uid] = [pod["state"] for pod in job["pods"]]
                nodes = [pod["node"] for pod in job["pods"]]
                role = gang.roles[0]
                self.start(
                    gang.uid,
                    tuple(
                        Placement(role.name, FLAVOR, node, nodes.count(node), role.requests)
                        for node in dict.fromkeys(nodes)
                    ),
                )

    def run(self, cycles: int) -> None:
        for _ in range(cycles):
            self.now += SECONDS
            self._lifecycle()
            self._plan()
            self._consolidate()

    def state(self, name: str, want: Mapping[str, Any]) -> str:
        attempt = self.attempts.get(name)
        if attempt is None:
            return "Pending"
        nodes = ", ".join(sorted({p.node for p in attempt.placements}))
        return f"Running on {nodes}" if "node" in want else "Running"

    def start(self, uid: str, placements: tuple[Placement, ...]) -> None:
        """Have a gang's pods run, or those of them that do in the case's beginning."""
        up = all(phase == "Running" for phase in self.pods.get(uid, ()))
        usage = {CELL: sum(dict(p.requests).get(GPU, 0) * p.pods for p in placements)}
        self.attempts[uid] = Attempt(
            uid, 1, AttemptState.RUNNING if up else AttemptState.UNGATED, 1, placements,
            admitted_at=self.now, running_at=self.now if up else None, quota={c: n for c, n in usage.items() if n},
        )  # fmt: skip

    def stop(self, uid: str) -> None:
        """Have its pods gone."""
        del self.attempts[uid]
        self.pods.pop(uid, None)

    def _lifecycle(self) -> None:
        for uid, attempt in list(self.attempts.items()):
            gang = self.gangs[uid]
            nodes = [p.node for p in attempt.placements for _ in range(p.pods)]
            phases = self.pods.get(uid) or ["Running"] * len(nodes)
            pods = {
                (gang.roles[0].name, i): Pod(
                    f"{uid}-{i}", "", f"{uid}-{i}", "", node, phase, ready=phase == "Running",
                    workload=uid, role=gang.roles[0].name, index=i,
                )
                for i, (node, phase) in enumerate(zip(nodes, phases, strict=True))
            }  # fmt: skip
            workload = Workload(uid, "", uid, gang.queue, gang.priority, gang.submitted_at, gang.seq)
            move = next_move(View(workload, attempt, Job(gang, 1, ""), pods, {}, self.now))
            if move is not None and move.to is AttemptState.ENDING:
                self.stop(uid)

    def _plan(self) -> None:
        decided = plan(self.snapshot(), self.now)
        for uid, _ in decided.evictions:
            self.stop(uid)
        for preempt in decided.preemptions:
            for victim in preempt.victims:
                self.stop(victim.uid)
        for admission in (*decided.admissions, *(preempt.admission for preempt in decided.preemptions)):
            self.start(admission.uid, admission.placements)

    def _consolidate(self) -> None:
        """Have gangs moved to make room for others, which then start in a later cycle."""
        for proposal in proposals(self.snapshot(), self.gangs, self.now, within=PLENTY):
            for move in proposal.moves:
                self.stop(move.gang.uid)
                self.start(move.gang.uid, move.to)

    def snapshot(self) -> Snapshot:
        """Return what the core sees."""
        fleet, tree = Fleet(), Tree.of(self.queues.values())
        running: dict[str, list[Running]] = {}
        for node in self.case["nodes"]:
            fleet.set_node(_node(node))
        for attempt in self.attempts.values():
            gang = self.gangs[attempt.uid]
            tree.add(gang.queue, attempt.quota)
            for p in attempt.placements:
                fleet.reserve(p.node, p.requests, p.pods)
            running.setdefault(gang.queue, []).append(_running(gang, attempt))
        return Snapshot(
            queues=self.queues,
            flavors={FLAVOR: Flavor(FLAVOR, levels=_levels(self.case))},
            waiting=Backlog(gang for uid, gang in self.gangs.items() if uid not in self.attempts),
            fleet=fleet,
            tree=tree,
            later=tree.copy(),
            running=running,
            policy=POLICY,
        )


def _queues(case: Case) -> dict[str, Queue]:
    listed = {queue["name"]: queue for queue in case["queues"]}
    gpus = sum(node["gpus"] for node in case["nodes"])

    def deserved(name: str) -> int:
        amount: int | None = listed[name]["deservedGpus"]
        return gpus if amount is None else amount

    def below(name: str) -> int:
        return sum(owned(child) for child, queue in listed.items() if queue["parent"] == name)

    def owned(name: str) -> int:
        return max(deserved(name), below(name))

    top = sum(owned(name) for name, queue in listed.items() if queue["parent"] is None)
    queues = {ROOT: Queue(ROOT, quotas={CELL: Quota(max(0, gpus - top))})}
    for name, queue in listed.items():
        limit = queue["limitGpus"]
        before = (queue["priority"] or USUAL_PRIORITY) - USUAL_PRIORITY
        queues[name] = Queue(
            name,
            queue["parent"] or ROOT,
            quotas={CELL: Quota(owned(name) - below(name), None if limit is None else max(0, limit - owned(name)))},
            weight=(Fraction(queue["overQuotaWeight"]) or HARDLY) * Fraction(GOES_BEFORE) ** before,
            preemption=RULES,
        )
    return queues


def _levels(case: Case) -> tuple[Level, ...]:
    """Return the levels of the case's topology, which are called what their labels are."""
    return tuple(Level(label, label) for topology in case.get("topologies", ()) for label in topology["levels"])


def _node(node: Mapping[str, Any]) -> Node:
    allocatable = {
        GPU: node["gpus"],
        "cpu": node.get("cpuMilli", PLENTY),
        "memory": node.get("memory", PLENTY),
        "pods": PLENTY,
    }
    return Node(node["name"], node["labels"], allocatable=allocatable)


def _gang(job: Mapping[str, Any], case: Case, at: int) -> Gang:
    requests = {
        GPU: job["gpusPerPod"],
        "cpu": job.get("cpuMilliPerPod", 0),
        "memory": job.get("memoryPerPod", 0),
        "pods": 1,
    }
    pods = len(job["pods"])
    role = Role(
        "pods",
        pods,
        tuple(sorted((resource, amount) for resource, amount in requests.items() if amount)),
        least=job["minPods"] if job["minPods"] < pods else None,
    )
    topology = job.get("topology") or {}
    queue = next(queue for queue in case["queues"] if queue["name"] == job["queue"])
    before = (queue["priority"] or USUAL_PRIORITY) - USUAL_PRIORITY
    return Gang(
        uid=job["name"],
        namespace="",
        name=job["name"],
        queue=job["queue"],
        priority=before * GOES_BEFORE + job["priority"],
        submitted_at=0.0,
        seq=at,
        roles=(role,),
        together=Together(topology.get("required") or "", topology.get("preferred") or ""),
        preemptible=job["preemptible"],
    )


def _running(gang: Gang, attempt: Attempt) -> Running:
    return Running(
        uid=gang.uid,
        queue=gang.queue,
        priority=gang.priority,
        submitted_at=gang.submitted_at,
        admitted_at=gang.seq,  # in the order in which the case lists them
        usage=attempt.quota,
        placements=attempt.placements,
        gpus=attempt.quota.get(CELL, 0),
        pods=sum(p.pods for p in attempt.placements),
        ready_at=attempt.running_at,
        preemptible=gang.preemptible,
    )
