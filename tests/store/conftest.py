from collections.abc import AsyncIterator

import pytest
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine

from queuectl.store.engine import open_engine
from tests.store.scene import Scene
from tests.support.databases import database_url, postgres

__all__ = ["database_url", "driver_url", "engine", "postgres", "scene"]


@pytest.fixture(params=["psycopg", "asyncpg"])
def driver_url(request: pytest.FixtureRequest, database_url: str) -> str:
    url = make_url(database_url).set(drivername=f"postgresql+{request.param}")
    return url.render_as_string(hide_password=False)


@pytest.fixture
async def engine(driver_url: str) -> AsyncIterator[AsyncEngine]:
    engine = open_engine(driver_url)
    yield engine
    await engine.dispose()


@pytest.fixture
async def scene(engine: AsyncEngine) -> Scene:
    return await Scene.open(engine)
