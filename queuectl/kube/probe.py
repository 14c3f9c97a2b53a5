"""Tells whether the API server acts by our policies already."""

from typing import Any

from queuectl.kube.client import ApiError, KubeClient
from queuectl.kube.names import API_VERSION, CHANGED_BY, FINALIZER, RESTRICTED_LABEL, SUBMITTED_BY

_JOBS = f"/apis/{API_VERSION}/namespaces/default/trainingjobs"
_QUEUES = f"/apis/{API_VERSION}/queues"


async def policies_act(client: KubeClient) -> bool:
    """Tell by dry runs whether CRDs and policies take effect.

    The API server learns of them one by one. For up to 5 s after a CRD changes it even refuses every object that a
    mutating policy is for, since it looks up the types of custom resources at that interval.
    """
    try:
        job = await _dry_run(client, _JOBS, _job("1"))
        queue = await _dry_run(client, _QUEUES, _queue("1"))
    except ApiError:
        return False
    return (
        FINALIZER in job["metadata"].get("finalizers", ())
        and SUBMITTED_BY in job["metadata"].get("annotations", {})
        and CHANGED_BY in queue["metadata"].get("annotations", {})
        and RESTRICTED_LABEL in queue["metadata"].get("labels", {})
        and await _refuses(client, _JOBS, _job("1 GPU"))
        and await _refuses(client, _QUEUES, _queue("1 GPU"))
    )


async def _dry_run(client: KubeClient, path: str, body: dict[str, Any]) -> Any:
    return await client.request("POST", path, params={"dryRun": "All"}, body=body)


async def _refuses(client: KubeClient, path: str, body: dict[str, Any]) -> bool:
    try:
        await _dry_run(client, path, body)
    except ApiError:
        return True
    return False


def _job(amount: str) -> dict[str, Any]:
    container = {"name": "main", "image": "none", "resources": {"requests": {"nvidia.com/gpu": amount}}}
    role = {"name": "worker", "replicas": 1, "template": {"spec": {"containers": [container]}}}
    meta = {"generateName": "queuectl-probe-"}
    spec = {"queue": "queuectl-probe", "roles": [role]}
    return {"apiVersion": API_VERSION, "kind": "TrainingJob", "metadata": meta, "spec": spec}


def _queue(amount: str) -> dict[str, Any]:
    quota = {"flavor": "queuectl-probe", "resource": "nvidia.com/gpu", "nominal": amount}
    meta = {"generateName": "queuectl-probe-"}
    return {"apiVersion": API_VERSION, "kind": "Queue", "metadata": meta, "spec": {"quotas": [quota], "maxWaiting": 1}}
