"""What is wrong with a manifest, in sentences for people."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from queuectl.kube.schema import structural
from queuectl.model.reasons import listed

_MANY = 8  # names told when none is near


def problems(error: ValidationError, model: type[BaseModel]) -> list[tuple[str, str]]:
    """Return pairs of a field (``spec.roles[0].replicas``) and a sentence with its value and the remedy."""
    return [_problem(entry["loc"], entry["type"], entry["msg"], entry["input"], model) for entry in error.errors()]


def _problem(loc: Sequence[int | str], kind: str, text: str, value: object, model: type[BaseModel]) -> tuple[str, str]:
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    match kind:
        case "extra_forbidden":
            return field, _unknown(str(loc[-1]), _siblings(structural(model), loc))
        case "missing":
            return field, "is required; add it"
        case "value_error":
            return field, text.removeprefix("Value error, ")
        case "list_type":
            return field, f"{value!r} is not a list; write [{value}]" if isinstance(
                value, str | int
            ) else f"{value!r} is not a list"
    shown = repr(value) if isinstance(value, str | int | float) else f"this {type(value).__name__}"
    return field, f"{shown}: {text[:1].lower()}{text[1:]}"


def _unknown(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"known here are {', '.join(known)}"
    return f"unknown field {name}; {remedy}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return which of the known names may be meant, or which there are."""
    names = sorted(known)
    return alike(name, names) or f"known are {listed(names, _MANY) or 'none'}"


def alike(name: str, known: Sequence[str]) -> str:
    """Return which of the known names may be meant; empty when none is near."""
    near = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(near)}?" if near else ""


def _siblings(schema: dict[str, Any], loc: Sequence[int | str]) -> list[str]:
    for part in loc[:-1]:
        inner = schema.get("items") if isinstance(part, int) else schema.get("properties", {}).get(part)
        schema = inner or schema.get("additionalProperties") or {}
    return list(schema.get("properties", ()))
