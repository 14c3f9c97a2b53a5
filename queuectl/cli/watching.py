"""Following objects as they change."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog

from queuectl.kube.client import KubeClient
from queuectl.kube.informer import Informer, Item

Change = tuple[dict[str, Any] | None, dict[str, Any] | None]  # before, after; None: not there

_decode = msgspec.json.Decoder().decode


def item(raw: msgspec.Raw | bytes) -> Item[dict[str, Any]]:
    """Decode any object, known by its uid."""
    value = _decode(raw)
    return Item(value["metadata"]["uid"], value["metadata"]["resourceVersion"], value)


@asynccontextmanager
async def changes(
    client: KubeClient, path: str, *, name: str = "", label_selector: str = ""
) -> AsyncIterator[AsyncIterator[Change]]:
    """Follow a collection, or one object of it.

    Yields what is there at first, then each change, and (None, None) once after the former. Connections are made
    anew as often as needed; limit the wait with asyncio.timeout where it must end.
    """
    log_to_stderr()
    seen: asyncio.Queue[Change] = asyncio.Queue()
    if name:
        path = f"{path}?fieldSelector=metadata.name%3D{name}"
    informer = Informer(client, path, item, lambda old, new: seen.put_nowait((old, new)), label_selector=label_selector)
    running = asyncio.create_task(informer.run())

    async def follow() -> AsyncIterator[Change]:
        await _first(informer.synced.wait(), running)
        while not seen.empty():
            yield seen.get_nowait()
        yield None, None
        while True:
            yield await _first(seen.get(), running)

    try:
        yield follow()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def log_to_stderr() -> None:
    """Tell in a line of what is tried again, such as a lost connection."""

    def line(_: object, __: str, event: Any) -> str:
        return f"queuectl: {event['event']}: {event.get('error', '')}; trying again"

    structlog.configure(processors=[line], logger_factory=structlog.PrintLoggerFactory(sys.stderr))


async def _first(wanted: Any, running: "asyncio.Task[None]") -> Any:
    """Await something that needs the informer; raise what ended the informer, should it end."""
    task = asyncio.ensure_future(wanted)
    try:
        await asyncio.wait({task, running}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
    if running.done():
        running.result()
    return task.result()
