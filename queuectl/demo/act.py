"""The act itself: jobs come as in the trace, an observer watches, a view shows it."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from queuectl.demo import script
from queuectl.demo.board import Board
from queuectl.demo.observer import Observer
from queuectl.demo.script import Cue
from queuectl.demo.view import View, summary
from queuectl.kube.client import ApiUnreachableError, KubeClient
from queuectl.kube.names import API, jobs_path
from queuectl.local.errors import LocalError
from queuectl.local.prepare import apply, prepare

READY_SECONDS = 60.0
LIMIT_SECONDS = 300.0  # several times of what it takes
LINE_SECONDS = 5.0
LOOK_SECONDS = 0.25  # also from one picture to the next
SUBMIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it."""

    jobs: int
    finished: int
    partial_gangs: int
    over_bookings: int

    @property
    def good(self) -> bool:
        """Tell whether all is as it should be."""
        return self.finished == self.jobs and not self.partial_gangs and not self.over_bookings

    def __str__(self) -> str:
        """Return the demo's last line."""
        return f"demo: {self.finished} jobs finished, {self.partial_gangs} partial gangs, {self.over_bookings} over-bookings"


async def furnish(kubeconfig: Path, quotas: dict[str, int]) -> None:
    """Install queuectl's kinds, nodes and queues. Raises LocalError, or ApiError when it is refused."""
    async with await KubeClient.open(str(kubeconfig)) as client:
        await prepare(client, nodes=script.NODES)
        await apply(client, script.admin_objects(quotas))


async def queues_are_served(kubeconfig: Path) -> None:
    """Wait until a leading controller has looked at every queue. Raises LocalError."""
    async with await KubeClient.open(str(kubeconfig)) as client:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            queues = (await client.request("GET", f"{API}/queues"))["items"]
            if all((queue.get("status") or {}).get("conditions") for queue in queues):
                return
            if time.monotonic() > deadline:
                raise LocalError(f"No controller has taken over the queues after {READY_SECONDS:g} s.")
            await asyncio.sleep(LOOK_SECONDS)


async def play(
    kubeconfig: Path, cues: Sequence[Cue], quotas: dict[str, int], console: Console, check: Callable[[], None]
) -> Result:
    """Submit the jobs at their times and watch until all have ended, or the time limit.

    ``check`` is called now and then and raises when there is no use in going on.
    """
    async with await KubeClient.open(str(kubeconfig)) as client, asyncio.TaskGroup() as group:
        observer = Observer(client)
        in_lines = not console.is_terminal or console.is_dumb_terminal
        board = Board(client, cues, lambda what: _print(console, f"{board.clock:5.1f} s  {what}") if in_lines else None)
        view = View(board, observer, quotas, console)
        helpers = [group.create_task(work) for work in (observer.run(), board.watch.run())]
        async with asyncio.timeout(READY_SECONDS):
            await observer.ready()
            await board.watch.listed.wait()
        board.begin()
        helpers.append(group.create_task(_submit(client, cues, board)))
        with _lines(view, console) if in_lines else _live(view, console) as refresh:
            while not board.done() and board.clock < LIMIT_SECONDS:
                check()
                refresh()
                await asyncio.sleep(LOOK_SECONDS)
            refresh()
        seconds = board.clock
        gpu_seconds = observer.gpu_seconds()
        await observer.settled()
        told = list(summary(board, observer, seconds, gpu_seconds))
        for helper in helpers:
            helper.cancel()
    _print(console, "")
    for line in told:
        _print(console, line)
    return Result(len(cues), len(board.finished()), len(observer.partial_gangs), len(observer.over_bookings))


async def _submit(client: KubeClient, cues: Sequence[Cue], board: Board) -> None:
    for cue in cues:
        await asyncio.sleep(max(0.0, cue.at - board.clock))
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(ApiUnreachableError),
            wait=wait_random_exponential(0.2, max=2),
            stop=stop_after_delay(SUBMIT_SECONDS),
            reraise=True,
        ):
            with attempt:
                created = await client.request("POST", jobs_path(script.NAMESPACE), body=script.job_object(cue))
        board.submitted(cue.name, created["metadata"]["uid"])


@contextmanager
def _live(view: View, console: Console) -> Iterator[Callable[[], None]]:
    """Redraw in place; by ourselves, since rich's own thread would read what the event loop is changing."""
    with Live(view, console=console, auto_refresh=False) as live:
        yield live.refresh


@contextmanager
def _lines(view: View, console: Console) -> Iterator[Callable[[], None]]:
    """Print the state every few seconds."""
    due = 0.0

    def refresh() -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + LINE_SECONDS
            _print(console, view.line())

    yield refresh


def _print(console: Console, line: str) -> None:
    """Print a line as it is, without styles or folding."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)
