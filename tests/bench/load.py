"""The load: gangs of equal pods that fit at once, on simulated nodes."""

from dataclasses import dataclass
from typing import Any

import msgspec

from queuectl.kube import decode, pods
from queuectl.local.nodes import node_manifest
from queuectl.model.lifecycle import Attempt, AttemptState
from queuectl.model.objects import Job
from queuectl.model.plan import Placement
from tests.support import manifests

NAMESPACE = QUEUE = "bench"
ROLE = "worker"
Object = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """`gangs` gangs of `pods` pods of `gpus` GPUs each, on `nodes` nodes of 8 GPUs."""

    gangs: int = 200
    pods: int = 8
    gpus: int = 2
    nodes: int = 500
    limit: float = 300.0  # seconds after which a run has failed

    def __post_init__(self) -> None:
        room = self.nodes * (8 // self.gpus if 0 < self.gpus <= 8 else 0)
        if min(self.gangs, self.pods, self.nodes) < 1 or self.gangs * self.pods > room:
            raise ValueError(
                f"{self.gangs} gangs of {self.pods} pods of {self.gpus} GPUs don't fit on {self.nodes} nodes of 8 GPUs; "
                f"ask for at most {room} such pods"
            )

    @property
    def total(self) -> int:
        """Number of pods."""
        return self.gangs * self.pods

    def names(self) -> list[str]:
        return [f"gang-{n:05}" for n in range(self.gangs)]

    def node_manifests(self) -> list[Object]:
        return [node_manifest(_node(n)) for n in range(self.nodes)]

    def job(self, name: str) -> Object:
        container = {"name": "main", "image": "train:1", "resources": {"limits": {"nvidia.com/gpu": self.gpus}}}
        return manifests.job(name, manifests.role(ROLE, self.pods, container), namespace=NAMESPACE, queue=QUEUE)

    def placed(self, name: str, number: int) -> tuple[Job, Attempt]:
        """Return the gang as it would be were it admitted: the first gang on the first nodes, and so on."""
        manifest = self.job(name)
        manifest["metadata"] |= {"uid": name, "generation": 1}
        job = decode.job(msgspec.json.encode(manifest)).value
        (role,) = job.gang.roles
        first, each = number * self.pods, 8 // self.gpus
        nodes = [_node(index // each) for index in range(first, first + self.pods)]
        placements = tuple(
            Placement(ROLE, QUEUE, node, nodes.count(node), role.requests) for node in sorted(set(nodes))
        )
        return job, Attempt(name, 1, AttemptState.RESERVED, 1, placements, admitted_at=0.0)

    def bare_pods(self, job: Job, attempt: Attempt) -> dict[tuple[str, int], Object]:
        """Return the pods that the controller would make; without an owner, for there is none."""
        made = pods.manifests(job, attempt, 0, {})
        for manifest in made.values():
            del manifest["metadata"]["ownerReferences"]
        return made


def _node(number: int) -> str:
    return f"node-{number:05}"
