"""The command line as a user runs it: a process of its own."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.eventually import eventually

SECONDS = 180.0  # for one command, on a busy machine


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        """The lines of a table, headings first, split at blanks."""
        return [line.split() for line in self.out.splitlines()]


class Commands:
    """Runs `queuectl` with a kubeconfig and, unless told otherwise, in a namespace."""

    def __init__(self, kubeconfig: Path, namespace: str = "") -> None:
        self.kubeconfig = kubeconfig
        self.namespace = namespace

    async def __call__(self, *words: str, stdin: str = "", code: int = 0, env: Mapping[str, str] = {}) -> Result:
        """Run a command to its end, which must be with this exit code."""
        process = await self._start(words, env)
        try:
            async with asyncio.timeout(SECONDS):
                out, err = await process.communicate(stdin.encode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        result = Result(process.returncode or 0, out.decode(), err.decode())
        assert result.code == code, f"{words}: exit code {result.code}, not {code}\n{result.out}\n{result.err}"
        assert "Traceback" not in result.err, result.err
        return result

    @asynccontextmanager
    async def running(self, *words: str) -> AsyncIterator["Output"]:
        """Run a command that goes on until it is interrupted, as Ctrl-C does."""
        process = await self._start(words, {})
        output = Output(process)
        reading = asyncio.create_task(output.read())
        try:
            yield output
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await reading

    async def _start(self, words: tuple[str, ...], env: Mapping[str, str]) -> asyncio.subprocess.Process:
        where = ["-n", self.namespace] if self.namespace and "-n" not in words and "-A" not in words else []
        local = (
            []
            if words[0] in {"queues", "nodes", "forgive", "version", "maintenance"} or words[0].startswith("-")
            else where
        )
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "queuectl", words[0], *local, *words[1:]),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=os.environ | {"KUBECONFIG": str(self.kubeconfig)} | dict(env),
        )


class Output:
    """What a running command has printed so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.text = ""

    async def read(self) -> None:
        assert self.process.stdout is not None
        while chunk := await self.process.stdout.read(65536):
            self.text += chunk.decode()

    async def until(self, *parts: str) -> None:
        """Wait until one line has all the parts."""
        await self._until(f"a line with {parts}", lambda line: all(part in line for part in parts))

    async def until_row(self, name: str, *cells: str) -> None:
        """Wait until a row that begins with the name ends with the cells."""
        end = list(cells)
        await self._until(
            f"a row {name} … {end}", lambda line: line.split()[:1] == [name] and line.split()[-len(end) :] == end
        )

    async def _until(self, what: str, found: Callable[[str], bool]) -> None:
        async def shown() -> bool:
            return any(found(line) for line in self.text.splitlines())

        try:
            await eventually(shown, what, seconds=SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text}") from None
