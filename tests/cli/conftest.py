import pytest

from queuectl.kube.client import KubeClient
from queuectl.local.controlplane import Running
from tests.e2e.conftest import live, shared_controller, shared_database
from tests.support.commands import Commands
from tests.support.databases import postgres
from tests.support.stage import Stage

__all__ = ["live", "postgres", "shared_controller", "shared_database"]


@pytest.fixture
def cli(kube: KubeClient, control_plane: Running) -> Commands:
    """The command line on the shared control plane, in whatever namespace the kubeconfig means."""
    return Commands(control_plane.kubeconfig)


@pytest.fixture
def staged(live: Stage, control_plane: Running) -> Commands:
    """The command line in the namespace of the stage."""
    return Commands(control_plane.kubeconfig, live.namespace)
