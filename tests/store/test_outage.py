"""Postgres goes away at the worst moments, on both drivers."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine

from queuectl.model.lifecycle import AttemptState, Move
from queuectl.model.plan import Eviction, Preempt
from queuectl.model.policy import Cause
from queuectl.store import engine as store_engine
from queuectl.store import migrate
from queuectl.store.embedded import EmbeddedPostgres
from queuectl.store.engine import Conflict, StoreUnavailable, open_engine, retried, transaction
from tests.store.proxy import Cut, Proxy, proxied
from tests.store.scene import PREEMPTED, Scene, admission, workload
from tests.support.databases import FAST
from tests.support.eventually import eventually


@pytest.fixture
async def cut_scene(driver_url: str) -> AsyncIterator[tuple[Proxy, Scene]]:
    async with proxied(driver_url) as (proxy, url):
        engine = open_engine(url)
        scene = await Scene.open(engine)
        await scene.submit("w1", "w2")
        await scene.nodes(n1=8)
        await scene.quota()
        yield proxy, scene
        await engine.dispose()


@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER], ids=lambda cut: cut.name)
async def test_a_lost_commit_of_a_cycle_is_looked_up(cut_scene: tuple[Proxy, Scene], cut: Cut) -> None:
    proxy, scene = cut_scene
    proxy.cut = cut
    result = await scene.admit(admission("w1", n1=8), admission("w2", n1=1))
    assert proxy.cuts == 1
    assert [a.uid for a in result.admitted] == ["w1"]
    assert result.refused == ["w2"]
    assert (await scene.ledger.load()).attempts == result.admitted
    assert [e["kind"] for e in await scene.ledger.history("w1")] == ["Admitted"]
    assert await scene.ledger.audit() == []


@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER], ids=lambda cut: cut.name)
async def test_a_lost_commit_of_a_preemption_is_looked_up(cut_scene: tuple[Proxy, Scene], cut: Cut) -> None:
    proxy, scene = cut_scene
    await scene.admit(admission("w1", n1=8))
    preempt = Preempt(admission("w2", n1=8)[0], (Eviction("w1", Cause.QUEUE),))
    proxy.cut = cut
    result = await scene.cycle(preemptions=[(preempt, 1, {"w1": PREEMPTED})])
    assert proxy.cuts == 1
    assert [(a.uid, a.victims) for a in result.claimed] == [("w2", (("w1", 1),))]
    proxy.cut = cut
    moves = [Move("w1", 1, AttemptState.ENDED), Move("w2", 1, AttemptState.RESERVED)]
    assert await scene.ledger.advance(scene.epoch, moves, now=1.0) == moves
    assert proxy.cuts == 2
    assert await scene.ledger.audit() == []


async def test_a_commit_that_arrives_late_is_waited_for(cut_scene: tuple[Proxy, Scene], engine: AsyncEngine) -> None:
    proxy, scene = cut_scene

    async def another_try_waits() -> bool:
        async with engine.connect() as connection:
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%plan%'"
            return bool((await connection.exec_driver_sql(waiting.replace("%", "%%"))).scalar())

    proxy.cut = Cut.LATE
    proxy.release = lambda: eventually(another_try_waits, "the second try waits for the first")
    result = await scene.admit(admission("w1", n1=8), admission("w2", n1=1))
    assert ([a.uid for a in result.admitted], result.refused) == (["w1"], ["w2"])
    assert [e["kind"] for e in await scene.ledger.history("w1")] == ["Admitted"]
    assert await scene.ledger.audit() == []


@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER], ids=lambda cut: cut.name)
async def test_a_lost_commit_of_moves_counts_them_once(cut_scene: tuple[Proxy, Scene], cut: Cut) -> None:
    proxy, scene = cut_scene
    await scene.admit(admission("w1", n1=8))
    for state in (AttemptState.CREATED, AttemptState.ENDING, AttemptState.ENDED):
        proxy.cut = cut
        assert [move.to for move in await scene.move("w1", state)] == [state]
    assert proxy.cuts == 3
    assert (await scene.workload("w1")).failures == 1
    assert await scene.ledger.audit() == []


async def test_a_backend_killed_before_commit_leaves_nothing(scene: Scene) -> None:
    with pytest.raises(StoreUnavailable):  # noqa: PT012
        async with transaction(scene.engine) as connection:
            await connection.execute(text("INSERT INTO cluster (uid) VALUES ('half')"))
            pid = (await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one()
            await scene.rows("SELECT pg_terminate_backend(:pid)", {"pid": pid})
            await connection.execute(text("SELECT 1"))
    assert await scene.rows("SELECT * FROM cluster") == []


async def test_pooled_connections_that_died_are_replaced(scene: Scene) -> None:
    await asyncio.gather(*(scene.ledger.load() for _ in range(5)))
    await scene.rows(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
        "AND datname = current_database()"
    )
    await scene.submit("w1")
    assert len((await scene.ledger.load()).workloads) == 1


async def test_a_lock_that_is_not_granted_is_an_outage(scene: Scene) -> None:
    async with scene.engine.connect() as connection, connection.begin():
        await connection.execute(text("LOCK TABLE workload"))
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="lock timeout"):
            await scene.submit("w1")
        assert time.monotonic() - started < 10


async def test_a_conflict_is_tried_again_once(scene: Scene) -> None:
    tries = []

    async def deadlocked(again: bool) -> str:  # noqa: FBT001
        tries.append(again)
        async with transaction(scene.engine) as connection:
            if len(tries) == 1:
                await connection.execute(text("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40P01'; END $$"))
        return "done"

    assert await retried(deadlocked) == "done"
    assert tries == [False, False]

    async def hopeless(again: bool) -> None:  # noqa: FBT001
        tries.append(again)
        raise Conflict("again")

    with pytest.raises(Conflict):
        await retried(hopeless)
    assert len(tries) == 4


async def test_crossing_writers_of_one_epoch_neither_fail_nor_overbook(scene: Scene) -> None:
    uids = [f"w{i}" for i in range(24)]
    await scene.submit(*uids)
    await scene.nodes(n1=20, n2=20)
    await scene.quota()
    results = await asyncio.gather(
        *(
            scene.admit(admission(uid, n1=2, n2=3) if i % 2 else admission(uid, n2=3, n1=2))
            for i, uid in enumerate(uids)
        ),
        *(scene.nodes(n2=20 + i, n1=20) for i in range(5)),
    )
    admitted = [a.uid for result in results if result is not None for a in result.admitted]
    assert len(admitted) >= 6
    ends = [scene.move(uid, AttemptState.ENDING, AttemptState.ENDED) for uid in admitted]
    await asyncio.gather(*ends, scene.nodes(n1=1, n2=1))
    assert await scene.ledger.audit() == []


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_the_server_crashes_and_comes_back(tmp_path: Path, driver: str) -> None:
    server = EmbeddedPostgres(tmp_path / "pg", {"fsync": "off"})
    url = await asyncio.to_thread(server.start)
    try:
        await asyncio.to_thread(migrate.upgrade, url)
        given = make_url(url).set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)
        engine = open_engine(given)
        scene = await Scene.open(engine)
        await scene.submit("w1")
        await asyncio.to_thread(server.kill)
        for call in (scene.ledger.load, scene.leadership.acquire, lambda: scene.submit("w2"), scene.ledger.audit):
            with pytest.raises(StoreUnavailable):
                await call()
        assert await asyncio.to_thread(server.start) == url
        await scene.submit("w2")
        assert {w.uid for w in (await scene.ledger.load()).workloads} == {"w1", "w2"}
        await engine.dispose()
    finally:
        await asyncio.to_thread(server.stop)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_server_that_hangs_holds_nobody_for_long(tmp_path: Path, driver: str) -> None:
    server = EmbeddedPostgres(tmp_path / "pg", FAST)
    url = await asyncio.to_thread(server.start)
    pid = server._alive()
    assert pid is not None
    try:
        given = make_url(url).set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)
        engine = open_engine(given)
        async with transaction(engine) as connection:
            await connection.execute(text("SELECT 1"))
        stopped = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in stopped:
            process.suspend()
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            async with transaction(engine, limit=1.0) as connection:
                await connection.execute(text("SELECT 1"))
        assert time.monotonic() - started < store_engine.CALL_SECONDS
        for process in stopped:
            process.resume()
        async with transaction(engine) as connection:
            assert await connection.scalar(text("SELECT 1")) == 1
        await engine.dispose()
    finally:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            process.resume()
        await asyncio.to_thread(server.stop)


async def test_a_cancelled_call_leaves_the_pool_sound(scene: Scene) -> None:
    for delay in (0.0, 0.001, 0.003, 0.01, 0.03):
        task = asyncio.create_task(scene.cycle(submissions=[workload(f"w{i}") for i in range(200)]))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    results = await asyncio.gather(*(scene.ledger.load() for _ in range(10)))
    assert len({len(result.workloads) for result in results}) == 1
    assert await scene.ledger.advance(scene.epoch, [Move("x", 1, AttemptState.CREATED)], now=1.0) == []
