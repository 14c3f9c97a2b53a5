"""What labels tell of GPUs: as the vendors' discoveries write them, and as they shouldn't be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queuectl.model.gpus import GIB, MIB, NO_GPUS, Claim, Gpus, Unit, problems, read, weight
from queuectl.model.resources import CARD
from tests.support.builders import GPU

H100 = {
    "nvidia.com/cuda.driver-version.full": "550.107.02", "nvidia.com/cuda.driver.major": "550",
    "nvidia.com/cuda.runtime-version.full": "12.4", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "81559",
    "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.replicas": "1",
    "nvidia.com/gpu.sharing-strategy": "none",
}  # fmt: skip
SLICED = {"nvidia.com/gpu.product": "A100-SXM4-40GB-MIG-1g.5gb", "nvidia.com/gpu.memory": "4864", "nvidia.com/gpu.count": "56", "nvidia.com/mig.strategy": "single"}  # fmt: skip
MIG_1G = "nvidia.com/mig-1g.10gb"
MIXED = H100 | {"nvidia.com/mig.strategy": "mixed", f"{MIG_1G}.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", f"{MIG_1G}.memory": "9856", f"{MIG_1G}.count": "7"}  # fmt: skip

READ: dict[str, tuple[dict[str, str], Gpus]] = {
    "no GPUs": ({"kubernetes.io/arch": "amd64"}, NO_GPUS),
    "whole ones": (H100, Gpus("NVIDIA-H100-80GB-HBM3", "550.107.02", "12.4", Unit(81559 * MIB))),
    "an older discovery": (
        {
            "nvidia.com/gpu.product": "Tesla-V100-SXM2-32GB", "nvidia.com/cuda.driver.major": "455",
            "nvidia.com/cuda.driver.minor": "06", "nvidia.com/cuda.driver.rev": "",
            "nvidia.com/cuda.runtime.major": "11", "nvidia.com/cuda.runtime.minor": "1",
        },
        Gpus("Tesla-V100-SXM2-32GB", "455.06", "11.1"),
    ),
    "time-sliced": (
        {"nvidia.com/gpu.product": "Tesla-T4-SHARED", "nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.memory": "15360"},
        Gpus("Tesla-T4-SHARED", unit=Unit(15360 * MIB, shared=True)),
    ),
    "renamed, so only replicas tell": (
        {"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.replicas": "4"}, Gpus("Tesla-T4", unit=Unit(shared=True))
    ),
    "sliced into one kind": (SLICED, Gpus("A100-SXM4-40GB-MIG-1g.5gb", unit=Unit(4864 * MIB, slice="1g.5gb"))),
    "sliced and shared": (
        SLICED | {"nvidia.com/gpu.product": "A100-SXM4-40GB-MIG-1g.5gb-SHARED"},
        Gpus("A100-SXM4-40GB-MIG-1g.5gb-SHARED", unit=Unit(4864 * MIB, shared=True, slice="1g.5gb")),
    ),
    "sliced into several kinds": (
        MIXED, Gpus("NVIDIA-H100-80GB-HBM3", "550.107.02", "12.4", Unit(81559 * MIB), ((MIG_1G, Unit(9856 * MIB)),)),
    ),
    "AMD": (
        {"amd.com/gpu.product-name": "AMD_Instinct_MI300X", "amd.com/gpu.vram": "192G", "amd.com/gpu.driver-version": "6.10.5"},
        Gpus("AMD_Instinct_MI300X", "6.10.5", unit=Unit(192 * GIB)),
    ),
    "AMD, partitioned": (
        {"amd.com/gpu.product-name": "AMD_Instinct_MI300X", "amd.com/compute-memory-partition": "cpx_nps4"},
        Gpus("AMD_Instinct_MI300X", unit=Unit(slice="cpx_nps4")),
    ),
    "AMD, in one partition": (
        {"amd.com/gpu.product-name": "AMD_Instinct_MI300X", "amd.com/gpu.compute-memory-partition": "spx_nps1"},
        Gpus("AMD_Instinct_MI300X"),
    ),
    "Intel": (
        {"gpu.intel.com/product": "Max_1550", "gpu.intel.com/device.count": "2", "gpu.intel.com/memory.max": str(256 * GIB)},
        Gpus("Max_1550", unit=Unit(128 * GIB)),
    ),
    "Ascend": ({"accelerator": "huawei-Ascend910", "node.kubernetes.io/npu.chip.name": "910B3"}, Gpus("910B3")),
    "an older plugin of Ascend": ({"accelerator": "huawei-Ascend910"}, Gpus("Ascend910")),
    "numbers that are none": (H100 | {"nvidia.com/gpu.memory": "80GB", "nvidia.com/gpu.replicas": "two"}, Gpus("NVIDIA-H100-80GB-HBM3", "550.107.02", "12.4")),
}  # fmt: skip


@pytest.mark.parametrize(("labels", "want"), READ.values(), ids=READ.keys())
def test_what_labels_tell(labels: dict[str, str], want: Gpus) -> None:
    assert read(labels) == want


def test_a_resource_by_another_name_is_the_nodes_gpus() -> None:
    there = read(MIXED)
    assert there.of("example.com/h100").memory == there.of("nvidia.com/gpu.shared").memory == 81559 * MIB
    assert there.of(MIG_1G).memory == there.of(f"{MIG_1G}.shared").memory == 9856 * MIB
    assert there.of("nvidia.com/mig-2g.20gb") == Unit()


@pytest.mark.parametrize(
    ("resource", "sevenths"),
    {GPU: 7, "amd.com/gpu": 7, MIG_1G: 1, "nvidia.com/mig-3g.20gb": 3, "nvidia.com/mig-1g.5gb.me": 1, "nvidia.com/mig-7g.80gb": 7, "nvidia.com/mig-1c.3g.20gb": 1, "cpu": 0, "rdma/hca": 0, "queuectl.dev/gpu": 0, "amd.com/spx_nps1": 7}.items(),
)  # fmt: skip
def test_what_a_name_counts_as(resource: str, sevenths: int) -> None:
    assert weight(resource) == CARD * sevenths // 7


def test_partitions_count_as_their_part() -> None:
    assert [CARD // weight(f"amd.com/{mode}px_nps1") for mode in "sdtqc"] == [1, 2, 3, 4, 8]


NODE_A100 = [Claim("a100", "A100", ())]
WRONG: dict[str, tuple[dict[str, str], dict[str, int], list[Claim], str]] = {
    "too few": (H100, {GPU: 7}, [], "label nvidia.com/gpu.count is 8, and the node offers 7 nvidia.com/gpu; right would be 8, unless one is unhealthy"),
    "no number": (H100 | {"nvidia.com/gpu.memory": "80GB"}, {GPU: 8}, [], 'label nvidia.com/gpu.memory is "80GB"; right would be a number such as 81559, in MiB'),
    "below zero": (H100 | {"nvidia.com/gpu.replicas": "-2"}, {GPU: 8}, [], 'label nvidia.com/gpu.replicas is "-2"; right would be a number such as 4'),
    "beyond all that there is": (H100 | {"nvidia.com/gpu.count": "9" * 30}, {GPU: 8}, [], f'label nvidia.com/gpu.count is "{"9" * 30}"; right would be a number such as 8'),
    "empty": (H100 | {"nvidia.com/gpu.count": ""}, {GPU: 8}, [], 'label nvidia.com/gpu.count is ""; right would be a number such as 8'),
    "too many": (H100, {GPU: 9}, [], "label nvidia.com/gpu.count is 8, and the node offers 9 nvidia.com/gpu; right would be 8"),
    "another model than the flavor's": (
        H100, {GPU: 8}, NODE_A100,
        "label nvidia.com/gpu.product is NVIDIA-H100-80GB-HBM3, and flavor a100, whose labels the node has, has gpuModel A100; right would be a flavor of that model",
    ),
    "replicas without a strategy": (
        H100 | {"nvidia.com/gpu.replicas": "4"}, {GPU: 32}, [],
        'label nvidia.com/gpu.replicas is 4 and nvidia.com/gpu.sharing-strategy "none"; right would be time-slicing or mps. The GPUs are taken for shared ones',
    ),
    "shared by its product alone": (
        H100 | {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED"}, {GPU: 8}, [],
        "label nvidia.com/gpu.product is NVIDIA-H100-80GB-HBM3-SHARED and nvidia.com/gpu.replicas 1; right would be more than 1. The GPUs are taken for shared ones",
    ),
    "a strategy without replicas": (
        H100 | {"nvidia.com/gpu.sharing-strategy": "mps"}, {GPU: 8}, [],
        "label nvidia.com/gpu.sharing-strategy is mps and nvidia.com/gpu.replicas 1; right would be more than 1, or strategy none",
    ),
    "a driver and no plugin": (
        {"feature.node.kubernetes.io/pci-10de.present": "true"}, {"cpu": 8}, [],
        "label feature.node.kubernetes.io/pci-10de.present tells of a GPU of NVIDIA, and the node offers none to pods; right would be a resource nvidia.com/…: see whether its driver and device plugin run",
    ),
    "labels and no plugin": (H100, {"cpu": 8}, [], "label nvidia.com/gpu.count is 8, and the node offers no GPU to pods; right would be a resource nvidia.com/gpu: see whether its device plugin runs"),
    "GPUs and no labels": ({}, {GPU: 8}, [], "no label tells the model of its GPUs; right would be one such as nvidia.com/gpu.product, as GPU Feature Discovery writes it"),
    "slices that can't be announced": (
        {"nvidia.com/gpu.product": "A100-MIG-INVALID", "nvidia.com/mig.strategy": "single", "nvidia.com/gpu.count": "0"}, {GPU: 0}, [],
        "label nvidia.com/gpu.product is A100-MIG-INVALID: with MIG strategy single, right would be all GPUs of the node in slices of one profile",
    ),
    "slices by a strategy that has none": (
        H100 | {"nvidia.com/mig.strategy": "single"}, {GPU: 8, MIG_1G: 7}, [],
        "the node offers nvidia.com/mig-1g.10gb, and label nvidia.com/mig.strategy is single; right would be mixed",
    ),
    "too few slices": (
        MIXED, {GPU: 7, MIG_1G: 6}, [],
        "label nvidia.com/mig-1g.10gb.count is 7, and the node offers 6 nvidia.com/mig-1g.10gb; right would be 7, unless one is unhealthy",
    ),
    "two drivers": (
        H100 | {"nvidia.com/cuda.driver.major": "535"}, {GPU: 8}, [],
        "label nvidia.com/cuda.driver-version.full is 550.107.02 and nvidia.com/cuda.driver.major 535; right would be the same driver in both",
    ),
    "another weight than the flavor's": (
        {"nvidia.com/gpu.product": "T4-SHARED", "nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.sharing-strategy": "mps"}, {GPU: 4}, [Claim("t4", "T4", ((GPU, CARD // 5),))],
        "label nvidia.com/gpu.replicas is 4, and flavor t4 gives nvidia.com/gpu another weight; right would be 1/4",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("labels", "offered", "claims", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_said(
    labels: dict[str, str], offered: dict[str, int], claims: list[Claim], sentence: str
) -> None:
    assert problems(labels, offered, claims) == [sentence]


@pytest.mark.parametrize(
    ("labels", "offered", "claims"),
    [
        ({}, {"cpu": 8}, []),
        (H100, {GPU: 8}, [Claim("h100", "H100", ()), Claim("any", "", ())]),
        (H100, {GPU: 8}, [Claim("h100", "nvidia-h100-80gb-hbm3", ())]),
        (SLICED, {GPU: 56}, [Claim("mig", "A100", ((GPU, 3000),))]),
        ({"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.replicas": "10", "nvidia.com/gpu.sharing-strategy": "time-slicing"}, {"nvidia.com/gpu.shared": 80}, [Claim("t4", "T4", (("nvidia.com/gpu.shared", CARD // 10),))]),
        ({"amd.com/gpu.product-name": "AMD_Instinct_MI300X", "feature.node.kubernetes.io/pci-1200_1002.present": "true"}, {"amd.com/gpu": 8}, [Claim("amd", "MI300X", ())]),
    ],
)  # fmt: skip
def test_what_is_right_is_not_complained_of(
    labels: dict[str, str], offered: dict[str, int], claims: list[Claim]
) -> None:
    assert problems(labels, offered, claims) == []


_known = [*(labels for labels, _ in READ.values()), *(labels for labels, *_ in WRONG.values())]
_keys = st.sampled_from(sorted({key for labels in _known for key in labels}))
_values = st.one_of(
    st.text("aA0.-٣", max_size=8), st.sampled_from(["0", "1", "8", "-1", "x-MIG-", "-SHARED", "mixed", "single", "٣"])
)


@given(st.dictionaries(_keys, _values), st.dictionaries(st.sampled_from([GPU, MIG_1G, "cpu"]), st.integers(0, 9)))
def test_labels_of_any_kind_are_borne(labels: dict[str, str], offered: dict[str, int]) -> None:
    assert read(labels).unit.memory >= 0
    assert all(problems(labels, offered, [Claim("any", "H100", ((GPU, CARD),))]))
