"""Short ways to make the vocabulary's values for tests."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from queuectl.core.backlog import Backlog
from queuectl.core.fleet import Fleet
from queuectl.core.snapshot import Snapshot
from queuectl.core.tree import Tree
from queuectl.model import gpus
from queuectl.model.objects import (
    Constraints,
    Flavor,
    Gang,
    GpuNeed,
    Node,
    NodeTerm,
    Queue,
    QueueOrder,
    Requirement,
    Role,
    Taint,
    Toleration,
)
from queuectl.model.plan import Placement
from queuectl.model.policy import Quota
from queuectl.model.resources import is_extended, parse_quantity

GPU = "nvidia.com/gpu"
GI = 2**30
HCA: dict[str, Any] = {"rdma/hca": 1}  # an extended resource that is no GPU
Requests = tuple[tuple[str, int], ...]


def amounts(*, gpu: int = 0, cpu: str | int = 0, memory: str | int = 0, **other: int) -> dict[str, int]:
    """Return resource → amount; resources that are zero are left out."""
    given = {GPU: gpu, "cpu": parse_quantity("cpu", cpu), "memory": parse_quantity("memory", memory), **other}
    return {resource: amount for resource, amount in given.items() if amount}


def requests(**given: Any) -> Requests:
    """Return what a pod requests, `pods: 1` included."""
    return tuple(sorted({"pods": 1, **amounts(**given)}.items()))


def node(
    name: str,
    *,
    gpu: int = 8,
    cpu: str | int = 96,
    memory: str | int = "1Ti",
    pods: int = 110,
    labels: Mapping[str, str] | None = None,
    taints: Iterable[Taint] = (),
    unschedulable: bool = False,
    ready: bool = True,
    **other: int,
) -> Node:
    """Return a GPU server."""
    allocatable = amounts(gpu=gpu, cpu=cpu, memory=memory, **other) | {"pods": pods}
    return Node(name, labels or {}, tuple(taints), allocatable, unschedulable, ready, gpus.read(labels or {}))


def role(
    name: str = "worker",
    pods: int = 1,
    *,
    selector: Mapping[str, str] | None = None,
    terms: Iterable[NodeTerm] = (),
    tolerations: Iterable[Toleration] = (),
    must_succeed: bool = True,
    need: GpuNeed | None = None,
    least: int | None = None,
    **asks: Any,
) -> Role:
    """Return a role of `pods` pods that request `asks` each; `need` is filled in with the devices among these."""
    if need is not None:
        need = replace(need, resources=tuple(r for r, _ in requests(**asks) if is_extended(r)))
    constraints = Constraints(tuple(sorted((selector or {}).items())), tuple(terms), tuple(tolerations), need)
    return Role(name, pods, requests(**asks), constraints, must_succeed, least)


def gang(name: str, *roles: Role, **given: Any) -> Gang:
    """Return a gang of queue "q" with uid and name `name`."""
    settings: dict[str, Any] = {"queue": "q", "priority": 0, "submitted_at": 0.0} | given
    return Gang(uid=name, namespace="team", name=name, roles=roles, **settings)


def flavor(
    name: str = "any",
    *,
    labels: Mapping[str, str] | None = None,
    tolerations: Iterable[Toleration] = (),
    model: str = "",
    gpus: Mapping[str, int] | None = None,
) -> Flavor:
    """Return a flavor of all nodes, or of those with the labels. `gpus`: what a unit of a resource counts as."""
    known = tuple((gpus or {}).items())
    return Flavor(name, tuple(sorted((labels or {}).items())), tuple(tolerations), model, gpus=known)


def queue(name: str = "q", *, strict: bool = False, **quotas: Mapping[str, int]) -> Queue:
    """Return a queue with quotas: flavor → resource → amount; by default plenty of GPUs of flavor "any"."""
    order = QueueOrder.STRICT_FIFO if strict else QueueOrder.BEST_EFFORT_FIFO
    given = quotas or {"any": {GPU: 10_000}}
    owned = {(kind, resource): Quota(amount) for kind, parts in given.items() for resource, amount in parts.items()}
    return Queue(name, order=order, quotas=owned)


def needs(key: str, operator: str, *values: str) -> Requirement:
    """Return one expression of a node selector."""
    return Requirement(key, operator, values)


def fleet(
    nodes: Iterable[Node] = (),
    *,
    others: Iterable[tuple[str, Requests]] = (),
    reserved: Iterable[tuple[str, Requests, int]] = (),
) -> Fleet:
    """Return a fleet with others' pods and reservations."""
    result = Fleet()
    for one in nodes:
        result.set_node(one)
    for name, asked in others:
        result.use(name, asked, +1)
    for name, asked, count in reserved:
        result.reserve(name, asked, count)
    return result


def snapshot(
    waiting: Iterable[Gang],
    *,
    nodes: Iterable[Node] | Fleet = (),
    queues: Iterable[Queue] | None = None,
    flavors: Iterable[Flavor] | None = None,
    usage: Mapping[tuple[str, str, str], int] | None = None,
    broken: Mapping[str, str] | None = None,
) -> Snapshot:
    """Return a view of a world with queue "q" and flavor "any", unless others are given."""
    known = {one.name: one for one in ([queue()] if queues is None else queues)}
    tree = Tree.of(known.values())
    for (name, kind, resource), amount in (usage or {}).items():
        tree.add(name, {(kind, resource): amount})
    return Snapshot(
        queues=known,
        flavors={one.name: one for one in ([flavor()] if flavors is None else flavors)},
        waiting=Backlog(waiting),
        fleet=nodes if isinstance(nodes, Fleet) else fleet(nodes),
        tree=tree,
        later=tree.copy(),
        broken_queues=dict(broken or {}),
    )


def spread(placements: Iterable[Placement]) -> dict[str, dict[str, int]]:
    """Return role → node → pods."""
    result: dict[str, dict[str, int]] = {}
    for placement in placements:
        result.setdefault(placement.role, {})[placement.node] = placement.pods
    return result
