import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from queuectl.kube.client import KubeClient
from queuectl.local.controlplane import Running
from tests.support import ledger
from tests.support.claims import Claims
from tests.support.databases import Databases, database_url, postgres
from tests.support.proxy import Proxy, proxied
from tests.support.stage import Controller, Stage

__all__ = ["database_url", "postgres"]

_numbers = itertools.count(1)


@pytest.fixture
async def stage(kube: KubeClient, control_plane: Running, database_url: str, tmp_path: Path) -> AsyncIterator[Stage]:
    """Open a stage with a database of its own; no controller runs yet."""
    result = Stage(kube, control_plane.kubeconfig, database_url, tmp_path, f"stage-{next(_numbers)}")
    await result.open()
    try:
        yield result
    finally:
        await result.close()


@pytest.fixture
async def proxy(control_plane: Running, tmp_path: Path) -> AsyncIterator[Proxy]:
    async with proxied(control_plane, tmp_path) as result:
        yield result


@pytest.fixture(scope="module")
def shared_database(postgres: Databases) -> Iterator[str]:
    with postgres.migrated() as url:
        yield url


@pytest.fixture(scope="module")
def shared_controller(
    control_plane: Running, shared_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Controller]:
    """A controller that serves all live stages of a module; no test of that module may use `stage`."""
    folder = tmp_path_factory.mktemp("controller")
    controller = Controller(control_plane.kubeconfig, shared_database, folder, "shared", {})
    try:
        yield controller
    finally:
        controller.stop()


@pytest.fixture
async def live(
    kube: KubeClient, control_plane: Running, shared_controller: Controller, shared_database: str, tmp_path: Path
) -> AsyncIterator[Stage]:
    """Open a stage on which the shared controller acts. In the end all jobs are deleted and must leave nothing."""
    if not shared_controller.running:
        shared_controller.start()
        await shared_controller.until_leading()
    stage = Stage(kube, control_plane.kubeconfig, shared_database, tmp_path, f"stage-{next(_numbers)}")
    stage.join(shared_controller)
    await stage.open()
    try:
        yield stage
        await stage.end_jobs()
        await ledger.until_free(stage)
    finally:
        await stage.close()


@pytest.fixture
async def claims(live: Stage) -> AsyncIterator[Claims]:
    """Claims of the live stage; what uses them is to be gone before they are."""
    result = Claims(live)
    try:
        yield result
    finally:
        await live.end_jobs()
        await result.close()
