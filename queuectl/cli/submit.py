"""``queuectl submit``."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from queuectl.cli.errors import CommandError, Exit
from queuectl.cli.options import Context, Kubeconfig, Namespace, ObjectOutput, seconds
from queuectl.cli.render import resource_name, show_objects

if TYPE_CHECKING:
    from queuectl.cli.documents import Document
    from queuectl.cli.session import Session

_ORDER = ("ResourceFlavor", "Queue", "TrainingJob", "NodeMaintenance")  # what others name comes first
_SHOWN = 50  # problems told at once


def submit(
    files: Annotated[
        list[str], typer.Option("-f", "--filename", metavar="FILE", help="File to read; - is standard input.")
    ],
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the API server check everything and create nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Submit even what the queue's quota can never hold.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the jobs have ended; exit as wait does.")] = False,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="With --wait: how long at most.")] = "24h",
    output: Annotated[ObjectOutput | None, typer.Option("-o", "--output", help="Form of the output.")] = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Create what files describe, all of it or nothing."""
    limit = seconds(timeout)
    from queuectl.cli import session
    from queuectl.cli.documents import check, read

    documents = read(files)

    async def main(here: "session.Session") -> int:
        from queuectl.cli import preflight

        for document in documents:
            check(document, namespace, here.namespace)
        _refuse(documents)
        await preflight.check(here.client, documents, force=force, tell=session.say)
        _refuse(documents)
        created = await _create(here, documents, dry_run=dry_run)
        if output is None:
            for item in created:
                typer.echo(f"{resource_name(item)} created" + (" (server dry run)" if dry_run else ""))
        else:
            show_objects(created, output, one=len(created) == 1)
        if not wait or dry_run:
            return Exit.DONE
        return await _wait(here, created, limit)

    session.run(main, kubeconfig=kubeconfig, context=context, namespace=namespace)


def _refuse(documents: Iterable["Document"]) -> None:
    lines = [line for document in documents for line in document.lines()]
    if len(lines) == 1:
        raise CommandError(lines[0], Exit.REFUSED)
    if lines:
        rest = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        told = "\n  ".join(("nothing was created:", *lines[:_SHOWN], *rest))
        raise CommandError(told, Exit.REFUSED)


async def _create(here: "Session", documents: Sequence["Document"], *, dry_run: bool) -> list[dict[str, Any]]:
    from queuectl.cli.preflight import DRY_RUN, refusal
    from queuectl.kube.client import ApiError

    params = DRY_RUN if dry_run else {"fieldValidation": "Strict"}
    created: list[dict[str, Any]] = []
    for document in sorted(documents, key=lambda document: _ORDER.index(document.kind)):
        try:
            created.append(await here.client.request("POST", document.path, params=params, body=document.data))
        except ApiError as error:
            # It passed the same check a moment ago, so something else has changed since.
            before = ", ".join(resource_name(item) for item in created) or "nothing"
            told = f"{document.source}: {refusal(error, document)} (created before that: {before})"
            raise CommandError(told, Exit.REFUSED) from error
    return created


async def _wait(here: "Session", created: Sequence[dict[str, Any]], limit: float) -> int:
    from dataclasses import replace

    from queuectl.cli.change import For, wait_for

    by_namespace: dict[str, list[str]] = {}
    for item in created:
        if item["kind"] == "TrainingJob":
            by_namespace.setdefault(item["metadata"]["namespace"], []).append(item["metadata"]["name"])
    codes = [
        await wait_for(replace(here, namespace=namespace), names, For.FINISHED, limit)
        for namespace, names in by_namespace.items()
    ]
    return next((code for code in codes if code), Exit.DONE)
