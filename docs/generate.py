"""Write docs/reference/ from the code, or check that it is current.

python docs/generate.py --write | --check
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from queuectl.control import metrics
from queuectl.control.settings import Settings
from queuectl.kube.manifests import all_manifests
from queuectl.model.reasons import Reason

REFERENCE = Path(__file__).parent / "reference"
MADE = "<!-- Generated from the code by `make generate`; change it there. -->\n\n"

# Where each reason starts, by the first of its group in the list.
GROUPS = {
    Reason.PENDING: "Why a job waits",
    Reason.ADMITTED: "While it starts and runs",
    Reason.PREEMPTED: "Why everything was given back",
    Reason.QUEUE_READY: "Of a queue",
    Reason.MAINTENANCE_WAITS: "Of a NodeMaintenance and its nodes",
    Reason.SUCCEEDED: "How it ended",
}


def reasons() -> str:
    """Return the page of reasons."""
    lines = ["# Reasons", "", "The closed list of codes that conditions, events, metrics and the command line use."]
    for reason in Reason:
        if reason in GROUPS:
            lines += ["", f"## {GROUPS[reason]}", "", "| code | sentence |", "| --- | --- |"]
        sentence = re.sub(r"{(\w+):([\w ]+)}", r"{\1} \2s", reason.value)
        lines.append(f"| `{reason.code}` | {sentence} |")
    return "\n".join(lines)


def metric_list() -> str:
    """Return the page of metrics."""
    lines = ["# Metrics", "", "Served at `/metrics` by every controller; only the leader's move.", ""]
    lines += ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            [family] = metric.describe()
            labels = ", ".join(metric._labelnames)  # noqa: SLF001 - it has no public name
            name = family.name + ("_total" if family.type == "counter" else "")
            lines.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(lines)


def settings() -> str:
    """Return the page of the controller's settings."""
    lines = ["# Settings of the controller", "", "From the environment; times are in seconds.", ""]
    lines += ["| variable | default | meaning |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        variable = field.validation_alias or f"QUEUECTL_{name.upper()}"
        default = {"data": "`~/.local/share/queuectl`", "identity": "host name and process id"}.get(
            name, f"`{field.default}`" if field.default != "" else ""
        )
        lines.append(f"| `{variable}` | {default} | {field.description} |")
    return "\n".join(lines)


def api() -> str:
    """Return the page of the kinds and their fields."""
    lines = ["# API", "", "Group `queuectl.dev`, version `v1alpha1`. `kubectl explain` shows the same."]
    for manifest in all_manifests():
        if manifest["kind"] != "CustomResourceDefinition":
            continue
        names, scope = manifest["spec"]["names"], manifest["spec"]["scope"]
        [version] = manifest["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]
        lines += ["", f"## {names['kind']}", "", f"{schema.get('description', '')}"]
        lines += [f"{scope}, short name `{names['shortNames'][0]}`.", ""]
        lines += ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
        for part in ("spec", "status"):
            lines += [
                f"| `{path}` | {kind} | {default} | {text} |"
                for path, kind, default, text in _fields(part, schema["properties"].get(part, {}))
            ]
        rules = list(_rules(schema))
        if rules:
            lines += ["", "Refused by the API server:", "", *(f"- {rule}" for rule in rules)]
    return "\n".join(lines)


def _fields(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for name, field in (schema.get("properties") or {}).items():
        inner, suffix = field, ""
        if field.get("type") == "array":
            inner, suffix = field["items"], "[]"
        kind = "int or string" if inner.get("x-kubernetes-int-or-string") else inner.get("type", "any")
        if "enum" in inner:
            kind = ", ".join(f"`{value}`" for value in inner["enum"])
        default = f"`{json.dumps(field['default'])}`" if "default" in field else ""
        yield f"{path}.{name}{suffix}", kind + suffix, default, field.get("description", "")
        yield from _fields(f"{path}.{name}{suffix}", inner)


def _rules(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for rule in schema.get("x-kubernetes-validations") or ():
            if "message" in rule:
                yield rule["message"]
        for value in schema.values():
            yield from _rules(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _rules(value)


PAGES = {"reasons.md": reasons, "metrics.md": metric_list, "settings.md": settings, "api.md": api}


def main(mode: str) -> int:
    """Write or check all pages; return the exit status."""
    stale = []
    for name, make in PAGES.items():
        path, text = REFERENCE / name, MADE + make() + "\n"
        if mode == "--write":
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(str(path))
    for name in stale:
        sys.stderr.write(f"{name} is not current; run `make generate`\n")
    return 1 if stale else 0


if __name__ == "__main__":
    if sys.argv[1:] not in (["--write"], ["--check"]):
        sys.exit("usage: python docs/generate.py --write | --check")
    sys.exit(main(sys.argv[1]))
