"""Nodes, from the API server's bytes."""

from collections.abc import Collection

import msgspec

from queuectl.kube import faults
from queuectl.kube.decode.common import Bytes, Condition, Meta, SeenTaint, seconds
from queuectl.kube.informer import Item
from queuectl.kube.maintenance import mark
from queuectl.kube.names import FORGIVEN, SUSPECT
from queuectl.model import gpus
from queuectl.model.objects import Node, Taint
from queuectl.model.resources import is_extended, parse_quantity


class _NodeSpec(msgspec.Struct):
    taints: list[SeenTaint] = []
    unschedulable: bool = False


class _NodeStatus(msgspec.Struct):
    allocatable: dict[str, str] = {}
    capacity: dict[str, str] = {}
    conditions: list[Condition] = []


class _Node(msgspec.Struct):
    metadata: Meta
    spec: _NodeSpec = msgspec.field(default_factory=_NodeSpec)
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)


_decode_node = msgspec.json.Decoder(_Node).decode


def node(raw: Bytes, faulty: Collection[tuple[str, str]] = ()) -> Item[Node]:
    """Decode a node; raises ValueError when it announces nonsense. ``faulty``: the conditions that count as faults."""
    seen = _decode_node(raw)
    held = {c.type: c for c in seen.status.conditions if c.status == "True"}
    since = next((c.last_transition_time for c in seen.status.conditions if c.type == "Ready"), None)
    offers = {resource: parse_quantity(resource, q) for resource, q in seen.status.allocatable.items()}
    has = {
        resource: parse_quantity(resource, q) for resource, q in seen.status.capacity.items() if is_extended(resource)
    }
    value = Node(
        name=seen.metadata.name,
        labels=seen.metadata.labels,
        taints=tuple(Taint(t.key, t.value, t.effect) for t in seen.spec.taints),
        allocatable=offers,
        broken={resource: n - offers.get(resource, 0) for resource, n in has.items() if n > offers.get(resource, 0)},
        unschedulable=seen.spec.unschedulable,
        ready="Ready" in held,
        unready_since=since.timestamp() if since is not None and "Ready" not in held else None,
        uid=seen.metadata.uid,
        created_at=seen.metadata.creation_timestamp.timestamp() if seen.metadata.creation_timestamp else 0.0,
        forgiven_at=seconds(seen.metadata.annotations.get(FORGIVEN)) or 0.0,
        suspect=held[SUSPECT].message if SUSPECT in held else "",
        gpus=gpus.read(seen.metadata.labels),
        mark=mark(seen.metadata.annotations),
        faults=faults.of_node(seen.status.conditions, faulty),
    )
    return Item(seen.metadata.name, seen.metadata.resource_version, value)
