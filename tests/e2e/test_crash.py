"""The controller is killed between any two steps and started again: the same end, nothing doubled, nothing lost."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from queuectl.local.controlplane import Running
from tests.support.proxy import Proxy, proxied
from tests.support.stage import Stage


@pytest.fixture
async def proxy(control_plane: Running, tmp_path: Path) -> AsyncIterator[Proxy]:
    async with proxied(control_plane, tmp_path) as result:
        yield result


async def test_through(stage: Stage, proxy: Proxy) -> None:
    await stage.nodes(2)
    await stage.queue(16)
    controller = stage.controller(kubeconfig=proxy.kubeconfig)
    controller.start()
    await stage.submit("first", 4, 4, run_seconds=1)
    await stage.until_phase("first", "Succeeded")
    for a in proxy.answers:
        print(a.method, a.path, a.status)
