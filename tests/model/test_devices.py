"""What ResourceSlices come to on a node, and what is told of what does not add up."""

import json
from typing import Any

import pytest

from queuectl.kube import decode
from queuectl.model.devices import Allocated, Inventory, Slice, inventory
from queuectl.model.gpus import Gpus, Unit
from queuectl.model.objects import DeviceKind, Flavor, Inside

GPU, DRIVER = "nvidia.com/gpu", "gpu.example.com"
KIND = DeviceKind(DRIVER, DRIVER, GPU, "uuid")
BY_ATTRIBUTE = (Inside("nvlink", 4, "group"), Inside("pcie", 2, "resource.kubernetes.io/pcieRoot"))


def gpu(number: int, **more: Any) -> dict[str, Any]:
    attributes = {
        "uuid": {"string": f"GPU-{number}"},
        "group": {"int": number // 4},
        "resource.kubernetes.io/pcieRoot": {"string": f"pci{number // 2}"},
    } | more.pop("attributes", {})
    return {"name": f"gpu-{number}", "attributes": {k: v for k, v in attributes.items() if v}, **more}


def part(*devices: dict[str, Any], name: str = "s", **spec: Any) -> Slice:
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1} | spec.pop("pool", {})
    given = {"driver": DRIVER, "nodeName": "n1", "pool": pool, "devices": devices, **spec}
    return decode.resource_slice(json.dumps({"metadata": {"name": name}, "spec": given}).encode()).value


def read(*slices: Slice, inside: tuple[Inside, ...] = BY_ATTRIBUTE, kind: DeviceKind = KIND) -> Inventory:
    return inventory("n1", slices, [Flavor("named", inside=inside, devices=kind)])


def names(found: Inventory) -> list[str]:
    return [device.name.rpartition(":")[2] for device in found.devices]


def test_devices_are_known_by_name_with_their_domains_and_what_selects_them() -> None:
    found = read(part(gpu(0), gpu(5)))

    assert [device.domains for device in found.devices] == [
        (("nvlink", "0"), ("pcie", "pci0")), (("nvlink", "1"), ("pcie", "pci2")),
    ]  # fmt: skip
    assert found.identities == {f"device-{DRIVER}:gpu-{n}": (f"{DRIVER}/uuid", f"GPU-{n}") for n in (0, 5)}
    assert found.names[Allocated(DRIVER, "n1", "gpu-5")].resource == GPU
    assert found.problems == ()


def test_what_a_driver_says_of_its_gpus_stands_in_for_labels() -> None:
    told = {"productName": {"string": "NVIDIA H100 80GB HBM3"}, "driverVersion": {"version": "550.54.15"}}

    found = read(part(gpu(0, attributes=told, capacity={"memory": {"value": "80Gi"}})))

    assert found.gpus == Gpus("NVIDIA-H100-80GB-HBM3", "550.54.15", unit=Unit(80 * 2**30))


def test_a_declared_shape_goes_by_the_numbers_in_names_also_where_one_is_missing() -> None:
    found = read(part(gpu(10), gpu(0), gpu(1), gpu(3), gpu(4)), inside=(Inside("nvlink", 4),))

    assert names(found) == ["gpu-0", "gpu-1", "gpu-3", "gpu-4", "gpu-10"]
    assert [dict(device.domains)["nvlink"] for device in found.devices] == ["0", "0", "0", "1", "2"]


def test_only_devices_with_the_flavors_attributes_count() -> None:
    whole = DeviceKind(DRIVER, DRIVER, GPU, "uuid", (("type", "gpu"),))
    slices = part(gpu(0, attributes={"type": {"string": "gpu"}}), gpu(1, attributes={"type": {"string": "mig"}}))

    assert names(read(slices, kind=whole)) == ["gpu-0"]


@pytest.mark.parametrize(
    ("slices", "used", "problem"),
    [
        ([part(gpu(0), pool={"resourceSliceCount": 2})], [], "pool n1 of driver gpu.example.com has 1 of 2"),
        ([part(gpu(0)), part(gpu(1), name="t", pool={"generation": 2})], ["gpu-1"], ""),
        ([part(gpu(0, attributes={"uuid": None}), gpu(1))], ["gpu-1"], "has no attribute gpu.example.com/uuid"),
        ([part(gpu(0), gpu(1, attributes={"uuid": {"string": "GPU-0"}}))], ["gpu-0"], "as another of the node has"),
        ([part(gpu(0, taints=[{"key": "sick", "effect": "NoSchedule"}]))], [], "is tainted with sick"),
        ([part(gpu(0, allowMultipleAllocations=True))], [], "may be shared by several claims"),
        ([part(gpu(0, consumesCounters=[{"counterSet": "a", "counters": {}}]))], [], "shares counters"),
        ([part(gpu(0, attributes={"group": None}), gpu(1))], ["gpu-0", "gpu-1"], "1 of 2 devices are in no nvlink"),
        (
            [part(*(gpu(n, attributes={"productName": {"string": model}}) for n, model in enumerate(("A 1", "B 2"))))],
            ["gpu-0", "gpu-1"],
            "its devices are of several models: A-1, B-2",
        ),
        (
            [part(*(gpu(n, attributes={"group": {"int": 0}}) for n in range(5)))],
            [f"gpu-{n}" for n in range(5)],
            "5 devices share one nvlink; right would be 4",
        ),
        ([part(gpu(0), driver="other.example.com")], [], ""),
    ],
)
def test_what_does_not_add_up_is_told_and_not_used(slices: list[Slice], used: list[str], problem: str) -> None:
    found = read(*slices)

    assert names(found) == used
    assert problem in "; ".join(found.problems)
    assert bool(problem) == bool(found.problems)
