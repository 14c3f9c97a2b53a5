"""Random cohorts and jobs for virtual clusters, small enough to collide at every step."""

from typing import Any

from hypothesis import strategies as st

from queuectl.model.policy import FairRule, OverQuota, Prefer, Reclaim, Stop, VictimChoice, Within
from queuectl.simulate.form import GPU

FLAVORS = ["red", "blue"]
QUEUES = ["a", "b", "c", "d"]
limit = st.one_of(st.none(), st.integers(0, 4))


@st.composite
def quotas(draw: st.DrawFn, *, limits: bool) -> list[dict[str, Any]]:
    flavors = draw(st.sampled_from([["red"], ["blue"], ["red", "blue"], ["blue", "red"]]))
    result = []
    for flavor in flavors:
        quota: dict[str, Any] = {"flavor": flavor, "resource": GPU, "nominal": draw(st.integers(0, 6))}
        if limits:
            quota |= {"borrowingLimit": draw(limit), "lendingLimit": draw(limit)}
        result.append(quota)
    return result


@st.composite
def preemption(draw: st.DrawFn) -> dict[str, Any]:
    rules: dict[str, Any] = {
        "withinQueue": draw(st.sampled_from(Within)).value,
        "reclaimFromCohort": draw(
            st.sampled_from([Reclaim.ANY, Reclaim.ANY, Reclaim.LOWER_PRIORITY, Reclaim.NEVER])
        ).value,
        "victims": draw(st.sampled_from(VictimChoice)).value,
        "waitSeconds": draw(st.sampled_from([0, 0, 0, 4])),
        "minRunSeconds": draw(st.sampled_from([0, 0, 0, 6])),
    }
    if rules["reclaimFromCohort"] != Reclaim.NEVER.value and draw(st.booleans()):
        rules["borrowWithinCohort"] = draw(st.sampled_from([{}, {"maxPriority": 1}]))
    return rules


@st.composite
def leaves(draw: st.DrawFn, name: str, above: list[str]) -> dict[str, Any]:
    return {
        "name": name,
        "parent": draw(st.sampled_from(above)),
        "order": draw(st.sampled_from(["BestEffortFIFO", "BestEffortFIFO", "StrictFIFO"])),
        "weight": draw(st.sampled_from([None, "1", "2", "500m"])),
        "preemption": draw(preemption()),
        "maxRunning": draw(st.sampled_from([None, None, None, 2])),
        "perUser": draw(st.sampled_from([None, None, {"maxRunning": 1}, {"maxResources": {GPU: 3}}])),
        "whenOverQuota": draw(st.sampled_from(OverQuota)).value,
        "quotas": draw(quotas(limits=True)),
        "flavorChoice": {
            "whenCanBorrow": draw(st.sampled_from(Stop)).value,
            "whenCanPreempt": draw(st.sampled_from(Stop)).value,
            "prefer": draw(st.sampled_from(Prefer)).value,
        },
    }


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """Return nodes, flavors, a tree of queues and a policy, in the form of scenarios."""
    nodes = [
        {"name": f"{flavor}-{i}", "gpus": draw(st.integers(2, 6)), "labels": {"color": flavor}}
        for flavor in FLAVORS
        for i in range(draw(st.integers(1, 3)))
    ]
    roots = ["r1", "r2"][: draw(st.integers(1, 2))]
    queues: list[dict[str, Any]] = [
        {"name": root, "quotas": draw(st.one_of(st.none(), quotas(limits=False)))} for root in roots
    ]
    above = list(roots)
    if draw(st.booleans()):
        queues.append({"name": "mid", "parent": draw(st.sampled_from(roots)), "quotas": draw(quotas(limits=True))})
        above.append("mid")
    queues += [draw(leaves(name, above)) for name in QUEUES]
    fair = draw(st.sampled_from([[], [], [FairRule.FINAL, FairRule.INITIAL], [FairRule.FINAL], [FairRule.INITIAL]]))
    return {
        "nodes": nodes,
        "flavors": [{"name": flavor, "nodeLabels": {"color": flavor}} for flavor in FLAVORS],
        "queues": queues,
        "policy": {
            "fairSharing": [rule.value for rule in fair],
            "usageHalfLifeSeconds": draw(st.sampled_from([0, 0, 20, 1000])),
        },
    }


@st.composite
def jobs(draw: st.DrawFn, name: str, *, ends: bool = False) -> dict[str, Any]:
    """Return a job in the form of scenarios, without a time. ``ends``: its pods may succeed, each in its time."""
    pods = draw(st.integers(1, 3))
    return {
        "name": name,
        "queue": draw(st.sampled_from([*QUEUES, *QUEUES, "r1"])),  # also one that has queues below
        "user": draw(st.sampled_from(["ann", "bob"])),
        "priority": draw(st.integers(0, 2)),
        "pods": pods,
        "minPods": draw(st.sampled_from([None, None, 1])),
        "gpus": draw(st.integers(1, 2)),
        "grace": draw(st.sampled_from([0, 0, 1, 7])),
        "startSeconds": draw(st.sampled_from([0, 0, 0, 2])),
        "checkpoints": draw(st.sampled_from([None, 2, 30])),
        **draw(st.sampled_from([{}, {}, {"saves": 0}, {"saves": 3}, {"saves": 20}, {"saveGrace": 8}])),
        "runs": draw(st.lists(st.sampled_from([1, 9, 70]), min_size=1, max_size=pods))
        if ends and draw(st.booleans())
        else None,
        "preemptible": draw(st.sampled_from([None, None, None, False])),
        "replaceLostPods": draw(st.sampled_from([None, True])),
    }
