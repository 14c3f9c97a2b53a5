"""``queuectl simulate``."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from queuectl.cli.errors import CommandError, Exit
from queuectl.cli.render import Table, show_data

if TYPE_CHECKING:
    from queuectl.cli.documents import Document
    from queuectl.simulate.clockwork import Run


class RunOutput(StrEnum):
    """Forms in which a run is printed."""

    JSON = "json"
    YAML = "yaml"


def simulate(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Scenarios; - is standard input.")],
    *,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print only what differs from what is wanted.")] = False,
    output: Annotated[
        RunOutput | None, typer.Option("-o", "--output", help="Form of the output; default a timeline.")
    ] = None,
) -> None:
    """Run scenarios in virtual time, and tell what differs from what they want."""
    from queuectl.cli.documents import read
    from queuectl.model.reasons import counted
    from queuectl.simulate import form
    from queuectl.simulate.clockwork import run
    from queuectl.simulate.verdict import differences

    documents = read(files, what="scenario", fields="nodes, queues and jobs; docs/scenarios.md has the form")
    scenarios = [(document, _scenario(document, form.read)) for document in documents]
    failed = 0
    shown: list[dict[str, Any]] = []
    for document, scenario in scenarios:
        result = run(scenario)
        found = differences(scenario, result)
        failed += bool(found)
        title = f"{document.source}: {scenario.name}" if scenario.name else document.source
        if output is not None:
            shown.append({"source": document.source, "name": scenario.name, **_data(result), "differences": found})
            continue
        if not quiet:
            typer.echo(f"# {title}")
            _show(result)
        for line in found:
            typer.echo(f"{document.source}: differs: {line}")
        if not found and not quiet:
            typer.echo("as wanted\n" if scenario.want else "nothing is wanted\n")
    if output is not None:
        show_data(shown, output)
    if failed:
        raise CommandError(f"not as wanted: {failed} of {counted(len(scenarios), 'scenario')}", Exit.UNMET)


def _scenario(document: "Document", read: Any) -> Any:
    try:
        return read(document.data)
    except ValueError as error:
        lines = "\n".join(f"  {line}" for line in str(error).splitlines())
        raise CommandError(f"{document.source} is not a scenario:\n{lines}", Exit.REFUSED) from error


def _show(result: "Run") -> None:
    table = Table(("TIME", "JOB", "WHAT", "WHY"), wide=True)
    table.show((f"{entry.at:g}", entry.job, entry.what, entry.why) for entry in result.timeline)


def _data(result: "Run") -> dict[str, Any]:
    return {
        "timeline": [
            {"time": entry.at, "job": entry.job, "what": entry.what, "reason": entry.code, "message": entry.why}
            for entry in result.timeline
        ]
    }
