"""``queuectl defrag``."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from queuectl.cli import controller
from queuectl.cli.errors import Exit
from queuectl.cli.options import Context, Kubeconfig, Namespace, Output, OutputForm, seconds
from queuectl.cli.render import Table, duration, show_data

if TYPE_CHECKING:
    from queuectl.cli.session import Session
    from queuectl.control.settings import Settings
    from queuectl.core.defrag import Proposal, Relocation
    from queuectl.model.plan import Placement

Object = dict[str, Any]

_COLUMNS = ("FOR", "STARTS ON", "MOVE", "FROM", "TO", "LOSES", "PAYS AFTER")


def defrag(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", show_default=False)] = None,
    *,
    within: Annotated[
        str, typer.Option(metavar="DURATION", help="Only moves that the waiting job has made up for by then.")
    ] = "1h",
    apply: Annotated[
        bool, typer.Option("--apply", help="Ask the controller for these moves; it decides anew whether to make them.")
    ] = False,
    wait: Annotated[bool, typer.Option(help="With --apply: wait until the waiting jobs run.")] = True,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="With --apply: how long to wait at most.")] = "10m",
    output: OutputForm = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    database_url: controller.DatabaseUrl = None,
    data: controller.Data = None,
) -> None:
    """Propose moves of running jobs that let waiting ones start, those named or any, or have the moves made."""
    limit, patience = seconds(within, "--within"), seconds(timeout)
    settings = controller.ledger_settings(database_url, data)
    from queuectl.cli import session

    with controller.database(settings, shared=True) as url:

        async def main(here: "session.Session") -> int:
            found = await _proposals(here, settings, url, limit, names)
            if output in {Output.JSON, Output.YAML}:
                show_data([_plain(proposal) for proposal in found], str(output))
            elif output is Output.NAME:
                for move in (move for proposal in found for move in proposal.moves):
                    typer.echo(f"trainingjob.queuectl.dev/{move.gang.name.rpartition('/')[2]}")
            elif found:
                rows = (row for proposal in found for row in _rows(proposal))
                Table(_COLUMNS, wide=output is Output.WIDE).show(rows)
            else:
                session.say(f"no move would let a waiting job start and pay within {duration(limit)}")
            if not apply:
                return Exit.DONE
            from queuectl.cli.moves import Asked

            asked = [Asked.of(here.client, proposal, limit) for proposal in found]
            codes = [await one.ask() for one in asked]
            if wait and not any(codes):
                codes = await asyncio.gather(*(one.wait(patience) for one in asked))
            return next(filter(None, codes), Exit.DONE)

        session.run(main, kubeconfig=kubeconfig, context=context, namespace=namespace)


async def _proposals(
    here: "Session", settings: "Settings", url: str, within: float, names: Sequence[str] | None
) -> "list[Proposal]":
    from queuectl.control import feed
    from queuectl.core.defrag import proposals
    from queuectl.core.snapshot import Policy
    from queuectl.store.engine import open_engine
    from queuectl.store.ledger import Ledger

    only = {(await here.need(name))["metadata"]["uid"] for name in names} if names else None
    namespace = await here.client.request("GET", "/api/v1/namespaces/kube-system")
    engine = open_engine(url)
    try:
        ledger = Ledger(engine)
        await ledger.bind(namespace["metadata"]["uid"])
        policy = Policy(fair_sharing=settings.fair_sharing, usage_half_life=settings.usage_half_life)
        world = await feed.look(here.client, ledger, policy, settings.fault_rules)
    finally:
        await engine.dispose()
    now = time.time()
    return proposals(world.snapshot(now), world.gangs.movable(), now, within, only)


def _rows(proposal: "Proposal") -> Iterable[Sequence[object]]:
    gang = proposal.gang
    pays = duration(proposal.pays_after)
    for move in proposal.moves:
        yield [
            f"{gang.namespace}/{gang.name}", _told(proposal.admission.placements), move.gang.name,
            _told(move.gang.placements), _told(move.to), move.lost, pays,
        ]  # fmt: skip


def _told(placements: "Iterable[Placement]") -> str:
    return ",".join(f"{node}:{pods}" if pods > 1 else node for node, pods in _by_node(placements).items())


def _by_node(placements: "Iterable[Placement]") -> dict[str, int]:
    from queuectl.model.resources import total

    return dict(sorted(total({p.node: p.pods} for p in placements).items()))


def _plain(proposal: "Proposal") -> Object:
    """Return a proposal as data."""
    gang = proposal.gang
    return {
        "job": f"{gang.namespace}/{gang.name}",
        "queue": gang.queue,
        "nodes": _by_node(proposal.admission.placements),
        "moves": [_plain_move(move) for move in proposal.moves],
        "givesWay": [victim.name for victim in proposal.victims],
        "paysAfterSeconds": round(proposal.pays_after),
    }


def _plain_move(move: "Relocation") -> Object:
    return {
        "job": move.gang.name,
        "queue": move.gang.queue,
        "from": _by_node(move.gang.placements),
        "to": _by_node(move.to),
        "lostGpuSeconds": move.lost.gpu_seconds,
        "lostPodSeconds": move.lost.pod_seconds,
    }
