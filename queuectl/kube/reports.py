"""What pods say of their checkpoints, and how they are asked for one: JSON of one line each."""

import math
from collections.abc import Iterator

import msgspec

from queuectl.model.checkpoint import Ask, Checkpoint, Report

MAX_BYTES = 2048
MAX_STEP = 2**63 - 1
PREFIX = "queuectl-checkpoint: "  # of a line of a container's termination message


class _Report(msgspec.Struct):
    at: float
    step: int | None = None
    path: str = ""
    ask: str | None = None


_decode = msgspec.json.Decoder(_Report).decode


def read(text: str | bytes) -> Report:
    """Read a report. Raises ValueError that says what is wrong with it."""
    raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
    if len(raw) > MAX_BYTES:
        raise ValueError(f"it has {len(raw)} bytes, and at most {MAX_BYTES} are read")
    try:
        said = _decode(raw)
    except msgspec.DecodeError as error:
        raise ValueError(
            f'{error}; write it as {{"ask": null, "step": 1200, "at": 1750000000.5, "path": "/checkpoints/step-1200"}}'
        ) from error
    if not (math.isfinite(said.at) and said.at >= 0):
        raise ValueError(f"at is {said.at}; give seconds since 1970")
    if said.step is not None and not 0 <= said.step <= MAX_STEP:
        raise ValueError(f"step is {said.step}; give a number from 0 to {MAX_STEP}")
    return Report(said.ask or "", Checkpoint(said.at, said.step, said.path))


def lines(message: str) -> Iterator[str]:
    """Yield the reports in a container's termination message."""
    for line in message.splitlines():
        if line.startswith(PREFIX):
            yield line.removeprefix(PREFIX)


def ask(name: str, asked: Ask) -> str:
    """Return how a pod is asked."""
    return msgspec.json.encode({"id": name, "deadline": asked.until}).decode()
