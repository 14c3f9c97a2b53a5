"""Conditions of nodes, as node-problem-detector sets them."""

from datetime import UTC, datetime

from queuectl.kube.client import STRATEGIC_PATCH, KubeClient


async def set_condition(kube: KubeClient, node: str, kind: str, status: str, message: str) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {
        "type": kind, "status": status, "reason": "Checked", "message": message, "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }  # fmt: skip
    body = {"status": {"conditions": [condition]}}
    await kube.request("PATCH", f"/api/v1/nodes/{node}/status", body=body, content_type=STRATEGIC_PATCH)
