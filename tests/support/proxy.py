"""A proxy before the API server that does something at the n-th request of a kind, before or after it goes through.

What it holds back goes on even when the sender is dead by then, as a packet that is late on the network does.
"""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from pathlib import Path
from typing import Literal

import aiohttp
import yaml
from aiohttp import web
from yarl import URL

from queuectl.local.controlplane import Running
from tests.support.eventually import LIMIT_SECONDS, eventually

_HOP_BY_HOP = {"connection", "host", "keep-alive", "transfer-encoding", "content-length", "upgrade", "te", "trailer"}
_KEPT_BODY = 64 * 2**20
_FORBIDDEN = {"kind": "Status", "status": "Failure", "reason": "Forbidden", "message": "not today", "code": 403}


class Then(Enum):
    """What becomes of the request after an action."""

    GO_ON = "it goes through, or its answer is given"
    DROP = "it is never forwarded, or its answer is lost"
    REFUSE = "it is never forwarded, the answer is 403"


Match = Callable[[str, str, bytes], bool]  # method, path with query, body
Action = Callable[[], Awaitable[Then | None]]


@dataclass(eq=False)
class Rule:
    match: Match
    nth: int  # 0: every time
    when: Literal["before", "after"]
    do: Action
    seen: int = 0
    fired: bool = False  # the action has begun
    done: bool = False  # the request is through, or dropped

    async def until_fired(self, seconds: float = LIMIT_SECONDS) -> None:
        async def look() -> bool:
            return self.fired

        await eventually(look, f"request {self.nth} ({self.seen} seen)", seconds=seconds)

    async def until_done(self, seconds: float = LIMIT_SECONDS) -> None:
        async def look() -> bool:
            return self.done

        await eventually(look, "the request held back is through", seconds=seconds)


@dataclass(frozen=True)
class Answer:
    method: str
    path: str
    status: int
    body: bytes


@dataclass
class Proxy:
    """``kubeconfig`` leads through the proxy; ``answers`` are all that came back but watches' bodies."""

    kubeconfig: Path
    server: str
    session: aiohttp.ClientSession
    answers: list[Answer] = field(default_factory=list)
    refusing: bool = False  # as if nobody listened
    _rules: list[Rule] = field(default_factory=list)

    def on(self, match: Match, *, do: Action, nth: int = 1, when: Literal["before", "after"] = "before") -> Rule:
        """Do something at the nth request, from now on, that matches; at each of them if nth is 0."""
        rule = Rule(match, nth, when, do)
        self._rules.append(rule)
        return rule

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.refusing:
            return _drop(request)
        body = await request.read()
        path = request.raw_path
        rules = [rule for rule in self._rules if rule.match(request.method, path, body)]
        due: list[Rule] = []
        for rule in rules:
            rule.seen += 1
            if rule.nth in (0, rule.seen):
                due.append(rule)
        try:
            return await self._through(request, path, body, due)
        finally:
            for rule in due:
                rule.done = True

    async def _through(self, request: web.Request, path: str, body: bytes, due: list[Rule]) -> web.StreamResponse:
        match await _act(due, "before"):
            case Then.DROP:
                return _drop(request)
            case Then.REFUSE:
                return web.json_response(_FORBIDDEN, status=HTTPStatus.FORBIDDEN)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        try:
            async with self.session.request(
                request.method, URL(self.server + path, encoded=True), data=body or None, headers=headers
            ) as answer:
                back = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
                if "watch=1" in path and answer.status == HTTPStatus.OK:
                    self.answers.append(Answer(request.method, path, answer.status, b""))
                    return await _stream(request, answer, back)
                content = await answer.read()
        except (aiohttp.ClientError, OSError):
            return _drop(request)  # the API server is down, and so the sender sees it
        self.answers.append(Answer(request.method, path, answer.status, content))
        if await _act(due, "after") is Then.DROP:
            return _drop(request)
        return web.Response(status=answer.status, headers=back, body=content)


async def _act(rules: list[Rule], when: str) -> Then:
    for rule in rules:
        if rule.when == when:
            rule.fired = True
            then = await rule.do()
            if then is not None and then is not Then.GO_ON:
                return then
    return Then.GO_ON


async def _stream(request: web.Request, answer: aiohttp.ClientResponse, headers: dict[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    try:
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    except (aiohttp.ClientError, OSError):
        return _drop(request, response)
    return response


def _drop(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return response or web.Response(status=HTTPStatus.BAD_GATEWAY)


@asynccontextmanager
async def proxied(
    control_plane: Running, folder: Path, *, token: str = "", namespace: str = ""
) -> AsyncIterator[Proxy]:
    """Serve on a free port; ``token`` and ``namespace`` replace the administrator's in its kubeconfig."""
    context = ssl.create_default_context(cadata=control_plane.authority)
    kubeconfig = folder / "proxy.kubeconfig"
    connector = aiohttp.TCPConnector(ssl=context, limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
        proxy = Proxy(kubeconfig, control_plane.server, session)
        app = web.Application(client_max_size=_KEPT_BODY)
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1, handler_cancellation=False)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "proxy", "user": {"token": token or control_plane.token}}],
            "contexts": [
                {
                    "name": "proxy",
                    "context": {"cluster": "proxy", "user": "proxy", "namespace": namespace or "default"},
                }
            ],
            "current-context": "proxy",
        }
        kubeconfig.write_text(yaml.safe_dump(config))
        try:
            yield proxy
        finally:
            await runner.cleanup()
