"""One job's trouble is not its neighbours'."""

from typing import Any

from queuectl.kube.names import pod_name
from tests.support import ledger
from tests.support.proxy import Proxy, Then
from tests.support.stage import Stage


async def test_a_job_that_cannot_let_go_keeps_no_other_from_it(stage: Stage, proxy: Proxy) -> None:
    await stage.nodes(1)
    await stage.queue(8)

    async def refuse() -> Then:
        return Then.REFUSE

    rule = proxy.on(lambda method, path, _: method == "PATCH" and path.endswith("/a-stuck"), nth=0, do=refuse)
    stage.controller(kubeconfig=proxy.kubeconfig).start()
    for name in ("a-stuck", "b-free"):
        await stage.submit(name, 1, 1)
        await stage.until_phase(name, "Running")
    await stage.delete_job("a-stuck")
    await rule.until_fired()
    await stage.delete_job("b-free")
    await stage.until_gone("b-free")
    assert await stage.get_job("a-stuck")
    rule.nth = -1
    await stage.until_gone("a-stuck")
    await ledger.until_free(stage)


async def test_a_priority_class_that_somebody_deletes_is_made_again(stage: Stage) -> None:
    await stage.nodes(1)
    await stage.queue(8)
    stage.controller().start()
    await stage.submit("first", 1, 1, priority=77, run_seconds=0)
    await stage.until_phase("first", "Succeeded")
    await stage.client.request("DELETE", "/apis/scheduling.k8s.io/v1/priorityclasses/queuectl-77")
    await stage.submit("second", 1, 1, priority=77, run_seconds=0)
    job = await stage.until_phase("second", "Succeeded")
    assert job["status"]["attempt"] <= 2  # the first may not have heard of the deletion yet


async def test_gangs_whose_names_are_taken_hold_up_nobody_else(stage: Stage) -> None:
    """As many as the executor has workers; each waits for its name until its start deadline."""
    await stage.nodes(2)
    await stage.queue(16)
    spec: dict[str, Any] = {
        "containers": [{"name": "main", "image": "none"}],
        "schedulingGates": [{"name": "example.com/never"}],
    }
    blocked = [f"blocked-{i}" for i in range(8)]
    for name in blocked:
        metadata = {"name": pod_name(name, "worker", 1, 0), "namespace": stage.namespace}
        await stage.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        await stage.submit(name, 1, 1)
    controller = stage.controller()
    controller.start()
    for name in blocked:
        await stage.until_phase(name, "Starting")
    await stage.submit("free", 1, 1, run_seconds=0)
    await stage.until_phase("free", "Succeeded", seconds=50)
    for name in blocked:
        await stage.delete_pod(pod_name(name, "worker", 1, 0))
    for name in blocked:
        await stage.until_phase(name, "Running")
