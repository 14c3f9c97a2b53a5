"""Queues and ResourceFlavors, from the API server's bytes."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from queuectl.kube.decode.common import Bytes, decode_object, tolerations
from queuectl.kube.informer import Item
from queuectl.kube.names import CHANGE_WHY, CHANGED_BY
from queuectl.kube.selectors import selector
from queuectl.model import gpus
from queuectl.model.objects import DeviceKind, Flavor, Inside, Level, Queue, QueueOrder
from queuectl.model.policy import (
    Cap,
    FlavorChoice,
    OverQuota,
    Preemption,
    Prefer,
    Quota,
    Reclaim,
    Stop,
    StopPolicy,
    VictimChoice,
    Within,
)
from queuectl.model.resources import CARD, parse_quantity


def flavor(raw: Bytes) -> Item[Flavor]:
    """Decode a ResourceFlavor."""
    seen = decode_object(raw)
    topology = seen.spec.get("topology") or {}
    value = Flavor(
        name=seen.metadata.name,
        node_labels=tuple(sorted((seen.spec.get("nodeLabels") or {}).items())),
        tolerations=tolerations(seen.spec.get("tolerations")),
        gpu_model=seen.spec.get("gpuModel") or "",
        levels=tuple(Level(level["name"], level["nodeLabel"]) for level in topology.get("levels") or ()),
        inside=tuple(
            Inside(level["name"], level["gpus"], level.get("attribute") or "")
            for level in topology.get("insideNode") or ()
        ),
        gpus=tuple((gpu["resource"], _weight(gpu)) for gpu in seen.spec.get("gpus") or ()),
        devices=_devices(seen.spec.get("devices")),
    )
    return Item(seen.metadata.name, seen.metadata.resource_version, value)


def _devices(given: Mapping[str, Any] | None) -> DeviceKind | None:
    if not given:
        return None
    attributes = tuple(sorted((given.get("attributes") or {}).items()))
    identity = given.get("identity") or "uuid"
    return DeviceKind(given["driver"], given["deviceClassName"], given["resource"], identity, attributes)


def _weight(gpu: Mapping[str, Any]) -> int:
    """Return what a unit of a resource counts as, in amounts of cards; what doesn't come out even is rounded up."""
    if gpu.get("weight") is None:
        return gpus.weight(gpu["resource"]) or CARD
    part, _, parts = gpu["weight"].partition("/")
    return -(-CARD * int(part) // int(parts))


def queue(raw: Bytes) -> Item[Queue]:
    """Decode a Queue."""
    seen = decode_object(raw)
    value = Queue(
        name=seen.metadata.name,
        parent=seen.spec.get("parent") or "",
        order=QueueOrder(seen.spec.get("order") or QueueOrder.BEST_EFFORT_FIFO),
        quotas={(quota["flavor"], quota["resource"]): _quota(quota) for quota in seen.spec.get("quotas") or ()},
        weight=Fraction(parse_quantity("cpu", seen.spec.get("weight", 1)), 1000),
        preemption=_preemption(seen.spec.get("preemption") or {}),
        choice=_choice(seen.spec.get("flavorChoice") or {}),
        namespaces=selector(seen.spec.get("namespaceSelector")),
        stop=StopPolicy(seen.spec.get("stopPolicy") or StopPolicy.NONE),
        over_quota=OverQuota(seen.spec.get("whenOverQuota") or OverQuota.KEEP),
        max_running=seen.spec.get("maxRunning"),
        max_grace_seconds=seen.spec.get("maxGraceSeconds"),
        per_user=_cap(seen.spec.get("perUser") or {}),
        per_namespace=_cap(seen.spec.get("perNamespace") or {}),
        changed_by=seen.metadata.annotations.get(CHANGED_BY, ""),
        change_why=seen.metadata.annotations.get(CHANGE_WHY, "").strip(),
        generation=seen.metadata.generation,
        resource_version=seen.metadata.resource_version,
        status=seen.status,
    )
    return Item(seen.metadata.name, seen.metadata.resource_version, value)


def _quota(quota: Mapping[str, Any]) -> Quota:
    amounts = {
        name: max(0, parse_quantity(quota["resource"], quota[name]))
        for name in ("nominal", "borrowingLimit", "lendingLimit")
        if quota.get(name) is not None
    }
    return Quota(amounts["nominal"], amounts.get("borrowingLimit"), amounts.get("lendingLimit"))


def _cap(cap: Mapping[str, Any]) -> Cap:
    amounts = {
        resource: parse_quantity(resource, amount) for resource, amount in (cap.get("maxResources") or {}).items()
    }
    return Cap(cap.get("maxRunning"), tuple(sorted(amounts.items())))


def _preemption(rules: Mapping[str, Any]) -> Preemption:
    borrow = rules.get("borrowWithinCohort")
    return Preemption(
        Within(rules.get("withinQueue") or Within.NEVER),
        Reclaim(rules.get("reclaimFromCohort") or Reclaim.NEVER),
        borrow=borrow is not None,
        borrow_max_priority=(borrow or {}).get("maxPriority"),
        victims=VictimChoice(rules.get("victims") or VictimChoice.LEAST_WORK_LOST),
        wait_seconds=rules.get("waitSeconds") or 0,
        min_run_seconds=rules.get("minRunSeconds") or 0,
    )


def _choice(rules: Mapping[str, Any]) -> FlavorChoice:
    return FlavorChoice(
        Stop(rules.get("whenCanBorrow") or Stop.STOP),
        Stop(rules.get("whenCanPreempt") or Stop.NEXT),
        Prefer(rules.get("prefer") or Prefer.BORROWING),
    )
