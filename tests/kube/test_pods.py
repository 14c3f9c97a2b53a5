"""What a gang's pods are told, and where they go."""

import json

import pytest

from queuectl.kube import decode
from queuectl.kube.claims import UnnamedError, claim
from queuectl.kube.pods import devices_of, manifests, nodes_of
from queuectl.model.checkpoint import Checkpoint, Report
from queuectl.model.lifecycle import Attempt, AttemptState
from queuectl.model.objects import DeviceKind, Flavor, Job, Pod
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
        "QUEUECTL_ROLE": "mine", "A": "b", "QUEUECTL_POD": "llm-worker-1-1", "QUEUECTL_WORKLOAD_UID": one.gang.uid,
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


def test_a_job_that_saves_its_work_is_told_where_it_may_go_on() -> None:
    manifest = job("llm", role("worker", 1), checkpoint={"signal": "Annotation", "path": "/ckpt"})
    made = attempt(Placement("worker", "any", "n", 1, ()))
    first = env(manifests(decoded(manifest), made, 0, {})["worker", 0])
    assert first["QUEUECTL_CHECKPOINT_DIR"] == "/ckpt"
    assert not {"QUEUECTL_RESUME_STEP", "QUEUECTL_RESUME_PATH"} & first.keys(), "nothing is known yet"
    saved = Checkpoint(1.5, 1200, "/ckpt/step-1200", 1)
    again = env(manifests(decoded(manifest), made, 0, {}, saved)["worker", 0])
    assert again["QUEUECTL_RESUME_STEP"] == "1200"
    assert again["QUEUECTL_RESUME_PATH"] == "/ckpt/step-1200"


def test_every_container_sees_the_annotation_by_which_its_pod_is_asked() -> None:
    manifest = job("llm", role("worker", 1), checkpoint={"signal": "Annotation"})
    template = manifest["spec"]["roles"][0]["template"]["spec"]
    template |= {"volumes": [{"name": "data", "emptyDir": {}}], "initContainers": [{"name": "first", "image": "x"}]}
    spec = manifests(decoded(manifest), attempt(Placement("worker", "any", "n", 1, ())), 0, {})["worker", 0]["spec"]
    assert [volume["name"] for volume in spec["volumes"]] == ["data", "queuectl-ask"]
    [item] = spec["volumes"][1]["downwardAPI"]["items"]
    assert item == {"path": "ask", "fieldRef": {"fieldPath": "metadata.annotations['queuectl.dev/checkpoint-ask']"}}
    for container in (*spec["containers"], *spec["initContainers"]):
        assert {"name": "queuectl-ask", "mountPath": "/etc/queuectl", "readOnly": True} in container["volumeMounts"]
        assert {"name": "QUEUECTL_ASK_FILE", "value": "/etc/queuectl/ask"} in container["env"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("soon", "malformed"),
        ("[]", "Expected `object`"),
        ('{"step": 3}', "missing required field `at`"),
        ('{"at": "now"}', "Expected `float`"),
        ('{"at": -1}', "at is -1.0"),
        ('{"at": 1, "step": 1.5}', "Expected `int"),
        ('{"at": 1, "step": -4}', "step is -4"),
        (f'{{"at": 1, "path": "{2048 * "x"}"}}', "at most 2048 are read"),
    ],
)  # fmt: skip
def test_a_report_that_can_not_be_read_is_told(text: str, problem: str) -> None:
    seen = decoded_pod(annotation=text)
    assert seen.report is None
    assert problem in seen.report_problem


def test_what_a_pod_reports_is_read_from_its_annotation_and_its_last_words() -> None:
    one = '{"ask": "3-1", "step": 7, "at": 100.5, "path": "/c/7", "digest": "sha256:0"}'
    assert decoded_pod(annotation=one).report == Report("3-1", Checkpoint(100.5, 7, "/c/7"))
    later = 'bye\nqueuectl-checkpoint: {"ask": null, "step": 9, "at": 110}\n'
    assert decoded_pod(annotation=one, message=later).report == Report("3-1", Checkpoint(110.0, 9))
    assert decoded_pod(message="queuectl-checkpoint: {").report_problem
    assert decoded_pod(annotation=one, before=later).report == Report("3-1", Checkpoint(110.0, 9)), (
        "of a container started anew"
    )
    assert decoded_pod(annotation=one, ours=False).report is None, "others' pods may use the name as they like"


def decoded_pod(*, annotation: str = "", message: str = "", before: str = "", ours: bool = True) -> Pod:
    meta: Manifest = {"name": "p", "uid": "u", "annotations": {"queuectl.dev/checkpoint": annotation}}
    if ours:
        meta["labels"] = {"queuectl.dev/workload-uid": "w", "queuectl.dev/attempt": "3"}
    last, now = ({"terminated": {"exitCode": 0, "message": text}} if text else {} for text in (before, message))
    ends = [{"lastState": last, "state": now}]
    pod = {"metadata": meta, "status": {"containerStatuses": ends}}
    return decode.pod(json.dumps(pod).encode()).value


def test_a_pod_that_is_deleted_tells_since_when_and_how_long_it_may_take_to_stop() -> None:
    meta = {"name": "p", "deletionTimestamp": "1970-01-01T00:01:40Z", "deletionGracePeriodSeconds": 30}
    pod = decode.pod(json.dumps({"metadata": meta}).encode()).value
    assert (pod.deleting, pod.told_at, pod.stops_by) == (True, 70.0, 100.0)
    assert decoded_pod().stops_by is None


def test_tolerations_of_the_flavor_are_added_as_they_are() -> None:
    one = decoded(job("llm", role("worker", 1)))
    given = [
        {"key": "spot", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0},
        {"key": "gpu", "value": "yes"},
    ]
    raw = {"metadata": {"name": "any"}, "spec": {"tolerations": given}}
    kind = decode.flavor(json.dumps(raw).encode()).value
    made = attempt(Placement("worker", "any", "n", 1, ()))
    assert manifests(one, made, 0, {"any": kind})["worker", 0]["spec"]["tolerations"] == [
        given[0],
        {"key": "gpu", "operator": "Equal", "value": "yes"},
    ]


def _resizing(status: Manifest, *conditions: Manifest, init: bool = False) -> int:
    """Return the cpu that counts of a bound pod whose container asks for 2, by what its status says that it has."""
    one = {"name": "main", "resources": {"requests": {"cpu": "2"}}, **({"restartPolicy": "Always"} if init else {})}
    kind, of = ("initContainers", "initContainerStatuses") if init else ("containers", "containerStatuses")
    pod = {
        "metadata": {"name": "other", "namespace": "team", "uid": "u"},
        "spec": {"nodeName": "n", kind: [one]},
        "status": {"phase": "Running", of: [{"name": "main", **status}], "conditions": list(conditions)},
    }
    return dict(decode.pod(json.dumps(pod).encode()).value.requests)["cpu"]


def _has(cpu: str, allocated: str) -> Manifest:
    return {"resources": {"requests": {"cpu": cpu}}, "allocatedResources": {"cpu": allocated}}


def test_a_pod_that_is_resized_in_place_counts_as_kube_scheduler_counts_it() -> None:
    """The most of what it asks for, was given and has; what can never be given to it does not count."""
    infeasible = {"type": "PodResizePending", "status": "True", "reason": "Infeasible"}
    assert _resizing({}) == 2000
    assert _resizing(_has("2", "2000m")) == 2000
    assert _resizing(_has("6", "2")) == 6000  # it is being made smaller
    assert _resizing(_has("6", "2"), init=True) == 6000
    assert _resizing(_has("1", "1500m")) == 2000  # larger
    assert _resizing(_has("1", "1500m"), infeasible) == 1500
