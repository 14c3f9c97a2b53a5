"""What nodes have done, on record; and pods that are there yet when their attempt has ended."""

import pytest

from queuectl.model.lifecycle import AttemptState, Move
from queuectl.model.reasons import Reason, why
from queuectl.model.suspects import Offence
from queuectl.store import tables
from queuectl.store.engine import Fenced
from tests.store.scene import GPU, UP, Scene, admission

GONE = Offence("n1", 1000.5, why(Reason.NODE_LOST, node="n1"), "w1", 2)
FAULTY = Offence("n2", 1001.5, why(Reason.NODE_FAULTY, node="n2", problem="XID 79"))


async def test_offences_are_there_for_the_next_controller_each_once(scene: Scene) -> None:
    await scene.ledger.offend(scene.epoch, [FAULTY, GONE])
    await scene.ledger.offend(scene.epoch, [GONE])  # as after a COMMIT whose answer was lost
    assert (await scene.ledger.load()).offences == [GONE, FAULTY]
    assert (await scene.ledger.load(now=1001.0 + 30 * 86400)).offences == [FAULTY]  # the other is of no matter any more


async def test_what_is_forgiven_stays_on_record_and_counts_no_more(scene: Scene) -> None:
    later = Offence("n1", 2000.0, GONE.why, "w1", 3)
    await scene.ledger.offend(scene.epoch, [GONE, FAULTY, later])
    await scene.ledger.offend(scene.epoch, [], {"n1": 1500.0, "other": 1500.0})
    assert (await scene.ledger.load()).offences == [FAULTY, later]
    assert await scene.rows("SELECT node FROM offence WHERE forgiven_at IS NOT NULL") == [("n1",)]


async def test_who_does_not_lead_writes_nothing(scene: Scene) -> None:
    with pytest.raises(Fenced):
        await scene.ledger.offend(scene.epoch - 1, [GONE])
    assert (await scene.ledger.load()).offences == []


async def test_what_a_stuck_pod_holds_is_nobodys_in_the_moment_in_which_its_attempt_ends(scene: Scene) -> None:
    await scene.submit("w1", "w2", "w3")
    await scene.nodes(n1=8, n2=8)
    await scene.quota()
    await scene.admit(admission("w1", n1=4, n2=8))
    await scene.move("w1", *UP, AttemptState.ENDING)

    ended = Move("w1", 1, AttemptState.ENDED, left=(("n1", ((GPU, 4), ("pods", 1))),))
    assert await scene.ledger.advance(scene.epoch, [ended], now=2000.0) == [ended]
    assert await scene.ledger.advance(scene.epoch, [ended], now=2000.0) == []

    # Nobody has looked at the nodes since, and yet the ledger gives away what is free only.
    rooms = await scene.room(tables.node_room)
    assert (rooms["n1", GPU], rooms["n2", GPU]) == ((4, 0, 0), (8, 0, 0))
    assert rooms["n1", "pods"] == (109, 0, 0)
    assert (await scene.room(tables.quota_room))["q", "a100", GPU] == (1000, 0, 0)  # its queue may use it elsewhere
    assert (await scene.admit(admission("w2", n1=5))).refused == ["w2"]
    assert (await scene.admit(admission("w3", n1=4, n2=8))).refused == []
    await scene.cycle(nodes={"n1": {GPU: 4, "pods": 109}})  # as it is then seen
    assert (await scene.room(tables.node_room))["n1", GPU] == (4, 4, 0)
    assert await scene.ledger.audit() == []
