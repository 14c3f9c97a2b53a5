"""The checkpoint handshake on a real control plane: pods are asked, answer or don't, go, and are told where to go on."""

import asyncio
import json
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from queuectl.cli.errors import Exit
from queuectl.kube.client import MERGE_PATCH, STRATEGIC_PATCH
from queuectl.kube.names import ASK, REPORT, pods_path
from queuectl.local import build
from queuectl.local.components import STAGES
from queuectl.local.controlplane import Running
from tests.support import ledger
from tests.support.commands import Commands
from tests.support.eventually import eventually
from tests.support.stage import Controller, Object, Stage

STAYS = {"local.queuectl.dev/stop-after": "1000h"}  # a pod that has been deleted can be looked at until it is removed


async def running(stage: Stage, name: str, pods: int = 2, **checkpoint: Any) -> None:
    """Have a gang run that fills the stage, in a queue in which others go first."""
    await stage.nodes(pods)
    await stage.queue(8 * pods, preemption={"withinQueue": "LowerPriority"})
    await stage.submit(name, pods, 8, annotations=STAYS, checkpoint=checkpoint)
    await stage.until_phase(name, "Running")


async def report(stage: Stage, pod: Object, ask: str | None, step: int, at: float | None = None) -> None:
    """Say for a pod that it has saved its work, as a trainer does."""
    said = json.dumps({"ask": ask, "step": step, "at": at or time.time(), "path": f"/c/step-{step}", "digest": None})
    await annotate(stage, pod, said)


async def annotate(stage: Stage, pod: Object, said: str) -> None:
    body = {"metadata": {"annotations": {REPORT: said}}}
    await stage.client.request(
        "PATCH", pods_path(stage.namespace, pod["metadata"]["name"]), body=body, content_type=MERGE_PATCH
    )


async def asks(stage: Stage, job: str) -> list[tuple[Object, Object]]:
    """Wait until all pods of a job are asked; return them with how."""

    async def asked() -> list[tuple[Object, Object]] | None:
        pods = [(pod, pod["metadata"].get("annotations", {}).get(ASK)) for pod in await stage.pods(job)]
        return [(pod, json.loads(ask)) for pod, ask in pods] if pods and all(ask for _, ask in pods) else None

    return await eventually(asked, f"pods of {job} are asked")


async def until_saved(stage: Stage, job: str, step: int) -> Object:
    return await stage.until_job(
        job, lambda s: s.get("lastCheckpoint", {}).get("step") == step, f"has saved step {step}"
    )


async def remove(stage: Stage, job: str) -> list[Object]:
    """Wait until all pods of a job have been told to stop, let them, and return them as they were."""

    async def deleted() -> list[Object] | None:
        pods = await stage.pods(job)
        return pods if pods and all("deletionTimestamp" in pod["metadata"] for pod in pods) else None

    pods = await eventually(deleted, f"pods of {job} are deleted")
    for pod in pods:
        await stage.delete_pod(pod["metadata"]["name"], at_once=True)
    return pods


async def interruptions(stage: Stage, job: str) -> list[dict[str, Any]]:
    query = """
        SELECT i.* FROM interruption i JOIN workload w ON w.uid = i.workload_uid
        WHERE w.namespace = :namespace AND w.name = :name ORDER BY i.attempt
    """
    return await ledger.rows(stage, query, namespace=stage.namespace, name=job)


def condition(item: Object, kind: str) -> Object:
    return next((one for one in item["status"].get("conditions", ()) if one["type"] == kind), {})


async def test_a_victim_saves_its_work_and_goes_on_there_also_when_the_controller_dies_meanwhile(stage: Stage) -> None:
    controller = stage.controller()
    controller.start()
    await running(stage, "low", signal="Annotation", graceSeconds=600, path="/c")
    await stage.submit("high", 2, 8, priority=5)
    told = await stage.until_job("low", lambda s: "0 of 2 pods have" in s.get("message", ""), "is asked")
    assert told["status"]["phase"] == "Checkpointing"
    assert f"Gave way to {stage.namespace}/high" in told["status"]["message"]
    assert condition(told, "Checkpointing")["status"] == "True"
    (first, ask), (second, same) = await asks(stage, "low")
    assert ask == same
    assert ask["id"].startswith("1-")
    assert 590 < ask["deadline"] - time.time() <= 600
    await report(stage, first, ask["id"], 40)
    await stage.until_job("low", lambda s: "1 of 2 pods have" in s.get("message", ""), "has one answer")

    controller.kill()
    controller.start()
    await controller.until_leading()
    assert [again for _, again in await asks(stage, "low")] == [ask, ask], "it is the same ask"
    assert (await stage.get_job("high") or {})["status"]["phase"] == "Pending"
    await report(stage, second, ask["id"], 41)
    pods = await remove(stage, "low")
    for pod in pods:
        assert condition(pod, "DisruptionTarget")["reason"] == "PreemptionByQueuectl"
        assert f"Gave way to {stage.namespace}/high" in condition(pod, "DisruptionTarget")["message"]
    await stage.until_phase("high", "Running")
    low = await stage.until_phase("low", "Pending")
    assert {key: low["status"]["lastCheckpoint"][key] for key in ("attempt", "step", "path")} == {
        "attempt": 1, "step": 40, "path": "/c/step-40",
    }  # fmt: skip
    assert condition(low, "Checkpointing")["status"] == "False"
    assert condition(low, "Checkpointing")["reason"] == "Checkpointed"
    assert low["status"]["failures"] == 0
    [one] = await interruptions(stage, "low")
    assert (one["cause"], one["saved_step"], one["answered"], one["attempt"]) == ("Preempted", 40, True, 1)
    assert one["gpu_seconds"] == low["status"].get("lostSeconds", 0)

    await stage.delete_job("high")
    await stage.until_phase("low", "Running")
    for pod in await stage.pods("low"):
        env = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
        assert (env["QUEUECTL_RESUME_STEP"], env["QUEUECTL_RESUME_PATH"]) == ("40", "/c/step-40")
        assert env["QUEUECTL_CHECKPOINT_DIR"] == "/c"
    assert "Checkpointed" in await ledger.history(stage, "low")


async def test_what_was_saved_while_no_controller_led_is_known_to_the_next_and_answers_what_was_asked(
    stage: Stage,
) -> None:
    controller = stage.controller()
    controller.start()
    await running(stage, "low", signal="Annotation", graceSeconds=600, path="/c")
    controller.kill()
    for step, pod in enumerate(await stage.pods("low"), start=40):
        await report(stage, pod, None, step)
    controller.start()
    await until_saved(stage, "low", 40)

    await stage.submit("high", 2, 8, priority=5)
    asked = await asks(stage, "low")
    controller.kill()
    for pod, ask in asked:
        await report(stage, pod, ask["id"], 50)
    controller.start()
    await remove(stage, "low")
    await stage.until_phase("high", "Running")
    [one] = await interruptions(stage, "low")
    assert (one["saved_step"], one["answered"]) == (50, True)


async def test_who_does_not_answer_goes_at_the_deadline(stage: Stage) -> None:
    stage.controller().start()
    await running(stage, "low", signal="Annotation", graceSeconds=3)
    await stage.submit("high", 2, 8, priority=5)
    (first, ask), _ = await asks(stage, "low")
    await report(stage, first, ask["id"], 40)
    await remove(stage, "low")
    assert time.time() >= ask["deadline"]
    await stage.until_phase("high", "Running")
    assert await stage.until_event("low", "CheckpointMissed") == "Of 2 pods asked to save work, 1 did within 3 s."
    low = await stage.until_phase("low", "Pending")
    assert "lastCheckpoint" not in low["status"], "one of two is no checkpoint"
    [one] = await interruptions(stage, "low")
    assert (one["answered"], one["saved_at"]) == (False, None)
    assert 16 * 3 <= one["gpu_seconds"] == low["status"]["lostSeconds"], "all since it ran"


async def test_who_succeeds_while_it_is_asked_has_succeeded(stage: Stage) -> None:
    stage.controller().start()
    await running(stage, "low", signal="Annotation", graceSeconds=600)
    await stage.submit("high", 2, 8, priority=5)
    await asks(stage, "low")
    await stage.end_pods("low")
    await stage.until_phase("low", "Succeeded")
    await stage.until_phase("high", "Running")
    assert await interruptions(stage, "low") == []


@asynccontextmanager
async def trainer(answer: Callable[[Object], web.Response]) -> AsyncIterator[int]:
    """Serve POST /save as a pod would, on a port of this machine."""

    async def save(request: web.Request) -> web.Response:
        return answer(await request.json())

    app = web.Application()
    app.router.add_post("/save", save)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_pods_are_asked_by_http_until_they_answer(stage: Stage) -> None:
    bodies: list[Object] = []

    def answer(body: Object) -> web.Response:
        bodies.append(body)
        if len(bodies) == 1:
            return web.Response(status=503)
        if len(bodies) == 2:
            return web.Response(text="saved")
        return web.json_response({"ask": body["id"], "step": 77, "at": time.time(), "path": "/c/77", "digest": None})

    async with trainer(answer) as port:
        stage.controller().start()
        await running(stage, "low", 1, signal="HTTP", http={"port": port, "path": "/save"}, graceSeconds=600)
        await have_address(stage, "low")
        await stage.submit("high", 1, 8, priority=5)
        assert "gives 503" in await stage.until_event("low", "AskFailed")
        await remove(stage, "low")
        await stage.until_phase("high", "Running")
    assert len({json.dumps(body) for body in bodies}) == 1, "each time it is the same ask"
    low = await stage.until_phase("low", "Pending")
    assert low["status"]["lastCheckpoint"]["step"] == 77
    [one] = await interruptions(stage, "low")
    assert one["answered"] is True


async def have_address(stage: Stage, job: str) -> None:
    """Give a job's pods the address of this machine."""
    for pod in await stage.pods(job):
        path = pods_path(stage.namespace, pod["metadata"]["name"]) + "/status"
        body = {"status": {"podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}}
        await stage.client.request("PATCH", path, body=body, content_type=MERGE_PATCH)


@asynccontextmanager
async def kubelet(stage: Stage, control_plane: Running, folder: Path) -> AsyncIterator[None]:
    """Have commands in pods of the stage's nodes run on this machine, by kwok, through the API server's exec."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = folder / "exec.yaml"
    config.write_text(
        "apiVersion: kwok.x-k8s.io/v1alpha1\nkind: ClusterExec\nmetadata: {name: here}\nspec: {execs: [{local: {}}]}\n"
    )
    with (folder / "kubelet.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            build.binaries()["kwok"], f"--kubeconfig={control_plane.kubeconfig}", "--manage-single-node=nobody",
            f"--server-address=127.0.0.1:{port}", f"--config={config}",
            *(f"--config={stage}" for stage in STAGES.glob("*.yaml")), stdout=log, stderr=log,
        )  # fmt: skip

    async def listens() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    try:
        await eventually(listens, "kwok takes commands")
        for node in await stage.nodes(1):
            body = {"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}}
            await stage.client.request("PATCH", f"/api/v1/nodes/{node}/status", body=body, content_type=STRATEGIC_PATCH)
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_pods_are_asked_by_a_command(stage: Stage, control_plane: Running, tmp_path: Path) -> None:
    script = tmp_path / "save"
    script.write_text(
        f'#!/bin/sh\necho "$QUEUECTL_ASK_ID" >> {tmp_path}/asked\ntest -e {tmp_path}/ready || exit 7\n'
        'echo saving\necho "{\\"ask\\": \\"$QUEUECTL_ASK_ID\\", \\"step\\": 12, \\"at\\": $(date +%s), \\"path\\": \\"/c/12\\"}"\n'
    )
    script.chmod(0o755)
    await stage.queue(8, preemption={"withinQueue": "LowerPriority"})
    async with kubelet(stage, control_plane, tmp_path):
        stage.controller().start()
        rules = {"signal": "Exec", "exec": {"command": [str(script), "now"]}, "graceSeconds": 600}
        await stage.submit("low", 1, 8, checkpoint=rules)
        await stage.until_phase("low", "Running")
        await stage.submit("high", 1, 8, priority=5)
        # A kubelet tells the code; kwok only says so.
        assert re.search("exit (code|status) 7", await stage.until_event("low", "AskFailed"))
        (tmp_path / "ready").touch()
        await stage.until_phase("high", "Running")
    assert len(set((tmp_path / "asked").read_text().split())) == 1, "each time it is the same ask"
    low = await stage.until_phase("low", "Pending")
    assert low["status"]["lastCheckpoint"]["step"] == 12
    [one] = await interruptions(stage, "low")
    assert one["answered"] is True


async def test_the_time_of_a_file_is_an_answer(stage: Stage, control_plane: Running, tmp_path: Path) -> None:
    file = tmp_path / "latest"
    file.touch()
    os.utime(file, (1000, 1000))
    await stage.queue(8, preemption={"withinQueue": "LowerPriority"})
    async with kubelet(stage, control_plane, tmp_path):
        stage.controller().start()
        rules = {"signal": "Annotation", "answer": "File", "file": str(file), "graceSeconds": 600}
        await stage.submit("low", 1, 8, checkpoint=rules)
        await stage.until_phase("low", "Running")
        await stage.submit("high", 1, 8, priority=5)
        await asks(stage, "low")
        await stage.until_phase("low", "Checkpointing")
        file.touch()
        await stage.until_phase("high", "Running")
    [one] = await interruptions(stage, "low")
    assert (one["answered"], one["saved_step"]) == (True, None)


async def test_a_running_job_is_reminded_and_its_user_may_ask(stage: Stage, control_plane: Running) -> None:
    queuectl = Commands(control_plane.kubeconfig, stage.namespace)
    stage.controller().start()
    await running(stage, "llm", 1, signal="Annotation", graceSeconds=60, intervalSeconds=2)
    seen: set[str] = set()
    for step in (1, 2):  # twice in an interval each

        async def asked_anew() -> tuple[Object, str] | None:
            [(pod, ask)] = await asks(stage, "llm")
            return None if ask["id"] in seen else (pod, ask["id"])

        pod, name = await eventually(asked_anew, "it is reminded")
        seen.add(name)
        await report(stage, pod, name, step)
        await until_saved(stage, "llm", step)
    assert (await stage.get_job("llm") or {})["status"]["phase"] == "Running"

    # A job that saves by itself needs no reminder; one whose user asks is asked now.
    await stage.patch_job("llm", {"spec": {"checkpoint": {"intervalSeconds": 3600}}})
    assert "asked to save" in (await queuectl("checkpoint", "llm")).out
    pod, name = await eventually(asked_anew, "it is asked")
    seen.add(name)
    await report(stage, pod, name, 3)
    await until_saved(stage, "llm", 3)
    async with queuectl.running("checkpoint", "llm", "--wait") as output:
        pod, name = await eventually(asked_anew, "it is asked")
        await report(stage, pod, name, 4)
        await output.until("trainingjob.queuectl.dev/llm saved at", "step 4 path /c/step-4")
    late = await queuectl("checkpoint", "llm", "--wait", "--timeout", "2", code=Exit.TIMED_OUT)
    assert "not within 2 s" in late.err

    await stage.submit("plain", 1, 8)
    plain = await queuectl("checkpoint", "plain", code=Exit.REFUSED)
    assert "spec.checkpoint is not set; give it signal Annotation, HTTP or Exec" in plain.err


async def test_a_report_that_can_not_be_read_is_told_and_does_no_harm(stage: Stage) -> None:
    stage.controller().start()
    await running(stage, "llm", 1, signal="Annotation")
    [pod] = await stage.pods("llm")
    await annotate(stage, pod, "saved!")
    assert "reports a checkpoint that can't be read" in await stage.until_event("llm", "ReportUnreadable")
    await report(stage, pod, None, 5)
    await until_saved(stage, "llm", 5)
    await report(stage, pod, None, 4)
    await report(stage, pod, None, 6)
    job = await until_saved(stage, "llm", 6)
    assert job["status"]["phase"] == "Running"


async def test_with_sigterm_its_pods_have_the_grace_and_their_last_words_count(stage: Stage) -> None:
    stage.controller().start()
    await running(stage, "low", 1, graceSeconds=321)
    await stage.submit("high", 1, 8, priority=5)

    async def deleted() -> Object | None:
        [pod] = await stage.pods("low")
        return pod if "deletionTimestamp" in pod["metadata"] else None

    pod = await eventually(deleted, "the pod is deleted")
    assert 300 < pod["metadata"]["deletionGracePeriodSeconds"] <= 321
    said = {"ask": None, "step": 9, "at": time.time(), "path": "/c/9", "digest": None}
    message = f"bye\nqueuectl-checkpoint: {json.dumps(said)}\n"
    terminated = {"exitCode": 0, "message": message}
    body = {"status": {"containerStatuses": [{"name": "main", "state": {"running": None, "terminated": terminated}}]}}
    path = pods_path(stage.namespace, pod["metadata"]["name"]) + "/status"
    await stage.client.request("PATCH", path, body=body, content_type=STRATEGIC_PATCH)
    low = await until_saved(stage, "low", 9)
    assert low["status"]["phase"] == "Stopping"
    await remove(stage, "low")
    await stage.until_phase("high", "Running")
    [one] = await interruptions(stage, "low")
    assert (one["answered"], one["gpu_seconds"]) == (True, 0)


async def test_a_queue_bounds_how_long_its_jobs_may_take_to_leave(stage: Stage) -> None:
    """It is told when the job is submitted, and in its status; the ask and the pods say the shorter time."""
    stage.controller().start()
    await stage.nodes(2)
    await stage.queue(16, preemption={"withinQueue": "LowerPriority"}, maxGraceSeconds=4)
    pod = {"terminationGracePeriodSeconds": 3600}
    low = stage.job("low", 2, 8, annotations=STAYS, pod=pod, checkpoint={"signal": "Annotation", "graceSeconds": 600})
    said = await Commands(stage.kubeconfig, stage.namespace)("submit", "-f", "-", stdin=json.dumps(low))
    words = f"Queue {stage.name} lets its jobs take 4 s to leave"
    assert f"{words}, which is what counts instead of spec.checkpoint.graceSeconds, 600 s." in said.err
    running = await stage.until_phase("low", "Running")
    assert condition(running, "GraceCut")["message"].startswith(words)
    assert {each["spec"]["terminationGracePeriodSeconds"] for each in await stage.pods("low")} == {4}
    await stage.submit("high", 2, 8, priority=5)
    for _, ask in await asks(stage, "low"):
        assert ask["deadline"] - time.time() <= 4
    await remove(stage, "low")
    assert (await stage.until_event("low", "CheckpointMissed")).endswith("0 did within 4 s.")
    await stage.until_phase("high", "Running")


async def test_an_elastic_gang_saves_its_work_before_it_gives_up_pods_and_before_others_join_it(stage: Stage) -> None:
    """All of its pods are asked, and none goes or starts before, also when the controller dies meanwhile."""
    await stage.nodes(2)
    await stage.queue(16, preemption={"withinQueue": "LowerPriority"})
    controller = stage.controller()
    controller.start()
    job = stage.job("elastic", 4, 4, annotations=STAYS)
    job["spec"]["roles"][0]["minReplicas"] = 1
    job["spec"]["checkpoint"] = {"signal": "Annotation", "graceSeconds": 600}
    await stage.create(job)
    await stage.until_phase("elastic", "Running")
    await stage.submit("high", 1, 8, priority=5)
    told = await stage.until_job("elastic", lambda s: "0 of 4 pods have" in s.get("message", ""), "is asked")
    assert told["status"]["phase"] == "Running"
    assert condition(told, "Checkpointing")["status"] == "True"
    asked = await asks(stage, "elastic")
    assert len({ask["id"] for _, ask in asked}) == 1
    for pod, ask in asked[:3]:
        await report(stage, pod, ask["id"], 40)
    await stage.until_job("elastic", lambda s: "3 of 4 pods have" in s.get("message", ""), "has three answers")

    controller.kill()
    second = stage.controller("b")
    second.start()
    await stage.until_job("elastic", lambda s: "3 of 4 pods have" in s.get("message", ""), "has three answers")
    assert not any("deletionTimestamp" in pod["metadata"] for pod in await stage.pods("elastic"))
    pod, ask = asked[3]
    assert (await asks(stage, "elastic"))[3][1] == ask, "it is the same ask"
    await report(stage, pod, ask["id"], 41)

    async def going() -> list[Object] | None:
        gone = [pod for pod in await stage.pods("elastic") if "deletionTimestamp" in pod["metadata"]]
        return gone if len(gone) == 2 else None

    for pod in await eventually(going, "two pods are deleted"):
        assert condition(pod, "DisruptionTarget")["message"].startswith("Gave up 2 of 4 pods for")
        await stage.delete_pod(pod["metadata"]["name"], at_once=True)
    await stage.until_phase("high", "Running")
    after = await stage.until_reason("elastic", "Running")
    assert (after["status"]["lastCheckpoint"]["step"], after["status"]["pods"]) == (40, "2/4")
    assert (await stage.until_event("elastic", "Checkpointed")).startswith("All that were asked, 4 pods, saved")
    assert await ledger.history(stage, "elastic") == [
        "Admitted", "Created", "Ungated", "Running", "Shrunk", "Checkpointed", "Running",
    ]  # fmt: skip
    assert await interruptions(stage, "elastic") == [], "it runs on"

    await stage.delete_job("high")
    await grows(stage, second, after=asked[0][1]["id"])


async def grows(stage: Stage, controller: Controller, *, after: str) -> None:
    """See that the gang's two pods save before two others join them. `after`: the ask before."""

    async def asked() -> list[tuple[Object, Object]] | None:
        pods = [(pod, json.loads(pod["metadata"]["annotations"].get(ASK, "{}"))) for pod in await stage.pods("elastic")]
        again = [(pod, ask) for pod, ask in pods if ask.get("id", "") > after]
        return again if len(pods) == 4 and len(again) == 2 else None

    (first, ask), (second, _) = await eventually(asked, "the two that run are asked, and two more are there")
    controller.kill()
    later = stage.controller("c")
    later.start()
    await later.until_leading()
    await report(stage, first, ask["id"], 60)
    assert [again for _, again in await asked() or ()] == [ask, ask], "it is the same ask"
    assert len([pod for pod in await stage.pods("elastic") if pod["spec"].get("schedulingGates")]) == 2
    await report(stage, second, ask["id"], 61)
    await stage.until_job("elastic", lambda s: s["pods"] == "4/4", "has all pods")
    await until_saved(stage, "elastic", 60)


async def test_of_an_elastic_gang_only_the_pods_that_go_get_sigterm(stage: Stage) -> None:
    await stage.nodes(2)
    await stage.queue(16, preemption={"withinQueue": "LowerPriority"})
    stage.controller().start()
    job = stage.job("elastic", 4, 4, annotations=STAYS)
    job["spec"]["roles"][0]["minReplicas"] = 1
    job["spec"]["checkpoint"] = {"signal": "SigTerm", "graceSeconds": 600}
    await stage.create(job)
    await stage.until_phase("elastic", "Running")
    await stage.submit("high", 1, 8, priority=5)

    async def going() -> list[Object] | None:
        gone = [pod for pod in await stage.pods("elastic") if "deletionTimestamp" in pod["metadata"]]
        return gone if len(gone) == 2 else None

    for pod in await eventually(going, "two pods are deleted"):
        assert pod["metadata"]["name"] in {"elastic-worker-1-2", "elastic-worker-1-3"}
        assert 500 < pod["metadata"]["deletionGracePeriodSeconds"] <= 600, "and not their own 30 s"
        await stage.delete_pod(pod["metadata"]["name"], at_once=True)
    await stage.until_phase("high", "Running")
    after = await stage.until_reason("elastic", "Running")
    assert after["status"]["pods"] == "2/4"
    assert "Checkpointed" not in await ledger.history(stage, "elastic")
