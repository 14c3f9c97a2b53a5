"""Simulated GPU nodes, described as a real node describes itself."""

from collections.abc import Mapping, Sequence
from typing import Any


def node_manifest(
    name: str,
    *,
    gpus: int = 8,
    gpu_resource: str = "nvidia.com/gpu",
    gpu_product: str = "NVIDIA-H100-80GB-HBM3",
    cpu: str = "96",
    memory: str = "768Gi",
    pods: int = 110,
    more: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    taints: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """Return a Node for kwok to play; `cpu` and `memory` are Kubernetes quantities, `labels` win over our own.

    The GPU labels are those of GPU Feature Discovery; a node with no GPUs has none of them. `more`: further resources
    that it offers, as quantities.
    """
    has = {"cpu": cpu, "memory": memory, "ephemeral-storage": "3Ti", "pods": str(pods), **(more or {})}
    known = {"kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}
    if gpus:
        has[gpu_resource] = str(gpus)
        known |= {
            "nvidia.com/gpu.present": "true",
            "nvidia.com/gpu.count": str(gpus),
            "nvidia.com/gpu.product": gpu_product,
        }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": known | dict(labels or {}),
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        },
        "spec": {"taints": [dict(taint) for taint in taints]} if taints else {},
        "status": {"capacity": has, "allocatable": dict(has)},
    }
