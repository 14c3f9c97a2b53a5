"""What drivers say of devices (ResourceSlices) and who has them (ResourceClaims), and what that comes to on a node.

After KEP-4381 (dynamic resource allocation with structured parameters).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from queuectl.model.gpus import NO_GPUS, Gpus, Unit
from queuectl.model.objects import Device, Flavor, Inside
from queuectl.model.resources import device_name

_NUMBER = re.compile("[0-9]+$")


@dataclass(frozen=True, slots=True)
class Listed:
    """A device as a ResourceSlice lists it. ``attributes``: as text, by qualified name, the driver's domain included."""

    name: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    memory: int = 0  # bytes; 0: it is not told
    problem: str = ""  # why no claim of ours may name it


@dataclass(frozen=True, slots=True)
class Slice:
    """A ResourceSlice of one node: a part of a driver's pool."""

    name: str
    node: str
    driver: str
    pool: str
    generation: int
    slices: int  # of the pool in this generation
    devices: tuple[Listed, ...]


@dataclass(frozen=True, slots=True)
class Allocated:
    """A device that a claim has."""

    driver: str
    pool: str
    device: str


@dataclass(frozen=True, slots=True)
class DeviceClaim:
    """What is read of a ResourceClaim. ``workload``, ``attempt``, ``role`` and ``index`` are set on our own only."""

    uid: str
    namespace: str
    name: str
    deleting: bool = False
    workload: str = ""
    attempt: int = 0
    role: str = ""
    index: int = 0
    devices: tuple[Allocated, ...] = ()
    implied: bool = False  # kube-scheduler has made it for a pod that asks for a resource by name, which counts already


@dataclass(frozen=True, slots=True)
class Inventory:
    """A node's devices that claims may name."""

    devices: tuple[Device, ...] = ()
    names: Mapping[Allocated, Device] = field(default_factory=dict)
    identities: Mapping[str, tuple[str, str]] = field(
        default_factory=dict
    )  # by name: attribute and value that select it
    gpus: Gpus = NO_GPUS  # what drivers say that they are; where labels tell it, these count
    problems: tuple[str, ...] = ()


def qualified(name: str, driver: str) -> str:
    """Return an attribute's name with its domain, which is the driver's where none is given."""
    return name if "/" in name else f"{driver}/{name}"


def inventory(node: str, slices: Sequence[Slice], flavors: Iterable[Flavor]) -> Inventory:
    """Return the devices of a node that flavors are about. ``flavors``: those the node is of; of one driver the first."""
    names: dict[Allocated, Device] = {}
    identities: dict[str, tuple[str, str]] = {}
    problems: list[str] = []
    drivers: dict[str, str] = {}  # by the resource that their devices count as
    kinds: dict[Gpus, None] = {}
    for flavor in sorted(flavors, key=lambda flavor: flavor.name):
        kind = flavor.devices
        if kind is None or kind.driver in drivers.values():
            continue
        if drivers.setdefault(kind.resource, kind.driver) != kind.driver:
            problems.append(
                f"flavor {flavor.name} calls devices of driver {kind.driver} {kind.resource}, as those of driver"
                f" {drivers[kind.resource]} are called; they are not used"
            )
            continue
        identity = qualified(kind.identity, kind.driver)
        wanted = {(qualified(name, kind.driver), value) for name, value in kind.attributes}
        seen: set[str] = set()
        for pool, listed in _listed(kind.driver, slices, problems):
            if not wanted <= listed.attributes.items():
                continue
            value = listed.attributes.get(identity, "")
            problem = listed.problem or (
                f"has no attribute {identity}, by which a claim could name it" if not value
                else f"has {identity} {value}, as another of the node has" if value in seen
                else ""
            )  # fmt: skip
            if problem:
                problems.append(f"device {listed.name} of driver {kind.driver} {problem}; it is not used")
                continue
            seen.add(value)
            name = device_name(kind.driver, "" if pool == node else pool, listed.name)
            names[Allocated(kind.driver, pool, listed.name)] = Device(name, kind.resource, _domains(listed, flavor))
            identities[name] = (identity, value)
            kinds[_gpus(listed, kind.driver)] = None
        problems += _oversized(flavor, [device for device in names.values() if device.resource == kind.resource])
    if len({gpus.model for gpus in kinds}) > 1:
        problems.append(f"its devices are of several models: {', '.join(gpus.model or '?' for gpus in kinds)}")
    devices = sorted(names.values(), key=lambda device: _natural(device.name))
    return Inventory(tuple(devices), names, identities, next(iter(kinds), NO_GPUS), tuple(problems))


def _listed(driver: str, slices: Iterable[Slice], problems: list[str]) -> Iterator[tuple[str, Listed]]:
    """Yield (pool, device) of the newest generation of each pool that is complete."""
    pools: dict[str, list[Slice]] = {}
    for one in slices:
        if one.driver == driver:
            pools.setdefault(one.pool, []).append(one)
    for pool, known in sorted(pools.items()):
        newest = max(part.generation for part in known)
        parts = [part for part in known if part.generation == newest]
        if len(parts) != parts[0].slices:
            problems.append(
                f"pool {pool} of driver {driver} has {len(parts)} of {parts[0].slices} ResourceSlices of generation"
                f" {newest}; it is not used until all are there"
            )
            continue
        yield from ((pool, listed) for part in sorted(parts, key=lambda part: part.name) for listed in part.devices)


def _gpus(listed: Listed, driver: str) -> Gpus:
    """Return what the attributes that drivers have in common say, the model as labels would spell it."""
    model = listed.attributes.get(qualified("productName", driver), "").replace(" ", "-")
    return Gpus(model, listed.attributes.get(qualified("driverVersion", driver), ""), unit=Unit(listed.memory))


def _domains(listed: Listed, flavor: Flavor) -> tuple[tuple[str, str], ...]:
    driver = flavor.devices.driver if flavor.devices else ""
    found = ((level.name, _domain(listed, level, driver)) for level in flavor.inside)
    return tuple((level, domain) for level, domain in found if domain)


def _domain(listed: Listed, level: Inside, driver: str) -> str:
    if level.attribute:
        return listed.attributes.get(qualified(level.attribute, driver), "")
    number = _NUMBER.search(listed.name)
    return str(int(number[0]) // level.gpus) if number else ""


def _oversized(flavor: Flavor, devices: Sequence[Device]) -> Iterator[str]:
    for level in flavor.inside:
        found = [dict(device.domains).get(level.name) for device in devices]
        if None in found:
            yield f"{found.count(None)} of {len(found)} devices are in no {level.name}, as flavor {flavor.name} tells it"
        largest = max((found.count(domain) for domain in set(found) - {None}), default=0)
        if largest > level.gpus:
            yield (
                f"{largest} devices share one {level.name}; right would be {level.gpus}, as flavor {flavor.name} says"
            )


def _natural(name: str) -> tuple[str, int, str]:
    number = _NUMBER.search(name)
    return (name[: number.start()], int(number[0]), name) if number else (name, -1, name)
