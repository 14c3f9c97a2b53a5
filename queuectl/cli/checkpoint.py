"""``queuectl checkpoint``: have jobs save their work now."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from queuectl.cli.change import Names, each, until
from queuectl.cli.errors import CommandError, Exit
from queuectl.cli.jobs import phase_of
from queuectl.cli.options import Context, Kubeconfig, Namespace, PhaseName, seconds
from queuectl.cli.render import resource_name

if TYPE_CHECKING:
    from queuectl.cli.session import Session

Object = dict[str, Any]

_MARGIN = 15.0  # seconds beyond the job's own grace, until its status says what came of it


def checkpoint(
    names: Names,
    *,
    wait: Annotated[bool, typer.Option(help="Wait until the checkpoint is made, and say where it is.")] = False,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How long to wait at most; default what the job may take, and 15 s."),
    ] = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Have running jobs save their work now."""
    limit = seconds(timeout) if timeout else None
    from queuectl.cli import session

    async def main(here: "session.Session") -> int:
        return await each(list(dict.fromkeys(names)), lambda name: _ask(here, name, limit, wait=wait))

    session.run(main, kubeconfig=kubeconfig, context=context, namespace=namespace)


async def _ask(here: "Session", name: str, limit: float | None, *, wait: bool) -> None:
    from queuectl.kube.client import MERGE_PATCH
    from queuectl.kube.names import SAVE_ASKED

    job = await here.need(name)
    phase, rules = phase_of(job), job["spec"].get("checkpoint")
    over = phase in {PhaseName.SUCCEEDED, PhaseName.FAILED}
    if not over and (rules is None or rules["signal"] == "SigTerm"):  # else it would wait for what never comes
        raise CommandError(
            f"job {name} can't be asked while it runs: spec.checkpoint {'is not set' if rules is None else 'has signal SigTerm'};"
            " give it signal Annotation, HTTP or Exec",
            Exit.REFUSED,
        )
    if phase != PhaseName.RUNNING:
        raise CommandError(f"job {name} is {phase}: only a running job can be asked", Exit.REFUSED)
    before = _last(job)
    # Later than anything that is known of it, also where this machine's clock is behind.
    known = [_unix(before["time"])] if before else []
    at = max(time.time(), *(one + 1 for one in (*known, _unix(job["status"]["startedAt"]))))
    written = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    body = {"metadata": {"uid": job["metadata"]["uid"], "annotations": {SAVE_ASKED: written}}}
    await here.client.request("PATCH", here.path(name), body=body, content_type=MERGE_PATCH)
    if not wait:
        typer.echo(f"{resource_name(job)} asked to save its work")
        return
    job = await until(
        here,
        name,
        lambda job: _last(job) != before or phase_of(job) != PhaseName.RUNNING,
        limit or rules["graceSeconds"] + _MARGIN,
    )
    last = _last(job)
    if last is None or last == before:
        raise CommandError(f"job {name} is {phase_of(job)} and has not saved its work", Exit.REFUSED)
    where = " ".join(f"{key} {last[key]}" for key in ("step", "path") if key in last)
    typer.echo(f"{resource_name(job)} saved at {last['time']}{': ' if where else ''}{where}")


def _last(job: Object) -> Mapping[str, Any] | None:
    last: Mapping[str, Any] | None = (job.get("status") or {}).get("lastCheckpoint")
    return last


def _unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
