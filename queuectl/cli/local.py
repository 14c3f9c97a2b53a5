"""`queuectl local`: a real control plane with simulated GPU nodes on this machine."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from queuectl.local.controlplane import Running

app = typer.Typer(
    name="local",
    help="Run a real control plane with simulated GPU nodes on this machine.",
    no_args_is_help=True,
)


class Output(StrEnum):
    """Formats of `status`."""

    TABLE = "table"
    JSON = "json"


def default_state() -> Path:
    """Return XDG_STATE_HOME/queuectl/local, or ~/.local/state/queuectl/local."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "queuectl" / "local"


State = Annotated[
    Path | None,
    typer.Option(
        "--state", help="Folder of this control plane.", show_default="~/.local/state/queuectl/local", file_okay=False
    ),
]


@app.command()
def up(
    nodes: Annotated[int, typer.Option(min=0, max=5000, help="Simulated nodes with 8 GPUs each.")] = 0,
    real_nodes: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=64,
            help="Nodes that run pods as processes of this machine.",
            show_default="as before, at first 0",
        ),
    ] = None,
    real_gpus: Annotated[
        int | None,
        typer.Option(
            min=0, max=64, help="GPUs that each of these pretends to have.", show_default="as before, at first 8"
        ),
    ] = None,
    state: State = None,
) -> None:
    """Start what doesn't run yet, install queuectl's CRDs, and print how to point kubectl at it."""
    with _errors():
        from queuectl.local import controlplane

        running = controlplane.up(state or default_state(), real_nodes=real_nodes, real_gpus=real_gpus)
        _prepare(running, nodes)
        sys.stderr.write(f"The control plane is ready at {running.server}.\n")
        typer.echo(f"export KUBECONFIG={_quoted(running.kubeconfig)}")
        sys.stderr.write("Jobs wait until a controller runs; with that KUBECONFIG: queuectl controller\n")


@app.command()
def down(
    state: State = None,
    *,
    delete: Annotated[bool, typer.Option("--delete", help="Remove its data too.")] = False,
) -> None:
    """End what `up` started, and nothing else; its data stays for the next `up`."""
    with _errors():
        from queuectl.local import controlplane

        folder = state or default_state()
        known = folder.is_dir()
        ran = controlplane.down(folder, delete=delete)
    told = f"Ended {', '.join(ran)}" if ran else "Nothing ran"
    gone = f"; the data in {folder} is deleted" if delete and known else ""
    sys.stderr.write(f"{told}{gone}.\n")


@app.command()
def status(
    state: State = None,
    output: Annotated[Output, typer.Option("-o", "--output", help="Format.")] = Output.TABLE,
) -> None:
    """Show each component; exit code 1 unless all run."""
    with _errors():
        from dataclasses import asdict

        from queuectl.local import controlplane

        shown = controlplane.status(state or default_state())
        if output is Output.JSON:
            typer.echo(json.dumps([asdict(item) for item in shown], indent=2))
        else:
            typer.echo(f"{'COMPONENT':<24} {'STATUS':<8} {'PID':<8} PORT")
            for item in shown:
                word = "running" if item.running else "stopped"
                typer.echo(f"{item.component:<24} {word:<8} {item.pid or '-':<8} {item.port or '-'}")
    if not all(item.running for item in shown):
        raise typer.Exit(1)


def _prepare(running: "Running", nodes: int) -> None:
    import asyncio

    from queuectl.kube.client import KubeClient
    from queuectl.local.prepare import nodes_are_ready, prepare

    async def run() -> None:
        async with await KubeClient.open(str(running.kubeconfig)) as client:
            await prepare(client, nodes=nodes)
            await nodes_are_ready(client, running.real_nodes)

    asyncio.run(run())


@contextmanager
def _errors() -> Iterator[None]:
    """Show an expected error as one message on standard error, and exit with 1."""
    try:
        from queuectl.kube.client import ApiError, ApiUnreachableError
        from queuectl.local.errors import LocalError

        expected = (LocalError, ApiError, ApiUnreachableError)
    except ImportError as error:
        _fail(f"{error.name} is missing; run `pip install 'queuectl[local]'`.", error)
    try:
        yield
    except ImportError as error:
        _fail(f"{error.name} is missing; run `pip install 'queuectl[local]'`.", error)
    except expected as error:
        _fail(str(error), error)


def _fail(message: str, cause: Exception) -> None:
    sys.stderr.write(f"error: {message}\n")
    raise typer.Exit(1) from cause


def _quoted(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))
