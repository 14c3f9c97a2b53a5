"""What several kinds have in common, as the API server writes it."""

from datetime import datetime
from typing import Any

import msgspec

from queuectl.model.objects import Toleration

Bytes = msgspec.Raw | bytes


class Meta(msgspec.Struct, rename="camel"):
    """The metadata of an object."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    deletion_grace_period_seconds: int | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: list[str] = []

    @property
    def key(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"


class Condition(msgspec.Struct, rename="camel"):
    """A condition of a node or pod."""

    type: str
    status: str
    message: str = ""
    reason: str = ""
    last_transition_time: datetime | None = None


class SeenTaint(msgspec.Struct):
    """A taint of a node or device."""

    key: str
    effect: str
    value: str = ""


class Object(msgspec.Struct):
    """An object of a kind of ours."""

    metadata: Meta
    spec: dict[str, Any] = {}
    status: dict[str, Any] = {}


decode_object = msgspec.json.Decoder(Object).decode


def number(text: str | None) -> int:
    """Return the number that a label holds; 0 for what is none."""
    return int(text) if text and text.isdigit() else 0


def seconds(text: str | None) -> float | None:
    """Return Unix seconds; None for what is no time, which asks for nothing."""
    try:
        at = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return at.timestamp() if at and at.tzinfo else None


def tolerations(given: Any) -> tuple[Toleration, ...]:
    """Return the tolerations of a pod or flavor."""
    return tuple(
        Toleration(
            t.get("key") or "",
            t.get("operator") or "Equal",
            t.get("value") or "",
            t.get("effect") or "",
            t.get("tolerationSeconds"),
        )
        for t in given or ()
    )
