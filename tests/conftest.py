"""Fixtures for every test: a real control plane, shared by the session."""

import signal
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import settings

from queuectl.kube.client import KubeClient
from queuectl.local import controlplane
from queuectl.local.prepare import prepare
from tests.support.real import mounts
from tests.support.undisturbed import undisturbed, undisturbed_pair

__all__ = ["mounts", "undisturbed", "undisturbed_pair"]

settings.register_profile("any machine", deadline=None)  # which may be slow, or busy
settings.load_profile("any machine")


def pytest_configure() -> None:
    # So that a run that is told to end (SIGTERM) ends what its fixtures started, as it does for Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[controlplane.Running]:
    """Start a fresh control plane (without nodes or CRDs); it ends with the session, whatever happens."""
    state = tmp_path_factory.mktemp("control-plane")
    try:
        yield controlplane.up(state)
    finally:
        controlplane.down(state, delete=True)


@pytest.fixture(scope="session")
async def kube(control_plane: controlplane.Running) -> AsyncIterator[KubeClient]:
    """Open a client of the shared control plane, with CRDs and policies installed."""
    async with await KubeClient.open(str(control_plane.kubeconfig)) as client:
        await prepare(client)
        yield client
