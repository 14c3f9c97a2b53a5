"""The demo on a terminal, and in plain lines where there is none."""

from collections.abc import Iterable, Mapping

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from queuectl.demo.board import Board, Row
from queuectl.demo.observer import Observer
from queuectl.demo.script import GPUS_PER_NODE, NODES

BAR = 16  # cells of a queue's bar
FEWEST_ROWS = 3  # of waiting jobs, on a terminal however low
_REST = 19  # lines of everything else


class View:
    """Draws the board and what the observer sees."""

    def __init__(self, board: Board, observer: Observer, quotas: Mapping[str, int], console: Console) -> None:
        """Take what is shown."""
        self._board = board
        self._observer = observer
        self._quotas = quotas
        self._console = console

    def __rich__(self) -> RenderableType:
        """Return the whole picture as of now."""
        side_by_side = Table.grid(padding=(0, 4))
        side_by_side.add_row(self._queues(), self._nodes())
        return Group(Text(self.line(), style="bold"), Text(), side_by_side, Text(), self._waiting(), self._verdict())

    def line(self) -> str:
        """Return the state in one line."""
        rows = list(self._board.rows.values())
        submitted = sum(row.submitted is not None for row in rows)
        held = sum(self._observer.gpus_on(node) for node in self._observer.nodes)
        return (
            f"{self._board.clock:5.1f} s  {submitted} of {len(rows)} jobs submitted, {len(self._board.waiting())} wait, "
            f"{sum(row.holds for row in rows)} run, {len(self._board.finished())} finished; "
            f"{held} of {NODES * GPUS_PER_NODE} GPUs held"
        )

    def _queues(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("QUEUE")
        table.add_column("GPUS USED OF QUOTA", min_width=BAR + 8)
        for name in ("WAIT", "RUN", "DONE"):
            table.add_column(name, justify="right")
        for queue, quota in self._quotas.items():
            rows = [row for row in self._board.rows.values() if row.cue.queue == queue]
            used = self._observer.gpus_of(queue)
            table.add_row(
                queue,
                _bar(used, quota, BAR).append(f" {used}/{quota}"),
                *(str(count or "") for count in (_count(rows, "waits"), _count(rows, "holds"))),
                str(sum(row.ended is not None for row in rows) or ""),
            )
        return table

    def _nodes(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for _ in range(2):
            table.add_column("NODE")
            table.add_column("GPUS")
            table.add_column("FREE", justify="right")
        nodes = sorted(self._observer.nodes)
        half = (len(nodes) + 1) // 2
        for index in range(half):
            cells: list[RenderableType] = []
            for node in (nodes[index], *nodes[half + index : half + index + 1]):
                held = self._observer.gpus_on(node)
                cells += [node, _bar(held, GPUS_PER_NODE, GPUS_PER_NODE), str(GPUS_PER_NODE - held)]
            table.add_row(*cells)
        return table

    def _waiting(self) -> RenderableType:
        waiting = self._board.waiting()
        if not waiting:
            return Text("nobody waits", style="dim")
        room = max(FEWEST_ROWS, self._console.height - _REST)
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("JOB", "QUEUE"):
            table.add_column(name)
        for name in ("GPUS", "POS", "SINCE"):
            table.add_column(name, justify="right")
        table.add_column("WAITS BECAUSE", no_wrap=True, overflow="ellipsis", ratio=1)
        queues = list(self._quotas)
        waiting.sort(key=lambda row: (queues.index(row.cue.queue), row.position or len(self._board.rows)))
        shown = waiting[:room]
        for row in shown:
            since = f"{self._board.clock - (row.submitted or 0):.0f} s"
            position = str(row.position or "")
            table.add_row(row.cue.name, row.cue.queue, str(row.cue.gpus), position, since, row.message)
        more = len(waiting) - len(shown)
        return Group(table, Text(f"and {more} more", style="dim")) if more else table

    def _verdict(self) -> RenderableType:
        wrong = [*self._observer.partial_gangs, *self._observer.over_bookings]
        text = Text(f"observer: {len(self._observer.partial_gangs)} partial gangs, ", style="red" if wrong else "green")
        text.append(f"{len(self._observer.over_bookings)} over-bookings")
        return Padding(text, (1, 0, 0, 0))


def summary(board: Board, observer: Observer, seconds: float, gpu_seconds: float) -> Iterable[str]:
    """Return what is to be said at the end, line by line."""
    rows = list(board.rows.values())
    first_pods: dict[str, float] = {}
    for (uid, _), attempt in observer.attempts.items():
        seen = board.on_clock(attempt.first_seen)
        first_pods[uid] = min(seen, first_pods.get(uid, seen))
    waits = {
        row.cue.name: max(0.0, first_pods.get(row.uid, seconds) - row.submitted)
        for row in rows
        if row.waited and row.submitted is not None
    }
    gpus = NODES * GPUS_PER_NODE
    whole = observer.whole_gangs_succeeded()
    yield f"jobs         {len(board.finished())} of {len(rows)} finished in {seconds:.0f} s; the observer saw all pods of {whole} gangs succeed"
    several = sum(board.rows[name].cue.gpus > 1 for name in waits)
    yield f"waits        {len(waits)} gangs had to wait, {several} of them of 2 GPUs or more"
    if waits:
        longest = max(waits, key=lambda name: waits[name])
        cue = board.rows[longest].cue
        yield f"             the longest: {cue.name} ({cue.gpus} GPUs, {cue.queue}), {waits[longest]:.1f} s to its first pod"
    yield f"GPUs         {gpu_seconds / (gpus * seconds):.0%} of {gpus} in use on average, {observer.peak_gpus} at the peak"
    yield f"nodes        at most {observer.most_pods_on_a_node} pods on one, of {GPUS_PER_NODE} that fit"
    yield from (f"PARTIAL GANG {sentence}" for sentence in observer.partial_gangs)
    yield from (f"OVER-BOOKING {sentence}" for sentence in observer.over_bookings)
    for row in rows:
        if row.phase != "Succeeded":
            state = f"{row.phase}: {row.message}" if row.submitted is not None else "not submitted"
            yield f"NOT FINISHED {row.cue.name} ({row.cue.gpus} GPUs, {row.cue.queue}): {state}"


def _count(rows: Iterable[Row], what: str) -> int:
    return sum(getattr(row, what) for row in rows)


def _bar(used: int, whole: int, width: int) -> Text:
    filled = min(width, -(-used * width // whole)) if whole else 0
    style = "red" if used > whole else "green"
    return Text("█" * filled, style=style).append("░" * (width - filled), style="dim")
