"""``queuectl cancel``, ``hold``, ``release`` and ``wait``."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from queuectl.cli.errors import CommandError, Exit
from queuectl.cli.jobs import phase_of
from queuectl.cli.options import Context, Kubeconfig, Namespace, PhaseName, Selector, seconds
from queuectl.cli.render import resource_name

if TYPE_CHECKING:
    from queuectl.cli.session import Session

Object = dict[str, Any]
Names = Annotated[list[str], typer.Argument(metavar="NAME...")]

_TRIES = 5  # of a change that others' writes come before
_AT_ONCE = 16


class For(StrEnum):
    """What ``wait`` waits for."""

    RUNNING = "running"
    FINISHED = "finished"


def cancel(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", show_default=False)] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Cancel all jobs of the namespace.")] = False,
    selector: Selector = None,
    wait: Annotated[bool, typer.Option(help="Wait until pods and jobs are gone.")] = True,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="How long to wait at most.")] = "5m",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be cancelled.")] = False,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Stop and delete jobs."""
    limit = seconds(timeout)
    if bool(names) + every + bool(selector) != 1:
        raise CommandError("give the names of jobs, or --all, or -l with labels", Exit.USAGE)
    from queuectl.cli import session

    async def main(here: "session.Session") -> int:
        chosen = list(dict.fromkeys(names or ())) or await _all_names(here, selector)
        if not chosen:
            session.say(f"no jobs{f' with labels {selector}' if selector else ''} in namespace {here.namespace}")
        if len(chosen) > 1 and not (yes or dry_run) and sys.stdin.isatty():
            typer.confirm(f"Cancel {len(chosen)} jobs in namespace {here.namespace}?", abort=True, err=True)
        # In the body: next to one, the API server doesn't look at the query, and would delete in earnest.
        options: Object = {"propagationPolicy": "Background"} | ({"dryRun": ["All"]} if dry_run else {})

        async def one(name: str) -> None:
            job = await here.need(name)
            body = options | {"preconditions": {"uid": job["metadata"]["uid"]}}
            await here.client.request("DELETE", here.path(name), body=body)
            if wait and not dry_run:
                await _until_gone(here, job, limit)
            typer.echo(f"{resource_name(job)} cancelled" + (" (server dry run)" if dry_run else ""))

        return await each(chosen, one)

    session.run(main, kubeconfig=kubeconfig, context=context, namespace=namespace)


def hold(names: Names, *, namespace: Namespace = None, kubeconfig: Kubeconfig = None, context: Context = None) -> None:
    """Keep waiting jobs from starting."""
    _set_hold(names, hold=True, kubeconfig=kubeconfig, context=context, namespace=namespace)


def release(
    names: Names, *, namespace: Namespace = None, kubeconfig: Kubeconfig = None, context: Context = None
) -> None:
    """Let held jobs start."""
    _set_hold(names, hold=False, kubeconfig=kubeconfig, context=context, namespace=namespace)


def wait(
    names: Names,
    *,
    what: Annotated[For, typer.Option("--for", help="What to wait for.")] = For.FINISHED,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="How long to wait at most.")] = "10m",
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Wait until jobs run or have ended."""
    limit = seconds(timeout)
    from queuectl.cli import session

    async def main(here: "session.Session") -> int:
        return await wait_for(here, names, what, limit)

    session.run(main, kubeconfig=kubeconfig, context=context, namespace=namespace)


async def wait_for(here: "Session", names: Sequence[str], what: For, limit: float) -> int:
    """Wait for each job and say what it has come to; return the first code that isn't 0."""
    from queuectl.cli import session

    codes: dict[str, int] = {}

    async def one(name: str) -> None:
        await here.need(name)  # so that a wrong name is told, and an API server that doesn't answer
        job = await until(here, name, lambda job: reached(job, what), limit)
        typer.echo(f"{resource_name(job)} {phase_of(job)}")
        codes[name] = exit_code(job)
        if phase_of(job) == PhaseName.FAILED:
            session.say(f'job {name}: {job["status"]["message"]} "queuectl describe {name}" tells more')

    failed = await each(list(dict.fromkeys(names)), one, at_once=len(names))
    return failed or next((codes[name] for name in names if codes.get(name)), Exit.DONE)


def reached(job: Object, what: For) -> bool:
    """Tell whether a job has come so far; one that has ended isn't waited for any longer."""
    phases = {PhaseName.SUCCEEDED, PhaseName.FAILED} | ({PhaseName.RUNNING} if what is For.RUNNING else set())
    return phase_of(job) in phases


def exit_code(job: Object) -> int:
    """Return the job's own exit code; 1 when it failed without one, 0 while it runs."""
    if phase_of(job) != PhaseName.FAILED:
        return 0
    return int((job.get("status") or {}).get("exitCode") or 1)


async def until(here: "Session", name: str, holds: Callable[[Object], bool], limit: float) -> Object:
    """Return the job once it is as wanted. Raises CommandError when it is deleted or the limit is over."""
    from queuectl.cli.watching import changes

    last: Object | None = None
    try:
        async with asyncio.timeout(limit), changes(here.client, here.path(), name=name) as seen:
            async for old, new in seen:
                last = new or (last if old is None else None)
                if last is None:
                    raise await here.no_job(name) if old is None else _deleted(name)
                if holds(last):
                    return last
    except TimeoutError as error:
        status = (last or {}).get("status") or {}
        state = f"{phase_of(last or {})}: {status.get('message', 'no controller has looked at it yet')}"
        raise CommandError(f"job {name}: not within {limit:g} s; it is {state}", Exit.TIMED_OUT) from error
    raise AssertionError


async def each(names: Sequence[str], do: Callable[[str], Awaitable[None]], *, at_once: int = _AT_ONCE) -> int:
    """Do something to each job and tell of every failure; return the exit code of the first one."""
    from queuectl.cli.errors import report
    from queuectl.cli.session import explained
    from queuectl.kube.client import ApiError

    gate = asyncio.Semaphore(max(1, at_once))

    async def one(name: str) -> int:
        async with gate:
            try:
                await do(name)
            except CommandError as error:
                return report(error)
            except ApiError as error:
                return report(explained(error))
        return Exit.DONE

    codes = await asyncio.gather(*(one(name) for name in names))
    return next((code for code in codes if code), Exit.DONE)


def _deleted(name: str) -> CommandError:
    return CommandError(f"job {name} was deleted while it was waited for", Exit.NOT_FOUND)


async def _all_names(here: "Session", selector: str | None) -> list[str]:
    from queuectl.kube.listing import list_objects

    params = {"labelSelector": selector} if selector else {}
    return [job["metadata"]["name"] for job in await list_objects(here.client, here.path(), **params)]


async def _until_gone(here: "Session", job: Object, limit: float) -> None:
    from queuectl.cli.watching import changes

    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    present: set[str] = set()
    try:
        async with asyncio.timeout(limit), changes(here.client, here.path(), name=name) as seen:
            async for old, new in seen:
                if new is not None:
                    present.add(new["metadata"]["uid"])
                elif old is not None:
                    present.discard(old["metadata"]["uid"])
                if uid not in present and (new is None):
                    return
    except TimeoutError as error:
        raise CommandError(
            f"job {name} is being deleted, but not gone within {limit:g} s; its pods may take long to stop, or no"
            f' controller runs. "queuectl describe {name}" shows what is left',
            Exit.TIMED_OUT,
        ) from error


def _set_hold(
    names: Sequence[str], *, hold: bool, kubeconfig: str | None, context: str | None, namespace: str | None
) -> None:
    from queuectl.cli import session

    async def main(here: "session.Session") -> int:
        return await each(list(dict.fromkeys(names)), lambda name: _hold_one(here, name, hold=hold))

    session.run(main, kubeconfig=kubeconfig, context=context, namespace=namespace)


async def _hold_one(here: "Session", name: str, *, hold: bool) -> None:
    from queuectl.kube.client import MERGE_PATCH, ApiError

    for last_try in (*[False] * (_TRIES - 1), True):
        job = await here.need(name)
        if problem := too_late(job, hold=hold):
            raise CommandError(problem, Exit.REFUSED)
        if bool(job["spec"].get("hold")) == hold:
            typer.echo(f"{resource_name(job)} {'is held already' if hold else f'is not held: it is {_state(job)}'}")
            return
        # With the version that was looked at: a job that starts in this moment isn't held by surprise.
        body = {"metadata": {"resourceVersion": job["metadata"]["resourceVersion"]}, "spec": {"hold": hold}}
        try:
            await here.client.request("PATCH", here.path(name), body=body, content_type=MERGE_PATCH)
        except ApiError as error:
            if error.status != 409 or last_try:  # noqa: PLR2004
                raise
            continue
        typer.echo(f"{resource_name(job)} {'held' if hold else 'released'}")
        return


def too_late(job: Object, *, hold: bool) -> str | None:
    """Say why a job can't be held, or released; None: it can. One on its way back to its queue waits there soon."""
    name, phase, word = job["metadata"]["name"], phase_of(job), "hold" if hold else "release"
    if phase in {PhaseName.SUCCEEDED, PhaseName.FAILED}:
        return f"job {name} is {phase}: it has ended, so there is nothing to {word}"
    if job["metadata"].get("deletionTimestamp"):
        return f"job {name} is being deleted, so there is nothing to {word}"
    goes_back = phase in {PhaseName.CHECKPOINTING, PhaseName.STOPPING} and any(
        one["type"] == "Evicted" and one["status"] == "True" for one in job["status"].get("conditions") or ()
    )
    if not hold or phase == PhaseName.PENDING or goes_back:
        return None
    return (
        f"job {name} is {phase}: only a waiting job can be held. To stop it: queuectl cancel {name};"
        " to run it later, submit it again with hold: true"
    )


def _state(job: Object) -> str:
    """Say where a job is, and for what it waits."""
    phase, reason = phase_of(job), (job.get("status") or {}).get("reason")
    return f"{phase} ({reason})" if phase == PhaseName.PENDING and reason else phase
