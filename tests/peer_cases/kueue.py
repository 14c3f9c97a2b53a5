"""Cases of Kueue's form: a state of quotas, what arrives, and who is admitted, preempted or left waiting."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from queuectl.core.backlog import Backlog
from queuectl.core.cycle import plan
from queuectl.core.preemption import Ask, Field, Running
from queuectl.core.snapshot import Policy, Snapshot
from queuectl.core.tree import Tree
from queuectl.core.victims import find_victims
from queuectl.model.objects import Flavor, Gang, Queue, QueueOrder, Role
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
        "assignments": want["assignments"],
        "preempt": {name: want["reasons"].get(name) for name in want["preempt"]},
        "pending": sorted(want["pending"]),
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
    going = [gang for gangs in running.values() for gang in gangs if gang.goes]
    world = Field(_tree(queues, running), running, rules, _fair(case), going)
    return {"preempt": {v.gang.uid: _cause(v.gang, v.cause) for v in find_victims(world, ask)}}


def _cycle(case: Case) -> dict[str, Any]:
    queues = _queues(case)
    running = _running(case)
    tree = _tree(queues, running)
    waiting = [_gang(workload) for workload in case["pending"]]
    snapshot = Snapshot(
        queues=queues,
        flavors={name: Flavor(name) for name in case["flavors"]},
        waiting=Backlog(waiting),
        fleet=None,
        tree=tree,
        later=tree.copy(),
        running=running,
        policy=Policy(fair_sharing=_fair(case), one_head=True, resource_groups=True),
    )
    decided = plan(snapshot, 0.0)
    names = {gang.uid: gang for gangs in running.values() for gang in gangs}
    return {
        "assignments": {
            a.uid: {role: {"count": count, "flavors": dict(a.flavors[role])} for role, count in a.pods.items()}
            for a in decided.admissions
        },
        "preempt": {v.uid: _cause(names[v.uid], v.cause) for preempt in decided.preemptions for v in preempt.victims},
        "pending": sorted(decided.waits),
    }


def _cause(gang: Running, cause: Cause) -> str:
    return "alreadyEvicting" if gang.evicting else _CAUSE[cause]


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
        Role(p["name"], p["count"], tuple(sorted(p["requests"].items())), least=p.get("minCount"))
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
