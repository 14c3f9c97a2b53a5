"""Running gangs whose lost pods are replaced, on both drivers."""

import pytest

from queuectl.core.elastic import numbered
from queuectl.model.lifecycle import AttemptState, Move, Shrink, Step
from queuectl.model.plan import Admission, Placement, Portion, Repair
from queuectl.model.reasons import Reason, why
from queuectl.store.ledger import CycleResult
from tests.store.scene import GPU, REQUEUE, UP, Scene, admission
from tests.store.test_claims import quota_sums, sums

FIRST = frozenset({("worker", 0)})
REPLACING = why(Reason.REPLACING, there=1, pods=2, nodes="n1", cause="Node n1 is gone.")


def at(node: str, index: int) -> tuple[Placement, ...]:
    """A pod with one GPU, by its index."""
    return (Placement("worker", "a100", node, 1, ((GPU, 1), ("pods", 1)), first=index),)


@pytest.fixture
async def pair(scene: Scene) -> Scene:
    """e runs with pods of one GPU on n1 and n2; n3 is spare, other waits, and the quota is just enough for e."""
    await scene.submit("e", "other")
    await scene.nodes(n1=1, n2=1, n3=1)
    await scene.quota(nominal=2)
    places = at("n1", 0) + at("n2", 1)
    await scene.admit((Admission("e", places, {("a100", GPU): 2}), 7))
    assert len(await scene.move("e", *UP)) == 3
    return scene


def instead(node: str = "n3") -> Repair:
    return Repair(FIRST, at("n1", 0), at(node, 0), REPLACING)


async def repair(scene: Scene, one: Repair) -> CycleResult:
    return await scene.cycle(repairs={("e", 1): one}, now=1500.0)


async def test_the_lost_place_is_held_until_its_pod_is_gone_and_the_other_from_the_start(pair: Scene) -> None:
    assert (await repair(pair, instead())).repaired == ["e"]
    attempt = await pair.attempt("e")
    assert (attempt.state, attempt.coming) == (AttemptState.REPAIRING, FIRST)
    assert (attempt.growing_at, attempt.shrunk) == (1500.0, REPLACING)
    assert attempt.leaving == Portion(at("n1", 0))
    assert {key: p.node for key, p in numbered(attempt.placements).items()} == {
        ("worker", 0): "n3", ("worker", 1): "n2",
    }  # fmt: skip
    assert await pair.steps() == {"e": Step.SHRINK}
    assert (await sums(pair), await sums(pair, "n3")) == ((1, 0, 0), (1, 1, 0))
    assert attempt.quota == {("a100", GPU): 2}
    assert await quota_sums(pair) == (2, 2, 0), "charged once"
    assert await pair.ledger.audit() == []

    assert await pair.move("e", AttemptState.RUNNING) == [], "not before its pods have started"
    assert len(await pair.move("e", AttemptState.GROWING)) == 1
    attempt = await pair.attempt("e")
    assert (attempt.leaving, attempt.coming, attempt.growing_at) == (None, FIRST, 2000.0)
    assert await pair.steps() == {"e": Step.GROW}
    assert (await sums(pair), await sums(pair, "n3")) == ((0, 0, 0), (1, 1, 0))
    assert await quota_sums(pair) == (2, 2, 0)
    assert await pair.ledger.audit() == []

    assert len(await pair.move("e", AttemptState.RUNNING)) == 1
    attempt = await pair.attempt("e")
    assert (attempt.coming, attempt.shrunk) == (frozenset(), None)
    told = [(event["kind"], event["message"]) for event in await pair.ledger.history("e")]
    assert told[-3:] == [
        ("Replacing", str(REPLACING)),
        ("Growing", "What was left of the lost pods is gone."),
        ("Running", "All pods are ready."),
    ]
    await pair.move("e", AttemptState.ENDING, AttemptState.ENDED)
    assert await sums(pair, "n2") == await sums(pair, "n3") == await quota_sums(pair) == (0, 0, 0)
    assert await pair.ledger.audit() == []


async def test_whoever_starts_in_the_same_cycle_comes_after_it(pair: Scene) -> None:
    await pair.quota(nominal=3)
    result = await pair.cycle(admissions=[admission("other", n3=1)], repairs={("e", 1): instead()})
    assert (result.repaired, result.admitted, result.refused) == (["e"], [], ["other"])
    assert await pair.ledger.audit() == []


async def test_what_does_not_fit_or_is_not_its_own_is_refused_and_nothing_has_happened(pair: Scene) -> None:
    await pair.nodes(n3=0)
    strangers = Repair(FIRST, at("n3", 0), at("n1", 0), REPLACING)
    for one in (instead(), instead("n2"), instead("n9"), strangers):
        result = await repair(pair, one)
        assert (result.repaired, result.refused) == ([], ["e"])
    assert (await pair.attempt("e")).state is AttemptState.RUNNING
    assert (await sums(pair), await sums(pair, "n2")) == ((1, 1, 0), (1, 1, 0))
    assert await pair.ledger.audit() == []


async def test_only_one_that_runs_is_repaired(pair: Scene) -> None:
    assert (await repair(pair, instead())).repaired == ["e"]
    assert (await repair(pair, instead())).refused == ["e"]
    await pair.move("e", AttemptState.GROWING)
    assert (await repair(pair, instead())).refused == ["e"]
    await pair.move("e", AttemptState.ENDING)
    assert (await repair(pair, instead())).refused == ["e"]
    assert await pair.ledger.audit() == []


async def test_a_pod_that_stays_in_its_place_takes_no_further_room(pair: Scene) -> None:
    stays = Repair(FIRST, (), (), REPLACING)
    assert (await repair(pair, stays)).repaired == ["e"]
    assert (await pair.attempt("e")).leaving is None
    assert await sums(pair) == (1, 1, 0)
    await pair.move("e", AttemptState.GROWING, AttemptState.RUNNING)
    assert await sums(pair) == (1, 1, 0)
    assert await pair.ledger.audit() == []


async def test_a_plan_that_is_sent_again_repairs_nobody_twice(pair: Scene) -> None:
    """As when the answer to COMMIT was lost."""
    plan = (await pair.rows("SELECT gen_random_uuid()"))[0][0]
    for _ in range(2):
        result = await pair.ledger.cycle(pair.epoch, plan_id=plan, now=1500.0, repairs={("e", 1): instead()})
        assert (result.repaired, result.refused) == (["e"], [])
    assert (await sums(pair), await sums(pair, "n3")) == ((1, 0, 0), (1, 1, 0))
    gone = Move("e", 1, AttemptState.GROWING)
    assert await pair.ledger.advance(pair.epoch, [gone, gone], now=2000.0) == [gone]
    assert await pair.ledger.audit() == []


async def test_one_that_goes_back_whole_meanwhile_gives_back_both_places(pair: Scene) -> None:
    await repair(pair, instead())
    await pair.move("e", AttemptState.ENDING, end=REQUEUE)
    assert (await sums(pair), await sums(pair, "n3")) == ((1, 0, 0), (1, 1, 0)), "pods may still run in both"
    assert await pair.ledger.audit() == []
    await pair.move("e", AttemptState.ENDED)
    assert await sums(pair) == await sums(pair, "n2") == await sums(pair, "n3") == await quota_sums(pair) == (0, 0, 0)
    assert await pair.ledger.audit() == []


async def test_one_that_has_come_back_to_a_place_may_lose_it_again(pair: Scene) -> None:
    there, back = instead(), Repair(FIRST, at("n3", 0), at("n1", 0), REPLACING)
    for one in (there, back, there):
        assert (await repair(pair, one)).repaired == ["e"]
        assert len(await pair.move("e", AttemptState.GROWING, AttemptState.RUNNING)) == 2
        assert await pair.ledger.audit() == []
    assert [p.node for p in numbered((await pair.attempt("e")).placements).values()] == ["n3", "n2"]


async def test_one_that_can_spare_those_that_do_not_come_gives_them_up(pair: Scene) -> None:
    last = Repair(frozenset({("worker", 1)}), at("n2", 1), at("n3", 1), REPLACING)
    assert (await repair(pair, last)).repaired == ["e"]
    await pair.move("e", AttemptState.GROWING)
    failed = why(Reason.GROWTH_FAILED, gone=1, after=1, problem="it was too late")
    back = Move("e", 1, AttemptState.SHRINKING, shrink=Shrink(failed, Portion(at("n3", 1), {("a100", GPU): 1})))
    assert await pair.ledger.advance(pair.epoch, [back], now=2500.0) == [back]
    await pair.move("e", AttemptState.RUNNING)
    attempt = await pair.attempt("e")
    assert (attempt.whole, attempt.shrunk) == (Portion(at("n1", 0), {("a100", GPU): 1}), failed)
    assert await quota_sums(pair) == (1, 1, 0)
    assert await pair.ledger.audit() == []
