"""What `queuectl submit` accepts and refuses: all of it or nothing, with field, value and remedy."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from queuectl.cli.errors import Exit
from queuectl.kube.client import MERGE_PATCH, ApiError, KubeClient
from queuectl.kube.names import API, DEFAULT_QUEUE
from queuectl.local.controlplane import Running
from tests.support.commands import Commands, Result
from tests.support.eventually import eventually
from tests.support.manifests import Manifest, container, flavor, job, queue, quota, role, with_pod

NAMESPACE = "submit"
TEAM = "submit-team"
GPUS = "submit-gpus"


def text(*documents: Manifest) -> str:
    return yaml.safe_dump_all(documents)


def gpus(count: object = 1, resource: str = "nvidia.com/gpu", **more: Any) -> Manifest:
    return container(resources={"limits": {resource: count}}, **more)


def mine(name: str, *roles: Manifest, **spec: Any) -> Manifest:
    namespace = spec.pop("namespace", NAMESPACE)
    return job(name, *(roles or [role("worker", 2, gpus())]), namespace=namespace, **{"queue": TEAM, **spec})


# What a model alone can tell: the words that must be in the line about the document.
BAD = {
    "an unknown field": (mine("bad", proirity=3), "spec.proirity: unknown field proirity; did you mean priority?"),
    "negative replicas": (
        mine("bad", role("worker", -1, gpus())),
        "spec.roles[0].replicas: -1: input should be greater than or equal to 1",
    ),
    "no roles": (mine("bad", roles=[]), "spec.roles: this list: list should have at least 1 item"),
    "a model but no GPU": (
        mine("bad", role("worker", 2, container(gpu=None)), gpu={"models": ["H100"]}),
        "add a request such as nvidia.com/gpu: 1, or remove gpu",
    ),
    "two roles of one name": (
        mine("bad", role("worker", 1, gpus()), role("worker", 2, gpus())),
        'spec: two roles are named "worker"; give each role a name of its own',
    ),
    "a huge template": (
        mine("bad", role("worker", 2, container(args=["x" * 10_000_000]))),
        "at most 1000000 can be stored; move data out of the template, into an image, a volume or a ConfigMap",
    ),
    "a name too long for its pods": (
        mine("a" * 44, role()),
        "its role worker are too long for its pods: together at most 49 characters",
    ),
    "a request in words": (
        mine("bad", role("worker", 2, container(gpu="8 GPUs"))),
        'resources.requests.nvidia.com/gpu: "8 GPUs" is not a quantity; write 8 or 64Gi',
    ),
    "a quota below zero": (
        queue("bad", quotas=[quota(-8, flavor=GPUS)]),
        "Queue bad: spec.quotas[0].nominal: -8 is below zero; write 0 or more",
    ),
    "a quota in words": (
        queue("bad", quotas=[quota("8 GPUs", flavor=GPUS)]),
        'spec.quotas[0].nominal: "8 GPUs" is not a quantity; write 8 or 64Gi',
    ),
    "its own parent": (queue("bad", parent="bad"), "queue bad is its own parent; name another Queue or remove parent"),
    "an unknown kind": (
        {**mine("bad"), "kind": "TrainJob"},
        'kind: "TrainJob" can\'t be submitted; write TrainingJob, Queue, ResourceFlavor, NodeMaintenance',
    ),
    "another API": (
        {**mine("bad"), "apiVersion": "batch/v1"},
        'apiVersion: "batch/v1" is not ours; write queuectl.dev/v1alpha1',
    ),
    "no kind": (
        {"metadata": {"name": "bad"}},
        "kind: is required; write TrainingJob, Queue, ResourceFlavor, NodeMaintenance",
    ),
    "no name": (mine(""), "metadata.name: is required; add it, or generateName"),
}

# What only the cluster can tell.
WRONG = {
    "an unknown queue": (
        mine("wrong-queue", queue="submit-taem"),
        f'spec.queue: "submit-taem" does not exist; did you mean {TEAM}',
    ),
    "a queue like no other": (mine("wrong-queue-2", queue="zzz"), 'spec.queue: "zzz" does not exist; known are '),
    "an unknown class": (
        mine("wrong-class", priorityClassName="urgent"),
        'spec.priorityClassName: "urgent" does not exist; name a PriorityClass, or give priority instead',
    ),
    "an unknown parent": (
        queue("submit-orphan", parent="submit-taem"),
        f'spec.parent: "submit-taem" does not exist; did you mean {TEAM}',
    ),
    "an unknown parent much like the queue itself": (
        queue("zzz-child", parent="zzz-chile"),
        'spec.parent: "zzz-chile" does not exist; known are ',
    ),
    "a lending limit above what it owns": (
        queue("submit-lends", quotas=[quota(8, flavor=GPUS) | {"lendingLimit": 9}]),
        "spec.quotas[0].lendingLimit: 9 is more than nominal, 8, and no queue is below this one; write at most that",
    ),
    "an unknown flavor": (
        queue("submit-lost", quotas=[quota(flavor="submit-gpu")]),
        f'spec.quotas[0].flavor: "submit-gpu" does not exist; did you mean {GPUS}?',
    ),
    "a circle": (
        queue("submit-x", parent="submit-y"),
        'spec.parent: "submit-y" closes a circle, submit-x > submit-y > submit-z > submit-x; remove parent from one',
    ),
    "the circle's second": (queue("submit-y", parent="submit-z"), "closes a circle, submit-y > submit-z > "),
    "the circle's third": (queue("submit-z", parent="submit-x"), "closes a circle, submit-z > submit-x > "),
    "more than the quota": (
        mine("wrong-size", role("worker", 9, gpus(8))),
        f"72 nvidia.com/gpu and queue {TEAM} has 16 in flavor {GPUS}. Ask for at most that, or name a queue that may",
    ),
    "a resource that no flavor has": (
        mine("wrong-gpu", role("worker", 1, gpus(1, "amd.com/gpu"))),
        (
            "none has a quota for amd.com/gpu; for GPUs there is nvidia.com/gpu. Ask for what the queue has"
            f" ({GPUS}), or name another queue; --force"
        ),
    ),
    "a model that no flavor has": (mine("wrong-model", gpu={"models": ["B200"]}), "none is of GPU model B200."),
    "a field that no pod has": (
        with_pod(mine("wrong-field"), hostnetwork=True),
        'spec.roles[0].template: unknown field "spec.hostnetwork"; correct or remove it',
    ),
    "a pod that is refused": (
        mine("wrong-pod", role("worker", 1, gpus()), role("log", 1, gpus(image=None))),
        "spec.roles[1].template: spec.containers[0].image: Required value",
    ),
    "a namespace that isn't there": (
        mine("wrong-place", namespace="nowhere"),
        'metadata.namespace: "nowhere" does not exist; create it, or name another with -n',
    ),
    "one name twice": (mine("wrong-pod"), 'metadata.name: "wrong-pod" is in standard input, document 16 already'),
    "a name that is taken": (
        queue(TEAM),
        f'metadata.name: "{TEAM}" exists already; choose another name, or: kubectl edit Queue {TEAM}',
    ),
    "a name that is none": (mine("Wrong_Name"), "metadata.name: Invalid value"),
}


@pytest.fixture(scope="module")
def run(kube: KubeClient, control_plane: Running) -> Commands:
    return Commands(control_plane.kubeconfig)


@pytest.fixture(scope="module")
async def team(kube: KubeClient, run: Commands) -> AsyncIterator[str]:
    """A queue of 16 GPUs, and a namespace."""
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    await kube.request("POST", "/api/v1/namespaces", body=body)
    given = await run(
        "submit", "-f", "-", stdin=text(queue(TEAM, quotas=[quota(16, flavor=GPUS)]), flavor(GPUS, gpuModel="H100"))
    )
    assert given.out.splitlines() == [
        f"resourceflavor.queuectl.dev/{GPUS} created",
        f"queue.queuectl.dev/{TEAM} created",
    ]
    try:
        yield TEAM
    finally:
        path = f"{API}/namespaces/{NAMESPACE}/trainingjobs"
        for item in (await kube.request("GET", path))["items"]:  # no controller takes the finalizer away
            one = f"{path}/{item['metadata']['name']}"
            await kube.request(
                "PATCH", one, body={"metadata": {"finalizers": None}}, content_type="application/merge-patch+json"
            )
            await kube.request("DELETE", one)
        await kube.request("DELETE", f"{API}/queues/{TEAM}")
        await kube.request("DELETE", f"{API}/resourceflavors/{GPUS}")
        await kube.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}")


async def told(run: Commands, cases: dict[str, tuple[Manifest, str]]) -> Result:
    """Submit all of the cases, with a good job before and after them."""
    documents = (mine("good"), *(manifest for manifest, _ in cases.values()), mine("good-2"))
    return await run("submit", "-f", "-", stdin=text(*documents), code=Exit.REFUSED)


@pytest.fixture(scope="module")
async def bad(team: str, run: Commands) -> Result:
    return await told(run, BAD)


@pytest.fixture(scope="module")
async def wrong(team: str, run: Commands) -> Result:
    return await told(run, WRONG)


def _line(result: Result, number: int) -> str:
    return "\n".join(line for line in result.err.splitlines() if f"standard input, document {number}: " in line)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_object_is_refused(case: str, bad: Result) -> None:
    assert BAD[case][1] in _line(bad, list(BAD).index(case) + 2)


@pytest.mark.parametrize("case", WRONG)
def test_what_the_cluster_cannot_run_is_refused(case: str, wrong: Result) -> None:
    assert WRONG[case][1] in _line(wrong, list(WRONG).index(case) + 2)


async def test_nothing_is_created_when_one_is_bad(bad: Result, wrong: Result, kube: KubeClient) -> None:
    for result, cases in ((bad, BAD), (wrong, WRONG)):
        assert result.out == ""
        assert result.err.startswith("queuectl: nothing was created:\n")
        assert _line(result, 1) == _line(result, len(cases) + 2) == ""
    assert (await kube.request("GET", f"{API}/namespaces/{NAMESPACE}/trainingjobs"))["items"] == []


NOT_DOCUMENTS = {
    "bad YAML": ("kind: TrainingJob\nspec: [1, 2", "standard input: line 3, column 1: did not find expected"),
    "a key twice": ("kind: A\nkind: B", 'standard input: line 2, column 1: the key "kind" occurs twice'),
    "a tab": ("kind:\n\tA: b", "line 2, column 1: found character that cannot start any token"),
    "a list": ("- 1\n- 2", "standard input: this is a list, not an object; write apiVersion, kind, metadata and spec"),
    "words": ("submit this", "this is a text, not an object"),
    "nothing": ("# nothing\n---\n", "no documents; write at least one TrainingJob"),
}


@pytest.mark.parametrize("case", NOT_DOCUMENTS)
async def test_what_is_no_document_is_refused(case: str, run: Commands) -> None:
    given, want = NOT_DOCUMENTS[case]
    assert want in (await run("submit", "-f", "-", stdin=given, code=Exit.REFUSED)).err


async def test_a_dry_run_checks_all_and_creates_nothing(team: str, run: Commands, kube: KubeClient) -> None:
    given = text(mine("dry"), queue("submit-dry", parent=TEAM))
    done = await run("submit", "-f", "-", "--dry-run", stdin=given)
    assert done.out.splitlines() == [
        "queue.queuectl.dev/submit-dry created (server dry run)",
        "trainingjob.queuectl.dev/dry created (server dry run)",
    ]
    with pytest.raises(ApiError, match="not found"):
        await kube.request("GET", f"{API}/queues/submit-dry")
    with pytest.raises(ApiError, match="not found"):
        await kube.request("GET", f"{API}/namespaces/{NAMESPACE}/trainingjobs/dry")


async def test_files_names_and_what_comes_back(team: str, run: Commands, tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.json"
    first = mine("one")
    del first["metadata"]["namespace"]
    first["spec"]["roles"][0]["template"]["spec"]["containers"][0]["env"] = [{"name": "AT", "value": "12:30"}]
    one.write_text(text(first).replace("'12:30'", "12:30"))
    two.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": [mine("two"), mine("three")]}))
    words = ("submit", "-f", str(one), "-f", str(two), "-n", NAMESPACE, "-o", "name")
    assert (await run(*words)).out.split() == [f"trainingjob.queuectl.dev/{name}" for name in ("one", "two", "three")]

    again = await run("submit", "-f", str(one), "-n", NAMESPACE, code=Exit.REFUSED)
    assert again.err.startswith(f'queuectl: {one}: TrainingJob one: metadata.name: "one" exists already; ')
    assert "queuectl cancel one" in again.err

    shown = (await run("get", "one", "-n", NAMESPACE, "-o", "yaml")).out
    assert yaml.safe_load(shown)["metadata"]["uid"]
    anew = shown.replace("name: one\n", "name: anew\n")
    done = yaml.safe_load((await run("submit", "-f", "-", "-o", "yaml", stdin=anew)).out)
    assert (done["metadata"]["name"], done["metadata"]["namespace"]) == ("anew", NAMESPACE)
    assert done["spec"]["roles"][0]["template"]["spec"]["containers"][0]["env"][0]["value"] == "12:30"

    elsewhere = await run("submit", "-f", "-", "-n", "default", stdin=text(mine("other")), code=Exit.REFUSED)
    assert f'metadata.namespace: "{NAMESPACE}" is not the "default" of -n' in elsewhere.err


async def test_a_job_without_a_queue_goes_to_the_default_of_its_namespace(
    team: str, run: Commands, kube: KubeClient
) -> None:
    lost = mine("lost")
    del lost["spec"]["queue"]
    refused = await run("submit", "-f", "-", stdin=text(lost), code=Exit.REFUSED)
    assert "queue is missing and the namespace has no default; name a Queue" in refused.err

    async def default(name: str | None) -> None:
        body = {"metadata": {"annotations": {DEFAULT_QUEUE: name}}}
        await kube.request("PATCH", f"/api/v1/namespaces/{NAMESPACE}", body=body, content_type=MERGE_PATCH)

    async def tried(code: int, words: str) -> bool:
        try:
            given = await run("submit", "-f", "-", "--dry-run", stdin=text(lost), code=code)
        except AssertionError:
            return False
        return words in given.out + given.err

    await default("submit-tema")
    told = f'"submit-tema", the default of namespace {NAMESPACE}, does not exist; did you mean {TEAM}?'
    await eventually(lambda: tried(Exit.REFUSED, told), "the refusal of a default that is not there")
    await default(TEAM)
    await eventually(lambda: tried(Exit.DONE, "created"), "the default")
    await run("submit", "-f", "-", stdin=text(lost))
    await default(None)
    described = (await run("describe", "lost", "-n", NAMESPACE)).out.splitlines()
    assert f"Queue:          {TEAM}" in described
    assert "Submitted by:   admin" in described


async def test_several_come_back_as_a_list(team: str, run: Commands) -> None:
    named = mine("")
    named["metadata"] = {"generateName": "made-", "namespace": NAMESPACE}
    done = await run("submit", "-f", "-", "-o", "json", stdin=text(named, mine("listed")))
    items = msgspec.json.decode(done.out)["items"]
    assert items[0]["metadata"]["name"].startswith("made-")
    assert items[1]["metadata"]["name"] == "listed"


async def test_more_than_the_quota_waits_if_forced(team: str, run: Commands) -> None:
    huge = text(mine("huge", role("worker", 9, gpus(8))))
    assert "--force" in (await run("submit", "-f", "-", stdin=huge, code=Exit.REFUSED)).err
    assert (await run("submit", "-f", "-", "--force", stdin=huge)).out == "trainingjob.queuectl.dev/huge created\n"


async def test_what_no_reservation_covers_is_told_and_stays_with_the_job(team: str, run: Commands) -> None:
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
    done = await run("submit", "-f", "-", stdin=text(with_pod(mine("spread"), topologySpreadConstraints=[spread])))
    assert done.out == "trainingjob.queuectl.dev/spread created\n"
    assert "No reservation takes spec.roles[worker].template.spec.topologySpreadConstraints into account" in done.err
    assert "into account" not in (await run("submit", "-f", "-", stdin=text(mine("plain")))).err


async def test_that_nobody_may_write_the_answer_is_told(team: str, run: Commands) -> None:
    asked = {"checkpoint": {"signal": "Annotation"}}
    done = await run("submit", "-f", "-", stdin=text(mine("silent", **asked)))
    assert "role worker answers by an annotation of its pods, and its template has no serviceAccountName" in done.err
    named = with_pod(mine("named", **asked), serviceAccountName="default")
    for one in (named, mine("timed", checkpoint={"signal": "Annotation", "answer": "File", "file": "/saved"})):
        assert "serviceAccountName" not in (await run("submit", "-f", "-", "--dry-run", stdin=text(one))).err


async def test_pods_beyond_a_resource_quota_may_wait(team: str, run: Commands, kube: KubeClient) -> None:
    """It may have room later, so the job is accepted, and told about it."""
    path = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    await kube.request("POST", path, body=body)
    try:

        async def counted() -> bool:
            return bool((await kube.request("GET", f"{path}/none"))["status"].get("hard"))

        await eventually(counted, "the ResourceQuota is counted")
        done = await run("submit", "-f", "-", stdin=text(mine("patient")))
        assert done.out == "trainingjob.queuectl.dev/patient created\n"
        assert "pods of role worker are not checked" in done.err
        assert "exceeded quota" in done.err
    finally:
        await kube.request("DELETE", f"{path}/none")


async def test_what_the_api_server_adds_to_pods_is_told(team: str, run: Commands, kube: KubeClient) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/limitranges"
    spec = {"limits": [{"type": "Container", "defaultRequest": {"memory": "1Gi"}}]}
    body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "defaults"}, "spec": spec}
    await kube.request("POST", path, body=body)
    try:

        async def said() -> bool:
            done = await run("submit", "-f", "-", "--dry-run", stdin=text(mine("more")))
            return "pods of role worker request 1Gi memory more than their template" in done.err

        await eventually(said, "the LimitRange is known everywhere, and told of")
    finally:
        await kube.request("DELETE", f"{path}/defaults")


async def test_a_user_with_few_rights(team: str, run: Commands, kube: KubeClient, tmp_path: Path) -> None:
    """Who may create jobs and nothing else submits them; what couldn't be checked is told."""
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    await kube.request("POST", accounts, body={"metadata": {"name": "user"}})
    rule = {"apiGroups": ["queuectl.dev"], "resources": ["trainingjobs"], "verbs": ["create"]}
    await kube.request("POST", f"{rbac}/roles", body={"metadata": {"name": "user"}, "rules": [rule]})
    binding = {
        "metadata": {"name": "user"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "user"},
        "subjects": [{"kind": "ServiceAccount", "name": "user", "namespace": NAMESPACE}],
    }
    await kube.request("POST", f"{rbac}/rolebindings", body=binding)
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    answer = await kube.request("POST", f"{accounts}/user/token", body=request)
    config = yaml.safe_load(run.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": answer["status"]["token"]}
    config["contexts"][0]["context"]["namespace"] = NAMESPACE
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    user = Commands(file)

    given = mine("modest")
    del given["metadata"]["namespace"]  # that of the kubeconfig's context
    done = await user("submit", "-f", "-", stdin=text(given))
    assert done.out == "trainingjob.queuectl.dev/modest created\n"
    for what in ("queues are not checked", "flavors are not checked", "pods of role worker are not checked"):
        assert what in done.err
    refused = await user("get", code=Exit.REFUSED)
    assert "cannot list resource" in refused.err
