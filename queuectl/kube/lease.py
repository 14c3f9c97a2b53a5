"""The leader, mirrored into a Lease so that ``kubectl get lease`` shows it, and so that no other ledger is led by.

Which controller of one ledger leads is decided in that ledger. The Lease only keeps a controller with another ledger,
which knows nothing of what runs, from acting beside it: so it is where all look, wherever they are installed.
"""

from dataclasses import dataclass
from datetime import datetime

from queuectl.kube.client import APPLY_PATCH, ApiError, KubeClient

NAMESPACE = "kube-system"  # it is in every cluster
NAME = "queuectl-controller"
PATH = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{NAME}"
LEDGER = "queuectl.dev/ledger"  # annotation: the name of the ledger that the holder leads by
_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class Shown:
    """What a Lease says of who leads."""

    holder: str
    ledger: str
    renewed: str
    seconds: int  # after which, if it is not renewed, nobody leads


async def show(client: KubeClient, *, holder: str, ledger: str, epoch: int, seconds: float, now: datetime) -> None:
    """Write holder, ledger, epoch and time of renewal; without holder that nobody leads. Raises as ``request`` does."""
    body = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": NAME, "namespace": NAMESPACE, "annotations": {LEDGER: ledger}},
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(seconds)),
            "leaseTransitions": epoch,
            "renewTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        },
    }
    params = {"fieldManager": "queuectl", "force": "true"}
    await client.request("PATCH", PATH, params=params, body=body, content_type=APPLY_PATCH)


async def shown(client: KubeClient) -> Shown | None:
    """Return what the Lease says; None when there is none. Raises as ``KubeClient.request`` does."""
    try:
        found = await client.request("GET", PATH)
    except ApiError as error:
        if error.status == _NOT_FOUND:
            return None
        raise
    spec, notes = found.get("spec") or {}, found["metadata"].get("annotations") or {}
    return Shown(
        spec.get("holderIdentity") or "",
        notes.get(LEDGER, ""),
        spec.get("renewTime") or "",
        spec.get("leaseDurationSeconds") or 0,
    )
