"""The ledger's schema, brought up to date by alembic.

To make a revision after a change of ``tables.py`` (DATABASE_URL names an up-to-date scratch database)::

    python -m queuectl.store.migrate "say what changes"

writes ``migrations/versions/NNNN_say_what_changes.py`` with what alembic sees; read it, and add what it can't see
(constraints with CHECK, moved data).
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, create_engine, pool, text
from sqlalchemy.exc import InterfaceError, OperationalError
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

import queuectl
from queuectl.store.engine import StoreUnavailable, parse_url, psycopg_arguments

LOCK_SECONDS = 60  # longest wait for another process that migrates
_LOCK = 0x7175657565  # "queue"; any number that all of us agree on
_STATEMENT_MILLISECONDS = 600_000


class SchemaNewer(Exception):  # noqa: N818
    """The database was written by a newer queuectl."""


def upgrade(url: str) -> None:
    """Bring the schema up to date; safe when several processes do it at once. Blocks: call it in a thread.

    Raises StoreUnavailable, also when another process holds the lock for more than a minute, and SchemaNewer.
    """
    with _connected(url) as connection:
        _take_lock(connection)
        try:
            _refuse_newer(connection)
            connection.commit()
            command.upgrade(_config(connection), "head")
            connection.commit()
        finally:
            connection.rollback()
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _LOCK})
            connection.commit()


def current(url: str) -> str | None:
    """Return the database's revision, None when it is empty. Blocks.

    Raises StoreUnavailable, and SchemaNewer when this code doesn't know the revision.
    """
    with _connected(url) as connection:
        return _refuse_newer(connection)


def head() -> str:
    """Return the revision that this code needs."""
    found = ScriptDirectory.from_config(_config(None)).get_current_head()
    if found is None:
        raise FileNotFoundError(f"no migrations in {migrations_folder()}; reinstall queuectl")
    return found


def migrations_folder() -> Path:
    """Return where the migrations are: in the installed package, or beside it in a checkout."""
    package = Path(queuectl.__file__).parent
    shipped = package / "migrations"
    return shipped if shipped.is_dir() else package.parent / "migrations"


def _config(connection: Connection | None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.set_main_option("file_template", "%%(rev)s_%%(slug)s")
    if connection is not None:
        config.attributes["connection"] = connection
    return config


@contextmanager
def _connected(url: str) -> Iterator[Connection]:
    engine = create_engine(
        parse_url(url).set(drivername="postgresql+psycopg"), connect_args=psycopg_arguments(), poolclass=pool.NullPool
    )
    try:
        with engine.connect() as connection:
            # Building an index on a large table may take its time; the lock limits stay as they are.
            connection.execute(text(f"SET statement_timeout = {_STATEMENT_MILLISECONDS}"))
            connection.commit()
            yield connection
    except (OperationalError, InterfaceError) as error:
        raise StoreUnavailable(f"Postgres is not available: {error.orig}") from error
    finally:
        engine.dispose()


def _take_lock(connection: Connection) -> None:
    def attempt() -> bool:
        taken = bool(connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _LOCK}))
        connection.commit()
        return taken

    taken = Retrying(
        retry=retry_if_result(lambda taken: not taken),
        stop=stop_after_delay(LOCK_SECONDS),
        wait=wait_fixed(0.2),
        retry_error_callback=lambda _: False,
    )(attempt)
    if not taken:
        raise StoreUnavailable(f"another process has been migrating this database for {LOCK_SECONDS} s")


def _refuse_newer(connection: Connection) -> str | None:
    found = MigrationContext.configure(connection).get_current_revision()
    if found is not None:
        try:
            ScriptDirectory.from_config(_config(None)).get_revision(found)
        except CommandError as error:
            raise SchemaNewer(
                f"the database is at revision {found}, this queuectl knows {head()}: use the queuectl that wrote it, or a newer one"
            ) from error
    return found


def _make_revision(message: str) -> None:
    folder = migrations_folder() / "versions"
    numbers = [int(match[0]) for path in folder.glob("*.py") if (match := re.match(r"\d+", path.name))]
    with _connected(os.environ["DATABASE_URL"]) as connection:
        command.revision(_config(connection), message, autogenerate=True, rev_id=f"{max(numbers, default=0) + 1:04d}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or "DATABASE_URL" not in os.environ:  # noqa: PLR2004 - the program and its one argument
        sys.exit("usage: DATABASE_URL=... python -m queuectl.store.migrate MESSAGE")
    _make_revision(sys.argv[1])
