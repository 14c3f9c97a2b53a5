"""Cases of Volcano's form: nodes, queues and groups of pods, and the pods that one of its actions binds or evicts."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from queuectl.core.backlog import Backlog
from queuectl.core.cycle import plan
from queuectl.core.fleet import Fleet
from queuectl.core.preemption import Running
from queuectl.core.repair import places_for_missing
from queuectl.core.snapshot import Snapshot
from queuectl.core.tree import Tree
from queuectl.model.objects import Constraints, Flavor, Gang, Level, Node, Queue, Role, Together
from queuectl.model.plan import Placement
from queuectl.model.policy import Cell, Preemption, Quota, Reclaim, StopPolicy, VictimChoice, Within
from queuectl.model.resources import total

Case = Mapping[str, Any]

_FLAVOR = "all"
_ROOT = "/"  # the queue above all; its name is nobody else's
_RULES = {
    "allocate": Preemption(),
    "preempt": Preemption(within_queue=Within.LOWER_PRIORITY, victims=VictimChoice.LOWEST_PRIORITY),
    "reclaim": Preemption(reclaim=Reclaim.ANY, victims=VictimChoice.LOWEST_PRIORITY),
}


@dataclass(frozen=True)
class _Workload:
    """Pods of a group that are one job, by role."""

    name: str
    group: Case
    roles: Mapping[str, Sequence[Case]]
    least: Mapping[str, int]
    evictable: bool = True

    @property
    def pods(self) -> list[Case]:
        return [pod for pods in self.roles.values() for pod in pods]


def outcome(case: Case) -> dict[str, Any]:
    """Return what the core decides, in the words of the case's ``expected``."""
    waiting = {workload.name: workload for workload in _workloads(case, "Pending")}
    running = {workload.name: workload for workload in _workloads(case, "Running")}
    snapshot = _snapshot(case, waiting.values(), running.values())
    bound = _grown(case, snapshot)
    decided = plan(snapshot, 0.0)
    for admission in decided.admissions:
        bound |= _bound(waiting[admission.uid], admission.placements)
    evicted = [pod["name"] for p in decided.preemptions for v in p.victims for pod in running[v.uid].pods]
    return {"bind": bound, "bindCount": len(bound), "evict": sorted(evicted), "evictCount": len(evicted)}


def expected(case: Case) -> dict[str, Any]:
    """Return the part of ``expected`` that the outcome is held against."""
    return {**case["expected"], "evict": sorted(case["expected"]["evict"])}


def _grown(case: Case, snapshot: Snapshot) -> dict[str, str]:
    """Give the waiting pods of groups that run already a place beside the others, and return it."""
    bound: dict[str, str] = {}
    for group in case["groups"]:
        pods = sorted(
            (pod for pod in case["pods"] if pod["group"] == group["name"]), key=lambda pod: pod["phase"] == "Pending"
        )
        if snapshot.fleet is None or not any(pod["node"] for pod in pods):
            continue
        workload = _Workload(group["name"], group, _roles(pods), {})
        named = {(role, index): pod for role, of_role in workload.roles.items() for index, pod in enumerate(of_role)}
        stays = {key: pod["node"] for key, pod in named.items() if pod["node"]}
        flavors = dict.fromkeys(workload.roles, snapshot.flavors[_FLAVOR])
        found = places_for_missing(snapshot.fleet, _gang(case, workload), flavors, stays) or {}
        for key, node in found.items():
            snapshot.fleet.reserve(node, _requests(named[key]), 1)
            bound[named[key]["name"]] = node
    return bound


def _snapshot(case: Case, waiting: Iterable[_Workload], running: Iterable[_Workload]) -> Snapshot:
    queues = _queues(case)
    tree, fleet = Tree.of(queues.values()), _fleet(case)
    there: dict[str, list[Running]] = defaultdict(list)
    for workload in running:
        gang = _running(case, workload)
        there[gang.queue].append(gang)
        tree.add(gang.queue, gang.usage)
        for p in gang.placements:
            fleet.reserve(p.node, p.requests, p.pods)
    return Snapshot(
        queues=queues,
        flavors={_FLAVOR: Flavor(_FLAVOR, levels=tuple(Level(name, name) for name in _levels(case).values()))},
        waiting=Backlog([_gang(case, workload) for workload in waiting]),
        fleet=fleet,
        tree=tree,
        later=tree.copy(),
        running=there,
    )


def _fleet(case: Case) -> Fleet:
    fleet, levels = Fleet(), _levels(case)
    for node in case["nodes"]:
        domains = {levels[d["tier"]]: d["name"] for d in case.get("domains", ()) if node["name"] in d["nodes"]}
        fleet.set_node(Node(node["name"], node["labels"] | domains, allocatable=node["allocatable"]))
    return fleet


def _levels(case: Case) -> dict[int, str]:
    """Return tiers and what the levels of them are called, the widest first."""
    return {tier: f"tier-{tier}" for tier in sorted({d["tier"] for d in case.get("domains", ())}, reverse=True)}


def _together(case: Case, group: Case) -> Together:
    """Return how close a group's pods have to be; a tier above all is the whole cluster."""
    asked, levels = group.get("topology"), _levels(case)
    if not asked:
        return Together()
    tightest = levels[min(levels)]
    return Together(
        required=levels.get(asked["highestTier"], "") if asked["mode"] == "hard" else "", preferred=tightest
    )


def _queues(case: Case) -> dict[str, Queue]:
    """Return queues under one root: what each deserves is its own quota, and what nobody deserves is the root's."""
    cluster = total(node["allocatable"] for node in case["nodes"])
    weights = sum(queue["weight"] for queue in case["queues"])
    queues, left = {}, dict(cluster)
    for queue in case["queues"]:
        most, quotas = queue["capability"] or {}, {}
        for resource, amount in cluster.items():
            part = amount * queue["weight"] // weights
            deserved = (queue["deserved"] or {}).get(resource, 0) if case["sharing"] == "capacity" else part
            nominal = min(deserved, most.get(resource, deserved))
            limit = most[resource] - nominal if resource in most else None
            quotas[_FLAVOR, resource] = Quota(nominal, borrowing_limit=limit)
            left[resource] -= nominal
        queues[queue["name"]] = Queue(
            queue["name"],
            _ROOT,
            quotas=quotas,
            preemption=_RULES[case["action"]],
            stop=StopPolicy.NONE if queue["open"] else StopPolicy.HOLD,
        )
    return queues | {_ROOT: Queue(_ROOT, quotas={(_FLAVOR, r): Quota(amount) for r, amount in left.items()})}


def _workloads(case: Case, phase: str) -> Iterator[_Workload]:
    """Yield the jobs that groups are to queuectl.

    Volcano takes pods one by one, down to their group's minimum: that many are a gang from which nobody takes, and
    each other one is a job. So is each that waits, of a group of which any pod may run by itself.
    """
    for group in case["groups"]:
        members = [pod for pod in case["pods"] if pod["group"] == group["name"]]
        pods = [pod for pod in members if pod["phase"] == phase]
        if phase == "Running":
            ranked = sorted(pods, key=lambda pod: (pod["preemptible"], pod["priority"] != group["priority"]))
            kept, pods = ranked[: group["minMembers"]], ranked[group["minMembers"] :]
            if kept:
                yield _Workload(group["name"], group, _roles(kept), {}, evictable=False)
        elif len(pods) < len(members):
            continue  # see _grown
        elif group["minMembers"] > 1 or group.get("topology"):
            yield _Workload(group["name"], group, _roles(pods), _least(group, _roles(pods)))
            continue
        for pod in pods:
            yield _Workload(pod["name"], group, _roles([pod]), {}, evictable=pod["preemptible"])


def _roles(pods: Iterable[Case]) -> dict[str, list[Case]]:
    """Return pods by role: those of one role in the group that ask for the same."""
    roles: dict[str, list[Case]] = defaultdict(list)
    for pod in pods:
        roles[f"{pod.get('role') or ''}/{_requests(pod)}/{_constraints(pod).selector}"].append(pod)
    return roles


def _least(group: Case, roles: Mapping[str, Sequence[Case]]) -> dict[str, int]:
    """Return the fewest pods of each role: as its group says, or the first of all in the order of the roles."""
    least, left = {}, group["minMembers"]
    for name, pods in roles.items():
        given = group["minMembersPerRole"].get(pods[0].get("role") or "")
        least[name] = min(len(pods), left) if given is None else given
        left -= least[name]
    return least


def _requests(pod: Case) -> tuple[tuple[str, int], ...]:
    return tuple(sorted({"pods": 1, **pod["requests"]}.items()))


def _priority(case: Case, workload: _Workload) -> int:
    """Return the priority of a workload. Of Volcano's queues those of lower priority lose first, whatever runs there."""
    of_queues: dict[str, int] = {queue["name"]: queue["priority"] for queue in case["queues"]}
    own: int = max(pod["priority"] for pod in workload.pods)
    return of_queues[workload.group["queue"]] * 2**32 + own


def _gang(case: Case, workload: _Workload) -> Gang:
    roles = tuple(
        Role(name, len(pods), _requests(pods[0]), _constraints(pods[0]), least=workload.least.get(name))
        for name, pods in workload.roles.items()
    )
    return Gang(
        uid=workload.name,
        namespace="",
        name=workload.name,
        queue=workload.group["queue"],
        priority=_priority(case, workload),
        submitted_at=0.0,
        roles=roles,
        together=_together(case, workload.group),
        preempts=all(pod["mayPreempt"] for pod in workload.pods),
        hold=not workload.group["admitted"],
    )


def _constraints(pod: Case) -> Constraints:
    return Constraints(tuple(sorted((pod.get("nodeSelector") or {}).items())))


def _running(case: Case, workload: _Workload) -> Running:
    usage: dict[Cell, int] = total({(_FLAVOR, r): n for r, n in _requests(pod)} for pod in workload.pods)
    return Running(
        uid=workload.name,
        queue=workload.group["queue"],
        priority=_priority(case, workload),
        submitted_at=0.0,
        admitted_at=0.0,
        usage=usage,
        placements=_placements(workload),
        preemptible=workload.evictable,
    )


def _placements(workload: _Workload) -> tuple[Placement, ...]:
    return tuple(
        Placement(role, _FLAVOR, pod["node"], 1, _requests(pod))
        for role, pods in workload.roles.items()
        for pod in pods
    )


def _bound(workload: _Workload, placements: Iterable[Placement]) -> Iterator[tuple[str, str]]:
    """Yield pods with their nodes, each role's pods in their order."""
    left = {role: iter(pods) for role, pods in workload.roles.items()}
    for p in placements:
        for _ in range(p.pods):
            yield next(left[p.role])["name"], p.node
