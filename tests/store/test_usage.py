"""What queues have used before, from the attempts on record: as it is counted in memory, also after a restart."""

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from queuectl.core.elastic import finished
from queuectl.core.usage import STEPS, History
from queuectl.model.lifecycle import AttemptState, Move
from queuectl.store.engine import open_engine
from queuectl.store.ledger import Ledger
from tests.store.scene import GPU, PREEMPTED, UP, Scene, admission
from tests.store.test_claims import GONE, elastic, giving_up, preemption

__all__ = ["elastic"]

NOW = 1_800_000_000.0
HALF_LIFE = 7 * 86_400.0
seconds = st.one_of(st.floats(0, 3600), st.floats(0, 20 * HALF_LIFE), st.just(40 * 365 * 86_400.0))
quota = st.dictionaries(st.sampled_from([("a100", GPU), ("h100", GPU), ("a100", "cpu")]), st.integers(0, 10_000))
spans = st.lists(st.tuples(st.sampled_from("qrs"), quota, seconds, seconds, st.booleans()), max_size=12)

INSERT = text("""
    INSERT INTO attempt (workload_uid, number, state, generation, plan_id, epoch, queue, charged, quota, holds,
                         admitted_at, ended_at, "end")
    VALUES ('w', :number, 'Ended', 1, gen_random_uuid(), 1, :queue, ARRAY[]::text[], CAST(:quota AS jsonb), :holds,
            to_timestamp(:begin), to_timestamp(:end), '{}')
""")
WORKLOAD = text("""
    INSERT INTO workload (uid, namespace, name, queue, priority, submitted_at, seq) VALUES ('w', 'n', 'w', 'q', 0, now(), 1)
""")


def amounts(history: History, now: float) -> dict[tuple[str, Any], float]:
    return {(queue, cell): float(x) for queue, some in history.past(now).items() for cell, x in some.items()}


async def _loaded(url: str, spans: list[Any], now: float) -> tuple[History, History]:
    engine = open_engine(url)
    try:
        counted = History(HALF_LIFE)
        async with engine.begin() as connection:
            await connection.exec_driver_sql("TRUNCATE workload CASCADE")
            await connection.execute(WORKLOAD)
            for number, (queue, held, age, length, holds) in enumerate(spans):
                begin = now - age - length
                rows = [[flavor, resource, amount] for (flavor, resource), amount in held.items()]
                json = str(rows).replace("'", '"')
                given = {"number": number, "queue": queue, "quota": json, "holds": holds}
                await connection.execute(INSERT, {**given, "begin": begin, "end": now - age})
                if holds and age < 12 * HALF_LIFE:
                    counted.begin(queue, held, begin)
                    counted.end(queue, held, now - age)
        recalled = History(HALF_LIFE)
        past = (await Ledger(engine).load(half_life=HALF_LIFE, now=now)).past
        for queue, averages in past.items():
            recalled.recall(queue, averages, now)
        return counted, recalled
    finally:
        await engine.dispose()


def test_the_ledger_counts_as_the_core_does(database_url: str) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(spans, st.floats(0, HALF_LIFE))
    def check(spans: list[Any], later: float) -> None:
        counted, recalled = asyncio.run(_loaded(database_url, spans, NOW))
        for now in (NOW, NOW + later):
            left, right = amounts(counted, now), amounts(recalled, now)
            for key in left.keys() | right.keys():
                assert left.get(key, 0.0) == pytest.approx(right.get(key, 0.0), rel=1e-9, abs=1.1 / STEPS)

    check()


async def test_a_restart_forgets_nothing(scene: Scene) -> None:
    """Attempts that ended, one that runs, one that does in part, one that only claimed room, as told on the way."""
    await scene.submit("w1", "w2", "w3", "w4", "p")
    await scene.nodes(n1=8, n2=8, n3=8, n4=8)
    await scene.quota(nominal=32)
    on_the_way = History(HALF_LIFE)
    [partly] = (await scene.admit(admission("w4", n3=8, n4=4))).admitted
    on_the_way.begin("q", partly.quota, 1000.0)
    await scene.move("w4", *UP)
    done = finished(partly, [("worker", 1)])
    await scene.ledger.advance(scene.epoch, [Move("w4", 1, AttemptState.RUNNING, done=done)], now=1700.0)
    on_the_way.end("q", done.part.quota, 1700.0)
    for attempt in (await scene.admit(admission("w1", n1=4), admission("w2", n1=4), admission("w3", n2=8))).admitted:
        on_the_way.begin("q", attempt.quota, 1000.0)
    await scene.cycle(preemptions=[preemption("p", "w1", n1=4)], now=1500.0)
    await scene.move("p", AttemptState.ENDING, AttemptState.ENDED, end=PREEMPTED)
    await scene.move("w2", *UP, *GONE)
    await scene.move("w1", AttemptState.ENDED)
    for _ in range(2):
        on_the_way.end("q", {("a100", GPU): 4}, 2000.0)

    await agree(scene, on_the_way)
    assert (await scene.ledger.load()).past == {}


@pytest.mark.parametrize("ends", [False, True])
async def test_what_a_gang_held_before_it_shrank_is_not_forgotten(elastic: Scene, ends: bool) -> None:  # noqa: FBT001
    """It gives up three pods and later one more; that may be on its way out when the whole gang ends."""
    on_the_way = History(HALF_LIFE)
    on_the_way.begin("q", {("a100", GPU): 8}, 1000.0)
    for preemptor, pods in (("p", 3), ("p2", 1)):
        await elastic.cycle(preemptions=[preemption(preemptor, "e", ends={"e": giving_up(pods)}, n2=pods)], now=1500.0)
        await elastic.move(preemptor, *GONE)
        if pods == 3 or not ends:
            await elastic.move("e", AttemptState.RUNNING)
            on_the_way.end("q", {("a100", GPU): pods}, 2000.0)
    if ends:
        await elastic.move("e", *GONE)
        on_the_way.end("q", {("a100", GPU): 5}, 2000.0)
    await agree(elastic, on_the_way)


async def agree(scene: Scene, on_the_way: History) -> None:
    """A half-life later, somebody who starts from the ledger has counted what somebody has who was there."""
    later = 2000.0 + HALF_LIFE
    loaded = await scene.ledger.load(half_life=HALF_LIFE, now=later)
    after = History(HALF_LIFE)
    for queue, averages in loaded.past.items():
        after.recall(queue, averages, later)
    for attempt in loaded.attempts:
        for part in attempt.parts:
            after.begin("q", part.quota, attempt.admitted_at)
    assert set(amounts(after, later)) == {("q", ("a100", GPU))}
    assert amounts(after, later) == pytest.approx(amounts(on_the_way, later), abs=1.1 / STEPS)
