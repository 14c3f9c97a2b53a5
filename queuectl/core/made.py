"""What the API server makes of pods, where that is more than their template says.

LimitRanges give requests to containers that have none, RuntimeClasses an overhead and a node selector to pods, webhooks
add containers. Nobody can tell beforehand: it shows on pods as they are created, while they are gated. From then on
jobs of the namespace with such a template are planned with it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from queuectl.model.lifecycle import Attempt
from queuectl.model.objects import Job, Pod, Role
from queuectl.model.resources import is_alone, pod_requests

MAX_KNOWN = 1024  # templates of a namespace; the oldest are forgotten
_CONTAINER, _POD = ("resources", "restartPolicy"), ("runtimeClassName", "resources", "overhead")
_METADATA = ("labels", "annotations")  # by which webhooks tell whom to add something to


@dataclass(frozen=True, slots=True)
class _Grown:
    requests: tuple[tuple[str, int], ...]
    selector: frozenset[tuple[str, str]] = frozenset()  # what it has more


@dataclass
class Made:
    """What is known of it, and what is reserved for the pods of active attempts."""

    outgrown: set[str] = field(default_factory=set)  # workloads that were planned for less than their pods request
    _shown: dict[str, dict[str, _Grown]] = field(default_factory=dict)  # workload → role → the most of its gated pods
    _known: dict[str, dict[str, _Grown]] = field(default_factory=dict)  # namespace → what of a template matters → pods
    _reserved: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)  # workload → role → for each pod

    def begin(self, attempt: Attempt) -> None:
        """Take in what is reserved for an attempt."""
        self._reserved[attempt.uid] = {p.role: dict(p.requests) for p in attempt.placements}

    def start(self, uid: str) -> None:
        """Take in that a workload's attempt has all the pods that it is to have; those that join it later show anew."""
        self._shown.pop(uid, None)
        self.outgrown.discard(uid)

    def end(self, uid: str) -> None:
        """Forget what was reserved for a workload's attempt."""
        self._reserved.pop(uid, None)
        self.start(uid)

    def forget(self, namespace: str) -> None:
        """Take in that a namespace is gone."""
        self._known.pop(namespace, None)

    def beyond(self, pod: Pod) -> tuple[tuple[str, int], ...]:
        """Return what a pod of an active attempt requests beyond what is reserved for it."""
        reserved = self._reserved.get(pod.workload, {}).get(pod.role)
        if reserved is None:
            return ()
        return tuple((r, n - reserved.get(r, 0)) for r, n in pod.requests if n > reserved.get(r, 0) and not is_alone(r))

    def learn(self, job: Job, pod: Pod) -> bool:
        """Take in a gated pod of an active attempt of the job; tell whether that is news about its template."""
        role = next((one for one in job.gang.roles if one.name == pod.role), None)
        if role is None or not pod.requests:
            return False
        beyond = self.beyond(pod)
        if beyond:
            self.outgrown.add(pod.workload)
        known = self._known.get(job.gang.namespace, {})
        if not known and not beyond and role.constraints.selector == pod.selector:
            return False
        template = job.templates[pod.role]
        asks, own = pod_requests(template["spec"]), _own(template)
        shown = self._shown.setdefault(pod.workload, {})
        # All pods of a role are planned alike, so for the most of them; what claims stand for they do not request.
        before = shown.get(pod.role, _Grown(_plain(asks.items())))
        requests = dict(before.requests)
        requests |= {r: max(n, requests.get(r, 0)) for r, n in _plain(pod.requests)}
        selector = (dict(frozenset(pod.selector) - own) | dict(before.selector)).items()
        now = shown[pod.role] = _Grown(_plain(requests.items()), frozenset(selector))
        name = _what_matters(template)
        if known.get(name, _Grown(_plain(asks.items()))) == now:
            return False
        known = self._known.setdefault(job.gang.namespace, known)
        known.pop(name, None)
        known[name] = now
        if len(known) > MAX_KNOWN:
            del known[next(iter(known))]
        return True

    def judge(self, job: Job) -> Job:
        """Return a job with what its pods will request."""
        known = self._known.get(job.gang.namespace)
        if not known or job.problem is not None:
            return job
        roles = tuple(_grown(role, job.templates[role.name], known) for role in job.gang.roles)
        return job if roles == job.gang.roles else replace(job, gang=job.gang.but(roles=roles))


def alike(role: Role, other: Role) -> bool:
    """Tell whether two roles of a namespace may have the like template: then their pods are planned alike."""
    same_nodes = role.constraints.selector == other.constraints.selector
    return same_nodes and _plain(role.requests) == _plain(other.requests)


def _grown(role: Role, template: Mapping[str, Any], known: Mapping[str, _Grown]) -> Role:
    found = known.get(_what_matters(template))
    return _made(role, found, _own(template)) if found else role


@lru_cache(maxsize=MAX_KNOWN)  # a hundred thousand jobs may have the like role
def _made(role: Role, found: _Grown, own: frozenset[tuple[str, str]]) -> Role:
    requests = dict(found.requests) | {r: n for r, n in role.requests if is_alone(r)}
    constraints = replace(role.constraints, selector=tuple(sorted(own | found.selector)))
    return replace(role, requests=tuple(sorted(requests.items())), constraints=constraints)


def _own(template: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    return frozenset((template["spec"].get("nodeSelector") or {}).items())


def _plain(requests: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((r, n) for r, n in requests if not is_alone(r)))


def _what_matters(template: Mapping[str, Any]) -> str:
    """Return what of a template the API server's additions go by, as text."""
    spec, metadata = template["spec"], template.get("metadata") or {}
    return json.dumps(
        [
            [
                [{k: c.get(k) for k in _CONTAINER} for c in spec.get(kind) or ()]
                for kind in ("containers", "initContainers")
            ],
            {key: spec.get(key) for key in _POD},
            {key: metadata.get(key) for key in _METADATA},
        ],
        sort_keys=True,
    )
