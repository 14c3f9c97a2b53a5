"""Pods that request more than their template says: as the API server makes them, and as they are resized in place."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

from queuectl.control.world import World
from queuectl.core.cycle import plan
from queuectl.core.lifecycle import BackOff, Loss, can_go, next_move
from queuectl.kube import decode, pods
from queuectl.model.lifecycle import Attempt, AttemptState, Move
from queuectl.model.objects import Namespace, Pod
from queuectl.model.plan import Admission, Placement, Plan
from queuectl.model.reasons import Reason, why
from queuectl.model.resources import CARD
from tests.support.builders import GPU, flavor, node, queue, requests
from tests.support.manifests import Manifest, container, job, role

Change = Callable[[Manifest], None]
GPU_ONLY: dict[str, Any] = {"resources": {"requests": {GPU: 1}, "limits": {GPU: 1}}}


def _world(*nodes: Any) -> World:
    world = World(BackOff())
    world.on_flavor(None, flavor())
    world.on_queue(None, queue("team-a", any={GPU: 100}))
    for one in nodes:
        world.on_node(None, one)
    return world


def _submit(
    world: World,
    name: str = "llm",
    namespace: str = "default",
    *,
    pods: int = 2,
    least: int | None = None,
    **template: Any,
) -> None:
    one = role("worker", pods, container(gpu=None, **GPU_ONLY), minReplicas=least)
    manifest = job(name, one, namespace=namespace, replaceLostPods=True)
    manifest["spec"]["roles"][0]["template"] |= template
    manifest["metadata"] |= {"uid": name, "resourceVersion": "1", "generation": 1}
    world.on_job(None, decode.job(json.dumps(manifest).encode()).value)


def _plan(world: World) -> Plan:
    world.submissions(world.take_changes().submissions)
    return plan(world.snapshot(0.0), 0.0)


def _admit(world: World, admission: Admission, number: int = 1) -> Attempt:
    attempt = Attempt(
        admission.uid, number, AttemptState.RESERVED, 1, admission.placements, quota=admission.quota, admitted_at=0.0
    )
    world.admitted(attempt)
    return attempt


def _create(world: World, attempt: Attempt, change: Change | None = None, *, bound: bool = False) -> list[Pod]:
    """Have the attempt's pods as the API server shows them after it has changed their spec."""
    result = []
    nodes, manifests = pods.nodes_of(attempt), pods.manifests(world.jobs[attempt.uid], attempt, 0, world.flavors)
    for number, (key, manifest) in enumerate(deepcopy(manifests).items()):
        if change:
            change(manifest["spec"])
        manifest["metadata"] |= {"uid": f"pod-{attempt.uid}-{attempt.number}-{number}", "resourceVersion": "1"}
        if bound:
            del manifest["spec"]["schedulingGates"]
            manifest["spec"]["nodeName"] = nodes[key][0]
        pod = decode.pod(json.dumps(manifest).encode()).value
        world.on_pod(None, pod)
        result.append(pod)
    return result


def _limit_range(spec: Manifest) -> None:
    spec["containers"][0]["resources"]["requests"]["cpu"] = "6"


def _runtime_class(spec: Manifest) -> None:
    spec["overhead"] = {"cpu": "2"}
    spec["nodeSelector"] = {"kata": "yes"}


def _is_over(world: World, uid: str) -> str:
    """Return why the attempt ends, and have it ended."""
    view = world.view(uid, 1.0)
    assert view is not None
    assert not can_go(view, {key: node for key, (node, _) in pods.nodes_of(view.attempt).items()})
    move = next_move(view)
    assert move is not None
    assert move.end is not None
    assert (move.end.why.reason, move.end.charged, move.end.not_before) == (Reason.PLACE_LOST, False, 0.0)
    world.moved(move, 1.0)
    for pod in list(world.pods[uid, view.attempt.number].values()):
        world.on_pod(pod, None)
    world.moved(Move(uid, view.attempt.number, AttemptState.ENDED), 1.0)
    return str(move.end.why)


def test_a_gang_whose_pods_are_made_larger_is_planned_anew_with_what_they_request() -> None:
    world = _world(node("a", cpu=8), node("b", cpu=8))
    _submit(world)
    [admission] = _plan(world).admissions
    assert {p.node for p in admission.placements} == {"a"}
    _create(world, _admit(world, admission), _limit_range)
    assert "pods that request more than their template says" in _is_over(world, "llm")

    [admission] = _plan(world).admissions
    assert {p.node: dict(p.requests)["cpu"] for p in admission.placements} == {"a": 6000, "b": 6000}
    attempt = _admit(world, admission, 2)
    _create(world, attempt, _limit_range)
    view = world.view("llm", 1.0)
    assert view is not None
    assert can_go(view, {key: node for key, (node, _) in pods.nodes_of(attempt).items()})


def test_a_gang_that_does_not_fit_with_what_they_request_waits_for_that() -> None:
    world = _world(node("a", cpu=8))
    _submit(world)
    _create(world, _admit(world, _plan(world).admissions[0]), _limit_range)
    _is_over(world, "llm")
    assert "1 place with 6 cpu" in str(_plan(world).waits["llm"])


def test_others_of_the_same_template_in_the_namespace_are_planned_so_at_once() -> None:
    world = _world(node("a", cpu=8), node("b", cpu=8), node("c", cpu=8))
    _submit(world)
    _submit(world, "waits")
    _create(world, _admit(world, _plan(world).admissions[0]), _limit_range)
    for name, namespace, labels in (("like", "default", {}), ("else", "other", {}), ("kind", "default", {"a": "b"})):
        _submit(world, name, namespace, metadata={"labels": labels} if labels else {})
    asks = {uid: dict(one.gang.roles[0].requests).get("cpu", 0) for uid, one in world.jobs.items()}
    assert asks == {"llm": 6000, "waits": 6000, "like": 6000, "else": 0, "kind": 0}


def test_others_of_the_same_template_are_planned_so_however_many_pods_they_have() -> None:
    world = _world(node("a", cpu=8))
    _submit(world)
    _submit(world, "large", pods=3)
    _create(world, _admit(world, _plan(world).admissions[0]), _limit_range)
    assert [dict(one.gang.roles[0].requests)["cpu"] for one in world.jobs.values()] == [6000, 6000]


def test_a_gang_of_which_only_some_pods_are_made_larger_is_planned_with_the_largest() -> None:
    world = _world(node("a", cpu=8), node("b", cpu=8))
    _submit(world)
    overheads = iter(({"cpu": "6"}, {}))
    _create(world, _admit(world, _plan(world).admissions[0]), lambda spec: spec.update(overhead=next(overheads)))
    _is_over(world, "llm")
    [admission] = _plan(world).admissions
    assert {p.node: dict(p.requests)["cpu"] for p in admission.placements} == {"a": 6000, "b": 6000}


def test_what_was_known_of_a_namespace_is_forgotten_with_it() -> None:
    world = _world(node("a", cpu=8))
    _submit(world)
    world.on_namespace(None, Namespace("default"))
    _create(world, _admit(world, _plan(world).admissions[0]), _limit_range)
    world.on_namespace(Namespace("default"), None)
    _submit(world, "later")
    assert "cpu" not in dict(world.jobs["later"].gang.roles[0].requests)


def test_what_a_runtime_class_adds_counts_and_its_nodes_are_heeded() -> None:
    world = _world(
        node("a", cpu=3), node("k0", cpu=3, labels={"kata": "yes"}), node("k1", cpu=3, labels={"kata": "yes"})
    )
    _submit(world)
    _create(world, _admit(world, _plan(world).admissions[0]), _runtime_class)
    _is_over(world, "llm")
    [admission] = _plan(world).admissions
    assert {p.node: dict(p.requests)["cpu"] for p in admission.placements} == {"k0": 2000, "k1": 2000}


def test_what_is_made_smaller_again_is_planned_so_from_then_on() -> None:
    world = _world(node("a", cpu=96))
    _submit(world)
    _create(world, _admit(world, _plan(world).admissions[0]), _limit_range)
    _is_over(world, "llm")
    [admission] = _plan(world).admissions
    _create(world, _admit(world, admission, 2))  # the LimitRange is gone
    view = world.view("llm", 1.0)
    assert view is not None
    assert next_move(view) is None
    assert "cpu" not in dict(world.jobs["llm"].gang.roles[0].requests)


def _restarted(*nodes: str, least: int | None = None) -> World:
    """Return a world as a new leader has it: a gang runs on these nodes, with more than its template says."""
    world = _world(node("a", cpu=8), node("b", cpu=8), node("c", cpu=3))
    _submit(world, least=least)
    world.submissions(world.take_changes().submissions)
    places = tuple(Placement("worker", "any", name, 1, requests(gpu=1, cpu=6), CARD, i) for i, name in enumerate(nodes))
    attempt = Attempt("llm", 1, AttemptState.RUNNING, 1, places, 0.0, running_at=0.0, quota={("any", GPU): len(nodes)})
    world.load([world.workloads["llm"]], [attempt], 1)
    for pod in _create(world, attempt, _limit_range, bound=True):
        world.on_pod(pod, replace(pod, phase="Running", ready=True))
    return world


def test_pods_that_join_a_gang_get_the_room_that_is_reserved_for_them_whoever_leads() -> None:
    world = _restarted("a", least=1)
    assert {p.node for p in _plan(world).growths["llm"].placements} == {"b"}
    world.on_node(world.nodes.known["b"], node("b", cpu=5))
    assert _plan(world).growths == {}


def test_pods_that_replace_lost_ones_get_the_room_that_is_reserved_for_them_whoever_leads() -> None:
    world = _restarted("a", "b")
    world.on_node(world.nodes.known["b"], None)
    world.lost("llm", Loss(frozenset({("worker", 1)}), why(Reason.NODE_LOST, node="b")))
    assert _plan(world).irreparable == {"llm"}


def test_a_pod_that_is_resized_in_place_holds_what_it_requests() -> None:
    world = _world(node("a", cpu=8))
    _submit(world)
    attempt = _admit(world, _plan(world).admissions[0])
    before = _create(world, attempt, bound=True)
    assert world.fleet.room("a")["cpu"] == 8000
    _create(world, attempt, _limit_range, bound=True)
    assert world.fleet.room("a")["cpu"] == 8000 - 12000 + 4000  # all of it, and more
    for pod in before:
        world.on_pod(pod, None)
    assert world.fleet.room("a")["cpu"] == 8000
