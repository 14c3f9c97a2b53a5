"""What labels of GPU Feature Discovery say of a node's GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass

_MODEL = "nvidia.com/gpu.product"
_DRIVER = "nvidia.com/cuda.driver-version.full"


@dataclass(frozen=True, slots=True)
class Gpus:
    """A node's GPUs; what no label tells is empty."""

    model: str = ""  # as the vendor names it
    driver: str = ""  # its version


NO_GPUS = Gpus()


def read(labels: Mapping[str, str]) -> Gpus:
    """Return what a node's labels say of its GPUs."""
    return Gpus(labels.get(_MODEL, ""), labels.get(_DRIVER, ""))
