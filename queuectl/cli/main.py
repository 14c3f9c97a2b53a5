"""The command tree. Verbs live in their own modules and import what is heavy only when they run."""

import sys

import typer

from queuectl.cli import controller, local
from queuectl.cli.errors import report

app = typer.Typer(
    name="queuectl",
    help="Batch queues and gang scheduling for GPU clusters on Kubernetes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("controller")(controller.run)
app.add_typer(controller.db, name="db")
app.add_typer(local.app, name="local")


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    typer.echo(installed("queuectl"))


def run() -> None:
    """Run the command line; errors become one line on stderr and a documented exit code."""
    try:
        app(standalone_mode=True)
    except Exception as error:  # noqa: BLE001 - the outermost frame
        sys.exit(report(error))
