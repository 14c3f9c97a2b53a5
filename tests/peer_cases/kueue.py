"""Cases of Kueue's form: a state of quotas, what arrives, and who is admitted, preempted or left waiting."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from queuectl.core.backlog import Backlog
from queuectl.core.cycle import plan
from queuectl.core.fleet import Fleet
from queuectl.core.preemption import Ask, Field, Running, find_victims
from queuectl.core.repair import places_for_missing
from queuectl.core.snapshot import Policy, Snapshot
from queuectl.core.tree import Tree
from queuectl.model.objects import (
    Constraints,
    Flavor,
    Gang,
    Level,
    Node,
    NodeTerm,
    Queue,
    QueueOrder,
    Requirement,
    Role,
    Taint,
    Toleration,
    Topology,
)
from queuectl.model.plan import Placement
from queuectl.model.policy import (
    Amounts,
    Cause,
    Cell,
    FairRule,
    FlavorChoice,
    Preemption,
    Prefer,
    Quota,
    Reclaim,
    Stop,
    VictimChoice,
    Within,
)

Case = Mapping[str, Any]

HOST = "kubernetes.io/hostname"
_STOP = {"stop": Stop.STOP, "next": Stop.NEXT}
_CAUSE = {
    Cause.QUEUE: "queue",
    Cause.RECLAIM: "reclaim",
    Cause.RECLAIM_WHILE_BORROWING: "reclaimWhileBorrowing",
    Cause.FAIR_SHARE: "fairShare",
}


def outcome(case: Case) -> dict[str, Any]:
    """Return what the core decides, in the words of the case's ``expected``."""
    return _preempt(case) if case["kind"] == "preempt" else _cycle(case)


def expected(case: Case) -> dict[str, Any]:
    """Return the part of ``expected`` that the outcome is held against."""
    want = case["expected"]
    if case["kind"] == "preempt":
        return {"preempt": {name: want["reasons"].get(name) for name in want["preempt"]}}
    return {
        "assignments": {name: _meant(case, name, podsets) for name, podsets in want["assignments"].items()},
        "preempt": {name: want["reasons"].get(name) for name in want["preempt"]},
        "pending": sorted(want["pending"]),
        "evictForNodeFailure": sorted(want.get("evictForNodeFailure", ())),
    }


def _meant(case: Case, name: str, podsets: Case) -> dict[str, Any]:
    """Return assignments without flavors and places of what nobody asks for: of no pods, or of none of a resource."""
    asked = {
        p["name"]: p["requests"] for w in case["pending"] + case["admitted"] if w["name"] == name for p in w["podsets"]
    }
    return {
        role: {**given, "flavors": {r: flavor for r, flavor in given["flavors"].items() if asked[role].get(r)}}
        if given["count"]
        else {"count": 0, "flavors": {}}
        for role, given in podsets.items()
    }


def _preempt(case: Case) -> dict[str, Any]:
    queues = _queues(case)
    incoming = case["incoming"]
    usage: dict[Cell, int] = {}
    contested = set()
    for podset in incoming["podsets"]:
        for resource, amount in podset["requests"].items():
            cell = (podset["flavors"][resource], resource)
            usage[cell] = usage.get(cell, 0) + amount * podset["count"]
        contested |= {(podset["flavors"][r], r) for r in podset["needsPreemption"]}
    ask = Ask(incoming["queue"], incoming["priority"], incoming["createdAt"] or 0, usage, frozenset(contested))
    running = _running(case)
    rules = {name: queue.preemption for name, queue in queues.items()}
    world = Field(_tree(queues, running), running, rules, _fair(case))
    return {"preempt": {v.gang.uid: _cause(v.gang, v.cause) for v in find_victims(world, ask)}}


def _cycle(case: Case) -> dict[str, Any]:
    queues = _queues(case)
    running = _running(case)
    tree = _tree(queues, running)
    waiting = [_gang(workload) for workload in case["pending"]]
    flavors = _flavors(case)
    snapshot = Snapshot(
        queues=queues,
        flavors=flavors,
        waiting=Backlog(waiting),
        fleet=_fleet(case, running),
        tree=tree,
        later=tree.copy(),
        running=running,
        policy=Policy(fair_sharing=_fair(case), one_head=True, resource_groups=True),
    )
    decided = plan(snapshot, 0.0)
    repaired = _repaired(case, snapshot)
    names = {gang.uid: gang for gangs in running.values() for gang in gangs}
    return {
        "assignments": {
            a.uid: {
                role: {"count": count, "flavors": dict(a.flavors[role])}
                | _placed(case, a.flavors[role], role, a.placements)
                for role, count in a.pods.items()
            }
            for a in decided.admissions
        }
        | {name: assignment for name, assignment in repaired.items() if assignment},
        "preempt": {v.uid: _cause(names[v.uid], v.cause) for preempt in decided.preemptions for v in preempt.victims},
        "pending": sorted(decided.waits),
        "evictForNodeFailure": sorted(name for name, assignment in repaired.items() if not assignment),
    }


def _repaired(case: Case, snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Return workloads that have lost nodes, with their assignments after that; empty ones: they lose all."""
    result = {}
    for workload in case["admitted"]:
        failed = workload.get("failedNodes", ())
        if not failed or snapshot.fleet is None:
            continue
        gang = _gang(workload)
        flavors = {p["name"]: next(iter(p["flavors"].values())) for p in workload["podsets"]}
        stays: dict[tuple[str, int], str] = {}
        for podset in workload["podsets"]:
            nodes = [p.node for p in _placements(case, podset) for _ in range(p.pods)]
            stays |= {(podset["name"], index): node for index, node in enumerate(nodes) if node not in failed}
        found = places_for_missing(
            snapshot.fleet, gang, {role: snapshot.flavors[flavor] for role, flavor in flavors.items()}, stays
        )
        placements = [
            Placement(role, flavors[role], node, 1, ()) for (role, _), node in sorted((stays | (found or {})).items())
        ]
        result[gang.uid] = (
            {}
            if found is None
            else {
                p["name"]: {"count": p["count"], "flavors": p["flavors"]}
                | _placed(case, p["flavors"], p["name"], placements)
                for p in workload["podsets"]
            }
        )
    return result


def _cause(gang: Running, cause: Cause) -> str:
    return "alreadyEvicting" if gang.evicting else _CAUSE[cause]


def _flavors(case: Case) -> dict[str, Flavor]:
    if "nodes" not in case:
        return {name: Flavor(name) for name in case["flavors"]}
    return {
        flavor["name"]: Flavor(
            flavor["name"],
            tuple(sorted(flavor["nodeLabels"].items())),
            tuple(Toleration(**toleration) for toleration in flavor.get("tolerations", ())),
            levels=tuple(Level(label, label) for label in _levels(case, flavor["name"])),
        )
        for flavor in case["flavors"]
    }


def _levels(case: Case, flavor: str) -> list[str]:
    """Return the labels that are the levels of a flavor's topology, the widest first."""
    topologies = {topology["name"]: topology["levels"] for topology in case["topologies"]}
    return next((topologies[f["topology"]] for f in case["flavors"] if f["name"] == flavor and f["topology"]), [])


def _fleet(case: Case, running: Mapping[str, list[Running]]) -> Fleet | None:
    """Return the nodes with what others' pods and admitted workloads use of them; None where quota alone decides."""
    if "nodes" not in case:
        return None
    failed = {name for workload in case["admitted"] for name in workload.get("failedNodes", ())}
    fleet = Fleet()
    for node in case["nodes"]:
        taints = tuple(Taint(taint["key"], taint.get("value", ""), taint["effect"]) for taint in node.get("taints", ()))
        name = node["labels"].get(HOST, node["name"])  # workloads' places name the label
        ready = node["ready"] and name not in failed
        fleet.set_node(Node(name, node["labels"], taints, node["allocatable"], ready=ready))
    for pod in case["otherPods"]:
        if pod["phase"] not in {"Succeeded", "Failed"}:
            fleet.use(pod["node"], {"pods": 1, **pod["requests"]}.items(), 1)
    for gang in (gang for gangs in running.values() for gang in gangs):
        for p in gang.placements:
            fleet.reserve(p.node, p.requests, p.pods)
    return fleet


def _placements(case: Case, podset: Case) -> Iterator[Placement]:
    """Yield where the pods of an admitted podset are."""
    placed = podset.get("placed") or {"levels": [""], "domains": []}
    hosts = {node["labels"].get(placed["levels"][-1]): node["labels"].get(HOST, node["name"]) for node in case["nodes"]}
    flavor = next(iter(podset["flavors"].values()))
    for domain in placed["domains"]:
        host = domain["values"][-1]
        yield Placement(podset["name"], flavor, hosts.get(host, host), domain["pods"], _requests(podset))


def _placed(case: Case, flavors: Mapping[str, str], role: str, placements: Iterable[Placement]) -> dict[str, Any]:
    """Return where the pods of a role are, by the lowest level of the topology of its flavor, if that has one."""
    if "nodes" not in case or not (levels := _levels(case, next(iter(flavors.values()), ""))):
        return {}
    labels = {node["labels"].get(HOST, node["name"]): node["labels"] for node in case["nodes"]}
    pods: Counter[str] = Counter()
    for p in placements:
        if p.role == role:
            pods[labels[p.node][levels[-1]]] += p.pods
    domains = [{"values": [name], "pods": count} for name, count in sorted(pods.items())]
    return {"placed": {"levels": levels[-1:], "domains": domains}}


def _requests(podset: Case) -> tuple[tuple[str, int], ...]:
    return tuple(sorted({"pods": 1, **podset["requests"]}.items()))


def _queues(case: Case) -> dict[str, Queue]:
    """Return queues and cohorts, which are queues too; a cohort's name gets a slash so that it is nobody else's."""
    queues = {}
    for cohort in case["cohorts"]:
        name = f"cohort/{cohort['name']}"
        parent = f"cohort/{cohort['parent']}" if cohort["parent"] else ""
        queues[name] = Queue(name, parent, quotas=_quotas(cohort["quota"]), weight=Fraction(str(cohort["weight"])))
    for queue in case["queues"]:
        policy, borrow = queue["policy"], queue["policy"]["borrowInCohort"]
        quotas = _quotas(queue["quota"])
        listed = {
            (flavor, resource): quotas.get((flavor, resource), Quota())
            for group in queue["groups"]
            for flavor in group["flavors"]
            for resource in group["resources"]
        }
        queues[queue["name"]] = Queue(
            queue["name"],
            f"cohort/{queue['cohort']}" if queue["cohort"] else "",
            QueueOrder(queue["order"]),
            listed,
            Fraction(str(queue["weight"])),
            Preemption(
                Within(policy["withinQueue"]),
                Reclaim(policy["reclaimInCohort"]),
                borrow=borrow is not None,
                borrow_max_priority=(borrow or {}).get("maxPriority"),
                victims=VictimChoice.LOWEST_PRIORITY,
            ),
            FlavorChoice(
                _STOP[policy["whenCanBorrow"]],
                _STOP[policy["whenCanPreempt"]],
                Prefer(policy.get("flavorPreference") or Prefer.BORROWING),
            ),
        )
    return queues


def _quotas(quota: Mapping[str, Mapping[str, Any]]) -> dict[Cell, Quota]:
    return {
        (flavor, resource): Quota(amounts["nominal"], amounts["borrow"], amounts["lend"])
        for flavor, resources in quota.items()
        for resource, amounts in resources.items()
    }


def _running(case: Case) -> dict[str, list[Running]]:
    result: dict[str, list[Running]] = {}
    for workload in case["admitted"]:
        usage: Amounts = {(f, r): n for f, amounts in workload["usage"].items() for r, n in amounts.items()}
        gang = Running(
            uid=workload["name"],
            queue=workload["queue"],
            priority=workload["priority"],
            submitted_at=workload["createdAt"] or 0,
            admitted_at=workload["admittedAt"] or 0,
            usage=usage,
            placements=tuple(p for podset in workload["podsets"] for p in _placements(case, podset))
            if "nodes" in case
            else (),
            evicting=bool(workload.get("evicting")),
        )
        result.setdefault(gang.queue, []).append(gang)
    return result


def _tree(queues: Mapping[str, Queue], running: Mapping[str, list[Running]]) -> Tree:
    tree = Tree.of(queues.values())
    for gangs in running.values():
        for gang in gangs:
            tree.add(gang.queue, gang.usage)
    return tree


def _gang(workload: Case) -> Gang:
    roles = tuple(
        Role(p["name"], p["count"], _requests(p), _constraints(p), least=p.get("minCount"), topology=_topology(p))
        for p in workload["podsets"]
    )
    return Gang(
        uid=workload["name"],
        namespace="",
        name=workload["name"],
        queue=workload["queue"],
        priority=workload["priority"],
        submitted_at=workload["createdAt"] or 0,
        roles=roles,
    )


def _fair(case: Case) -> tuple[FairRule, ...]:
    return tuple(FairRule(rule) for rule in case["fairSharing"] or ())


def _constraints(podset: Case) -> Constraints:
    asked = podset.get("nodeAffinity") or ()
    labels = tuple(Requirement(one["key"], one["operator"], tuple(one["values"])) for one in asked)
    return Constraints(terms=(NodeTerm(labels),) if labels else ())


def _topology(podset: Case) -> Topology:
    asked = podset.get("topology") or {}
    return Topology(
        required=asked.get("required", ""),
        preferred=asked.get("preferred", ""),
        slice_level=asked.get("sliceLevel", ""),
        slice_size=asked.get("sliceSize", 1),
    )
