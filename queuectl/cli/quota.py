"""``queuectl quota``."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from queuectl.cli import controller
from queuectl.cli.errors import CommandError, Exit
from queuectl.cli.options import Context, Kubeconfig, Output, OutputForm, text
from queuectl.cli.render import Table, resource_name, show_data

if TYPE_CHECKING:
    from queuectl.cli.session import Session

Object = dict[str, Any]

app = typer.Typer(help="Edit quotas, and see who changed them.", no_args_is_help=True)

_TRIES = 5  # of an edit that others' writes come before
_PARTS = {"nominal": "nominal", "borrowingLimit": "borrowing_limit", "lendingLimit": "lending_limit"}  # in the ledger
_COLUMNS = ("WHEN", "QUEUE", "FLAVOR", "RESOURCE", "NOMINAL", "BORROWING", "LENDING", "WHO", "WHY")
_LIMIT = typer.Option(metavar="AMOUNT|none", help="New limit, or none.", show_default=False)


@app.command(
    "set",
    short_help="Edit a quota.",
    help=text(
        "Edit a quota of a queue: its nominal amount, its limits, or both.",
        'queuectl quota set research --nominal 64 --why "the new servers are here"',
        "queuectl quota set research --flavor h100 --borrowing-limit none --why trial --dry-run",
        more="Flavor and resource may be left out where only one quota can be meant. Others' edits of the same moment"
        " are kept. Who and why go on record with the change; what becomes of running jobs that the quota no longer"
        " covers is the queue's whenOverQuota.",
    ),
)
def change(
    queue: Annotated[str, typer.Argument(metavar="QUEUE", show_default=False)],
    *,
    why: Annotated[str, typer.Option(metavar="TEXT", help="Why it is changed.", show_default=False)],
    flavor: Annotated[str | None, typer.Option(metavar="NAME", help="Flavor of the quota.")] = None,
    resource: Annotated[str | None, typer.Option(metavar="NAME", help="Resource of the quota.")] = None,
    nominal: Annotated[str | None, typer.Option(metavar="AMOUNT", help="New amount that the queue owns.")] = None,
    borrowing_limit: Annotated[str | None, _LIMIT] = None,
    lending_limit: Annotated[str | None, _LIMIT] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Let the API server check it and change nothing.")] = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Edit a quota."""
    given = {"nominal": nominal, "borrowingLimit": borrowing_limit, "lendingLimit": lending_limit}
    wanted = {part: _amount(value) for part, value in given.items() if value is not None}
    if not wanted:
        raise CommandError("nothing is to be changed; give --nominal, --borrowing-limit or --lending-limit", Exit.USAGE)
    if nominal == "none":
        raise CommandError("--nominal: a queue's own amount can't be none; write 0 or more", Exit.USAGE)
    if not why.strip():
        raise CommandError("--why is empty; say in a few words why the quota is changed", Exit.USAGE)
    from queuectl.cli import session

    session.tell(
        lambda here: _edit(here, queue, (flavor, resource), wanted, why.strip(), dry_run=dry_run),
        kubeconfig=kubeconfig,
        context=context,
    )


@app.command(
    short_help="Show who changed which quota, when and why.",
    help=text(
        "Show the latest changes of quotas, newest first: when, of which queue, from and to, who and why.",
        "queuectl quota history",
        "queuectl quota history research --limit 5 -o json",
        more="All changes are on record, also those by kubectl or from a repository; the record is in the ledger's"
        " database. Beside a running controller with an embedded PostgreSQL, that one is asked.",
    ),
)
def history(
    queue: Annotated[str | None, typer.Argument(metavar="QUEUE", show_default=False)] = None,
    *,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")] = 20,
    output: OutputForm = None,
    database_url: controller.DatabaseUrl = None,
    data: controller.Data = None,
) -> None:
    """Show changes of quotas."""
    settings = controller.ledger_settings(database_url, data)
    with controller.database(settings, shared=True) as url:
        rows = asyncio.run(_history(url, queue or "", limit))
    if output in {Output.JSON, Output.YAML}:
        show_data([_tidy(row) for row in rows], str(output))
    elif rows:
        Table(_COLUMNS, wide=output is Output.WIDE).show(_row(row) for row in rows)
    else:
        of = f" of queue {queue}" if queue else ""
        raise CommandError(
            f"no change{of} is on record; the controller records a quota when it first sees it", Exit.NOT_FOUND
        )


async def _edit(
    here: "Session",
    name: str,
    which: tuple[str | None, str | None],
    wanted: Mapping[str, int | str | None],
    why: str,
    *,
    dry_run: bool,
) -> str:
    """Write the edit upon the queue as it is, and return what has changed."""
    from queuectl.cli.preflight import DRY_RUN
    from queuectl.cli.session import is_missing
    from queuectl.kube.client import MERGE_PATCH, ApiError
    from queuectl.kube.names import API, CHANGE_WHY

    path = f"{API}/queues/{name}"
    for last_try in (*[False] * (_TRIES - 1), True):
        try:
            found: Object = await here.client.request("GET", path)
        except ApiError as error:
            if is_missing(error):
                lists = '"queuectl queues" lists them'
                raise await here.unknown(f'queue "{name}"', name, f"{API}/queues", lists) from error
            raise
        quotas = found["spec"].get("quotas") or []
        chosen = _chosen(name, quotas, which)
        changes = [
            f"{part} {_told(chosen.get(part))} -> {_told(new)}"
            for part, new in wanted.items()
            if str(chosen.get(part)) != str(new)
        ]
        what = f"{resource_name(found)} {chosen['flavor']} {chosen['resource']}"
        if not changes:
            return f"{what}: already so"
        edited = {key: value for key, value in {**chosen, **wanted}.items() if value is not None}
        # Said anew: the API server takes unchanged words for those of the change before, so they get a blank more.
        before = (found["metadata"].get("annotations") or {}).get(CHANGE_WHY)
        # With the version that was looked at: nobody's edit since then is overwritten.
        meta = {
            "resourceVersion": found["metadata"]["resourceVersion"],
            "annotations": {CHANGE_WHY: f"{why} " if before == why else why},
        }
        body = {"metadata": meta, "spec": {"quotas": [edited if quota is chosen else quota for quota in quotas]}}
        params = DRY_RUN if dry_run else {"fieldValidation": "Strict"}
        try:
            await here.client.request("PATCH", path, params=params, body=body, content_type=MERGE_PATCH)
        except ApiError as error:
            if error.status != 409 or last_try:  # noqa: PLR2004
                raise
            continue
        return f"{what}: {', '.join(changes)}" + (" (server dry run)" if dry_run else "")
    raise AssertionError


def _chosen(name: str, quotas: Sequence[Object], which: tuple[str | None, str | None]) -> Object:
    """Return the one quota that is meant. Raises CommandError when it is none or not clear which."""
    flavor, resource = which
    found = [q for q in quotas if flavor in {None, q["flavor"]} and resource in {None, q["resource"]}]
    if len(found) == 1:
        return found[0]
    known = "; ".join(f"--flavor {q['flavor']} --resource {q['resource']}" for q in quotas) or "none"
    if found:
        raise CommandError(f"queue {name} has {len(found)} such quotas; name one: {known}", Exit.USAGE)
    asked = " ".join(part for part in (flavor and f"of flavor {flavor}", resource and f"for {resource}") if part)
    raise CommandError(f"queue {name} has no quota {asked}; it has: {known}".replace("  ", " "), Exit.NOT_FOUND)


def _amount(value: str) -> int | str | None:
    """Return a quantity as it stands in a manifest; None removes a limit."""
    if value == "none":
        return None
    return int(value) if value.isascii() and value.isdigit() else value


def _told(value: object) -> str:
    return "none" if value is None else str(value)


async def _history(url: str, queue: str, limit: int) -> list[Object]:
    from queuectl.store.engine import open_engine
    from queuectl.store.ledger import Ledger

    engine = open_engine(url)
    try:
        return await Ledger(engine).quota_history(queue, limit=limit)
    finally:
        await engine.dispose()


def _row(row: Object) -> Sequence[object]:
    amounts: list[object] = []
    for part in _PARTS.values():
        old, new = (_quantity(row, f"{way}_{part}") for way in ("from", "to"))
        amounts.append(new if old == new else f"{old}->{new}")
    when = f"{datetime.fromtimestamp(row['changed_at'], UTC):%Y-%m-%dT%H:%M:%SZ}"
    return [when, row["queue"], row["flavor"], row["resource"], *amounts, row["changed_by"], row["why"]]


def _tidy(row: Object) -> Object:
    """Return a change as data: amounts as in a manifest, null for none."""
    sides = {
        way: {name: _quantity(row, f"{way}_{part}", none=None) for name, part in _PARTS.items()}
        for way in ("from", "to")
    }
    when = datetime.fromtimestamp(row["changed_at"], UTC).isoformat()
    head = {name: row[name] for name in ("queue", "flavor", "resource")}
    return {"at": when, **head, **sides, "by": row["changed_by"], "why": row["why"]}


def _quantity(row: Object, column: str, none: str | None = "none") -> str | None:
    from queuectl.model.resources import format_quantity

    return none if row[column] is None else format_quantity(row["resource"], row[column])
