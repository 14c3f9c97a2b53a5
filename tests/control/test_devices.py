"""Devices as slices and claims change, joined with nodes: what is free, and for whom a claim counts."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from queuectl.control.devices import Devices
from queuectl.core import fit
from queuectl.core.fleet import Fleet
from queuectl.model.devices import Allocated, DeviceClaim, Listed, Slice
from queuectl.model.lifecycle import Attempt, AttemptState
from queuectl.model.objects import DeviceKind, Flavor
from queuectl.model.plan import Placement
from queuectl.model.resources import device_name, is_device
from tests.support.builders import GPU, node, role

DRIVER = "d.example.com"
NAMED = Flavor("named", devices=DeviceKind(DRIVER, "gpus", GPU, "uuid"))


def part(*numbers: int, of: str = "n1") -> Slice:
    devices = tuple(Listed(f"gpu-{n}", {f"{DRIVER}/uuid": str(n)}) for n in numbers)
    return Slice(f"{of}-gpus", of, DRIVER, of, 1, 1, devices)


def claim(*numbers: int, name: str = "other", **more: object) -> DeviceClaim:
    return replace(
        DeviceClaim(name, "team", name, devices=tuple(Allocated(DRIVER, "n1", f"gpu-{n}") for n in numbers)),
        **more,  # type: ignore[arg-type]
    )


class Scene:
    def __init__(self) -> None:
        self.fleet = Fleet()
        self.devices = Devices(self.fleet)
        self.devices.on_flavor(None, NAMED)
        self.devices.on_node("n1", node("n1", gpu=8))  # whatever a device plugin says

    @property
    def free(self) -> list[int]:
        """Return the numbers of devices that pods get, one by one, until there is none."""
        found: list[int] = []
        taken: list[Placement] = []
        while not isinstance(placed := fit.place(self.fleet, [role(gpu=1)], {"worker": NAMED}), fit.Short):
            taken += placed
            found.append(number(placed))
            self.fleet.reserve("n1", placed[0].requests, 1)
        for one in taken:
            self.fleet.reserve("n1", one.requests, -1)
        return sorted(found)


def number(placements: Iterable[Placement]) -> int:
    [name] = [name for p in placements for name, _ in p.requests if is_device(name)]
    return int(name.rpartition("-")[2])


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_only_what_slices_list_and_no_claim_has_is_free(scene: Scene) -> None:
    assert scene.free == []
    scene.devices.on_slice(None, part(0, 1, 2))
    assert scene.free == [0, 1, 2]
    assert scene.devices.on_claim(None, claim(1)) == {"n1"}
    assert scene.free == [0, 2]
    scene.devices.on_slice(part(0, 1, 2), part(0, 2))  # 1 is sick
    assert scene.free == [0, 2]
    scene.devices.on_slice(part(0, 2), part(0, 1, 2))
    assert scene.free == [0, 2]
    assert scene.devices.on_claim(claim(1), None) == {"n1"}
    assert scene.free == [0, 1, 2]
    scene.devices.on_slice(part(0, 1, 2), None)
    assert scene.free == []


def test_without_devices_in_the_flavor_the_kubelets_word_counts_again(scene: Scene) -> None:
    scene.devices.on_flavor(NAMED, replace(NAMED, devices=None))
    scene.fleet.forget_masks()
    assert scene.fleet.room("n1")[GPU] == 8


def test_what_a_pod_asks_for_by_name_is_not_counted_again_by_its_claim(scene: Scene) -> None:
    scene.devices.on_slice(None, part(0, 1, 2))
    scene.fleet.use("n1", ((GPU, 1),), +1)
    scene.devices.on_claim(None, claim(1, implied=True))
    assert scene.free == [0, 2]


def test_a_claim_of_ours_counts_for_its_attempt_and_after_that_until_it_is_gone(scene: Scene) -> None:
    scene.devices.on_slice(None, part(0, 1))
    requests = ((device_name(DRIVER, "", "gpu-0"), 1), (GPU, 1))
    attempt = Attempt("uid", 1, AttemptState.RUNNING, 1, (Placement("worker", "named", "n1", 1, requests),), 0.0)
    scene.fleet.reserve("n1", requests, 1)
    scene.devices.hold(attempt)
    mine = claim(0, name="mine", workload="uid", attempt=1, role="worker")
    scene.devices.on_claim(None, mine)
    assert scene.free == [1]
    assert scene.fleet.room("n1")[GPU] == 2  # it is not others' as well
    assert not scene.devices.allocated(attempt)
    assert scene.devices.orphans({"uid": attempt}) == []

    ending = replace(attempt, state=AttemptState.ENDING)
    assert scene.devices.allocated(ending)
    assert scene.devices.orphans({"uid": ending}) == [mine]

    scene.fleet.reserve("n1", requests, -1)
    scene.devices.hold(attempt, ended=True)
    assert scene.free == [1]
    assert scene.devices.orphans({}) == [mine]
    scene.devices.on_claim(mine, None)
    assert scene.free == [0, 1]
