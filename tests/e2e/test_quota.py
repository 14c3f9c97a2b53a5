"""Quotas that are edited while jobs run, on a real control plane: what is taken back, and who did it, and why."""

import json
from typing import Any

import pytest

from queuectl.cli.errors import Exit
from queuectl.cli.quota import _edit
from queuectl.cli.session import Session
from queuectl.kube.client import MERGE_PATCH, ApiError, KubeClient
from queuectl.kube.names import API, CHANGE_WHY
from queuectl.local.controlplane import Running
from tests.support import ledger, manifests
from tests.support.commands import Commands
from tests.support.eventually import eventually
from tests.support.stage import GPU, Stage


@pytest.fixture
def cli(control_plane: Running) -> Commands:
    return Commands(control_plane.kubeconfig)


async def test_a_lowered_quota_takes_back_the_latest_and_tells_who_and_why(live: Stage, cli: Commands) -> None:
    await live.nodes(3)
    name = await live.queue(24, whenOverQuota="TakeBack")
    attempts = {}  # a slow start may take two
    for job in ("first", "dear", "last"):
        await live.submit(job, 1, 8, priority=5 if job == "dear" else 0)
        attempts[job] = (await live.until_phase(job, "Running"))["status"]["attempt"]

    told = await cli("quota", "set", name, "--nominal", "12", "--why", "two servers are lent to speech", "--dry-run")
    assert told.out == f"queue.queuectl.dev/{name} {live.name} {GPU}: nominal 24 -> 12 (server dry run)\n"
    told = await cli("quota", "set", name, "--nominal", "16", "--why", "one server is lent to speech")
    assert told.out == f"queue.queuectl.dev/{name} {live.name} {GPU}: nominal 24 -> 16\n"

    last = await live.until_job("last", lambda s: s.get("phase") == "Pending", "waits")
    evicted = next(c for c in last["status"]["conditions"] if c["type"] == "Evicted")
    assert evicted["reason"] == "QuotaTakenBack"
    assert evicted["message"] == (
        f"The quota no longer covers it: in queue {name}, 24 {GPU} in flavor {live.name} were in use, and 16 may be."
    )
    last = await live.until_reason("last", "WaitingForQuota")
    for job in ("first", "dear"):
        stays = await live.get_job(job)
        assert stays
        told_of = await ledger.history(live, job)
        assert (stays["status"]["phase"], stays["status"]["attempt"]) == ("Running", attempts[job]), told_of
    assert (await ledger.history(live, "last"))[-3:] == ["Running", "QuotaTakenBack", "Requeued"]

    database = ("--database-url", live.database_url)
    record = json.loads((await cli("quota", "history", name, "-o", "json", *database)).out)
    nominals = [(one["from"]["nominal"], one["to"]["nominal"], one["why"]) for one in record]
    assert nominals == [("24", "16", "one server is lent to speech"), (None, "24", "")]
    assert {one["by"] for one in record} == {"admin"}
    table = (await cli("quota", "history", name, "--limit", "1", *database)).rows
    assert table[0] == ["WHEN", "QUEUE", "FLAVOR", "RESOURCE", "NOMINAL", "BORROWING", "LENDING", "WHO", "WHY"]
    assert table[1][1:] == [
        name, live.name, GPU, "24->16", "none", "none", "admin", "one", "server", "is", "lent", "to", "speech",
    ]  # fmt: skip

    # It kept its place: with the quota back, it starts before one that came later.
    await live.submit("later", 1, 8)
    await cli("quota", "set", name, "--nominal", "24", "--why", "it is back")
    last = await live.until_phase("last", "Running")
    assert last["status"]["attempt"] > attempts["last"]
    assert last["status"].get("failures", 0) == 0
    await live.until_reason("later", "WaitingForQuota")


async def test_edits_by_kubectl_and_from_a_repository_are_versions_too(live: Stage, cli: Commands) -> None:
    name = await live.queue(8)
    path = f"{API}/queues/{name}"

    async def edit(limits: dict[str, Any], why: str | None, **params: str) -> None:
        quota = manifests.quota(8, flavor=live.name) | limits
        body: dict[str, Any] = {"spec": {"quotas": [quota]}}
        if why is not None:
            body["metadata"] = {"annotations": {CHANGE_WHY: why}}
        if params:  # as kubectl apply --server-side does
            body |= {"apiVersion": "queuectl.dev/v1alpha1", "kind": "Queue"}
            kind = "application/apply-patch+yaml"
        else:
            kind = MERGE_PATCH
        await live.client.request("PATCH", path, params=params, body=body, content_type=kind)

    async def record() -> list[tuple[Any, ...]]:
        rows = await ledger.rows(
            live,
            "SELECT to_nominal, to_borrowing_limit, to_lending_limit, why FROM quota_version WHERE queue = :queue"
            " ORDER BY id",
            queue=name,
        )
        return [tuple(row.values()) for row in rows]

    async def until(*expected: tuple[Any, ...]) -> None:
        async def recorded() -> bool:
            return await record() == list(expected)

        try:
            await eventually(recorded, "the versions are on record")
        except AssertionError:
            assert await record() == list(expected)

    versions: list[tuple[Any, ...]] = [(8, None, None, "")]
    await until(*versions)
    await edit({"nominal": 16}, "by hand")
    versions.append((16, None, None, "by hand"))
    await until(*versions)
    await edit({"nominal": 16, "borrowingLimit": 4}, None)
    versions.append((16, 4, None, ""))
    await until(*versions)
    await edit({"nominal": 12, "lendingLimit": 0}, "release 7", fieldManager="gitops", force="true")
    versions.append((12, 4, 0, "release 7"))
    await until(*versions)
    for words in ({"--nominal": "10"}, {"--borrowing-limit": "none", "--lending-limit": "2"}):
        await cli("quota", "set", name, "--why", "the same words", *(word for pair in words.items() for word in pair))
        versions.append((10, *(versions[-1][1:3] if "--nominal" in words else (None, 2)), "the same words"))
        await until(*versions)


async def test_a_drained_queue_runs_nothing_until_it_is_opened(live: Stage) -> None:
    await live.nodes(2)
    root = await live.queue(8)
    child = await live.queue(8, "child", parent=root)
    await live.submit("above", 1, 8)
    await live.submit("below", 1, 8, queue=child)
    for job in ("above", "below"):
        await live.until_phase(job, "Running")

    async def stop(policy: str) -> None:
        body = {"spec": {"stopPolicy": policy}}
        await live.client.request("PATCH", f"{API}/queues/{root}", body=body, content_type=MERGE_PATCH)

    await stop("HoldAndDrain")
    for job, queue in (("above", root), ("below", child)):
        waits = await live.until_reason(job, "QueueStopped")
        told = f"Queue {queue} admits nothing new: queue {root} has stopPolicy HoldAndDrain."
        assert waits["status"]["message"] == told
        evicted = next(c for c in waits["status"]["conditions"] if c["type"] == "Evicted")
        assert evicted["reason"] == "QueueDrained"
    assert await live.pods() == []
    await stop("None")
    for job in ("above", "below"):
        await live.until_phase(job, "Running")


class Busy:
    """A client before whose changes somebody else changes the queue, a number of times."""

    def __init__(self, client: KubeClient, path: str, times: int) -> None:
        self._client, self._path, self._times = client, path, times

    async def request(self, method: str, path: str, **more: Any) -> Any:
        if method == "PATCH" and self._times:
            self._times -= 1
            body = {"spec": {"order": "StrictFIFO"}, "metadata": {"labels": {"turn": str(self._times)}}}
            await self._client.request("PATCH", self._path, body=body, content_type=MERGE_PATCH)
        return await self._client.request(method, path, **more)


async def test_an_edit_of_the_same_moment_is_kept(live: Stage) -> None:
    name = await live.queue(8)
    path = f"{API}/queues/{name}"

    async def edit(nominal: int, times: int) -> str:
        session = Session(Busy(live.client, path, times), "")  # type: ignore[arg-type]
        return await _edit(session, name, (None, None), {"nominal": nominal}, "test", dry_run=False)

    assert "nominal 8 -> 4" in await edit(4, times=2)
    spec = (await live.client.request("GET", path))["spec"]
    assert (spec["order"], spec["quotas"][0]["nominal"]) == ("StrictFIFO", 4)
    with pytest.raises(ApiError) as refused:
        await edit(2, times=99)
    assert refused.value.status == 409
    assert (await live.client.request("GET", path))["spec"]["quotas"][0]["nominal"] == 4


async def test_what_is_wrong_with_an_edit_is_told(live: Stage, cli: Commands) -> None:
    name = await live.queue(8)
    two = f"{live.name}-two"
    quotas = [manifests.quota(8, flavor=live.name), manifests.quota("8Gi", flavor=live.name, resource="memory")]
    await live.create(manifests.queue(two, quotas=quotas))

    async def told(code: Exit, *words: str) -> str:
        return (await cli("quota", "set", *words, code=code)).err

    why = ("--why", "test")
    ambiguous = await told(Exit.USAGE, two, "--nominal", "4", *why)
    assert f"--flavor {live.name} --resource {GPU}; --flavor {live.name} --resource memory" in ambiguous
    assert "has no quota of flavor other; it has: " in await told(
        Exit.NOT_FOUND, two, "--flavor", "other", "--nominal", "4", *why
    )
    assert 'no queue "nowhere"' in await told(Exit.NOT_FOUND, "nowhere", "--nominal", "4", *why)
    assert "8 GPUs" in await told(Exit.REFUSED, name, "--nominal", "8 GPUs", *why)
    assert "2.5 is not a whole number" in await told(Exit.REFUSED, name, "--nominal", "2.5", *why)
    assert "give --nominal" in await told(Exit.USAGE, name, *why)
    assert "--why" in await told(Exit.USAGE, name, "--nominal", "4")
    assert (await cli("quota", "set", name, "--nominal", "8", *why)).out.endswith(": already so\n")
    assert (await cli("quota", "set", two, "--resource", "memory", "--nominal", "4Gi", *why)).out.endswith(
        "nominal 8Gi -> 4Gi\n"
    )
    nothing = await cli("quota", "history", "nowhere", "--database-url", live.database_url, code=Exit.NOT_FOUND)
    assert "no change of queue nowhere is on record" in nothing.err
