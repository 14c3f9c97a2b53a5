"""Claims, volumes and storage classes, from the API server's bytes; of each only what tells where pods may go.

Where a volume can be reached is read as kube-scheduler's filters VolumeBinding and VolumeZone do.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from queuectl.kube.informer import Item
from queuectl.kube.selectors import node_terms
from queuectl.model.objects import NodeTerm, Requirement
from queuectl.model.volumes import Claim, StorageClass, Terms, Volume, VolumeUse

Bytes = msgspec.Raw | bytes

_BIND_COMPLETED = "pv.kubernetes.io/bind-completed"
_SELECTED_NODE = "volume.kubernetes.io/selected-node"
_CLASS = "volume.beta.kubernetes.io/storage-class"  # before there was a field for it; it still goes first
_DEFAULT_CLASS = ("storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class")
_NO_PROVISIONER = "kubernetes.io/no-provisioner"
_ZONES = {  # labels of volumes and nodes, and the name that a node may have instead
    "topology.kubernetes.io/zone": "",
    "topology.kubernetes.io/region": "",
    "failure-domain.beta.kubernetes.io/zone": "topology.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region": "topology.kubernetes.io/region",
}


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    namespace: str = ""
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _ClaimSpec(msgspec.Struct, rename="camel"):
    access_modes: list[str] = []
    volume_name: str = ""
    storage_class_name: str = ""


class _ClaimStatus(msgspec.Struct):
    phase: str = ""


class _Claim(msgspec.Struct):
    metadata: _Meta
    spec: _ClaimSpec = msgspec.field(default_factory=_ClaimSpec)
    status: _ClaimStatus = msgspec.field(default_factory=_ClaimStatus)


class _Ref(msgspec.Struct):
    name: str = ""
    namespace: str = ""


class _Affinity(msgspec.Struct):
    required: dict[str, Any] | None = None


class _VolumeSpec(msgspec.Struct, rename="camel"):
    claim_ref: _Ref | None = None
    node_affinity: _Affinity | None = None


class _Volume(msgspec.Struct):
    metadata: _Meta
    spec: _VolumeSpec = msgspec.field(default_factory=_VolumeSpec)


class _Class(msgspec.Struct, rename="camel"):
    metadata: _Meta
    provisioner: str = ""
    volume_binding_mode: str = ""
    allowed_topologies: list[dict[str, Any]] = []


_decode_claim = msgspec.json.Decoder(_Claim).decode
_decode_volume = msgspec.json.Decoder(_Volume).decode
_decode_class = msgspec.json.Decoder(_Class).decode


def claim(raw: Bytes) -> Item[Claim]:
    """Decode a PersistentVolumeClaim."""
    seen = _decode_claim(raw)
    meta, spec = seen.metadata, seen.spec
    value = Claim(
        key=f"{meta.namespace}/{meta.name}",
        modes=_modes(tuple(spec.access_modes)),
        volume=spec.volume_name,
        bound=bool(spec.volume_name) and _BIND_COMPLETED in meta.annotations,
        storage_class=sys.intern(meta.annotations.get(_CLASS) or spec.storage_class_name),
        node=meta.annotations.get(_SELECTED_NODE, ""),
        lost=seen.status.phase == "Lost",
        deleting=meta.deletion_timestamp is not None,
    )
    return Item(value.key, meta.resource_version, value)


def volume(raw: Bytes) -> Item[Volume]:
    """Decode a PersistentVolume."""
    seen = _decode_volume(raw)
    meta, ref, affinity = seen.metadata, seen.spec.claim_ref, seen.spec.node_affinity
    reach = [_zone(label, meta.labels[label]) for label in _ZONES if label in meta.labels]
    if affinity is not None and affinity.required is not None:
        reach.append(node_terms(affinity.required))
    value = Volume(meta.name, f"{ref.namespace}/{ref.name}" if ref else "", _shared(tuple(reach)))
    return Item(meta.name, meta.resource_version, value)


def storage_class(raw: Bytes) -> Item[StorageClass]:
    """Decode a StorageClass."""
    seen = _decode_class(raw)
    meta = seen.metadata
    is_default = any(meta.annotations.get(name) == "true" for name in _DEFAULT_CLASS)
    value = StorageClass(
        name=meta.name,
        waits=seen.volume_binding_mode == "WaitForFirstConsumer",
        provisions=seen.provisioner not in {"", _NO_PROVISIONER},
        reach=tuple(NodeTerm(tuple(_allowed(term))) for term in seen.allowed_topologies),
        default_since=meta.creation_timestamp if is_default else "",
    )
    return Item(meta.name, meta.resource_version, value)


def uses(role: str, spec: Mapping[str, Any]) -> Iterator[VolumeUse]:
    """Yield the volumes of a role's pods that are there by claims."""
    for each in spec.get("volumes") or ():
        by_name, own = each.get("persistentVolumeClaim"), each.get("ephemeral")
        if by_name:
            yield VolumeUse(role, each["name"], claim=by_name["claimName"])
        elif own:
            template = (own.get("volumeClaimTemplate") or {}).get("spec") or {}
            yield VolumeUse(role, each["name"], storage_class=template.get("storageClassName"))


@lru_cache(maxsize=4096)
def _shared(reach: tuple[Terms, ...]) -> tuple[Terms, ...]:
    """Return one object for all that are equal: a cluster has many volumes and few zones."""
    return reach


@lru_cache(maxsize=64)
def _modes(modes: tuple[str, ...]) -> tuple[str, ...]:
    return modes


def _zone(label: str, value: str) -> Terms:
    """Return from which nodes a volume with such a label can be reached: of its zones, or of none at all."""
    zones = tuple(value.split("__"))
    terms = [NodeTerm((Requirement(label, "In", zones),))]
    if other := _ZONES[label]:
        terms.append(NodeTerm((Requirement(label, "DoesNotExist"), Requirement(other, "In", zones))))
    return (*terms, NodeTerm(tuple(Requirement(name, "DoesNotExist") for name in _ZONES)))


def _allowed(term: Mapping[str, Any]) -> Iterator[Requirement]:
    for each in term.get("matchLabelExpressions") or ():
        yield Requirement(each["key"], "In", tuple(each["values"]))
