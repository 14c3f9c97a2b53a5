"""``python -m queuectl.demo``: a window of a real trace on a real control plane, watched by an independent observer."""

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

if TYPE_CHECKING:
    from queuectl.demo.stand import Stand
    from queuectl.demo.window import TraceJob

T = TypeVar("T")

FAILED = 1
INTERRUPTED = 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder of what the demo runs.", show_default="~/.local/state/queuectl/demo", file_okay=False
        ),
    ] = None,
    speed: Annotated[float, typer.Option(min=0.1, max=20, help="How much faster than usual.")] = 1.0,
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Leave control plane and controller running.")] = False,
    end: Annotated[bool, typer.Option("--end", help="End what an earlier run with --keep left running.")] = False,
) -> None:
    """Run 60 jobs of a real trace on 16 simulated 8-GPU nodes and say whether any gang was ever partial.

    Then two trainings as processes of this machine: one is preempted, and both have to end alike.
    """
    try:
        from queuectl.demo.stand import Stand, default_state  # noqa: PLC0415 - needs the extra
        from queuectl.local.errors import LocalError  # noqa: PLC0415
        from queuectl.store.embedded import EmbeddedUnavailable  # noqa: PLC0415
    except ImportError as error:
        sys.exit(f"error: {error.name} is missing; run `pip install 'queuectl[local]'`.")
    from queuectl.kube.client import ApiError, ApiUnreachableError  # noqa: PLC0415

    expected = (LocalError, EmbeddedUnavailable, ApiError, ApiUnreachableError, TimeoutError)
    interrupt = _Interrupt()
    folder = state or default_state()
    try:
        with Stand(folder) as stand:
            if end:
                with interrupt.held_back():
                    stand.end()
                typer.echo(f"Everything that the demo left running in {folder} has ended.")
                return
            if stand.kept():
                raise LocalError(f"A demo was left running in {folder}; end it with: {_ending(state)}")
            code = _run(stand, interrupt, speed, state, keep=keep)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (*expected, BaseExceptionGroup) as error:
        cause = error
        while isinstance(cause, BaseExceptionGroup):  # of concurrent tasks, the first tells enough
            cause = cause.exceptions[0]
        if not isinstance(cause, expected):
            raise
        sys.exit(f"error: {str(cause) or type(cause).__name__}")
    sys.exit(code)


def _run(stand: "Stand", interrupt: "_Interrupt", speed: float, state: Path | None, *, keep: bool) -> int:
    from queuectl.demo import act, script, training  # noqa: PLC0415
    from queuectl.demo.window import shipped  # noqa: PLC0415
    from queuectl.local.build import binaries  # noqa: PLC0415

    console = Console(soft_wrap=True, highlight=False, markup=False)
    window = shipped()
    cues, quotas = script.cues(window, speed), script.quotas(window)
    for line in _introduction(window, quotas, speed):
        console.print(line)
    begun = time.monotonic()
    result: act.Result | None = None
    trained: training.Result | None = None
    interrupted = False
    try:
        with _phase(console, "programs of the control plane found or built"):
            binaries()
        with (
            interrupt.held_back(),
            _phase(console, "etcd, kube-apiserver, kube-scheduler, controller manager, kwok, node agent up"),
        ):
            stand.end()  # what a killed demo may have left
            nodes = stand.start_control_plane(real_nodes=training.NODES)
        with _phase(console, f"queuectl's kinds and policies, {script.NODES} nodes, {len(quotas)} queues there"):
            interrupt.run(act.furnish(stand.kubeconfig, quotas))
        with _phase(console, "controller up, with a Postgres of its own"):
            with interrupt.held_back():
                stand.start_controller()
            interrupt.run(act.queues_are_served(stand.kubeconfig))
        console.print(f"setup  done after {time.monotonic() - begun:.1f} s\n")
        result = interrupt.run(act.play(stand.kubeconfig, cues, quotas, console, stand.check))
        console.print("training     two like trainings run as processes of this machine, and one has to give way ...")
        trained = interrupt.run(training.play(stand.kubeconfig, stand.trainings, nodes, stand.check))
        console.print(str(trained))
        if keep:
            stand.keep()
            for line in _how_to_use(stand.kubeconfig, state):
                console.print(line)
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: everything is being ended")
    finally:
        if not (keep and trained):
            interrupt.hold()
            in_order = interrupted or (result is not None and result.good and trained is not None and trained.good)
            stand.end(delete=in_order)
            if not in_order:
                console.print(f"The logs stay in {stand.state} until the next run.")
    if result is None or trained is None:
        return INTERRUPTED
    console.print(str(result))
    return 0 if result.good and trained.good else FAILED


def _introduction(window: Sequence["TraceJob"], quotas: Mapping[str, int], speed: float) -> Iterator[str]:
    from queuectl.demo import script  # noqa: PLC0415
    from queuectl.demo.window import RULE  # noqa: PLC0415

    gpus = script.NODES * script.GPUS_PER_NODE
    sizes = ", ".join(map(str, sorted({job.gpus for job in window})))
    faster = script.COMPRESSION * speed
    yield "queuectl demo: jobs of a real trace on a real Kubernetes control plane with simulated nodes"
    yield f"trace  Philly (Microsoft, 2017; msr-fiddle/philly-traces, CC BY 4.0), jobs {window[0].name} to {window[-1].name}:"
    yield f"       {len(window)} gangs of {sizes} GPUs, one pod for each GPU, on {script.NODES} nodes of {script.GPUS_PER_NODE} GPUs"
    yield f"chosen {RULE}"
    yield (
        f"time   {faster:g} times faster than in the trace; run times are then held between "
        f"{script.SHORTEST_RUN / speed:.3g} and {script.LONGEST_RUN / speed:.3g} s"
    )
    yield (
        f"queues {', '.join(f'{queue} {quota}' for queue, quota in quotas.items())}: virtual clusters and their quotas, "
        f"{sum(quotas.values())} of {gpus} GPUs,"
    )
    yield f"       made tight (the largest gang of each, {script.SMALLEST_QUOTA} at least) and StrictFIFO, so that nobody passes a big gang"


def _how_to_use(kubeconfig: Path, state: Path | None) -> Iterator[str]:
    yield "\nControl plane and controller go on running. To use them:"
    yield f"  export KUBECONFIG={shlex.quote(str(kubeconfig))}"
    yield "  kubectl get tj -A"
    yield f"  {_beside_python('queuectl')} queues"
    yield "To end all of it:"
    yield f"  {_ending(state)}\n"


def _ending(state: Path | None) -> str:
    where = f" --state {shlex.quote(str(state))}" if state else ""
    return f"{_beside_python(Path(sys.executable).name)} -m queuectl.demo --end{where}"


def _beside_python(name: str) -> str:
    """Return a program of this environment, by a path that is short to type."""
    path = Path(sys.executable).with_name(name)
    return shlex.quote(os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path))


@contextmanager
def _phase(console: Console, what: str) -> Iterator[None]:
    begun = time.monotonic()
    with console.status(what) if console.is_terminal else nullcontext():
        yield
    console.print(f"setup  {time.monotonic() - begun:5.1f} s  {what}")


class _Interrupt:
    """Turns SIGINT and SIGTERM into one KeyboardInterrupt, at a moment at which everything started is recorded."""

    def __init__(self) -> None:
        self._held = False
        self._asked = False
        self._cancel: Callable[[], object] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._caught)

    def hold(self) -> None:
        """Ignore both from here on."""
        self._held = True

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Let the block end first."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._asked:
            raise KeyboardInterrupt

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine; it is cancelled first."""

        async def main() -> T:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None  # noqa: S101
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            try:
                return await work
            finally:
                self._cancel = None

        try:
            return asyncio.run(main())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    def _caught(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True
        if self._cancel is not None:
            self._cancel()
        elif not self._held:
            raise KeyboardInterrupt


if __name__ == "__main__":
    app()
