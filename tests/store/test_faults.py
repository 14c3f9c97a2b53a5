"""Failures that are not charged, and what GPUs reported, in the ledger on both drivers."""

import pytest

from queuectl.model.failures import Ignored
from queuectl.model.faults import Reading
from queuectl.model.lifecycle import AttemptState, End, Move, Outcome
from queuectl.model.reasons import Reason, why
from queuectl.store.engine import Fenced
from tests.store.scene import UP, Scene, admission

BLAMED = Ignored(2, 1200, (("n1", 100.5), ("n2", 200.25)))
CAUSE = why(Reason.NODE_BLAMED, pod="p", how="exit code 80", rule="r", node="n2", times=2, limit=20)


async def end(scene: Scene, number: int, one: End) -> None:
    await scene.admit(admission("w1", n1=6))
    await scene.move("w1", *UP)
    moves = [Move("w1", number, AttemptState.ENDING, one), Move("w1", number, AttemptState.ENDED)]
    assert await scene.ledger.advance(scene.epoch, moves, now=2000.0) == moves


async def test_failures_that_are_not_charged_are_remembered_until_there_is_more_to_know(scene: Scene) -> None:
    await scene.submit("w1")
    await scene.nodes(n1=8)
    await scene.quota()
    assert (await scene.workload("w1")).ignored == Ignored()
    await end(scene, 1, End(CAUSE, Outcome.REQUEUE, ignored=BLAMED))
    known = await scene.workload("w1")
    assert (known.ignored, known.failures) == (BLAMED, 0)
    assert known.last_end == End(CAUSE, Outcome.REQUEUE, ignored=BLAMED)
    await end(scene, 2, End(why(Reason.NODE_LOST, node="n1"), Outcome.REQUEUE))
    assert (await scene.workload("w1")).ignored == BLAMED
    more = Ignored(3, 1200)
    await end(scene, 3, End(CAUSE, Outcome.REQUEUE, ignored=more))
    assert (await scene.workload("w1")).ignored == more


async def test_what_was_read_of_gpus_is_there_for_the_next_leader(scene: Scene) -> None:
    assert (await scene.ledger.load()).readings == {}
    one = Reading({"GPU-3 DCGM_FI_DEV_XID_ERRORS 79": 1}, {("3", 79): 100.5, ("4", 48): 200.25})
    await scene.ledger.keep_readings(scene.epoch, {"n1": one, "n2": Reading()})
    assert (await scene.ledger.load()).readings == {"n1": one, "n2": Reading()}
    other = Reading({"GPU-3 DCGM_FI_DEV_XID_ERRORS 31": 1})
    await scene.ledger.keep_readings(scene.epoch, {"n1": other, "n2": None, "n3": None})
    assert (await scene.ledger.load()).readings == {"n1": other}
    with pytest.raises(Fenced):
        await scene.ledger.keep_readings(scene.epoch - 1, {"n1": one})
