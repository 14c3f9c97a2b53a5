"""A stage for one end-to-end test: nodes, queues and jobs of its own, and controllers as real processes."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from queuectl.kube import lease
from queuectl.kube.client import MERGE_PATCH, ApiError, KubeClient
from queuectl.kube.names import API, GROUP, JOB_LABEL, ROLE_LABEL, jobs_path, pods_path
from queuectl.local.nodes import node_manifest
from queuectl.local.prepare import create_nodes
from tests.support import manifests
from tests.support.eventually import LIMIT_SECONDS, eventually

Object = dict[str, Any]
STAGE_LABEL = "stage.example.com/name"
GPU = "nvidia.com/gpu"
_roles = itertools.count(1)


class Controller:
    """A `queuectl controller` process; its log is a file."""

    def __init__(self, kubeconfig: Path, database_url: str, folder: Path, name: str, env: Mapping[str, str]) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._env = os.environ | {
            "KUBECONFIG": str(kubeconfig),
            "DATABASE_URL": database_url,
            "QUEUECTL_IDENTITY": name,
            "QUEUECTL_PORT": "0",
            "QUEUECTL_LOG_FORMAT": "json",
            "QUEUECTL_LEASE_SECONDS": "3",
            "QUEUECTL_BACK_OFF_FIRST": "1",
            "QUEUECTL_BACK_OFF_LONGEST": "8",
            **env,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0  # offset in the log

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._started_at = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "queuectl", "controller"],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int:
        assert self._process is not None
        assert self._process.returncode is not None
        return self._process.returncode

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it as Kubernetes would."""
        self._end(signal.SIGTERM)

    async def until_leading(self, *, seconds: float = LIMIT_SECONDS) -> None:
        """Wait until it acts as the leader, for the first time since its latest start."""

        async def leads() -> bool:
            return b'"in sync"' in self.log.read_bytes()[self._started_at :]

        await eventually(leads, f"controller {self.name} leads", seconds=seconds)

    def says(self, text: str) -> bool:
        return self.log.exists() and text in self.log.read_text(errors="replace")

    @property
    def url(self) -> str:
        """Where it serves /healthz, /readyz and /metrics; once it says so."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("serving ")]
        return lines[-1].removeprefix("serving ") if lines else ""

    def _end(self, number: signal.Signals) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


class Stage:
    """Everything has the stage's name in it, so that tests share a control plane one after the other."""

    def __init__(self, client: KubeClient, kubeconfig: Path, database_url: str, folder: Path, name: str) -> None:
        self.client = client
        self.name = name
        self.namespace = name
        self.namespaces = [name]  # and others of its own, if a test needs more
        self.database_url = database_url
        self.kubeconfig = kubeconfig
        self._folder = folder
        self._controllers: list[Controller] = []
        self._shared: list[Controller] = []

    async def open(self) -> None:
        await self._create_namespace(self.namespace)
        await self.flavor()

    async def add_namespace(self, name: str) -> None:
        await self._create_namespace(name)
        self.namespaces.append(name)

    async def close(self) -> None:
        """Remove all of it, without any controller's help."""
        for controller in self._controllers:
            controller.send(signal.SIGCONT) if controller.running else None
            controller.kill()
        if self._controllers:  # else who leads by the next stage's ledger would wait until it is over
            await self._quietly("DELETE", lease.PATH)
        for job in await self.jobs():
            if job["metadata"].get("finalizers"):
                path = jobs_path(job["metadata"]["namespace"], job["metadata"]["name"])
                await self._quietly("PATCH", path, {"metadata": {"finalizers": None}})
            await self._quietly("DELETE", jobs_path(job["metadata"]["namespace"], job["metadata"]["name"]))
        mine = {"labelSelector": f"{STAGE_LABEL}={self.name}"}
        for namespace in self.namespaces:
            await self.client.request("DELETE", pods_path(namespace), params={}, body={"gracePeriodSeconds": 0})
        await self.client.request("DELETE", "/api/v1/nodes", params=mine)
        for kind in ("queues", "resourceflavors"):
            for item in (await self.client.request("GET", f"{API}/{kind}"))["items"]:
                if item["metadata"]["name"].startswith(self.name):
                    await self._quietly("DELETE", f"{API}/{kind}/{item['metadata']['name']}")
        for namespace in self.namespaces:
            await self._quietly("DELETE", f"/api/v1/namespaces/{namespace}")

    # Controllers

    def join(self, controller: Controller) -> None:
        """Show this controller's log too when a wait fails."""
        self._shared.append(controller)

    def controller(self, name: str = "a", *, kubeconfig: Path | None = None, env: Mapping[str, str] = {}) -> Controller:
        """Return a controller that is not started yet."""
        result = Controller(
            kubeconfig or self.kubeconfig, env.get("DATABASE_URL", self.database_url), self._folder, name, env
        )
        self._controllers.append(result)
        return result

    # Objects

    async def create(self, manifest: Object, *, client: KubeClient | None = None) -> Object:
        """Create an object with strict field validation, as kubectl does."""
        group = manifest["apiVersion"]
        base = f"/apis/{group}" if "/" in group else f"/api/{group}"
        namespace = manifest["metadata"].get("namespace")
        plural = manifest["kind"].lower() + "s"
        path = f"{base}/namespaces/{namespace}/{plural}" if namespace else f"{base}/{plural}"
        created: Object = await (client or self.client).request(
            "POST", path, body=manifest, params={"fieldValidation": "Strict"}
        )
        return created

    async def nodes(self, count: int, *, gpus: int = 8, first: int = 0, **more: Any) -> list[str]:
        """Create nodes and wait until they are ready."""
        names = [f"{self.name}-{first + i}" for i in range(count)]
        labels = {STAGE_LABEL: self.name} | more.pop("labels", {})
        await create_nodes(self.client, [node_manifest(name, gpus=gpus, labels=labels, **more) for name in names])
        return names

    async def adopt(self, nodes: Iterable[str], *, mine: bool = True) -> None:
        """Take nodes that others have made into the stage's flavor, or out of it again."""
        body = {"metadata": {"labels": {STAGE_LABEL: self.name if mine else None}}}
        for node in nodes:
            await self.client.request("PATCH", f"/api/v1/nodes/{node}", body=body, content_type=MERGE_PATCH)

    async def flavor(self) -> None:
        """Create the flavor of the stage's nodes."""
        await self.create(manifests.flavor(self.name, nodeLabels={STAGE_LABEL: self.name}))

    async def queue(self, nominal: int, name: str = "", **spec: Any) -> str:
        """Create a queue with a quota of GPUs in the stage's flavor."""
        full = f"{self.name}-{name}" if name else self.name
        await self.create(manifests.queue(full, quotas=[manifests.quota(nominal, flavor=self.name)], **spec))
        return full

    def job(
        self,
        name: str,
        pods: int,
        gpus: int,
        *,
        annotations: Mapping[str, str] | None = None,
        pod: Mapping[str, Any] | None = None,
        **spec: Any,
    ) -> Object:
        """Return a job of one role; `annotations` go to its pods, `pod` into their spec."""
        container = {"name": "main", "image": "train:1", "resources": {"limits": {GPU: gpus}}}
        role = manifests.role("worker", pods, container)
        role["template"]["metadata"] = {"annotations": dict(annotations or {})}
        role["template"]["spec"] |= pod or {}
        return manifests.job(name, role, namespace=self.namespace, **{"queue": self.name, **spec})

    async def submit(self, name: str, pods: int, gpus: int, *, run_seconds: float | None = None, **more: Any) -> Object:
        """Submit a job of one role; it runs until it is deleted unless `run_seconds` says otherwise."""
        annotations = dict(more.pop("annotations", None) or {})
        if run_seconds is not None:
            annotations["local.queuectl.dev/run-seconds"] = f"{run_seconds}s"
        return await self.create(self.job(name, pods, gpus, annotations=annotations, **more))

    async def submit_as(self, user: str, manifest: Object) -> Object:
        """Create a job as somebody else, who may create jobs in its namespace and nothing else."""
        namespace = manifest["metadata"]["namespace"]
        rbac, role = "rbac.authorization.k8s.io", f"submits-{next(_roles)}"
        meta = {"name": role, "namespace": namespace}
        rule = {"apiGroups": [GROUP], "resources": ["trainingjobs"], "verbs": ["create"]}
        await self.create({"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": [rule]})
        who = {
            "subjects": [{"apiGroup": rbac, "kind": "User", "name": user}],
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": role},
        }
        await self.create({"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": meta, **who})
        config = yaml.safe_load(self.kubeconfig.read_text(encoding="utf-8"))
        config["users"][0]["user"]["as"] = user
        kubeconfig = self._folder / f"{self.name}-{role}.kubeconfig"
        kubeconfig.write_text(yaml.safe_dump(config), encoding="utf-8")
        async with await KubeClient.open(str(kubeconfig)) as client:

            async def created() -> Object | None:
                try:
                    return await self.create(manifest, client=client)
                except ApiError as error:
                    if error.reason != "Forbidden" or "cannot create resource" not in error.message:
                        raise  # else the API server has not heard of the role yet
                return None

            return await eventually(created, f"{user} may create jobs in {namespace}")

    async def patch_job(self, name: str, patch: Object, *, namespace: str = "") -> Object:
        path = jobs_path(namespace or self.namespace, name)
        patched: Object = await self.client.request("PATCH", path, body=patch, content_type=MERGE_PATCH)
        return patched

    async def delete_job(self, name: str, *, namespace: str = "") -> None:
        await self.client.request("DELETE", jobs_path(namespace or self.namespace, name))

    async def end_jobs(self) -> None:
        """Delete all jobs, also those that are going already, and wait until they are gone."""
        for job in await self.jobs():
            await self._quietly("DELETE", jobs_path(job["metadata"]["namespace"], job["metadata"]["name"]))

        async def gone() -> bool:
            return not await self.jobs()

        await eventually(gone, "all jobs are gone")

    async def end_pods(self, job: str, *, exit_code: int = 0, role: str = "") -> None:
        """Have the job's running pods, or those of one role, end now."""
        annotations = {"local.queuectl.dev/run-seconds": "0", "local.queuectl.dev/exit-code": str(exit_code)}
        for pod in await self.pods(job):
            if pod["status"]["phase"] == "Running" and role in {"", pod["metadata"]["labels"][ROLE_LABEL]}:
                path = pods_path(self.namespace, pod["metadata"]["name"])
                body = {"metadata": {"annotations": annotations}}
                await self.client.request("PATCH", path, body=body, content_type=MERGE_PATCH)

    async def others_pod(self, name: str, gpus: int, **more: Any) -> Object:
        """Create a pod that is not under queuectl, for any of the stage's nodes."""
        spec = {
            "nodeSelector": {STAGE_LABEL: self.name},
            "containers": [{"name": "main", "image": "other:1", "resources": {"limits": {GPU: gpus}}}],
            **more,
        }
        meta = {"name": name, "namespace": self.namespace}
        return await self.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})

    async def delete_pod(self, name: str, *, namespace: str = "", at_once: bool = False) -> None:
        grace = {"gracePeriodSeconds": 0} if at_once else None
        await self.client.request("DELETE", pods_path(namespace or self.namespace, name), body=grace)

    async def jobs(self) -> list[Object]:
        return [
            job
            for namespace in self.namespaces
            for job in (await self.client.request("GET", jobs_path(namespace)))["items"]
        ]

    async def get_job(self, name: str) -> Object | None:
        return await self._get(jobs_path(self.namespace, name))

    async def pods(self, job: str = "") -> list[Object]:
        params = {"labelSelector": f"{JOB_LABEL}={job}"} if job else {}
        return [
            pod
            for namespace in self.namespaces
            for pod in (await self.client.request("GET", pods_path(namespace), params=params))["items"]
        ]

    # Waiting

    async def until_event(self, name: str, reason: str, *, seconds: float = LIMIT_SECONDS) -> str:
        """Wait until an event of the job bears the reason; return its note."""
        path = f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events"

        async def look() -> str | None:
            for item in (await self.client.request("GET", path))["items"]:
                if item["reason"] == reason and item["regarding"]["name"] == name:
                    return str(item["note"])
            return None

        return await eventually(look, f"job {name} has an event {reason}", seconds=seconds)

    async def until_job(
        self, name: str, holds: Callable[[Object], object], what: str, *, seconds: float = LIMIT_SECONDS
    ) -> Object:
        """Wait until the job's status satisfies `holds`; return the job."""
        last: Object = {}

        async def look() -> Object | None:
            nonlocal last
            last = await self.get_job(name) or {}
            return last if last and holds(last.get("status") or {}) else None

        try:
            return await eventually(look, f"job {name} {what}", seconds=seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\nstatus: {last.get('status')}\n{self.logs()}") from None

    def logs(self) -> str:
        """Return the ends of the controllers' logs."""
        return "\n".join(c.log.read_text()[-3000:] for c in (*self._controllers, *self._shared) if c.log.exists())

    async def until_phase(self, name: str, *phases: str, seconds: float = LIMIT_SECONDS) -> Object:
        return await self.until_job(name, lambda s: s.get("phase") in phases, f"is {phases}", seconds=seconds)

    async def until_reason(self, name: str, *reasons: str, seconds: float = LIMIT_SECONDS) -> Object:
        return await self.until_job(name, lambda s: s.get("reason") in reasons, f"says {reasons}", seconds=seconds)

    async def until_gone(self, name: str, *, seconds: float = LIMIT_SECONDS) -> None:
        async def gone() -> bool:
            return await self.get_job(name) is None

        await eventually(gone, f"job {name} is gone", seconds=seconds)

    async def _create_namespace(self, name: str) -> None:
        await self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    async def _get(self, path: str) -> Object | None:
        try:
            found: Object = await self.client.request("GET", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return found

    async def _quietly(self, method: str, path: str, body: Object | None = None) -> None:
        try:
            await self.client.request(method, path, body=body, content_type=MERGE_PATCH if body else "application/json")
        except ApiError as error:
            if error.status not in {404, 409}:
                raise
