import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from queuectl.kube.client import KubeClient
from queuectl.local.controlplane import Running
from tests.support.databases import database_url, postgres
from tests.support.stage import Stage

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
