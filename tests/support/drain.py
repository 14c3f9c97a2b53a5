"""What `kubectl drain` does: cordon a node, evict its pods through the Eviction API, wait until they are gone."""

import asyncio
from http import HTTPStatus
from typing import Any

from queuectl.kube.client import MERGE_PATCH, ApiError, KubeClient
from queuectl.kube.names import pods_path
from tests.support.eventually import eventually

Object = dict[str, Any]


async def cordon(kube: KubeClient, node: str, *, closed: bool = True) -> None:
    body = {"spec": {"unschedulable": closed}}
    await kube.request("PATCH", f"/api/v1/nodes/{node}", body=body, content_type=MERGE_PATCH)


async def evict(kube: KubeClient, pod: Object) -> None:
    """Ask for a pod's eviction, again and again while a disruption budget forbids it."""
    meta = {"name": pod["metadata"]["name"], "namespace": pod["metadata"]["namespace"]}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
    path = f"{pods_path(meta['namespace'], meta['name'])}/eviction"

    async def accepted() -> bool:
        try:
            await kube.request("POST", path, body=body)
        except ApiError as error:
            if error.status != HTTPStatus.TOO_MANY_REQUESTS:
                return error.status == HTTPStatus.NOT_FOUND
            return False
        return True

    await eventually(accepted, f"pod {meta['name']} may be evicted")


async def drain(kube: KubeClient, node: str) -> None:
    """Cordon a node, evict all pods there, and wait until they are gone."""
    await cordon(kube, node)
    params = {"fieldSelector": f"spec.nodeName={node}"}
    pods = (await kube.request("GET", "/api/v1/pods", params=params))["items"]
    await asyncio.gather(*(evict(kube, pod) for pod in pods))
    mine = {pod["metadata"]["uid"] for pod in pods}

    async def gone() -> bool:
        there = (await kube.request("GET", "/api/v1/pods", params=params))["items"]
        return mine.isdisjoint(pod["metadata"]["uid"] for pod in there)

    await eventually(gone, f"node {node} is drained")
