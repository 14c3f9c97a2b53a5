"""``queuectl queues`` and ``queuectl nodes``."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from queuectl.cli.errors import Exit
from queuectl.cli.options import Context, Kubeconfig, Output, OutputForm, Watch
from queuectl.cli.render import Table, show_data, show_objects

if TYPE_CHECKING:
    from queuectl.cli.session import Session
    from queuectl.model.devices import DeviceClaim, Slice
    from queuectl.model.maintenance import Maintenance
    from queuectl.model.objects import Flavor, Node, Pod

Object = dict[str, Any]
Names = Annotated[list[str] | None, typer.Argument(metavar="NAME", show_default=False)]

_QUEUE_COLUMNS = ("NAME", "PARENT", "ORDER", "PENDING", "RUNNING", "READY")
_QUOTA_COLUMNS = ("FLAVOR", "RESOURCE", "USED", "TOTAL", "NOMINAL")
_NODE_COLUMNS = ("NAME", "STATE", "FLAVOR", "RESOURCE", "GPUS", "HELD", "OTHERS", "FREE", "MAINTENANCE")
_LABEL_COLUMNS = ("MODEL", "UNIT", "DRIVER", "PROBLEMS", "SUSPECT")  # what labels tell, what can't be right, offences
_PAUSE = 0.2  # seconds in which changes of nodes and pods are gathered


def queues(
    names: Names = None,
    *,
    watch: Watch = False,
    output: OutputForm = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """List queues."""
    from queuectl.cli import session

    async def main(here: "session.Session") -> int:
        from queuectl.kube.listing import list_objects
        from queuectl.kube.names import API

        found = {queue["metadata"]["name"]: queue for queue in await list_objects(here.client, f"{API}/queues")}
        missing = [name for name in names or () if name not in found]
        shown = [queue for name, queue in sorted(found.items()) if not names or name in names]
        wide = output is Output.WIDE
        table = Table((*_QUEUE_COLUMNS, *(_QUOTA_COLUMNS if wide else ())), wide=wide)

        def show(queues: Sequence[Object], *, one: bool) -> None:
            if output in {None, Output.WIDE}:
                table.show(row for queue in queues for row in queue_rows(queue, wide=wide))
            else:
                show_objects(queues, str(output), one=one)

        if not shown and not missing and output is None:
            session.say("no queues; an admin makes them: queuectl submit -f queue.yaml")
        if shown or output in {Output.JSON, Output.YAML}:
            show(shown, one=len(names or ()) == 1 and bool(shown))
        if watch:
            await _watch_queues(here, shown, names, lambda queue: show([queue], one=True))
        for name in missing:
            session.say(str(session.no_queue(name, found)))
        return Exit.NOT_FOUND if missing else Exit.DONE

    session.run(main, kubeconfig=kubeconfig, context=context)


async def _watch_queues(here: "Session", shown: Sequence[Object], names: Sequence[str] | None, show: Any) -> None:
    from queuectl.cli.watching import changes
    from queuectl.kube.names import API

    printed = {queue["metadata"]["resourceVersion"] for queue in shown}
    async with changes(here.client, f"{API}/queues") as seen:
        async for _, new in seen:
            if new and (not names or new["metadata"]["name"] in names):
                if new["metadata"]["resourceVersion"] not in printed:
                    show(new)
                printed.discard(new["metadata"]["resourceVersion"])


def queue_rows(queue: Object, *, wide: bool) -> Iterable[list[object]]:
    """Return a queue's row; when wide, one for each of its quotas."""
    spec, status = queue["spec"], queue.get("status") or {}
    told: Mapping[str, Mapping[str, str]] = {c["type"]: c for c in status.get("conditions") or ()}
    ready = {"True": "yes", "False": f"no: {told.get('Ready', {}).get('message')}"}.get(
        told.get("Ready", {}).get("status", "")
    )
    state = "; ".join(filter(None, (ready, told.get("EvictionBlocked", {}).get("message"))))
    row: list[object] = [
        queue["metadata"]["name"],
        spec.get("parent"),
        spec.get("order"),
        status.get("pending", 0),
        status.get("running", 0),
        state,
    ]
    if not wide:
        return [row]
    quotas = [
        [r["flavor"], r["resource"], r["amount"], r.get("total", r["nominal"]), r["nominal"]]
        for r in status.get("reserved") or [{**q, "amount": 0} for q in spec.get("quotas") or ()]
    ]
    return [[*row, *quota] for quota in quotas or [[None] * len(_QUOTA_COLUMNS)]]


# Nodes


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of one resource on one node. ``held`` by pods of jobs, ``others`` by pods that aren't queuectl's.

    ``unit``: what one of them is: a whole GPU, a slice, or what several pods share.
    """

    resource: str
    total: int
    held: int
    others: int
    free: int
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Under:
    """The NodeMaintenance that a node is under or waits for, and how far the node has come."""

    name: str
    phase: str


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as ``nodes`` shows it, and as its JSON and YAML are."""

    name: str
    state: str
    flavors: tuple[str, ...]
    gpus: tuple[Gpus, ...]
    model: str
    driver: str
    problems: tuple[str, ...]
    suspect: str = ""  # what happened to gangs there, and until when it gets no new ones
    maintenance: Under | None = None

    def rows(self, *, wide: bool = False) -> list[list[object]]:
        """Return a row for each kind of GPU; one for a node that has none."""
        head = [self.name, self.state, ",".join(self.flavors)]
        gpus = self.gpus or (Gpus("", 0, 0, 0, 0),)
        more = [[self.model, g.unit, self.driver, "; ".join(self.problems), self.suspect] if wide else [] for g in gpus]
        under = f"{self.maintenance.name}:{self.maintenance.phase}" if self.maintenance else ""
        return [
            [*head, g.resource, g.total, g.held, g.others, g.free, under, *m] for g, m in zip(gpus, more, strict=True)
        ]


def nodes(
    names: Names = None,
    *,
    watch: Watch = False,
    output: OutputForm = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """List nodes and who holds their GPUs."""
    from queuectl.cli import session

    async def main(here: "session.Session") -> int:
        views = await _read(here)
        missing = [name for name in names or () if name not in {view.name for view in views}]
        shown = [view for view in views if not names or view.name in names]
        wide = output is Output.WIDE
        table = Table((*_NODE_COLUMNS, *(_LABEL_COLUMNS if wide else ())), wide=wide)
        if not shown and not missing and output is None:
            session.say("no nodes")
        if shown or output in {Output.JSON, Output.YAML}:
            _show(shown, output, table, one=len(names or ()) == 1 and bool(shown))
        if watch:
            await _watch_nodes(here, shown, names, lambda view: _show([view], output, table, one=True))
        for name in missing:
            session.say(str(await here.no_node(name)))
        return Exit.NOT_FOUND if missing else Exit.DONE

    session.run(main, kubeconfig=kubeconfig, context=context)


def _show(views: Sequence[NodeView], output: Output | None, table: Table, *, one: bool) -> None:
    match output:
        case None | Output.WIDE:
            table.show(row for view in views for row in view.rows(wide=output is Output.WIDE))
        case Output.NAME:
            for view in views:
                typer.echo(f"node/{view.name}")
        case _:
            data = [_plain(view) for view in views]
            show_data(data[0] if one else data, output)


def _plain(view: NodeView) -> Object:
    gpus = [asdict(gpus) for gpus in view.gpus]
    return {**asdict(view), "flavors": list(view.flavors), "gpus": gpus, "problems": list(view.problems)}


async def _read(here: "Session") -> list[NodeView]:
    from queuectl.kube import decode
    from queuectl.kube.listing import list_raw
    from queuectl.kube.names import API, claims_path, slices_path
    from queuectl.model.faults import DEFAULT_RULES

    running = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
    flavors, maintenances, found, pods = await asyncio.gather(
        list_raw(here.client, f"{API}/resourceflavors"),
        _maintenances(here),
        list_raw(here.client, "/api/v1/nodes"),
        list_raw(here.client, "/api/v1/pods", **running),
    )
    kinds = [decode.flavor(raw).value for raw in flavors]
    slices, claims = (
        [await list_raw(here.client, path) for path in (slices_path(), claims_path())]
        if any(flavor.devices for flavor in kinds)
        else ([], [])
    )
    return views(
        kinds,
        [decode.node(raw, DEFAULT_RULES.conditions).value for raw in found],
        [decode.pod(raw).value for raw in pods],
        [decode.resource_slice(raw).value for raw in slices],
        [decode.resource_claim(raw).value for raw in claims],
        maintenances=maintenances,
    )


async def _maintenances(here: "Session") -> list["Maintenance"]:
    """Return all NodeMaintenances; none where they can't be read, for not everybody who sees nodes may."""
    from queuectl.kube.client import ApiError
    from queuectl.kube.listing import list_raw
    from queuectl.kube.maintenance import PATH, maintenance

    try:
        return [maintenance(raw).value for raw in await list_raw(here.client, PATH)]
    except ApiError as error:
        if error.status not in {403, 404}:
            raise
        return []


def views(
    flavors: Sequence["Flavor"],
    nodes: Sequence["Node"],
    pods: Iterable["Pod"],
    slices: Iterable["Slice"] = (),
    claims: Sequence["DeviceClaim"] = (),
    *,
    maintenances: Sequence["Maintenance"] = (),
) -> list[NodeView]:
    """Return what ``nodes`` shows, by name."""
    from queuectl.model.devices import inventory
    from queuectl.model.gpus import Claim, problems

    on: dict[str, list[Slice]] = {}
    for one in slices:
        on.setdefault(one.node, []).append(one)
    under = _under(maintenances, nodes)
    used: dict[tuple[str, str, bool], int] = {}
    for pod in pods:
        for resource, amount in pod.requests:  # of pods that are bound and haven't ended
            key = (pod.node, resource, bool(pod.workload))
            used[key] = used.get(key, 0) + amount
    result = []
    for node in sorted(nodes, key=lambda node: node.name):
        mine = [f for f in flavors if all(node.labels.get(k) == v for k, v in f.node_labels)]
        gpus = []
        named = inventory(node.name, on.get(node.name, ()), mine)
        counts = {f.devices.resource: 0 for f in mine if f.devices} | Counter(d.resource for d in named.devices)
        for claim, device in ((c, named.names[d]) for c in claims for d in c.devices if d in named.names):
            key = (node.name, device.resource, bool(claim.workload))
            used[key] = used.get(key, 0) + (not claim.implied)
        for resource, total in sorted({**node.allocatable, **counts}.items()):
            unit = _unit(node, resource, mine)
            if unit:
                held, others = used.get((node.name, resource, True), 0), used.get((node.name, resource, False), 0)
                gpus.append(Gpus(resource, total, held, others, max(0, total - held - others), unit))
        signs = {"Cordoned": node.unschedulable, "Suspect": node.suspect, "Faulty": node.faults}
        state = ",".join(("Ready" if node.ready else "NotReady", *(sign for sign, shown in signs.items() if shown)))
        wrong = problems(node.labels, node.allocatable, [Claim(f.name, f.gpu_model, f.gpus) for f in mine])
        names = tuple(f.name for f in mine)
        wrong += [*named.problems, *node.faults]
        kind = node.gpus if node.gpus.model else named.gpus
        result.append(
            NodeView(
                node.name, state, names, tuple(gpus), kind.model, kind.driver, tuple(wrong), node.suspect,
                under.get(node.name),
            )
        )  # fmt: skip
    return result


def _under(maintenances: Sequence["Maintenance"], nodes: Sequence["Node"]) -> dict[str, Under]:
    """Return by node the maintenance whose it is, of those that it is known to be under or to wait for."""
    from queuectl.core.maintenance import owners

    known = {one.name: {state.name: state.phase.value for state in one.states} for one in maintenances}
    whose = owners(maintenances, {node.name: node for node in nodes}, time.time())
    return {node: Under(name, known[name][node]) for node, name in whose.items() if node in known[name]}


def _unit(node: "Node", resource: str, flavors: Sequence["Flavor"]) -> str:
    """Say what a unit of a resource is; empty when it is no GPU, neither by its name nor by a flavor's word."""
    from queuectl.core.cards import weigh
    from queuectl.model.gpus import SHARED, weight
    from queuectl.model.resources import MIG

    if not weight(resource) and not any(weigh(resource, flavor) for flavor in flavors):
        return ""
    unit = node.gpus.of(resource)
    profile = resource.removesuffix(SHARED).removeprefix(MIG) if resource.startswith(MIG) else unit.slice
    words = ([f"slice {profile}"] if profile else []) + (["shared"] if unit.shared or resource.endswith(SHARED) else [])
    return " ".join(words) or "whole"


async def _watch_nodes(here: "Session", shown: Sequence[NodeView], names: Sequence[str] | None, show: Any) -> None:
    from queuectl.cli.watching import log_to_stderr
    from queuectl.kube import decode
    from queuectl.kube.informer import Informer
    from queuectl.kube.maintenance import PATH, maintenance
    from queuectl.kube.names import API, claims_path, slices_path
    from queuectl.model.faults import DEFAULT_RULES

    log_to_stderr()
    changed, devices = asyncio.Event(), asyncio.Event()

    def on_change(_: object, __: object) -> None:
        changed.set()

    def on_flavor(_: object, new: "Flavor | None") -> None:
        changed.set()
        if new is not None and new.devices is not None:
            devices.set()

    flavors = Informer(here.client, f"{API}/resourceflavors", decode.flavor, on_flavor)
    node = partial(decode.node, faulty=DEFAULT_RULES.conditions)
    nodes = Informer(here.client, "/api/v1/nodes", node, on_change)
    pods = Informer(here.client, "/api/v1/pods", decode.pod, on_change)
    slices = Informer(here.client, slices_path(), decode.resource_slice, on_change, after=devices)
    claims = Informer(here.client, claims_path(), decode.resource_claim, on_change, after=devices)
    at_once = asyncio.Event()
    at_once.set()
    maintenances = Informer(here.client, PATH, maintenance, on_change, after=at_once)
    informers: tuple[Informer[Any], ...] = (flavors, nodes, pods, slices, claims, maintenances)
    printed = {view.name: view for view in shown}
    async with asyncio.TaskGroup() as group:
        for informer in informers:
            group.create_task(informer.run())
        for informer in informers:
            if informer.needed:
                await informer.synced.wait()
        while True:
            changed.clear()
            now = views(
                [item.value for item in flavors.objects.values()],
                [item.value for item in nodes.objects.values()],
                [item.value for item in pods.objects.values()],
                [item.value for item in slices.objects.values()],
                [item.value for item in claims.objects.values()],
                maintenances=[item.value for item in maintenances.objects.values()],
            )
            for view in now:
                if printed.get(view.name) != view and (not names or view.name in names):
                    show(view)
                    printed[view.name] = view
            await changed.wait()
            await asyncio.sleep(_PAUSE)
