"""Asking a pod to save its work: by HTTP to the pod itself, or by a command in one of its containers."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import aiohttp

from queuectl.kube import reports
from queuectl.kube.client import ApiError, ApiUnreachableError
from queuectl.kube.writes import Writer
from queuectl.model.checkpoint import Answer, Ask, Checkpoint, Report, Saving, Signal
from queuectl.model.objects import Pod

CONNECT_SECONDS = 5.0
LOOK_SECONDS = 2.0  # between two looks at a file
STAT_SECONDS = 30.0  # for one of them
SAID_BYTES = 200  # of an answer that is none


class UnansweredError(Exception):
    """A pod could not be asked, or its answer is none; asking again may help. Says why, in words."""


class Asking:
    """Ways to ask. Use it as a context manager."""

    def __init__(self, writer: Writer) -> None:
        """Prepare; nothing is sent."""
        self._writer = writer
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the client for pods' own servers. It knows no proxy, cookie or credential."""
        connector = aiohttp.TCPConnector(limit=0)  # the caller bounds how many are asked at once
        self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def ask(self, pod: Pod, saving: Saving, name: str, ask: Ask, *, seconds: float) -> Report | None:
        """Ask a pod once and return its answer; None when that is seen elsewhere, in its annotations.

        ``name`` is the ask's. Waits at most so many seconds. Raises UnansweredError, DeposedError.
        """
        try:
            async with asyncio.timeout(seconds):
                said = await self._ask(pod, saving, name, ask)
                if saving.answer is Answer.FILE:
                    return Report(name, await self._written(pod, saving, ask))
        except TimeoutError as error:
            raise UnansweredError("no answer in time") from error
        except (ApiError, ApiUnreachableError) as error:
            raise UnansweredError(str(error)) from error
        return Report(name, said.saved) if said and saving.answer in {Answer.REPLY, Answer.EXIT} else None

    async def _ask(self, pod: Pod, saving: Saving, name: str, ask: Ask) -> Report | None:
        body = reports.ask(name, ask)
        match saving.signal:
            case Signal.ANNOTATION:
                if pod.ask != body:
                    await self._writer.ask_pod(pod, body)
                return None
            case Signal.HTTP:
                return await self._post(pod, saving, body)
            case _:
                return await self._run(pod, saving, name, ask)

    async def _post(self, pod: Pod, saving: Saving, body: str) -> Report | None:
        if not pod.ip or self._session is None:
            raise UnansweredError("it has no address")
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        url = f"http://{host}:{saving.port}{saving.url_path}"
        try:
            async with self._session.post(
                url,
                data=body,
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            ) as response:
                text = await response.content.read(reports.MAX_BYTES + 1)
                if response.status != 200:  # noqa: PLR2004
                    said = " ".join(text[:SAID_BYTES].decode(errors="replace").split())
                    raise UnansweredError(f"POST {url} gives {response.status}{f': {said}' if said else ''}")
        except (aiohttp.ClientError, OSError) as error:
            raise UnansweredError(f"POST {url}: {error or type(error).__name__}") from error
        if saving.answer is not Answer.REPLY:
            return None
        try:
            return reports.read(text)
        except ValueError as error:
            raise UnansweredError(f"POST {url}: its answer can't be read: {error}") from error

    async def _run(self, pod: Pod, saving: Saving, name: str, ask: Ask) -> Report:
        """Run the command. Without a report as its last line it has saved what there was when it was asked."""
        given = ("env", f"QUEUECTL_ASK_ID={name}", f"QUEUECTL_ASK_DEADLINE={ask.until}")
        text = await self._command(pod, saving, (*given, *saving.command))
        try:
            return reports.read(text.strip().splitlines()[-1])
        except (ValueError, IndexError):
            return Report(name, Checkpoint(ask.at))

    async def _written(self, pod: Pod, saving: Saving, ask: Ask) -> Checkpoint:
        """Wait until the file is at least as new as the ask; its time may have whole seconds only."""
        while True:
            try:
                async with asyncio.timeout(STAT_SECONDS):
                    at = int(await self._command(pod, saving, ("stat", "-c", "%Y", saving.file)))
                if at >= int(ask.at):
                    return Checkpoint(float(at))
            except (UnansweredError, ValueError, TimeoutError):
                pass  # it is not there yet
            await asyncio.sleep(LOOK_SECONDS)

    async def _command(self, pod: Pod, saving: Saving, command: Sequence[str]) -> str:
        code, text = await self._writer.run_in_pod(pod, command, container=saving.container or pod.container)
        if code:
            raise UnansweredError(f"{' '.join(saving.command) or command[0]} ended with exit code {code}")
        return text
