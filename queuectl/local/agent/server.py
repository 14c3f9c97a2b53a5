"""What the API server asks of a kubelet: the logs of containers, and commands in them (`kubectl logs`, `kubectl exec`).

The API server shows no certificate and checks none, so requests are taken only from processes of this agent's user: the
kernel tells whose a connection of the loopback net is.
"""

import asyncio
import contextlib
import json
import os
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from pathlib import Path

from aiohttp import WSMsgType, web

from queuectl.local.agent.command import Command, StartError
from queuectl.local.agent.config import RefusedError
from queuectl.local.agent.given import HOST_ADDRESS
from queuectl.local.agent.pod import Container, Host, Pod

FOLLOW_SECONDS = 0.2
CHUNK = 65536
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_STDIN, _STDOUT, _STDERR, _ERROR, _CLOSE = 0, 1, 2, 3, 255
_ESTABLISHED = "01"


@contextlib.asynccontextmanager
async def serving(host: Host, certificates: Path) -> AsyncIterator[int]:
    """Serve for the pods of a host; the value is the port. `certificates` has apiserver.crt and apiserver.key."""
    app = web.Application(middlewares=[_only_us])
    app["host"] = host
    app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", _logs)
    for path in ("/exec/{namespace}/{pod}/{container}", "/exec/{namespace}/{pod}/{uid}/{container}"):
        app.router.add_get(path, _exec)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "apiserver.crt", certificates / "apiserver.key")
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST_ADDRESS, 0, ssl_context=context)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@web.middleware
async def _only_us(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    theirs = request.transport.get_extra_info("peername") if request.transport else None
    if theirs is None or _owner(theirs[1]) != os.getuid():
        raise web.HTTPForbidden(text="Only the API server of this agent's user may ask.")
    return await handler(request)


def _owner(port: int) -> int | None:
    """Tell which user has the established connection from this port of the loopback address."""
    wanted = f"{int.from_bytes(bytes(map(int, HOST_ADDRESS.split('.'))), 'little'):08X}:{port:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] == wanted and fields[3] == _ESTABLISHED:
            return int(fields[7])
    return None


def _find(request: web.Request) -> tuple[Pod, Container]:
    named = request.match_info
    for pod in reversed(request.app["host"].pods.values()):  # of two by this name, the later one
        meta = pod.manifest["metadata"]
        if (meta["namespace"], meta["name"]) == (named["namespace"], named["pod"]):
            if container := pod.containers.get(named["container"]):
                return pod, container
            raise web.HTTPNotFound(text=f"container {named['container']} not found in pod {named['pod']}")
    raise web.HTTPNotFound(text=f"pod {named['pod']} is not on this node")


async def _logs(request: web.Request) -> web.StreamResponse:
    _, container = _find(request)
    asked = request.query
    for name in ("timestamps", "sinceSeconds", "sinceTime", "stream"):
        if asked.get(name) not in (None, "", "false", "All"):
            raise web.HTTPBadRequest(
                text=f"{name}: this node agent keeps the output as it is, without times and streams"
            )
    path = container.log
    if asked.get("previous") == "true":
        path = container.folder / f"{container.restarts - 1}.log"
    if not path.exists():
        raise web.HTTPBadRequest(text=f"container {container.spec['name']} has no such log: it is waiting to start")
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    left = int(asked.get("limitBytes") or 2**62)
    with path.open("rb") as file:
        if "tailLines" in asked:
            file.seek(_start_of_tail(path, int(asked["tailLines"])))
        while left > 0:
            ends = asked.get("follow") != "true" or container.command is None or container.log != path
            while left > 0 and (chunk := file.read(min(CHUNK, left))):
                await response.write(chunk)
                left -= len(chunk)
            if ends:
                break
            await asyncio.sleep(FOLLOW_SECONDS)
    return response


def _start_of_tail(path: Path, lines: int) -> int:
    begins, position = deque([0], maxlen=lines + 1), 0
    with path.open("rb") as file:
        for line in file:
            position += len(line)
            begins.append(position)
    return begins[0]


async def _exec(request: web.Request) -> web.StreamResponse:
    pod, container = _find(request)
    asked = request.query
    if asked.get("tty") in {"1", "true"}:
        raise web.HTTPBadRequest(text="tty: this node agent has no terminals; leave out -t")
    if container.command is None:
        raise web.HTTPBadRequest(text=f"container {container.spec['name']} does not run")
    socket = web.WebSocketResponse(protocols=PROTOCOLS, max_msg_size=2**22)
    if not socket.can_prepare(request):
        raise web.HTTPBadRequest(text=f"commands take a websocket of {' or '.join(PROTOCOLS)}")
    await socket.prepare(request)
    await socket.send_bytes(bytes([_STDOUT]))  # tells the client that its channels are open
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        command = await Command.start(
            pod.wanted(container, asked.getall("command", [])),
            stdin=pipe if asked.get("input") in {"1", "true"} else null,
            stdout=pipe if asked.get("output") in {"1", "true"} else null,
            stderr=pipe if asked.get("error") in {"1", "true"} else null,
        )
    except (StartError, RefusedError) as error:
        await _say(socket, _failure("InternalError", str(error)))
        return socket
    process = command.process
    hearing = asyncio.create_task(_hear(socket, command))
    try:
        async with asyncio.TaskGroup() as group:
            for channel, stream in ((_STDOUT, process.stdout), (_STDERR, process.stderr)):
                if stream is not None:
                    group.create_task(_pass_on(stream, socket, channel))
        code = await command.wait()
        await _say(socket, _exit(code))
    except* (ConnectionError, RuntimeError):
        pass  # the client is gone
    finally:
        hearing.cancel()
        command.close()
    return socket


async def _hear(socket: web.WebSocketResponse, command: Command) -> None:
    """Pass on what the client sends; when it leaves, so does its command."""
    stdin = command.process.stdin
    async for message in socket:
        if message.type is not WSMsgType.BINARY or not message.data or stdin is None:
            continue
        channel, data = message.data[0], message.data[1:]
        with contextlib.suppress(ConnectionError):
            if channel == _STDIN and data:
                stdin.write(data)
                await stdin.drain()
            elif channel == _CLOSE and data == bytes([_STDIN]):
                stdin.close()
    command.kill()


async def _pass_on(stream: asyncio.StreamReader, socket: web.WebSocketResponse, channel: int) -> None:
    while chunk := await stream.read(CHUNK):
        await socket.send_bytes(bytes([channel]) + chunk)


async def _say(socket: web.WebSocketResponse, status: dict[str, object]) -> None:
    await socket.send_bytes(bytes([_ERROR]) + json.dumps(status).encode())
    await socket.close()


def _exit(code: int) -> dict[str, object]:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    causes = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
    return _failure("NonZeroExitCode", f"command terminated with exit code {code}") | {"details": causes}


def _failure(reason: str, message: str) -> dict[str, object]:
    code = HTTPStatus.INTERNAL_SERVER_ERROR
    return {"metadata": {}, "status": "Failure", "reason": reason, "message": message, "code": code}
