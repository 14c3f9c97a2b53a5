"""A real Postgres for the session, and a migrated database of its own for every test that asks.

Import the fixtures into a conftest: ``from tests.support.databases import database_url, postgres``.
Set TEST_DATABASE_URL to a superuser's URL to test against another server than the embedded one.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import make_url

from queuectl.store import migrate
from queuectl.store.embedded import EmbeddedPostgres

FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "max_connections": "100"}
TEMPLATE = "queuectl_template"


class Databases:
    """Makes databases on one server. ``url`` is a superuser's."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._made = False

    def execute(self, *statements: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def named(self, name: str) -> str:
        return make_url(self.url).set(database=name).render_as_string(hide_password=False)

    def empty(self) -> AbstractContextManager[str]:
        return self._like("template0")

    def migrated(self) -> AbstractContextManager[str]:
        if not self._made:
            self.execute(f"DROP DATABASE IF EXISTS {TEMPLATE} WITH (FORCE)", f"CREATE DATABASE {TEMPLATE}")
            migrate.upgrade(self.named(TEMPLATE))
            self._made = True
        return self._like(TEMPLATE)

    @contextmanager
    def _like(self, template: str) -> Iterator[str]:
        name = f"test_{uuid4().hex[:12]}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        try:
            yield self.named(name)
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def embedded_server() -> Iterator[EmbeddedPostgres]:
    """Run a Postgres that is fast and forgets on a power cut.

    Not in pytest's own folder: another pytest that starts meanwhile closes that to the server's system user.
    """
    with TemporaryDirectory(prefix="queuectl-postgres-") as folder:
        server = EmbeddedPostgres(Path(folder), FAST)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Databases]:
    """The session's server."""
    if url := os.environ.get("TEST_DATABASE_URL"):
        yield Databases(url)
        return
    with embedded_server() as server:
        yield Databases(server.url)


@pytest.fixture
def database_url(postgres: Databases) -> Iterator[str]:
    """A migrated database of the test's own."""
    with postgres.migrated() as url:
        yield url
