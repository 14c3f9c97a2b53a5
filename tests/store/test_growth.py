"""Running gangs that get further pods, on both drivers."""

from dataclasses import replace

import pytest

from queuectl.core.elastic import finished, numbered
from queuectl.core.usage import History
from queuectl.model.lifecycle import AttemptState, Move, Shrink, Step
from queuectl.model.plan import Placement, Portion
from queuectl.model.reasons import Reason, why
from queuectl.store.ledger import CycleResult
from tests.store.scene import GPU, PREEMPTED, UP, Scene, admission
from tests.store.test_claims import GONE, becomes_reserved, preemption, quota_sums, sums
from tests.store.test_usage import HALF_LIFE, agree

FAILED = why(Reason.GROWTH_FAILED, gone=2, after=1, problem="it was too late")


def more(pods: int, node: str = "n1", first: int = 1) -> Portion:
    """Further pods with one GPU each, from an index on."""
    return Portion(
        (Placement("worker", "a100", node, pods, ((GPU, 1), ("pods", 1)), first=first),), {("a100", GPU): pods}
    )


@pytest.fixture
async def small(scene: Scene) -> Scene:
    """e runs with a pod of one GPU on n1, which has four, as n2 has; p and other wait, and the quota is six."""
    await scene.submit("e", "p", "other")
    await scene.nodes(n1=4, n2=4)
    await scene.quota(nominal=6)
    await scene.admit(admission("e", n1=1))
    assert len(await scene.move("e", *UP)) == 3
    return scene


async def grow(scene: Scene, part: Portion) -> CycleResult:
    return await scene.cycle(growths={("e", 1): part}, now=1500.0)


async def test_a_gang_grows_on_the_node_where_it_is_and_its_pods_keep_their_numbers(small: Scene) -> None:
    assert (await grow(small, more(2))).grown == ["e"]
    attempt = await small.attempt("e")
    assert (attempt.state, attempt.coming, attempt.growing_at) == (
        AttemptState.GROWING,
        frozenset({("worker", 1), ("worker", 2)}),
        1500.0,
    )
    assert attempt.quota == {("a100", GPU): 3}
    assert await small.steps() == {"e": Step.GROW}
    assert await sums(small) == await quota_sums(small) == (3, 3, 0)
    assert await small.ledger.audit() == []
    assert await small.move("e", AttemptState.RUNNING) == [Move("e", 1, AttemptState.RUNNING)]
    assert (await small.attempt("e")).coming == frozenset()

    assert (await grow(small, more(2, "n2", 3))).grown == ["e"]
    await small.move("e", AttemptState.RUNNING)
    assert (await grow(small, more(1, "n1", 5))).grown == ["e"]
    await small.move("e", AttemptState.RUNNING)
    attempt = await small.attempt("e")
    homes = [p.node for p in numbered(attempt.placements).values()]
    assert homes == ["n1", "n1", "n1", "n2", "n2", "n1"]
    done = Move("e", 1, AttemptState.RUNNING, done=finished(attempt, [("worker", 0), ("worker", 5)]))
    assert await small.ledger.advance(small.epoch, [done], now=2000.0) == [done]
    assert await sums(small) == (2, 2, 0)
    assert await small.ledger.audit() == []
    await small.move("e", *GONE)
    assert await sums(small) == await sums(small, "n2") == await quota_sums(small) == (0, 0, 0)
    assert await small.ledger.audit() == []


async def test_a_gang_that_does_not_grow_after_all_may_have_the_same_place_later(small: Scene) -> None:
    for _ in range(2):
        assert (await grow(small, more(2))).grown == ["e"]
        back = Move("e", 1, AttemptState.SHRINKING, shrink=Shrink(FAILED, more(2)))
        assert await small.ledger.advance(small.epoch, [back], now=2000.0) == [back]
        assert await sums(small) == (3, 1, 0)
        assert await small.ledger.audit() == []
        await small.move("e", AttemptState.RUNNING)
        attempt = await small.attempt("e")
        assert (attempt.whole.pods, attempt.shrunk) == (1, FAILED)
        assert await sums(small) == await quota_sums(small) == (1, 1, 0)
    await small.move("e", AttemptState.ENDING, AttemptState.ENDED)
    assert await small.ledger.audit() == []


async def test_what_does_not_fit_is_refused(small: Scene) -> None:
    for part in (more(4), replace(more(4, "n2"), quota={("a100", GPU): 6}), more(1, "n3")):
        result = await grow(small, part)
        assert (result.grown, result.refused) == ([], ["e"])
    await small.nodes(n1=0)  # less than it holds
    assert (await grow(small, more(1))).refused == ["e"]
    assert (await small.attempt("e")).state is AttemptState.RUNNING
    assert await small.ledger.audit() == []


async def test_who_starts_in_the_same_cycle_goes_first(small: Scene) -> None:
    result = await small.cycle(admissions=[admission("other", n1=2)], growths={("e", 1): more(2)})
    assert ([a.uid for a in result.admitted], result.refused) == (["other"], ["e"])


async def test_only_one_that_runs_and_that_nobody_takes_grows(small: Scene) -> None:
    result = await small.cycle(
        preemptions=[preemption("p", "e", ends={"e": PREEMPTED}, n1=4)], growths={("e", 1): more(1)}
    )
    assert ([a.uid for a in result.claimed], result.refused) == (["p"], ["e"])
    assert (await grow(small, more(1))).refused == ["e"]
    await small.move("e", AttemptState.ENDED)
    assert await becomes_reserved(small, "p")
    assert (await grow(small, more(1))).refused == ["e"]
    assert await small.ledger.audit() == []


async def test_a_plan_that_is_sent_again_grows_nobody_twice(small: Scene) -> None:
    plan = (await small.rows("SELECT gen_random_uuid()"))[0][0]
    for _ in range(2):
        result = await small.ledger.cycle(small.epoch, plan_id=plan, now=1500.0, growths={("e", 1): more(2)})
        assert (result.grown, result.refused) == (["e"], [])
    assert await sums(small) == (3, 3, 0)


async def test_what_it_got_later_counts_from_then_on(small: Scene) -> None:
    on_the_way = History(HALF_LIFE)
    on_the_way.begin("q", {("a100", GPU): 1}, 1000.0)
    await grow(small, more(2))
    on_the_way.begin("q", {("a100", GPU): 2}, 1500.0)
    await agree(small, on_the_way)
    await small.move("e", *GONE)
    on_the_way.end("q", {("a100", GPU): 3}, 2000.0)
    await agree(small, on_the_way)
