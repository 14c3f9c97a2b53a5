"""What a pod has of its node for itself (host ports, being apart from others), and what no reservation covers.

kube-scheduler's rules: ports of containers and sidecars, whatever address they are bound to (here stricter: two
addresses of one port are not told apart); required anti-affinity by the node's name.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from queuectl.core.nodes import selects
from queuectl.kube.selectors import selector
from queuectl.model.objects import Requirement
from queuectl.model.resources import ALONE, APART, HOST_PORT

HOSTNAME = "kubernetes.io/hostname"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_OTHER_PODS = ("namespaces", "namespaceSelector", "matchLabelKeys", "mismatchLabelKeys")  # of an anti-affinity term

PodSpec = Mapping[str, Any]
Labels = Mapping[str, str]


def alone(pods: Sequence[tuple[PodSpec, Labels]], namespace: str) -> list[dict[str, int]]:
    """Return for each kind of pods of a gang what one of them needs of its node, by names of ``is_alone``.

    A pod that is to be apart from those with some labels needs all of it; one with these labels, that minds nobody
    itself, a small part, if it is of the same gang. A single pod is a gang of one.
    """
    terms = {name: picks for spec, labels in pods for name, picks in _apart(spec, labels, namespace)}
    result = []
    for spec, labels in pods:
        mine = {name for name, _ in _apart(spec, labels, namespace)}
        beside = {name: 1 for name, picks in terms.items() if selects(picks, labels)}
        result.append(beside | dict.fromkeys((*_ports(spec), *mine), ALONE))
    return result


def unpromised(spec: PodSpec, labels: Labels) -> list[str]:
    """Return the fields of a pod's spec that only kube-scheduler heeds: no reservation takes them into account.

    What is not known of volumes, ``core.volumes`` says.
    """
    affinity = spec.get("affinity") or {}
    anti = (affinity.get("podAntiAffinity") or {}).get(_REQUIRED) or ()
    spread = spec.get("topologySpreadConstraints") or ()
    return [
        field
        for field, given in (
            ("affinity.podAffinity", (affinity.get("podAffinity") or {}).get(_REQUIRED)),
            ("affinity.podAntiAffinity", any(not _is_own(term, labels) for term in anti)),
            ("topologySpreadConstraints", any(each.get("whenUnsatisfiable") != "ScheduleAnyway" for each in spread)),
            ("resourceClaims", spec.get("resourceClaims")),
            ("schedulerName", spec.get("schedulerName") not in {None, "", "default-scheduler"}),
        )
        if given
    ]


def _ports(spec: PodSpec) -> Iterator[str]:
    sidecars = (c for c in spec.get("initContainers") or () if c.get("restartPolicy") == "Always")
    for container in (*(spec.get("containers") or ()), *sidecars):
        for port in container.get("ports") or ():
            number = port.get("hostPort") or (port.get("containerPort") if spec.get("hostNetwork") else None)
            if number:
                yield f"{HOST_PORT}{port.get('protocol') or 'TCP'}-{number}"


def _apart(spec: PodSpec, labels: Labels, namespace: str) -> Iterator[tuple[str, tuple[Requirement, ...]]]:
    """Yield what pods like this one have to be apart from, by a name that is the same for the same labels."""
    for term in ((spec.get("affinity") or {}).get("podAntiAffinity") or {}).get(_REQUIRED) or ():
        if _is_own(term, labels):
            picks = selector(term["labelSelector"]) or ()
            yield f"{APART}{namespace}:{_words(picks)}", picks


def _is_own(term: Mapping[str, Any], labels: Labels) -> bool:
    """Tell whether a term keeps pods like this one apart from each other, node by node."""
    picks = selector(term.get("labelSelector"))
    by_node = term.get("topologyKey") == HOSTNAME and not any(term.get(key) is not None for key in _OTHER_PODS)
    return by_node and picks is not None and selects(picks, labels)


def _words(picks: Iterable[Requirement]) -> str:
    return ",".join(sorted(f"{pick.key} {pick.operator} {' '.join(sorted(pick.values))}".strip() for pick in picks))
