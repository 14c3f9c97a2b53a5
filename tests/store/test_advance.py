"""The arrows of an attempt's life, on both drivers."""

from itertools import pairwise

import pytest

from queuectl.core.elastic import finished
from queuectl.model.lifecycle import (
    STEP_OF,
    UNDER_WAY,
    Attempt,
    AttemptState,
    Done,
    End,
    Move,
    Outcome,
    Step,
    WorkloadState,
)
from queuectl.model.reasons import Reason, why
from queuectl.store import tables
from tests.store.scene import DELETED, GPU, REQUEUE, SUCCEEDED, UP, Scene, admission, workload

LIFE = (AttemptState.RESERVED, *UP, AttemptState.ENDING, AttemptState.ENDED)
LEGAL = {*pairwise(LIFE), *((state, AttemptState.ENDING) for state in LIFE[:3])}


@pytest.fixture
async def admitted(scene: Scene) -> Scene:
    await scene.submit("w1", "w2")
    await scene.nodes(n1=8)
    await scene.quota()
    await scene.admit(admission("w1", n1=6))
    return scene


async def test_a_whole_life(admitted: Scene) -> None:
    for before, after in pairwise(LIFE):
        assert await admitted.steps() == ({"w1": STEP_OF[before]} if before in STEP_OF else {})
        assert len(await admitted.move("w1", after, end=SUCCEEDED)) == 1
        assert await admitted.ledger.audit() == []

    loaded = await admitted.ledger.load(["w1"])
    assert loaded.attempts == []
    assert await admitted.steps() == {}
    (w1,) = [w for w in loaded.workloads if w.uid == "w1"]
    assert (w1.state, w1.attempt, w1.last_end, w1.finished_at) == (WorkloadState.FINISHED, 1, SUCCEEDED, 2000.0)
    assert (await admitted.room(tables.node_room))["n1", GPU] == (8, 0, 0)
    assert (await admitted.room(tables.quota_room))["q", "a100", GPU] == (1000, 0, 0)
    kinds = [e["kind"] for e in await admitted.ledger.history("w1")]
    assert kinds == ["Admitted", "Created", "Ungated", "Running", "Succeeded", "Finished"]
    held = await admitted.rows("SELECT node, pods, freed_at IS NOT NULL FROM reservation")
    assert held == [("n1", 1, True)]


@pytest.mark.parametrize("start", LIFE, ids=str)
async def test_only_legal_arrows_take_effect_and_repeats_are_harmless(admitted: Scene, start: AttemptState) -> None:
    await admitted.move("w1", *LIFE[1 : LIFE.index(start) + 1])
    for to in LIFE:
        if (start, to) not in LEGAL:
            assert await admitted.move("w1", to) == []
    assert await admitted.ledger.audit() == []
    for to in LIFE:
        if (start, to) in LEGAL:
            assert len(await admitted.move("w1", to)) == 1
            assert await admitted.move("w1", to) == []
            break
    assert await admitted.ledger.audit() == []


async def test_moves_that_name_no_current_attempt_are_left_out(admitted: Scene) -> None:
    good = Move("w1", 1, AttemptState.CREATED)
    moves = [
        Move("w1", 2, AttemptState.CREATED),
        Move("w1", 0, AttemptState.CREATED),
        Move("w2", 1, AttemptState.CREATED),
        Move("unknown", 1, AttemptState.CREATED),
        Move("w1", 1, AttemptState.ENDING),  # without an end
        Move("w1", 1, AttemptState.CREATED, DELETED),  # an end where none belongs
        good,
        good,
    ]
    assert await admitted.ledger.advance(admitted.epoch, moves, now=1.0) == [good]
    assert await admitted.ledger.advance(admitted.epoch, [], now=1.0) == []


async def test_several_arrows_of_one_attempt_in_one_transaction(admitted: Scene) -> None:
    moves = [Move("w1", 1, state) for state in UP]
    assert await admitted.ledger.advance(admitted.epoch, moves, now=5.5) == moves
    assert (await admitted.attempt("w1")).running_at == 5.5
    stamps = await admitted.rows("SELECT created_at = ungated_at, ungated_at = running_at FROM attempt")
    assert stamps == [(True, True)]


async def test_a_requeued_workload_counts_backs_off_and_starts_again(admitted: Scene) -> None:
    await admitted.move("w1", AttemptState.ENDING)
    attempt = await admitted.attempt("w1")
    assert (attempt.state, attempt.end) == (AttemptState.ENDING, REQUEUE)
    await admitted.move("w1", AttemptState.ENDED)

    w1 = await admitted.workload("w1")
    assert (w1.state, w1.not_before, w1.failures, w1.late_starts, w1.last_end) == (
        WorkloadState.QUEUED,
        500.25,
        1,
        1,
        REQUEUE,
    )
    assert [e["kind"] for e in await admitted.ledger.history("w1")][-2:] == ["PodsReadyTimeout", "Requeued"]

    (again,) = (await admitted.admit(admission("w1", n1=8))).admitted
    assert again.number == 2
    await admitted.move("w1", *UP, attempt=2)
    assert (await admitted.workload("w1")).late_starts == 0
    assert (await admitted.workload("w1")).failures == 1
    assert await admitted.move("w1", AttemptState.ENDING, attempt=1) == []
    assert await admitted.ledger.audit() == []


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED, Outcome.DELETED])
async def test_every_other_outcome_finishes_the_workload(admitted: Scene, outcome: Outcome) -> None:
    end = End(why(Reason.POD_FAILED, pod="p", code=3), outcome, not_before=99.0, exit_code=3)
    await admitted.move("w1", AttemptState.ENDING, AttemptState.ENDED, end=end)
    w1 = await admitted.workload("w1")
    assert (w1.state, w1.not_before, w1.last_end) == (WorkloadState.FINISHED, 0.0, end)
    assert (await admitted.cycle(submissions=[workload("w1")], admissions=[admission("w1", n1=1)])).refused == ["w1"]


async def test_what_an_ended_attempt_frees_repairs_the_deficit(admitted: Scene) -> None:
    await admitted.admit(admission("w2", n1=2))
    await admitted.nodes(n1=1)
    assert (await admitted.room(tables.node_room))["n1", GPU] == (1, 8, 7)
    await admitted.move("w1", AttemptState.ENDING, AttemptState.ENDED)
    assert (await admitted.room(tables.node_room))["n1", GPU] == (1, 2, 1)
    await admitted.move("w2", AttemptState.ENDING, AttemptState.ENDED)
    assert (await admitted.room(tables.node_room))["n1", GPU] == (1, 0, 0)


async def test_many_gangs_end_together(scene: Scene) -> None:
    uids = [f"w{i}" for i in range(20)]
    await scene.submit(*uids)
    await scene.nodes(n1=100, n2=100)
    await scene.quota()
    await scene.admit(*(admission(uid, n1=2, n2=3) for uid in uids))
    moves = [Move(uid, 1, AttemptState.ENDING, SUCCEEDED) for uid in uids]
    moves += [Move(uid, 1, AttemptState.ENDED) for uid in uids[:15]]
    assert await scene.ledger.advance(scene.epoch, moves, now=9.0) == moves
    assert (await scene.room(tables.node_room))["n2", GPU] == (100, 15, 0)
    assert await scene.ledger.audit() == []


def part(attempt: Attempt, *indexes: int) -> Done:
    return finished(attempt, [("worker", index) for index in indexes])


async def test_what_pods_held_that_are_done_is_free_while_the_others_run_on(scene: Scene) -> None:
    await scene.submit("w1", "w2")
    await scene.nodes(n1=8, n2=8, n3=8)
    await scene.quota(nominal=24)
    [gang] = (await scene.admit(admission("w1", n1=8, n2=8, n3=8))).admitted
    await scene.move("w1", *UP)
    assert (await scene.admit(admission("w2", n1=8))).refused == ["w2"]

    move = Move("w1", 1, AttemptState.RUNNING, done=part(gang, 0, 2))
    assert await scene.ledger.advance(scene.epoch, [move, move], now=3000.0) == [move]
    assert await scene.ledger.advance(scene.epoch, [move], now=3001.0) == []
    left = await scene.attempt("w1")
    assert ([p.node for p in left.placements], left.quota) == (["n2"], {("a100", GPU): 8})
    assert left.done == {("worker", 0), ("worker", 2)}
    assert (await scene.room(tables.quota_room))["q", "a100", GPU] == (24, 8, 0)
    assert [a.uid for a in (await scene.admit(admission("w2", n1=8, n3=8))).admitted] == ["w2"]

    last = Move("w1", 1, AttemptState.RUNNING, done=finished(left, [("worker", 1)]))
    assert await scene.ledger.advance(scene.epoch, [last], now=3002.0) == [], "with the last one, the attempt ends"
    event = (await scene.ledger.history("w1"))[-1]
    assert (event["kind"], event["at"], event["facts"]["freed"]) == ("PartlyDone", 3000.0, [["a100", GPU, 16]])
    assert event["message"] == "1 of 3 pods run on; 2 are done, and what they held is given back."
    await scene.move("w1", AttemptState.ENDING, AttemptState.ENDED, end=SUCCEEDED)
    kept = await scene.rows("SELECT node, pods FROM reservation WHERE workload_uid = 'w1' ORDER BY node")
    assert kept == [("n1", 1), ("n2", 1), ("n3", 1)], "where it ran stays on record"
    assert (await scene.room(tables.node_room))["n1", GPU] == (8, 8, 0)
    assert await scene.ledger.audit() == []


@pytest.mark.parametrize("state", [s for s in LIFE if s not in UNDER_WAY], ids=str)
async def test_no_pod_is_done_before_all_are_ungated_or_while_they_are_removed(
    scene: Scene, state: AttemptState
) -> None:
    await scene.submit("w1")
    await scene.nodes(n1=8, n2=8)
    await scene.quota()
    [gang] = (await scene.admit(admission("w1", n1=8, n2=8))).admitted
    await scene.move("w1", *LIFE[1 : LIFE.index(state) + 1])
    assert await scene.ledger.advance(scene.epoch, [Move("w1", 1, state, done=part(gang, 0))], now=9.0) == []
    assert await scene.ledger.audit() == []


async def test_gangs_whose_pods_are_done_together_are_one_transaction(scene: Scene) -> None:
    uids = [f"w{i}" for i in range(20)]
    await scene.submit(*uids)
    await scene.nodes(n1=100, n2=100)
    await scene.quota()
    gangs = (await scene.admit(*(admission(uid, n1=2, n2=3) for uid in uids))).admitted
    for state in UP:
        await scene.ledger.advance(scene.epoch, [Move(uid, 1, state) for uid in uids], now=5.0)
    moves = [Move(gang.uid, 1, AttemptState.RUNNING, done=part(gang, 0)) for gang in gangs]
    assert await scene.ledger.advance(scene.epoch, moves, now=9.0) == moves
    told = await scene.rows("SELECT count(*), count(DISTINCT xmin::text) FROM event WHERE kind = 'PartlyDone'")
    assert told == [(20, 1)]
    assert (await scene.room(tables.node_room))["n1", GPU] == (100, 0, 0)
    assert (await scene.room(tables.node_room))["n2", GPU] == (100, 60, 0)


async def test_retire_ends_only_what_waits(admitted: Scene) -> None:
    ends = {"w1": DELETED, "w2": DELETED, "unknown": DELETED}
    assert await admitted.ledger.retire(admitted.epoch, ends, now=3.0) == ["w2"]
    assert await admitted.ledger.retire(admitted.epoch, ends, now=4.0) == []
    w2 = await admitted.workload("w2")
    assert (w2.state, w2.finished_at, w2.last_end) == (WorkloadState.FINISHED, 3.0, DELETED)
    assert (await admitted.workload("w1")).state is WorkloadState.ACTIVE
    assert [e["kind"] for e in await admitted.ledger.history("w2")] == ["Deleted"]


async def test_load_returns_finished_workloads_only_when_asked(admitted: Scene) -> None:
    await admitted.ledger.retire(admitted.epoch, {"w2": DELETED}, now=3.0)
    assert {w.uid for w in (await admitted.ledger.load()).workloads} == {"w1"}
    loaded = await admitted.ledger.load(["w2", "unknown"])
    assert {w.uid for w in loaded.workloads} == {"w1", "w2"}
    assert loaded.max_seq == 2


async def test_audit_names_what_is_wrong(admitted: Scene) -> None:
    await admitted.rows("UPDATE node_room SET reserved = 5 WHERE resource = 'nvidia.com/gpu'")
    await admitted.rows("UPDATE quota_room SET reserved = 0")
    await admitted.rows("UPDATE quota_room SET promised = 4")
    await admitted.rows("UPDATE reservation SET freed_at = now()")
    await admitted.rows("UPDATE step SET done_at = now()")
    await admitted.rows("UPDATE workload SET state = 'Queued', attempt = 3 WHERE uid = 'w1'")
    await admitted.rows("INSERT INTO node_room (node, resource, room, reserved, deficit) VALUES ('n2', 'cpu', 1, 0, 1)")
    assert sorted(await admitted.ledger.audit()) == [
        "Attempt 1 of workload w1 is Reserved and holds no reservation.",
        "Attempt 1 of workload w1 is Reserved and its open step is none.",
        "Node n1: 1 of pods is promised, attempts are promised 0.",
        "Node n1: 1 of pods is reserved, attempts hold 0.",
        "Node n1: 5 of nvidia.com/gpu is reserved, attempts hold 0.",
        "Node n1: 6 of nvidia.com/gpu is promised, attempts are promised 0.",
        "Node n2, cpu: reserved 0, promised 0, room 1, deficit 1.",
        "Queue q: 0 of nvidia.com/gpu in flavor a100 is reserved, attempts hold 6.",
        "Queue q: 4 of nvidia.com/gpu in flavor a100 is promised, attempts are promised 6.",
        "Workload w1 counts 3 attempts, the last one known is 1.",
        "Workload w1 is Queued and has 1 active attempts.",
    ]


async def test_the_step_of_an_ended_life_is_closed(admitted: Scene) -> None:
    await admitted.move("w1", AttemptState.ENDING)
    assert await admitted.steps() == {"w1": Step.REMOVE}
    steps = await admitted.rows("SELECT step, done_at IS NULL FROM step ORDER BY id")
    assert steps == [("Create", False), ("Remove", True)]


async def test_that_an_attempt_ended_for_another_cause_than_was_thought_counts(admitted: Scene) -> None:
    charged = End(why(Reason.POD_FAILED, pod="w1-worker-0", code=1), Outcome.FAILED, charged=True)
    lost = End(why(Reason.NODE_LOST, node="n1"), Outcome.REQUEUE)
    await admitted.move("w1", *UP, AttemptState.ENDING, end=charged)
    await admitted.ledger.advance(admitted.epoch, [Move("w1", 1, AttemptState.ENDED, lost)], now=2000.0)
    w1 = await admitted.workload("w1")
    assert (w1.state, w1.failures, w1.last_end) == (WorkloadState.QUEUED, 0, lost)
    assert [e["kind"] for e in await admitted.ledger.history("w1")][-2:] == ["PodFailed", "Requeued"]
    assert await admitted.ledger.audit() == []
