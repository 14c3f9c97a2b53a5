"""What is read of claims, volumes and storage classes, and of the volumes of a job."""

import json
from typing import Any

import pytest

from queuectl.core.nodes import eligible
from queuectl.kube import decode, volumes
from queuectl.model.objects import Constraints, VolumeUse
from queuectl.model.volumes import Claim
from tests.support.builders import flavor, node
from tests.support.manifests import job, with_pod

ZONE, OLD_ZONE = "topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"


def _raw(spec: dict[str, Any], *, status: dict[str, Any] | None = None, **meta: Any) -> bytes:
    return json.dumps({"metadata": {"name": "data", **meta}, "spec": spec, "status": status or {}}).encode()


def test_a_claim_is_bound_only_once_the_binder_says_so() -> None:
    spec = {"volumeName": "pv", "accessModes": ["ReadWriteMany"], "storageClassName": "fast", "resources": {}}
    done = {"pv.kubernetes.io/bind-completed": "yes", "volume.kubernetes.io/selected-node": "n1"}
    free = Claim("team/data", ("ReadWriteMany",), volume="pv", storage_class="fast")
    assert volumes.claim(_raw(spec, namespace="team")).value == free
    bound = volumes.claim(_raw(spec, namespace="team", annotations=done, status={"phase": "Lost"})).value
    assert (bound.bound, bound.node, bound.lost, bound.key) == (True, "n1", True, "team/data")
    assert not volumes.claim(_raw({}, namespace="team", annotations=done)).value.bound


def _within(*zones: str) -> dict[str, Any]:
    expression = {"key": ZONE, "operator": "In", "values": list(zones)}
    return {"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}}


REACH: dict[str, tuple[dict[str, str], dict[str, Any], set[str]]] = {
    "everywhere": ({}, {}, {"in a", "in b", "by old labels in a", "nowhere"}),
    "by affinity": ({}, _within("a"), {"in a"}),
    "by label, and nodes without zones": ({ZONE: "a"}, {}, {"in a", "nowhere"}),
    "by labels of several zones": ({ZONE: "a__b"}, {}, {"in a", "in b", "nowhere"}),
    "by an old label": ({OLD_ZONE: "a"}, {}, {"in a", "by old labels in a", "nowhere"}),
    "by both": ({ZONE: "a__b"}, _within("b", "c"), {"in b"}),
}


@pytest.mark.parametrize(("labels", "spec", "reached"), REACH.values(), ids=REACH.keys())
def test_from_where_a_volume_can_be_reached(labels: dict[str, str], spec: dict[str, Any], reached: set[str]) -> None:
    """As the filters VolumeBinding and VolumeZone of kube-scheduler 1.36 have it."""
    nodes = [
        node("in a", labels={ZONE: "a"}),
        node("in b", labels={ZONE: "b"}),
        node("by old labels in a", labels={OLD_ZONE: "a"}),
        node("nowhere"),
    ]
    reach = volumes.volume(_raw(spec, labels=labels)).value.reach
    assert {one.name for one in nodes if eligible(one, flavor(), Constraints(volumes=reach))} == reached


def test_a_storage_class_says_when_and_where_its_volumes_are_made() -> None:
    allowed = [{"matchLabelExpressions": [{"key": ZONE, "values": ["a", "b"]}]}]
    meta = {"name": "fast", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
    raw = {"metadata": {**meta, "creationTimestamp": "2026-01-01T00:00:00Z"}, "provisioner": "ebs.csi.aws.com"}
    more = {"volumeBindingMode": "WaitForFirstConsumer", "allowedTopologies": allowed}
    kind = volumes.storage_class(json.dumps(raw | more).encode()).value
    assert (kind.waits, kind.provisions, kind.default_since) == (True, True, "2026-01-01T00:00:00Z")
    assert eligible(node("n", labels={ZONE: "b"}), flavor(), Constraints(volumes=(kind.reach,)))
    assert not eligible(node("n", labels={ZONE: "c"}), flavor(), Constraints(volumes=(kind.reach,)))
    by_hand = {"metadata": {"name": "local"}, "provisioner": "kubernetes.io/no-provisioner"}
    assert not volumes.storage_class(json.dumps(by_hand).encode()).value.provisions


def test_a_jobs_volumes_by_claim() -> None:
    given = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "sets"}},
        {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {"storageClassName": "fast"}}}},
        {"name": "more", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}},
    ]
    read = decode.job(json.dumps(with_pod(job("llm"), volumes=given)).encode()).value
    assert read.volumes == (
        VolumeUse("worker", "data", claim="sets"),
        VolumeUse("worker", "scratch", storage_class="fast"),
        VolumeUse("worker", "more"),
    )
    assert read.unpromised == ()
