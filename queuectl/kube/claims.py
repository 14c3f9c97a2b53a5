"""ResourceClaims that name devices, and pods that refer to them instead of asking for an extended resource."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from queuectl.model.objects import DeviceKind
from queuectl.model.resources import parse_quantity

Manifest = dict[str, Any]
CLAIM = "queuectl"  # what pods call theirs
_KINDS = ("containers", "initContainers")
_REST = "queuectl-rest"  # the request for what only init containers ask for


class UnnamedError(Exception):
    """A device can't be named: no ResourceSlice lists it any more."""


def claim(
    pod: Manifest, template: Mapping[str, Any], kind: DeviceKind, devices: Sequence[str],
    identities: Mapping[str, tuple[str, str]],
) -> Manifest:  # fmt: skip
    """Return the claim of a pod for these devices, one request for each container that asks for some.

    kube-scheduler allocates it, so that nobody else can have been given the same device; the selectors leave it no
    choice. ``identities``: by device, the attribute and its value that tell it from the others of its node. Raises
    UnnamedError.
    """
    requests, left = [], list(devices)
    for name, number in _asked(template, kind):
        requests.append(_request(name, kind, left[:number], identities))
        left = left[number:]
    if left:
        requests.append(_request(_REST, kind, left, identities))
    meta = {key: pod["metadata"][key] for key in ("name", "namespace", "labels", "ownerReferences")}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": meta,
        "spec": {"devices": {"requests": requests}},
    }


def with_claim(pod: Manifest, kind: DeviceKind) -> Manifest:
    """Return the pod with its claim, which is named as the pod is, in place of the extended resource."""
    spec = pod["spec"]
    asked = {name for name, _ in _asked(spec, kind)}
    containers = {
        each: [_claiming(container, kind, own=container["name"] in asked) for container in spec[each]]
        for each in _KINDS
        if spec.get(each)
    }
    claims = [*(spec.get("resourceClaims") or ()), {"name": CLAIM, "resourceClaimName": pod["metadata"]["name"]}]
    return {**pod, "spec": {**spec, **containers, "resourceClaims": claims}}


def _asked(spec: Mapping[str, Any], kind: DeviceKind) -> list[tuple[str, int]]:
    """Return (container, devices) of those that run side by side; others use what is there."""
    found = ((each["name"], _devices(each, kind)) for each in spec["containers"])
    return [(name, number) for name, number in found if number]


def _devices(container: Mapping[str, Any], kind: DeviceKind) -> int:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return parse_quantity(kind.resource, asked.get(kind.resource, 0))


def _claiming(container: Manifest, kind: DeviceKind, *, own: bool) -> Manifest:
    if not _devices(container, kind):
        return container
    resources = {
        name: {key: value for key, value in amounts.items() if key != kind.resource} if name != "claims" else amounts
        for name, amounts in container["resources"].items()
    }
    mine = {"name": CLAIM, "request": container["name"]} if own else {"name": CLAIM}
    return {**container, "resources": {**resources, "claims": [*(resources.get("claims") or ()), mine]}}


def _request(
    name: str, kind: DeviceKind, devices: Sequence[str], identities: Mapping[str, tuple[str, str]]
) -> Manifest:
    missing = [device for device in devices if device not in identities]
    if missing:
        raise UnnamedError(f"no ResourceSlice lists {', '.join(missing)} any more")
    expression = _selector(kind.driver, [identities[device] for device in devices])
    exactly = {
        "deviceClassName": kind.device_class,
        "count": len(devices),
        "selectors": [{"cel": {"expression": expression}}],
    }
    return {"name": name, "exactly": exactly}


def _selector(driver: str, identities: Iterable[tuple[str, str]]) -> str:
    """Return the CEL expression that is true of these devices; one without the attribute must not be an error."""
    [attribute] = {attribute for attribute, _ in identities}
    domain, name = (json.dumps(part) for part in attribute.rsplit("/", 1))
    values = json.dumps([value for _, value in identities])
    there = f"device.attributes[{domain}]"
    return f"device.driver == {json.dumps(driver)} && {name} in {there} && {there}[{name}] in {values}"
