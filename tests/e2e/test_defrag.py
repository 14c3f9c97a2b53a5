"""``queuectl defrag`` on a real control plane: what it reads there, what it proposes, and what comes of it."""

import json
import time

import pytest

from queuectl.cli.errors import Exit
from queuectl.cli.moves import Asked
from queuectl.kube.names import MOVE_BY
from queuectl.local.controlplane import Running
from queuectl.model.objects import MoveRequest
from tests.support import ledger
from tests.support.commands import Commands
from tests.support.stage import Stage


@pytest.fixture
def cli(control_plane: Running) -> Commands:
    return Commands(control_plane.kubeconfig)


async def fragmented(live: Stage) -> tuple[dict[str, str], str, str]:
    """Have two nodes be half in use, each by one job, and a job wait for a whole one; return homes, and who they are."""
    await live.nodes(2)
    await live.queue(16)
    for job in ("a", "b", "c", "d"):
        await live.submit(job, 1, 4, checkpoint={"signal": "SigTerm"})
        await live.until_phase(job, "Running")
    homes = {job: (await live.pods(job))[0]["spec"]["nodeName"] for job in "abcd"}
    first, second = next((one, other) for one in "abcd" for other in "abcd" if homes[one] != homes[other])
    for job in {*"abcd"} - {first, second}:
        await live.delete_job(job)
        await live.until_gone(job)
    await live.submit("whole", 1, 8)
    await live.until_reason("whole", "WaitingForNodes")
    return homes, first, second


async def test_it_proposes_the_move_that_makes_a_node_whole_and_changes_nothing(live: Stage, cli: Commands) -> None:
    homes, first, second = await fragmented(live)
    database = ("--database-url", live.database_url)
    [proposal] = json.loads((await cli("defrag", "-o", "json", *database)).out)
    [move] = proposal["moves"]
    moved = move["job"].rpartition("/")[2]
    stays = second if moved == first else first
    assert moved in {first, second}
    assert (proposal["job"], proposal["queue"]) == (f"{live.namespace}/whole", live.name)
    assert (move["from"], move["to"], proposal["nodes"]) == ({homes[moved]: 1}, {homes[stays]: 1}, {homes[moved]: 1})
    row = (await cli("defrag", *database)).rows[1]
    goes = row[2].rpartition("/")[2]  # both lose about the same, so it may be the other one by now
    stays = second if goes == first else first
    assert row[:5] == [f"{live.namespace}/whole", homes[goes], f"{live.namespace}/{goes}", homes[goes], homes[stays]]

    nothing = await cli("defrag", "--within", "1s", *database)
    assert "no move would let a waiting job start" in nothing.err
    await cli("defrag", "--within", "soon", *database, code=Exit.USAGE)
    for job in (first, second):
        assert (await live.until_phase(job, "Running"))["status"]["attempt"] == 1


async def test_apply_moves_one_job_the_big_one_starts_and_the_small_one_runs_elsewhere(
    live: Stage, cli: Commands
) -> None:
    homes, first, second = await fragmented(live)
    database = ("--database-url", live.database_url)
    asked = await cli("defrag", "-n", live.namespace, "whole", "--apply", *database)
    assert "trainingjob.queuectl.dev/whole Running" in asked.err
    [row] = asked.rows[1:]
    moved = row[2].rpartition("/")[2]
    stays = second if moved == first else first
    assert f"asked for {live.namespace}/{moved} to make room for {live.namespace}/whole" in asked.err

    [pod] = await live.pods("whole")
    assert pod["spec"]["nodeName"] == homes[moved]
    again = await live.until_phase(moved, "Running")
    assert [p["spec"]["nodeName"] for p in await live.pods(moved) if p["status"]["phase"] == "Running"] == [
        homes[stays]
    ]
    assert (again["status"]["attempt"], again["status"]["failures"]) == (2, 0)
    told = await live.until_event(moved, "Moved")
    assert told.startswith(f"Moves to make room for {live.namespace}/whole of queue {live.name}, as ")
    assert f"its room is kept on {homes[stays]}" in told
    assert again["metadata"]["annotations"]["queuectl.dev/move-asked-by"] in told
    attempts = {job["metadata"]["name"]: job["status"]["attempt"] for job in await live.jobs()}
    assert attempts == {"whole": 1, moved: 2, stays: 1}
    assert await ledger.audit(live) == []

    await cli("defrag", "-n", live.namespace, "whole", "--apply", *database)  # which does nothing, for it runs
    assert {job["metadata"]["name"]: job["status"]["attempt"] for job in await live.jobs()} == attempts


async def test_what_does_not_hold_any_more_is_refused_and_nobody_moves(live: Stage) -> None:
    _, first, second = await fragmented(live)
    uids = {job: (await live.until_phase(job, "Running"))["metadata"]["uid"] for job in (first, second)}
    whole = await live.until_phase("whole", "Pending")
    request = MoveRequest(
        uid=whole["metadata"]["uid"],
        job=f"{live.namespace}/whole",
        moves=tuple(sorted({uids[first]: 1, uids[second]: 2}.items())),
        within=3600,
        until=round(time.time() + 60, 3),
    )
    asked = Asked(live.client, request, {f"{live.namespace}/{job}": uid for job, uid in uids.items()})
    assert await asked.ask() == Exit.DONE
    assert await asked.wait(60) == Exit.REFUSED
    told = await live.until_event("whole", "MovesRefused")
    assert "not all who are to move still run as they did" in told
    for job in (first, second):
        assert (await live.until_phase(job, "Running"))["status"]["attempt"] == 1
    forged = await live.patch_job(first, {"metadata": {"annotations": {MOVE_BY: "mallory"}}})
    assert forged["metadata"]["annotations"][MOVE_BY] in told
    gone = Asked(live.client, request, {f"{live.namespace}/nobody": "none"})
    assert await gone.ask() == Exit.NOT_FOUND
