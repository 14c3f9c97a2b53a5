"""What was just written is in the mirror before the watch shows it, and not for longer than it exists."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from queuectl.kube import decode
from queuectl.kube.client import KubeClient
from queuectl.kube.informer import Informer, Item
from queuectl.kube.names import GATE, pods_path
from queuectl.local.controlplane import Running
from queuectl.model.objects import Pod
from tests.support.eventually import eventually
from tests.support.proxy import Proxy, Then, proxied

PODS = pods_path("default")


@asynccontextmanager
async def following(client: KubeClient) -> AsyncIterator[tuple[Informer[Pod], list[tuple[Pod | None, Pod | None]]]]:
    """Start an informer of pods; it need not be in sync yet."""
    changes: list[tuple[Pod | None, Pod | None]] = []
    informer = Informer(client, PODS, decode.pod, lambda old, new: changes.append((old, new)))
    task = asyncio.create_task(informer.run())
    try:
        yield informer, changes
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def create(client: KubeClient, name: str) -> Item[Pod]:
    spec: dict[str, Any] = {"containers": [{"name": "main", "image": "none"}], "schedulingGates": [{"name": GATE}]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    return decode.pod(await client.request_raw("POST", PODS, body=body))


async def delete(client: KubeClient, name: str) -> None:
    await client.request("DELETE", f"{PODS}/{name}", body={"gracePeriodSeconds": 0})


async def until(holds: Callable[[], bool], what: str) -> None:
    async def look() -> bool:
        return holds()

    await eventually(look, what)


@pytest.fixture
async def proxy(control_plane: Running, tmp_path: Path) -> AsyncIterator[Proxy]:
    async with proxied(control_plane, tmp_path) as result:
        yield result


async def test_a_pod_that_is_gone_again_is_not_taken_in(kube: KubeClient) -> None:
    async with following(kube) as (informer, changes):
        await informer.synced.wait()
        item = await create(kube, "short")
        await delete(kube, "short")
        await until(lambda: any(new is None for _, new in changes), "the watch shows that the pod is gone")
        seen = len(changes)
        informer.adopt(item)
        assert item.key not in informer.objects
        assert len(changes) == seen


async def test_a_pod_taken_in_while_the_watch_hangs_leaves_when_the_watch_says_so(
    kube: KubeClient, proxy: Proxy
) -> None:
    hang = asyncio.Event()

    async def held() -> Then:
        await hang.wait()
        return Then.GO_ON

    watch = proxy.on(lambda _, path, __: "watch=1" in path, do=held)
    async with await KubeClient.open(str(proxy.kubeconfig)) as client, following(client) as (informer, changes):
        await informer.synced.wait()
        await watch.until_fired()
        item = await create(kube, "early")
        informer.adopt(item)
        assert informer.objects[item.key] == item
        assert changes[-1] == (None, item.value)
        await delete(kube, "early")
        hang.set()
        await until(lambda: item.key not in informer.objects, "the pod has left")
        assert changes[-1][1] is None


async def test_a_pod_created_while_a_list_is_under_way_is_not_taken_for_lost(kube: KubeClient, proxy: Proxy) -> None:
    hang = asyncio.Event()

    async def held() -> Then:
        await hang.wait()
        return Then.GO_ON

    listing = proxy.on(lambda _, path, __: path.startswith(f"{PODS}?limit"), when="after", do=held)
    async with await KubeClient.open(str(proxy.kubeconfig)) as client, following(client) as (informer, changes):
        await listing.until_fired()  # the list is made, and on its way
        item = await create(kube, "meanwhile")
        informer.adopt(item)
        hang.set()
        await informer.synced.wait()
        assert informer.objects[item.key].value.uid == item.value.uid
        assert all(new is not None for _, new in changes)
        await delete(kube, "meanwhile")
        await until(lambda: item.key not in informer.objects, "the pod has left")
