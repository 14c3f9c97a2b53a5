"""What has to be in a cluster before the controller starts: CRDs and admission policies.

``python -m queuectl.kube.manifests --write`` writes them as YAML, ``--check`` tells whether the YAML is current.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from queuectl.kube.crds import Queue, ResourceFlavor, TrainingJob
from queuectl.kube.names import GROUP
from queuectl.kube.nodemaintenance import NodeMaintenance
from queuectl.kube.policies import policies
from queuectl.kube.schema import Column, Resource, crd

RESOURCES = (
    Resource(
        TrainingJob,
        plural="trainingjobs",
        short_names=("tj",),
        namespaced=True,
        columns=(
            Column("Queue", ".spec.queue"),
            # The class where one is named, else the number: the API server shows the first that is there.
            Column("Priority", ".spec['priorityClassName','priority']"),
            Column("Phase", ".status.phase"),
            Column("Pods", ".status.pods"),
            Column("Position", ".status.queuePosition", "integer"),
            Column("Reason", ".status.reason"),
            Column("Age", ".metadata.creationTimestamp", "date"),
            Column("Attempt", ".status.attempt", "integer", wide=True),
            Column("Checkpoint", ".status.lastCheckpoint.time", "date", wide=True),
            Column("Message", ".status.message", wide=True),
        ),
    ),
    Resource(
        Queue,
        plural="queues",
        short_names=("q",),
        columns=(
            Column("Parent", ".spec.parent"),
            Column("Order", ".spec.order"),
            Column("Pending", ".status.pending", "integer"),
            Column("Running", ".status.running", "integer"),
            Column("Ready", ".status.conditions[?(@.type=='Ready')].status"),
            Column("Reason", ".status.conditions[?(@.type=='Ready')].reason"),
            Column("Age", ".metadata.creationTimestamp", "date"),
        ),
    ),
    Resource(
        ResourceFlavor,
        plural="resourceflavors",
        short_names=("rf",),
        columns=(
            Column("GPU-Model", ".spec.gpuModel"),
            Column("Age", ".metadata.creationTimestamp", "date"),
        ),
    ),
    Resource(
        NodeMaintenance,
        plural="nodemaintenances",
        short_names=("nm",),
        columns=(
            Column("Work", ".spec.work"),
            Column("Phase", ".status.phase"),
            Column("Done", ".status.done"),
            Column("Age", ".metadata.creationTimestamp", "date"),
            Column("Message", ".status.message", wide=True),
        ),
    ),
)

_HEADER = "# generated, by `make generate`\n"


def crds() -> list[dict[str, Any]]:
    """Return the CustomResourceDefinitions."""
    return [crd(resource) for resource in RESOURCES]


def all_manifests() -> list[dict[str, Any]]:
    """Return everything to apply, in order: CRDs, then policies and their bindings."""
    return [*crds(), *policies()]


def files() -> dict[str, str]:
    """Return the generated files: path from the repository's root → text."""
    result = {f"crds/{item['metadata']['name'].removesuffix(f'.{GROUP}')}.yaml": _dump([item]) for item in crds()}
    return result | {"config/base/policies.yaml": _dump(policies())}


class _Dumper(yaml.SafeDumper):
    """Writes lists indented and never uses aliases."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: FBT001, FBT002, ARG002
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _dump(items: Sequence[dict[str, Any]]) -> str:
    text = yaml.dump_all(items, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)
    return _HEADER + text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the generated files; return 1 when they are not current."""
    parser = argparse.ArgumentParser(prog="python -m queuectl.kube.manifests", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the files")
    action.add_argument("--check", action="store_true", help="exit 1 when a file is not what --write would write")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository's root (default: here)")
    chosen = parser.parse_args(arguments)
    stale = [
        path
        for path, text in files().items()
        if not (chosen.root / path).is_file() or (chosen.root / path).read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if chosen.write:
            (chosen.root / path).parent.mkdir(parents=True, exist_ok=True)
            (chosen.root / path).write_text(files()[path], encoding="utf-8")
        print(f"{'wrote' if chosen.write else 'not current, run make generate:'} {path}", file=sys.stderr)  # noqa: T201
    return int(bool(stale) and chosen.check)


if __name__ == "__main__":
    sys.exit(main())
