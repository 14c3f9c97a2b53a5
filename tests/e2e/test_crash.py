"""The controller is killed between any two steps and started again: the same end, nothing doubled, nothing lost."""

import itertools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal

import pytest

from queuectl.kube.client import KubeClient
from queuectl.kube.names import ASK, GATE
from queuectl.local.controlplane import Running
from tests.e2e.test_checkpoint import asks, interruptions, report
from tests.support import ledger
from tests.support.databases import Databases
from tests.support.eventually import eventually
from tests.support.observer import observing
from tests.support.proxy import Action, Match, Proxy, Then, proxied
from tests.support.stage import Controller, Object, Stage

PODS = 6

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Standing:
    """Three nodes that one gang of the tests fills, and a controller to be killed."""

    stage: Stage
    proxy: Proxy
    controller: Controller

    def start(self) -> None:
        if not self.controller.running:
            self.controller.start()

    def kill(self) -> Action:
        async def do() -> Then:
            self.controller.kill()
            return Then.DROP

        return do

    def created(self, job: str) -> list[Object]:
        """Return the metadata of each pod that the API server said to have created."""
        answers = [a for a in self.proxy.answers if a.method == "POST" and "/pods" in a.path and a.status == 201]
        made = [json.loads(answer.body)["metadata"] for answer in answers]
        return [meta for meta in made if meta["name"].startswith(f"{job}-worker-")]


@pytest.fixture(scope="module")
async def standing(
    kube: KubeClient, control_plane: Running, postgres: Databases, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Standing]:
    folder = tmp_path_factory.mktemp("crash")
    with postgres.migrated() as url:
        async with proxied(control_plane, folder) as proxy:
            stage = Stage(kube, control_plane.kubeconfig, url, folder, "crash")
            await stage.open()
            try:
                await stage.nodes(3)
                await stage.queue(24, preemption={"withinQueue": "LowerPriority"})
                async with observing(stage):
                    # Nodes are lost on purpose: they are to be used again.
                    env = {"QUEUECTL_SUSPECT_FIRST": "0"}
                    yield Standing(stage, proxy, stage.controller(kubeconfig=proxy.kubeconfig, env=env))
            finally:
                await stage.close()


def says(phase: str) -> Callable[[str], Match]:
    """Match the write of a status with this phase."""
    wanted = f'"phase":"{phase}"'.encode()
    return lambda job: lambda method, path, body: method == "PATCH" and f"/{job}/status" in path and wanted in body


def creates(job: str) -> Match:
    name = f'"name":"{job}-worker-'.encode()
    return lambda method, path, body: method == "POST" and "/pods" in path and name in body


def ungates(job: str) -> Match:
    return lambda method, path, body: method == "PATCH" and f"/pods/{job}-worker-" in path and GATE.encode() in body


def asks_to_save(job: str) -> Match:
    return lambda method, path, body: method == "PATCH" and f"/pods/{job}-worker-" in path and ASK.encode() in body


def tells_why(job: str) -> Match:
    return lambda method, path, body: method == "PATCH" and f"/{job}-worker-" in path and b"DisruptionTarget" in body


def removes(_: str) -> Match:
    return lambda method, path, _: method == "DELETE" and "/pods" in path


def lets_go(job: str) -> Match:
    return lambda method, path, body: method == "PATCH" and path.endswith(f"/{job}") and b"finalizers" in body


@dataclass(frozen=True)
class Case:
    match: Callable[[str], Match]
    nth: int = 1
    when: Literal["before", "after"] = "before"


succeeded = says("Succeeded")
ENDING = {succeeded}

CASES = {
    "after the transaction": Case(says("Starting")),
    "after Admitted": Case(says("Starting"), when="after"),
    "before the first pod": Case(creates),
    "before the third pod": Case(creates, 3),
    "after the third pod": Case(creates, 3, "after"),
    "after all pods": Case(creates, PODS, "after"),
    "before the first gate": Case(ungates),
    "before the third gate": Case(ungates, 3),
    "after the third gate": Case(ungates, 3, "after"),
    "after all gates": Case(ungates, PODS, "after"),
    "before Running": Case(says("Running")),
    "before Succeeded": Case(succeeded),
    "after Succeeded": Case(succeeded, when="after"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_a_job_runs_once_whenever_the_controller_dies(standing: Standing, case: Case) -> None:
    stage, name = standing.stage, f"job-{next(_numbers)}"
    rule = standing.proxy.on(case.match(name), nth=case.nth, when=case.when, do=standing.kill())
    standing.start()
    await stage.submit(name, PODS, 4)
    if case.match in ENDING:
        await stage.until_phase(name, "Running")
        await stage.end_pods(name)
    await rule.until_fired()
    standing.start()
    if case.match not in ENDING:
        await stage.until_phase(name, "Running")
        await stage.end_pods(name)
    job = await stage.until_phase(name, "Succeeded")
    await ledger.until_free(stage)
    assert job["status"]["attempt"] == 1
    assert job["status"]["failures"] == 0
    pods = await stage.pods(name)
    assert sorted(pod["metadata"]["name"] for pod in pods) == [f"{name}-worker-1-{i}" for i in range(PODS)]
    assert all(pod["status"]["phase"] == "Succeeded" for pod in pods)
    # Nothing was made that is gone by now.
    assert {pod["metadata"]["uid"] for pod in pods} == {meta["uid"] for meta in standing.created(name)}


FREEING = {
    "before pods are removed": Case(removes),
    "after pods are removed": Case(removes, when="after"),
}


@pytest.mark.parametrize("case", FREEING.values(), ids=FREEING.keys())
async def test_room_is_given_back_once_when_the_controller_dies_while_freeing_it(
    standing: Standing, case: Case
) -> None:
    stage, name = standing.stage, f"job-{next(_numbers)}"
    rule = standing.proxy.on(case.match(name), nth=case.nth, when=case.when, do=standing.kill())
    standing.start()
    slow = {"local.queuectl.dev/stop-after": "4s"}
    await stage.submit(name, PODS, 4, annotations=slow, maxRunSeconds=1)
    await stage.submit(f"{name}-next", PODS, 4, run_seconds=0)
    await rule.until_fired()
    standing.start()
    first = await stage.until_phase(name, "Failed")
    following = await stage.until_phase(f"{name}-next", "Succeeded")
    assert first["status"]["reason"] == "MaxRunSecondsExceeded"
    assert first["status"]["attempt"] == following["status"]["attempt"] == 1
    assert await stage.pods(name) == []
    await ledger.until_free(stage)


async def test_a_job_is_gone_when_the_controller_dies_while_it_is_being_deleted(standing: Standing) -> None:
    stage, name = standing.stage, f"job-{next(_numbers)}"
    rule = standing.proxy.on(lets_go(name), do=standing.kill())
    standing.start()
    await stage.submit(name, 2, 4)
    await stage.until_phase(name, "Running")
    await stage.delete_job(name)
    await rule.until_fired()
    assert await stage.pods(name) == []
    await ledger.until_free(stage)
    standing.start()
    await stage.until_gone(name)


SAVING = {
    "before the second pod is asked": Case(asks_to_save, 2),
    "after all are asked": Case(asks_to_save, 3, "after"),
    "before pods are told why they go": Case(tells_why),
    "before pods are removed": Case(removes),
    "after pods are removed": Case(removes, when="after"),
    "before it waits again": Case(says("Pending")),
}


@pytest.mark.parametrize("case", SAVING.values(), ids=SAVING.keys())
async def test_a_victim_saves_and_is_evicted_once_when_the_controller_dies_meanwhile(
    standing: Standing, case: Case
) -> None:
    stage, name = standing.stage, f"job-{next(_numbers)}"
    standing.start()
    slow = {"local.queuectl.dev/stop-after": "2s"}
    await stage.submit(name, 3, 8, annotations=slow, checkpoint={"signal": "Annotation", "graceSeconds": 600})
    await stage.until_phase(name, "Running")
    rule = standing.proxy.on(case.match(name), nth=case.nth, when=case.when, do=standing.kill())
    await stage.submit(f"{name}-next", 3, 8, priority=5)
    if case.match is asks_to_save:
        await rule.until_fired()
        standing.start()
    asked = await asks(stage, name)
    assert len({ask["id"] for _, ask in asked}) == 1
    for pod, ask in asked:
        await report(stage, pod, ask["id"], 40)
    await rule.until_fired()
    standing.start()
    await stage.until_phase(f"{name}-next", "Running")
    victim = (await stage.until_phase(name, "Pending"))["status"]
    assert (victim["attempt"], victim["failures"], victim["lastCheckpoint"]["step"]) == (1, 0, 40)
    [one] = await interruptions(stage, name)
    assert (one["cause"], one["saved_step"], one["answered"]) == ("Preempted", 40, True)
    assert (await ledger.history(stage, name))[-3:] == ["Preempted", "Checkpointed", "Requeued"]
    await stage.delete_job(f"{name}-next")
    await stage.until_phase(name, "Running")
    await stage.delete_job(name)
    await stage.until_gone(name)
    await ledger.until_free(stage)


REPAIRING = {
    "before the lost pods are removed": Case(removes),
    "after the first one is removed": Case(removes, when="after"),
    "before the first pod in their stead": Case(creates),
    "after the second pod in their stead": Case(creates, 2, "after"),
    "before the second gate": Case(ungates, 2),
    "after all gates": Case(ungates, 2, "after"),
}


@pytest.mark.parametrize("case", REPAIRING.values(), ids=REPAIRING.keys())
async def test_lost_pods_are_replaced_once_when_the_controller_dies_meanwhile(standing: Standing, case: Case) -> None:
    stage, name = standing.stage, f"job-{next(_numbers)}"
    standing.start()
    await stage.submit(name, 4, 4, replaceLostPods=True)
    job = await stage.until_phase(name, "Running")
    homes = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in await stage.pods(name)}
    before = {meta["name"]: meta["uid"] for meta in standing.created(name)}
    lost = job["status"]["assignments"][0]["node"]
    rule = standing.proxy.on(case.match(name), nth=case.nth, when=case.when, do=standing.kill())
    await stage.client.request("DELETE", f"/api/v1/nodes/{lost}")
    await rule.until_fired()
    standing.start()

    async def whole() -> bool:  # the status may still say so from before
        return (await ledger.history(stage, name))[-2:] == ["Growing", "Running"]

    await eventually(whole, "it is whole again")
    assert (await ledger.history(stage, name)).count("Replacing") == 1
    job = await stage.until_job(name, lambda s: (s["reason"], s["pods"]) == ("Running", "4/4"), "says so")
    assert (job["status"]["attempt"], job["status"]["failures"]) == (1, 0)
    after = {pod["metadata"]["name"]: pod for pod in await stage.pods(name)}
    assert after.keys() == homes.keys()
    for pod, home in homes.items():
        made = {meta["uid"] for meta in standing.created(name) if meta["name"] == pod}
        if home == lost:
            assert after[pod]["spec"]["nodeName"] not in homes.values(), "on the node that was spare"
            assert made == {before[pod], after[pod]["metadata"]["uid"]}, "made once more, and no more"
        else:
            assert made == {before[pod]} == {after[pod]["metadata"]["uid"]}, "the others run on"
    await stage.nodes(1, first=int(lost.rpartition("-")[2]))
    await stage.end_pods(name)
    await stage.until_phase(name, "Succeeded")
    await ledger.until_free(stage)
