"""Pods that running gangs have lost are replaced before anybody else gets the room, or the gang goes back whole."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from queuectl.control import turn
from queuectl.core.cycle import plan
from queuectl.core.elastic import numbered
from queuectl.core.preemption import Running
from queuectl.core.snapshot import Broken, Snapshot
from queuectl.model.lifecycle import Attempt, AttemptState, Move
from queuectl.model.objects import ANYWHERE, Flavor, Gang, Level, Node, Topology
from queuectl.model.plan import Placement, PodKey, Portion, Repair
from queuectl.model.policy import Preemption, Within
from queuectl.model.reasons import Reason, why
from queuectl.simulate.clockwork import Clockwork
from queuectl.simulate.cluster import _key
from queuectl.simulate.form import read
from tests.core.test_invariants import Watched
from tests.support.builders import GPU, gang, node, queue, requests, role, snapshot

NOW = 1000.0
ONE = requests(gpu=1)
RACKS = Flavor("any", levels=(Level("rack", "rack"),))
LOST = why(Reason.NODE_LOST, node="a0")
IN_RACK = Topology(required="rack")
SLICES = {"level": "rack", "size": 2}


def server(name: str, **given: Any) -> Node:
    """Return a node with two GPUs in the rack of its name's first letter."""
    return node(name, gpu=2, labels={"rack": name[0]}, **given)


def pod(index: int) -> PodKey:
    return ("worker", index)


def runs(name: str, on: Mapping[str, int], topology: Topology = ANYWHERE, **given: Any) -> tuple[Gang, Portion]:
    """Return a gang that runs on nodes, so many pods on each, numbered in this order."""
    placements, first = [], 0
    for at, pods in on.items():
        placements.append(Placement("worker", "any", at, pods, ONE, first=first))
        first += pods
    gang_ = gang(name, replace(role(pods=first, gpu=1), topology=topology), **given)
    return gang_, Portion(tuple(placements), {("any", GPU): first})


def broken(of: tuple[Gang, Portion], *indexes: int, good: str = "", closed: str = "") -> Broken:
    lost = frozenset(pod(index) for index in indexes)
    return Broken(*of, lost, frozenset(good.split()), frozenset(closed.split()), LOST)


def view(nodes: list[Node], those: list[Broken], waiting: list[Gang] = [], **given: Any) -> Snapshot:  # noqa: B006
    world = snapshot(waiting, nodes=nodes, flavors=[RACKS], **given)
    assert world.fleet is not None
    for one in those:
        for tree in (world.tree, world.later):
            tree.add(one.gang.queue, one.has.quota)
        for p in one.has.placements:
            world.fleet.reserve(p.node, p.requests, p.pods)
    return replace(world, broken=those)


def homes(repair: Repair) -> dict[int, str]:
    return {p.first + i: p.node for p in repair.found for i in range(p.pods)}


def test_each_lost_pod_gets_a_place_in_the_rack_of_the_others_and_is_charged_nothing() -> None:
    nodes = [server(name) for name in ("a1", "a2", "b0", "b1")]
    gone = broken(runs("g", {"a0": 2, "a1": 2}, IN_RACK), 0, 1)
    full = [queue(any={GPU: 4})]
    repair = plan(view(nodes, [gone], queues=full), NOW).repairs["g"]
    assert (repair.pods, homes(repair)) == (frozenset({pod(0), pod(1)}), {0: "a2", 1: "a2"})
    assert [(p.node, p.pods) for p in repair.left] == [("a0", 2)]
    assert str(repair.why) == (
        "The gang runs with 2 of 4 pods; those that were on a0 are being replaced. Node a0 is gone."
    )


def test_without_a_place_there_it_is_left_to_go_back_whole() -> None:
    elsewhere = [server(name) for name in ("a1", "b0", "b1")]
    decided = plan(view(elsewhere, [broken(runs("g", {"a0": 2, "a1": 2}, IN_RACK), 0, 1)]), NOW)
    assert (decided.repairs, decided.irreparable) == ({}, frozenset({"g"}))
    wide = plan(view(elsewhere, [broken(runs("g", {"a0": 2, "a1": 2}, Topology(preferred="rack")), 0, 1)]), NOW)
    assert set(homes(wide.repairs["g"]).values()) == {"b0"}, "what is only preferred keeps no gang from it"


def test_nobody_who_waits_gets_the_room_before_it_whatever_the_priority() -> None:
    nodes = [server("a1"), server("a2")]
    gone = broken(runs("g", {"a0": 2, "a1": 2}), 0, 1)
    urgent = gang("urgent", role(pods=1, gpu=2), priority=9)
    decided = plan(view(nodes, [gone], [urgent]), NOW)
    assert set(homes(decided.repairs["g"]).values()) == {"a2"}
    assert decided.admissions == ()
    assert decided.waits["urgent"].reason is Reason.WAITING_FOR_NODES


def test_nobody_gives_way_to_it_and_it_gives_way_to_nobody_meanwhile() -> None:
    nodes = [server("a1"), server("a2"), server("a3")]
    gone = broken(runs("g", {"a0": 2, "a1": 2}), 0, 1)
    low = Running("low", "q", -5, 0.0, 0.0, {("any", GPU): 4}, runs("low", {"a2": 2, "a3": 2})[1].placements)
    mine = Running("g", "q", 0, 0.0, 0.0, gone.has.quota, gone.has.placements)
    takes = replace(queue(), preemption=Preemption(within_queue=Within.LOWER_PRIORITY))
    world = view(nodes, [gone], [gang("urgent", role(pods=1, gpu=2), priority=9)], queues=[takes])
    assert world.fleet is not None
    for p in low.placements:
        world.fleet.reserve(p.node, p.requests, p.pods)
    decided = plan(replace(world, running={"q": [low, mine]}), NOW)
    assert (decided.repairs, decided.irreparable) == ({}, frozenset({"g"}))
    [preempt] = decided.preemptions
    assert [victim.uid for victim in preempt.victims] == ["low"]


def test_two_that_lost_pods_get_no_more_than_there_is_the_more_urgent_first() -> None:
    nodes = [server("a1"), server("a2"), server("a3")]
    gone = [
        broken(runs("late", {"a0": 1, "a1": 1}, seq=2), 0),
        broken(runs("urgent", {"a0": 1, "a1": 1}, priority=1, seq=3), 0),
        broken(runs("early", {"a0": 2, "a3": 1}, seq=1), 0, 1),
    ]
    decided = plan(view(nodes, gone), NOW)
    assert {uid: set(homes(repair).values()) for uid, repair in decided.repairs.items()} == {
        "urgent": {"a3"}, "early": {"a2"},
    }  # fmt: skip
    assert decided.irreparable == {"late"}


def test_a_pod_whose_place_is_still_good_stays_there_beside_its_neighbours() -> None:
    nodes = [server("a0"), server("a1"), server("a2")]
    removed = broken(runs("g", {"a0": 2, "a1": 2}), 1, good="a0 a1")
    repair = plan(view(nodes, [removed]), NOW).repairs["g"]
    assert (repair.pods, repair.left, repair.found) == (frozenset({pod(1)}), (), ())


def test_it_leaves_all_nodes_that_take_no_new_pods_if_there_is_room_for_these_too() -> None:
    gone = broken(runs("g", {"a0": 2, "a1": 2, "a2": 2}), 0, 1, closed="a0 a1")
    nodes = [server("a1", unschedulable=True), server("a2"), server("a3")]
    repair = plan(view(nodes, [gone]), NOW).repairs["g"]
    assert homes(repair) == {0: "a3", 1: "a3"}
    repair = plan(view([*nodes, server("a4")], [gone]), NOW).repairs["g"]
    assert repair.pods == frozenset(pod(index) for index in range(4))
    assert set(homes(repair).values()) == {"a3", "a4"}
    assert str(repair.why) == (
        "The gang runs with 2 of 6 pods; those that were on a0, a1 are being replaced. Node a0 is gone."
    )


def test_nobody_leaves_a_node_that_still_works_before_all_who_have_lost_pods_have_a_place() -> None:
    first = broken(runs("a", {"a0": 1, "a1": 1, "a2": 1}), 0, closed="a0 a1")
    second = broken(runs("b", {"b0": 1, "b1": 1}), 0, closed="b0")
    nodes = [server("a1", unschedulable=True), server("a2", unschedulable=True), server("b1", unschedulable=True)]
    decided = plan(view([*nodes, server("c0")], [first, second]), NOW)
    assert {uid: homes(repair) for uid, repair in decided.repairs.items()} == {"a": {0: "c0"}, "b": {0: "c0"}}
    decided = plan(view([*nodes, server("c0"), server("c1")], [first, second]), NOW)
    assert {uid: set(homes(repair)) for uid, repair in decided.repairs.items()} == {"a": {0, 1}, "b": {0}}


def test_neighbouring_indexes_stay_together_and_those_in_the_middle_find_their_numbers_again() -> None:
    nodes = [server(name) for name in ("a1", "a3", "a4")]
    gone = broken(runs("g", {"a0": 2, "a1": 2, "a2": 2}), 0, 1, 4, 5)
    repair = plan(view(nodes, [gone]), NOW).repairs["g"]
    attempt = Attempt("g", 1, AttemptState.RUNNING, 1, gone.has.placements, 0.0, quota=gone.has.quota)
    after = attempt.repairing(repair, NOW)
    assert after.quota == attempt.quota
    at = {key: p.node for key, p in numbered(after.placements).items()}
    assert at[pod(2)] == at[pod(3)] == "a1"
    assert {at[pod(0)], at[pod(4)]} == {"a3", "a4"}
    assert at[pod(0)] == at[pod(1)]
    assert at[pod(4)] == at[pod(5)]


def test_a_lost_node_that_other_pods_could_use_is_not_used_again() -> None:
    """It takes no new pods of the role, though its label still says what the other roles ask for."""
    nodes = [server("a0", unschedulable=True), server("a1")]
    decided = plan(view(nodes, [broken(runs("g", {"a0": 2, "a1": 2}), 0, 1)]), NOW)
    assert decided.irreparable == {"g"}


# Histories


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Any]:
    """Return racks of nodes, gangs that may have lost pods replaced, and nodes that come and go."""
    racks = draw(st.integers(1, 3))
    nodes = [
        {"name": f"{rack}{i}", "gpus": 2, "labels": {"rack": rack}}
        for rack in "abc"[:racks]
        for i in range(draw(st.integers(2, 4)))
    ]
    names = [one["name"] for one in nodes]
    asks = st.sampled_from([None, {"required": "rack"}, {"preferred": "rack"}, {"slices": SLICES}])
    jobs = []
    for i in range(draw(st.integers(1, 4))):
        topology = draw(asks)
        job = {
            "name": f"j{i}", "queue": "q", "at": draw(st.integers(0, 8)), "gpus": 1, "priority": draw(st.integers(0, 1)),
            "pods": draw(st.sampled_from([2, 4, 6] if topology and "slices" in topology else [2, 3, 5])),
            "minPods": draw(st.sampled_from([None, None, 2])), "topology": topology,
            "replaceLostPods": draw(st.sampled_from([True, True, True, None])),
            "startSeconds": draw(st.sampled_from([0, 2, 5])), "grace": draw(st.sampled_from([0, 3])),
            "startDeadlineSeconds": 30, "run": draw(st.sampled_from([None, 20, 60])),
        }  # fmt: skip
        jobs.append({key: value for key, value in job.items() if value is not None})
    verbs = st.sampled_from(["nodeDown", "nodeDown", "nodeUp", "cordon", "uncordon", "drain", "remove", "restart"])
    events = draw(st.lists(st.tuples(st.integers(5, 50), verbs, st.integers(0, 11)), min_size=2, max_size=10))
    return {
        "nodes": nodes,
        "flavors": [{"name": "f", "topology": {"levels": [{"name": "rack", "nodeLabel": "rack"}]}}],
        "queues": [{"name": "q", "quotas": [{"flavor": "f", "resource": GPU, "nominal": draw(st.integers(4, 30))}]}],
        "jobs": jobs,
        "events": [
            {"at": at, "controllerRestart": True} if verb == "restart" else {"at": at, verb: names[number % len(names)]}
            for at, verb, number in events if verb not in {"drain", "remove"}
        ],
        "until": 120,
        "others": [(at, verb, number) for at, verb, number in events if verb in {"drain", "remove"}],
    }  # fmt: skip


class Rough(Watched):
    """A cluster in which others remove pods and drain nodes."""

    def remove(self, number: int) -> None:
        pods = sorted(pod.name for pod in self.cluster._pods.values() if not pod.ended)
        for one in [pod for pod in self.cluster._pods.values() if pods and pod.name == pods[number % len(pods)]]:
            self.cluster._remove_pod(_key(one))

    def drain(self, number: int) -> None:
        nodes = sorted(self.cluster._nodes)
        name = nodes[number % len(nodes)] if nodes else ""
        self.cluster._turn("cordon", name)
        for one in [pod for pod in self.cluster._pods.values() if pod.node == name and not pod.ended]:
            self.cluster._set_pod(replace(one, deleting=True, disrupted="Eviction: drained"))
            self.at(self.now + 2, lambda one=one: self.cluster._remove_pod(_key(one)))  # type: ignore[misc]

    def _move(self, move: Move, leaves: str = "Stopping") -> None:
        super()._move(move, leaves)
        attempt = self.world.attempts.get(move.uid)
        job = self.world.jobs[move.uid]
        if attempt is None or attempt.state is not AttemptState.RUNNING:
            return
        racks: dict[int, set[str]] = {}
        for (_, index), p in numbered(attempt.placements, attempt.done).items():
            racks.setdefault(index // 2, set()).add(p.node[0])
        topology = job.gang.roles[0].topology
        if topology.required:
            assert len(set().union(*racks.values())) == 1, "all pods are in one rack, also those that replace others"
        if topology.slice_level and not attempt.done:
            assert all(len(rack) == 1 for rack in racks.values()), "each slice is whole in its rack"


@settings(max_examples=60, deadline=None)
@given(histories())
def test_any_history_of_lost_nodes_keeps_gangs_whole_and_in_their_racks(data: dict[str, Any]) -> None:
    others = data.pop("others")
    clock = Rough(read(data))
    for at, verb, number in others:
        clock.at(at, lambda verb=verb, number=number: getattr(clock, verb)(number))  # type: ignore[misc]
    run = clock.run()
    assert run.faults == []
    for attempt in clock.world.attempts.values():
        pods = clock.world.pods.get((attempt.uid, attempt.number), {})
        for key, p in numbered(attempt.placements, attempt.done).items():
            if attempt.state is AttemptState.RUNNING and (pod := pods.get(key)):
                assert pod.node == p.node, "pods are where their room is"
        assert attempt.state is not AttemptState.REPAIRING, "what is replaced comes, or all goes"


def test_a_job_may_be_gone_before_its_lost_pods_are_looked_at() -> None:
    job = {"name": "j", "queue": "q", "pods": 2, "gpus": 1, "replaceLostPods": True}
    quotas = [{"flavor": "default", "resource": GPU, "nominal": 2}]
    nodes, queues = [{"name": "n", "gpus": 4}], [{"name": "q", "quotas": quotas}]
    clock = Clockwork(read({"nodes": nodes, "queues": queues, "jobs": [job], "until": 1}))
    clock.run()
    clock.cluster._remove_pod(next(iter(clock.cluster._pods)))
    moves, _ = turn.due(clock.world, {}, clock.now)
    assert (moves, set(clock.world.losses)) == ([], {"j"})
    clock.world.on_job(clock.cluster.jobs.pop("j"), None)
    clock._cycle()
    clock.settle()
    assert clock.result.faults == []
    assert clock.world.attempts == {}
