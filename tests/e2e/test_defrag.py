"""``queuectl defrag`` on a real control plane: what it reads there, and what it proposes."""

import json

import pytest

from queuectl.cli.errors import Exit
from queuectl.local.controlplane import Running
from tests.support.commands import Commands
from tests.support.stage import Stage


@pytest.fixture
def cli(control_plane: Running) -> Commands:
    return Commands(control_plane.kubeconfig)


async def test_it_proposes_the_move_that_makes_a_node_whole_and_changes_nothing(live: Stage, cli: Commands) -> None:
    nodes = await live.nodes(2)
    await live.queue(16)
    for job in ("a", "b", "c", "d"):
        await live.submit(job, 1, 4)
        await live.until_phase(job, "Running")
    homes = {job: (await live.pods(job))[0]["spec"]["nodeName"] for job in "abcd"}
    first, second = next((one, other) for one in "abcd" for other in "abcd" if homes[one] != homes[other])
    for job in {*"abcd"} - {first, second}:
        await live.delete_job(job)
        await live.until_gone(job)
    await live.submit("whole", 1, 8)
    await live.until_reason("whole", "WaitingForNodes")

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
    assert {homes[first], homes[second]} == set(nodes)

    nothing = await cli("defrag", "--within", "1s", *database)
    assert "no move would let a waiting job start" in nothing.err
    await cli("defrag", "--within", "soon", *database, code=Exit.USAGE)
    for job in (first, second):
        assert (await live.until_phase(job, "Running"))["status"]["attempt"] == 1
