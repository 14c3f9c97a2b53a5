"""The controller needs no more than config/base gives it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from queuectl.core.maintenance import UPGRADE_STATE
from queuectl.kube import lease
from queuectl.kube.client import APPLY_PATCH, KubeClient
from queuectl.local.controlplane import Running
from tests.e2e.test_maintenance import PASSES, verified
from tests.support import devices, ledger
from tests.support.maintenance import maintenance_of
from tests.support.proxy import proxied
from tests.support.stage import Stage

BASE = Path(__file__).parents[2] / "config" / "base"
NAMESPACE, ACCOUNT = "queuectl-system", "queuectl"
PATHS = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts",
    "Role": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles",
    "RoleBinding": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}


@pytest.fixture
async def token(kube: KubeClient) -> str:
    """A token of the controller's service account, with the rights of config/base."""
    for name in ("namespace.yaml", "rbac.yaml"):
        for manifest in yaml.safe_load_all((BASE / name).read_text()):
            path = f"{PATHS[manifest['kind']]}/{manifest['metadata']['name']}"
            params = {"fieldManager": "test", "force": "true"}
            await kube.request("PATCH", path, params=params, body=manifest, content_type=APPLY_PATCH)
    asked: Any = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    answer = await kube.request("POST", f"{PATHS['ServiceAccount']}/{ACCOUNT}/token", body=asked)
    return str(answer["status"]["token"])


async def test_the_service_account_of_the_base_is_enough_for_all_of_a_jobs_life(
    stage: Stage, control_plane: Running, token: str, tmp_path: Path
) -> None:
    await stage.nodes(2)
    await stage.queue(16)
    async with proxied(control_plane, tmp_path, token=token, namespace=NAMESPACE) as proxy:
        controller = stage.controller(kubeconfig=proxy.kubeconfig)
        controller.start()
        await stage.submit("fades", 2, 4, run_seconds=0, ttlSecondsAfterFinished=1)
        await stage.until_gone("fades")
        await stage.submit("runs", 2, 4, priority=7)
        await stage.until_phase("runs", "Running")
        controller.kill()
        controller.start()
        await stage.submit("fails", 2, 4, maxRunSeconds=1)
        await stage.until_phase("fails", "Failed")
        await stage.submit("waits", 4, 8)
        await stage.until_reason("waits", "ExceedsMaxQuota")
        claim = {"name": "data", "persistentVolumeClaim": {"claimName": "none"}}
        await stage.submit("claims", 1, 1, pod={"volumes": [claim]})
        await stage.until_reason("claims", "VolumeNotReady")
        for name in ("runs", "fails", "waits", "claims"):
            await stage.delete_job(name)
            await stage.until_gone(name)
        await devices.offer(stage, gpus=2, first=2)
        await stage.submit("named", 1, 2)
        await stage.until_phase("named", "Running")
        await stage.delete_job("named")
        await stage.until_gone("named")
        async with maintenance_of(stage) as maintenance:
            await maintenance.begin(work="DriverUpgrade", nodes=[f"{stage.name}-0"], test=verified(stage, PASSES))
            await maintenance.patch_node(
                f"{stage.name}-0", {"metadata": {"labels": {UPGRADE_STATE: "upgrade-required"}}}
            )
            await maintenance.until_node("Safe")
            await maintenance.done(f"{stage.name}-0")
            await maintenance.until("Finished")
            await maintenance.until_as_before()
    await ledger.until_free(stage)
    refused = {(a.method, a.path) for a in proxy.answers if a.status in {401, 403}}
    assert refused == set()
    done = {(a.method, a.path.partition("?")[0].rpartition("/")[0]) for a in proxy.answers if a.status < 300}
    assert ("PATCH", lease.PATH.rpartition("/")[0]) in done
