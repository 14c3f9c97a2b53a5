"""ConfigMaps and Secrets that a pod names: read before its containers begin, as they are at that moment."""

import base64
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from queuectl.kube.client import ApiError, ApiUnreachableError, KubeClient

Manifest = dict[str, Any]
Data = Mapping[tuple[str, str], Mapping[str, bytes]]  # kind, name → what is in it, by key

_KINDS = {
    "configMap": "ConfigMap", "configMapRef": "ConfigMap", "configMapKeyRef": "ConfigMap",
    "secret": "Secret", "secretRef": "Secret", "secretKeyRef": "Secret",
}  # fmt: skip


class RefusedError(Exception):
    """The pod asks for something that this agent does not do, or that is not there; the message names the field."""


async def read(client: KubeClient, pod: Manifest) -> dict[tuple[str, str], dict[str, bytes]]:
    """Return all that the pod names; what is optional and not there is left out. Raises RefusedError."""
    found: dict[tuple[str, str], dict[str, bytes]] = {}
    for where, kind, name, optional in _named(pod["spec"]):
        if (kind, name) in found:
            continue
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/{kind.lower()}s/{name}"
        try:
            found[kind, name] = _content(await client.request("GET", path))
        except (ApiError, ApiUnreachableError) as error:
            missing = isinstance(error, ApiError) and error.status == HTTPStatus.NOT_FOUND
            if not (missing and optional):
                raise RefusedError(f"{where}: {error}") from error
    return found


def variables(source: Manifest, data: Data) -> dict[str, str]:
    """Return the variables of an entry of `envFrom`."""
    kind, reference = _reference(source)
    prefix = source.get("prefix") or ""
    return {f"{prefix}{key}": text.decode(errors="replace") for key, text in _of(data, kind, reference).items()}


def variable(name: str, source: Manifest, data: Data) -> str | None:
    """Return what `valueFrom` says of a variable; None when that is optional and not there. Raises RefusedError."""
    kind, reference = _reference(source)
    content = _of(data, kind, reference)
    if reference["key"] not in content:
        if reference.get("optional"):
            return None
        raise RefusedError(f"env {name}: {kind} {reference['name']} has no key {reference['key']}")
    return content[reference["key"]].decode(errors="replace")


def write(volume: Manifest, folder: Path, data: Data) -> None:
    """Write the files of a volume. Raises RefusedError."""
    kind, reference = _reference(volume)
    content = _of(data, kind, reference)
    items = reference.get("items") or [{"key": key, "path": key} for key in content]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for item in items:
        if item["key"] not in content:
            if reference.get("optional"):
                continue
            raise RefusedError(f"volume {volume['name']}: {kind} {_name(reference)} has no key {item['key']}")
        path = folder / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content[item["key"]])
        mode = item.get("mode")
        path.chmod(mode if mode is not None else reference.get("defaultMode") or 0o644)


def _named(spec: Manifest) -> Iterator[tuple[str, str, str, bool]]:
    """Yield which field names what, and whether that is optional."""
    places = [(f"volume {volume['name']}", volume) for volume in spec.get("volumes") or ()]
    for container in [*(spec.get("initContainers") or ()), *spec["containers"]]:
        places += [(f"container {container['name']}: envFrom", each) for each in container.get("envFrom") or ()]
        places += [
            (f"env {each['name']}", each["valueFrom"]) for each in container.get("env") or () if each.get("valueFrom")
        ]
    for where, source in places:
        if is_one(source):
            kind, reference = _reference(source)
            yield where, kind, _name(reference), bool(reference.get("optional"))


def is_one(source: Manifest) -> bool:
    """Tell whether a volume or a variable is of a ConfigMap or a Secret."""
    return bool(_KINDS.keys() & source.keys())


def _reference(source: Manifest) -> tuple[str, dict[str, Any]]:
    field = next(iter(_KINDS.keys() & source.keys()))
    return _KINDS[field], source[field]


def _name(reference: Manifest) -> str:
    return str(reference.get("secretName") or reference.get("name") or "")


def _of(data: Data, kind: str, reference: Manifest) -> Mapping[str, bytes]:
    return data.get((kind, _name(reference)), {})


def _content(found: Manifest) -> dict[str, bytes]:
    if found["kind"] == "ConfigMap":
        texts = {key: text.encode() for key, text in (found.get("data") or {}).items()}
        return texts | {key: base64.b64decode(text) for key, text in (found.get("binaryData") or {}).items()}
    return {key: base64.b64decode(text) for key, text in (found.get("data") or {}).items()}
