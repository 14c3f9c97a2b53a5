"""For how long nodes and pods are waited for of which nobody knows what they do. Pure."""

from math import inf

from queuectl.model.objects import Pod
from queuectl.model.suspects import Healing

# After a pod's time to stop is over, it is stuck: where no kubelet can tell that it is gone, and where one could.
STUCK_SECONDS = 30.0
STUCK_ON_READY_SECONDS = 300.0


def patience(healing: Healing, unready: int, nodes: int) -> float:
    """Return the seconds that gangs stay on a node that is not ready.

    For ever where most nodes are not: then it is the network, or the API server, that is at fault, and there is no better
    place. kube-controller-manager evicts nobody for the same reason, from 55 % and 3 nodes on.
    """
    return inf if unready > 2 and 100 * unready >= 55 * nodes else healing.not_ready  # noqa: PLR2004


def stuck_from(pod: Pod, *, unreachable: bool) -> float:
    """Return the Unix seconds from which on nobody waits any longer for a pod that was told to go, inf if it was not.

    ``unreachable``: its node is not ready, or gone.
    """
    return inf if pod.stops_by is None else pod.stops_by + (STUCK_SECONDS if unreachable else STUCK_ON_READY_SECONDS)
