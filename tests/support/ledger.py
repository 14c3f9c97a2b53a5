"""What the ledger says of a stage."""

from typing import Any

from sqlalchemy import text

from queuectl.store.engine import open_engine
from queuectl.store.ledger import Ledger
from tests.support.eventually import LIMIT_SECONDS, eventually
from tests.support.stage import Stage

_HELD = """
SELECT 'node ' || node || ' ' || resource AS what, reserved FROM node_room WHERE reserved > 0 AND node LIKE :mine
UNION ALL
SELECT 'queue ' || queue || ' ' || resource, reserved FROM quota_room WHERE reserved > 0 AND queue LIKE :mine
UNION ALL
SELECT 'attempt ' || attempt.number || ' of ' || name, 1
FROM attempt JOIN workload ON uid = workload_uid WHERE attempt.state <> 'Ended' AND namespace LIKE :mine
"""


async def rows(stage: Stage, query: str, **values: Any) -> list[dict[str, Any]]:
    engine = open_engine(stage.database_url)
    try:
        async with engine.connect() as connection:
            return [dict(row) for row in (await connection.execute(text(query), values)).mappings()]
    finally:
        await engine.dispose()


async def execute(stage: Stage, statement: str) -> None:
    engine = open_engine(stage.database_url)
    try:
        async with engine.begin() as connection:
            await connection.execute(text(statement))
    finally:
        await engine.dispose()


async def audit(stage: Stage) -> list[str]:
    engine = open_engine(stage.database_url)
    try:
        return await Ledger(engine).audit()
    finally:
        await engine.dispose()


async def until_free(stage: Stage, *, everywhere: bool = False, seconds: float = LIMIT_SECONDS) -> None:
    """Wait until nothing of the stage, or nothing at all, holds room; the ledger must never contradict itself."""
    held: list[dict[str, Any]] = []

    async def free() -> bool:
        nonlocal held
        assert await audit(stage) == []
        held = await rows(stage, _HELD, mine="%" if everywhere else f"{stage.name}%")
        return not held

    try:
        await eventually(free, "the ledger is free", seconds=seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}: {held}") from None


async def history(stage: Stage, job: str) -> list[str]:
    """Return the kinds of events of a job's workload, oldest first."""
    query = """
        SELECT kind FROM event JOIN workload ON uid = workload_uid
        WHERE namespace = :namespace AND name = :name ORDER BY event.id
    """
    return [row["kind"] for row in await rows(stage, query, namespace=stage.namespace, name=job)]
