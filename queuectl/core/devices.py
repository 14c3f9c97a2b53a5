"""Devices inside nodes that claims name: how many pods they are good for by domains, and which ones a pod gets."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from queuectl.model.objects import Device, GpuNeed

Matrix = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """Devices of one kind on a node: their columns in the fleet, and which share a domain. Like nodes have one shape."""

    resource: str  # that each of them counts as
    names: tuple[str, ...]
    columns: tuple[int, ...]
    levels: tuple[tuple[str, tuple[int, ...]], ...]  # the largest first: which domain of the level each device is in

    def holds(self, room: Matrix, devices: int, need: GpuNeed) -> Matrix:
        """Return how many pods of so many devices each row of room has devices for."""
        free = (room[:, self.columns] > 0).astype(np.int64)
        together = devices * need.mates
        pods: Matrix = (free @ self._members(need.level) // together).sum(axis=1) * need.mates
        return pods

    def most(self, room: Matrix, level: str) -> int:
        """Return how many devices are free in that domain of a level that has most, of all rows of room."""
        free = (room[:, self.columns] > 0).astype(np.int64)
        return int((free @ self._members(level)).max(initial=0))

    def choose(self, room: Matrix, devices: int, pods: int, need: GpuNeed) -> list[tuple[str, ...]]:
        """Return the names of the devices that each of so many pods gets, for which one row of room has enough.

        Best fit: the domain with the least that is free and enough, and of it again the tightest domains inside.
        """
        left = [at for at, column in enumerate(self.columns) if room[column] > 0]
        names = [level for level, _ in self.levels]
        inner = names[names.index(need.level) + 1 :] if need.level else names
        chosen: list[tuple[str, ...]] = []
        while len(chosen) < pods:
            mates = min(need.mates, pods - len(chosen))
            home = self._tightest(left, need.level, devices * mates) if need.level else left
            if home is None or len(home) < devices * mates:
                raise LookupError(f"{pods} pods have no {devices} devices each")
            for _ in range(mates):
                some = self._compact(home, devices, inner)
                home = [at for at in home if at not in some]
                left = [at for at in left if at not in some]
                chosen.append(tuple(self.names[at] for at in sorted(some)))
        return chosen

    def _compact(self, devices: Sequence[int], number: int, levels: Sequence[str]) -> list[int]:
        """Return so many of the devices, in as few domains of each level as can be."""
        if not levels or number == len(devices):
            return list(devices[:number])
        home = self._tightest(devices, levels[0], number)
        if home is not None:
            return self._compact(home, number, levels[1:])
        largest = max(self._groups(devices, levels[0]), key=len)
        rest = [at for at in devices if at not in largest]
        return [*largest, *self._compact(rest, number - len(largest), levels)]

    def _tightest(self, devices: Sequence[int], level: str, number: int) -> list[int] | None:
        enough = [group for group in self._groups(devices, level) if len(group) >= number]
        return min(enough, key=len, default=None)

    def _groups(self, devices: Iterable[int], level: str) -> Collection[list[int]]:
        domains, groups = dict(self.levels)[level], dict[int, list[int]]()
        for at in devices:
            groups.setdefault(domains[at], []).append(at)
        return groups.values()

    def _members(self, level: str) -> Matrix:
        """Return (devices, domains): which device is in which domain. A level that there is not has none."""
        if level not in self._tables:
            return np.zeros((len(self.names), 0), np.int64)
        return self._tables[level]

    @cached_property
    def _tables(self) -> Mapping[str, Matrix]:
        everything = ("", (0,) * len(self.names))
        return {level: np.eye(max(of) + 1, dtype=np.int64)[list(of)] for level, of in (everything, *self.levels)}


def shapes(devices: Sequence[Device], columns: Mapping[str, int]) -> tuple[Shape, ...]:
    """Return the shapes of a node's devices, one for each resource that they count as. ``columns``: of the fleet."""
    result = []
    for resource in dict.fromkeys(device.resource for device in devices):
        mine = [device for device in devices if device.resource == resource]
        fullest = sorted(mine, key=lambda device: -len(device.domains))  # has the levels in order
        levels = dict.fromkeys(level for device in fullest for level, _ in device.domains)
        result.append(
            Shape(
                resource,
                tuple(device.name for device in mine),
                tuple(columns[device.name] for device in mine),
                tuple((level, _numbers(mine, level)) for level in levels),
            )
        )
    return tuple(result)


def _numbers(devices: Sequence[Device], level: str) -> tuple[int, ...]:
    """Return for each device the number of its domain; one that is known to be in none is alone in its own."""
    known: dict[object, int] = {}
    return tuple(known.setdefault(_path(device, level) or (device.name,), len(known)) for device in devices)


def _path(device: Device, level: str) -> tuple[str, ...]:
    """Return the domains from the largest level down to this one; empty when the device is in none of this level."""
    levels = [name for name, _ in device.domains]
    at = levels.index(level) + 1 if level in levels else 0
    return tuple(domain for _, domain in device.domains[:at])
