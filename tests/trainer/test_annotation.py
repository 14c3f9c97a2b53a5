"""A trainer tells what it has saved by its pod's annotation, with the rights of the pod's service account."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from queuectl.kube.client import KubeClient
from queuectl.local.controlplane import Running
from tests.trainer.training import Training

NAMESPACE = "default"
RBAC = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
CORE = f"/api/v1/namespaces/{NAMESPACE}"
RULES = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]  # as docs/trainer.md has it


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path / "job", options=("--every", "50"))
    yield training
    training.clear()


@pytest.fixture
async def in_a_pod(kube: KubeClient, control_plane: Running, tmp_path: Path) -> Callable[..., Any]:
    """Make a pod with a service account; return the environment in which its container would run."""

    async def make(name: str, *, rules: list[Any]) -> dict[str, str]:
        subject = {"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
        about = {"name": name}
        await kube.request("POST", f"{CORE}/serviceaccounts", body={"metadata": about})
        await kube.request("POST", f"{RBAC}/roles", body={"metadata": about, "rules": rules})
        binding = {"metadata": about, "roleRef": role, "subjects": [subject]}
        await kube.request("POST", f"{RBAC}/rolebindings", body=binding)
        pod = {
            "metadata": about | {"annotations": {"other": "stays"}},
            "spec": {"serviceAccountName": name, "containers": [{"name": "train", "image": "example.com/train:1"}]},
        }
        await kube.request("POST", f"{CORE}/pods", body=pod)
        asked = await kube.request("POST", f"{CORE}/serviceaccounts/{name}/token", body={"spec": {}})
        account = tmp_path / name
        account.mkdir()
        (account / "token").write_text(asked["status"]["token"])
        (account / "namespace").write_text(NAMESPACE)
        (account / "ca.crt").write_text(control_plane.authority)
        server = urlsplit(control_plane.server)
        return {
            "QUEUECTL_POD": name,
            "QUEUECTL_SERVICE_ACCOUNT": str(account),
            "KUBERNETES_SERVICE_HOST": str(server.hostname),
            "KUBERNETES_SERVICE_PORT": str(server.port),
        }

    return make


async def test_the_annotation_tells_of_the_last_checkpoint(
    kube: KubeClient, training: Training, in_a_pod: Callable[..., Any]
) -> None:
    training.run(**await in_a_pod("saves", rules=RULES))

    annotations = (await kube.request("GET", f"{CORE}/pods/saves"))["metadata"]["annotations"]
    newest = training.newest()
    assert newest is not None
    assert annotations["other"] == "stays"
    assert json.loads(annotations["queuectl.dev/checkpoint"]) == {
        "ask": None,
        "step": newest.step,
        "at": newest.at,
        "path": str(newest.path),
        "digest": newest.digest,
    }


async def test_without_the_right_to_patch_its_pod_it_trains_as_well(
    kube: KubeClient, training: Training, in_a_pod: Callable[..., Any]
) -> None:
    said = training.run(**await in_a_pod("may-not", rules=[]))

    assert "the annotation of pod may-not is not written: 403 Forbidden" in said
    newest = training.newest()
    assert newest is not None
    assert newest.step == 200
    assert (
        "queuectl.dev/checkpoint" not in (await kube.request("GET", f"{CORE}/pods/may-not"))["metadata"]["annotations"]
    )


def test_while_the_api_server_is_away_it_trains_as_well(training: Training, tmp_path: Path) -> None:
    for name in ("token", "namespace", "ca.crt"):
        (tmp_path / name).write_text("")
    said = training.run(
        QUEUECTL_POD="alone",
        QUEUECTL_SERVICE_ACCOUNT=str(tmp_path),
        KUBERNETES_SERVICE_HOST="127.0.0.1",
        KUBERNETES_SERVICE_PORT="9",
    )

    assert "the annotation of pod alone is not written" in said
    assert training.newest() is not None
