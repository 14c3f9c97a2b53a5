"""Two controllers and one ledger: one acts, and whoever lost the lead does no harm."""

import asyncio
import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from queuectl.kube.names import GATE
from tests.support import ledger
from tests.support.eventually import eventually
from tests.support.observer import observing
from tests.support.proxy import Match, Proxy, Rule, Then
from tests.support.stage import Controller, Stage

PODS = 6
WRITTEN = """
SELECT (SELECT count(*) FROM plan WHERE epoch <= :epoch) AS plans,
       (SELECT count(*) FROM step WHERE epoch <= :epoch) AS steps,
       (SELECT count(*) FROM attempt WHERE epoch <= :epoch) AS attempts,
       (SELECT count(*) FROM event WHERE epoch <= :epoch) AS events
"""


async def leads(controller: Controller) -> bool:
    """Ask the controller itself."""
    return "\nqueuectl_leading 1.0\n" in await _get(controller, "/metrics")


async def _get(controller: Controller, path: str) -> str:
    if not controller.url:
        return ""
    try:
        async with aiohttp.ClientSession() as session, session.get(controller.url + path) as answer:
            return await answer.text()
    except aiohttp.ClientError:
        return ""  # not yet, or no longer


async def until_leads(controller: Controller) -> float:
    """Return the seconds that it took."""
    started = time.monotonic()
    await eventually(lambda: leads(controller), f"{controller.name} leads")
    return time.monotonic() - started


async def until_stands_by(controller: Controller) -> None:
    async def ready() -> bool:
        return await _get(controller, "/readyz") == "ok\n"

    await eventually(ready, f"{controller.name} is ready")


async def until_says(controller: Controller, text: str) -> None:
    async def look() -> bool:
        return controller.says(text)

    await eventually(look, f"{controller.name} says {text!r}")


async def leadership(stage: Stage) -> dict[str, Any]:
    query = "SELECT epoch, holder, extract(epoch FROM renewed_at) AS renewed_at FROM leadership"
    return (await ledger.rows(stage, query))[0]


async def written_by(stage: Stage, epoch: int) -> dict[str, int]:
    """Count what the ledger holds of this epoch and those before."""
    return (await ledger.rows(stage, WRITTEN, epoch=epoch))[0]


async def test_the_standby_takes_over_from_a_dead_leader(
    stage: Stage, record_property: Callable[[str, object], None]
) -> None:
    await stage.nodes(2)
    await stage.queue(16)
    lease = {"QUEUECTL_LEASE_SECONDS": "6"}
    first, second = stage.controller("first", env=lease), stage.controller("second", env=lease)
    first.start()
    await until_leads(first)
    second.start()
    await until_stands_by(second)
    await stage.submit("before", 2, 4, run_seconds=1)
    await stage.until_phase("before", "Succeeded")
    assert not await leads(second)
    assert not second.says('"attempt moved"')

    first.kill()
    await stage.submit("after", 2, 4, run_seconds=0)
    took = await until_leads(second)
    record_property("failover_seconds", round(took, 1))
    assert took < 60  # the budget of 10 s is the benchmark's to judge, on a machine that does nothing else
    await stage.until_phase("after", "Succeeded")
    await ledger.until_free(stage)


async def test_a_leader_that_is_told_to_end_hands_over_at_once(stage: Stage) -> None:
    await stage.nodes(1)
    await stage.queue(8)
    lease = {"QUEUECTL_LEASE_SECONDS": "300"}
    first, second = stage.controller("first", env=lease), stage.controller("second", env=lease)
    first.start()
    await until_leads(first)
    second.start()
    await until_stands_by(second)
    await asyncio.to_thread(first.stop)
    await until_leads(second)
    await stage.submit("after", 2, 4, run_seconds=0)
    await stage.until_phase("after", "Succeeded")


def creates(method: str, path: str, body: bytes) -> bool:
    return method == "POST" and "/pods" in path and b'"first"' in body


def ungates(method: str, path: str, body: bytes) -> bool:
    return method == "PATCH" and "/pods/first-" in path and GATE.encode() in body


@dataclass
class Late:
    """A request that is held back until the test lets it go."""

    rule: Rule
    released: asyncio.Event

    async def release(self) -> None:
        self.released.set()
        await self.rule.until_done()


def pause_at(proxy: Proxy, controller: Controller, match: Match, nth: int) -> Late:
    """Freeze the controller at its nth such request, which is held back."""
    released = asyncio.Event()

    async def do() -> Then:
        controller.send(signal.SIGSTOP)
        async with asyncio.timeout(120):
            await released.wait()
        return Then.GO_ON

    return Late(proxy.on(match, nth=nth, do=do), released)


async def wake(stage: Stage, controller: Controller, epoch: int) -> None:
    """Let a deposed leader go on; it must write nothing to the ledger, and say that its term is over."""
    before = await written_by(stage, epoch)
    assert before["events"] > 0
    controller.send(signal.SIGCONT)
    await until_says(controller, '"term over"')
    await until_stands_by(controller)
    assert not await leads(controller)
    assert await written_by(stage, epoch) == before
    assert (await leadership(stage))["holder"] == "second"


@pytest.mark.parametrize(
    ("match", "harmless"), [(creates, 409), (ungates, 422)], ids=["between two creates", "between two gates"]
)
async def test_a_leader_that_slept_beyond_its_lease_writes_nothing(
    stage: Stage, proxy: Proxy, match: Match, harmless: int
) -> None:
    await stage.nodes(3)
    await stage.queue(24)
    first, second = stage.controller("first", kubeconfig=proxy.kubeconfig), stage.controller("second")
    late = pause_at(proxy, first, match, 3)
    async with observing(stage):
        first.start()
        await until_leads(first)
        await stage.submit("first", PODS, 4)
        await late.rule.until_fired()
        epoch = (await leadership(stage))["epoch"]
        second.start()
        await stage.until_phase("first", "Running")
        await late.release()
        assert proxy.answers[-1].status == harmless
        await wake(stage, first, epoch)
        job = await stage.until_phase("first", "Running")
        assert job["status"]["attempt"] == 1
        assert len(await stage.pods("first")) == PODS
        await stage.submit("after", 2, 4, run_seconds=0)  # there is room for it
        await stage.delete_job("first")
        await stage.until_phase("after", "Succeeded")
        await stage.until_gone("first")
    await ledger.until_free(stage)


async def test_a_pod_that_a_deposed_leader_creates_late_stays_gated_and_is_removed(stage: Stage, proxy: Proxy) -> None:
    await stage.nodes(3)
    await stage.queue(24)
    first, second = stage.controller("first", kubeconfig=proxy.kubeconfig), stage.controller("second")
    late = pause_at(proxy, first, creates, 3)
    first.start()
    await until_leads(first)
    never = {"local.queuectl.dev/never-ready": "true"}
    await stage.submit("first", PODS, 4, annotations=never, startDeadlineSeconds=30)
    await late.rule.until_fired()
    epoch = (await leadership(stage))["epoch"]
    second.start()
    # The attempt ends: not ready in time. The next one waits for its back-off or has begun.
    await stage.until_job("first", lambda status: status.get("attempt", 0) > 1, "is at its second attempt")
    async with observing(stage):
        await late.release()
        answer = proxy.answers[-1]
        assert answer.status == 201
        pod = json.loads(answer.body)
        assert GATE in {gate["name"] for gate in pod["spec"]["schedulingGates"]}

        async def removed() -> bool:
            return pod["metadata"]["uid"] not in {p["metadata"]["uid"] for p in await stage.pods()}

        await eventually(removed, "the late pod is removed")
        await wake(stage, first, epoch)
    await stage.delete_job("first")
    await stage.until_gone("first")
    await ledger.until_free(stage)


async def test_an_api_server_that_does_not_answer_costs_nobody_the_lead(stage: Stage, proxy: Proxy) -> None:
    await stage.nodes(1)
    await stage.queue(8)
    released = asyncio.Event()

    async def hang() -> Then:
        await released.wait()
        return Then.DROP

    rule = proxy.on(lambda method, path, _: method == "PATCH" and "/leases/" in path, do=hang)
    controller = stage.controller(kubeconfig=proxy.kubeconfig)
    controller.start()
    try:
        await rule.until_fired()
        begun = await leadership(stage)

        async def renewed() -> bool:
            return bool((await leadership(stage))["renewed_at"] > begun["renewed_at"] + 6)  # two leases later

        await eventually(renewed, "the lead is renewed")
        assert (await leadership(stage))["epoch"] == begun["epoch"]
    finally:
        released.set()
