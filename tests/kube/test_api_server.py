"""What the API server does with our objects: columns, names, status, and the admission policies."""

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from copy import deepcopy
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
import yaml

from queuectl.core.limits import not_for
from queuectl.kube import decode
from queuectl.kube.client import MERGE_PATCH, ApiError, KubeClient
from queuectl.kube.crds import Phase, Queue, TrainingJob
from queuectl.kube.names import (
    API_VERSION,
    CHANGE_WHY,
    CHANGED_BY,
    DEFAULT_QUEUE,
    FINALIZER,
    RESTRICTED_LABEL,
    SUBMITTED_BY,
)
from queuectl.kube.probe import policies_act
from queuectl.local.controlplane import Running
from tests.support.eventually import eventually
from tests.support.manifests import Manifest, collection, container, flavor, job, queue, quota, role

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
NOW = "2026-01-02T03:04:05Z"
FIXED = [phase for phase in Phase if phase is not Phase.PENDING]


class Objects:
    """Creates objects and removes what it created."""

    def __init__(self, kube: KubeClient) -> None:
        self.kube = kube
        self.created: list[str] = []

    async def create(self, manifest: Manifest) -> str:
        """Create the object under a name of its own and return its path."""
        named = deepcopy(manifest)
        named["metadata"] |= {"generateName": named["metadata"].pop("name") + "-"}
        created = await self.kube.request("POST", collection(named), params={"fieldValidation": "Strict"}, body=named)
        path = f"{collection(named)}/{created['metadata']['name']}"
        self.created.append(path)
        return path

    async def get(self, path: str) -> Manifest:
        found: Manifest = await self.kube.request("GET", path)
        return found

    async def patch(self, path: str, body: object, subresource: str = "") -> Manifest:
        patched: Manifest = await self.kube.request(
            "PATCH", path + subresource, params={"fieldValidation": "Strict"}, body=body, content_type=MERGE_PATCH
        )
        return patched

    async def set_phase(self, path: str, phase: Phase) -> None:
        await self.patch(path, {"status": {"phase": phase}}, "/status")

    async def remove_all(self) -> None:
        for path in self.created:
            if "/trainingjobs/" in path:
                await self.patch(path, {"metadata": {"finalizers": None}})
            await self.kube.request("DELETE", path)


@pytest.fixture
async def objects(kube: KubeClient) -> AsyncIterator[Objects]:
    result = Objects(kube)
    yield result
    await result.remove_all()


async def test_defaults_are_filled_in(objects: Objects) -> None:
    spec = (await objects.get(await objects.create(job())))["spec"]

    assert {key: spec[key] for key in spec.keys() - {"queue", "roles"}} == {
        "startDeadlineSeconds": 300,
        "backoffLimit": 3,
        "hold": False,
        "preemptible": True,
        "replaceLostPods": False,
    }
    assert spec["roles"][0]["mustSucceed"] is True
    assert spec["roles"][0]["template"]["spec"]["restartPolicy"] == "Never"
    assert (await objects.get(await objects.create(queue())))["spec"] == {
        "order": "BestEffortFIFO",
        "stopPolicy": "None",
        "whenOverQuota": "Keep",
    }


async def table(objects: Objects, path: str) -> dict[str, Any]:
    answer = await objects.kube.request("GET", path, accept=TABLE)
    columns = [(column["name"], column["priority"]) for column in answer["columnDefinitions"]]
    cells = dict(zip((name for name, _ in columns), answer["rows"][0]["cells"], strict=True))
    return {"columns": [n for n, p in columns if p == 0], "wide": [n for n, p in columns if p > 0], "cells": cells}


async def test_a_jobs_columns(objects: Objects) -> None:
    path = await objects.create(job(priority=7))
    status = {
        "phase": "Running",
        "pods": "3/8",
        "queuePosition": 2,
        "reason": "Running",
        "message": "So.",
        "attempt": 4,
    }
    await objects.patch(path, {"status": status}, "/status")

    shown = await table(objects, path)

    assert shown["columns"] == ["Name", "Queue", "Priority", "Phase", "Pods", "Position", "Reason", "Age"]
    assert shown["wide"] == ["Attempt", "Checkpoint", "Message"]
    assert shown["cells"] | {"Name": "", "Age": ""} == {
        "Name": "",
        "Age": "",
        "Queue": "team-a",
        "Priority": "7",
        "Phase": "Running",
        "Pods": "3/8",
        "Position": 2,
        "Reason": "Running",
        "Attempt": 4,
        "Checkpoint": None,
        "Message": "So.",
    }


async def test_the_priority_column_shows_the_class_where_one_is_named(objects: Objects) -> None:
    path = await objects.create(job(priorityClassName="urgent"))

    assert (await table(objects, path))["cells"]["Priority"] == "urgent"


async def test_a_queues_columns(objects: Objects) -> None:
    path = await objects.create(queue(parent="all", order="StrictFIFO"))
    ready = {"type": "Ready", "status": "False", "reason": "QueueStopped", "message": "It is stopped."}
    conditions = [{**ready, "lastTransitionTime": "2026-01-01T00:00:00Z"}]
    await objects.patch(path, {"status": {"pending": 3, "running": 2, "conditions": conditions}}, "/status")

    shown = await table(objects, path)

    assert shown["columns"] == ["Name", "Parent", "Order", "Pending", "Running", "Ready", "Reason", "Age"]
    assert [shown["cells"][name] for name in shown["columns"][1:-1]] == [
        "all", "StrictFIFO", 3, 2, "False", "QueueStopped",
    ]  # fmt: skip


async def test_a_flavors_columns(objects: Objects) -> None:
    shown = await table(objects, await objects.create(flavor(gpuModel="H100")))

    assert shown["columns"] == ["Name", "GPU-Model", "Age"]
    assert shown["cells"]["GPU-Model"] == "H100"


async def test_short_names_and_category(kube: KubeClient) -> None:
    answer = await kube.request("GET", f"/apis/{API_VERSION}")
    known = {item["name"]: item for item in answer["resources"]}

    assert {name: item.get("shortNames") for name, item in known.items() if "/" not in name} == {
        "trainingjobs": ["tj"],
        "queues": ["q"],
        "resourceflavors": ["rf"],
        "nodemaintenances": ["nm"],
    }
    assert all(item["categories"] == ["queuectl"] for name, item in known.items() if "/" not in name)
    assert known["trainingjobs"]["namespaced"]
    assert not known["queues"]["namespaced"]
    assert not known["resourceflavors"]["namespaced"]
    assert {"trainingjobs/status", "queues/status"} <= known.keys()


CONDITION = {
    "type": "Admitted",
    "status": "True",
    "observedGeneration": 1,
    "lastTransitionTime": NOW,
    "reason": "Admitted",
    "message": "Capacity is reserved.",
}
JOB_STATUS = {
    "phase": "Running",
    "conditions": [CONDITION],
    "observedGeneration": 1,
    "queuePosition": 1,
    "reason": "Running",
    "message": "The whole gang is ready: 2 pods.",
    "attempt": 1,
    "failures": 0,
    "pods": "2/2",
    "assignments": [{"role": "worker", "flavor": "h100", "node": "node-1", "pods": 2}],
    "admittedAt": NOW,
    "startedAt": NOW,
    "finishedAt": NOW,
    "exitCode": 0,
}
QUEUE_STATUS = {
    "conditions": [CONDITION | {"type": "Ready"}],
    "observedGeneration": 1,
    "pending": 0,
    "running": 1,
    "reserved": [{"flavor": "h100", "resource": "nvidia.com/gpu", "amount": "8", "nominal": "16"}],
}


async def test_status_is_typed_and_complete(objects: Objects) -> None:
    path = await objects.create(job())
    patched = await objects.patch(path, {"status": JOB_STATUS}, "/status")
    assert patched["status"] == JOB_STATUS
    assert patched["metadata"]["generation"] == 1
    read = TrainingJob.model_validate(patched)
    assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == patched

    path = await objects.create(queue())
    patched = await objects.patch(path, {"status": QUEUE_STATUS}, "/status")
    assert patched["status"] == QUEUE_STATUS
    assert Queue.model_validate(patched).status is not None


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"phase": "Odd"}, ("status.phase", "Odd", "Pending")),
        ({"attempt": -1}, ("status.attempt", "-1")),
        ({"admittedAt": "yesterday"}, ("status.admittedAt", "date-time")),
        ({"colour": "red"}, ("status.colour", "unknown field")),
        ({"conditions": [{"type": "Admitted"}]}, ("status.conditions[0].message", "Required")),
    ],
)
async def test_a_wrong_status_is_refused(objects: Objects, status: object, words: tuple[str, ...]) -> None:
    path = await objects.create(job())

    with pytest.raises(ApiError) as error:
        await objects.patch(path, {"status": status}, "/status")
    for word in words:
        assert word in error.value.message


async def test_status_and_spec_are_written_apart(objects: Objects) -> None:
    path = await objects.create(job())

    await objects.patch(path, {"status": {"phase": "Running"}})
    assert "status" not in await objects.get(path)

    await objects.patch(path, {"spec": {"hold": True}, "status": {"phase": "Pending"}}, "/status")
    found = await objects.get(path)
    assert found["spec"]["hold"] is False
    assert found["status"]["phase"] == "Pending"


async def test_a_job_gets_the_finalizer_beside_others(objects: Objects) -> None:
    manifest = job()
    manifest["metadata"]["finalizers"] = ["example.com/other"]
    path = await objects.create(manifest)

    assert set((await objects.get(path))["metadata"]["finalizers"]) == {FINALIZER, "example.com/other"}

    # Whoever takes it away has done so: it is added on creation only.
    await objects.patch(path, {"metadata": {"finalizers": None}})
    await objects.patch(path, {"spec": {"hold": True}})
    assert "finalizers" not in (await objects.get(path))["metadata"]


GANG_CHANGES: dict[str, dict[str, Any]] = {
    "queue": {"queue": "team-b"},
    "priority": {"priority": 9},
    "priorityClassName": {"priorityClassName": "urgent"},
    "roles": {"roles": [role("worker", 3)]},
    "roles, of a template": {"roles": [role("worker", 2, container(image="train:2"))]},
    "roles, of a field that the schema does not know": {"roles": [role("worker", 2, container(tty=True))]},
    "roles, of a label": {
        "roles": [
            role(template={"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [container()]}}),
        ]
    },
    "gpu": {"gpu": {"models": ["H100"]}},
}


@pytest.mark.parametrize("change", GANG_CHANGES)
async def test_the_gang_is_fixed_while_it_is_admitted(objects: Objects, change: str) -> None:
    path = await objects.create(job())
    await objects.set_phase(path, Phase.RUNNING)

    with pytest.raises(ApiError) as error:
        await objects.patch(path, {"spec": GANG_CHANGES[change]})

    field = change.partition(",")[0]
    assert error.value.status == 422
    assert (
        f"spec.{field} can't be changed while the job is Running: "
        "delete it and submit it anew, or wait until it is back in the queue"
    ) in error.value.message


@pytest.mark.parametrize("phase", FIXED)
async def test_the_gang_is_fixed_in_every_phase_but_pending(objects: Objects, phase: Phase) -> None:
    path = await objects.create(job())
    await objects.set_phase(path, phase)

    with pytest.raises(ApiError, match=rf"spec\.queue, spec\.gpu can't be changed while the job is {phase}"):
        await objects.patch(path, {"spec": {"queue": "team-b", "gpu": {"models": ["H100"]}}})

    # Nor can a field be taken away; what does not change the gang may change, and so may metadata.
    with pytest.raises(ApiError, match="roles"):
        await objects.patch(path, {"spec": {"roles": [role(mustSucceed=None), role("more")]}})
    loose = {
        "hold": True,
        "ttlSecondsAfterFinished": 5,
        "backoffLimit": 0,
        "maxRunSeconds": 60,
        "startDeadlineSeconds": 1,
    }
    patched = await objects.patch(path, {"metadata": {"labels": {"a": "b"}}, "spec": loose})
    assert {key: patched["spec"][key] for key in loose} == loose


@pytest.mark.parametrize("change", GANG_CHANGES)
async def test_the_gang_may_change_while_it_waits(objects: Objects, change: str) -> None:
    path = await objects.create(job())
    await objects.patch(path, {"spec": GANG_CHANGES[change]})

    again = await objects.create(job())
    await objects.set_phase(again, Phase.STOPPING)
    await objects.set_phase(again, Phase.PENDING)
    await objects.patch(again, {"spec": GANG_CHANGES[change]})


async def test_rules_hold_for_updates_too(objects: Objects) -> None:
    path = await objects.create(queue(quotas=[quota()]))
    with pytest.raises(ApiError, match="write 8 or 64Gi"):
        await objects.patch(path, {"spec": {"quotas": [quota("8 GPUs")]}})
    with pytest.raises(ApiError, match="is its own parent"):
        await objects.patch(path, {"spec": {"parent": path.rpartition("/")[2]}})


async def test_the_probe_sees_that_policies_act(kube: KubeClient) -> None:
    await eventually(lambda: policies_act(kube), "the policies", seconds=15)


@pytest.fixture
async def other_user(kube: KubeClient, control_plane: Running, tmp_path: Path) -> AsyncIterator[KubeClient]:
    """Open a client of somebody else, who may do as much."""
    account = {"metadata": {"generateName": "somebody-"}}
    accounts = "/api/v1/namespaces/default/serviceaccounts"
    name = (await kube.request("POST", accounts, body=account))["metadata"]["name"]
    token = await kube.request("POST", f"{accounts}/{name}/token", body={"spec": {"expirationSeconds": 3600}})
    bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "default"}],
    }
    await kube.request("POST", bindings, body=binding)
    config = json.loads(json.dumps(_kubeconfig(control_plane, token["status"]["token"])))
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    async with await KubeClient.open(str(tmp_path / "kubeconfig")) as client:

        async def allowed() -> bool:
            try:
                await client.request("GET", f"/apis/{API_VERSION}/queues")
            except ApiError:
                return False
            return True

        await eventually(allowed, "the new user's rights")
        yield client
    await kube.request("DELETE", f"{bindings}/{name}")
    await kube.request("DELETE", f"{accounts}/{name}")


def _kubeconfig(plane: Running, token: str) -> dict[str, Any]:
    authority = b64encode(plane.authority.encode()).decode()
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": plane.server, "certificate-authority-data": authority}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


async def author(objects: Objects, path: str) -> str:
    return str((await objects.get(path))["metadata"]["annotations"][CHANGED_BY])


async def test_a_queue_tells_who_changed_its_spec_last(objects: Objects, other_user: KubeClient) -> None:
    manifest = queue(quotas=[quota()])
    manifest["metadata"]["annotations"] = {CHANGED_BY: "somebody else"}
    path = await objects.create(manifest)
    assert await author(objects, path) == "admin"

    async def other(body: object, subresource: str = "") -> None:
        await other_user.request("PATCH", path + subresource, body=body, content_type=MERGE_PATCH)

    # Neither a label, nor the status, nor a lie changes it.
    await other({"metadata": {"labels": {"a": "b"}}})
    await other({"status": {"pending": 1}}, "/status")
    await other({"metadata": {"annotations": {CHANGED_BY: "king"}}})
    await other({"metadata": {"annotations": {CHANGED_BY: None}}})
    assert await author(objects, path) == "admin"

    await other({"spec": {"quotas": [quota(16)]}, "metadata": {"annotations": {CHANGED_BY: "king"}}})
    assert (await author(objects, path)).startswith("system:serviceaccount:default:somebody-")

    await objects.patch(path, {"spec": {"order": "StrictFIFO"}})
    assert await author(objects, path) == "admin"


async def test_a_kubeconfig_may_act_as_somebody_else(control_plane: Running, tmp_path: Path) -> None:
    config = yaml.safe_load(control_plane.kubeconfig.read_text(encoding="utf-8"))
    config["users"][0]["user"] |= {"as": "ann", "as-groups": ["vision", "speech"]}
    (tmp_path / "kubeconfig").write_text(json.dumps(config), encoding="utf-8")
    async with await KubeClient.open(str(tmp_path / "kubeconfig")) as client:
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        made = await client.request("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", body=review)
    told = made["status"]["userInfo"]
    assert told["username"] == "ann"
    assert {"vision", "speech"} <= set(told["groups"])


class Namespace:
    """A namespace whose labels and annotations change."""

    def __init__(self, kube: KubeClient, name: str) -> None:
        self.kube, self.name, self.path = kube, name, f"/api/v1/namespaces/{name}"

    async def make(self) -> None:
        await self.kube.request("POST", "/api/v1/namespaces", body={"metadata": {"name": self.name}})

    async def remove(self) -> None:
        await self.kube.request("DELETE", self.path)

    async def annotate(self, **given: str | None) -> None:
        await self._patch({"annotations": given})

    async def label(self, **given: str | None) -> None:
        await self._patch({"labels": given})

    async def _patch(self, meta: Manifest) -> None:
        await self.kube.request("PATCH", self.path, body={"metadata": meta}, content_type=MERGE_PATCH)

    def job(self, **spec: Any) -> Manifest:
        """Return a job; a queue of None leaves the field out."""
        manifest = job(namespace=self.name, **spec)
        manifest["spec"] = {key: value for key, value in manifest["spec"].items() if value is not None}
        return manifest

    async def try_job(self, **spec: Any) -> Manifest:
        """Create a job in a dry run."""
        manifest = self.job(**spec)
        params = {"dryRun": "All", "fieldValidation": "Strict"}
        found: Manifest = await self.kube.request("POST", collection(manifest), params=params, body=manifest)
        return found

    async def refusal(self, **spec: Any) -> str:
        """Return why a job is refused; nothing if it isn't."""
        try:
            await self.try_job(**spec)
        except ApiError as error:
            return error.message
        return ""


@pytest.fixture
async def namespace(kube: KubeClient) -> AsyncIterator[Namespace]:
    """Create a namespace of its own; nothing but a controller manager ever ends one, so its objects are removed."""
    result = Namespace(kube, f"team-{token_hex(4)}")
    await result.make()
    yield result
    await result.remove()


async def test_a_job_without_a_queue_gets_that_of_its_namespace(namespace: Namespace) -> None:
    refusal = await namespace.refusal(queue=None)
    assert refusal.startswith("spec: ")
    assert "queue is missing and the namespace has no default; name a Queue, or have an admin annotate" in refusal

    await namespace.annotate(**{DEFAULT_QUEUE: "team-a"})

    async def defaulted() -> bool:
        return not await namespace.refusal(queue=None)

    await eventually(defaulted, "the default queue")
    assert (await namespace.try_job(queue=None))["spec"]["queue"] == "team-a"
    assert (await namespace.try_job(queue="team-b"))["spec"]["queue"] == "team-b"

    await namespace.annotate(**{DEFAULT_QUEUE: "Team A"})
    await eventually(lambda: _says(namespace, '"Team A"', queue=None), "the wrong default")


async def _says(namespace: Namespace, words: str, **spec: Any) -> bool:
    return words in await namespace.refusal(**spec)


async def test_a_queue_can_not_be_taken_from_a_job(objects: Objects) -> None:
    path = await objects.create(job())
    with pytest.raises(ApiError, match="queue is missing"):
        await objects.patch(path, {"spec": {"queue": None}})


async def submitter(objects: Objects, path: str) -> str:
    return str((await objects.get(path))["metadata"]["annotations"][SUBMITTED_BY])


async def test_a_job_tells_who_submitted_it(objects: Objects, other_user: KubeClient) -> None:
    manifest = job()
    manifest["metadata"]["annotations"] = {SUBMITTED_BY: "somebody else"}
    path = await objects.create(manifest)
    assert await submitter(objects, path) == "admin"

    for lie in ("king", None, ""):
        await other_user.request(
            "PATCH",
            path,
            body={"spec": {"hold": lie is None}, "metadata": {"annotations": {SUBMITTED_BY: lie, "a": "b"}}},
            content_type=MERGE_PATCH,
        )
        assert await submitter(objects, path) == "admin"
    assert (await objects.get(path))["metadata"]["annotations"]["a"] == "b"

    made = await other_user.request("POST", collection(manifest), params={"dryRun": "All"}, body=job())
    assert made["metadata"]["annotations"][SUBMITTED_BY].startswith("system:serviceaccount:default:somebody-")


async def marked(objects: Objects, path: str) -> bool:
    labels = (await objects.get(path))["metadata"].get("labels", {})
    return bool(labels.get(RESTRICTED_LABEL) == "true")


async def test_only_queues_with_rules_for_submitting_are_marked(objects: Objects) -> None:
    path = await objects.create(queue())
    assert not await marked(objects, path)
    await objects.patch(path, {"spec": {"maxWaiting": 3}})
    assert await marked(objects, path)
    await objects.patch(path, {"metadata": {"labels": {RESTRICTED_LABEL: None, "a": "b"}}})
    assert await marked(objects, path)
    await objects.patch(path, {"spec": {"maxWaiting": None, "namespaceSelector": {}}})
    assert await marked(objects, path)
    await objects.patch(path, {"spec": {"namespaceSelector": None}})
    assert (await objects.get(path))["metadata"]["labels"] == {"a": "b"}


SELECTORS: dict[str, tuple[Manifest, dict[str, str], dict[str, str], str]] = {
    "a label's value": ({"matchLabels": {"team": "a"}}, {"team": "b"}, {"team": "a"}, "team in (a), and namespace {} has team=b"),
    "one of several": (
        {"matchExpressions": [{"key": "team", "operator": "In", "values": ["a", "b"]}]},
        {"squad": "a"}, {"team": "b"}, "team in (a, b), and namespace {} has no label team",
    ),
    "none of several": (
        {"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["a", "b"]}]},
        {"team": "a"}, {"team": "c"}, "team not in (a, b), and namespace {} has team=a",
    ),
    "a label that is there": (
        {"matchExpressions": [{"key": "team", "operator": "Exists"}]},
        {}, {"team": ""}, "a label team, and namespace {} has no label team",
    ),
    "a label that is not there": (
        {"matchExpressions": [{"key": "guest", "operator": "DoesNotExist"}]},
        {"guest": "yes"}, {"team": "a"}, "no label guest, and namespace {} has guest=yes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SELECTORS)
async def test_a_queue_is_for_the_namespaces_that_its_selector_takes(
    objects: Objects, namespace: Namespace, case: str
) -> None:
    selector, wrong, right, words = SELECTORS[case]
    name = (await objects.create(queue(namespaceSelector=selector))).rpartition("/")[2]
    told = f"spec.queue: queue {name} takes only jobs of namespaces with {words.format(namespace.name)}"

    await namespace.label(**wrong)
    await eventually(lambda: _says(namespace, told, queue=name), "the refusal", seconds=60)
    assert not await namespace.refusal(queue="team-a"), "other queues take it"

    await namespace.label(**dict.fromkeys(wrong, None) | right)
    await eventually(lambda: _says_nothing(namespace, queue=name), "the job to be taken")
    # The core judges by the same words: labels and selectors may change while a job waits.
    known = decode.queue(json.dumps(queue(name, namespaceSelector=selector)).encode()).value
    assert not_for(known, namespace.name, right) is None
    assert words.format(namespace.name) in str(not_for(known, namespace.name, wrong))


async def _says_nothing(namespace: Namespace, **spec: Any) -> bool:
    return not await namespace.refusal(**spec)


async def test_a_waiting_job_moves_only_to_a_queue_that_takes_it(objects: Objects) -> None:
    name = (await objects.create(queue(namespaceSelector={"matchLabels": {"team": "nobody"}}))).rpartition("/")[2]
    path = await objects.create(job())

    async def refused() -> bool:
        try:
            await objects.patch(path, {"spec": {"queue": name}})
        except ApiError as error:
            return "takes only jobs of namespaces with team in (nobody)" in error.message
        await objects.patch(path, {"spec": {"queue": "team-a"}})
        return False

    await eventually(refused, "the refusal", seconds=60)
    await objects.patch(path, {"spec": {"queue": "team-b"}})


async def test_a_queue_takes_no_more_waiting_jobs_than_it_may(objects: Objects, namespace: Namespace) -> None:
    path = await objects.create(queue(maxWaiting=2))
    name = path.rpartition("/")[2]
    assert not await namespace.refusal(queue=name)
    await objects.patch(path, {"status": {"pending": 1}}, "/status")
    assert not await namespace.refusal(queue=name)
    await objects.patch(path, {"status": {"pending": 2}}, "/status")
    told = f"spec.queue: in queue {name} as many wait as may: 2, and maxWaiting is 2; submit it later, or name another queue"
    await eventually(lambda: _says(namespace, told, queue=name), "the refusal", seconds=60)


async def test_limits_of_users_are_quantities(objects: Objects) -> None:
    path = await objects.create(queue(perUser={"maxResources": {"nvidia.com/gpu": 8, "cpu": "500m"}}))
    with pytest.raises(ApiError, match=r'nvidia\.com/gpu\]: "8 GPUs" is not a quantity'):
        await objects.patch(path, {"spec": {"perNamespace": {"maxResources": {"nvidia.com/gpu": "8 GPUs"}}}})


async def test_a_change_of_a_queue_does_not_inherit_the_reason_of_the_one_before(objects: Objects) -> None:
    manifest = queue(quotas=[quota()])
    manifest["metadata"]["annotations"] = {CHANGE_WHY: "it is new"}
    path = await objects.create(manifest)

    async def change(reason: str | None = None, **spec: object) -> str:
        body: dict[str, Any] = {"spec": spec} if spec else {}
        if reason is not None:
            body["metadata"] = {"annotations": {CHANGE_WHY: reason}}
        await objects.patch(path, body)
        return str((await objects.get(path))["metadata"]["annotations"][CHANGE_WHY])

    assert (await objects.get(path))["metadata"]["annotations"][CHANGE_WHY] == "it is new"
    assert await change("more servers", quotas=[quota(16)]) == "more servers"
    assert await change("another story") == "more servers", "the reason of what was done is not written anew"
    assert await change(quotas=[quota(8)]) == ""
    assert await change("too late") == ""
    assert await change("few servers", quotas=[quota(4)]) == "few servers"
    # As a manifest that is applied again and again says it.
    assert await change("few servers", quotas=[quota(2)]) == ""
