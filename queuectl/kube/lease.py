"""The leader, mirrored into a Lease so that ``kubectl get lease`` shows it. Nothing decides by it."""

from datetime import datetime

from queuectl.kube.client import APPLY_PATCH, KubeClient

NAME = "queuectl-controller"


async def show(client: KubeClient, *, namespace: str, holder: str, epoch: int, seconds: float, now: datetime) -> None:
    """Write holder, epoch and time of renewal; raises as ``KubeClient.request`` does."""
    body = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": NAME, "namespace": namespace},
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(seconds)),
            "leaseTransitions": epoch,
            "renewTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        },
    }
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{NAME}"
    params = {"fieldManager": "queuectl", "force": "true"}
    await client.request("PATCH", path, params=params, body=body, content_type=APPLY_PATCH)
