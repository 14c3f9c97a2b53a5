"""Moves that make room: who goes where, for whom, and at what cost; everybody has a place again at once."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from queuectl.core import defrag
from queuectl.core.backlog import Backlog
from queuectl.core.cycle import plan
from queuectl.core.defrag import Proposal, make_room
from queuectl.core.elastic import pods_of
from queuectl.core.fleet import Base
from queuectl.core.preemption import Running
from queuectl.core.snapshot import Snapshot
from queuectl.model.objects import Gang, Level, Node, Queue, Requirement, Together
from queuectl.model.plan import Placement
from queuectl.model.policy import Preemption, Quota, Reclaim, StopPolicy, VictimChoice
from queuectl.model.work import Work
from tests.support.builders import GPU, flavor, gang, node, queue, role, snapshot

NOW = 10_000.0
CELL = ("any", GPU)


def running(job: Gang, places: Mapping[str, int], **given: Any) -> tuple[Gang, Running]:
    """Return a gang of one role that has been running for an hour, with its pods by node."""
    only = job.roles[0]
    gpus = dict(only.requests).get(GPU, 0) * sum(places.values())
    placements = tuple(Placement(only.name, "any", name, pods, only.requests) for name, pods in places.items())
    settings: dict[str, Any] = {"admitted_at": 0.0, "ready_at": NOW - 3600, "gpus": gpus} | given
    return job, Running(
        job.uid, job.queue, job.priority, 0.0, usage={CELL: gpus}, placements=placements, name=f"team/{job.name}",
        pods=sum(places.values()), **settings,
    )  # fmt: skip


def world(
    nodes: Sequence[Node], those: Iterable[tuple[Gang, Running]], waiting: Iterable[Gang], queues: Sequence[Queue] = ()
) -> tuple[Snapshot, dict[str, Gang]]:
    view = snapshot(waiting, nodes=nodes, queues=queues or [queue()])
    by_queue: dict[str, list[Running]] = {}
    gangs = {}
    assert view.fleet is not None
    for job, one in those:
        gangs[job.uid] = job
        by_queue.setdefault(one.queue, []).append(one)
        view.tree.add(one.queue, one.usage)
        for p in one.placements:
            view.fleet.reserve(p.node, p.requests, p.pods)
    return replace(view, later=view.tree.copy(), running=by_queue), gangs


def moved(proposal: Proposal | None) -> dict[str, dict[str, int]]:
    """Return who goes where, by node how many pods."""
    return {move.gang.uid: {p.node: p.pods for p in move.to} for move in proposal.moves} if proposal else {}


def carried_out(view: Snapshot, proposal: Proposal) -> Snapshot:
    """Return the world in which the moves have been made, and nothing else."""
    after, places = view.copy(), {move.gang.uid: move.to for move in proposal.moves}
    assert after.fleet is not None
    for move in proposal.moves:
        for p in move.gang.placements:
            after.fleet.reserve(p.node, p.requests, -p.pods)
        for p in move.to:
            after.fleet.reserve(p.node, p.requests, p.pods)
    those = {
        name: [replace(one, placements=places.get(one.uid, one.placements)) for one in some]
        for name, some in view.running.items()
    }
    return replace(after, running=those)


def small(name: str, **given: Any) -> Gang:
    return gang(name, role(gpu=4), **given)


HALVES = [node("n0"), node("n1")]
WHOLE = gang("whole", role(gpu=8))


def test_whoever_loses_least_goes_where_there_is_room_and_the_waiting_gang_then_starts() -> None:
    dear, cheap = running(small("dear"), {"n0": 1}), running(small("cheap"), {"n1": 1}, saved_at=NOW - 60)
    view, gangs = world(HALVES, [dear, cheap], [WHOLE])
    [proposal] = defrag.proposals(view, gangs, NOW, within=3600)
    assert moved(proposal) == {"cheap": {"n0": 1}}
    assert proposal.lost == Work(4 * 60)
    assert proposal.pays_after == 4 * (60 + 600) / 8  # a restart counts as 600 s
    after = plan(carried_out(view, proposal), NOW)
    assert [(a.uid, [p.node for p in a.placements]) for a in after.admissions] == [("whole", ["n1"])]


def test_a_move_that_costs_more_than_it_gains_in_time_is_not_proposed() -> None:
    dear, other = running(small("dear"), {"n0": 1}), running(small("other"), {"n1": 1})
    view, gangs = world(HALVES, [dear, other], [WHOLE])
    assert defrag.proposals(view, gangs, NOW, within=4 * (3600 + 600) / 8 - 1) == []
    assert len(defrag.proposals(view, gangs, NOW, within=4 * (3600 + 600) / 8)) == 1


def test_nobody_moves_whom_others_could_not_take() -> None:
    rules = Preemption(min_run_seconds=7200)
    shields: list[tuple[dict[str, Any], Queue]] = [
        ({"preemptible": False}, queue()),
        ({"evicting": True}, queue()),
        ({"covered": (("team/budget", 1),)}, queue()),
        ({}, replace(queue(), preemption=rules)),
    ]
    for shield, its in shields:
        those = [running(small(f"j{i}"), {f"n{i}": 1}, **shield) for i in range(2)]
        view, gangs = world(HALVES, those, [WHOLE], [its])
        assert defrag.proposals(view, gangs, NOW, within=1e9) == []


def test_nobody_moves_to_where_its_pods_may_not_go() -> None:
    nodes = [node("n0", labels={"disk": "fast"}), node("n1")]
    bound = gang("bound", role(gpu=4, selector={"disk": "fast"}))
    view, gangs = world(nodes, [running(bound, {"n0": 1}), running(small("free"), {"n1": 1})], [WHOLE])
    [proposal] = defrag.proposals(view, gangs, NOW, within=1e9)
    assert moved(proposal) == {"free": {"n0": 1}}


def test_nothing_is_proposed_for_whom_quota_keeps_waiting_or_who_could_start() -> None:
    those = [running(small("a"), {"n0": 1}), running(small("b"), {"n1": 1})]
    view, gangs = world(HALVES, those, [WHOLE], [queue(any={GPU: 15})])
    assert defrag.proposals(view, gangs, NOW, within=1e9) == []
    view, gangs = world([*HALVES, node("n2")], those, [WHOLE])
    assert defrag.proposals(view, gangs, NOW, within=1e9) == []


def test_nothing_is_proposed_for_whom_its_queue_would_not_start() -> None:
    those = [running(small("a"), {"n0": 1}), running(small("b"), {"n1": 1})]
    others = Requirement("team", "Exists")
    for its in (replace(queue(), stop=StopPolicy.HOLD), replace(queue(), namespaces=(others,))):
        view, gangs = world(HALVES, those, [WHOLE], [its])
        assert defrag.proposals(view, gangs, NOW, within=1e9) == []
    first = gang("first", role(gpu=8, pods=3), priority=1)
    view, gangs = world(HALVES, those, [first, WHOLE], [queue(strict=True)])
    assert defrag.proposals(view, gangs, NOW, within=1e9) == []


def test_a_queue_gets_back_what_it_lent_with_a_move_where_nodes_are_in_the_way() -> None:
    """The borrowers give up no more than they borrowed: one of them has to move for that."""
    rules = Preemption(reclaim=Reclaim.ANY, victims=VictimChoice.LOWEST_PRIORITY)
    queues = [
        Queue("all"),
        *(Queue(name, "all", quotas={CELL: Quota(8)}, preemption=rules) for name in ("lends", "borrows")),
    ]
    sizes = {"a": ("n0", 4), "b": ("n1", 4), "c": ("n1", 2)}
    those = [
        running(gang(name, role(gpu=gpus), queue="borrows"), {at: 1}, admitted_at=float(i))
        for i, (name, (at, gpus)) in enumerate(sizes.items())
    ]
    view, gangs = world(HALVES, those, [gang("due", role(gpu=8), queue="lends")], queues)
    assert not plan(view, NOW).preemptions
    [proposal] = defrag.proposals(view, gangs, NOW, within=1e9)
    assert moved(proposal) == {"b": {"n0": 1}}
    assert [one.uid for one in proposal.victims] == ["c"]
    [preempt] = plan(carried_out(view, proposal), NOW).preemptions
    assert [victim.uid for victim in preempt.victims] == ["c"]


def test_each_proposal_reckons_with_those_before_it() -> None:
    """Four half-full nodes give two whole ones, and not three."""
    nodes = [node(f"n{i}") for i in range(4)]
    those = [running(small(f"j{i}"), {f"n{i}": 1}) for i in range(4)]
    waiting = [gang(f"w{i}", role(gpu=8), submitted_at=float(i), gpu_models=("",) * i) for i in range(3)]
    view, gangs = world(nodes, those, waiting)
    found = defrag.proposals(view, gangs, NOW, within=1e9)
    assert [proposal.gang.uid for proposal in found] == ["w0", "w1"]
    assert len({uid for proposal in found for uid in moved(proposal)}) == 2


def draw(rng: random.Random) -> tuple[Snapshot, dict[str, Gang], Gang]:
    """Return a small cluster of nodes of 8, gangs on them, and one that waits."""
    free = {f"n{i}": 8 for i in range(rng.randint(2, 4))}
    those = []
    for i in range(rng.randint(2, 6)):
        gpus, pods = rng.choice([1, 2, 3, 4]), rng.choice([1, 1, 1, 2])
        places: dict[str, int] = {}
        for _ in range(pods):
            at = rng.choice(sorted(free))
            if free[at] >= gpus:
                free[at] -= gpus
                places[at] = places.get(at, 0) + 1
        if places:
            job = gang(f"j{i}", role(pods=sum(places.values()), gpu=gpus))
            those.append(running(job, places, saved_at=NOW - rng.randint(0, 3600)))
    waiting = gang("w", role(pods=rng.choice([1, 1, 2]), gpu=rng.choice([4, 6, 8])))
    view, gangs = world([node(name) for name in free], those, [waiting])
    return view, gangs, waiting


def least(view: Snapshot, gangs: Mapping[str, Gang], waiting: Gang) -> Work | None:
    """Return the cost of the cheapest set of gangs that can all be placed anew beside the waiting one, by trying all."""
    everybody = view.running.get("q", [])
    best = None
    for count in range(1, len(everybody) + 1):
        for away in combinations(everybody, count):
            cost = Work(sum(one.lost(NOW).gpu_seconds + 600 * one.gpus for one in away))
            if (best is None or cost < best) and _fit(view, gangs, waiting, away):
                best = cost
    return best


def _fit(view: Snapshot, gangs: Mapping[str, Gang], waiting: Gang, away: Sequence[Running]) -> bool:
    """Tell whether all pods fit into what is free without these, by trying every node for each pod."""
    assert view.fleet is not None
    free = {f"n{i}": 8 for i in range(len(view.fleet.node_names()))}
    for one in view.running["q"]:
        if one not in away:
            for p in one.placements:
                free[p.node] -= dict(p.requests)[GPU] * p.pods
    pods = [dict(r.requests)[GPU] for one in away for r in gangs[one.uid].roles for _ in range(r.pods)]
    pods += [dict(r.requests)[GPU] for r in waiting.roles for _ in range(r.pods)]
    return _packs(sorted(pods, reverse=True), sorted(free.values()))


def _packs(pods: list[int], free: list[int]) -> bool:
    if not pods:
        return True
    return any(
        _packs(pods[1:], sorted([*free[:at], room - pods[0], *free[at + 1 :]]))
        for at, room in enumerate(free)
        if room >= pods[0] and room not in free[:at]
    )


def test_whoever_moves_has_a_place_and_the_waiting_gang_starts_then() -> None:
    found = 0
    for seed in range(250):
        view, gangs, waiting = draw(random.Random(seed))
        proposal = make_room(view, waiting, gangs, NOW)
        if proposal is None or not proposal.moves:
            continue
        found += 1
        for move in proposal.moves:
            assert pods_of(move.to) == pods_of(move.gang.placements)
        after = carried_out(view, proposal)
        assert after.fleet is not None
        assert (after.fleet.matrix(Base.FREE) >= 0).all()
        assert [a.uid for a in plan(replace(after, waiting=Backlog([waiting])), NOW).admissions] == ["w"]
    assert found > 25


def test_whoever_has_to_be_in_one_rack_is_so_wherever_it_goes() -> None:
    racks = replace(flavor(), levels=(Level("rack", "rack"),))
    found = 0
    for seed in range(80):
        rng = random.Random(seed)
        nodes = [node(f"n{i}", labels={"rack": "ab"[i % 2]}) for i in range(6)]
        free = {one.name: 8 for one in nodes}
        those = []
        for i in range(rng.randint(3, 8)):
            gpus, rack = rng.choice([1, 2, 4]), rng.choice([0, 1])
            places: dict[str, int] = {}
            for at in rng.sample(sorted(free)[rack::2], 2):
                if free[at] >= gpus:
                    free[at] -= gpus
                    places[at] = 1
            if places:
                job = gang(f"j{i}", role(pods=len(places), gpu=gpus), together=Together(required="rack"))
                those.append(running(job, places))
        waiting = gang("w", role(pods=rng.choice([2, 3]), gpu=8), together=Together(required="rack"))
        view, gangs = world(nodes, those, [waiting])
        proposal = make_room(replace(view, flavors={"any": racks}), waiting, gangs, NOW)
        if proposal is None or not proposal.moves:
            continue
        found += 1
        for placements in (proposal.admission.placements, *(move.to for move in proposal.moves)):
            assert len({int(p.node[1:]) % 2 for p in placements}) == 1
    assert found > 10


def test_it_finds_moves_nearly_always_where_there_are_any_and_they_are_nearly_the_cheapest() -> None:
    possible = found = best = 0
    for seed in range(250):
        view, gangs, waiting = draw(random.Random(seed))
        if plan(view, NOW).admissions:
            continue
        cost = least(view, gangs, waiting)
        proposal = make_room(view, waiting, gangs, NOW)
        if cost is None:
            assert proposal is None
            continue
        possible += 1
        found += proposal is not None
        best += proposal is not None and proposal.cost == cost
    assert possible > 25
    assert found >= 0.98 * possible
    assert best >= 0.85 * found
