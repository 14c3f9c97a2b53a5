"""A local copy of one kind of object, kept by list and watch on raw JSON.

One ``run`` is an endless series of list-then-watch rounds. A round ends when the server ends the watch (normal),
says 410 Gone (list again; what vanished meanwhile is reported as removed), or the connection breaks or stays
quiet for too long (back off, then go on from the last resource version seen).
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import structlog

from queuectl.kube.client import ApiError, ApiUnreachableError, KubeClient

PAGE = "500"
WATCH_SECONDS = 280
BACKOFF_SECONDS = (0.1, 5.0)  # first and longest pause, doubled in between

log = structlog.get_logger()


class Meta(msgspec.Struct, rename="camel"):
    """The metadata that an informer itself needs."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Versioned(msgspec.Struct):
    metadata: Meta = msgspec.field(default_factory=Meta)


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class _GoneError(Exception):
    """The resource version is too old: list again."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Item(Generic[T]):
    """A decoded object and what identifies it."""

    key: str
    resource_version: str
    value: T

    def newer_than(self, resource_version: str) -> bool:
        """Compare with another version of the same kind of object; the empty one is the oldest."""
        return int(self.resource_version or 0) > int(resource_version or 0)


_page = msgspec.json.Decoder(_Page)
_event = msgspec.json.Decoder(_Event)
_versioned = msgspec.json.Decoder(_Versioned)
_status = msgspec.json.Decoder(_Status)


class Informer(Generic[T]):
    """Keeps ``objects`` (by key) and tells ``on_change(old, new)`` of each change; None stands for absence.

    ``on_change`` is called in the event loop and must not block. ``decode`` turns an object's bytes into an Item;
    what it can't decode is logged and treated as absent.
    """

    def __init__(
        self,
        client: KubeClient,
        path: str,
        decode: Callable[[msgspec.Raw | bytes], Item[T]],
        on_change: Callable[[T | None, T | None], None],
        *,
        label_selector: str = "",
        after: asyncio.Event | None = None,
        field_selector: str = "",
    ) -> None:
        """Prepare; nothing is sent before ``run``. ``after``: what it waits for even then.

        With it the kind is one that not every API server has, or shows: it is then as if there were none.
        """
        self.objects: dict[str, Item[T]] = {}
        self.synced = asyncio.Event()
        self._client = client
        self._path = path
        self._decode = decode
        self._on_change = on_change
        selectors = {"labelSelector": label_selector, "fieldSelector": field_selector}
        self._params = {name: selector for name, selector in selectors.items() if selector}
        self._after = after
        self._version = ""
        self._adopted: set[str] = set()  # keys of objects that neither list nor watch has shown yet

    @property
    def needed(self) -> bool:
        """Tell whether what it waits for has come."""
        return self._after is None or self._after.is_set()

    async def once(self) -> None:
        """List, and don't watch. Raises ApiError and ApiUnreachableError."""
        while not self.synced.is_set():
            with suppress(_GoneError):
                try:
                    await self._list()
                except ApiError as error:
                    if not self._may_be_missing(error):
                        raise
                self.synced.set()

    async def run(self) -> None:
        """List and watch until cancelled."""
        pause = BACKOFF_SECONDS[0]
        if self._after is not None:
            await self._after.wait()
        while True:
            before = self._version
            try:
                if not self._version:
                    await self._list()
                    self.synced.set()
                await self._watch()
                pause = BACKOFF_SECONDS[0]
            except _GoneError:
                self._version = ""
            except (ApiUnreachableError, ApiError) as error:
                if self._version != before:  # it had worked for a while
                    pause = BACKOFF_SECONDS[0]
                if self._may_be_missing(error):
                    self.synced.set()
                log.warning("watch interrupted", path=self._path, error=str(error), pause=round(pause, 2))
            # Jitter keeps informers from coming back all at once.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(pause * 2, BACKOFF_SECONDS[1])

    def adopt(self, item: Item[T]) -> None:
        """Take in an object just written, before the watch shows it.

        One that is not newer than what the watch has shown is known already, or gone again.
        """
        known = self.objects.get(item.key)
        if all(item.newer_than(version) for version in (self._version, known.resource_version if known else "")):
            self._set(item.key, item)
            self._adopted.add(item.key)

    def _may_be_missing(self, error: Exception) -> bool:
        return self._after is not None and isinstance(error, ApiError) and error.status in {403, 404}

    async def _list(self) -> None:
        found: dict[str, Item[T]] = {}
        params = self._params | {"limit": PAGE}
        while True:
            try:
                page = _page.decode(await self._client.request_raw("GET", self._path, params=params))
            except ApiError as error:
                if error.status == 410:  # noqa: PLR2004 - the continue token expired
                    raise _GoneError from error
                raise
            for raw in page.items or ():
                item = self._try_decode(raw)
                if item is not None:
                    found[item.key] = item
            if not page.metadata.continue_:
                break
            params = self._params | {"limit": PAGE, "continue": page.metadata.continue_}
        self._version = page.metadata.resource_version
        self._replace(found)

    def _replace(self, found: dict[str, Item[T]]) -> None:
        # What was adopted while the list was under way stays as it is.
        kept = {key for key in self._adopted if self.objects[key].newer_than(self._version)}
        for key in self.objects.keys() - found.keys() - kept:
            self._set(key, None)
        for key, item in found.items():
            known = self.objects.get(key)
            if key not in kept and (known is None or known.resource_version != item.resource_version):
                self._set(key, item)

    async def _watch(self) -> None:
        params = self._params | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(WATCH_SECONDS + random.randrange(40)),  # noqa: S311
        }
        try:
            async with self._client.stream(self._path, params=params) as lines:
                async for line in lines:
                    self._handle(_event.decode(line))
        except ApiError as error:
            if error.status == 410:  # noqa: PLR2004
                raise _GoneError from error
            raise

    def _handle(self, event: _Event) -> None:
        if event.type == "ERROR":
            status = _status.decode(event.object)
            if status.code == 410:  # noqa: PLR2004
                raise _GoneError
            raise ApiUnreachableError(f"watch: {status.message}")
        if event.type == "BOOKMARK":
            self._version = _versioned.decode(event.object).metadata.resource_version
            return
        item = self._try_decode(event.object)
        if item is None:
            self._version = _versioned.decode(event.object).metadata.resource_version
            return
        self._version = item.resource_version
        if item.key in self._adopted and self.objects[item.key].newer_than(item.resource_version):
            return  # the watch is still behind what was adopted
        self._set(item.key, None if event.type == "DELETED" else item)

    def _set(self, key: str, item: Item[T] | None) -> None:
        old = self.objects.pop(key, None)
        self._adopted.discard(key)
        if item is not None:
            self.objects[key] = item
        if old is not None or item is not None:
            self._on_change(old.value if old else None, item.value if item else None)

    def _try_decode(self, raw: msgspec.Raw) -> Item[T] | None:
        try:
            return self._decode(raw)
        except (msgspec.DecodeError, ValueError, TypeError, LookupError):
            meta = _versioned.decode(raw).metadata
            log.exception("object skipped", path=self._path, name=meta.name, namespace=meta.namespace)
            return None
