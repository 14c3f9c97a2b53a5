"""get, describe, hold, release, cancel and wait, on jobs that a real controller runs."""

import asyncio
import json
import signal

import yaml

from queuectl.cli.errors import Exit
from tests.support.commands import Commands
from tests.support.stage import Stage

HEADINGS = ["NAME", "QUEUE", "PRIORITY", "PHASE", "PODS", "POSITION", "REASON", "AGE"]


async def test_lists_of_jobs(live: Stage, staged: Commands) -> None:
    await live.nodes(2)
    await live.queue(16)
    await live.submit("first", 2, 8, priority=7)
    await live.until_phase("first", "Running")
    second = await live.submit("second", 1, 8)
    await live.patch_job("second", {"metadata": {"labels": {"team": "vision"}}})
    await live.until_reason("second", "WaitingForQuota")

    table = (await staged("get")).rows
    assert table[0] == HEADINGS
    assert table[1][:-1] == ["first", live.name, "7", "Running", "2/2", "-", "Running"]
    assert table[2][:-1] == ["second", live.name, "0", "Pending", "0/1", "1", "WaitingForQuota"]
    assert table[1][-1][-1] in "smh"

    wide = await staged("get", "-o", "wide")
    assert wide.rows[0] == [*HEADINGS, "ATTEMPT", "NODES", "MESSAGE"]
    assert wide.rows[1][8:10] == ["1", "2"]
    assert "it owns 16 and uses 16" in wide.out

    everywhere = (await staged("get", "-A")).rows
    assert everywhere[0] == ["NAMESPACE", *HEADINGS]
    assert [live.namespace, "second"] in [row[:2] for row in everywhere]

    for words, want in (
        (["--phase", "Pending"], ["second"]),
        (["--queue", live.name, "--phase", "Running"], ["first"]),
        (["-l", "team=vision"], ["second"]),
        (["second", "first"], ["first", "second"]),
    ):
        done = await staged("get", *words)
        assert [row[0] for row in done.rows[1:]] == want, words

    assert (await staged("get", "-o", "name")).out.split() == [
        "trainingjob.queuectl.dev/first",
        "trainingjob.queuectl.dev/second",
    ]
    one = json.loads((await staged("get", "second", "-o", "json")).out)
    assert one["metadata"]["uid"] == second["metadata"]["uid"]
    assert "managedFields" not in one["metadata"]
    several = yaml.safe_load((await staged("get", "-o", "yaml")).out)
    assert several["kind"] == "List"
    assert [item["metadata"]["name"] for item in several["items"]] == ["first", "second"]

    await live.queue(0, "idle")
    idle = f"{live.name}-idle"
    nothing = await staged("get", "--queue", idle)
    assert (nothing.out, nothing.err) == ("", f"queuectl: no jobs of queue {idle} in namespace {live.namespace}\n")
    assert json.loads((await staged("get", "--queue", idle, "-o", "json")).out)["items"] == []
    unknown = await staged("get", "--queue", live.name[:-1], code=Exit.NOT_FOUND)
    assert f'no queue "{live.name[:-1]}"; did you mean ' in unknown.err
    assert live.name in unknown.err

    missing = await staged("get", "first", "third", code=Exit.NOT_FOUND)
    assert [row[0] for row in missing.rows] == ["NAME", "first"]
    assert f'no job "third" in namespace {live.namespace}; "queuectl get -A"' in missing.err
    typo = await staged("get", "frist", code=Exit.NOT_FOUND)
    assert f'no job "frist" in namespace {live.namespace}; did you mean first?' in typo.err
    kind = await staged("describe", "queue", live.name, code=Exit.NOT_FOUND)
    assert 'no job "queue"' in kind.err
    assert '"queuectl queues" lists queues' in kind.err


async def test_a_watch_shows_each_change_until_it_is_interrupted(live: Stage, staged: Commands) -> None:
    await live.nodes(1)
    await live.queue(8)
    async with staged.running("get", "-w") as table, staged.running("get", "-w", "-o", "json") as objects:
        await live.submit("watched", 1, 8)
        await table.until("watched", "Running", "1/1")
        await staged("cancel", "watched")
        await table.until("watched", "Deleted")
        assert table.text.count("NAME ") == 1
        await objects.until('"phase": "Running"')
        for output in (table, objects):
            output.process.send_signal(signal.SIGINT)
            async with asyncio.timeout(60):
                assert await output.process.wait() == 130


async def test_a_description_says_where_the_pods_are_and_what_happened(live: Stage, staged: Commands) -> None:
    nodes = await live.nodes(2)
    await live.queue(16)
    await live.submit("told", 2, 8, maxRunSeconds=7200)
    await live.until_phase("told", "Running")
    await live.submit("behind", 1, 8)
    await live.until_reason("behind", "WaitingForQuota")
    events = await staged("describe", "told")
    lines = [" ".join(line.split()) for line in events.out.splitlines()]
    for want in (
        "Name: told",
        f"Queue: {live.name}",
        "Phase: Running",
        "Message: The whole gang is ready: 2 pods.",
        "Attempt: 1 (0 failed of 4)",
        "Longest run: 120m",
        "worker 2 nvidia.com/gpu: 8 yes",
        f"worker {nodes[0]} {live.name} 1 1 Ready",
        f"worker {nodes[1]} {live.name} 1 1 Ready",
    ):
        assert want in lines, events.out
    assert any(line.startswith("PodsReady True Running ") for line in lines)
    section = lines[lines.index("Events:") :]
    assert any("Normal Admitted Capacity for 2 pods is reserved on 2 nodes" in line for line in section), events.out

    waiting = await staged("describe", "behind")
    both = await staged("describe", "told", "behind")
    assert [row[1] for row in both.rows if row[:1] == ["Name:"]] == ["told", "behind"]
    assert f"Logs: kubectl logs -n {live.namespace} told-worker-1-0" in events.out
    assert f"Jobs of {live.name}: {live.namespace}/told (16)." in waiting.out
    assert f"1 in queue {live.name}" in waiting.out
    assert "it owns 16 and uses 16" in waiting.out
    assert "Pods: none" in waiting.out
    assert 'no job "nobody"' in (await staged("describe", "nobody", code=Exit.NOT_FOUND)).err


async def test_hold_and_release(live: Stage, staged: Commands) -> None:
    await live.nodes(1)
    await live.queue(8)
    await live.submit("blocker", 1, 8)
    await live.until_phase("blocker", "Running")
    await live.submit("held", 1, 8)
    await live.until_reason("held", "WaitingForQuota")

    assert (await staged("hold", "held")).out == "trainingjob.queuectl.dev/held held\n"
    assert (await staged("hold", "held")).out == "trainingjob.queuectl.dev/held is held already\n"
    await live.until_reason("held", "Held")
    refused = await staged("hold", "blocker", code=Exit.REFUSED)
    assert "job blocker is Running: only a waiting job can be held. To stop it: queuectl cancel blocker" in refused.err

    waits = await staged("release", "held")
    assert waits.out == "trainingjob.queuectl.dev/held released\n"
    await live.until_reason("held", "WaitingForQuota")
    waits = await staged("release", "held")
    assert waits.out == "trainingjob.queuectl.dev/held is not held: it is Pending (WaitingForQuota)\n"
    await staged("hold", "held")

    await staged("cancel", "blocker")
    assert (await staged("release", "held")).out == "trainingjob.queuectl.dev/held released\n"
    await live.until_phase("held", "Running")
    assert (await staged("release", "held")).out == "trainingjob.queuectl.dev/held is not held: it is Running\n"
    assert 'no job "nobody"' in (await staged("release", "held", "nobody", code=Exit.NOT_FOUND)).err


async def test_cancel_waits_until_all_is_gone(live: Stage, staged: Commands) -> None:
    await live.nodes(1)
    await live.queue(8)
    for name in ("a", "b", "c"):
        await live.submit(name, 1, 2)
    await live.until_phase("a", "Running")

    tried = await staged("cancel", "--all", "--dry-run")
    assert sorted(tried.out.splitlines()) == [
        f"trainingjob.queuectl.dev/{name} cancelled (server dry run)" for name in ("a", "b", "c")
    ]
    assert [job["metadata"].get("deletionTimestamp") for job in await live.jobs()] == [None] * 3
    missing = await staged("cancel", "a", "nobody", code=Exit.NOT_FOUND)
    assert missing.out == "trainingjob.queuectl.dev/a cancelled\n"
    assert 'no job "nobody"' in missing.err
    assert await live.get_job("a") is None
    assert await live.pods("a") == []

    await live.patch_job("b", {"metadata": {"labels": {"team": "vision"}}})
    assert (await staged("cancel", "-l", "team=vision")).out == "trainingjob.queuectl.dev/b cancelled\n"
    assert (await staged("cancel", "--all", "--yes")).out == "trainingjob.queuectl.dev/c cancelled\n"
    assert "no jobs in namespace" in (await staged("cancel", "--all")).err


async def test_cancel_does_not_wait_for_ever(live: Stage, staged: Commands) -> None:
    await live.queue(8)
    await live.submit("slow", 1, 8)
    await live.patch_job("slow", {"metadata": {"finalizers": ["example.com/mine"]}})
    late = await staged("cancel", "slow", "--timeout", "1s", code=Exit.TIMED_OUT)
    assert "job slow is being deleted, but not gone within 1 s; its pods may take long to stop" in late.err
    assert late.out == ""
    assert (await staged("cancel", "slow", "--no-wait")).out == "trainingjob.queuectl.dev/slow cancelled\n"
    await live.patch_job("slow", {"metadata": {"finalizers": None}})
    await live.until_gone("slow")


async def test_wait_exits_as_the_job_did(live: Stage, staged: Commands) -> None:
    await live.nodes(1)
    await live.queue(8)
    await live.submit("well", 1, 1, run_seconds=1)
    await live.submit("badly", 1, 1, run_seconds=1, annotations={"local.queuectl.dev/exit-code": "42"}, backoffLimit=0)
    await live.submit("long", 1, 1)
    done, failed, running = await asyncio.gather(
        staged("wait", "well"),
        staged("wait", "badly", code=42),
        staged("wait", "long", "--for", "running"),
    )
    assert done.out == "trainingjob.queuectl.dev/well Succeeded\n"
    assert failed.out == "trainingjob.queuectl.dev/badly Failed\n"
    assert (
        "job badly: Failed 1 time, backoffLimit is 0; last: Pod badly-worker-1-0 failed with exit code 42" in failed.err
    )
    assert '"queuectl describe badly" tells more' in failed.err
    assert running.out == "trainingjob.queuectl.dev/long Running\n"
    assert (await staged("wait", "well", "--for", "running")).out == "trainingjob.queuectl.dev/well Succeeded\n"
    assert (await staged("wait", "well", "badly", code=42)).out.count("\n") == 2


async def test_a_wait_that_is_in_vain(live: Stage, staged: Commands) -> None:
    await live.queue(8)
    await live.submit("stuck", 1, 8, hold=True)
    await live.until_reason("stuck", "Held")
    late = await staged("wait", "stuck", "--for", "running", "--timeout", "1s", code=Exit.TIMED_OUT)
    assert "job stuck: not within 1 s; it is Pending: Held by its user; 'queuectl release stuck'" in late.err
    assert 'no job "nobody"' in (await staged("wait", "nobody", code=Exit.NOT_FOUND)).err

    async with staged.running("get", "-w") as table:
        await table.until("stuck", "Held")
        waiting = asyncio.create_task(staged("wait", "stuck", "--timeout", "2m", code=Exit.NOT_FOUND))
        await asyncio.sleep(0)
        await staged("cancel", "stuck")
        assert "job" in (await waiting).err


async def test_submit_that_waits(live: Stage, staged: Commands) -> None:
    await live.nodes(1)
    await live.queue(8)
    annotations = {"local.queuectl.dev/run-seconds": "1s", "local.queuectl.dev/exit-code": "9"}
    job = live.job("waited", 1, 8, annotations=annotations, backoffLimit=0)
    done = await staged("submit", "-f", "-", "--wait", "--timeout", "2m", stdin=json.dumps(job), code=9)
    assert done.out.splitlines() == [
        "trainingjob.queuectl.dev/waited created",
        "trainingjob.queuectl.dev/waited Failed",
    ]
