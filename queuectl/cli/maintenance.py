"""``queuectl maintenance``."""

import asyncio
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from queuectl.cli.errors import CommandError, Exit
from queuectl.cli.options import Context, Kubeconfig, Output, OutputForm, seconds, text
from queuectl.cli.render import Table, age, resource_name, show_objects

if TYPE_CHECKING:
    from queuectl.cli.session import Session

Object = dict[str, Any]

app = typer.Typer(help="Have jobs leave nodes that somebody works on, in an order.", no_args_is_help=True)

_COLUMNS = ("NAME", "WORK", "PHASE", "DONE", "AGE", "MESSAGE")
_NODE_COLUMNS = ("NODE", "PHASE", "SINCE", "MESSAGE")
_WINDOW = "times as 2026-12-24T22:00:00Z, a slash between them: START/END, START/ or /END"
_POLL_SECONDS = 0.5
_NAMED = 5
Nodes = Annotated[list[str] | None, typer.Argument(metavar="NODE...", show_default=False)]


@app.command(
    short_help="Begin maintenance of nodes.",
    help=text(
        "Have jobs leave nodes, a few nodes at a time, so that somebody can work on them.",
        "queuectl maintenance start gpu-07 gpu-08 --reason 'new fans'",
        "queuectl maintenance start -l rack=b2 --driver-upgrade --max-unavailable 25% --test-image nvcr.io/nvidia/cuda"
        " --test-command nvidia-smi",
        "queuectl maintenance start gpu-07 --window 2026-12-24T22:00:00Z/2026-12-25T04:00:00Z",
        more="A node's jobs are asked to save their work, and go back to their queues; then it is Safe, and \"queuectl"
        ' maintenance done" says that the work on it is done. With --driver-upgrade the GPU Operator works on it, and'
        " says so. What the options can't say is said in a NodeMaintenance.",
    ),
)
def start(
    nodes: Nodes = None,
    *,
    selector: Annotated[
        str | None, typer.Option("-l", "--selector", metavar="LABELS", help="Nodes with these labels, such as a=b.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Its name; made up when absent.")] = None,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Why; the jobs' owners are told.")] = None,
    driver_upgrade: Annotated[
        bool, typer.Option("--driver-upgrade", help="The work is the GPU Operator's upgrade of the driver.")
    ] = False,
    window: Annotated[str | None, typer.Option(metavar="START/END", help=f"When; {_WINDOW}.")] = None,
    max_unavailable: Annotated[
        str, typer.Option(metavar="NUMBER|PERCENT", help="How many of the nodes at a time.")
    ] = "1",
    canary: Annotated[int, typer.Option(min=0, help="How many go first, and are released before the others.")] = 1,
    test_image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Image of a pod that verifies each node; none when absent.")
    ] = None,
    test_command: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Its command; the image's own when absent.")
    ] = None,
    test_gpus: Annotated[int, typer.Option(min=0, help="How many GPUs (nvidia.com/gpu) it asks for.")] = 1,
    wait_for_jobs: Annotated[bool, typer.Option("--wait-for-jobs", help="Let jobs run to their end.")] = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Begin maintenance of nodes."""
    if bool(nodes) == bool(selector):
        raise CommandError("name the nodes, or give --selector; one of the two", Exit.USAGE)
    spec: Object = {"nodes": list(dict.fromkeys(nodes))} if nodes else {"nodeSelector": _labels(selector or "")}
    spec |= {"maxUnavailable": int(max_unavailable) if max_unavailable.isdecimal() else max_unavailable}
    spec |= {"canary": canary, "drain": "Wait" if wait_for_jobs else "Checkpoint"}
    spec |= {"work": "DriverUpgrade" if driver_upgrade else "Manual"}
    if reason:
        spec["reason"] = reason
    if window:
        spec["window"] = _window(window)
    if test_image:
        container: Object = {"name": "test", "image": test_image}
        if test_command:
            container["command"] = shlex.split(test_command)
        if test_gpus:
            container["resources"] = {"limits": {"nvidia.com/gpu": test_gpus}}
        spec["test"] = {"template": {"spec": {"containers": [container]}}}
    elif test_command:
        raise CommandError("--test-command needs --test-image", Exit.USAGE)
    from queuectl.cli import session

    meta = {"name": name} if name else {"generateName": "maintenance-"}
    session.tell(lambda here: _start(here, meta, spec), kubeconfig=kubeconfig, context=context)


@app.command(
    short_help="Show how far maintenance has come.",
    help=text(
        "Show how far maintenance has come: of all, or of one with each of its nodes.",
        "queuectl maintenance status",
        "queuectl maintenance status driver-580",
        "kubectl wait --for=condition=Finished --timeout=4h nm/driver-580",
        more="A node is Pending, Draining while jobs leave it, Safe to work on, Verifying, Released or Skipped; or Failed,"
        " which halts the rest.",
    ),
)
def status(
    name: Annotated[str | None, typer.Argument(metavar="NAME", show_default=False)] = None,
    *,
    output: OutputForm = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show how far maintenance has come."""
    from queuectl.cli import session

    async def main(here: "session.Session") -> int:
        found = [await _need(here, name)] if name else await _all(here)
        if output not in {None, Output.WIDE}:
            show_objects(found, str(output), one=name is not None)
            return Exit.DONE
        if not found:
            session.say("no maintenance; queuectl maintenance start begins one")
            return Exit.DONE
        Table(_COLUMNS, wide=output is Output.WIDE).show(_row(one) for one in found)
        if name:
            typer.echo()
            Table(_NODE_COLUMNS, wide=output is Output.WIDE).show(_node_row(one) for one in _nodes(found[0]))
            safe = next((node["name"] for node in _nodes(found[0]) if node["phase"] == "Safe"), None)
            if safe and found[0]["spec"]["work"] == "Manual":
                session.say(f"once the work on it is done: queuectl maintenance done {safe}")
        return Exit.DONE

    session.run(main, kubeconfig=kubeconfig, context=context)


@app.command(
    short_help="Say that the work on nodes is done.",
    help=text(
        "Say that the work on nodes is done: they are verified, if there is a test, and released.",
        "queuectl maintenance done gpu-07",
        more="Of a node that has failed it says that it is good all the same. A node whose turn has not come is left out"
        " (Skipped): no job leaves it, and no test runs."
        " The same is said by the annotation queuectl.dev/maintenance-done on the node.",
    ),
)
def done(
    nodes: Annotated[list[str], typer.Argument(metavar="NODE...", show_default=False)],
    *,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Say that the work on nodes is done."""
    from queuectl.cli import session
    from queuectl.cli.change import each

    async def main(here: "session.Session") -> int:
        under: dict[str, Object] = {}
        for one in await _all(here):
            for node in _nodes(one):
                of = {"maintenance": one["metadata"]["name"], "waits": node["phase"] == "Pending"}
                known = under.get(node["name"])
                if node["phase"] not in {"Released", "Skipped"} and (known is None or known["waits"]):
                    under[node["name"]] = of
        return await each(list(dict.fromkeys(nodes)), lambda node: _done(here, node, under))

    session.run(main, kubeconfig=kubeconfig, context=context)


@app.command(
    short_help="End maintenance and release its nodes.",
    help=text(
        "End maintenance, whatever has been done, and release its nodes: those that queuectl has cordoned take pods again.",
        "queuectl maintenance cancel driver-580",
        more="Nodes that are held back from the GPU Operator's driver upgrade are so no longer: to keep the driver that they"
        " have, set its version back first.",
    ),
)
def cancel(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
    *,
    wait: Annotated[bool, typer.Option(help="Wait until the nodes are released.")] = True,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="How long to wait at most.")] = "1m",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """End maintenance and release its nodes."""
    limit = seconds(timeout)
    from queuectl.cli import session

    async def end(here: "session.Session") -> str:
        one = await _need(here, name)
        await here.client.request("DELETE", _path(name), body={"preconditions": {"uid": one["metadata"]["uid"]}})
        if wait:
            await _until_released(here, name, limit)
        return f"{resource_name(one)} {'cancelled, its nodes are released' if wait else 'cancelled'}"

    session.tell(end, kubeconfig=kubeconfig, context=context)


async def _start(here: "Session", meta: Mapping[str, str], spec: Object) -> str:
    from queuectl.kube.client import ApiError
    from queuectl.kube.names import API_VERSION

    nodes = await _cluster_nodes(here)
    known = {node["metadata"]["name"] for node in nodes}
    if unknown := [node for node in spec.get("nodes", ()) if node not in known]:
        from queuectl.kube.problems import nearest

        raise CommandError(f'no node "{unknown[0]}"; {nearest(unknown[0], known)}', Exit.NOT_FOUND)
    wanted = spec.get("nodeSelector")
    if wanted and not any(wanted.items() <= (node["metadata"].get("labels") or {}).items() for node in nodes):
        given = ",".join(f"{key}={value}" for key, value in wanted.items())
        raise CommandError(f"no node has the labels {given}; kubectl get nodes --show-labels", Exit.NOT_FOUND)
    body = {"apiVersion": API_VERSION, "kind": "NodeMaintenance", "metadata": dict(meta), "spec": spec}
    try:
        made = await here.client.request("POST", _path(), body=body, params={"fieldValidation": "Strict"})
    except ApiError as error:
        if error.reason != "AlreadyExists":
            raise
        hint = f"choose another --name, or: queuectl maintenance status {meta['name']}"
        raise CommandError(f'maintenance "{meta["name"]}" exists already; {hint}', Exit.REFUSED) from None
    return f"{resource_name(made)} created; queuectl maintenance status {made['metadata']['name']} shows how far it is"


async def _done(here: "Session", node: str, under: Mapping[str, Object]) -> None:
    from queuectl.kube.client import MERGE_PATCH
    from queuectl.kube.maintenance import DONE

    if node not in under:
        if node not in {one["metadata"]["name"] for one in await _cluster_nodes(here)}:
            raise await here.no_node(node)
        raise CommandError(f"node {node} is under no maintenance that is not done with it", Exit.REFUSED)
    said = datetime.now(UTC).isoformat(timespec="seconds")
    body = {"metadata": {"annotations": {DONE: said}}}
    await here.client.request("PATCH", f"/api/v1/nodes/{node}", body=body, content_type=MERGE_PATCH)
    name, waits = under[node]["maintenance"], under[node]["waits"]
    told = (
        f"left out of maintenance {name}: its turn had not come" if waits else f"said to be done, of maintenance {name}"
    )
    typer.echo(f"node/{node} {told}")


async def _until_released(here: "Session", name: str, limit: float) -> None:
    from queuectl.kube.maintenance import mark

    deadline = time.monotonic() + limit
    while True:
        nodes = await _cluster_nodes(here)
        left = [
            node["metadata"]["name"]
            for node in nodes
            if mark(node["metadata"].get("annotations") or {}).maintenance == name
        ]
        if not left:
            return
        if time.monotonic() >= deadline:
            more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
            raise CommandError(
                f"maintenance {name} is cancelled, but {', '.join(left[:_NAMED])}{more} not released within {limit:g} s;"
                " no controller may be running",
                Exit.TIMED_OUT,
            )
        await asyncio.sleep(_POLL_SECONDS)


async def _cluster_nodes(here: "Session") -> list[Object]:
    from queuectl.kube.listing import list_objects

    return await list_objects(here.client, "/api/v1/nodes")


async def _all(here: "Session") -> list[Object]:
    from queuectl.kube.listing import list_objects

    found = await list_objects(here.client, _path())
    return sorted(found, key=lambda one: str(one["metadata"]["creationTimestamp"]))


async def _need(here: "Session", name: str) -> Object:
    from queuectl.cli.session import is_missing
    from queuectl.kube.client import ApiError

    try:
        found: Object = await here.client.request("GET", _path(name))
    except ApiError as error:
        if not is_missing(error):
            raise
        lists = '"queuectl maintenance status" lists them all'
        raise await here.unknown(f'maintenance "{name}"', name, _path(), lists) from None
    return found


def _path(name: str = "") -> str:
    from queuectl.kube.maintenance import PATH

    return f"{PATH}/{name}" if name else PATH


def _nodes(one: Object) -> Sequence[Object]:
    return (one.get("status") or {}).get("nodes") or ()


def _row(one: Object) -> list[object]:
    told, meta = one.get("status") or {}, one["metadata"]
    message = told.get("message", "not seen by a controller yet")
    return [
        meta["name"],
        one["spec"]["work"],
        told.get("phase"),
        told.get("done"),
        age(meta["creationTimestamp"]),
        message,
    ]


def _node_row(node: Object) -> list[object]:
    phase = f"{node['phase']} (canary)" if node.get("canary") else node["phase"]
    return [node["name"], phase, age(node["since"]), node.get("message")]


def _labels(given: str) -> dict[str, str]:
    pairs = [part.strip().partition("=") for part in given.split(",")]
    for key, sign, value in pairs:
        if not key or not sign or not value:
            raise CommandError(
                f'--selector: "{given}" is not key=value; write rack=b2 or rack=b2,pool=h100', Exit.USAGE
            )
    return {key: value for key, _, value in pairs}


def _window(given: str) -> dict[str, str]:
    start, slash, end = given.partition("/")
    found = {}
    for which, moment in (("start", start), ("end", end)):
        try:
            at = datetime.fromisoformat(moment) if moment else None
        except ValueError:
            at, slash = None, ""
        if at is not None and at.tzinfo is None:
            slash = ""
        if at is not None:
            found[which] = at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    if not slash or not found:
        raise CommandError(f'--window: "{given}" is not a window; write {_WINDOW}', Exit.USAGE)
    return found
