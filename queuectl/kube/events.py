"""Events, as the API server takes them."""

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

NAMESPACE = "default"  # of events about things that are in none


def event(
    regarding: Mapping[str, str], reason: str, note: str, *, identity: str, now: float, warning: bool = False
) -> dict[str, Any]:
    """Return an event about an object, of ``now`` (Unix seconds), by the controller of that identity."""
    namespace = regarding.get("namespace", NAMESPACE)
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{regarding['name']}.{uuid.uuid4().hex[:16]}", "namespace": namespace},
        "eventTime": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": "queuectl.dev/controller",
        "reportingInstance": identity[:128],
        "action": reason,
        "reason": reason,
        "type": "Warning" if warning else "Normal",
        "note": note[:1024],
        "regarding": dict(regarding),
    }
