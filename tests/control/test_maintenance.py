"""Maintenance is carried out to its end whenever controllers die, watches lag and writes meet others': by real writes, to
an API server in memory."""

import asyncio
import copy
import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queuectl.control.maintenance import Maintainer
from queuectl.control.world import World
from queuectl.core.lifecycle import BackOff
from queuectl.core.maintenance import UPGRADE_SKIP, UPGRADE_STATE, most
from queuectl.kube import decode, maintenance
from queuectl.kube.client import ApiError, KubeClient
from queuectl.kube.writes import Writer
from queuectl.model.lifecycle import Attempt, AttemptState, Workload
from queuectl.model.maintenance import CLOSED
from queuectl.model.objects import Job
from queuectl.model.plan import Placement
from tests.kube.test_maintenance import merged
from tests.support.builders import gang, requests, role

Object = dict[str, Any]
M = f"{maintenance.PATH}/m"
NODES = 4
STEPS = (
    "upgrade-required",
    "cordon-required",
    "drain-required",
    "pod-restart-required",
    "uncordon-required",
    "upgrade-done",
)


class CrashError(Exception):
    """The controller has died."""


class Api:
    """Objects by path, with versions. ``dies_in``: after so many writes, of which the last may or may not have come through."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.version = 1
        self.dies_in: int | None = None
        self.comes_through = True
        self.before_answer: Callable[[], None] = lambda: None

    async def request_raw(self, method: str, path: str, **request: Any) -> bytes:
        if method != "GET" and self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in < 0:
                if self.comes_through:
                    self._answer(method, path, **request)
                raise CrashError
        answer = json.dumps(self._answer(method, path, **request)).encode()
        self.before_answer()
        return answer

    def _answer(self, method: str, path: str, body: Any = None, **_: Any) -> Object:
        status = path.endswith("/status")
        path = path.removesuffix("/status")
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                raise ApiError(409, "AlreadyExists", "it exists")
            return self.put(path, body | {"metadata": body["metadata"] | {"uid": path}})
        known = self.objects.get(path)
        if known is None:
            raise ApiError(404, "NotFound", "it is gone")
        if method == "GET":
            return known
        if method == "DELETE":
            return self.objects.pop(path)
        wanted = body["metadata"].get("resourceVersion", known["metadata"]["resourceVersion"])
        if wanted != known["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "it has changed")
        return self.put(path, merged(known, {"status": body["status"]} if status else body))

    def put(self, path: str, item: Object) -> Object:
        self.version += 1
        item = copy.deepcopy(item)
        item["metadata"]["resourceVersion"] = str(self.version)
        self.objects[path] = item
        return item

    def change(self, path: str, patch: Object) -> None:
        self.put(path, merged(self.objects[path], patch))


def node_path(number: int) -> str:
    return f"/api/v1/nodes/n{number}"


class Cluster:
    """Four nodes with two jobs of two nodes each, one node cordoned by an admin, and a maintenance of all of them."""

    def __init__(self, **spec: Any) -> None:
        self.drives = spec.get("work") == "DriverUpgrade"  # else the GPU Operator has nothing to do
        self.api = Api()
        self.now = 1_796_083_200.0
        self.jobs = {"a": (0, 1), "b": (2, 3)}
        for number in range(NODES):
            meta: Object = {"name": f"n{number}", "labels": {UPGRADE_STATE: "upgrade-done"}, "annotations": {}}
            item: Object = {"metadata": meta, "spec": {}, "status": {}}
            self.api.put(node_path(number), item)
        self.api.change(node_path(3), {"spec": {"unschedulable": True}})
        meta = {"name": "m", "uid": "u", "generation": 1, "creationTimestamp": "2026-12-01T00:00:00Z"}
        nodes = [f"n{number}" for number in range(NODES)]
        test = {"namespace": "x", "timeoutSeconds": 900, "template": {"spec": {"containers": []}}}
        self.api.put(M, {"metadata": meta, "spec": {"nodes": nodes, "test": test, **spec}})
        self.lead()

    def lead(self) -> None:
        """Have a new controller take over, which reads everything anew."""
        self.api.dies_in = None
        self.world = World(BackOff())
        self.alive = alive = [True]
        workloads, attempts = [], []
        for seq, (name, numbers) in enumerate(self.jobs.items()):
            one = gang(name, role(pods=2, gpu=1))
            self.world.on_job(None, Job(one, generation=1, resource_version="1"))
            workloads.append(Workload(name, one.namespace, name, "q", 0, 0.0, seq))
            places = tuple(Placement("worker", "f", f"n{number}", 1, requests(gpu=1)) for number in numbers)
            attempts.append(Attempt(name, 1, AttemptState.RUNNING, 1, places, 0.0, running_at=0.0))
        self.seen: dict[str, Any] = {}
        self.deliver()
        self.world.load(workloads, attempts, len(workloads))
        writer = Writer(cast("KubeClient", self.api), lambda: alive[0])
        self.maintainer = Maintainer(self.world, writer, "me", lambda: None, lambda: self.now)

    def deliver(self) -> None:
        """Have the watches show everything as it is."""
        upkeep = self.world.upkeep
        for prefix, read, change in (
            ("/api/v1/nodes/", decode.node, self._on_node),
            (M, maintenance.maintenance, upkeep.on_maintenance),
            ("/api/v1/namespaces/x/pods/", maintenance.node_test, upkeep.on_test),
        ):
            self._deliver(prefix, cast("Callable[..., Any]", read), change)

    def _deliver(self, prefix: str, read: Callable[[bytes], Any], change: Callable[[Any, Any], None]) -> None:
        now = {
            path: read(json.dumps(item).encode()).value
            for path, item in self.api.objects.items()
            if path.startswith(prefix)
        }
        before = {path: value for path, value in self.seen.items() if path.startswith(prefix)}
        for path in before.keys() | now.keys():
            if before.get(path) != now.get(path):
                change(self.seen.pop(path, None), now.get(path))
                if path in now:
                    self.seen[path] = now[path]

    def _on_node(self, old: Any, new: Any) -> None:
        self.world.on_node(old, new)
        self.world.upkeep.on_node(old, new)

    async def look(self) -> None:
        try:
            await self.maintainer.look()
        except CrashError:
            self.alive[0] = False
            await asyncio.sleep(0)
            self.lead()

    def leave(self, name: str) -> None:
        if name in self.jobs:
            del self.jobs[name]
            self.world.attempts.pop(name)

    def operate(self, number: int) -> None:
        """Have the GPU Operator take its next step with a node."""
        if not self.drives:
            return
        path, labels = node_path(number), self.api.objects[node_path(number)]["metadata"]["labels"]
        state = labels[UPGRADE_STATE]
        if state == "upgrade-done" and "new" not in labels:
            state = STEPS[0]
        elif state != "upgrade-done" and (state != STEPS[0] or labels.get(UPGRADE_SKIP) != "true"):
            state = STEPS[STEPS.index(state) + 1]
        if state == "drain-required":
            assert not [name for name, numbers in self.jobs.items() if number in numbers], (
                "it would remove a job's pods"
            )
        cordon = {"drain-required": True, "upgrade-done": None}.get(state, ...)
        patch: Object = {"metadata": {"labels": {UPGRADE_STATE: state}}}
        if state != labels[UPGRADE_STATE]:
            if state == "upgrade-done":
                patch["metadata"]["labels"]["new"] = "driver"
            self.api.change(path, patch | ({} if cordon is ... or number == 3 else {"spec": {"unschedulable": cordon}}))

    def end_test(self, *, well: bool) -> None:
        for path, item in list(self.api.objects.items()):
            if path.startswith("/api/v1/namespaces/x/pods/") and "status" not in item:
                self.api.change(path, {"status": {"phase": "Succeeded" if well else "Failed"}})

    def phases(self) -> dict[str, str]:
        return {node["name"]: node["phase"] for node in self.api.objects[M].get("status", {}).get("nodes", ())}

    def say_done(self, *phases: str) -> None:
        for name, phase in self.phases().items():
            if phase in phases:
                self.api.change(f"/api/v1/nodes/{name}", {"metadata": {"annotations": {maintenance.DONE: "yes"}}})

    async def to_its_end(self) -> None:
        """Let everybody do their part until nothing is left to do."""
        for turn in range(100):
            self.deliver()
            await self.look()
            for name, numbers in list(self.jobs.items()):
                if turn % 5 == 0 and any(self.phases().get(f"n{number}") == "Draining" for number in numbers):
                    self.leave(name)
            if self.drives:
                for number in range(NODES):
                    self.operate(number)
            else:
                self.say_done("Safe")
            self.say_done("Failed")
            self.end_test(well=True)


EVENTS = st.one_of(
    st.just(("look",)),
    st.just(("deliver",)),
    st.tuples(st.just("dies"), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("operate"), st.integers(0, NODES - 1)),
    st.tuples(st.just("heartbeat"), st.integers(0, NODES - 1)),
    st.tuples(st.just("leave"), st.sampled_from(["a", "b"])),
    st.tuples(st.just("test"), st.booleans()),
    st.just(("done",)),
)


async def happen(cluster: Cluster, what: tuple[Any, ...]) -> None:
    match what:
        case ("look",):
            await cluster.look()
        case ("deliver",):
            cluster.deliver()
        case ("dies", writes, through):
            cluster.api.dies_in, cluster.api.comes_through = writes, through
        case ("operate", number):
            cluster.operate(number)
        case ("heartbeat", number):
            cluster.api.change(node_path(number), {"status": {"beat": cluster.api.version}})
        case ("leave", name):
            cluster.leave(name)
        case ("test", well):
            cluster.end_test(well=well)
        case ("done",):
            cluster.say_done("Safe")


@pytest.mark.parametrize("work", ["Manual", "DriverUpgrade"])
@settings(max_examples=40)
@given(most_at_once=st.sampled_from([1, 2, "75%"]), canary=st.integers(0, 2), history=st.lists(EVENTS, max_size=60))
def test_whatever_happens_nodes_are_worked_on_in_order_and_are_in_the_end_as_they_were(
    work: str, most_at_once: int | str, canary: int, history: list[tuple[Any, ...]]
) -> None:
    async def play() -> None:
        cluster = Cluster(work=work, maxUnavailable=most_at_once, canary=canary)
        await cluster.look()
        cluster.deliver()
        await cluster.look()  # all are held back now
        for what in history:
            await happen(cluster, what)
            if cluster.phases():
                one = cluster.world.upkeep.maintenances["m"]
                closed = [phase for phase in cluster.phases().values() if phase in CLOSED]
                assert len(closed) <= most(one, NODES)
        cluster.api.dies_in = None
        await cluster.to_its_end()
        assert cluster.api.objects[M]["status"]["phase"] == "Finished"
        assert set(cluster.phases().values()) == {"Released"}
        for number in range(NODES):
            item = cluster.api.objects[node_path(number)]
            assert bool(item["spec"].get("unschedulable")) == (number == 3), item
            assert item["metadata"]["annotations"] == {}
            assert UPGRADE_SKIP not in item["metadata"]["labels"]
        assert not [path for path in cluster.api.objects if "/pods/" in path], "test pods are gone"

    asyncio.run(play())


@pytest.mark.parametrize("work", ["Manual", "DriverUpgrade"])
@settings(max_examples=40)
@given(history=st.lists(EVENTS, max_size=40))
def test_whenever_it_is_deleted_nodes_are_released(work: str, history: list[tuple[Any, ...]]) -> None:
    async def play() -> None:
        cluster = Cluster(work=work, maxUnavailable=2, canary=1)
        await cluster.look()
        cluster.deliver()
        await cluster.look()
        for what in history:
            await happen(cluster, what)
        cluster.api.dies_in = None
        del cluster.api.objects[M]
        for _ in range(4):
            cluster.deliver()
            await cluster.look()
        for number in range(NODES):
            item = cluster.api.objects[node_path(number)]
            assert maintenance.MARK not in item["metadata"]["annotations"]
            in_upgrade = item["metadata"]["labels"][UPGRADE_STATE] in STEPS[2:-1]
            assert in_upgrade or bool(item["spec"].get("unschedulable")) == (number == 3)

    asyncio.run(play())


async def test_a_test_pod_may_be_over_before_its_creation_is_answered() -> None:
    cluster = Cluster(canary=0, maxUnavailable=NODES)

    def watch() -> None:
        cluster.deliver()
        cluster.end_test(well=True)
        cluster.deliver()

    cluster.api.before_answer = watch
    await cluster.to_its_end()
    assert set(cluster.phases().values()) == {"Released"}
    assert [
        node["message"] for node in cluster.api.objects[M]["status"]["nodes"] if "succeeded" not in node["message"]
    ] == []


async def test_the_word_that_work_is_done_is_of_one_maintenance_and_not_of_the_next_of_that_node() -> None:
    cluster = Cluster(nodes=["n0"], test=None)
    first = cluster.api.objects[M]
    meta = first["metadata"] | {"name": "m2", "uid": "u2", "creationTimestamp": "2026-12-01T00:01:00Z"}
    cluster.api.put(f"{M}2", first | {"metadata": meta})
    cluster.leave("a")

    async def settle() -> list[str]:
        for _ in range(5):
            cluster.deliver()
            await cluster.look()
        return [cluster.api.objects[path]["status"]["nodes"][0]["phase"] for path in (M, f"{M}2")]

    assert await settle() == ["Safe", "Pending"]
    cluster.say_done("Safe")
    assert await settle() == ["Released", "Safe"]
    cluster.say_done("Released")
    assert await settle() == ["Released", "Released"]
    item = cluster.api.objects[node_path(0)]
    assert (item["spec"].get("unschedulable"), item["metadata"]["annotations"]) == (None, {})
