"""Faulty nodes and failed pods on a real control plane: who leaves, who starts again, where, and how often."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from queuectl.kube.client import MERGE_PATCH
from queuectl.kube.names import REPORT, pods_path
from queuectl.local.controlplane import Running
from queuectl.local.prepare import nodes_are_ready
from tests.support import ledger
from tests.support.conditions import set_condition
from tests.support.eventually import eventually
from tests.support.real import Agent, Pods
from tests.support.stage import Object, Stage

EXPORTER = "app=nvidia-dcgm-exporter"
SHOWS = 'cd "$FOLDER" && exec python -m http.server 9400 --bind "$ADDRESS"'
LABELS = (
    'gpu="{gpu}",UUID="GPU-{gpu}",pci_bus_id="0:{gpu}",device="nvidia{gpu}",modelName="NVIDIA H100",Hostname="{node}"'
)


def node_of(job: Object) -> str:
    [place] = job["status"]["assignments"]
    return str(place["node"])


def rules(*given: Object, **more: Any) -> Object:
    return {"podFailurePolicy": {"rules": [*given], **more}}


def on(action: str, *values: int, operator: str = "In", **more: Any) -> Object:
    return {"action": action, "onExitCodes": {"operator": operator, "values": [*values]}, **more}


async def until_on_another(stage: Stage, name: str, node: str) -> Object:
    """Wait until a job runs in its next attempt, on another node."""

    def elsewhere(status: Object) -> bool:
        return status.get("phase") == "Running" and status["assignments"][0]["node"] != node

    return await stage.until_job(name, elsewhere, f"runs elsewhere than on {node}")


async def test_a_gang_leaves_a_faulty_node_with_its_work_saved_and_the_node_comes_back(stage: Stage) -> None:
    await stage.nodes(2)
    await stage.queue(16)
    stage.controller().start()
    await stage.submit("gang", 1, 8, checkpoint={"signal": "Annotation", "graceSeconds": 600}, backoffLimit=0)
    first = node_of(await stage.until_phase("gang", "Running"))

    await set_condition(stage.client, first, "GPUMissing", "True", "nvidia-smi finds 7 GPUs, and there should be 8")
    told = await stage.until_phase("gang", "Checkpointing")
    assert (
        f"It leaves node {first}, which is at fault: condition GPUMissing is True: nvidia-smi finds 7"
        in (told["status"]["message"])
    )

    async def asked() -> str | None:
        [pod] = await stage.pods("gang")
        ask = pod["metadata"].get("annotations", {}).get("queuectl.dev/checkpoint-ask")
        return str(json.loads(ask)["id"]) if ask else None

    said = {"ask": await eventually(asked, "the pod is asked"), "step": 7, "at": time.time()}
    [pod] = await stage.pods("gang")
    body = {"metadata": {"annotations": {REPORT: json.dumps(said)}}}
    path = pods_path(stage.namespace, pod["metadata"]["name"])
    await stage.client.request("PATCH", path, body=body, content_type=MERGE_PATCH)
    again = await until_on_another(stage, "gang", first)
    assert again["status"]["attempt"] == 2
    assert again["status"]["failures"] == 0
    assert again["status"]["lastCheckpoint"]["step"] == 7
    [one] = await ledger.rows(
        stage,
        "SELECT cause, saved_step, answered FROM interruption JOIN workload ON uid = workload_uid WHERE namespace = :n",
        n=stage.namespace,
    )
    assert one == {"cause": "NodeFaulty", "saved_step": 7, "answered": True}

    await stage.submit("next", 1, 8)
    await stage.until_reason("next", "WaitingForNodes")
    await set_condition(stage.client, first, "GPUMissing", "False", "all are there")
    assert node_of(await stage.until_phase("next", "Running")) == first


@pytest.fixture
def agent(mounts: None, control_plane: Running, tmp_path: Path, stage: Stage) -> Agent:
    return Agent(control_plane, tmp_path, [f"{stage.name}-real-{number}" for number in range(2)], gpus=8)


class Exporters:
    """Pods that show metrics as dcgm-exporter does, one on each node."""

    def __init__(self, stage: Stage, folder: Path, nodes: list[str]) -> None:
        self._stage = stage
        self._folders = {node: folder / node for node in nodes}

    async def start(self) -> None:
        key, value = EXPORTER.split("=")
        for node, folder in self._folders.items():
            folder.mkdir()
            self.show(node, {})
            address = {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
            pods = Pods(self._stage.client, self._stage.namespace, node)
            await pods.run(
                f"exporter-{node}",
                SHOWS,
                labels={key: value},
                env=[address, {"name": "FOLDER", "value": "/shown"}],
                volumeMounts=[{"name": "shown", "mountPath": "/shown"}],
                volumes=[{"name": "shown", "hostPath": {"path": str(folder)}}],
                ports=[{"name": "metrics", "containerPort": 9400}],
            )

    def show(self, node: str, xids: Mapping[int, int], pod: str = "") -> None:
        """Show the last XID of each GPU, of those that are not named 0; of all the pod that has them."""
        whose = f'namespace="{self._stage.namespace}",pod="{pod}",container="{pod and "main"}"'
        lines = ["# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered."]
        lines += ["# TYPE DCGM_FI_DEV_XID_ERRORS gauge"]
        for gpu in range(8):
            code = xids.get(gpu, 0)
            known = f'{LABELS.format(gpu=gpu, node=node)},err_code="{code}",err_msg="",{whose}'
            lines += [f"DCGM_FI_DEV_XID_ERRORS{{{known}}} {code}", f"DCGM_FI_DEV_GPU_TEMP{{{known}}} 40"]
        new = self._folders[node] / "new"
        new.write_text("\n".join((*lines, "")), encoding="utf-8")
        new.replace(self._folders[node] / "metrics")

    async def until_read(self, what: str, holds: Callable[[Object], object]) -> None:
        """Wait until the ledger says of each node's GPUs what is wanted, by node."""

        async def look() -> bool:
            found = await ledger.rows(self._stage, "SELECT node, levels, faults FROM gpu_reading")
            return bool(holds({row["node"]: row for row in found}))

        await eventually(look, what)


async def test_an_error_of_a_gpu_takes_its_node_out_for_a_while_and_only_once(
    stage: Stage, agent: Agent, tmp_path: Path
) -> None:
    env = {
        "QUEUECTL_EXPORTER_NAMESPACE": stage.namespace, "QUEUECTL_EXPORTER_LABELS": EXPORTER,
        "QUEUECTL_EXPORTER_SECONDS": "0.5",
    }  # fmt: skip
    exporters = Exporters(stage, tmp_path / "shown", list(agent.nodes))
    (tmp_path / "shown").mkdir()
    try:
        agent.start()
        await nodes_are_ready(stage.client, agent.nodes)
        await stage.adopt(agent.nodes)
        await stage.queue(16)
        await exporters.start()
        for node in agent.nodes:
            exporters.show(node, {7: 79})  # long ago
        controller = stage.controller(env=env)
        controller.start()
        await exporters.until_read("both exporters are read", lambda rows: rows.keys() == set(agent.nodes))

        job = stage.job("gang", 1, 8, backoffLimit=0)
        job["spec"]["roles"][0]["template"]["spec"]["containers"][0]["command"] = ["sleep", "1000"]
        await stage.create(job)
        first = node_of(await stage.until_phase("gang", "Running"))
        [pod] = await stage.pods("gang")
        exporters.show(first, {7: 79, 2: 31}, pod["metadata"]["name"])
        note = await stage.until_event("gang", "GpuError")
        assert note.startswith(f"On node {first}, GPU 2 reported XID 31 (memory page fault")
        assert (await stage.get_job("gang") or {})["status"]["attempt"] == 1

        exporters.show(first, {7: 79, 2: 31, 3: 48}, pod["metadata"]["name"])
        again = await until_on_another(stage, "gang", first)
        assert (again["status"]["attempt"], again["status"]["failures"]) == (2, 0)
        note = await stage.until_event("gang", "NodeFaulty")
        assert f"It leaves node {first}, which is at fault: GPU 3 reported XID 48 (double-bit ECC error)" in note

        await exporters.until_read("the fault is known", lambda rows: rows[first]["faults"])
        controller.kill()
        other = stage.controller("b", env=env)
        other.start()
        await other.until_leading()
        job = stage.job("next", 1, 8)
        job["spec"]["roles"][0]["template"]["spec"]["containers"][0]["command"] = ["sleep", "1000"]
        await stage.create(job)
        await stage.until_reason("next", "WaitingForNodes")
        other.kill()

        # The exporter still shows it, and nobody takes it for a new one when its time is over.
        stage.controller("c", env={**env, "QUEUECTL_FAULT_SECONDS": "1"}).start()
        assert node_of(await stage.until_phase("next", "Running")) == first
        await exporters.until_read("the fault is over", lambda rows: not rows[first]["faults"])
        for name, attempt in (("gang", 2), ("next", 1)):
            status = (await stage.get_job(name) or {})["status"]
            assert (status["phase"], status["attempt"]) == ("Running", attempt)
    finally:
        agent.end()


async def test_rules_say_what_follows_from_an_exit_code(live: Stage) -> None:
    await live.nodes(2)
    await live.queue(16)
    await live.submit("wrong", 2, 1, **rules(on("Ignore", 75), on("FailJob", 41, 42)))
    await live.submit("flaky", 1, 1, backoffLimit=0, **rules(on("FailJob", 42), on("Ignore", 1, operator="NotIn")))
    await live.submit("unlucky", 1, 5, backoffLimit=0, **rules(on("AvoidNode", 80, role="worker")))
    for name in ("wrong", "flaky", "unlucky"):
        await live.until_phase(name, "Running")
    first = node_of(await live.get_job("unlucky") or {})
    await live.end_pods("wrong", exit_code=42)
    await live.end_pods("flaky", exit_code=75)
    await live.end_pods("unlucky", exit_code=80)

    wrong = (await live.until_phase("wrong", "Failed"))["status"]
    assert (wrong["reason"], wrong["attempt"], wrong["exitCode"]) == ("PodFailurePolicy", 1, 42)
    assert (
        "failed with exit code 42 of container main, for which rules[1] of podFailurePolicy fails the job"
        in (wrong["message"])
    )
    again = await live.until_job("flaky", lambda s: s.get("attempt") == 2 and s["phase"] == "Running", "runs again")
    assert again["status"]["failures"] == 0
    assert "rules[1] of podFailurePolicy ignores: 1 of at most 20" in await live.until_event("flaky", "FailureIgnored")
    moved = await until_on_another(live, "unlucky", first)
    assert (moved["status"]["attempt"], moved["status"]["failures"]) == (2, 0)
    assert f"rules[0] of podFailurePolicy blames node {first}" in await live.until_event("unlucky", "NodeBlamed")


async def test_a_crash_loop_ends_although_nothing_of_it_is_charged(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    annotations = {"local.queuectl.dev/exit-code": "75"}
    policy = rules(on("Ignore", 75), ignoreLimit=2)
    await live.submit("loop", 1, 1, run_seconds=0, annotations=annotations, backoffLimit=0, **policy)
    done = (await live.until_phase("loop", "Failed"))["status"]
    assert (done["reason"], done["attempt"], done["failures"]) == ("IgnoreLimitExceeded", 3, 0)
    assert done["message"].startswith("Failed 3 times in a row without getting further, ignoreLimit is 2; last: Pod")
    assert done["exitCode"] == 75
