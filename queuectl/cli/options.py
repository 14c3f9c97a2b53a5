"""Options that verbs share, and their values."""

import re
from enum import StrEnum
from typing import Annotated

import typer

from queuectl.cli.errors import CommandError, Exit


class Output(StrEnum):
    """Forms of what is printed."""

    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


class ObjectOutput(StrEnum):
    """Forms in which objects are printed."""

    NAME = "name"
    YAML = "yaml"
    JSON = "json"


class PhaseName(StrEnum):
    """Phases of a job, as ``queuectl.kube.crds.Phase``, which is too heavy for help and completion."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    CHECKPOINTING = "Checkpointing"
    STOPPING = "Stopping"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


Kubeconfig = Annotated[
    str | None, typer.Option("--kubeconfig", metavar="FILE", help="Kubeconfig to use; default as for kubectl.")
]
Context = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig; default its current one.")
]
Namespace = Annotated[
    str | None,
    typer.Option("-n", "--namespace", metavar="NAME", help="Namespace; default that of the kubeconfig's context."),
]
AllNamespaces = Annotated[bool, typer.Option("-A", "--all-namespaces", help="Show jobs of all namespaces.")]
Selector = Annotated[
    str | None, typer.Option("-l", "--selector", metavar="LABELS", help="Only jobs with these labels, such as a=b.")
]
OutputForm = Annotated[
    Output | None, typer.Option("-o", "--output", help="Form of the output; default a table that fits the terminal.")
]
Watch = Annotated[bool, typer.Option("-w", "--watch", help="Go on showing what changes, until Ctrl-C.")]

_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?")


def seconds(text: str, flag: str = "--timeout") -> float:
    """Return the seconds of a duration such as 90, 90s, 10m or 1h30m. Raises CommandError, which names the flag."""
    match = _DURATION.fullmatch(text)
    if not text or match is None or not any(match.groups()):
        raise CommandError(f'{flag}: "{text}" is not a duration; write 90s, 10m or 1h30m', Exit.USAGE)
    hours, minutes, rest = (float(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + rest


def text(summary: str, *examples: str, more: str = "") -> str:
    """Return a verb's help: what it does, examples, then the rest."""
    shown = "\n".join(f"  {example}" for example in examples)
    return f"{summary}\n\n\b\nExamples:\n{shown}\n\n{more}".rstrip()
