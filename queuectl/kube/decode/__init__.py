"""From the API server's bytes to the vocabulary; only fields that are used are read."""

from queuectl.kube.decode.devices import resource_claim, resource_slice
from queuectl.kube.decode.jobs import job
from queuectl.kube.decode.nodes import node
from queuectl.kube.decode.others import budget, namespace, priority_class
from queuectl.kube.decode.pods import pod
from queuectl.kube.decode.queues import flavor, queue

__all__ = [
    "budget",
    "flavor",
    "job",
    "namespace",
    "node",
    "pod",
    "priority_class",
    "queue",
    "resource_claim",
    "resource_slice",
]
