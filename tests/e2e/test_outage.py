"""The API server or Postgres away for 30 s in the middle of a load: it goes on by itself."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from queuectl.kube.client import KubeClient
from queuectl.local import controlplane
from queuectl.local.controlplane import Running
from queuectl.local.prepare import prepare
from queuectl.store import migrate
from tests.support import ledger
from tests.support.databases import embedded_server
from tests.support.eventually import eventually
from tests.support.observer import observing
from tests.support.proxy import Proxy, Then
from tests.support.stage import Controller, Stage

OUTAGE_SECONDS = 30
SIZES = {f"gang-{n}": 1 + n * 5 % 8 for n in range(30)}


async def _phases(stage: Stage) -> list[str]:
    return [job.get("status", {}).get("phase", "") for job in await stage.jobs()]


async def go_on_through(stage: Stage, stop: Callable[[], object], start: Callable[[], object]) -> None:
    """Bring a load, let the outage begin in the midst of it, and see all of it through."""
    await stage.nodes(5)
    await stage.queue(40)
    controller = stage.controller()
    controller.start()
    async with observing(stage):
        for n, (name, pods) in enumerate(SIZES.items()):
            await stage.submit(name, pods, 2, run_seconds=3 + n % 3)

        async def under_way() -> bool:
            phases = await _phases(stage)
            return phases.count("Succeeded") >= 3 and "Running" in phases

        await eventually(under_way, "some gangs are done and some run", seconds=240)
        await asyncio.to_thread(stop)
        await asyncio.sleep(OUTAGE_SECONDS)  # the outage itself; nothing is waited for
        await asyncio.to_thread(start)

        async def over() -> bool:
            return set(await _phases(stage)) == {"Succeeded"}

        try:
            await eventually(over, "all gangs succeed", seconds=300)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{await stage.jobs()}\n{controller.log.read_text()[-5000:]}") from None
    assert controller.running
    jobs = await stage.jobs()
    assert len(jobs) == len(SIZES)
    assert {job["status"]["failures"] for job in jobs} == {0}
    await ledger.until_free(stage)


async def test_the_load_goes_on_after_an_outage_of_the_api_server(
    database_url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    state = tmp_path_factory.mktemp("outage")
    try:
        running = await asyncio.to_thread(controlplane.up, state)
        async with await KubeClient.open(str(running.kubeconfig)) as client:
            await prepare(client)
            stage = Stage(client, running.kubeconfig, database_url, tmp_path, "outage")
            await stage.open()
            try:
                await go_on_through(
                    stage,
                    lambda: controlplane.stop(state, "kube-apiserver", kill=True),
                    lambda: controlplane.start(state, "kube-apiserver"),
                )
            finally:
                await stage.close()
    finally:
        await asyncio.to_thread(controlplane.down, state, delete=True)


async def test_the_load_goes_on_after_an_outage_of_postgres(
    kube: KubeClient, control_plane: Running, tmp_path: Path
) -> None:
    with embedded_server() as server:
        await asyncio.to_thread(migrate.upgrade, server.url)
        stage = Stage(kube, control_plane.kubeconfig, server.url, tmp_path, "postgres-outage")
        await stage.open()
        try:
            await go_on_through(stage, server.kill, server.start)
        finally:
            await stage.close()


async def end_of(controller: Controller, *, seconds: float = 120) -> int:
    async def ended() -> bool:
        return not controller.running

    await eventually(ended, "the controller ends", seconds=seconds)
    return controller.returncode


async def test_the_ledger_of_another_cluster_is_refused(stage: Stage) -> None:
    await ledger.execute(stage, "INSERT INTO cluster (uid) VALUES ('another-cluster')")
    controller = stage.controller()
    controller.start()
    assert await end_of(controller) == 4
    last = controller.log.read_text().splitlines()[-1]
    assert last.startswith("queuectl: this database belongs to cluster another-cluster, and this is cluster ")
    assert "set DATABASE_URL to a database of this cluster's own" in last
    assert not controller.says("Traceback")


@pytest.mark.parametrize(
    ("url", "code", "problem"),
    [
        ("postgresql://queuectl:secret@127.0.0.1:1/queuectl", 7, "not available"),
        ("mysql://queuectl:secret@127.0.0.1/queuectl", 2, "DATABASE_URL starts with mysql://"),
        ("nonsense", 2, "DATABASE_URL is not a URL"),
    ],
    ids=["nobody listens", "another database", "no URL"],
)
async def test_a_wrong_database_url_is_named_without_its_password(
    stage: Stage, url: str, code: int, problem: str
) -> None:
    controller = stage.controller(env={"DATABASE_URL": url})
    controller.start()
    assert await end_of(controller) == code
    assert controller.says(f"queuectl: {problem}") or controller.says(problem)
    assert not controller.says("Traceback")
    assert not controller.says("secret")


async def test_a_controller_waits_for_an_api_server_that_is_not_there_yet(stage: Stage, proxy: Proxy) -> None:
    await stage.nodes(1)
    await stage.queue(8)
    await stage.submit("first", 2, 4, run_seconds=0)
    proxy.refusing = True
    controller = stage.controller(kubeconfig=proxy.kubeconfig)
    controller.start()

    async def tried() -> bool:
        return controller.log.exists() and controller.log.read_text().count("API server unreachable") >= 3

    await eventually(tried, "the controller tries again")
    assert controller.running
    proxy.refusing = False
    await stage.until_phase("first", "Succeeded")


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


async def test_a_leader_ends_when_it_is_told_to_while_postgres_is_away(
    kube: KubeClient, control_plane: Running, tmp_path: Path
) -> None:
    with embedded_server() as server:
        await asyncio.to_thread(migrate.upgrade, server.url)
        stage = Stage(kube, control_plane.kubeconfig, server.url, tmp_path, "told-to-end")
        await stage.open()
        try:
            controller = stage.controller()
            controller.start()
            await controller.until_leading()
            await asyncio.to_thread(server.kill)
            controller.send(signal.SIGTERM)
            assert await end_of(controller) == 0
            assert not controller.says("Traceback")
        finally:
            await stage.close()


async def test_a_priority_class_that_is_not_known_yet_is_waited_for(stage: Stage, proxy: Proxy) -> None:
    """The API server refuses pods of a class that it has just made until its admission has heard of it."""

    def makes_class(method: str, path: str, body: bytes) -> bool:
        return method == "POST" and path.endswith("/priorityclasses")

    async def forget() -> None:
        await stage.client.request("DELETE", "/apis/scheduling.k8s.io/v1/priorityclasses/queuectl-4711")

    rule = proxy.on(makes_class, do=forget, when="after")
    await stage.nodes(1)
    await stage.queue(8)
    stage.controller(kubeconfig=proxy.kubeconfig).start()
    await stage.submit("gang", 2, 4, priority=4711)
    job = await stage.until_phase("gang", "Running")
    assert rule.done
    assert job["status"]["attempt"] == 1
