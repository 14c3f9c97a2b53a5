"""Fill a fresh control plane: queuectl's CRDs and policies, and simulated nodes."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any

from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from queuectl.kube.client import APPLY_PATCH, ApiError, ApiUnreachableError, KubeClient
from queuectl.kube.manifests import all_manifests
from queuectl.kube.probe import policies_act
from queuectl.local.errors import LocalError
from queuectl.local.nodes import node_manifest

READY_SECONDS = 60.0
POLL_SECONDS = 0.1
AT_ONCE = 32  # requests in flight while creating nodes

_retried = retry(
    retry=retry_if_exception_type(ApiUnreachableError),
    stop=stop_after_attempt(6),
    wait=wait_random_exponential(0.2, max=3),
    reraise=True,
)


async def prepare(client: KubeClient, *, nodes: int | Sequence[dict[str, Any]] = 0) -> None:
    """Apply the CRDs and policies, create the nodes, and wait until all of it works. May be repeated.

    `nodes` is a number of 8-GPU nodes named node-0001 on, or manifests from `node_manifest`; nodes that exist are
    left as they are. Raises LocalError when something isn't ready in time, ApiError when it is refused.
    """
    await apply(client, all_manifests())
    await _until("The CRDs are not established", lambda: _established(client))
    await _until("The admission policies have no effect", lambda: policies_act(client))
    wanted = [node_manifest(f"node-{n:04}") for n in range(1, nodes + 1)] if isinstance(nodes, int) else list(nodes)
    if wanted:
        await create_nodes(client, wanted)


async def apply(client: KubeClient, manifests: Iterable[dict[str, Any]]) -> None:
    """Apply cluster-scoped objects server-side, in order. Raises ApiError."""
    for manifest in manifests:
        group = manifest["apiVersion"] if "/" in manifest["apiVersion"] else None
        base = f"/apis/{group}" if group else f"/api/{manifest['apiVersion']}"
        path = f"{base}/{_plural(manifest['kind'])}/{manifest['metadata']['name']}"
        await _retried(client.request)(
            "PATCH",
            path,
            params={"fieldManager": "queuectl", "force": "true"},
            body=manifest,
            content_type=APPLY_PATCH,
        )


async def create_nodes(client: KubeClient, manifests: Sequence[dict[str, Any]]) -> None:
    """Create simulated nodes, as far as they don't exist, and wait until they are Ready. Raises LocalError, ApiError."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def create(manifest: dict[str, Any]) -> None:
        async with gate:
            try:
                await _retried(client.request)("POST", "/api/v1/nodes", body=manifest)
            except ApiError as error:
                if error.reason != "AlreadyExists":
                    raise

    try:
        async with asyncio.TaskGroup() as group:
            for manifest in manifests:
                group.create_task(create(manifest))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    await nodes_are_ready(client, {manifest["metadata"]["name"] for manifest in manifests})


async def nodes_are_ready(client: KubeClient, names: Collection[str]) -> None:
    """Wait until all of these nodes are Ready. Raises LocalError."""
    await _until(f"Not all of {len(names)} nodes are Ready", lambda: _ready(client, set(names)))


async def _established(client: KubeClient) -> bool:
    wanted = {item["metadata"]["name"] for item in all_manifests() if item["kind"] == "CustomResourceDefinition"}
    found = await client.request("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
    return wanted <= {item["metadata"]["name"] for item in found["items"] if _holds(item, "Established")}


async def _ready(client: KubeClient, names: set[str]) -> bool:
    found = await client.request("GET", "/api/v1/nodes", params={"resourceVersion": "0"})
    return names <= {item["metadata"]["name"] for item in found["items"] if _holds(item, "Ready")}


def _holds(item: dict[str, Any], condition: str) -> bool:
    conditions = item.get("status", {}).get("conditions") or ()
    return any(c["type"] == condition and c["status"] == "True" for c in conditions)


async def _until(problem: str, check: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            if await check():
                return
        except ApiUnreachableError:
            pass  # until the deadline
        if time.monotonic() > deadline:
            raise LocalError(f"{problem} after {READY_SECONDS:g} s; see the logs in the state folder's logs/.")
        await asyncio.sleep(POLL_SECONDS)


def _plural(kind: str) -> str:
    lower = kind.lower()
    return f"{lower[:-1]}ies" if lower.endswith("y") else f"{lower}s"
