"""What the demo shows of its jobs: their statuses as users see them, and when the demo saw them change."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from queuectl.demo.script import NAMESPACE, Cue
from queuectl.demo.watch import Object, Watch
from queuectl.kube.client import KubeClient
from queuectl.kube.names import jobs_path

WAITING = "Pending"
ENDED = frozenset({"Succeeded", "Failed"})


@dataclass(slots=True)
class Row:
    """One job. Times are seconds on the board's clock; None: not yet."""

    cue: Cue
    uid: str = ""
    submitted: float | None = None
    phase: str = ""
    reason: str = ""
    message: str = ""
    position: int | None = None
    waited: bool = False  # it was told what it waits for
    ended: float | None = None

    @property
    def waits(self) -> bool:
        """Tell whether it waits in its queue now."""
        return self.submitted is not None and self.phase in {"", WAITING}

    @property
    def holds(self) -> bool:
        """Tell whether it holds capacity."""
        return self.phase not in {"", WAITING} and self.phase not in ENDED


class Board:
    """All jobs of the demo. ``tell`` gets a sentence for each thing that happens to one."""

    def __init__(self, client: KubeClient, cues: Sequence[Cue], tell: Callable[[str], None]) -> None:
        """Prepare; ``watch.run`` fills it."""
        self.rows = {cue.name: Row(cue) for cue in cues}
        self.watch = Watch(client, jobs_path(NAMESPACE), self._on_list, self._on_job)
        self._tell = tell
        self._begun = time.monotonic()

    def begin(self) -> None:
        """Set the clock to zero."""
        self._begun = time.monotonic()

    @property
    def clock(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begun

    def on_clock(self, monotonic: float) -> float:
        """Return a monotonic time as seconds on this clock."""
        return monotonic - self._begun

    def submitted(self, name: str, uid: str) -> None:
        """Take in that the API server has accepted a job."""
        row = self.rows[name]
        row.uid, row.submitted = uid, self.clock

    def done(self) -> bool:
        """Tell whether every job has ended."""
        return all(row.phase in ENDED for row in self.rows.values())

    def finished(self) -> list[Row]:
        """Return the jobs that ran to their end."""
        return [row for row in self.rows.values() if row.phase == "Succeeded"]

    def waiting(self) -> list[Row]:
        """Return the jobs that wait, the oldest first."""
        return [row for row in self.rows.values() if row.waits]

    def _on_list(self, items: list[Object]) -> None:
        for item in items:
            self._on_job(item, False)  # noqa: FBT003

    def _on_job(self, item: Object, gone: bool) -> None:  # noqa: FBT001
        row = self.rows.get(item["metadata"]["name"])
        if row is None or gone:
            return
        status = item.get("status") or {}
        before, row.phase = row.phase, status.get("phase", "")
        row.reason, row.message = status.get("reason", ""), status.get("message", "")
        row.position = status.get("queuePosition")
        what = f"{row.cue.name} ({row.cue.gpus} GPU{'s' * (row.cue.gpus > 1)}, {row.cue.queue})"
        if row.phase == WAITING and row.reason not in {"", "Pending"} and not row.waited:
            row.waited = True
            self._tell(f"{what} waits: {row.message}")
        if row.phase == before:
            return
        if row.phase == "Running":
            self._tell(f"{what} runs")
        elif row.phase in ENDED:
            row.ended = self.clock
            self._tell(f"{what} has finished" if row.phase == "Succeeded" else f"{what} has failed: {row.message}")
        elif row.phase == WAITING and before:
            self._tell(f"{what} is back in its queue: {row.message}")
