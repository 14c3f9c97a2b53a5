"""The command tree. Verbs live in their own modules and import what is heavy only when they run."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from queuectl.cli import change, checkpoint, cluster, controller, jobs, local, maintenance, quota
from queuectl.cli.defrag import defrag
from queuectl.cli.errors import report
from queuectl.cli.forgive import forgive
from queuectl.cli.options import text
from queuectl.cli.simulate import simulate
from queuectl.cli.submit import submit

# As a plugin of kubectl's it is called kubectl-queuectl, and kubectl completes its words.
PLUGIN = Path(sys.argv[0]).stem == "kubectl-queuectl"
PROGRAM = "kubectl queuectl" if PLUGIN else "queuectl"


# Words of other command lines, and which of ours is meant.
_MEANT = {
    "delete": "cancel", "stop": "cancel", "kill": "cancel", "explain": "describe", "why": "describe", "show": "describe",
    "status": "get", "list": "get", "ls": "get", "jobs": "get", "create": "submit", "apply": "submit", "run": "submit",
    "suspend": "hold", "pause": "hold", "resume": "release", "drain": "maintenance", "cordon": "maintenance",
    "logs": "describe",  # it says which pod's
}  # fmt: skip


class _Commands(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; one that others call so is proposed."""
        if args[0] in _MEANT:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{_MEANT[args[0]]}'?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Invoke a command; what is said of a wrong value is without the words of the library that looks at it."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    name="queuectl",
    cls=_Commands,
    help="Batch queues and gang scheduling for GPU clusters on Kubernetes.",
    no_args_is_help=True,
    add_completion=not PLUGIN,
    rich_markup_mode=None,  # plain help starts twice as fast, and reads well off a terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it so
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _common(
    *,
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    """Batch queues and gang scheduling for GPU clusters on Kubernetes."""


app.command(
    short_help="Create what files describe, all of it or nothing.",
    help=text(
        "Create the TrainingJobs, Queues and ResourceFlavors that files describe, all of them or nothing.",
        "queuectl submit -f job.yaml",
        "queuectl submit -f queues.yaml -f jobs.yaml --dry-run",
        "generate-job | queuectl submit -f - -o name",
        "queuectl submit -f job.yaml --wait && echo succeeded",
        more="Everything is checked first: each object by itself, then that its queue, flavors and PriorityClass exist,"
        " that the queue's quota could ever hold it, and that the API server would accept its pods.",
    ),
)(submit)
app.command(
    short_help="List jobs.",
    help=text(
        "List jobs: where each one is, and why it waits.",
        "queuectl get",
        "queuectl get -A --phase Pending -o wide",
        "queuectl get -w --queue team-a",
        "queuectl get llm -o yaml",
        more="Without names, all jobs of the namespace. A table is cut to the terminal's width unless it is wide.",
    ),
)(jobs.get)
app.command(
    short_help="Show all about jobs.",
    help=text(
        "Show a job's spec in short, its state, why it waits, where its pods are, whose log to read, and its events.",
        "queuectl describe llm",
    ),
)(jobs.describe)
app.command(
    short_help="Stop and delete jobs.",
    help=text(
        "Stop jobs and delete them, and wait until they are gone.",
        "queuectl cancel llm",
        "queuectl cancel llm bert --no-wait",
        "queuectl cancel --all --dry-run",
        more="Asks first when it is several jobs and standard input is a terminal.",
    ),
)(change.cancel)
app.command(
    short_help="Keep waiting jobs from starting.",
    help=text(
        "Keep waiting jobs from starting; they keep their place in the queue.",
        "queuectl hold llm",
        more="A job that is past waiting is refused with exit code 4.",
    ),
)(change.hold)
app.command(
    short_help="Let held jobs start.",
    help=text("Let held jobs start when their turn comes.", "queuectl release llm"),
)(change.release)
app.command(
    short_help="Wait until jobs run or have ended.",
    help=text(
        "Wait until jobs have ended, or until they run.",
        "queuectl wait llm",
        "queuectl wait llm --for=running --timeout=2m",
        more="Exits with the job's own exit code when it has failed (1 when it has none), with 3 when it doesn't exist"
        " or is deleted meanwhile, and with 5 when the time is over. Of several jobs, the first that failed counts.",
    ),
)(change.wait)
app.command(
    short_help="Have running jobs save their work now.",
    help=text(
        "Have running jobs save their work now; they run on.",
        "queuectl checkpoint llm",
        "queuectl checkpoint llm --wait",
        more="A job says in spec.checkpoint how it is asked; one that is not running, or has no way to be asked while it"
        " runs, is refused with exit code 4. With --wait it exits with 5 when no checkpoint was made in time.",
    ),
)(checkpoint.checkpoint)
app.command(
    short_help="List queues.",
    help=text(
        "List queues: what waits and runs in each, and how much of its quotas is in use.",
        "queuectl queues",
        "queuectl queues team-a -o wide",
        more="Wide output has a line for each quota: NOMINAL is what the queue itself owns, TOTAL that and what the queues"
        " below it lend, USED what jobs use of the total. So a parent's USED counts its children's jobs, and a queue whose"
        " USED is above its TOTAL borrows the rest.",
    ),
)(cluster.queues)
app.command(
    short_help="List nodes and who holds their GPUs.",
    help=text(
        "List nodes: their GPUs, how many jobs of queuectl's hold, how many other pods hold, and how many are free.",
        "queuectl nodes",
        "queuectl nodes -o json",
        "queuectl nodes -w",
        more="Counted are pods that are bound to the node and have not ended. A Suspect node is one on which something bad"
        " happened to gangs; -o wide tells what, and until when no new gang goes onto it. MAINTENANCE is the NodeMaintenance"
        " that the node is under, and how far it has come.",
    ),
)(cluster.nodes)
app.command(
    short_help="Trust suspect nodes again.",
    help=text(
        "Forget what has happened to gangs on nodes until now, so that new ones go onto them again.",
        "queuectl forgive node-3",
        more="It is written on the node, as the annotation queuectl.dev/forgiven, so it needs the right to patch nodes.",
    ),
)(forgive)
app.command(
    short_help="Propose moves of running jobs that let waiting ones start.",
    help=text(
        "Propose moves of running jobs to other nodes, so that jobs can start for which there is room enough in all, and"
        " not together.",
        "queuectl defrag",
        "queuectl defrag --within 10m",
        "queuectl defrag -o json",
        more="Nothing is changed. Each job that would move has another place beside the one that starts, and may be taken"
        " by the rules of preemption: it is preemptible, has run for its queue's minRunSeconds, and its"
        " PodDisruptionBudgets allow it. LOSES is its work since its last checkpoint or start; PAYS AFTER is how long the"
        " waiting job has to run for as much work as all its moves cost, a restart of 600 s for each among it. Each"
        " proposal reckons with those above it. Read are the cluster and the controller's ledger.",
    ),
)(defrag)
app.command(
    short_help="Run scenarios in virtual time.",
    help=text(
        "Run scenarios in virtual time, and tell what happens and what differs from what they want.",
        "queuectl simulate scenario.yaml",
        "queuectl simulate scenarios/*.yaml --quiet",
        "queuectl simulate scenario.yaml -o json",
        more="No cluster is needed: a scenario describes its own, its queues and jobs, what happens when, and what is"
        " wanted; docs/scenarios.md has the form. Decisions are those of the controller. Exits with 6 when anything"
        " is not as wanted.",
    ),
)(simulate)
app.command("controller")(controller.run)
app.add_typer(maintenance.app, name="maintenance")
app.add_typer(quota.app, name="quota")
app.add_typer(controller.db, name="db")
app.add_typer(local.app, name="local")


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    typer.echo(installed("queuectl"))


def run() -> None:
    """Run the command line; errors become a message on stderr and a documented exit code."""
    if os.environ.get("KUBECONFIG") == "":
        del os.environ["KUBECONFIG"]  # as kubectl has it
    try:
        app(standalone_mode=True, prog_name=PROGRAM)
    except Exception as error:  # noqa: BLE001 - the outermost frame
        sys.exit(report(error))
