"""Jobs and pods as they are seen on a control plane."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Any, Self

import msgspec

from queuectl.demo.watch import Watch
from queuectl.kube.client import KubeClient
from queuectl.kube.names import ASK, INDEX_LABEL, REPORT, ROLE_LABEL
from queuectl.model.plan import PodKey
from queuectl.model.reasons import Reason

Object = dict[str, Any]
SIMULATED = "local.queuectl.dev"  # the prefix of annotations by which pods are simulated


class Seen:
    """All objects of a kind as last seen. One for all plays, so that they may look as often as they like."""

    def __init__(self, client: KubeClient, path: str) -> None:
        self._items: dict[str, Object] = {}
        self._watch = Watch(client, path, self._on_list, self._on_event)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[Self]:
        """Keep it current meanwhile."""
        task = asyncio.create_task(self._watch.run())
        try:
            await self._watch.listed.wait()
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def of(self, namespaces: Collection[str]) -> list[Object]:
        return [item for item in self._items.values() if item["metadata"]["namespace"] in namespaces]

    def _on_list(self, items: list[Object]) -> None:
        self._items = {item["metadata"]["uid"]: item for item in items}

    def _on_event(self, item: Object, gone: bool) -> None:  # noqa: FBT001
        if gone:
            self._items.pop(item["metadata"]["uid"], None)
        else:
            self._items[item["metadata"]["uid"]] = item


def status_of(job: Object) -> Object:
    status: Object = job.get("status") or {}
    return status


def told(job: Object) -> Object:
    """Return a job's status without what drifts on while nothing happens."""
    return {key: value for key, value in status_of(job).items() if key in {"phase", "reason", "attempt", "assignments"}}


def is_stopping(item: Object) -> bool:
    return "deletionTimestamp" in item["metadata"]


def key_of(pod: Object) -> PodKey:
    labels = pod["metadata"]["labels"]
    return labels[ROLE_LABEL], int(labels[INDEX_LABEL])


def has_ended(pod: Object) -> bool:
    return pod["status"].get("phase") in {"Succeeded", "Failed"}


def is_ending(pod: Object) -> bool:
    """Tell whether a pod that runs has been told how to end."""
    told = f"{SIMULATED}/run-seconds" in pod["metadata"].get("annotations", {})
    return told and pod["status"].get("phase") == "Running" and not is_stopping(pod)


def is_asked(pod: Object) -> bool:
    return ASK in pod["metadata"].get("annotations", {})


def has_answered(pod: Object) -> bool:
    """Tell whether a pod has saved its work for an ask, whichever."""
    report = pod["metadata"].get("annotations", {}).get(REPORT)
    return report is not None and msgspec.json.decode(report)["ask"] is not None


def is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def is_starting(status: Object) -> bool:
    """Tell whether a job starts, or some of its pods do."""
    return status.get("phase") == "Starting" or status.get("reason") in {Reason.GROWING.code, Reason.REPLACING.code}


def start_of(name: str, pods: Iterable[Object]) -> tuple[str, ...]:
    """Return what tells the start of these pods from others."""
    return ("start", name, *sorted(pod["metadata"]["uid"] for pod in pods))
