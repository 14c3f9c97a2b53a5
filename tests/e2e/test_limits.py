"""Who may use a queue and how much each may hold, while jobs wait and rules change."""

from typing import Any

from queuectl.kube.client import MERGE_PATCH, ApiError
from queuectl.kube.names import API
from tests.support.eventually import eventually
from tests.support.stage import Stage


async def edit(live: Stage, **spec: Any) -> None:
    await live.client.request("PATCH", f"{API}/queues/{live.name}", body={"spec": spec}, content_type=MERGE_PATCH)


async def label(live: Stage, value: str | None) -> None:
    body = {"metadata": {"labels": {"team": value}}}
    await live.client.request("PATCH", f"/api/v1/namespaces/{live.namespace}", body=body, content_type=MERGE_PATCH)


async def refusal(live: Stage, name: str) -> str:
    """Try to submit a job and return why it is refused, if it is."""
    try:
        await live.submit(name, 1, 1)
    except ApiError as error:
        return error.message
    await live.delete_job(name)
    await live.until_gone(name)
    return ""


async def until_refused(live: Stage, name: str, words: str) -> None:
    async def refused() -> bool:
        return words in await refusal(live, name)

    await eventually(refused, f"the refusal: {words}")


async def test_a_job_waits_while_its_namespace_may_not_use_the_queue(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8)
    await live.submit("held", 1, 8, hold=True)
    await live.until_reason("held", "Held")

    await edit(live, namespaceSelector={"matchLabels": {"team": live.name}})
    await live.patch_job("held", {"spec": {"hold": False}})
    job = await live.until_reason("held", "NamespaceNotAllowed")
    assert f"namespace {live.namespace} has no label team" in job["status"]["message"]
    await until_refused(live, "late", f"takes only jobs of namespaces with team in ({live.name})")

    await label(live, live.name)
    await live.until_phase("held", "Running")

    async def taken() -> bool:
        return not await refusal(live, "late")

    await eventually(taken, "a job of a namespace with the label")


async def test_a_users_next_job_starts_when_another_of_his_has_ended(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8, perUser={"maxRunning": 1})
    await live.submit("first", 1, 1)
    await live.until_phase("first", "Running")
    await live.submit("second", 1, 1)
    job = await live.until_reason("second", "MaxRunningReached")
    assert "1 job of user admin" in job["status"]["message"]
    await live.end_pods("first")
    await live.until_phase("second", "Running")


async def test_a_stopped_queue_says_so_and_goes_on_when_it_may(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8, stopPolicy="Hold")
    await live.submit("waits", 1, 1)
    job = await live.until_reason("waits", "QueueStopped")
    assert f"queue {live.name} has stopPolicy Hold" in job["status"]["message"]

    async def stopped() -> bool:
        found = await live.client.request("GET", f"{API}/queues/{live.name}")
        conditions = (found.get("status") or {}).get("conditions") or ()
        return any((c["type"], c["status"], c["reason"]) == ("Ready", "False", "QueueStopped") for c in conditions)

    await eventually(stopped, "the queue says that it is stopped")
    await edit(live, stopPolicy="None")
    await live.until_phase("waits", "Running")


async def test_a_queue_takes_no_more_waiting_jobs_than_it_may(live: Stage) -> None:
    await live.nodes(1)
    await live.queue(8, maxWaiting=1)
    await live.submit("runs", 1, 8)
    await live.until_phase("runs", "Running")

    async def submitted() -> bool:
        try:
            await live.submit("waits", 1, 8)
        except ApiError:
            return False
        return True

    await eventually(submitted, "the one that runs is no longer counted as waiting")
    await until_refused(live, "late", f"in queue {live.name} as many wait as may: 1, and maxWaiting is 1")
    await live.end_pods("runs")
    await live.until_phase("waits", "Running")

    async def taken() -> bool:
        return not await refusal(live, "late")

    await eventually(taken, "room in the line")
