"""What the containers of a pod are given: environment, arguments, volumes, names of hosts."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from queuectl.local.agent import config
from queuectl.local.agent.config import Manifest, RefusedError
from queuectl.model.resources import parse_quantity

Mounts = dict[str, tuple[str, bool]]

HOST_ADDRESS = "127.0.0.1"
_IN_MAP = re.compile(r"metadata\.(labels|annotations)(?:\['(.+)'\])?")
_FIELDS = {"metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName"}
_READ_ONLY = {"downwardAPI", "configMap", "secret"}
_VARIABLE = re.compile(r"\$(?:\$|\(([^()]*)\))")


def address(uid: str) -> str:
    """Return a pod's address, of the loopback net: no set-up is needed, and it is likely that no other pod has it."""
    first, second, third = hashlib.sha256(uid.encode()).digest()[:3]
    return f"127.{1 + first % 254}.{second}.{1 + third % 254}"


def field(pod: Manifest, path: str) -> str:
    """Return the value of a `fieldRef`. Raises RefusedError."""
    if match := _IN_MAP.fullmatch(path):
        values: Mapping[str, str] = pod["metadata"].get(match[1]) or {}
        if match[2]:
            return values.get(match[2], "")
        return "\n".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in sorted(values.items()))
    if path in {"status.podIP", "status.podIPs"}:
        return address(pod["metadata"]["uid"])
    if path in {"status.hostIP", "status.hostIPs"}:
        return HOST_ADDRESS
    if path not in _FIELDS:
        raise RefusedError(f"fieldRef {path} is not supported by this node agent")
    part, _, name = path.partition(".")
    return str(pod[part].get(name) or "")


def environment(
    pod: Manifest, container: Manifest, base: Mapping[str, str], node: Mapping[str, str], data: config.Data
) -> dict[str, str]:
    """Return a container's environment, on top of `base`; `node`: the resources of the node. Raises RefusedError."""
    env = dict(base)
    for each in container.get("envFrom") or ():
        env |= config.variables(each, data)
    for each in container.get("env") or ():
        source = each.get("valueFrom")
        if source is None:
            env[each["name"]] = expand(each.get("value") or "", env)
        elif "fieldRef" in source:
            env[each["name"]] = field(pod, source["fieldRef"]["fieldPath"])
        elif "resourceFieldRef" in source:
            env[each["name"]] = _resource(pod, container, source["resourceFieldRef"], node)
        elif config.is_one(source):
            value = config.variable(each["name"], source, data)
            env |= {} if value is None else {each["name"]: value}
        else:
            kind, reference = next(iter(source.items()))
            if not reference.get("optional"):
                raise RefusedError(f"env {each['name']}: {kind} is not supported by this node agent; give a value")
    return env


def arguments(container: Manifest, env: Mapping[str, str]) -> list[str]:
    """Return the whole command line. Raises RefusedError."""
    if not container.get("command"):
        raise RefusedError(f"container {container['name']}: command is missing; this node agent looks into no image")
    return [expand(word, env) for word in [*container["command"], *(container.get("args") or ())]]


def expand(text: str, env: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by what `env` says, if it says anything, and `$$` by `$`."""
    return _VARIABLE.sub(lambda match: "$" if match[1] is None else env.get(match[1], match[0]), text)


def volumes(pod: Manifest, folder: Path, data: config.Data) -> dict[str, Path]:
    """Make the pod's volumes below `folder`, or find them, and return where each is. Raises RefusedError."""
    places = {}
    for volume in pod["spec"].get("volumes") or ():
        name = volume["name"]
        if "hostPath" in volume:
            places[name] = _on_host(name, volume["hostPath"])
        elif "emptyDir" in volume or "downwardAPI" in volume:
            places[name] = folder / name
            places[name].mkdir(parents=True, exist_ok=True)
            places[name].chmod(0o777)
        elif config.is_one(volume):
            places[name] = folder / name
            config.write(volume, places[name], data)
        else:
            kind = next((key for key in volume if key != "name"), "it")
            raise RefusedError(
                f"volume {name}: {kind} is not supported by this node agent; use emptyDir, hostPath, downwardAPI,"
                " configMap or secret"
            )
    show(pod, folder)
    return places


def show(pod: Manifest, folder: Path) -> None:
    """Write what has changed in the pod's downwardAPI volumes; each file is replaced in one step."""
    for volume in pod["spec"].get("volumes") or ():
        for item in (volume.get("downwardAPI") or {}).get("items") or ():
            if "fieldRef" not in item:
                raise RefusedError(f"volume {volume['name']}: resourceFieldRef is not supported by this node agent")
            path = folder / volume["name"] / item["path"]
            text = field(pod, item["fieldRef"]["fieldPath"])
            if not path.exists() or path.read_text() != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                scratch = path.with_name(f".{path.name}.new")
                scratch.write_text(text)
                scratch.replace(path)


def mounts(container: Manifest, places: Mapping[str, Path], pod: Manifest, env: Mapping[str, str]) -> Mounts:
    """Return what a container sees where. Raises RefusedError."""
    kinds = {volume["name"]: volume for volume in pod["spec"].get("volumes") or ()}
    seen: Mounts = {}
    for mount in container.get("volumeMounts") or ():
        source = places[mount["name"]]
        if part := mount.get("subPath") or expand(mount.get("subPathExpr") or "", env):
            source = source / part
            if ".." in Path(part).parts or part.startswith("/"):
                raise RefusedError(f"volume {mount['name']}: subPath {part} leads out of it")
            if not source.exists():
                source.mkdir(parents=True)
        read_only = bool(mount.get("readOnly")) or bool(_READ_ONLY & kinds[mount["name"]].keys())
        seen[str(Path("/", mount["mountPath"]))] = (str(source), read_only)
    return seen


def hosts(pod: Manifest, others: Iterable[Manifest]) -> str:
    """Return the pod's /etc/hosts: the machine's, its own names, and those that DNS would know in a cluster."""
    lines = [Path("/etc/hosts").read_text().rstrip("\n") if Path("/etc/hosts").exists() else "127.0.0.1 localhost"]
    lines += [f"{alias['ip']} {' '.join(alias['hostnames'])}" for alias in pod["spec"].get("hostAliases") or ()]
    namespace = pod["metadata"]["namespace"]
    for other in [pod, *(other for other in others if other is not pod)]:
        spec, meta = other["spec"], other["metadata"]
        host, domain = spec.get("hostname") or meta["name"], spec.get("subdomain")
        names = [f"{host}.{domain}.{namespace}.svc.cluster.local", f"{host}.{domain}"] if domain else []
        if other is pod:
            names.append(host)
        if names and meta["namespace"] == namespace:
            lines.append(f"{address(meta['uid'])} {' '.join(names)}")
    return "\n".join(lines) + "\n"


def _resource(pod: Manifest, container: Manifest, reference: Manifest, node: Mapping[str, str]) -> str:
    named = reference.get("containerName") or container["name"]
    spec = next(each for each in pod["spec"]["containers"] if each["name"] == named)
    kind, _, resource = reference["resource"].partition(".")
    given = (spec.get("resources") or {}).get(kind) or {}
    amount = given.get(resource, node.get(resource, "0") if kind == "limits" else "0")
    divisor = reference.get("divisor") or "0"
    unit = parse_quantity(resource, divisor) or parse_quantity(resource, "1")
    return str(-(-parse_quantity(resource, amount) // unit))


def _on_host(name: str, wanted: Manifest) -> Path:
    path, kind = Path(wanted["path"]), wanted.get("type") or ""
    if kind == "FileOrCreate":
        path.touch()
    elif kind == "DirectoryOrCreate" or (not kind and not path.exists()):
        path.mkdir(parents=True, exist_ok=True)
    fits = {"": path.exists(), "Directory": path.is_dir(), "DirectoryOrCreate": path.is_dir()}
    if not fits.get(kind, path.is_file() if kind.startswith("File") else path.exists()):
        raise RefusedError(f"volume {name}: hostPath {path} is no {kind}")
    return path
