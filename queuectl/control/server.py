"""/healthz, /readyz and /metrics over HTTP."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from queuectl.control.manager import Health


def app(health: Health) -> Starlette:
    """Return the web application."""

    async def healthz(_: Request) -> Response:
        return _answer(ok=health.alive(), problem="the admission loop is stuck")

    async def readyz(_: Request) -> Response:
        return _answer(ok=health.ready(), problem="the database can't be reached")

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)])


def _answer(*, ok: bool, problem: str) -> Response:
    return PlainTextResponse("ok\n" if ok else f"{problem}\n", 200 if ok else 503)


class _Server(uvicorn.Server):
    """Uvicorn inside our own loop: signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises OSError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    result = socket.socket(family)
    result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    result.bind((host, port))
    result.listen(128)  # two sockets may bind to one port, and only one may listen
    return result


async def serve(health: Health, listener: socket.socket) -> None:
    """Serve until cancelled."""
    config = uvicorn.Config(app(health), log_config=None, access_log=False, lifespan="off")
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(task)
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(task, 5)
