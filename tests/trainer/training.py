"""Runs of digits.py as processes of their own."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from queuectl.trainer.checkpoints import Checkpoint, Folder
from queuectl.trainer.reports import LINE

SCRIPT = Path(__file__).with_name("digits.py")
STEPS = 240
LIMIT_SECONDS = 120.0
OURS = ("QUEUECTL_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "KUBERNETES_")


class Training:
    """A job in a folder of its own, attempt after attempt."""

    def __init__(self, home: Path, *, ranks: int = 1, options: tuple[str, ...] = ()) -> None:
        self.home, self.ranks, self.options = home, ranks, options
        self.attempt = 0
        self.processes: list[subprocess.Popen[str]] = []
        home.mkdir(exist_ok=True)

    @property
    def checkpoints(self) -> Path:
        return self.home / "checkpoints"

    def start(self, *options: str, pause: float = 0.0, **environment: str) -> None:
        """Start the next attempt's processes."""
        self.attempt += 1
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, SCRIPT, self.checkpoints, "--steps", STEPS, "--peers", port, "--pause", pause]
        command += ["--result", self.home / "result.npz", "--log", self.home / "log", *self.options, *options]
        for rank in range(self.ranks):
            ours = {
                "QUEUECTL_RANK": str(rank),
                "QUEUECTL_WORLD_SIZE": str(self.ranks),
                "QUEUECTL_ATTEMPT": str(self.attempt),
                "QUEUECTL_TERMINATION_LOG": str(self.home / f"message-{rank}"),
                "PYTHONPATH": os.pathsep.join(sys.path),
                "OPENBLAS_NUM_THREADS": "1",
            }
            self.processes.append(
                subprocess.Popen(
                    [str(word) for word in command],
                    env={name: value for name, value in os.environ.items() if not name.startswith(OURS)}
                    | ours
                    | environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def end(self) -> tuple[list[int], str]:
        """Wait for the end of all processes; return their exit codes and what they said."""
        said = [process.communicate(timeout=LIMIT_SECONDS) for process in self.processes]
        codes = [process.returncode for process in self.processes]
        self.processes = []
        return codes, "".join(out + error for out, error in said)

    def run(self, *options: str, **environment: str) -> str:
        """Let the next attempt come to its end; return what it said."""
        self.start(*options, pause=0.0, **environment)
        codes, said = self.end()
        assert codes == [0] * self.ranks, said
        return said

    def steps(self) -> list[tuple[int, int, str]]:
        """Return attempt, step and loss of all steps that were taken so far."""
        log = self.home / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [(int(attempt), int(step), loss) for attempt, step, loss in (line.split() for line in lines)]

    def until_step(self, step: int) -> None:
        def is_taken() -> bool:
            ended = any(process.poll() is not None for process in self.processes)
            return ended or any(taken[1] >= step for taken in self.steps() if taken[0] == self.attempt)

        until(is_taken, f"step {step}")

    def report(self, rank: int = 0) -> dict[str, object] | None:
        """Return the report in the termination message."""
        message = self.home / f"message-{rank}"
        lines = message.read_text().splitlines() if message.exists() else []
        found = [line.removeprefix(LINE) for line in lines if line.startswith(LINE)]
        return json.loads(found[-1]) if found else None

    def has_answered(self, ask: str) -> bool:
        return (self.report() or {}).get("ask") == ask

    def newest(self) -> Checkpoint | None:
        return Folder(self.checkpoints).newest()

    def lost_steps(self) -> list[int]:
        """Return for each attempt but the first how many steps were taken again."""
        lost, last = [], 0
        for before, after in zip(self.steps(), self.steps()[1:], strict=False):
            last = before[1]
            if after[0] != before[0]:
                lost.append(last - after[1] + 1)
        return lost

    def is_as_undisturbed(self, undisturbed: "Training") -> None:
        with np.load(self.home / "result.npz") as mine, np.load(undisturbed.home / "result.npz") as theirs:
            assert sorted(mine) == sorted(theirs)
            for name in mine:
                assert mine[name].tobytes() == theirs[name].tobytes(), name
        losses = {step: loss for _, step, loss in undisturbed.steps()}
        assert list(losses) == list(range(1, STEPS + 1))
        assert all(loss == losses[step] for _, step, loss in self.steps())
        assert {step for _, step, _ in self.steps()} == set(losses)

    def clear(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def until(look: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not look():
        assert time.monotonic() < deadline, f"{what}: not within {LIMIT_SECONDS:g} s"
        time.sleep(0.001)
