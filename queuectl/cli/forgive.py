"""``queuectl forgive``: trust nodes again on which something bad happened to gangs."""

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from queuectl.cli.change import Names, each
from queuectl.cli.options import Context, Kubeconfig

if TYPE_CHECKING:
    from queuectl.cli.session import Session


def forgive(names: Names, *, kubeconfig: Kubeconfig = None, context: Context = None) -> None:
    """Trust nodes again on which something bad happened to gangs."""
    from queuectl.cli import session

    async def main(here: "session.Session") -> int:
        return await each(list(dict.fromkeys(names)), lambda name: _forgive_one(here, name))

    session.run(main, kubeconfig=kubeconfig, context=context)


async def _forgive_one(here: "Session", name: str) -> None:
    from queuectl.cli.session import is_missing
    from queuectl.kube.client import MERGE_PATCH, ApiError
    from queuectl.kube.names import FORGIVEN, SUSPECT

    path = f"/api/v1/nodes/{name}"
    try:
        node = await here.client.request("GET", path)
    except ApiError as error:
        if not is_missing(error):
            raise
        raise await here.no_node(name) from error
    told = next((c for c in node["status"].get("conditions") or () if c["type"] == SUSPECT), None)
    if told is None or told["status"] != "True":
        typer.echo(f"node/{name} not suspect")
        return
    # Later than the last offence that was told, also where this machine's clock is behind.
    at = max(time.time(), datetime.fromisoformat(told["lastTransitionTime"]).timestamp() + 1)
    stamp = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    body = {"metadata": {"uid": node["metadata"]["uid"], "annotations": {FORGIVEN: stamp}}}
    await here.client.request("PATCH", path, body=body, content_type=MERGE_PATCH)
    typer.echo(f"node/{name} forgiven")
