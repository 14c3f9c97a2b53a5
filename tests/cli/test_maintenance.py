"""queuectl maintenance: what it refuses, before and at the API server. What it does is in tests/e2e/test_maintenance.py."""

from pathlib import Path

import pytest

from queuectl.cli.errors import Exit
from tests.support.commands import Commands
from tests.support.eventually import eventually
from tests.support.stage import Stage


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "name the nodes, or give --selector"),
        (("a", "-l", "rack=b"), "one of the two"),
        (("-l", "rack"), '"rack" is not key=value; write rack=b2'),
        (("a", "--window", "tonight"), '"tonight" is not a window; write times as 2026-12-24T22:00:00Z'),
        (("a", "--window", "2026-12-24T22:00:00/"), "is not a window"),
        (("a", "--window", "/"), "is not a window"),
        (("a", "--test-command", "true"), "--test-command needs --test-image"),
    ],
)
async def test_what_cannot_be_meant_is_refused(words: tuple[str, ...], told: str) -> None:
    result = await Commands(Path("/nowhere"))("maintenance", "start", *words, code=Exit.USAGE)
    assert told in result.err


async def test_what_is_not_there_is_told(live: Stage, cli: Commands) -> None:
    [node] = await live.nodes(1)
    assert f"did you mean {node}?" in (await cli("maintenance", "start", f"{node}0", code=Exit.NOT_FOUND)).err
    refused = await cli("maintenance", "start", node, "--max-unavailable", "none", code=Exit.REFUSED)
    assert "none is not a number of nodes; write 1 or more, or a part of them such as 25%" in refused.err
    gone = await cli("maintenance", "start", "-l", "rack=none", code=Exit.NOT_FOUND)
    assert "no node has the labels rack=none" in gone.err
    assert "under no maintenance" in (await cli("maintenance", "done", node, code=Exit.REFUSED)).err
    for verb in ("status", "cancel"):
        assert 'no maintenance "none"' in (await cli("maintenance", verb, "none", code=Exit.NOT_FOUND)).err


async def test_a_node_that_is_safe_is_shown_with_what_to_say_once_the_work_is_done(live: Stage, cli: Commands) -> None:
    [node] = await live.nodes(1)
    await cli("maintenance", "start", node, "--name", live.name)

    async def safe() -> bool:
        return f"queuectl maintenance done {node}\n" in (await cli("maintenance", "status", live.name)).err

    await eventually(safe, "the node is safe")
    assert (await cli("nodes", node)).rows[1][-1] == f"{live.name}:Safe"
    typo = await cli("maintenance", "cancel", live.name[:-1], code=Exit.NOT_FOUND)
    assert "did you mean " in typo.err
    await cli("maintenance", "done", node)


async def test_a_name_that_is_taken_is_told(live: Stage, cli: Commands) -> None:
    [node] = await live.nodes(1)
    await cli("maintenance", "start", node, "--name", "fans")
    refused = await cli("maintenance", "start", node, "--name", "fans", code=Exit.REFUSED)
    assert "exists already; choose another --name, or: queuectl maintenance status fans" in refused.err
