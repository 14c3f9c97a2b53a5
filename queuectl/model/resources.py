"""Resource amounts as plain integers.

An amount is an ``int``: thousandths for ``cpu``, bytes for memory-like resources, 72,072,000ths for cards of GPUs
(``queuectl.dev/gpu``), units for the rest.
Fractions are rounded up, as kube-scheduler does, so that no request is ever counted too small.
"""

import re
from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING, Context, Decimal
from functools import lru_cache
from typing import Any, TypeVar

Resources = Mapping[str, int]
Key = TypeVar("Key")

MAX_AMOUNT = 2**63 - 1  # what a 64-bit column and a numpy int64 hold; larger amounts saturate
QUANTITY_PATTERN = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E|[eE][+-]?[0-9]{1,3})?$"

_QUANTITY = re.compile(QUANTITY_PATTERN)
_UP = Context(prec=40, rounding=ROUND_CEILING)  # more digits than any amount has
_SUFFIX = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12),
    "P": Decimal(10**15), "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
    "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
CARDS = "queuectl.dev/gpu"  # cards of GPUs, and parts of them: what a quota may count; no node offers it
CARD = 72_072_000  # amounts of it that make a card: thousandths and all parts down to sixteenths are exact
MIG = "nvidia.com/mig-"
# What one pod of a node has for itself: every node has this much of each host port, and of being apart from others.
ALONE = 2**20
HOST_PORT, APART = "hostport-", "apart-"
DEVICE = "device-"  # begins the name of one device that claims can name: its node has 1 of it
_GPU = re.compile(
    r"[^/]*/(?!.*(mem|core))(mig-|.*gpu).*|gpu\.intel\.com/(i915|xe)|huawei\.com/Ascend(?!.*(mem|core)).*"
    r"|amd\.com/[a-z]px_nps\d"
)
_MEMORY_LIKE = ("memory", "ephemeral-storage", "storage", "hugepages-")
_POD_LEVEL = ("cpu", "memory", "hugepages-")  # what kube-scheduler heeds of pod-level resources


def parse_quantity(resource: str, value: str | float) -> int:
    """Return the amount that a Kubernetes quantity stands for.

    Raises ValueError naming the value when it is not a quantity ("8 GPUs").
    """
    unit = 1000 if resource == "cpu" else CARD if resource == CARDS else 1
    amount = _UP.to_integral_value(_UP.multiply(_exact(value, resource), unit))
    return int(amount.max(-MAX_AMOUNT).min(MAX_AMOUNT))


def is_whole(value: str | float) -> bool:
    """Tell whether a quantity is a whole number. Raises ValueError as ``parse_quantity``."""
    exact = _exact(value)
    return exact == _UP.to_integral_value(exact)


def _exact(value: str | float, resource: str = "") -> Decimal:
    text = str(value)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        whole = is_extended(resource) and resource != CARDS
        remedy = "a whole number, such as 8" if whole else "a number with an optional unit, such as 8, 500m or 64Gi"
        raise ValueError(f"{value!r} is not a quantity; write {remedy}")
    suffix = match.group(3) or ""
    if suffix in _SUFFIX:
        return _UP.multiply(Decimal(text.removesuffix(suffix)), _SUFFIX[suffix])
    return Decimal(text)  # with an exponent


def format_quantity(resource: str, amount: int) -> str:
    """Return the quantity in the largest unit: ``1500`` of cpu is ``1500m``, ``2**30`` of memory is ``1Gi``.

    It is exact, but of cards: these are rounded up to thousandths, so a seventh is ``0.143``.
    """
    if resource == "cpu":
        return str(amount // 1000) if amount % 1000 == 0 else f"{amount}m"
    if resource == CARDS:
        return format((Decimal(-(-amount * 1000 // CARD)) / 1000).normalize(), "f")
    if resource.startswith(_MEMORY_LIKE):
        for suffix in ("Ei", "Pi", "Ti", "Gi", "Mi", "T", "G", "M", "Ki"):
            unit = int(_SUFFIX[suffix])
            if amount and amount % unit == 0:
                return f"{amount // unit}{suffix}"
    return str(amount)


def is_extended(resource: str) -> bool:
    """Tell whether a device plugin announces the resource (``nvidia.com/gpu``), not the kubelet itself."""
    return "/" in resource and "kubernetes.io/" not in resource and not is_alone(resource) and not is_device(resource)


def is_alone(resource: str) -> bool:
    """Tell whether the name stands for what no node announces and every node has: ``ALONE`` of it."""
    return resource.startswith((HOST_PORT, APART))


def device_name(driver: str, pool: str, device: str) -> str:
    """Return the name that stands for a device; ``pool`` is empty where it is named like the node."""
    return DEVICE + ":".join((driver, *filter(None, [pool.replace("/", ":")]), device))


def is_device(resource: str) -> bool:
    """Tell whether the name stands for one device, as ``device_name`` makes it."""
    return resource.startswith(DEVICE)


def is_unannounced(resource: str) -> bool:
    """Tell whether a node's room of the resource is on record only while somebody uses it."""
    return is_alone(resource) or is_device(resource)


@lru_cache(maxsize=4096)
def is_gpu(resource: str) -> bool:
    """Tell whether the resource counts GPUs, whole, sliced or shared, by the name that vendors give it."""
    return not is_device(resource) and _GPU.fullmatch(resource) is not None


def total(parts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    """Add up amounts, key by key."""
    result: dict[Key, int] = {}
    for part in parts:
        for resource, amount in part.items():
            result[resource] = result.get(resource, 0) + amount
    return result


def most(quantities: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return of each resource the largest of its quantities. Raises ValueError as ``parse_quantity``."""
    result: dict[str, str] = {}
    for part in quantities:
        for name, value in part.items():
            if name not in result or parse_quantity(name, value) > parse_quantity(name, result[name]):
                result[name] = value
    return result


def times(resources: Resources, count: int) -> dict[str, int]:
    """Multiply every amount by a count."""
    return {resource: amount * count for resource, amount in resources.items()}


def pod_requests(spec: Mapping[str, Any]) -> dict[str, int]:
    """Return what kube-scheduler reserves for a pod of this spec, ``pods: 1`` included.

    The largest of the init phase and the run phase, sidecars counted in both; pod-level resources instead, where
    they are given; plus overhead. See KEP-753 (sidecar containers) and KEP-2837 (pod level resources).
    Raises ValueError when a quantity is malformed or below zero.
    """
    running = total(_container_requests(c) for c in spec.get("containers") or ())
    sidecars: dict[str, int] = {}
    init_peak: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        requests = _container_requests(container)
        if container.get("restartPolicy") == "Always":
            sidecars = total((sidecars, requests))
            requests = sidecars
        else:
            requests = total((sidecars, requests))
        _raise_to(init_peak, requests)
    result = total((running, sidecars))
    _raise_to(result, init_peak)
    result.update(_pod_level(spec.get("resources") or {}, result))
    result = total((result, _parse_all(spec.get("overhead") or {})))
    return {resource: min(amount, MAX_AMOUNT) for resource, amount in result.items() if amount} | {"pods": 1}


def _container_requests(container: Mapping[str, Any]) -> dict[str, int]:
    resources = container.get("resources") or {}
    # A limit without a request is the request: the API server fills it in the same way.
    return _parse_all({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _pod_level(resources: Mapping[str, Any], summed: Resources) -> dict[str, int]:
    """Return what pod-level resources say, with the API server's default for a limit without a request."""
    requests, limits = _parse_all(resources.get("requests") or {}), _parse_all(resources.get("limits") or {})
    for resource in limits.keys() - requests.keys():
        # What the containers ask for is the request; huge pages can't be overcommitted, so there the limit is.
        by_containers = summed.get(resource, 0) and not resource.startswith("hugepages-")
        requests[resource] = summed[resource] if by_containers else limits[resource]
    return {name: amount for name, amount in requests.items() if name.startswith(_POD_LEVEL)}


def _parse_all(quantities: Mapping[str, Any]) -> dict[str, int]:
    amounts = {resource: parse_quantity(resource, value) for resource, value in quantities.items()}
    for resource, amount in amounts.items():
        if amount < 0:
            raise ValueError(f"{resource} of {quantities[resource]} is below zero; write 0 or more")
    return amounts


def _raise_to(floor: dict[str, int], other: Resources) -> None:
    for resource, amount in other.items():
        floor[resource] = max(floor.get(resource, 0), amount)
