"""What is read of nodes that are not ready or suspect, and of pods that others have ended."""

import json
from typing import Any

import pytest

from queuectl.kube import decode
from queuectl.kube.names import FORGIVEN, SUSPECT, WORKLOAD_LABEL
from queuectl.model.objects import Node, Pod

AT, UNIX = "2026-01-01T00:00:00Z", 1767225600.0


def node(*conditions: dict[str, str], **annotations: str) -> Node:
    given = {"metadata": {"name": "n", "annotations": annotations}, "status": {"conditions": list(conditions)}}
    return decode.node(json.dumps(given).encode()).value


def pod(meta: dict[str, Any] | None = None, **status: Any) -> Pod:
    given = {"metadata": {"name": "p", "namespace": "ns", **(meta or {})}, "spec": {"nodeName": "n"}, "status": status}
    return decode.pod(json.dumps(given).encode()).value


@pytest.mark.parametrize(("status", "since"), [("True", None), ("False", UNIX), ("Unknown", UNIX)])
def test_since_when_a_node_is_not_ready(status: str, since: float | None) -> None:
    one = node({"type": "Ready", "status": status, "lastTransitionTime": AT})
    assert (one.ready, one.unready_since) == (status == "True", since)


def test_a_node_that_has_never_been_ready_has_not_fallen_silent() -> None:
    assert (node().ready, node().unready_since) == (False, None)


def test_what_a_node_is_suspect_of_and_until_when_it_is_forgiven_is_no_change_of_the_node() -> None:
    ready = {"type": "Ready", "status": "True"}
    one = node(ready, {"type": SUSPECT, "status": "True", "message": "offence 1"}, **{FORGIVEN: AT})
    assert (one.suspect, one.forgiven_at) == ("offence 1", UNIX)
    assert node(ready, {"type": SUSPECT, "status": "False", "message": ""}).suspect == ""
    assert node(ready, **{FORGIVEN: "yes"}).forgiven_at == 0.0
    assert one == node(ready)


def test_until_when_a_pod_may_take_to_stop() -> None:
    assert (pod({"deletionTimestamp": AT}).deleting, pod({"deletionTimestamp": AT}).stops_by) == (True, UNIX)
    assert pod().stops_by is None


def test_who_ended_a_pod() -> None:
    told = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "TerminationByKubelet",
        "message": "too little memory",
    }
    evicted = pod(phase="Failed", reason="Evicted", conditions=[told])
    assert (evicted.disrupted_by, evicted.disrupted) == ("TerminationByKubelet", "too little memory")
    evicted = pod(phase="Failed", conditions=[{name: told[name] for name in ("type", "status", "reason")}])
    assert evicted.disrupted == "TerminationByKubelet"


def test_that_a_kubelet_did_not_take_a_pod_is_no_failure_of_its_own() -> None:
    refused = pod(phase="Failed", reason="UnexpectedAdmissionError", message="no healthy devices")
    assert (refused.disrupted_by, refused.disrupted) == (
        "UnexpectedAdmissionError",
        "UnexpectedAdmissionError: no healthy devices",
    )
    ran = {"state": {"terminated": {"exitCode": 137}}}
    assert pod(phase="Failed", reason="DeadlineExceeded", containerStatuses=[ran]).disrupted == ""
    assert pod(phase="Failed", containerStatuses=[ran]).disrupted == ""


def test_that_a_machine_started_again_is_no_failure_of_what_ran_there() -> None:
    missing = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": "it could not be located"}
    lost = pod(phase="Failed", containerStatuses=[{"name": "main", "state": {"terminated": missing}}])
    assert (lost.disrupted_by, lost.disrupted) == ("ContainerStatusUnknown", "container main: it could not be located")
    crashed = {"exitCode": 137, "reason": "Error"}
    assert pod(phase="Failed", containerStatuses=[{"name": "main", "state": {"terminated": crashed}}]).disrupted == ""


def test_why_a_container_of_ours_cannot_start() -> None:
    def waits(*states: dict[str, Any], label: str = WORKLOAD_LABEL) -> str:
        containers = [{"name": f"c{i}", "state": state} for i, state in enumerate(states)]
        return pod(
            {"labels": {label: "u"}}, containerStatuses=containers[1:], initContainerStatuses=containers[:1]
        ).waits

    creating = {"waiting": {"reason": "ContainerCreating"}}
    pulls = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off\npulling image x"}}
    assert waits(creating, {"waiting": {"reason": "PodInitializing"}}, {"running": {}}) == ""
    assert waits(creating, pulls) == "ImagePullBackOff (Back-off pulling image x)"
    assert waits({"waiting": {"reason": "CrashLoopBackOff"}}, pulls) == "CrashLoopBackOff"
    assert waits(pulls, label="another") == ""
    assert len(waits({"waiting": {"reason": "CreateContainerConfigError", "message": "x" * 999}})) == 200


def test_devices_that_a_node_has_and_does_not_offer_are_known() -> None:
    """Of other resources the difference is what the kubelet keeps."""
    given = {"capacity": {"nvidia.com/gpu": "8", "cpu": "96"}, "allocatable": {"nvidia.com/gpu": "6", "cpu": "94"}}
    raw = {"metadata": {"name": "n"}, "status": given}
    assert decode.node(json.dumps(raw).encode()).value.broken == {"nvidia.com/gpu": 2}
