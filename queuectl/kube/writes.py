"""All writes to the API server, each harmless when it is repeated or comes too late."""

import asyncio
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from queuectl.kube import decode, maintenance, moves, pods
from queuectl.kube.client import JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, ApiError, KubeClient
from queuectl.kube.names import (
    API,
    ASK,
    ATTEMPT_LABEL,
    FINALIZER,
    MOVE_REFUSED,
    SUSPECT,
    WORKLOAD_LABEL,
    claims_path,
    jobs_path,
    pods_path,
)
from queuectl.model.devices import DeviceClaim
from queuectl.model.lifecycle import Attempt
from queuectl.model.maintenance import Maintenance, NodeTest, Wanted
from queuectl.model.objects import Job, MoveRequest, Pod, Queue

# More requests under way do not make the API server faster, they only delay each other.
MAX_REQUESTS = 32

_CONFLICT, _NOT_FOUND, _INVALID = 409, 404, 422


class DeposedError(Exception):
    """Leadership has run out; nothing more may be written."""


class NameTakenError(Exception):
    """A pod or claim of that name exists and is not this attempt's."""


class Writer:
    """Writes while ``trusted`` says that this controller leads; raises DeposedError otherwise."""

    def __init__(self, client: KubeClient, trusted: Callable[[], bool]) -> None:
        """Prepare; nothing is sent."""
        self._client = client
        self._trusted = trusted
        self._slots = asyncio.Semaphore(MAX_REQUESTS)

    async def create_pod(self, manifest: pods.Manifest) -> Pod:
        """Create a pod, or find that this attempt has created it before.

        Raises ApiError when it is refused and NameTakenError when another pod has the name.
        """
        meta = manifest["metadata"]
        path = pods_path(meta["namespace"])
        try:
            answer = await self._send("POST", path, body=manifest, params={"fieldValidation": "Strict"})
        except ApiError as error:
            if error.status != _CONFLICT or error.reason != "AlreadyExists":
                raise
            answer = await self._send("GET", f"{path}/{meta['name']}")
        pod = decode.pod(answer).value
        if (pod.workload, str(pod.attempt)) != (meta["labels"][WORKLOAD_LABEL], meta["labels"][ATTEMPT_LABEL]):
            raise NameTakenError(f"a pod {pod.name} exists that is not of this attempt")
        return pod

    async def create_claim(self, manifest: pods.Manifest) -> None:
        """Create a pod's ResourceClaim, or find that this attempt has created it before.

        Raises ApiError when it is refused and NameTakenError when another claim has the name.
        """
        meta = manifest["metadata"]
        try:
            await self._send(
                "POST", claims_path(meta["namespace"]), body=manifest, params={"fieldValidation": "Strict"}
            )
        except ApiError as error:
            if error.status != _CONFLICT or error.reason != "AlreadyExists":
                raise
            found = decode.resource_claim(await self._send("GET", claims_path(meta["namespace"], meta["name"]))).value
            mine = (meta["labels"][WORKLOAD_LABEL], meta["labels"][ATTEMPT_LABEL])
            if (found.workload, str(found.attempt)) != mine or found.deleting:
                raise NameTakenError(f"a claim {found.name} exists that is not of this attempt") from error

    async def remove_claim(self, claim: DeviceClaim) -> None:
        """Delete a claim; it goes when its pod has stopped."""
        body = {"preconditions": {"uid": claim.uid}}
        await self._ignoring_gone("DELETE", claims_path(claim.namespace, claim.name), body=body)

    async def ungate(self, job: Job, pod: Pod, node: str) -> Pod | None:
        """Pin a pod to its node and take its gate away; None when the pod is gone, the pod as it is otherwise."""
        path = pods_path(pod.namespace, pod.name)
        try:
            answer = await self._send(
                "PATCH", path, body=pods.ungate_patch(job, pod.role, node, pod.uid), content_type=JSON_PATCH
            )
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return None
            if error.status != _INVALID:
                raise
            # A test of the patch failed: it was ungated before, or is another pod by now.
            now = await self._get_pod(path)
            if now is None or now.uid != pod.uid:
                return None
            if now.gated:
                raise
            return now
        return decode.pod(answer).value

    async def ask_pod(self, pod: Pod, ask: str) -> None:
        """Have a pod see, by annotation, that it is to save its work."""
        body = {"metadata": {"uid": pod.uid, "annotations": {ASK: ask}}}
        await self._ignoring_gone("PATCH", pods_path(pod.namespace, pod.name), body=body, content_type=MERGE_PATCH)

    async def run_in_pod(self, pod: Pod, command: Sequence[str], *, container: str) -> tuple[int, str]:
        """Run a command in a pod's container, to its end; return its exit code and the end of its output."""
        if not self._trusted():
            raise DeposedError("leadership ran out")
        return await self._client.execute(pods_path(pod.namespace, pod.name) + "/exec", command, container=container)

    async def tell_disrupted(self, pod: Pod, cause: str) -> None:
        """Say on a pod that it is about to be removed, and not for its own fault."""
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "PreemptionByQueuectl",
            "message": cause[:1024],
            "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        body = {"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}}
        path = pods_path(pod.namespace, pod.name) + "/status"
        await self._ignoring_gone("PATCH", path, body=body, content_type=STRATEGIC_PATCH)

    async def tell_suspect(self, node: str, cause: str) -> None:
        """Say by a condition of a node why it is suspect; without a cause, that it is not."""
        condition = {
            "type": SUSPECT,
            "status": "True" if cause else "False",
            "reason": "Offence" if cause else "Trusted",
            "message": cause,
            "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        body = {"status": {"conditions": [condition]}}
        await self._ignoring_gone("PATCH", f"/api/v1/nodes/{node}/status", body=body, content_type=STRATEGIC_PATCH)

    async def remove_pods(
        self, attempt: Attempt, namespace: str, *, ended_too: bool, grace_seconds: int | None = None
    ) -> None:
        """Delete the attempt's pods; those that stopped by themselves only if ``ended_too``.

        ``grace_seconds``: how long they may take after SIGTERM, if not as long as they say themselves.
        """
        options = {} if grace_seconds is None else {"body": {"gracePeriodSeconds": grace_seconds}}
        params = {"labelSelector": f"{WORKLOAD_LABEL}={attempt.uid},{ATTEMPT_LABEL}={attempt.number}"}
        if not ended_too:
            params["fieldSelector"] = "status.phase!=Succeeded,status.phase!=Failed"
        await self._send("DELETE", pods_path(namespace), params=params, **options)

    async def remove_pod(self, pod: Pod, *, grace_seconds: int | None = None) -> None:
        """Delete one pod; with 0 seconds when its node is gone, so that no kubelet would ever confirm."""
        options: dict[str, Any] = {"preconditions": {"uid": pod.uid}}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        await self._ignoring_gone("DELETE", pods_path(pod.namespace, pod.name), body=options)

    async def ensure_priority_class(self, priority: int) -> None:
        """Create the PriorityClass of our pods unless it exists."""
        try:
            await self._send("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", body=pods.priority_class(priority))
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise

    async def get_job(self, job: Job) -> Job | None:
        """Read a job anew; None when it is gone or another one has its name."""
        try:
            answer = await self._send("GET", jobs_path(job.gang.namespace, job.gang.name))
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return None
            raise
        now = decode.job(answer).value
        return now if now.gang.uid == job.gang.uid else None

    async def patch_job_status(self, job: Job, status: Any) -> Job:
        """Replace a job's status if it is still as ``job`` shows it; raises ApiError 409 otherwise."""
        gone = {key: None for key in job.status if key not in status}
        body = {"metadata": {"resourceVersion": job.resource_version}, "status": status | gone}
        path = jobs_path(job.gang.namespace, job.gang.name) + "/status"
        return decode.job(await self._send("PATCH", path, body=body, content_type=MERGE_PATCH)).value

    async def patch_queue_status(self, queue: Queue, status: Any) -> None:
        """Replace a queue's status if it is still as ``queue`` shows it."""
        body = {"metadata": {"resourceVersion": queue.resource_version}, "status": status}
        await self._ignoring_gone("PATCH", f"{API}/queues/{queue.name}/status", body=body, content_type=MERGE_PATCH)

    async def set_finalizer(self, job: Job, *, present: bool) -> None:
        """Add our finalizer to a job or take it away; does nothing when the job is gone or as wanted."""
        path = jobs_path(job.gang.namespace, job.gang.name)
        try:
            live = await self._client.request("GET", path)
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return
            raise
        meta = live["metadata"]
        finalizers = [name for name in meta.get("finalizers") or () if name != FINALIZER]
        if meta["uid"] != job.gang.uid or (FINALIZER in (meta.get("finalizers") or ())) == present:
            return
        body = {
            "metadata": {
                "resourceVersion": meta["resourceVersion"],
                "finalizers": [*finalizers, FINALIZER] if present else finalizers,
            }
        }
        await self._ignoring_gone("PATCH", path, body=body, content_type=MERGE_PATCH)

    async def refuse_move(self, job: Job, request: MoveRequest, because: str) -> None:
        """Answer the request to move that a job bears, if the job is still the same."""
        annotations = {MOVE_REFUSED: moves.refused(request, because)}
        body = {"metadata": {"uid": job.gang.uid, "annotations": annotations}}
        path = jobs_path(job.gang.namespace, job.gang.name)
        await self._ignoring_gone("PATCH", path, body=body, content_type=MERGE_PATCH)

    async def delete_job(self, job: Job) -> None:
        """Delete a job if it is still the same."""
        body = {"preconditions": {"uid": job.gang.uid}, "propagationPolicy": "Background"}
        await self._ignoring_gone("DELETE", jobs_path(job.gang.namespace, job.gang.name), body=body)

    async def patch_maintenance_status(self, one: Maintenance, status: Any) -> Maintenance:
        """Replace a maintenance's status if it is still as ``one`` shows it; raises ApiError 409 otherwise."""
        body = {"metadata": {"resourceVersion": one.resource_version}, "status": status}
        path = f"{maintenance.PATH}/{one.name}/status"
        return maintenance.maintenance(await self._send("PATCH", path, body=body, content_type=MERGE_PATCH)).value

    async def make_node(self, name: str, want: Wanted) -> None:
        """Have a node be as a maintenance wants it. Raises ApiError 409 when others write it at the same time."""
        path = f"/api/v1/nodes/{name}"
        try:
            patch = maintenance.node_patch(json.loads(await self._send("GET", path)), want)
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return
            raise
        if patch is not None:
            await self._send("PATCH", path, body=patch, content_type=MERGE_PATCH)

    async def create_test(self, one: Maintenance, node: str) -> None:
        """Create the pod that verifies a node unless it exists. Raises ApiError when it is refused."""
        manifest = maintenance.test_pod(one, node)
        path = pods_path(manifest["metadata"]["namespace"])
        try:
            await self._send("POST", path, body=manifest, params={"fieldValidation": "Strict"})
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise

    async def remove_test(self, test: NodeTest) -> None:
        """Delete a test pod."""
        body = {"preconditions": {"uid": test.uid}}
        await self._ignoring_gone("DELETE", pods_path(test.namespace, test.name), body=body)

    async def create_event(self, namespace: str, body: Any) -> None:
        """Record an event."""
        await self._send("POST", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", body=body)

    async def _get_pod(self, path: str) -> Pod | None:
        try:
            return decode.pod(await self._send("GET", path)).value
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    async def _ignoring_gone(self, method: str, path: str, **request: Any) -> None:
        try:
            await self._send(method, path, **request)
        except ApiError as error:
            # 409: the uid names another object by now, or it has changed and the next look decides anew.
            if error.status not in {_NOT_FOUND, _CONFLICT}:
                raise

    async def _send(self, method: str, path: str, **request: Any) -> bytes:
        async with self._slots:
            if not self._trusted():
                raise DeposedError("leadership ran out")
            return await self._client.request_raw(method, path, **request)
