"""A command under way: a container's, a probe's, a hook's, or one of `kubectl exec`."""

import asyncio
import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Self

BEGIN_SECONDS = 30.0  # from the launcher's start until the command is there
_SHIM = Path(__file__).with_name("shim.py")


class StartError(Exception):
    """The command could not be started; the message says why."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A command, and what it finds around it."""

    argv: list[str]
    env: Mapping[str, str]
    cwd: str
    mounts: Mapping[str, tuple[str, bool]]  # where the command sees it → where it is, and whether it is read-only
    root: str  # an empty folder to mount on; nothing is written there


class Command:
    """A running command; when this object is closed, or this process dies, every process of it is killed."""

    def __init__(self, process: asyncio.subprocess.Process, control: asyncio.StreamWriter) -> None:
        """Take over a launcher; ``start`` is the way to get one."""
        self.process = process
        self._control = control

    @classmethod
    async def start(
        cls,
        wanted: Wanted,
        *,
        stdin: int = asyncio.subprocess.DEVNULL,
        stdout: int | IO[bytes] = asyncio.subprocess.DEVNULL,
        stderr: int | IO[bytes] = asyncio.subprocess.STDOUT,
    ) -> Self:
        """Start it in a session of its own. Raises StartError."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_SHIM), str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env={},
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise StartError(f"the launcher: {error}") from error
        finally:
            theirs.close()
        reader, control = await asyncio.open_unix_connection(sock=ours)
        command = cls(process, control)
        try:
            control.write(json.dumps(asdict(wanted)).encode() + b"\n")
            async with asyncio.timeout(BEGIN_SECONDS):
                said = json.loads(await reader.readline() or b'{"error": "the launcher was killed"}')
        except (OSError, TimeoutError) as error:
            command.close()
            raise StartError(f"the launcher: {error or 'it does not answer'}") from error
        except BaseException:
            command.close()
            raise
        if "error" in said:
            command.close()
            raise StartError(said["error"])
        return command

    def terminate(self) -> None:
        """Send SIGTERM to the command itself, as a kubelet does, not to what it has started."""
        self._control.write(b"T")

    def kill(self) -> None:
        """Send SIGKILL to all its processes."""
        self._control.write(b"K")

    async def wait(self) -> int:
        """Return its exit code, 128 + N after signal N, once no process of it is left."""
        return await self.process.wait()

    def close(self) -> None:
        """Kill what is left of it."""
        self._control.close()


async def mounts_work(folder: Path) -> bool:
    """Whether commands can have mounts of their own here: that takes CAP_SYS_ADMIN or a user namespace."""
    root = folder / "root"
    root.mkdir(parents=True, exist_ok=True)
    try:
        await run(Wanted(["true"], {"PATH": "/usr/bin:/bin"}, "/", {"/queuectl": (str(root), True)}, str(root)))
    except StartError:
        return False
    return True


async def run(wanted: Wanted) -> int:
    """Run a command of which only the exit code matters. Raises StartError."""
    command = await Command.start(wanted)
    try:
        return await command.wait()
    finally:
        command.close()
