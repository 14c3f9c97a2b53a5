"""ResourceSlices and ResourceClaims, from the API server's bytes."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from queuectl.kube.decode.common import Bytes, Meta, SeenTaint, number
from queuectl.kube.informer import Item
from queuectl.kube.names import (
    ATTEMPT_LABEL,
    EXTENDED_RESOURCE_CLAIM,
    INDEX_LABEL,
    ROLE_LABEL,
    WORKLOAD_LABEL,
)
from queuectl.model.devices import Allocated, DeviceClaim, Listed, Slice, qualified
from queuectl.model.resources import parse_quantity


class _Device(msgspec.Struct, rename="camel"):
    name: str
    attributes: dict[str, dict[str, Any]] = {}  # name → type → value, or list of values
    capacity: dict[str, dict[str, Any]] = {}
    taints: list[SeenTaint] = []
    consumes_counters: list[Any] = []
    allow_multiple_allocations: bool = False


class _Pool(msgspec.Struct, rename="camel"):
    name: str
    generation: int = 0
    resource_slice_count: int = 1


class _SliceSpec(msgspec.Struct, rename="camel"):
    driver: str
    pool: _Pool
    node_name: str = ""
    devices: list[_Device] = []


class _Slice(msgspec.Struct):
    metadata: Meta
    spec: _SliceSpec


_decode_slice = msgspec.json.Decoder(_Slice).decode


def resource_slice(raw: Bytes) -> Item[Slice]:
    """Decode a ResourceSlice; devices that are of no one node are left out."""
    seen = _decode_slice(raw)
    spec = seen.spec
    value = Slice(
        name=seen.metadata.name,
        node=spec.node_name,
        driver=spec.driver,
        pool=spec.pool.name,
        generation=spec.pool.generation,
        slices=spec.pool.resource_slice_count,
        devices=tuple(
            Listed(
                device.name,
                {qualified(name, spec.driver): _as_text(value) for name, value in device.attributes.items()},
                _memory(device, spec.driver),
                _unusable(device),
            )
            for device in (spec.devices if spec.node_name else ())
        ),
    )
    return Item(seen.metadata.name, seen.metadata.resource_version, value)


def _memory(device: _Device, driver: str) -> int:
    capacity = {qualified(name, driver): each for name, each in device.capacity.items()}
    return parse_quantity("memory", capacity.get(qualified("memory", driver), {}).get("value", 0))


def _as_text(attribute: Mapping[str, Any]) -> str:
    [value] = attribute.values()
    return value if isinstance(value, str) else json.dumps(value)


def _unusable(device: _Device) -> str:
    taint = next((taint for taint in device.taints if taint.effect in {"NoSchedule", "NoExecute"}), None)
    if taint is not None:
        return f"is tainted with {taint.key}"
    if device.allow_multiple_allocations:
        return "may be shared by several claims"
    return "shares counters with other devices" if device.consumes_counters else ""


class _Result(msgspec.Struct, rename="camel"):
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None


class _Results(msgspec.Struct):
    results: list[_Result] = []


class _Allocation(msgspec.Struct):
    devices: _Results = msgspec.field(default_factory=_Results)


class _ClaimStatus(msgspec.Struct):
    allocation: _Allocation | None = None


class _Claim(msgspec.Struct):
    metadata: Meta
    status: _ClaimStatus = msgspec.field(default_factory=_ClaimStatus)


_decode_claim = msgspec.json.Decoder(_Claim).decode


def resource_claim(raw: Bytes) -> Item[DeviceClaim]:
    """Decode a ResourceClaim, ours or another's."""
    seen = _decode_claim(raw)
    meta, labels, allocation = seen.metadata, seen.metadata.labels, seen.status.allocation
    value = DeviceClaim(
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        deleting=meta.deletion_timestamp is not None,
        workload=labels.get(WORKLOAD_LABEL, ""),
        attempt=number(labels.get(ATTEMPT_LABEL)),
        role=labels.get(ROLE_LABEL, ""),
        index=number(labels.get(INDEX_LABEL)),
        devices=tuple(
            Allocated(result.driver, result.pool, result.device)
            for result in (allocation.devices.results if allocation else ())
            if not result.admin_access  # takes the device from nobody
        ),
        implied=EXTENDED_RESOURCE_CLAIM in meta.annotations,
    )
    return Item(meta.key, meta.resource_version, value)
