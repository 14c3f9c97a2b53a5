"""One run of a verb against a cluster."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

import typer

from queuectl.cli.errors import CommandError, Exit
from queuectl.kube.client import ApiError, KubeClient
from queuectl.kube.context import namespace_of
from queuectl.kube.names import jobs_path

# Kinds that others' command lines take in front of a name, and which of our verbs lists them.
_KINDS = dict.fromkeys(("queue", "queues", "q"), "queues") | dict.fromkeys(("node", "nodes", "no"), "nodes")


@dataclass(frozen=True, slots=True)
class Session:
    """A client, and the namespace that is meant (empty for all)."""

    client: KubeClient
    namespace: str

    def path(self, name: str = "") -> str:
        """Return the path of the namespace's jobs, or of one of them."""
        return jobs_path(self.namespace, name)

    async def job(self, name: str) -> dict[str, Any] | None:
        """Read a job; None when there is none of that name."""
        try:
            found: dict[str, Any] = await self.client.request("GET", self.path(name))
        except ApiError as error:
            if is_missing(error):
                return None
            raise
        return found

    async def need(self, name: str) -> dict[str, Any]:
        """Read a job. Raises CommandError when there is none of that name."""
        found = await self.job(name)
        if found is None:
            raise await self.no_job(name)
        return found

    async def no_job(self, name: str) -> CommandError:
        """Return the error for a job that doesn't exist."""
        otherwise = '"queuectl get -A" lists the jobs of all namespaces'
        if name in _KINDS:
            otherwise = f'"queuectl {_KINDS[name]}" lists {_KINDS[name]}, and this verb takes names of jobs'
        return await self.unknown(f'job "{name}" in namespace {self.namespace}', name, self.path(), otherwise)

    async def unknown(self, what: str, name: str, path: str, otherwise: str) -> CommandError:
        """Return the error for an object that doesn't exist, with those of its path that may be meant."""
        from queuectl.kube.problems import alike

        try:
            page = await self.client.request("GET", path, params={"limit": "500"})
        except ApiError:  # who may not list them has to do without
            page = {"items": ()}
        known = [one["metadata"]["name"] for one in page["items"]]
        return CommandError(f"no {what}; {alike(name, known) or otherwise}", Exit.NOT_FOUND)

    async def no_node(self, name: str) -> CommandError:
        """Return the error for a node that doesn't exist."""
        return await self.unknown(f'node "{name}"', name, "/api/v1/nodes", '"queuectl nodes" lists them')


def run(
    main: Callable[[Session], Awaitable[int]],
    *,
    kubeconfig: str | None,
    context: str | None,
    namespace: str | None = None,
    everywhere: bool = False,
) -> None:
    """Open a session, run the verb in it, and end with its exit code."""

    async def session() -> int:
        where = namespace_of(kubeconfig, context)
        async with await KubeClient.open(kubeconfig, context=context) as client:
            try:
                return await main(Session(client, "" if everywhere else namespace or where))
            except ApiError as error:
                raise explained(error) from error

    code = asyncio.run(session())
    if code:
        raise typer.Exit(code)


def tell(verb: Callable[[Session], Awaitable[str]], *, kubeconfig: str | None, context: str | None) -> None:
    """Open a session, run a verb in it, and print what it says that has been done."""

    async def main(here: Session) -> int:
        typer.echo(await verb(here))
        return Exit.DONE

    run(main, kubeconfig=kubeconfig, context=context)


def is_missing(error: ApiError) -> bool:
    """Tell whether an object is missing, and not the kind itself."""
    return error.status == 404 and bool(error.details.get("name"))  # noqa: PLR2004


def no_queue(name: str, known: Collection[str]) -> CommandError:
    """Return the error for a queue that doesn't exist."""
    from queuectl.kube.problems import nearest

    return CommandError(f'no queue "{name}"; {nearest(name, known)}', Exit.NOT_FOUND)


def explained(error: ApiError) -> Exception:
    """Return the error in words that say what to do, where the API server's own don't."""
    if error.status == 404 and not error.details.get("name"):  # noqa: PLR2004
        return CommandError(
            "this cluster doesn't know queuectl's kinds; an admin installs them with: kubectl apply -k crds",
            Exit.NOT_FOUND,
        )
    if error.status == 401:  # noqa: PLR2004
        return CommandError(
            f"the API server doesn't accept the kubeconfig's credentials ({error.message}); log in anew", Exit.REFUSED
        )
    return error


def say(message: str) -> None:
    """Tell people something that is not data."""
    sys.stderr.write(f"queuectl: {message}\n")
