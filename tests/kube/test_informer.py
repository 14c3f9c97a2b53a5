"""A kind that is waited for: not looked at before, and as if there were none where the API server has no such kind."""

import asyncio
from contextlib import suppress

from queuectl.kube import decode
from queuectl.kube.client import KubeClient
from queuectl.kube.informer import Informer
from queuectl.kube.names import slices_path
from queuectl.model.devices import Slice
from tests.support.eventually import eventually

MISSING = slices_path().replace("/v1/", "/v0/")


def informer(kube: KubeClient, path: str, after: asyncio.Event) -> Informer[Slice]:
    return Informer(kube, path, decode.resource_slice, lambda _old, _new: None, after=after)


async def test_a_kind_that_is_waited_for_is_listed_then_or_there_is_none(kube: KubeClient) -> None:
    wanted = asyncio.Event()
    both = [informer(kube, path, wanted) for path in (slices_path(), MISSING)]
    tasks = [asyncio.create_task(one.run()) for one in both]
    try:
        assert [one.needed for one in both] == [False, False]
        wanted.set()
        assert [one.needed for one in both] == [True, True]

        async def synced() -> bool:
            return all(one.synced.is_set() for one in both)

        await eventually(synced, "both are in sync")
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_a_look_at_a_kind_that_is_not_there_shows_none(kube: KubeClient) -> None:
    wanted = asyncio.Event()
    wanted.set()
    missing = informer(kube, MISSING, wanted)

    await missing.once()

    assert missing.objects == {}
