"""Lists of any length, read page by page."""

from typing import Any

import msgspec

from queuectl.kube.client import KubeClient

_PAGE = "500"


class _Meta(msgspec.Struct):
    continue_: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct):
    metadata: _Meta
    items: list[msgspec.Raw] | None = None


_page = msgspec.json.Decoder(_Page).decode
_object = msgspec.json.Decoder().decode


async def list_raw(client: KubeClient, path: str, **params: str) -> list[msgspec.Raw]:
    """Return every object of a collection, undecoded. Raises ApiError and ApiUnreachableError."""
    found: list[msgspec.Raw] = []
    query = params | {"limit": _PAGE}
    while True:
        page = _page(await client.request_raw("GET", path, params=query))
        found.extend(page.items or ())
        if not page.metadata.continue_:
            return found
        query = params | {"limit": _PAGE, "continue": page.metadata.continue_}


async def list_objects(client: KubeClient, path: str, **params: str) -> list[dict[str, Any]]:
    """Return every object of a collection. Raises as ``list_raw`` does."""
    return [_object(raw) for raw in await list_raw(client, path, **params)]
