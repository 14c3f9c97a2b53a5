"""Checkpoints and interruptions in the ledger, on both drivers."""

from dataclasses import replace

import pytest

from queuectl.model.checkpoint import Ask, Checkpoint, Interruption
from queuectl.model.lifecycle import AttemptState, End, Move, Outcome, Shrink, Step
from queuectl.model.plan import Placement, Portion
from queuectl.model.reasons import Reason, why
from queuectl.model.resources import CARD
from queuectl.model.work import Work
from queuectl.store import tables
from queuectl.store.engine import Fenced
from tests.store.scene import GPU, SUCCEEDED, UP, Scene, admission

END = End(why(Reason.QUEUE_DRAINED, queue="q"), Outcome.REQUEUE, ask=Ask(1999.0625, 2059.0625, 2))
ANSWERED = replace(END, ask=Ask(1999.0625, 2010.0, 2, 2))
LOST = Interruption(2010.5, "QueueDrained", 2009.25, 1200, Work(6), answered=True)


@pytest.fixture
async def running(scene: Scene) -> Scene:
    await scene.submit("w1")
    await scene.nodes(n1=8)
    await scene.quota()
    await scene.admit(admission("w1", n1=6))
    await scene.move("w1", *UP)
    return scene


async def advance(scene: Scene, *moves: Move, now: float = 2000.0) -> list[Move]:
    return await scene.ledger.advance(scene.epoch, moves, now=now)


ASKED = Move("w1", 1, AttemptState.CHECKPOINTING, END)
GOES = Move("w1", 1, AttemptState.ENDING, ANSWERED)
ENDED = Move("w1", 1, AttemptState.ENDED, interruption=LOST)


async def test_a_gang_that_is_asked_holds_its_room_until_it_has_gone(running: Scene) -> None:
    assert await advance(running, ASKED) == [ASKED]
    assert await running.steps() == {"w1": Step.ASK}
    attempt = await running.attempt("w1")
    assert (attempt.state, attempt.end, attempt.ending_at) == (AttemptState.CHECKPOINTING, END, None)
    assert (await running.room(tables.node_room))["n1", "nvidia.com/gpu"] == (8, 6, 0)
    assert await running.ledger.audit() == []

    assert await advance(running, GOES, now=2010.5) == [GOES]
    attempt = await running.attempt("w1")
    assert (attempt.end, attempt.ending_at) == (ANSWERED, 2010.5)
    assert await running.steps() == {"w1": Step.REMOVE}
    assert await advance(running, ENDED) == [ENDED]
    assert (await running.room(tables.node_room))["n1", "nvidia.com/gpu"] == (8, 0, 0)
    assert await running.ledger.audit() == []
    kinds = [e["kind"] for e in await running.ledger.history("w1")]
    assert kinds[-3:] == ["QueueDrained", "Checkpointed", "Requeued"], "why it goes is told once"


async def test_it_may_succeed_meanwhile_and_is_asked_only_while_it_runs(running: Scene) -> None:
    assert await advance(running, replace(ASKED, end=None)) == []
    await advance(running, ASKED)
    for to in (AttemptState.RUNNING, AttemptState.SHRINKING, AttemptState.ENDED):
        assert await advance(running, Move("w1", 1, to)) == []
    assert len(await advance(running, Move("w1", 1, AttemptState.ENDING, SUCCEEDED))) == 1
    assert await advance(running, ASKED) == []
    await advance(running, Move("w1", 1, AttemptState.ENDED))
    assert (await running.workload("w1")).last_end == SUCCEEDED
    assert [e["kind"] for e in await running.ledger.history("w1")][-3:] == ["QueueDrained", "Succeeded", "Finished"]


async def test_what_an_interruption_cost_is_kept_once(running: Scene) -> None:
    await advance(running, ASKED, GOES)
    assert await advance(running, ENDED) == [ENDED]
    assert await advance(running, ENDED) == []
    columns = "workload_uid, attempt, cause, saved_step, gpu_seconds, pod_seconds, answered"
    assert await running.rows(f"SELECT {columns} FROM interruption") == [("w1", 1, "QueueDrained", 1200, 6, 0, True)]
    [(at, saved_at)] = await running.rows(
        "SELECT extract(epoch FROM at), extract(epoch FROM saved_at) FROM interruption"
    )
    assert (float(at), float(saved_at)) == (2010.5, 2009.25)
    assert (await running.workload("w1")).lost == 6

    await running.admit(admission("w1", n1=6))
    await running.move("w1", *UP, attempt=2)
    await advance(running, *(replace(move, attempt=2) for move in (ASKED, GOES, ENDED)))
    assert (await running.workload("w1")).lost == 12, "of all attempts"


async def test_the_last_checkpoint_is_kept_over_attempts(running: Scene) -> None:
    saved = Checkpoint(1999.5, 1200, "/c/step-1200\0", 1)
    await running.ledger.save(running.epoch, {"w1": saved, "gone": saved})
    await running.ledger.save(running.epoch, {})
    await advance(running, ASKED, GOES, ENDED)
    assert (await running.workload("w1")).saved == replace(saved, path="/c/step-1200")
    with pytest.raises(Fenced):
        await running.ledger.save(running.epoch - 1, {"w1": replace(saved, step=1)})


PART = Portion((Placement("worker", "a100", "n2", 1, ((GPU, 2), ("pods", 1)), 2 * CARD),), {("a100", GPU): 2})
SHRINKS = Move(
    "w1", 1, AttemptState.SHRINKING,
    shrink=Shrink(why(Reason.RUNNING, pods=1), PART, Ask(1999.0625, 2059.0625, 2)),
)  # fmt: skip
SAVED = Move("w1", 1, AttemptState.SHRINKING, asked=Ask(1999.0625, 2010.0, 2, 1))


@pytest.fixture
async def two(scene: Scene) -> Scene:
    await scene.submit("w1")
    await scene.nodes(n1=8, n2=8)
    await scene.quota()
    await scene.admit(admission("w1", n1=4, n2=2))
    await scene.move("w1", *UP)
    return scene


async def test_a_part_goes_once_what_came_of_asking_is_known(two: Scene) -> None:
    assert await advance(two, SAVED) == [], "nobody is asked"
    assert await advance(two, SHRINKS) == [SHRINKS]
    assert (await two.attempt("w1")).ask == Ask(1999.0625, 2059.0625, 2), "the next leader asks the same"
    assert await advance(two, SAVED) == [SAVED]
    assert await advance(two, SAVED) == [], "that is over"
    attempt = await two.attempt("w1")
    assert (attempt.state, attempt.ask, attempt.leaving) == (AttemptState.SHRINKING, None, PART)
    assert await two.steps() == {"w1": Step.SHRINK}
    assert (await two.room(tables.node_room))["n2", GPU] == (8, 2, 0)
    assert await two.ledger.audit() == []
    assert await advance(two, Move("w1", 1, AttemptState.RUNNING)) == [Move("w1", 1, AttemptState.RUNNING)]
    assert (await two.room(tables.node_room))["n2", GPU] == (8, 0, 0)
    assert await two.ledger.audit() == []
    kinds = [e["kind"] for e in await two.ledger.history("w1")]
    assert kinds[-3:] == ["Running", "CheckpointMissed", "Running"]


async def test_who_ends_while_it_is_asked_before_a_part_goes_is_asked_no_longer(two: Scene) -> None:
    await advance(two, SHRINKS)
    await advance(two, Move("w1", 1, AttemptState.ENDING, SUCCEEDED))
    assert (await two.attempt("w1")).ask is None
    assert await advance(two, SAVED) == []
    await advance(two, Move("w1", 1, AttemptState.ENDED))
    assert await two.ledger.audit() == []
