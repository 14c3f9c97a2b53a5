"""List and watch one kind of object, apart from the controller's informers: what observes them must not share their faults.

A list is told as a whole, for nobody knows in which order its objects came to be; what follows is told one by one,
in the order of the API server.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from queuectl.kube.client import ApiError, ApiUnreachableError, KubeClient

Object = dict[str, Any]

PAGE = "500"
WATCH_SECONDS = "300"
PAUSE_SECONDS = 0.3  # before the next try, and after the server has ended a watch

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Watch:
    """Tells ``on_list`` of all objects, then ``on_event`` of each change: the object, and whether it is gone."""

    def __init__(
        self,
        client: KubeClient,
        path: str,
        on_list: Callable[[list[Object]], None],
        on_event: Callable[[Object, bool], None],
    ) -> None:
        """Prepare; nothing is sent before ``run``. Both functions are called in the event loop."""
        self.listed = asyncio.Event()
        self._client = client
        self._path = path
        self._on_list = on_list
        self._on_event = on_event
        self._version = ""

    async def run(self) -> None:
        """Go on until cancelled, across outages of the API server."""
        while True:
            try:
                if not self._version:
                    await self._list()
                    self.listed.set()
                await self._watch()
            except ApiError:  # 410: too much has happened meanwhile. Else: a kind that is not installed yet
                self._version = ""
            except ApiUnreachableError:
                pass  # on from the last version seen
            await asyncio.sleep(PAUSE_SECONDS)

    async def _list(self) -> None:
        items: list[Object] = []
        params = {"limit": PAGE}
        while True:
            page = await self._client.request("GET", self._path, params=params)
            items += page["items"]
            if not page["metadata"].get("continue"):
                break
            params = {"limit": PAGE, "continue": page["metadata"]["continue"]}
        self._on_list(items)
        self._version = page["metadata"]["resourceVersion"]

    async def _watch(self) -> None:
        params = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": WATCH_SECONDS,
        }
        async with self._client.stream(self._path, params=params) as lines:
            async for line in lines:
                event = _decode(line)
                kind, item = event["type"], event["object"]
                if kind == "ERROR":
                    raise ApiError(item.get("code", 0), item.get("reason", ""), item.get("message", ""))
                if kind != "BOOKMARK":
                    self._on_event(item, kind == "DELETED")
                self._version = item["metadata"]["resourceVersion"]
