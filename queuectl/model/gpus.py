"""What labels say of a node's GPUs, and what is wrong with them.

The labels are those of NVIDIA's GPU Feature Discovery, of AMD's node labeller, of Intel's rules for Node Feature
Discovery and of Ascend's device plugin. A label that is missing or no number tells nothing.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from queuectl.model.resources import CARD, CARDS, MIG, is_gpu

SHARED = ".shared"  # ends the name of a resource whose device plugin renames what pods share
INVALID = "INVALID"  # the profile of slices that strategy single can't announce
MIB, GIB = 2**20, 2**30
_PLAIN = "nvidia.com/gpu"
_STRATEGY = "nvidia.com/mig.strategy"
_MODELS = (
    f"{_PLAIN}.product", "amd.com/gpu.product-name", "beta.amd.com/gpu.product-name", "gpu.intel.com/product",
    "node.kubernetes.io/npu.chip.name",
)  # fmt: skip
_DRIVERS = ("nvidia.com/cuda.driver-version.full", "amd.com/gpu.driver-version", "beta.amd.com/gpu.driver-version")
_CUDA = "nvidia.com/cuda.runtime-version.full"
_OLD_DRIVER = [f"nvidia.com/cuda.driver.{part}" for part in ("major", "minor", "rev")]
_OLD_CUDA = [f"nvidia.com/cuda.runtime.{part}" for part in ("major", "minor")]
_VENDORS = {"10de": ("NVIDIA", "nvidia.com/"), "1002": ("AMD", "amd.com/"), "19e5": ("Ascend", "huawei.com/")}
_PCI = re.compile(
    r"feature\.node\.kubernetes\.io/pci-(?:\w{4}_)?(10de|1002|19e5)\.present"
)  # by Node Feature Discovery
_SLICES = re.compile(r"(?:(\d+)c\.)?(\d+)g\.")
_PARTITION = (
    "amd.com/compute-memory-partition",
    "amd.com/gpu.compute-memory-partition",
)  # the latter by older labellers
_PARTITIONS = re.compile(r"amd\.com/([dtqc])px_nps\d")
_PARTS = {"d": 2, "t": 3, "q": 4, "c": 8}  # of a card; a flavor can tell otherwise


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of a GPU resource on a node."""

    memory: int = 0  # bytes; 0: no label tells
    shared: bool = False  # whether several pods get the same GPU, by time-slicing or MPS
    slice: str = (
        ""  # the MIG profile, or AMD's partition, of what is called a GPU (strategy single); empty: a whole one
    )


@dataclass(frozen=True, slots=True)
class Gpus:
    """A node's GPUs; what no label tells is empty."""

    model: str = ""  # as the vendor names it
    driver: str = ""  # its version
    cuda: str = ""  # the version that the driver supports
    unit: Unit = Unit()
    slices: tuple[tuple[str, Unit], ...] = ()  # MIG slices that are resources of their own (strategy mixed)

    def of(self, resource: str) -> Unit:
        """Return what a unit of a resource of the node is; names unknown here are its GPUs by another name."""
        name = resource.removesuffix(SHARED)
        if name.startswith(MIG):
            return next((unit for known, unit in self.slices if known == name), Unit())
        return self.unit


NO_GPUS = Gpus()


def read(labels: Mapping[str, str]) -> Gpus:
    """Return what a node's labels say of its GPUs."""
    model = _first(labels, _MODELS)
    if not model and labels.get("accelerator", "").startswith("huawei-"):
        model = labels["accelerator"].removeprefix("huawei-")
    driver = _first(labels, _DRIVERS) or _joined(labels, _OLD_DRIVER)
    if not model and not driver:
        return NO_GPUS
    cuda = labels.get(_CUDA) or _joined(labels, _OLD_CUDA)
    unit = _unit(labels, _PLAIN)
    if not unit.memory:
        partition = _first(labels, _PARTITION)
        unit = Unit(
            _other_memory(labels), unit.shared, unit.slice or ("" if partition.startswith("spx") else partition)
        )
    slices: tuple[tuple[str, Unit], ...] = ()
    if labels.get(_STRATEGY) == "mixed":
        slices = tuple((name, _unit(labels, name)) for name in _sliced(labels))
    return Gpus(model, driver, cuda, unit, slices)


@lru_cache(maxsize=4096)
def weight(resource: str) -> int:
    """Return what a unit of a resource counts as in cards, by its name alone: a MIG slice by its seventh parts."""
    if not is_gpu(resource) or resource == CARDS:
        return 0
    if partition := _PARTITIONS.fullmatch(resource):
        return CARD // _PARTS[partition[1]]
    if resource.startswith(MIG) and (profile := _SLICES.match(resource.removeprefix(MIG))):
        return -(-CARD * int(profile[1] or profile[2]) // 7)
    return CARD


def is_slice(resource: str) -> bool:
    """Tell whether a resource counts slices by its name; others may stand for slices as well, which labels tell."""
    return resource.startswith(MIG) or _PARTITIONS.fullmatch(resource) is not None


def _unit(labels: Mapping[str, str], name: str) -> Unit:
    product, strategy = labels.get(f"{name}.product", ""), labels.get(f"{name}.sharing-strategy", "none")
    replicas = _number(labels, f"{name}.replicas")
    shared = product.endswith("-SHARED") or (strategy not in {"none", ""} if replicas is None else replicas > 1)
    profile = product.partition("-MIG-")[2].removesuffix("-SHARED") if name == _PLAIN else ""
    return Unit((_number(labels, f"{name}.memory") or 0) * MIB, shared, profile)


def _other_memory(labels: Mapping[str, str]) -> int:
    """Return the memory of a GPU of AMD's or Intel's."""
    vram = _first(labels, ("amd.com/gpu.vram", "beta.amd.com/gpu.vram"))
    if re.fullmatch("[0-9]{1,6}G", vram):
        return int(vram[:-1]) * GIB
    together = _number(labels, "gpu.intel.com/memory.max") or 0  # of all GPUs, in bytes
    return together // (_number(labels, "gpu.intel.com/device.count") or 1)


def _sliced(labels: Mapping[str, str]) -> list[str]:
    end = ".product"
    return sorted(key.removesuffix(end) for key in labels if key.startswith(MIG) and key.endswith(end))


def _first(labels: Mapping[str, str], keys: Iterable[str]) -> str:
    return next((labels[key] for key in keys if labels.get(key)), "")


def _joined(labels: Mapping[str, str], keys: Iterable[str]) -> str:
    return ".".join(labels[key] for key in keys if labels.get(key))


def _number(labels: Mapping[str, str], key: str) -> int | None:
    text = labels.get(key, "")
    return int(text) if re.fullmatch("[0-9]{1,15}", text) else None


# What is wrong


@dataclass(frozen=True, slots=True)
class Claim:
    """What a flavor says of its nodes' GPUs."""

    flavor: str
    model: str
    weights: tuple[tuple[str, int], ...]  # by resource, what a unit counts as in cards


def problems(labels: Mapping[str, str], offered: Mapping[str, int], claims: Sequence[Claim] = ()) -> list[str]:
    """Return a sentence for each thing that can't be right about a node's GPUs, and what would be.

    ``offered``: what pods may have of each resource; ``claims``: of the flavors that the node is of.
    """
    return [
        *_no_numbers(labels),
        *_not_offered(labels, offered),
        *_counts(labels, offered),
        *_sharing(labels),
        *_slicing(labels, offered),
        *_drivers(labels),
        *_models(labels, offered, claims),
        *_weights(labels, claims),
    ]


_EXAMPLES = {"count": "8", "memory": "81559, in MiB", "replicas": "4"}


def _no_numbers(labels: Mapping[str, str]) -> Iterator[str]:
    for name in (_PLAIN, *_sliced(labels)):
        for part, example in _EXAMPLES.items():
            key = f"{name}.{part}"
            if key in labels and _number(labels, key) is None:
                yield f'label {key} is "{labels[key]}"; right would be a number such as {example}'


def _not_offered(labels: Mapping[str, str], offered: Mapping[str, int]) -> Iterator[str]:
    names = [resource for resource, amount in offered.items() if amount and is_gpu(resource)]
    for key in labels:
        found = _PCI.fullmatch(key)
        if found and labels[key] == "true" and not names:
            vendor, prefix = _VENDORS[found[1]]
            yield (
                f"label {key} tells of a GPU of {vendor}, and the node offers none to pods; right would be a resource"
                f" {prefix}…: see whether its driver and device plugin run"
            )
            return
    count = _number(labels, f"{_PLAIN}.count")
    if count and not names and _PLAIN not in offered:
        yield (
            f"label {_PLAIN}.count is {count}, and the node offers no GPU to pods; right would be a resource {_PLAIN}:"
            " see whether its device plugin runs"
        )


def _counts(labels: Mapping[str, str], offered: Mapping[str, int]) -> Iterator[str]:
    for name in (_PLAIN, *_sliced(labels)):
        count = _number(labels, f"{name}.count")
        times = max(1, _number(labels, f"{name}.replicas") or 1)
        there = next((each for each in (name, f"{name}{SHARED}") if each in offered), None)
        if count is None or there is None or (name == _PLAIN and labels.get(_STRATEGY) == "mixed"):
            continue  # count is of all GPUs then, those that are sliced among them
        if offered[there] != count * times:
            by = f" and {name}.replicas {times}" if times > 1 else ""
            unless = ", unless one is unhealthy" if offered[there] < count * times else ""
            yield (
                f"label {name}.count is {count}{by}, and the node offers {offered[there]} {there}; right would be"
                f" {count * times}{unless}"
            )


def _sharing(labels: Mapping[str, str]) -> Iterator[str]:
    for name in (_PLAIN, *_sliced(labels)):
        product, replicas = labels.get(f"{name}.product", ""), _number(labels, f"{name}.replicas")
        strategy = labels.get(f"{name}.sharing-strategy", "")
        many = replicas is not None and replicas > 1
        if many and strategy in {"none", ""}:
            yield (
                f'label {name}.replicas is {replicas} and {name}.sharing-strategy "{strategy}"; right would be'
                " time-slicing or mps. The GPUs are taken for shared ones"
            )
        elif product.endswith("-SHARED") and not many:
            yield (
                f"label {name}.product is {product} and {name}.replicas"
                f" {labels.get(f'{name}.replicas', 'missing')}; right would be more than 1."
                " The GPUs are taken for shared ones"
            )
        elif strategy not in {"none", ""} and not many:
            yield (
                f"label {name}.sharing-strategy is {strategy} and {name}.replicas"
                f" {labels.get(f'{name}.replicas', 'missing')}; right would be more than 1, or strategy none"
            )


def _slicing(labels: Mapping[str, str], offered: Mapping[str, int]) -> Iterator[str]:
    strategy, unit = labels.get(_STRATEGY, "none"), _unit(labels, _PLAIN)
    slices = sorted(resource for resource, amount in offered.items() if amount and resource.startswith(MIG))
    if unit.slice == INVALID:
        yield (
            f"label {_PLAIN}.product is {labels[f'{_PLAIN}.product']}: with MIG strategy single, right would be all GPUs"
            " of the node in slices of one profile"
        )
    elif unit.slice and strategy != "single":
        yield f"label {_PLAIN}.product tells of slices {unit.slice}, and {_STRATEGY} is {strategy}; right would be single"
    if slices and strategy != "mixed":
        yield f"the node offers {', '.join(slices)}, and label {_STRATEGY} is {strategy}; right would be mixed"


def _drivers(labels: Mapping[str, str]) -> Iterator[str]:
    new, old = labels.get(_DRIVERS[0], ""), labels.get(_OLD_DRIVER[0], "")
    if new and old and new.partition(".")[0] != old:
        yield f"label {_DRIVERS[0]} is {new} and {_OLD_DRIVER[0]} {old}; right would be the same driver in both"


def _models(labels: Mapping[str, str], offered: Mapping[str, int], claims: Sequence[Claim]) -> Iterator[str]:
    model = read(labels).model
    if not model and any(amount and is_gpu(resource) for resource, amount in offered.items()):
        yield (
            f"no label tells the model of its GPUs; right would be one such as {_PLAIN}.product, as GPU Feature"
            " Discovery writes it"
        )
    for claim in claims:
        if model and claim.model and not _words(claim.model) & _words(model):
            key = next((key for key in _MODELS if labels.get(key)), "accelerator")
            yield (
                f"label {key} is {labels[key]}, and flavor {claim.flavor}, whose labels the node has, has gpuModel"
                f" {claim.model}; right would be a flavor of that model"
            )


def _words(model: str) -> set[str]:
    """Return the parts of a name that tell a model: those of letters and digits, unless they are its memory."""
    parts = re.findall(r"[a-z0-9]+", model.lower())
    telling = {part for part in parts if re.search("[0-9]", part) and re.search("[a-z]", part)}
    return {part for part in telling if not re.fullmatch("[0-9]+gb?", part)} or set(parts)


def _weights(labels: Mapping[str, str], claims: Sequence[Claim]) -> Iterator[str]:
    replicas = _number(labels, f"{_PLAIN}.replicas") or 1
    if replicas < 2 or _unit(labels, _PLAIN).slice:  # noqa: PLR2004 - shared by two or more
        return
    for claim in claims:
        for resource, amount in claim.weights:
            if resource.removesuffix(SHARED) == _PLAIN and amount != -(-CARD // replicas):
                yield (
                    f"label {_PLAIN}.replicas is {replicas}, and flavor {claim.flavor} gives {resource} another weight;"
                    f" right would be 1/{replicas}"
                )
