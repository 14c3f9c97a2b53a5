import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from queuectl.kube.client import KubeClient
from queuectl.local.controlplane import Running
from tests.support.stage import Stage

_numbers = itertools.count(1)


@pytest.fixture
async def stage(kube: KubeClient, control_plane: Running, tmp_path: Path) -> AsyncIterator[Stage]:
    """Open a stage on which no controller ever acts: the test does, right or wrong."""
    result = Stage(kube, control_plane.kubeconfig, "", tmp_path, f"observed-{next(_numbers)}")
    await result.open()
    try:
        yield result
    finally:
        await result.close()
