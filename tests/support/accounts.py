"""What the processes of a recurrence (tests/trainer/recurrence.py) say themselves that they have done."""

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Run:
    """One attempt, as a rank tells it."""

    began_at: float
    began_after: int  # this step
    steps: list[tuple[int, float]] = field(default_factory=list)  # number, Unix seconds
    saves: list[tuple[int, float]] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.steps[-1][0] if self.steps else self.began_after


@dataclass(frozen=True)
class Gang:
    """A training job, and where its processes leave what they do."""

    name: str
    home: Path
    pods: int
    gpus: int  # of each pod
    every: int  # steps from one checkpoint to the next
    steps: int
    hasty: bool  # whether ranks fail at once when they lose a peer

    def runs(self) -> dict[int, Run]:
        """Return its attempts that have begun to train, each as the rank tells it that came furthest.

        The others must tell the same, but for what was under way when they were killed.
        """
        told = [self._runs(rank) for rank in range(self.pods)]
        found = {}
        for number in set().union(*told):
            ranks = [runs[number] for runs in told if number in runs]
            run = found[number] = max(ranks, key=lambda one: (len(one.steps), len(one.saves)))
            for one in ranks:
                assert one.began_after == run.began_after, (self.name, number)
                assert run.last - one.last <= 1, (self.name, number)
                assert one.saves == run.saves[: len(one.saves)], (self.name, number)
                assert len(run.saves) - len(one.saves) <= 1, (self.name, number)
        return found

    def pid(self, rank: int, attempt: int) -> int | None:
        """Return the process of a rank, if it is there."""
        found = [step for number, what, step, _ in self._lines(rank) if (number, what) == (attempt, "process")]
        return found[-1] if found and _runs_here(found[-1]) else None

    def result(self) -> int:
        return int((self.home / "result").read_text())

    def _runs(self, rank: int) -> dict[int, Run]:
        runs: dict[int, Run] = {}
        for attempt, what, step, at in self._lines(rank):
            match what:
                case "begin":
                    assert attempt not in runs, f"{self.name}: attempt {attempt} has begun twice"
                    assert attempt > max(runs, default=0), f"{self.name}: attempt {attempt} has begun after a later one"
                    runs[attempt] = Run(at, step)
                case "step":
                    assert attempt == max(runs), f"{self.name}: attempt {attempt} goes on while another one trains"
                    assert step == runs[attempt].last + 1
                    runs[attempt].steps.append((step, at))
                case "saved":
                    if attempt in runs and (step, at) not in runs[attempt].saves:
                        runs[attempt].saves.append((step, at))
        return runs

    def _lines(self, rank: int) -> list[tuple[int, str, int, float]]:
        path = self.home / f"account-{rank}"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(attempt), what, int(step), float(at)) for attempt, what, step, at in lines]


def _runs_here(pid: int) -> bool:
    try:
        return b"recurrence.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill(pid: int, number: int) -> None:
    """Send a signal, if the process is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
