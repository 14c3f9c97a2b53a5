"""One pod: its containers as processes, from its binding to this node until the API server forgets it."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from queuectl.kube.client import ApiError, ApiUnreachableError, KubeClient
from queuectl.kube.names import pods_path
from queuectl.local.agent import config, given
from queuectl.local.agent.command import Command, StartError, Wanted, run
from queuectl.local.agent.config import Manifest, RefusedError
from queuectl.local.agent.given import Mounts
from queuectl.local.agent.shim import NOT_BEGUN

STRATEGIC = "application/strategic-merge-patch+json"
RESTART_SECONDS = (0, 10, 20, 40, 80, 160, 300)  # before each restart of a container, the last again and again
PREPARE_SECONDS = 10  # until a pod that can't be prepared is tried again
LEAST_SECONDS = 2.0  # from SIGTERM to SIGKILL, however long a preStop hook took
GATHER_SECONDS = 0.02  # changes that come together are one write
RETRY_SECONDS = (0.2, 5.0)  # first and longest pause of a write that did not get through, doubled in between
MESSAGE_BYTES, LOG_BYTES, LOG_LINES = 4096, 2048, 80  # of a termination message; of one taken from the log
ACCOUNT_SECONDS = 7 * 86400  # that a service account's token is good for
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
LOST = "The node agent ended while the pod was there, and the pod's processes with it."

log = structlog.get_logger()


@dataclass(slots=True)
class Host:
    """What all pods of an agent share."""

    client: KubeClient
    folder: Path
    authority: str  # PEM of the API server's CA
    resources: dict[str, str]  # of each node
    mounts_work: bool
    pods: dict[str, "Pod"] = field(default_factory=dict)  # by uid

    def base(self) -> dict[str, str]:
        """Return what every container's environment begins with."""
        server, _, port = self.client.host.rpartition("//")[2].rpartition(":")
        kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        kept["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        return kept | {"KUBERNETES_SERVICE_HOST": server, "KUBERNETES_SERVICE_PORT": port}


@dataclass(slots=True)
class Container:
    """A container's state, as its status says it."""

    spec: Manifest
    folder: Path  # logs are in it, one for each time that it ran
    initial: bool
    state: Manifest
    last: Manifest = field(default_factory=dict)
    restarts: int = 0
    ready: bool = False
    command: Command | None = None  # while it runs
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # it runs, and its startup probe has succeeded

    @property
    def sidecar(self) -> bool:
        """Whether it starts in its turn among the initial containers, and runs on beside the main ones."""
        return self.initial and self.spec.get("restartPolicy") == "Always"

    @property
    def log(self) -> Path:
        """The output of the current run."""
        return self.folder / f"{self.restarts}.log"

    @property
    def exit_code(self) -> int | None:
        """How it ended, once it has."""
        code: int | None = (self.state.get("terminated") or {}).get("exitCode")
        return code

    def status(self) -> Manifest:
        """Return its containerStatus."""
        return {
            "name": self.spec["name"],
            "image": self.spec.get("image") or "",
            "imageID": "",
            "ready": self.exit_code == 0 if self.initial and not self.sidecar else self.ready,
            "started": "running" in self.state,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last,
        }


class Pod:
    """One pod. ``run`` is its life; ``update`` tells of changes in the API server, ``vanish`` that it is gone."""

    def __init__(self, host: Host, manifest: Manifest) -> None:
        """Take over a pod; nothing begins before ``run``."""
        self.manifest = manifest
        self.uid: str = manifest["metadata"]["uid"]
        self.folder: Path = host.folder / "pods" / self.uid
        self.gone = False  # from the API server
        self._host = host
        self._spec: Manifest = manifest["spec"]
        initial = self._spec.get("initContainers") or []
        waiting = {"waiting": {"reason": "PodInitializing" if initial else "ContainerCreating"}}
        self.containers = {
            spec["name"]: Container(spec, self.folder / "logs" / spec["name"], spec in initial, dict(waiting))
            for spec in [*initial, *self._spec["containers"]]
        }
        self._places: dict[str, Path] = {}
        self._mounts: Mounts = {}
        self._data: config.Data = {}
        self._begun = _now()
        self._over = False  # nothing of it runs, or will
        self._settled = False  # nothing is to be reported any more
        self._cause: Manifest = {}  # why the node ended it, if it did: reason and message
        self._disrupted = False
        self._stop = asyncio.Event()
        self._deadline = float("inf")
        self._release = asyncio.Event()  # deleted, or nobody is there to tell
        self._changed = asyncio.Event()
        self._reporting = asyncio.Lock()
        self._sent: Manifest = {}
        self._conditions: dict[str, Manifest] = {}

    async def run(self) -> None:
        """Run the pod's containers, and report, until it is deleted and gone or the node shuts down."""
        status = self.manifest.get("status") or {}
        reports = asyncio.create_task(self._report_changes())
        try:
            self.update(self.manifest)
            if status.get("phase") in {"Succeeded", "Failed"}:
                self._settled = True
            elif status.get("startTime"):
                self._lose(status)
            else:
                await self._live()
            self._over = True
            self._changed.set()
            await self._release.wait()
            await self._report()
            if self.manifest["metadata"].get("deletionTimestamp"):
                await self._remove()
        finally:
            reports.cancel()

    def update(self, manifest: Manifest) -> None:
        """Take in a newer version of the pod."""
        self.manifest = manifest
        try:
            if self._places:
                given.show(manifest, self.folder / "volumes")
        except OSError:
            log.exception("volumes not updated", uid=self.uid)
        if manifest["metadata"].get("deletionTimestamp"):
            self.stop(manifest["metadata"].get("deletionGracePeriodSeconds") or 0)
            self._release.set()
        self._changed.set()

    def vanish(self) -> None:
        """End its processes soon: somebody removed the pod without waiting for this node."""
        self.gone = True
        self.stop(0)
        self._release.set()

    def shut_down(self, seconds: float) -> None:
        """End it since its node shuts down; it has its own grace, but at most `seconds`."""
        if not self._over:
            self._cause = {
                "reason": "Terminated",
                "message": "Pod was terminated in response to imminent node shutdown.",
            }
            self._disrupted = True
        self.stop(min(seconds, self._grace))
        self._release.set()

    def stop(self, seconds: float) -> None:
        """Begin to end its processes: SIGKILL after so many seconds, or sooner if it was told so before."""
        self._deadline = min(self._deadline, time.monotonic() + max(seconds, 1))
        self._stop.set()

    def wanted(self, container: Container, argv: list[str] | None = None) -> Wanted:
        """Return the command of a container, or another one in its place. Raises RefusedError."""
        base = self._host.base() | {"HOSTNAME": self._spec.get("hostname") or self.manifest["metadata"]["name"]}
        if not self._host.mounts_work:
            base["QUEUECTL_TERMINATION_LOG"] = str(self._message(container))
        env = given.environment(self.manifest, container.spec, base, self._host.resources, self._data)
        mounts = given.mounts(container.spec, self._places, self.manifest, env)
        if self._host.mounts_work:
            path = container.spec.get("terminationMessagePath") or "/dev/termination-log"
            mounts = self._mounts | {path: (str(self._message(container)), False)} | mounts
        else:
            if elsewhere := [target for target, (source, _) in mounts.items() if target != source]:
                raise RefusedError(
                    f"mountPath {elsewhere[0]}: this machine allows no mount namespace, so only hostPath volumes can be"
                    " mounted, each at its own path; run the agent as root with CAP_SYS_ADMIN, or where user"
                    " namespaces are allowed"
                )
            mounts = {}
        argv = given.arguments(container.spec, env) if argv is None else argv
        return Wanted(argv, env, container.spec.get("workingDir") or "/", mounts, str(self._host.folder / "root"))

    def write_hosts(self) -> None:
        """Write the names of its peers anew, into the same file, since that is mounted."""
        if "/etc/hosts" in self._mounts:
            text = given.hosts(self.manifest, (pod.manifest for pod in self._host.pods.values()))
            if (path := self.folder / "hosts").read_text() != text:
                path.write_text(text)

    @property
    def _grace(self) -> float:
        grace = self._spec.get("terminationGracePeriodSeconds")
        return 30 if grace is None else float(grace)

    async def _live(self) -> None:
        while not await self._prepared():
            if await self._stopped_within(PREPARE_SECONDS):
                return
        seconds = self._spec.get("activeDeadlineSeconds")
        timer = asyncio.get_running_loop().call_later(seconds, self._expire) if seconds else None
        try:
            async with asyncio.TaskGroup() as sidecars:
                await self._initial_and_main(sidecars)
                self.stop(self._grace)  # of the sidecars, if there are any
        finally:
            if timer:
                timer.cancel()

    async def _initial_and_main(self, sidecars: asyncio.TaskGroup) -> None:
        for each in self.containers.values():
            if each.sidecar:
                kept = sidecars.create_task(self._keep(each))
                async with _meanwhile(each.begun.wait()) as begun:
                    await asyncio.wait({kept, begun}, return_when=asyncio.FIRST_COMPLETED)
            elif each.initial and not await self._keep(each):
                return
        async with asyncio.TaskGroup() as group:
            for each in self.containers.values():
                if not each.initial:
                    group.create_task(self._keep(each))

    async def _prepared(self) -> bool:
        try:
            await self._prepare()
        except (RefusedError, OSError) as error:
            for each in self.containers.values():
                each.state = {"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}}
            self._changed.set()
            return False
        return True

    async def _stopped_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        return self._stop.is_set()

    async def _prepare(self) -> None:
        """Make the pod's files, and see that nothing is asked for that this agent does not do."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._data = await config.read(self._host.client, self.manifest)
        self._places = given.volumes(self.manifest, self.folder / "volumes", self._data)
        if self._host.mounts_work:
            (self.folder / "hosts").write_text("")
            self._mounts["/etc/hosts"] = (str(self.folder / "hosts"), False)
            if self._spec.get("serviceAccountName") and self._spec.get("automountServiceAccountToken") is not False:
                self._mounts[ACCOUNT] = (str(await self._account()), True)
        for pod in self._host.pods.values():
            pod.write_hosts()
        for each in self.containers.values():
            if each.spec.get("restartPolicy") and not each.sidecar:
                raise RefusedError(f"container {each.spec['name']}: restartPolicy is not supported by this node agent")
            self.wanted(each)

    async def _account(self) -> Path:
        """Write what a client inside needs to be the pod's service account."""
        folder = self.folder / "account"
        folder.mkdir(mode=0o700, exist_ok=True)
        meta = self.manifest["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{self._spec['serviceAccountName']}/token"
        bound = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": self.uid}
        body = {"spec": {"expirationSeconds": ACCOUNT_SECONDS, "boundObjectRef": bound}}
        try:
            answer: Manifest = await self._host.client.request("POST", path, body=body)
        except (ApiError, ApiUnreachableError) as error:
            raise RefusedError(f"serviceAccountName {self._spec['serviceAccountName']}: {error}") from error
        (folder / "token").write_text(answer["status"]["token"])
        (folder / "ca.crt").write_text(self._host.authority)
        (folder / "namespace").write_text(meta["namespace"])
        return folder

    def _expire(self) -> None:
        self._cause = {"reason": "DeadlineExceeded", "message": "Pod was active longer than activeDeadlineSeconds."}
        self.stop(self._grace)

    async def _keep(self, container: Container) -> bool:
        """Run a container as often as the restart policy says; whether its last run succeeded."""
        policy = "Always" if container.sidecar else self._spec.get("restartPolicy") or "Always"
        for pause in chain(RESTART_SECONDS, repeat(RESTART_SECONDS[-1])):
            if self._stop.is_set():
                return False
            code = await self._once(container)
            again = policy != "Never" and (
                code != 0 or (policy == "Always" and (container.sidecar or not container.initial))
            )
            if self._stop.is_set() or not again:
                return code == 0
            ended = container.state
            if pause:
                message = f"back-off {pause}s restarting failed container"
                container.state = {"waiting": {"reason": "CrashLoopBackOff", "message": message}}
                container.last = ended
                self._changed.set()
                if await self._stopped_within(pause):
                    container.state, container.last = ended, {}
                    return False
            container.last = ended
            container.restarts += 1
        raise AssertionError

    async def _once(self, container: Container) -> int:
        """Run a container once, to its end; return its exit code."""
        begun = _now()
        try:
            container.folder.mkdir(parents=True, exist_ok=True)
            self._message(container).write_bytes(b"")
            self._message(container).chmod(0o666)
            with container.log.open("ab") as output:
                command = await Command.start(self.wanted(container), stdout=output)
        except (StartError, RefusedError, OSError) as error:
            return self._ended(container, begun, NOT_BEGUN, "StartError", str(error))
        container.command = command
        container.state = {"running": {"startedAt": begun}}
        async with (
            _closing(command),
            _meanwhile(self._watch(container)) as unwell,
            _meanwhile(self._stop.wait()) as stopped,
        ):
            self._changed.set()
            exited = asyncio.create_task(command.wait())
            await asyncio.wait({exited, stopped, unwell}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                await self._end(container, command, exited, time.monotonic() + self._grace)
            code = await exited
        container.command = None
        return self._ended(container, begun, code, "Error" if code else "Completed", self._said(container, code))

    def _ended(self, container: Container, begun: str, code: int, reason: str, message: str) -> int:
        terminated = {"exitCode": code, "reason": reason, "startedAt": begun, "finishedAt": _now()}
        container.state = {"terminated": terminated | ({"message": message} if message else {})}
        container.ready = False
        self._changed.set()
        return code

    async def _end(self, container: Container, command: Command, exited: "asyncio.Task[int]", deadline: float) -> None:
        """PreStop hook, SIGTERM, and SIGKILL when the grace is over; the grace may be another one when the pod is told to stop."""
        least = 0.0
        if hook := (container.spec.get("lifecycle") or {}).get("preStop"):
            async with _meanwhile(self._act(container, hook)) as acted:
                await self._within_grace({exited, acted}, deadline)
            least = time.monotonic() + LEAST_SECONDS
        command.terminate()
        await self._within_grace({exited}, deadline, least)
        if not exited.done():
            command.kill()

    async def _within_grace(
        self, tasks: "set[asyncio.Task[int]] | set[asyncio.Task[bool]]", deadline: float, least: float = 0.0
    ) -> None:
        while (left := max(self._deadline if self._stop.is_set() else deadline, least) - time.monotonic()) > 0:
            done, _ = await asyncio.wait(tasks, timeout=min(left, 1.0), return_when=asyncio.FIRST_COMPLETED)
            if done:
                return

    async def _watch(self, container: Container) -> None:
        """Keep `ready` as probes say it is; return when they say that the container has to end."""
        async for started in self._outcomes(container, "startupProbe"):
            if not started:
                return
            container.begun.set()
            break
        async with _meanwhile(self._keep_ready(container)):
            async for alive in self._outcomes(container, "livenessProbe"):
                if not alive:
                    return

    async def _keep_ready(self, container: Container) -> None:
        async for passed in self._outcomes(container, "readinessProbe"):
            ready = passed and (container.sidecar or not container.initial)
            if container.ready != ready:
                container.ready = ready
                self._changed.set()

    async def _outcomes(self, container: Container, kind: str) -> AsyncIterator[bool]:
        """Probe again and again; yield the outcome as often as it has been the same as many times as it has to be."""
        probe = container.spec.get(kind)
        if not probe:
            yield True
            await asyncio.get_running_loop().create_future()
            return
        await asyncio.sleep(probe.get("initialDelaySeconds") or 0)
        in_a_row, before = 0, False
        while True:
            passed = False
            with suppress(TimeoutError):
                async with asyncio.timeout(probe.get("timeoutSeconds") or 1):
                    passed = await self._act(container, probe)
            in_a_row, before = (in_a_row + 1 if passed == before else 1), passed
            needed = probe.get("successThreshold") or 1 if passed else probe.get("failureThreshold") or 3
            if in_a_row >= needed:
                yield passed
            await asyncio.sleep(probe.get("periodSeconds") or 10)

    async def _act(self, container: Container, action: Manifest) -> bool:
        """Do what a probe or a hook says; whether it succeeded."""
        try:
            if "exec" in action:
                return await run(self.wanted(container, action["exec"]["command"])) == 0
            if "sleep" in action:
                await asyncio.sleep(action["sleep"]["seconds"])
                return True
            where = action.get("httpGet") or action.get("tcpSocket")
            if where is None:
                return False
            ports = {port.get("name"): port["containerPort"] for port in container.spec.get("ports") or ()}
            address, port = where.get("host") or given.address(self.uid), ports.get(where["port"], where["port"])
            if "tcpSocket" in action:
                _, writer = await asyncio.open_connection(address, port)
                writer.close()
                return True
            url = f"{(where.get('scheme') or 'HTTP').lower()}://{address}:{port}{where.get('path') or '/'}"
            headers = {each["name"]: each["value"] for each in where.get("httpHeaders") or ()}
            async with aiohttp.ClientSession() as session, session.get(url, headers=headers, ssl=False) as response:
                return 200 <= response.status < 400  # noqa: PLR2004
        except (StartError, RefusedError, OSError, aiohttp.ClientError):
            return False

    def _message(self, container: Container) -> Path:
        return container.folder / "termination-log"

    def _said(self, container: Container, code: int) -> str:
        """Return the termination message."""
        said = _tail(self._message(container), MESSAGE_BYTES)
        if not said and code and container.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            said = "".join(_tail(container.log, LOG_BYTES).splitlines(keepends=True)[-LOG_LINES:])
        return said

    def _lose(self, status: Manifest) -> None:
        """Report a pod that an earlier agent has run: nothing is left of it."""
        self._begun = status["startTime"]
        self._cause, self._disrupted = {"reason": "NodeAgentRestarted", "message": LOST}, True
        kinds = ("initContainerStatuses", "containerStatuses")
        before = {each["name"]: each for kind in kinds for each in status.get(kind) or ()}
        for name, each in self.containers.items():
            known = before.get(name) or {}
            each.state, each.restarts = known.get("state") or each.state, known.get("restartCount") or 0
            if each.exit_code is None:
                begun = (each.state.get("running") or {}).get("startedAt") or self._begun
                self._ended(each, begun, 137, "ContainerStatusUnknown", LOST)

    async def _report_changes(self) -> None:
        while not self.gone:
            await self._changed.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._changed.clear()
            await self._report()

    async def _report(self) -> None:
        """Write the status, if it isn't what was written last, until the API server has taken it."""
        async with self._reporting:
            pause = RETRY_SECONDS[0]
            while not self.gone and not self._settled and (status := self._status()) != self._sent:
                try:
                    path = pods_path(self.manifest["metadata"]["namespace"], self.manifest["metadata"]["name"])
                    body = {"metadata": {"uid": self.uid}, "status": status}
                    await self._host.client.request("PATCH", f"{path}/status", body=body, content_type=STRATEGIC)
                    self._sent = status
                except ApiError as error:
                    if error.status not in {HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT}:
                        log.exception("status refused", pod=path, status=status)
                    return
                except ApiUnreachableError as error:
                    log.warning("status not written", pod=path, error=str(error), pause=pause)
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, RETRY_SECONDS[1])

    async def _remove(self) -> None:
        """Tell the API server that nothing is left of the pod."""
        path = pods_path(self.manifest["metadata"]["namespace"], self.manifest["metadata"]["name"])
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        pause = RETRY_SECONDS[0]
        while not self.gone:
            try:
                await self._host.client.request("DELETE", path, body=body)
            except ApiUnreachableError:
                await asyncio.sleep(pause)
                pause = min(pause * 2, RETRY_SECONDS[1])
            except ApiError as error:
                if error.status not in {HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT}:
                    log.exception("pod not removed", pod=path)
                return
            else:
                return

    def _status(self) -> Manifest:
        initial = [each for each in self.containers.values() if each.initial]
        main = [each for each in self.containers.values() if not each.initial]
        if self._over:
            good = not self._cause and all(each.exit_code == 0 for each in main)
            phase, why = ("Succeeded", "PodCompleted") if good else ("Failed", "PodFailed")
        else:
            begun = any("waiting" not in each.state or each.last for each in main)
            phase, why = "Running" if begun else "Pending", "ContainersNotReady"
        sidecars = [each for each in initial if each.sidecar]
        ready = not self._over and all(each.ready for each in (*sidecars, *main))
        shown = {each["type"]: each["status"] for each in (self.manifest.get("status") or {}).get("conditions") or ()}
        gates = (gate["conditionType"] for gate in self._spec.get("readinessGates") or ())
        self._condition(
            "Initialized",
            all(each.exit_code == 0 or (each.sidecar and each.begun.is_set()) for each in initial),
            "ContainersNotInitialized",
        )
        self._condition("ContainersReady", ready, why)
        self._condition("Ready", ready and all(shown.get(gate) == "True" for gate in gates), why)
        if self._disrupted:
            self._condition("DisruptionTarget", True, "TerminationByKubelet", self._cause.get("message", ""))  # noqa: FBT003
        address = given.address(self.uid)
        return {
            "phase": phase,
            **(self._cause if self._over else {}),
            "startTime": self._begun,
            "hostIP": given.HOST_ADDRESS,
            "hostIPs": [{"ip": given.HOST_ADDRESS}],
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [dict(condition) for condition in self._conditions.values()],
            "initContainerStatuses": [each.status() for each in initial],
            "containerStatuses": [each.status() for each in main],
        }

    def _condition(self, kind: str, holds: bool, reason: str, message: str = "") -> None:  # noqa: FBT001 - as it says
        """Set a condition; the reason says why it does not hold, of DisruptionTarget why it does."""
        status = "True" if holds else "False"
        known = self._conditions.get(kind) or {}
        since = known["lastTransitionTime"] if known.get("status") == status else _now()
        why = reason if holds == (kind == "DisruptionTarget") else None
        told = {"message": message} if message else {}
        self._conditions[kind] = {"type": kind, "status": status, "lastTransitionTime": since, "reason": why, **told}


@asynccontextmanager
async def _closing(command: Command) -> AsyncIterator[None]:
    try:
        yield
    finally:
        command.close()


@asynccontextmanager
async def _meanwhile(work: Coroutine[Any, Any, Any]) -> "AsyncIterator[asyncio.Task[Any]]":
    """Let something go on for as long as the block does."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _tail(path: Path, size: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read(size).decode(errors="replace")
