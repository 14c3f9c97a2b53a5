"""What a gang's pods are told, and where they go."""

import json

import pytest

from queuectl.kube import decode
from queuectl.kube.claims import UnnamedError, claim
from queuectl.kube.pods import devices_of, manifests, nodes_of
from queuectl.model.lifecycle import Attempt, AttemptState
from queuectl.model.objects import DeviceKind, Flavor, Job
from queuectl.model.plan import Placement
from queuectl.model.resources import device_name
from tests.support.builders import GPU
from tests.support.manifests import Manifest, job, role


def decoded(manifest: Manifest) -> Job:
    return decode.job(json.dumps(manifest).encode()).value


def attempt(*placements: Placement) -> Attempt:
    return Attempt("u", 1, AttemptState.RESERVED, 1, placements, admitted_at=0.0)


def env(pod: Manifest, container: int = 0) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in pod["spec"]["containers"][container].get("env", [])}


def test_pods_are_numbered_as_they_were_placed() -> None:
    """Not by the names of nodes: neighbours in index are neighbours in the topology."""
    made = attempt(Placement("worker", "any", "z", 2, (), first=0), Placement("worker", "any", "a", 1, (), first=2))
    assert [node for _, (node, _) in sorted(nodes_of(made).items())] == ["z", "z", "a"]


def test_every_container_is_told_which_pod_it_is_in() -> None:
    """Ranks go over all roles in the order of the spec; what the template says itself stays."""
    given = {
        "name": "main",
        "image": "x",
        "env": [{"name": "QUEUECTL_ROLE", "value": "mine"}, {"name": "A", "value": "b"}],
    }
    one = decoded(job("llm", role("worker", 2, given), role("chief", 1)))
    made = attempt(Placement("chief", "any", "n", 1, ()), Placement("worker", "any", "n", 2, ()))
    pods = manifests(one, made, 0, {})
    ranks = {key: env(pod)["QUEUECTL_RANK"] for key, pod in pods.items()}
    assert ranks == {("worker", 0): "0", ("worker", 1): "1", ("chief", 0): "2"}
    told = env(pods["worker", 1])
    assert told == {
        "QUEUECTL_INDEX": "1", "QUEUECTL_RANK": "1", "QUEUECTL_WORLD_SIZE": "3", "QUEUECTL_ATTEMPT": "1",
        "QUEUECTL_ROLE": "mine", "A": "b",
    }  # fmt: skip
    assert "hostname" not in pods["worker", 0]["spec"]


def test_a_pod_whose_devices_are_named_has_a_claim_in_place_of_the_resource() -> None:
    """One request for each container that asks for some; kube-scheduler is left no choice, and nobody's CEL fails."""

    def container(name: str, gpus: int) -> Manifest:
        return {"name": name, "image": "x", "resources": {"limits": {"cpu": "1", GPU: gpus}, "requests": {GPU: gpus}}}

    manifest = job("llm", role("worker", 1, container("a", 2), container("b", 1), {"name": "c", "image": "x"}))
    manifest["spec"]["roles"][0]["template"]["spec"]["initContainers"] = [container("warm", 3)]
    one = decoded(manifest)
    names = [device_name("d.example.com", "", f"gpu-{number}") for number in range(3)]
    made = attempt(Placement("worker", "named", "n", 1, tuple((name, 1) for name in names)))
    kind = DeviceKind("d.example.com", "gpus", GPU, "uuid")
    [(key, (node, _, devices))] = devices_of(made, {"named": Flavor("named", devices=kind)}).items()
    [pod] = manifests(one, made, 0, {"named": Flavor("named", devices=kind)}).values()
    identities = {name: ("d.example.com/uuid", f"GPU-{number}") for number, name in enumerate(names)}

    claimed = claim(pod, one.templates["worker"]["spec"], kind, devices, identities)

    assert (key, node, devices) == (("worker", 0), "n", names)
    spec = pod["spec"]
    assert spec["resourceClaims"] == [{"name": "queuectl", "resourceClaimName": "llm-worker-1-0"}]
    assert [each.get("resources") for each in (*spec["containers"], *spec["initContainers"])] == [
        {"limits": {"cpu": "1"}, "requests": {}, "claims": [{"name": "queuectl", "request": "a"}]},
        {"limits": {"cpu": "1"}, "requests": {}, "claims": [{"name": "queuectl", "request": "b"}]},
        None,
        {"limits": {"cpu": "1"}, "requests": {}, "claims": [{"name": "queuectl"}]},
    ]
    assert claimed["metadata"]["name"] == "llm-worker-1-0"
    assert claimed["metadata"]["labels"] == pod["metadata"]["labels"]
    requests = claimed["spec"]["devices"]["requests"]
    assert [(each["name"], each["exactly"]["count"]) for each in requests] == [("a", 2), ("b", 1)]
    assert requests[0]["exactly"]["selectors"][0]["cel"]["expression"] == (
        'device.driver == "d.example.com" && "uuid" in device.attributes["d.example.com"]'
        ' && device.attributes["d.example.com"]["uuid"] in ["GPU-0", "GPU-1"]'
    )
    with pytest.raises(UnnamedError, match="gpu-2"):
        claim(pod, one.templates["worker"]["spec"], kind, devices, {name: identities[name] for name in names[:2]})


def test_the_first_pod_has_a_name_that_the_others_find() -> None:
    """With the subdomain of a headless Service."""
    manifest = job("llm", role("worker", 2))
    manifest["spec"]["roles"][0]["template"]["spec"]["subdomain"] = "peers"
    pods = manifests(decoded(manifest), attempt(Placement("worker", "any", "n", 2, ())), 0, {})
    assert {env(pod)["QUEUECTL_MASTER_ADDR"] for pod in pods.values()} == {"llm-worker-1-0.peers"}
    assert pods["worker", 1]["spec"]["hostname"] == "llm-worker-1-1"
