"""What pods do on nodes that run them as processes, seen in the API server and on this machine."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kubernetes_asyncio import client, config
from kubernetes_asyncio.stream import WsApiClient
from kubernetes_asyncio.stream.ws_client import ERROR_CHANNEL, STDERR_CHANNEL, STDOUT_CHANNEL

from queuectl.kube.client import MERGE_PATCH, KubeClient
from queuectl.local.controlplane import Running
from queuectl.local.prepare import apply, nodes_are_ready
from tests.support.eventually import eventually
from tests.support.real import Agent, Pods, condition, ended, is_alive

NAMESPACE = "processes"
NODES = ["processes-1", "processes-2"]
# As in a plain container: root, but without CAP_SYS_ADMIN, and user namespaces are not allowed.
CONFINED = [
    *("unshare", "--user", "--map-root-user", "sh", "-c"),
    'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-sys_admin "$@"',
    "confined",
]
SLEEP = "sleep 600 & wait"  # goes on until a signal comes


@pytest.fixture(scope="module")
async def agent(
    kube: KubeClient, control_plane: Running, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Agent]:
    await apply(kube, [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}])
    async with Agent(control_plane, tmp_path_factory.mktemp("agent"), NODES, gpus=2).running(kube) as agent:
        yield agent


@pytest.fixture
async def pods(agent: Agent, kube: KubeClient) -> AsyncIterator[Pods]:
    yield Pods(kube, NAMESPACE, NODES[0])
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    await kube.request("DELETE", path, body={"gracePeriodSeconds": 1})

    async def none() -> bool:
        return not (await kube.request("GET", path))["items"]

    await eventually(none, "all pods are gone")
    await eventually(lambda: no_processes(agent), "all processes are gone")


def exists(path: str) -> bool:
    return Path(path).exists()


def succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except FileNotFoundError:
        return False


async def waits(pods: Pods, name: str) -> str:
    """Return why the pod's first container waits."""

    async def told() -> str | None:
        statuses = (await pods.get(name) or {"status": {}})["status"].get("containerStatuses") or [{"state": {}}]
        said: str | None = (statuses[0]["state"].get("waiting") or {}).get("message")
        return said

    return await eventually(told, f"pod {name} says why it waits")


async def no_processes(agent: Agent) -> bool:
    return not agent.processes()


async def test_the_node_says_what_it_has(agent: Agent, kube: KubeClient) -> None:
    node = await kube.request("GET", f"/api/v1/nodes/{NODES[0]}")
    has = node["status"]["allocatable"]
    assert (has["nvidia.com/gpu"], has["cpu"]) == ("2", str(os.cpu_count()))
    assert node["metadata"]["labels"]["local.queuectl.dev/real"] == "true"


async def test_output_exit_code_and_what_a_pod_is_told(pods: Pods) -> None:
    def of(name: str, path: str) -> dict[str, Any]:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    env = [
        {"name": "WHO", "value": "world"},
        {"name": "GREETING", "value": "hello $(WHO), $$(WHO) $(NOBODY)"},
        of("NAME", "metadata.name"),
        of("ADDRESS", "status.podIP"),
        of("NODE", "spec.nodeName"),
        of("COLOUR", "metadata.annotations['example.com/colour']"),
    ]
    script = 'echo "$GREETING"; echo $NAME $ADDRESS $NODE $COLOUR >&2'
    await pods.run("talks", script, env=env, annotations={"example.com/colour": "red"})
    await pods.run("fails", 'echo "why: $1" > ${QUEUECTL_TERMINATION_LOG:-/dev/termination-log}; exit 3')
    await pods.run("logs", "echo the last words; exit 4", terminationMessagePolicy="FallbackToLogsOnError")

    talks = await pods.until("talks", "Succeeded")
    address = talks["status"]["podIP"]
    assert await pods.logs("talks") == f"hello world, $(WHO) $(NOBODY)\ntalks {address} {NODES[0]} red\n"
    assert await pods.logs("talks", tailLines="1") == f"talks {address} {NODES[0]} red\n"
    end = ended(talks)
    assert (end["exitCode"], end["reason"]) == (0, "Completed")
    assert talks["status"]["startTime"] <= end["startedAt"] <= end["finishedAt"]
    assert address.startswith("127.")

    end = ended(await pods.until("fails", "Failed"))
    assert (end["exitCode"], end["reason"], end["message"]) == (3, "Error", "why: \n")
    end = ended(await pods.until("logs", "Failed"))
    assert (end["exitCode"], end["message"]) == (4, "the last words\n")


async def test_a_command_that_can_not_start_says_why(pods: Pods) -> None:
    await pods.run("missing", "", containers=[{"name": "main", "image": "none", "command": ["no-such-program"]}])
    end = ended(await pods.until("missing", "Failed"))
    assert (end["exitCode"], end["reason"]) == (128, "StartError")
    assert "no-such-program: No such file or directory" in end["message"]


async def test_logs_are_followed_to_the_end(pods: Pods, kube: KubeClient, tmp_path: Path) -> None:
    go = tmp_path / "go"
    await pods.run("counts", f"echo one; while [ ! -e {go} ]; do sleep 0.1; done; echo two")
    await pods.until_says("counts", "one")
    lines = []
    async with kube.stream(pods.path("counts", "log"), params={"follow": "true"}) as stream:
        async for line in stream:
            lines.append(line)
            go.touch()
    assert lines == [b"one", b"two"]


async def test_who_heeds_sigterm_ends_in_order_after_its_hook(pods: Pods, tmp_path: Path) -> None:
    story = tmp_path / "story"
    script = f"trap 'echo term >> {story}; exit 7' TERM; echo ready; {SLEEP}"
    hook = {"preStop": {"exec": {"command": ["sh", "-c", f"echo hook >> {story}"]}}}
    await pods.run("graceful", script, lifecycle=hook, terminationGracePeriodSeconds=60)
    await pods.until_says("graceful", "ready")
    await pods.delete("graceful")
    await pods.until_gone("graceful")
    assert story.read_text().split() == ["hook", "term"]


async def test_who_ignores_sigterm_is_killed_with_all_it_has_started(pods: Pods, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers"
    script = f"trap '' TERM; setsid sleep 600 & echo $$$$ $! > {numbers}; echo ready; wait"  # Kubernetes makes $ of $$
    await pods.run("stubborn", script, terminationGracePeriodSeconds=600)
    await pods.until_says("stubborn", "ready")
    main, child = map(int, numbers.read_text().split())
    assert is_alive(main)
    assert is_alive(child)
    await pods.delete("stubborn")
    await pods.delete("stubborn", gracePeriodSeconds=1)  # a shorter grace counts from then on
    await pods.until_gone("stubborn")
    assert not is_alive(main)
    assert not is_alive(child)


async def test_a_pod_removed_by_force_ends_too(pods: Pods, agent: Agent) -> None:
    await pods.run("forced", f"trap '' TERM; echo ready; {SLEEP}; {SLEEP}")
    await pods.until_says("forced", "ready")
    await pods.delete("forced", gracePeriodSeconds=0)
    await pods.until_gone("forced")
    await eventually(lambda: no_processes(agent), "its processes are gone")


async def test_annotations_reach_a_running_process(mounts: None, pods: Pods, kube: KubeClient) -> None:
    items = [{"path": "ask", "fieldRef": {"fieldPath": "metadata.annotations['example.com/ask']"}}]
    script = "while ! grep -q now /etc/queuectl/ask; do sleep 0.1; done; touch /etc/queuectl/x || echo read-only"
    await pods.run(
        "asked",
        script,
        volumes=[{"name": "ask", "downwardAPI": {"items": items}}],
        volumeMounts=[{"name": "ask", "mountPath": "/etc/queuectl"}],
    )
    await pods.until("asked", "Running")
    body = {"metadata": {"annotations": {"example.com/ask": "save now"}}}
    await kube.request("PATCH", pods.path("asked"), body=body, content_type=MERGE_PATCH)
    await pods.until("asked", "Succeeded")
    assert "read-only\n" in await pods.logs("asked")
    assert not exists("/etc/queuectl")


async def test_volumes_are_shared_between_containers_and_kept_between_pods(
    mounts: None, pods: Pods, tmp_path: Path
) -> None:
    volumes = [{"name": "scratch", "emptyDir": {}}, {"name": "kept", "hostPath": {"path": str(tmp_path)}}]

    def container(name: str, script: str) -> dict[str, Any]:
        places = [
            {"name": "scratch", "mountPath": "/scratch-of-a-test"},
            {"name": "kept", "mountPath": "/kept-of-a-test/here", "subPath": "part"},
        ]
        return {"name": name, "image": "none", "command": ["sh", "-c", script], "volumeMounts": places}

    wait = (
        "while [ ! -e /scratch-of-a-test/word ]; do sleep 0.1; done; mv /scratch-of-a-test/word /kept-of-a-test/here/"
    )
    first = [container("reads", wait), container("writes", "echo kept > /scratch-of-a-test/word")]
    await pods.run("first", "", volumes=volumes, containers=first)
    await pods.until("first", "Succeeded")
    second = [container("reads", "cat /kept-of-a-test/here/word; ls /scratch-of-a-test")]
    await pods.run("second", "", volumes=volumes, containers=second)
    await pods.until("second", "Succeeded")
    assert await pods.logs("second") == "kept\n"
    assert (tmp_path / "part" / "word").read_text() == "kept\n"
    assert not exists("/scratch-of-a-test")


async def test_peers_are_found_by_name_and_ready_by_address(mounts: None, pods: Pods, tmp_path: Path) -> None:
    serve = "exec python -m http.server 8123 --bind $ADDRESS"
    env = [{"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    probe = {"httpGet": {"port": "web", "path": "/"}, "periodSeconds": 1}
    ports = [{"name": "web", "containerPort": 8123}]
    for name in ("left", "right"):  # the same port, each at its own address
        await pods.run(name, serve, env=env, readinessProbe=probe, ports=ports, hostname=name, subdomain="peers")

    async def ready() -> bool:
        both = [await pods.get(name) for name in ("left", "right")]
        return all(pod and condition(pod, "Ready") == "True" for pod in both)

    await eventually(ready, "both are ready")
    ask = "from urllib.request import urlopen; print(urlopen('http://right.peers:8123/').status)"
    await pods.run("asks", f'python -c "{ask}"', subdomain="peers")
    await pods.until("asks", "Succeeded")
    assert await pods.logs("asks") == "200\n"


async def test_not_ready_until_the_probe_succeeds(pods: Pods, tmp_path: Path) -> None:
    probe = {"exec": {"command": ["test", "-e", str(tmp_path / "go")]}, "periodSeconds": 1}
    await pods.run("late", f"echo started; {SLEEP}", readinessProbe=probe)
    await pods.until_says("late", "started")
    pod = await pods.until("late", "Running")
    assert condition(pod, "Ready") == "False"
    (tmp_path / "go").touch()

    async def ready() -> bool:
        return condition(await pods.get("late") or {"status": {}}, "Ready") == "True"

    await eventually(ready, "it is ready")


async def test_who_hangs_is_ended_and_started_again(pods: Pods, tmp_path: Path) -> None:
    """Its liveness is looked at only once it has started."""
    first, started = tmp_path / "been", tmp_path / "started"
    script = (
        f"test -e {first} && exit 0; touch {first}; trap 'echo told; exit 9' TERM; sleep 2; touch {started};"
        " while :; do sleep 0.1; done"
    )

    def probe(command: list[str]) -> dict[str, Any]:
        return {"exec": {"command": command}, "periodSeconds": 1, "failureThreshold": 1}

    probes = {"startupProbe": probe(["test", "-e", str(started)]) | {"failureThreshold": 60}}
    probes["livenessProbe"] = probe(["false"])
    await pods.run("hangs", script, restartPolicy="OnFailure", terminationGracePeriodSeconds=60, **probes)
    status = (await pods.until("hangs", "Succeeded"))["status"]["containerStatuses"][0]
    assert status["restartCount"] == 1
    assert status["lastState"]["terminated"]["exitCode"] == 9
    assert started.exists()
    assert await pods.logs("hangs", previous="true") == "told\n"


async def test_init_containers_come_first_and_in_order(pods: Pods, tmp_path: Path) -> None:
    story = tmp_path / "story"

    def container(name: str, script: str) -> dict[str, Any]:
        return {"name": name, "image": "none", "command": ["sh", "-c", script]}

    initial = [container(name, f"sleep 0.2; echo {name} >> {story}") for name in ("one", "two")]
    await pods.run("orderly", f"echo main >> {story}", initContainers=initial)
    await pods.until("orderly", "Succeeded")
    assert story.read_text().split() == ["one", "two", "main"]
    await pods.run("stillborn", f"echo never >> {story}", initContainers=[container("bad", "exit 5")])
    failed = await pods.until("stillborn", "Failed")
    assert failed["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 5
    assert "never" not in story.read_text()


async def test_a_sidecar_starts_first_and_ends_last(pods: Pods, tmp_path: Path) -> None:
    story, up = tmp_path / "story", tmp_path / "up"

    def container(name: str, script: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "image": "none", "command": ["sh", "-c", script], **more}

    script = f"sleep 0.3; echo side >> {story}; touch {up}; trap 'echo after >> {story}; exit 0' TERM; {SLEEP}"
    probe = {"exec": {"command": ["test", "-e", str(up)]}, "periodSeconds": 1}
    initial = [
        container("side", script, restartPolicy="Always", startupProbe=probe),
        container("second", f"echo second >> {story}"),
    ]
    await pods.run("beside", f"echo main >> {story}", initContainers=initial)
    await pods.until("beside", "Succeeded")
    assert story.read_text().split() == ["side", "second", "main", "after"]


async def test_a_container_that_fails_is_started_again_if_the_pod_says_so(pods: Pods, tmp_path: Path) -> None:
    script = f"echo try; test -e {tmp_path / 'been'} || {{ touch {tmp_path / 'been'}; exit 6; }}"
    await pods.run("again", script, restartPolicy="OnFailure")
    status = (await pods.until("again", "Succeeded"))["status"]["containerStatuses"][0]
    assert status["restartCount"] == 1
    assert status["lastState"]["terminated"]["exitCode"] == 6
    assert await pods.logs("again") == await pods.logs("again", previous="true") == "try\n"


async def test_what_the_agent_does_not_do_is_said(pods: Pods) -> None:
    volumes = [{"name": "claimed", "persistentVolumeClaim": {"claimName": "a"}}]
    await pods.run("claims", "true", volumes=volumes)

    assert "volume claimed: persistentVolumeClaim is not supported" in await waits(pods, "claims")
    await pods.delete("claims")
    await pods.until_gone("claims")


async def create(kube: KubeClient, kind: str, name: str, **content: Any) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/{kind.lower()}s"
    await kube.request("POST", path, body={"metadata": {"name": name}, **content})


async def test_config_maps_and_secrets_are_variables(pods: Pods, kube: KubeClient) -> None:
    """What is optional may be missing; for the rest a pod waits, and says for what."""
    await create(kube, "ConfigMap", "settings", data={"RATE": "0.1", "STEPS": "7"})
    optional = {"name": "nowhere", "key": "x", "optional": True}
    env = [
        {"name": "STEPS", "value": "$(P_RATE)"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "login", "key": "token"}}},
        {"name": "NONE", "valueFrom": {"configMapKeyRef": optional}},
    ]
    sources = [
        {"configMapRef": {"name": "settings"}},
        {"prefix": "P_", "configMapRef": {"name": "settings"}},
        {"secretRef": {"name": "nowhere", "optional": True}},
    ]
    script = 'echo "$RATE $STEPS $P_STEPS $TOKEN ${NONE-unset}"'
    await pods.run("told", script, env=env, envFrom=sources)
    assert 'env TOKEN: secrets "login" not found' in await waits(pods, "told")
    await create(kube, "Secret", "login", stringData={"token": "s3cret"})
    await pods.until("told", "Succeeded")
    assert await pods.logs("told") == "0.1 0.1 7 s3cret unset\n"


async def test_config_maps_and_secrets_are_files(mounts: None, pods: Pods, kube: KubeClient) -> None:
    await create(kube, "ConfigMap", "files", data={"a.yaml": "a: 1", "b.yaml": "b: 2"}, binaryData={"raw": "AAE="})
    await create(kube, "Secret", "key", stringData={"id": "private"})
    volumes = [
        {"name": "all", "configMap": {"name": "files"}},
        {"name": "some", "configMap": {"name": "files", "items": [{"key": "b.yaml", "path": "deep/er.yaml"}]}},
        {"name": "key", "secret": {"secretName": "key", "defaultMode": 0o400}},
        {"name": "none", "secret": {"secretName": "nowhere", "optional": True}},
    ]
    places = [{"name": name, "mountPath": f"/of-a-test/{name}"} for name in ("all", "some", "key", "none")]
    places.append({"name": "all", "mountPath": "/of-a-test/one.yaml", "subPath": "a.yaml"})
    script = (
        "cd /of-a-test; ls all none; cat all/a.yaml some/deep/er.yaml key/id one.yaml; wc -c < all/raw;"
        " stat -c %a key/id; touch all/x || echo read-only"
    )
    await pods.run("reads", script, volumes=volumes, volumeMounts=places)
    await pods.until("reads", "Succeeded")
    said = await pods.logs("reads")
    assert said.startswith("all:\na.yaml\nb.yaml\nraw\n\nnone:\na: 1b: 2privatea: 12\n400\n")
    assert said.endswith("read-only\n")


async def test_a_pod_has_the_rights_of_its_service_account(mounts: None, pods: Pods, kube: KubeClient) -> None:
    script = (
        "cd /var/run/secrets/kubernetes.io/serviceaccount; python -c '"
        "import os, ssl, urllib.error, urllib.request as r;"
        'url = "https://{KUBERNETES_SERVICE_HOST}:{KUBERNETES_SERVICE_PORT}/api/v1/nodes".format(**os.environ);'
        'ask = r.Request(url, headers={"Authorization": "Bearer " + open("token").read()})\n'
        'try: r.urlopen(ask, context=ssl.create_default_context(cafile="ca.crt"))\n'
        "except urllib.error.HTTPError as error: print(error.read().decode())'"
    )
    await pods.run("account", script, serviceAccountName="default")
    await pods.until("account", "Succeeded")
    assert f'User \\"system:serviceaccount:{NAMESPACE}:default\\" cannot list' in await pods.logs("account")


async def test_commands_in_a_container(pods: Pods, control_plane: Running) -> None:
    await pods.run("open", SLEEP, env=[{"name": "WHERE", "value": "inside"}])
    await pods.until("open", "Running")
    configuration = client.Configuration()
    await config.load_kube_config(str(control_plane.kubeconfig), client_configuration=configuration)
    async with WsApiClient(configuration) as api:
        core: Any = client.CoreV1Api(api)
        options: dict[str, Any] = {"stdin": False, "stdout": True, "stderr": True, "tty": False}
        command = ["sh", "-c", "echo out $WHERE; echo err >&2; exit 9"]
        opened = await core.connect_get_namespaced_pod_exec(
            "open", NAMESPACE, command=command, _preload_content=False, **options
        )
        heard: dict[int, bytes] = {}
        async with opened as socket:
            async for message in socket:
                heard[message.data[0]] = heard.get(message.data[0], b"") + message.data[1:]
        assert heard[STDOUT_CHANNEL] == b"out inside\n"
        assert heard[STDERR_CHANNEL] == b"err\n"
        assert WsApiClient.parse_error_data(heard[ERROR_CHANNEL].decode()) == 9


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
async def test_kubectl_logs_and_exec(pods: Pods, control_plane: Running) -> None:
    async def kubectl(*words: str, stdin: str = "") -> tuple[int, str]:
        command = ["kubectl", "--kubeconfig", str(control_plane.kubeconfig), "-n", NAMESPACE, *words]
        done = await asyncio.to_thread(
            subprocess.run, command, input=stdin, capture_output=True, text=True, timeout=60, check=False
        )
        return done.returncode, done.stdout

    await pods.run("open", f"echo ready; {SLEEP}")
    await pods.until_says("open", "ready")
    assert await kubectl("logs", "open") == (0, "ready\n")
    assert await kubectl("exec", "-i", "open", "--", "sh", "-c", "cat; exit 11", stdin="through") == (11, "through")


@pytest.mark.skipif(not succeeds([*CONFINED, "true"]), reason="no namespace in which to forbid them")
async def test_without_mount_namespaces_only_what_can_be_done_is_done(
    agent: Agent, kube: KubeClient, control_plane: Running, tmp_path: Path
) -> None:
    confined = Agent(control_plane, tmp_path, ["confined"], under=CONFINED)
    pods = Pods(kube, NAMESPACE, "confined")
    kept = {"name": "kept", "hostPath": {"path": str(tmp_path)}}
    at_home = [{"name": "kept", "mountPath": str(tmp_path)}]
    try:
        confined.start()
        await nodes_are_ready(kube, ["confined"])
        script = f"echo told > $QUEUECTL_TERMINATION_LOG; echo kept > {tmp_path}/word"
        await pods.run("modest", script, volumes=[kept], volumeMounts=at_home)
        await pods.run("demanding", "true", volumes=[kept], volumeMounts=[{"name": "kept", "mountPath": "/other"}])
        assert ended(await pods.until("modest", "Succeeded"))["message"] == "told\n"
        assert (tmp_path / "word").read_text() == "kept\n"
        assert "mountPath /other: this machine allows no mount namespace" in await waits(pods, "demanding")
        for name in ("modest", "demanding"):
            await pods.delete(name)
            await pods.until_gone(name)
    finally:
        confined.end()
        await kube.request("DELETE", "/api/v1/nodes/confined")


async def test_an_agent_that_ends_takes_its_pods_along_and_says_so(
    pods: Pods, agent: Agent, kube: KubeClient, tmp_path: Path
) -> None:
    story = tmp_path / "story"
    await pods.run("soft", f"trap 'echo saved > {story}; exit 0' TERM; echo ready; {SLEEP}")
    await pods.run("hard", f"trap '' TERM; setsid sleep 600 & echo ready; {SLEEP}; {SLEEP}")
    for name in ("soft", "hard"):
        await pods.until_says(name, "ready")
    before = agent.processes()
    agent.end()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in before)
    assert story.read_text() == "saved\n"
    for name in ("soft", "hard"):
        pod = await pods.until(name, "Failed")
        assert pod["status"]["reason"] == "Terminated"
        assert condition(pod, "DisruptionTarget") == "True"
        [why] = [each for each in pod["status"]["conditions"] if each["type"] == "DisruptionTarget"]
        assert "node shutdown" in why["message"]
    assert condition(await kube.request("GET", f"/api/v1/nodes/{NODES[0]}"), "Ready") == "False"
    agent.start()
    await nodes_are_ready(kube, NODES)
    assert await pods.logs("soft") == "ready\n"


async def test_an_agent_that_is_killed_leaves_no_process_and_the_next_one_says_so(
    pods: Pods, agent: Agent, kube: KubeClient
) -> None:
    await pods.run("lost", f"setsid sleep 600 & sleep 600 & echo ready; {SLEEP}")
    await pods.until_says("lost", "ready")
    before = agent.processes()
    assert len(before) > 3
    agent.end(signal.SIGKILL)

    async def gone() -> bool:
        return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in before)

    await eventually(gone, "its processes are gone")

    agent.start()
    pod = await pods.until("lost", "Failed")
    assert pod["status"]["reason"] == "NodeAgentRestarted"
    assert ended(pod)["reason"] == "ContainerStatusUnknown"
    assert condition(pod, "DisruptionTarget") == "True"
