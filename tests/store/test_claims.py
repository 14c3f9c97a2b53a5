"""Preemption: room that is promised while victims are on their way out, on both drivers."""

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy.exc import IntegrityError

from queuectl.model.lifecycle import Attempt, AttemptState, End, Leave, Move, Outcome, Shrink, Step, WorkloadState
from queuectl.model.plan import Admission, Eviction, Placement, Portion, Preempt
from queuectl.model.policy import Cause, Quota
from queuectl.model.reasons import Reason, why
from queuectl.store import tables
from tests.store.scene import DELETED, GPU, PREEMPTED, REQUEUE, SUCCEEDED, UP, Scene, admission

Sums = tuple[int, int, int]  # reserved, promised, deficit
GONE = (AttemptState.ENDING, AttemptState.ENDED)


def preemption(
    uid: str, *victims: str, ends: Mapping[str, Leave] | None = None, **gpus: int
) -> tuple[Preempt, int, dict[str, Leave]]:
    causes = tuple(Eviction(victim, Cause.QUEUE) for victim in victims)
    given: dict[str, Leave] = dict.fromkeys(victims, PREEMPTED) if ends is None else dict(ends)
    return Preempt(admission(uid, **gpus)[0], causes), 7, given


async def claim(scene: Scene, uid: str, *victims: str, **gpus: int) -> Attempt:
    (attempt,) = (await scene.cycle(preemptions=[preemption(uid, *victims, ends=None, **gpus)])).claimed
    return attempt


async def sums(scene: Scene, node: str = "n1", resource: str = GPU) -> Sums:
    (row,) = await scene.rows(
        "SELECT reserved, promised, deficit FROM node_room WHERE node = :node AND resource = :resource",
        {"node": node, "resource": resource},
    )
    return row[0], row[1], row[2]


async def quota_sums(scene: Scene, queue: str = "q") -> Sums:
    (row,) = await scene.rows("SELECT reserved, promised, deficit FROM quota_room WHERE queue = :q", {"q": queue})
    return row[0], row[1], row[2]


async def becomes_reserved(scene: Scene, uid: str) -> bool:
    return bool(await scene.move(uid, AttemptState.RESERVED))


@pytest.fixture
async def full(scene: Scene) -> Scene:
    """Two nodes with 8 GPUs each, held by v1 and v2 (n1: 4 each) and v3 (n2: 6); p, p2 and small wait."""
    await scene.submit("v1", "v2", "v3", "p", "p2", "small")
    await scene.nodes(n1=8, n2=8)
    await scene.quota(nominal=16)
    await scene.admit(admission("v1", n1=4), admission("v2", n1=4), admission("v3", n2=6))
    return scene


async def test_the_room_is_promised_before_it_is_free(full: Scene) -> None:
    attempt = await claim(full, "p", "v1", "v2", n1=8)

    assert attempt == await full.attempt("p")
    assert (attempt.state, attempt.holds, attempt.victims) == (AttemptState.CLAIMED, False, (("v1", 1), ("v2", 1)))
    assert attempt.quota == {("a100", GPU): 8}
    assert (await full.workload("p")).state is WorkloadState.ACTIVE
    victim = await full.attempt("v1")
    assert (victim.state, victim.end, victim.claimed, victim.holds) == (AttemptState.ENDING, PREEMPTED, True, True)
    assert await full.steps() == {"v1": Step.REMOVE, "v2": Step.REMOVE, "v3": Step.CREATE}
    assert await sums(full) == (8, 8, 0)
    assert await quota_sums(full) == (14, 14, 0)
    assert [e["kind"] for e in await full.ledger.history("p")] == ["WaitingForVictims"]
    assert [e["kind"] for e in await full.ledger.history("v1")] == ["Admitted", PREEMPTED.why.code]
    assert await full.ledger.audit() == []


async def test_victims_that_end_at_different_times_and_a_restart_between(full: Scene) -> None:
    await claim(full, "p", "v1", "v2", n1=8)
    assert not await becomes_reserved(full, "p")

    await full.move("v1", AttemptState.ENDED)
    assert await sums(full) == (4, 8, 0)
    assert not await becomes_reserved(full, "p")
    # Half of the node is empty, and it is nobody's but the preemptor's, whoever asks and whoever leads.
    successor = await Scene.open(full.engine)
    assert (await successor.attempt("p")).victims == (("v2", 1),)
    result = await successor.cycle(admissions=[admission("small", n1=1)], preemptions=[preemption("p2", n1=1)])
    assert (result.refused, result.admitted, result.claimed) == (["p2", "small"], [], [])

    await successor.move("v2", AttemptState.ENDED)
    assert await sums(successor) == (0, 8, 0)
    assert (await successor.attempt("p")).victims == ()
    assert (await successor.cycle(admissions=[admission("small", n1=1)])).refused == ["small"]
    assert await becomes_reserved(successor, "p")
    assert await sums(successor) == (8, 8, 0)
    attempt = await successor.attempt("p")
    assert (attempt.state, attempt.holds, attempt.admitted_at) == (AttemptState.RESERVED, True, 2000.0)
    assert (await successor.steps())["p"] is Step.CREATE
    assert [e["kind"] for e in await successor.ledger.history("p")] == ["WaitingForVictims", "Admitted"]
    assert (await successor.workload("v1")).state is WorkloadState.QUEUED

    assert len(await successor.move("p", *UP, *GONE, end=SUCCEEDED)) == 5
    assert await sums(successor) == (0, 0, 0)
    assert await successor.ledger.audit() == []


async def test_what_the_choice_of_victims_looks_at_survives_a_restart(full: Scene) -> None:
    before = await full.workload("v1")
    assert (before.preemptions, before.first_admitted_at, before.requeued_at) == (0, 1000.0, None)
    by = {"job": "ns/job-p", "queue": "q", "priority": 1, "cause": "so", "lost": "nothing", "since": ""}
    await full.cycle(
        preemptions=[preemption("p", "v1", n1=4, ends={"v1": End(why(Reason.PREEMPTED, **by), Outcome.REQUEUE)})]
    )
    await full.move("v1", AttemptState.ENDED)
    await full.move("v3", *GONE)  # for another reason
    await full.cycle(admissions=[admission("v3", n2=6)], now=3000.0)

    successor = await Scene.open(full.engine)
    gave_way, came_back = await successor.workload("v1"), await successor.workload("v3")
    assert (gave_way.preemptions, gave_way.first_admitted_at, gave_way.requeued_at) == (1, 1000.0, 2000.0)
    assert (came_back.preemptions, came_back.first_admitted_at, came_back.requeued_at) == (0, 1000.0, 2000.0)


async def test_the_last_victims_end_and_the_start_in_one_transaction(full: Scene) -> None:
    await claim(full, "p", "v1", "v2", n1=8)
    start = Move("p", 1, AttemptState.RESERVED)
    moves = [start, Move("v1", 1, AttemptState.ENDED), Move("v2", 1, AttemptState.ENDED), start]
    assert await full.ledger.advance(full.epoch, moves, now=1.0) == moves[1:]
    assert await full.ledger.audit() == []


async def test_a_claimed_attempt_only_starts_or_ends(full: Scene) -> None:
    await claim(full, "p", "v1", n1=4)
    for to in (*UP, AttemptState.CLAIMED, AttemptState.ENDED):
        assert await full.move("p", to) == []
    assert await full.move("v3", AttemptState.CLAIMED) == []


async def test_a_preemptor_does_not_start_on_what_a_stuck_pod_of_its_victim_holds(full: Scene) -> None:
    """Also when all of it is one transaction, before anybody has looked at the node again."""
    await claim(full, "p", "v1", "v2", n1=8)
    stuck = Move("v1", 1, AttemptState.ENDED, left=(("n1", ((GPU, 4),)),))
    gone, starts = Move("v2", 1, AttemptState.ENDED), Move("p", 1, AttemptState.RESERVED)

    assert await full.ledger.advance(full.epoch, [stuck, gone, starts], now=2000.0) == [stuck, gone]
    assert await sums(full) == (0, 8, 4)  # promised, and 4 too many
    assert await full.ledger.audit() == []
    await full.cycle(nodes={"n1": {GPU: 8, "pods": 110}})  # the pod is gone
    assert await becomes_reserved(full, "p")
    assert await sums(full) == (8, 8, 0)


async def test_a_preemptor_that_goes_gives_its_promise_back(full: Scene) -> None:
    await claim(full, "p", "v1", "v2", n1=8)
    await full.move("v1", AttemptState.ENDED)
    await full.move("p", AttemptState.ENDING, end=DELETED)
    assert await sums(full) == (4, 8, 0)
    assert not await becomes_reserved(full, "p")
    await full.move("p", AttemptState.ENDED)

    assert await sums(full) == (4, 0, 0)
    assert (await full.workload("p")).state is WorkloadState.FINISHED
    assert (await full.attempt("v2")).state is AttemptState.ENDING
    assert await full.ledger.audit() == []
    # What is free is anybody's again; what the other victim still has may be promised to the next.
    assert (await full.cycle(admissions=[admission("small", n1=5)])).refused == ["small"]
    assert (await full.cycle(admissions=[admission("small", n1=4)])).refused == []
    assert (await full.cycle(preemptions=[preemption("p2", "v2", n1=5)])).refused == ["p2"]
    assert (await claim(full, "p2", "v2", n1=4)).victims == (("v2", 1),)
    await full.move("v2", AttemptState.ENDED)
    assert await becomes_reserved(full, "p2")
    assert await sums(full) == (8, 8, 0)
    assert await full.ledger.audit() == []


async def test_what_a_large_victim_leaves_over_is_free_once_it_is_gone(full: Scene) -> None:
    await claim(full, "p", "v3", n2=2)
    assert await sums(full, "n2") == (6, 2, 0)
    assert (await full.cycle(admissions=[admission("small", n2=3)])).refused == ["small"]
    await full.move("v3", AttemptState.ENDED)
    assert (await full.cycle(admissions=[admission("small", n2=7)])).refused == ["small"]
    assert (await full.cycle(admissions=[admission("small", n2=6)])).refused == []
    assert await becomes_reserved(full, "p")
    assert await sums(full, "n2") == (8, 8, 0)


async def test_idle_room_is_held_at_once(full: Scene) -> None:
    await claim(full, "p", "v1", n1=4, n2=2)
    assert await sums(full, "n2") == (6, 8, 0)
    assert (await full.cycle(admissions=[admission("small", n2=1)])).refused == ["small"]


async def test_preemptions_come_before_admissions_and_are_all_or_nothing(full: Scene) -> None:
    result = await full.cycle(
        admissions=[admission("small", n2=1)],
        preemptions=[preemption("p", "v1", n1=4, n2=3), preemption("p2", "v2", n1=4, n2=2)],
    )
    assert ([a.uid for a in result.admitted], [a.uid for a in result.claimed]) == ([], ["p2"])
    assert result.refused == ["p", "small"]
    assert (await full.attempt("v1")).state is AttemptState.RESERVED
    assert (await full.attempt("v1")).claimed is False
    assert await full.ledger.audit() == []


async def test_two_preemptors_share_no_victim(full: Scene) -> None:
    result = await full.cycle(preemptions=[preemption("p", "v1", n1=2), preemption("p2", "v1", n1=2)])
    assert ([a.uid for a in result.claimed], result.refused) == (["p"], ["p2"])
    assert (await full.cycle(preemptions=[preemption("p2", "v1", n1=2)])).refused == ["p2"]
    # Nor does one count a victim twice.
    assert (await full.cycle(preemptions=[preemption("p2", "v2", "v2", n1=6)])).refused == ["p2"]
    assert await full.ledger.audit() == []


async def test_who_is_no_victim(full: Scene) -> None:
    await claim(full, "p", "v1", n1=4)
    for victim in ("v1", "small", "p2", "unknown"):  # is another's, has nothing, is the preemptor, is nobody
        assert (await full.cycle(preemptions=[preemption("p2", victim, "v2", n1=1)])).refused == ["p2"]
    assert (await full.cycle(preemptions=[preemption("p2", "v2", ends={}, n1=1)])).refused == ["p2"]
    assert (await full.attempt("v2")).state is AttemptState.RESERVED


async def test_a_victim_that_is_ending_anyway_keeps_its_end(full: Scene) -> None:
    await full.move("v1", AttemptState.ENDING, end=SUCCEEDED)
    steps = await full.rows("SELECT * FROM step ORDER BY id")
    assert (await claim(full, "p", "v1", n1=4)).victims == (("v1", 1),)
    victim = await full.attempt("v1")
    assert (victim.end, victim.claimed) == (SUCCEEDED, True)
    assert await full.rows("SELECT * FROM step ORDER BY id") == steps
    await full.move("v1", AttemptState.ENDED)
    assert (await full.workload("v1")).state is WorkloadState.FINISHED
    assert await becomes_reserved(full, "p")
    assert await full.ledger.audit() == []


async def test_a_victim_starts_again_while_its_room_is_taken(full: Scene) -> None:
    await claim(full, "p", "v1", n1=4)
    await full.move("v1", AttemptState.ENDED)
    assert (await full.admit(admission("v1", n2=2))).refused == []
    assert await becomes_reserved(full, "p")
    assert (await full.attempt("v1")).number == 2
    assert (await full.attempt("v1")).claimed is False
    assert await full.ledger.audit() == []


async def test_a_node_that_shrinks_meanwhile_keeps_the_claim_waiting(full: Scene) -> None:
    await claim(full, "p", "v1", "v2", n1=6)
    await full.nodes(n1=5)
    assert await sums(full) == (8, 6, 3)
    await full.move("v1", AttemptState.ENDED)
    await full.move("v2", AttemptState.ENDED)
    assert await sums(full) == (0, 6, 1)
    assert not await becomes_reserved(full, "p")
    await full.nodes(n1=6)
    assert await becomes_reserved(full, "p")
    assert await sums(full) == (6, 6, 0)


async def test_a_shrunken_node_can_be_promised_once_enough_goes(full: Scene) -> None:
    await full.nodes(n1=4)
    assert (await full.cycle(preemptions=[preemption("p", "v1", n1=1)])).refused == ["p"]
    await claim(full, "p", "v1", "v2", n1=4)
    assert await sums(full) == (8, 4, 4)


async def test_rows_of_a_gone_node_stay_while_they_are_promised(full: Scene) -> None:
    await claim(full, "p", "v1", n1=4)
    await full.cycle(nodes_gone=["n1"])
    await full.move("v1", AttemptState.ENDED)
    await full.move("v2", *GONE)
    assert await sums(full) == (0, 4, 4)
    assert not await becomes_reserved(full, "p")
    await full.move("p", *GONE)
    assert ("n1", GPU) not in await full.room(tables.node_room)
    assert await full.ledger.audit() == []


async def test_a_plan_that_is_sent_again_says_the_same(full: Scene) -> None:
    plan_id = uuid4()
    arguments: dict[str, Any] = {
        "admissions": [admission("small", n2=1), admission("p2", n2=8)],
        "preemptions": [preemption("p", "v1", "v2", n1=8)],
    }
    first = await full.ledger.cycle(full.epoch, plan_id=plan_id, now=1000.0, **arguments)
    assert [a.uid for a in first.claimed] == ["p"]
    assert await full.ledger.cycle(full.epoch, plan_id=plan_id, now=1000.0, **arguments) == first
    assert await sums(full) == (8, 8, 0)


@pytest.fixture
async def cohort(scene: Scene) -> Scene:
    """Two queues of 4 GPUs each that may borrow from each other."""
    cell = ("a100", GPU)
    await scene.submit("a1", "a2", queue="a")
    await scene.submit("b1", "b2", queue="b")
    await scene.nodes(n1=100)
    await scene.cycle(
        quotas={"a": {cell: Quota(4)}, "b": {cell: Quota(4)}},
        limits={"a": {cell: 8}, "b": {cell: 6}, "team": {cell: 8}, "root": {cell: 8}},
    )
    return scene


ABOVE: dict[str, Any] = {"ancestors": {"a": ["team", "root"], "b": ["team", "root"]}}


async def test_a_cohort_can_not_be_over_booked(cohort: Scene) -> None:
    result = await cohort.admit(admission("a1", n1=6), admission("b1", n1=3), admission("b2", n1=2), **ABOVE)
    assert ([a.uid for a in result.admitted], result.refused) == (["a1", "b2"], ["b1"])
    for queue, used in {"a": 6, "b": 2, "team": 8, "root": 8}.items():
        assert await quota_sums(cohort, queue) == (used, used, 0)
    assert (await cohort.admit(admission("a2", n1=1), **ABOVE)).refused == ["a2"]
    with pytest.raises(IntegrityError):
        await cohort.rows("UPDATE quota_room SET promised = 9 WHERE queue = 'team'")
    assert await cohort.ledger.audit() == []
    # It gives back what it was charged, also when the tree is another one by then.
    await cohort.move("a1", *GONE)
    assert await quota_sums(cohort, "root") == (2, 2, 0)
    assert (await cohort.admit(admission("b1", n1=4), **ABOVE)).refused == []
    assert (await cohort.admit(admission("a2", n1=3), **ABOVE)).refused == ["a2"]
    assert await cohort.ledger.audit() == []


async def test_reclaiming_a_cohorts_quota(cohort: Scene) -> None:
    await cohort.admit(admission("a1", n1=4), admission("a2", n1=4), **ABOVE)
    (attempt,) = (await cohort.cycle(preemptions=[preemption("b1", "a2", n1=4)], **ABOVE)).claimed
    assert attempt.state is AttemptState.CLAIMED
    assert await quota_sums(cohort, "a") == (8, 4, 0)
    assert await quota_sums(cohort, "b") == (0, 4, 0)
    assert await quota_sums(cohort, "team") == (8, 8, 0)
    await cohort.move("a2", AttemptState.ENDED)
    assert (await cohort.admit(admission("a2", n1=1), **ABOVE)).refused == ["a2"]
    assert await becomes_reserved(cohort, "b1")
    assert await quota_sums(cohort, "root") == (8, 8, 0)
    assert await cohort.ledger.audit() == []


async def test_a_cohort_without_a_row_lends_nothing(cohort: Scene) -> None:
    assert (await cohort.admit(admission("a1", n1=1), ancestors={"a": ["unheard-of"]})).refused == ["a1"]


async def test_limits_are_no_quota_edits(cohort: Scene) -> None:
    cell = ("a100", GPU)
    await cohort.cycle(limits={"a": {cell: 5}, "team": {}})
    await cohort.cycle(quotas={"a": {cell: Quota(3)}}, changed_by={"a": "alice"})
    rooms = {key[0]: row[0] for key, row in (await cohort.room(tables.quota_room)).items()}
    assert rooms == {"a": 3, "b": 6, "root": 8}
    versions = "SELECT queue, from_nominal, to_nominal, changed_by FROM quota_version ORDER BY id"
    assert await cohort.rows(versions) == [("a", None, 4, ""), ("b", None, 4, ""), ("a", 4, 3, "alice")]


async def test_audit_names_a_claim_without_a_claimer(full: Scene) -> None:
    await claim(full, "p", "v1", n1=4)
    await full.move("v1", AttemptState.ENDED)
    await becomes_reserved(full, "p")
    await full.move("v2", AttemptState.ENDING)
    await full.rows(
        "UPDATE attempt SET promised = false, claimed_by_uid = 'p', claimed_by_attempt = 1 WHERE workload_uid = 'v2'"
    )
    assert (await full.ledger.audit())[
        -1
    ] == "Attempt 1 of workload v2 is claimed by attempt 1 of workload p, which does not wait."


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE node_room SET promised = room + 1",
        "UPDATE node_room SET promised = -1",
        "UPDATE attempt SET holds = true WHERE state = 'Claimed'",
        "UPDATE attempt SET holds = false WHERE state = 'Reserved'",
        "UPDATE attempt SET promised = false WHERE state = 'Reserved'",
        "UPDATE attempt SET promised = true WHERE claimed_by_uid IS NOT NULL",
        "UPDATE attempt SET claimed_by_uid = 'nobody' WHERE claimed_by_uid IS NOT NULL",
        "UPDATE attempt SET claimed_by_attempt = NULL WHERE claimed_by_uid IS NOT NULL",
    ],
)
async def test_postgres_itself_refuses(full: Scene, statement: str) -> None:
    await claim(full, "p", "v1", n1=4)
    with pytest.raises(IntegrityError):
        await full.rows(statement)


async def test_the_same_reservation_move_again_is_harmless(full: Scene) -> None:
    await claim(full, "p", "v1", n1=4)
    await full.move("v1", AttemptState.ENDED)
    assert await becomes_reserved(full, "p")
    assert not await becomes_reserved(full, "p")
    assert await full.move("p", *GONE, end=REQUEUE) != []
    assert await full.ledger.audit() == []


def eight(uid: str, *nodes: str) -> tuple[Admission, int]:
    """Ask for pods with one GPU each, four on each node."""
    places = tuple(Placement("worker", "a100", node, 4, ((GPU, 1), ("pods", 1))) for node in nodes)
    return Admission(uid, places, {("a100", GPU): 4 * len(nodes)}), 7


def giving_up(pods: int, node: str = "n2") -> Shrink:
    part = Portion((Placement("worker", "a100", node, pods, ((GPU, 1), ("pods", 1))),), {("a100", GPU): pods})
    facts = {"job": "ns/p", "queue": "q", "priority": 1, "cause": "it is", "gone": pods, "before": 8, "after": 8 - pods}
    return Shrink(why(Reason.SHRUNK, **facts), part)


@pytest.fixture
async def elastic(scene: Scene) -> Scene:
    """An elastic gang of 8 pods fills two nodes of 4 GPUs; p, p2 and small wait."""
    await scene.submit("e", "p", "p2", "small")
    await scene.nodes(n1=4, n2=4)
    await scene.quota(nominal=8)
    await scene.admit(eight("e", "n1", "n2"))
    assert len(await scene.move("e", *UP)) == 3
    return scene


async def test_only_a_part_of_a_gang_leaves(elastic: Scene) -> None:
    shrink = giving_up(4)
    (preemptor,) = (await elastic.cycle(preemptions=[preemption("p", "e", ends={"e": shrink}, n2=4)])).claimed
    assert preemptor.victims == (("e", 1),)
    victim = await elastic.attempt("e")
    assert (victim.state, victim.end, victim.claimed, victim.holds) == (AttemptState.SHRINKING, None, False, True)
    assert [(p.node, p.pods) for p in victim.placements] == [("n1", 4)]
    assert victim.quota == {("a100", GPU): 4}
    assert victim.leaving == shrink.part
    assert (str(victim.shrunk), victim.running_at) == (str(shrink.why), 2000.0)
    assert await elastic.steps() == {"e": Step.SHRINK}
    # The part is there and promised to another; what stays is the gang's own.
    assert await sums(elastic, "n1") == (4, 4, 0)
    assert await sums(elastic, "n2") == (4, 4, 0)
    assert await quota_sums(elastic) == (8, 8, 0)
    assert not await becomes_reserved(elastic, "p")
    assert await elastic.ledger.audit() == []

    successor = await Scene.open(elastic.engine)
    assert await successor.move("e", AttemptState.RUNNING) == [Move("e", 1, AttemptState.RUNNING)]
    assert await sums(successor, "n2") == (0, 4, 0)
    assert await quota_sums(successor) == (4, 8, 0)
    victim = await successor.attempt("e")
    assert (victim.state, victim.leaving, victim.quota) == (AttemptState.RUNNING, None, {("a100", GPU): 4})
    assert victim.running_at == 2000.0
    assert (await successor.attempt("p")).victims == ()
    assert (await successor.cycle(admissions=[admission("small", n2=1)])).refused == ["small"]
    assert await becomes_reserved(successor, "p")
    assert await sums(successor, "n2") == (4, 4, 0)
    assert await successor.ledger.audit() == []
    kinds = [e["kind"] for e in await successor.ledger.history("e")]
    assert kinds == ["Admitted", "Created", "Ungated", "Running", "Shrunk", "Running"]

    await successor.move("e", *GONE, end=SUCCEEDED)
    await successor.move("p", *GONE)
    assert await sums(successor, "n1") == await sums(successor, "n2") == (0, 0, 0)
    assert await quota_sums(successor) == (0, 0, 0)
    assert await successor.ledger.audit() == []


async def test_part_of_what_a_gang_has_on_a_node_leaves_and_more_of_it_later(elastic: Scene) -> None:
    for pods, preemptor in ((1, "p"), (2, "p2")):
        await elastic.cycle(preemptions=[preemption(preemptor, "e", ends={"e": giving_up(pods)}, n2=pods)])
        assert await elastic.ledger.audit() == []
        await elastic.move("e", AttemptState.RUNNING)
        assert await becomes_reserved(elastic, preemptor)
    victim = await elastic.attempt("e")
    assert [(p.node, p.pods) for p in victim.placements] == [("n1", 4), ("n2", 1)]
    assert victim.quota == {("a100", GPU): 5}
    assert await sums(elastic, "n2") == (4, 4, 0)
    assert await elastic.ledger.audit() == []


async def test_a_part_leaves_for_nobody(elastic: Scene) -> None:
    part = Placement("worker", "a100", "n2", 3, ((GPU, 1), ("pods", 1)))
    shrink = Shrink(why(Reason.QUEUE_DRAINED, queue="q"), Portion((part,), {("a100", GPU): 3}))
    move = Move("e", 1, AttemptState.SHRINKING, shrink=shrink)
    assert await elastic.ledger.advance(elastic.epoch, [move], now=3000.0) == [move]
    assert await elastic.ledger.advance(elastic.epoch, [move], now=3000.0) == []
    victim = await elastic.attempt("e")
    assert (victim.state, victim.leaving, victim.shrunk) == (AttemptState.SHRINKING, shrink.part, shrink.why)
    assert [(p.node, p.pods) for p in victim.placements] == [("n1", 4), ("n2", 1)]
    assert await elastic.steps() == {"e": Step.SHRINK}
    # It is there, and whoever it will be promised to has to wait until it is gone.
    assert await sums(elastic, "n2") == (4, 1, 0)
    assert await quota_sums(elastic) == (8, 5, 0)
    assert await elastic.ledger.audit() == []
    assert (await elastic.cycle(preemptions=[preemption("p", "e", ends={"e": PREEMPTED}, n1=4)])).refused == ["p"]
    assert (await elastic.cycle(admissions=[admission("small", n2=1)])).refused == ["small"]

    assert await elastic.move("e", AttemptState.RUNNING) == [Move("e", 1, AttemptState.RUNNING)]
    assert await sums(elastic, "n2") == (1, 1, 0)
    assert await quota_sums(elastic) == (5, 5, 0)
    assert await elastic.ledger.audit() == []
    assert [a.uid for a in (await elastic.admit(admission("small", n2=1))).admitted] == ["small"]


async def test_more_than_a_gang_has_does_not_leave(elastic: Scene) -> None:
    part = Placement("worker", "a100", "n2", 5, ((GPU, 1), ("pods", 1)))
    shrink = Shrink(why(Reason.QUEUE_DRAINED, queue="q"), Portion((part,), {("a100", GPU): 5}))
    for given in (Move("e", 1, AttemptState.SHRINKING, shrink=shrink), Move("e", 1, AttemptState.SHRINKING)):
        assert await elastic.ledger.advance(elastic.epoch, [given], now=3000.0) == []
    assert await sums(elastic, "n2") == (4, 4, 0)
    assert await elastic.ledger.audit() == []


@pytest.mark.parametrize("claimer_first", [True, False])
async def test_a_gang_that_ends_while_it_shrinks_gives_all_back(elastic: Scene, claimer_first: bool) -> None:  # noqa: FBT001
    await elastic.cycle(preemptions=[preemption("p", "e", ends={"e": giving_up(3)}, n2=3)])
    if claimer_first:
        await elastic.move("p", *GONE)
        assert await sums(elastic, "n2") == (4, 1, 0)
    await elastic.move("e", AttemptState.ENDING, end=SUCCEEDED)
    assert (await elastic.attempt("e")).leaving == giving_up(3).part
    assert await elastic.ledger.audit() == []
    # What it gives up is still promised to one, the rest to nobody, and nobody else is promised it on its way out.
    assert (await elastic.cycle(preemptions=[preemption("p2", "e", n1=4)])).refused == ["p2"]
    assert not await becomes_reserved(elastic, "p")
    await elastic.move("e", AttemptState.ENDED)
    assert await sums(elastic, "n1") == (0, 0, 0)
    assert await becomes_reserved(elastic, "p") is not claimer_first
    held = 0 if claimer_first else 3
    assert await sums(elastic, "n2") == await quota_sums(elastic) == (held, held, 0)
    assert await elastic.ledger.audit() == []


async def test_a_gang_goes_on_shrinking_when_its_claimer_goes(elastic: Scene) -> None:
    await elastic.cycle(preemptions=[preemption("p", "e", ends={"e": giving_up(4)}, n2=4)])
    await elastic.move("p", *GONE)
    assert (await elastic.attempt("e")).state is AttemptState.SHRINKING
    assert await elastic.ledger.audit() == []
    await elastic.move("e", AttemptState.RUNNING)
    assert await sums(elastic, "n2") == (0, 0, 0)
    assert await elastic.ledger.audit() == []


async def test_whose_part_can_not_be_had(elastic: Scene) -> None:
    for shrink in (giving_up(5), giving_up(1, "n3")):  # more than it has there
        assert (await elastic.cycle(preemptions=[preemption("p", "e", ends={"e": shrink}, n2=1)])).refused == ["p"]
    result = await elastic.cycle(
        preemptions=[
            preemption("p", "e", ends={"e": giving_up(2)}, n2=2),
            preemption("p2", "e", ends={"e": giving_up(2)}, n2=2),  # it shrinks already
            preemption("small", "e", n1=1),
        ]
    )
    assert ([a.uid for a in result.claimed], result.refused) == (["p"], ["p2", "small"])
    await elastic.move("e", AttemptState.ENDING)
    assert (await elastic.cycle(preemptions=[preemption("p2", "e", n2=1)])).refused == ["p2"]
    assert await elastic.ledger.audit() == []
    assert (await elastic.cycle(preemptions=[preemption("p2", "e", ends={"e": giving_up(2)}, n2=1)])).refused == ["p2"]


async def test_only_a_running_gang_gives_up_a_part(full: Scene) -> None:
    part = Portion(admission("v3", n2=6)[0].placements, {("a100", GPU): 6})
    leave = {"v3": Shrink(giving_up(6).why, part)}
    assert (await full.cycle(preemptions=[preemption("p", "v3", ends=leave, n2=6)])).refused == ["p"]


@pytest.fixture
async def claimed(full: Scene) -> Scene:
    """p waits for v1 and v2 (n1) and v3 (n2); v1 has ended already."""
    await claim(full, "p", "v1", "v2", "v3", n1=8, n2=6)
    await full.move("v1", AttemptState.ENDED)
    return full


async def test_a_claim_is_taken_over_with_the_victims_that_are_needed(claimed: Scene) -> None:
    (attempt,) = (await claimed.cycle(preemptions=[preemption("p2", "p", "v2", n1=8)])).claimed

    assert (attempt.state, attempt.victims) == (AttemptState.CLAIMED, (("v2", 1),))
    assert attempt == await claimed.attempt("p2")
    overtaken = await claimed.attempt("p")
    assert (overtaken.state, overtaken.end, overtaken.holds) == (AttemptState.ENDING, PREEMPTED, False)
    assert (overtaken.claimed, overtaken.victims) == (True, ())
    assert await claimed.rows("SELECT workload_uid, claimed_by_uid FROM attempt WHERE state = 'Ending' ORDER BY 1") == [
        ("p", None),
        ("v2", "p2"),
        ("v3", None),
    ]
    assert await sums(claimed, "n1") == (4, 8, 0)
    assert await sums(claimed, "n2") == (6, 0, 0)
    assert await quota_sums(claimed) == (10, 8, 0)
    assert [e["kind"] for e in await claimed.ledger.history("p")] == ["WaitingForVictims", PREEMPTED.why.code]
    assert await claimed.ledger.audit() == []

    await claimed.move("p", AttemptState.ENDED)
    assert (await claimed.workload("p")).state is WorkloadState.QUEUED
    assert not await becomes_reserved(claimed, "p2")
    await claimed.move("v2", AttemptState.ENDED)
    assert await becomes_reserved(claimed, "p2")
    assert await sums(claimed, "n1") == (8, 8, 0)
    await claimed.move("v3", AttemptState.ENDED)
    assert (await claimed.admit(admission("small", n2=8))).refused == []
    assert await claimed.ledger.audit() == []


async def test_a_claim_is_taken_over_with_further_victims_and_survives_a_restart(full: Scene) -> None:
    await claim(full, "p", "v1", n1=4)
    await full.cycle(preemptions=[preemption("p2", "p", "v1", "v2", n1=8)])
    await full.move("p", AttemptState.ENDED)
    successor = await Scene.open(full.engine)
    loaded = await successor.attempt("p2")
    assert (loaded.state, loaded.victims) == (AttemptState.CLAIMED, (("v1", 1), ("v2", 1)))
    for victim in ("v1", "v2"):
        await successor.move(victim, AttemptState.ENDED)
    assert await becomes_reserved(successor, "p2")
    assert await successor.ledger.audit() == []


@pytest.mark.parametrize(
    ("victims", "gpus", "ends"),
    [
        (("v2",), 4, None),  # claimed by p, whose claim is not taken over
        (("p", "p"), 8, None),
        (("p",), 9, None),  # more than will be there
        (("p", "v2"), 8, {"v2": PREEMPTED}),  # nobody says why p ends
    ],
)
async def test_a_takeover_that_can_not_be_is_refused(
    claimed: Scene, victims: tuple[str, ...], gpus: int, ends: dict[str, End] | None
) -> None:
    result = await claimed.cycle(preemptions=[preemption("p2", *victims, ends=ends, n1=gpus)])
    assert result.refused == ["p2"]
    assert (await claimed.attempt("p")).victims == (("v2", 1), ("v3", 1))
    assert await claimed.ledger.audit() == []


async def test_a_claim_that_was_taken_over_is_not_taken_twice(claimed: Scene) -> None:
    both = [preemption("p2", "p", "v2", n1=8), preemption("small", "p", "v3", n2=6)]
    result = await claimed.cycle(preemptions=both)
    assert ([a.uid for a in result.claimed], result.refused) == (["p2"], ["small"])
    assert (await claimed.cycle(preemptions=[preemption("small", "p", n2=6)])).refused == ["small"]
    assert await claimed.ledger.audit() == []


async def test_nobody_is_refused_whom_the_core_let_in_after_a_preemptor_that_asks_for_less_than_it_takes(
    full: Scene,
) -> None:
    await full.submit("other", queue="q2")
    await full.nodes(n3=6)
    await full.quota("q2", nominal=6)
    await full.quota(nominal=20)
    await full.admit(admission("other", n3=6))
    await claim(full, "p", "other", n3=6)
    assert await quota_sums(full) == (14, 20, 0)
    result = await full.cycle(admissions=[admission("small", n2=2)], preemptions=[preemption("p2", "v1", n1=2)])
    assert (result.refused, [a.uid for a in result.claimed]) == ([], ["p2"])
    assert await quota_sums(full) == (16, 20, 0)
    assert await full.ledger.audit() == []
