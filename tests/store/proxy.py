"""A TCP proxy before Postgres that cuts a connection at its COMMIT."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from enum import Enum

from sqlalchemy import make_url


class Cut(Enum):
    BEFORE = "the server never sees COMMIT"
    AFTER = "the server commits, its answer is lost"
    LATE = "the client is cut off, and COMMIT reaches the server later"


class Proxy:
    """``cut`` is done to the next COMMIT, once. With LATE, ``release`` is awaited before COMMIT goes on."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._tasks: set[asyncio.Task[None]] = set()
        self.cut: Cut | None = None
        self.release: Callable[[], Awaitable[object]] | None = None
        self.cuts = 0

    async def handle(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        server, to_server = await asyncio.open_connection(*self._target)
        back = asyncio.create_task(_copy(server, to_client))
        try:
            while data := await client.read(65536):
                if self.cut is None or b"COMMIT" not in data:
                    to_server.write(data)
                    await to_server.drain()
                    continue
                cut, self.cut = self.cut, None
                self.cuts += 1
                back.cancel()
                with suppress(asyncio.CancelledError):
                    await back
                if cut is Cut.AFTER:
                    to_server.write(data)
                    await server.read(65536)
                to_client.transport.abort()
                if cut is Cut.LATE:
                    assert self.release is not None
                    await self.release()
                    to_server.write(data)
                    await server.read(65536)
                break
        except OSError:
            pass
        finally:
            back.cancel()
            to_server.close()
            to_client.close()
            self._tasks.discard(task)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[tuple[Proxy, str]]:
    target = make_url(url)
    proxy = Proxy(target.host or "127.0.0.1", target.port or 5432)
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield proxy, target.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)
    finally:
        server.close()
        await proxy.close()
