"""Maintenance in the API server: the objects, the notes on nodes, and test pods."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from queuectl.core.maintenance import UPGRADE_SKIP
from queuectl.kube.informer import Item
from queuectl.kube.names import API, API_VERSION, GROUP
from queuectl.model.maintenance import (
    Drain,
    Maintenance,
    NodePhase,
    NodeState,
    NodeTest,
    NodeWork,
    Phase,
    Progress,
    TestPhase,
    Wanted,
)
from queuectl.model.objects import Mark

PATH = f"{API}/nodemaintenances"
MARK = f"{GROUP}/maintenance"  # of a node: whose it is and what queuectl has done to it; label of a test pod: the uid
DONE = f"{GROUP}/maintenance-done"  # of a node: somebody says that the work there is done
NODE = f"{GROUP}/node"  # of a test pod: the node that it verifies

Object = dict[str, Any]
_object = msgspec.json.Decoder(dict[str, Any]).decode
_NOT_STARTING = {"Unschedulable", "ImagePullBackOff", "ErrImagePull", "InvalidImageName", "CreateContainerConfigError"}


def mark(annotations: Mapping[str, str]) -> Mark:
    """Read what is noted on a node; what can't be read counts as nothing."""
    done = DONE in annotations
    try:
        noted = json.loads(annotations.get(MARK, "{}"))
        return Mark(str(noted.get("name", "")), noted.get("cordoned") is True, noted.get("held") is True, done)
    except (ValueError, AttributeError):
        return Mark(done=done)


def maintenance(raw: msgspec.Raw | bytes) -> Item[Maintenance]:
    """Decode a NodeMaintenance."""
    seen = _object(raw)
    meta, spec, status = seen["metadata"], seen["spec"], seen.get("status") or {}
    window, test = spec.get("window") or {}, spec.get("test")
    value = Maintenance(
        name=meta["name"],
        uid=meta["uid"],
        nodes=tuple(spec.get("nodes") or ()),
        selector=tuple(sorted((spec.get("nodeSelector") or {}).items())),
        work=NodeWork(spec.get("work", "Manual")),
        start=_unix(window.get("start")),
        end=_unix(window.get("end")),
        max_unavailable=spec.get("maxUnavailable", 1),
        canary=spec.get("canary", 1),
        test=test,
        test_seconds=test.get("timeoutSeconds", 900) if test else 0,
        drain=Drain(spec.get("drain", "Checkpoint")),
        why=spec.get("reason", ""),
        created_at=_unix(meta.get("creationTimestamp")) or 0.0,
        generation=meta.get("generation", 0),
        resource_version=meta["resourceVersion"],
        phase=Phase(status.get("phase", "Waiting")),
        states=tuple(_state(one) for one in status.get("nodes") or ()),
        status=status,
    )
    return Item(meta["name"], meta["resourceVersion"], value)


def _state(given: Mapping[str, Any]) -> NodeState:
    since, canary = _unix(given["since"]) or 0.0, given.get("canary") is True
    reason, message = given.get("reason", ""), given.get("message", "")
    return NodeState(given["name"], NodePhase(given["phase"]), since, reason, message, canary)


def status(one: Maintenance, progress: Progress, now: float) -> Object:
    """Return the status that tells how far a maintenance has come."""
    known = {condition["type"]: condition for condition in one.status.get("conditions") or ()}
    conditions = []
    for kind, holds in (("Halted", progress.phase is Phase.HALTED), ("Finished", progress.phase is Phase.FINISHED)):
        said, before = "True" if holds else "False", known.get(kind, {})
        since = before.get("lastTransitionTime") if before.get("status") == said else None
        conditions.append(
            {
                "type": kind,
                "status": said,
                "observedGeneration": one.generation,
                "lastTransitionTime": since or _text(now),
                "reason": progress.why.code,
                "message": str(progress.why),
            }
        )
    done = sum(state.phase is NodePhase.RELEASED for state in progress.states)
    return {
        "conditions": conditions,
        "observedGeneration": one.generation,
        "phase": progress.phase.value,
        "message": str(progress.why),
        "done": f"{done}/{len(progress.states)}",
        "nodes": [_standing(state) for state in progress.states],
    }


def _standing(state: NodeState) -> Object:
    told = {"name": state.name, "phase": state.phase.value, "since": _text(state.since)}
    if state.reason:
        told |= {"reason": state.reason, "message": state.message[:1024]}
    return told | {"canary": True} if state.canary else told


def node_patch(node: Mapping[str, Any], want: Wanted) -> Object | None:
    """Return the merge patch that makes a node be as is wanted, and notes what that changed; None: it is.

    Only what is noted as queuectl's own is ever undone. It holds only for the node as it was read.
    """
    cordon, hold = want.cordoned, want.held
    meta, spec = node["metadata"], node.get("spec") or {}
    annotations, labels = meta.get("annotations") or {}, meta.get("labels") or {}
    noted = mark(annotations)
    unschedulable, skipped = bool(spec.get("unschedulable")), labels.get(UPGRADE_SKIP) == "true"
    changes: Object = {}
    ours, held = noted.cordoned and unschedulable, noted.held and skipped
    if cordon and not unschedulable:
        changes["spec"], ours = {"unschedulable": True}, True
    elif not cordon and ours:
        changes["spec"], ours = {"unschedulable": None}, False
    if hold and not skipped:
        changes["metadata"], held = {"labels": {UPGRADE_SKIP: "true"}}, True
    elif hold is False and held:
        changes["metadata"], held = {"labels": {UPGRADE_SKIP: None}}, False
    note = None
    if cordon or ours or held:
        note = json.dumps({"name": want.maintenance, "cordoned": ours, "held": held})
    taken = want.done_is_taken and noted.done
    if note == annotations.get(MARK) and not changes and not taken:
        return None
    changes.setdefault("metadata", {})["annotations"] = {MARK: note} | ({DONE: None} if taken else {})
    changes["metadata"]["resourceVersion"] = meta["resourceVersion"]
    return changes


def test_pod(one: Maintenance, node: str) -> Object:
    """Return the pod that verifies a node: it may go there although the node is cordoned, and nowhere else."""
    rules: Mapping[str, Any] = one.test or {}
    template = rules["template"]
    meta, spec = template.get("metadata") or {}, template["spec"]
    short = hashlib.sha256(f"{one.uid}/{node}".encode()).hexdigest()[:10]
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{one.name[:40].rstrip('.-')}-test-{short}",
            "namespace": rules["namespace"],
            "labels": (meta.get("labels") or {}) | {MARK: one.uid},
            "annotations": (meta.get("annotations") or {}) | {NODE: node},
            "ownerReferences": [
                {"apiVersion": API_VERSION, "kind": "NodeMaintenance", "name": one.name, "uid": one.uid}
            ],
        },
        "spec": spec | {"affinity": affinity, "tolerations": [*spec.get("tolerations", ()), {"operator": "Exists"}]},
    }


def refused_test(one: Maintenance, node: str, problem: str) -> NodeTest:
    """Return what stands for a test pod that the API server has refused."""
    meta = test_pod(one, node)["metadata"]
    told = f"it could not be created: {problem}"
    return NodeTest(one.uid, node, meta["namespace"], meta["name"], TestPhase.RUNNING, 0.0, told)


def node_test(raw: msgspec.Raw | bytes) -> Item[NodeTest]:
    """Decode a test pod."""
    seen = _object(raw)
    meta, told = seen["metadata"], seen.get("status") or {}
    phases = {"Succeeded": TestPhase.SUCCEEDED, "Failed": TestPhase.FAILED}
    annotations = meta.get("annotations") or {}
    phase = phases.get(told.get("phase", ""), TestPhase.RUNNING)
    value = NodeTest(
        maintenance=(meta.get("labels") or {}).get(MARK, ""),
        node=annotations.get(NODE, ""),
        namespace=meta["namespace"],
        name=meta["name"],
        phase=phase,
        created_at=_unix(meta.get("creationTimestamp")) or 0.0,
        problem=_problem(told),
        uid=meta["uid"],
        resource_version=meta["resourceVersion"],
    )
    return Item(f"{meta['namespace']}/{meta['name']}", meta["resourceVersion"], value)


def _problem(told: Mapping[str, Any]) -> str:
    """Say what is wrong with a pod, as far as its status tells."""
    for each in _containers(told):
        ended = (each.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            said = (ended.get("message") or "").strip().splitlines()
            return f"container {each['name']} exited with {ended['exitCode']}{f': {said[-1][:200]}' if said else ''}"
        waiting = (each.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _NOT_STARTING:
            return f"container {each['name']} does not start: {waiting['reason']}"
    for condition in told.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"it finds no room: {condition.get('message', '')}".rstrip(". ")
    return str(told.get("message") or "").rstrip(". ")


def _containers(told: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [*(told.get("initContainerStatuses") or ()), *(told.get("containerStatuses") or ())]


def _unix(text: str | None) -> float | None:
    return datetime.fromisoformat(text).timestamp() if text else None


def _text(at: float) -> str:
    """Return a time as the API server writes it, never later than it was."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
