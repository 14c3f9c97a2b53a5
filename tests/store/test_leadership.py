"""Leadership and the fence, on both drivers."""

import asyncio
import time
from uuid import uuid4

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from queuectl.store.engine import Fenced, StoreUnavailable, WrongCluster
from queuectl.store.leadership import Leadership, Term, fence
from queuectl.store.ledger import Ledger
from tests.store.scene import Scene, workload
from tests.support.eventually import eventually


async def test_one_leads_until_it_resigns(engine: AsyncEngine) -> None:
    a, b = Leadership(engine, holder="a"), Leadership(engine, holder="b")
    assert await a.current() is None
    started = time.monotonic()
    term = await a.acquire()
    assert term is not None
    assert term.epoch == 1
    assert started + 5.0 <= term.trusted_until <= time.monotonic() + 5.0
    assert term.trusted()
    assert await b.acquire() is None
    current = await b.current()
    assert current is not None
    assert current[:2] == ("a", 1)
    assert 0 < current[2] <= 6.0

    await b.resign(1)  # not b's to give up
    assert await b.acquire() is None
    await a.resign(1)
    assert await a.current() is None
    assert await a.renew(1) is None
    with pytest.raises(Fenced):
        await Ledger(engine).cycle(1, plan_id=uuid4(), now=0.0, submissions=[workload("w")])
    taken = await b.acquire()
    assert taken is not None
    assert taken.epoch > 1


async def test_an_expired_lease_is_taken_over_and_can_not_be_renewed(engine: AsyncEngine) -> None:
    a, b = Leadership(engine, holder="a", ttl=0.3, margin=0.1), Leadership(engine, holder="b")
    term = await a.acquire()
    assert term is not None
    taken = await eventually(b.acquire, "b leads", seconds=5)
    assert taken is not None
    assert taken.epoch == 2
    assert not term.trusted()
    assert await a.renew(1) is None
    assert await a.renew(2) is None
    assert await a.acquire() is None


async def test_renewal_keeps_the_epoch_and_prolongs_the_trust(engine: AsyncEngine) -> None:
    a = Leadership(engine, holder="a")
    first = await a.acquire()
    assert first is not None
    renewed = await a.renew(first.epoch)
    assert renewed is not None
    assert renewed.epoch == first.epoch
    assert renewed.trusted_until > first.trusted_until


async def test_acquiring_again_begins_a_new_epoch(engine: AsyncEngine) -> None:
    a = Leadership(engine, holder="a")
    assert [term.epoch for term in (await a.acquire(), await a.acquire()) if term] == [1, 2]


async def test_only_one_of_many_takes_over(engine: AsyncEngine) -> None:
    candidates = [Leadership(engine, holder=f"c{i}") for i in range(8)]
    terms = await asyncio.gather(*(candidate.acquire() for candidate in candidates))
    assert len([term for term in terms if term]) == 1


async def test_a_fenced_transaction_holds_off_a_takeover_but_no_renewal(engine: AsyncEngine) -> None:
    a, b = Leadership(engine, holder="a", ttl=1.0, margin=0.1), Leadership(engine, holder="b", ttl=10)
    assert await a.acquire()
    async with engine.connect() as connection, connection.begin():
        await fence(connection, 1)
        assert await a.renew(1)  # passes
        await eventually(lambda: _nobody(a), "a's lease has expired", seconds=5)
        takeover = asyncio.create_task(b.acquire())
        await eventually(lambda: _waiting(engine), "the takeover waits for the transaction")
        assert not takeover.done()
    term = await takeover
    assert term is not None
    assert term.epoch == 2
    async with engine.connect() as connection:
        with pytest.raises(Fenced):
            await fence(connection, 1)


async def _nobody(leadership: Leadership) -> bool:
    return await leadership.current() is None


async def _waiting(engine: AsyncEngine) -> bool:
    async with engine.connect() as connection:
        return bool((await connection.exec_driver_sql("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar())


async def test_a_held_row_makes_a_renewal_fail_in_time(engine: AsyncEngine) -> None:
    a = Leadership(engine, holder="a", ttl=1.0, margin=0.1)
    assert await a.acquire()
    async with engine.connect() as connection, connection.begin():
        await connection.exec_driver_sql("SELECT 1 FROM leadership FOR UPDATE")
        with pytest.raises(StoreUnavailable):
            await a.renew(1)
    assert await a.renew(1)


async def test_two_ledgers_at_once_write_under_one_epoch_only(engine: AsyncEngine) -> None:
    old = await Scene.open(engine, holder="same")
    new = await Scene.open(engine, holder="same")
    results = await asyncio.gather(
        *(scene.cycle(submissions=[workload(f"w{i}")]) for i, scene in enumerate((old, new) * 5)),
        return_exceptions=True,
    )
    assert [isinstance(result, Fenced) for result in results] == [True, False] * 5
    assert len((await new.ledger.load()).workloads) == 5


def test_bad_arguments_are_named() -> None:
    engine: AsyncEngine = None  # type: ignore[assignment]  # nothing connects
    with pytest.raises(ValueError, match="holder is empty"):
        Leadership(engine, holder="")
    with pytest.raises(ValueError, match=r"margin is 6.0 s"):
        Leadership(engine, holder="a", ttl=6.0, margin=6.0)
    assert not Term(1, time.monotonic() - 1).trusted()


async def test_a_ledger_belongs_to_one_cluster(engine: AsyncEngine) -> None:
    ledger = Ledger(engine)
    await ledger.bind("uid-1")
    await ledger.bind("uid-1")
    with pytest.raises(WrongCluster, match=r"belongs to cluster uid-1, and this is cluster uid-2"):
        await ledger.bind("uid-2")
