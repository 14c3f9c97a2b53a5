"""Faults of nodes as others tell of them, in conditions."""

from collections.abc import Collection, Iterable
from typing import Protocol

PROBLEM_CHARACTERS = 200


class Condition(Protocol):
    """What is read of a node's condition."""

    type: str
    status: str
    message: str


def of_node(conditions: Iterable[Condition], counted: Collection[tuple[str, str]]) -> tuple[str, ...]:
    """Return what conditions of a node, of those that count, say in words."""
    return tuple(
        f"condition {one.type} is {one.status}{f': {_short(one.message)}' if one.message else ''}"
        for one in conditions
        if (one.type, one.status) in counted
    )


def _short(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= PROBLEM_CHARACTERS else f"{text[:PROBLEM_CHARACTERS]}..."
