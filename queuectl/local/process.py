"""Start and end processes that outlive this one, without ever ending a stranger that got a recycled pid."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from queuectl.local.errors import LocalError

STOP_SECONDS = 10.0
POLL_SECONDS = 0.05

# Children of this process: kept so that they are reaped, and never seen as an unfinished Popen by the collector.
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True, slots=True)
class Process:
    """A process by pid and a mark of its start, which no later process with that pid shares."""

    pid: int
    born: str


def spawn(command: Sequence[str], *, log: Path, cwd: Path) -> Process:
    """Start `command` in a session of its own, its output added to `log`. Raises LocalError."""
    with log.open("ab") as out:
        try:
            child = subprocess.Popen(  # noqa: S603 - commands are made by this package
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as error:
            raise LocalError(f"{command[0]} can't be started: {error}.") from error
    _children[child.pid] = child
    return Process(child.pid, _birth(child.pid) or "gone")


def is_alive(process: Process) -> bool:
    """Whether exactly this process still runs (a zombie does not)."""
    birth = _birth(process.pid)
    if birth is None and (child := _children.pop(process.pid, None)):
        child.wait(timeout=STOP_SECONDS)  # ended already: this only reaps it
    return birth == process.born


def end(processes: Sequence[Process], *, seconds: float = STOP_SECONDS) -> None:
    """SIGTERM, at most `seconds` of waiting, SIGKILL; returns when all are gone. Raises LocalError if one stays."""
    for process in processes:
        send(process, signal.SIGTERM)
        send(process, signal.SIGCONT)  # a paused process can't act on SIGTERM
    if not _gone(processes, seconds):
        for process in processes:
            send(process, signal.SIGKILL)
        if not _gone(processes, seconds):
            left = [str(p.pid) for p in processes if is_alive(p)]
            raise LocalError(f"Processes {', '.join(left)} did not end after SIGKILL; look at their state with ps.")


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal if exactly this process still runs."""
    if is_alive(process):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise LocalError(
                f"Process {process.pid} belongs to another user; run this as the user who started it."
            ) from error


def tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a log, empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16_384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def _gone(processes: Sequence[Process], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(is_alive(p) for p in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _birth(pid: int) -> str | None:
    """Tell when the running process `pid` started, as text to compare; None if there is none."""
    if sys.platform == "linux":
        try:
            # The command name, in parentheses, may hold anything: count fields from its end.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            return None
        state, ticks = fields[0], fields[19]
        return None if state in "ZX" else f"{boot}:{ticks}"
    shown = subprocess.run(  # noqa: S603
        ["/bin/ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=10, check=False
    ).stdout.split(maxsplit=1)
    return None if not shown or shown[0].startswith("Z") else shown[1].strip()
