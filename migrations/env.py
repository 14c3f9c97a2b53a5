"""Run by alembic: migrate over the connection that it is given, in one transaction."""

from typing import Literal

from alembic import context
from alembic.autogenerate.api import AutogenContext
from sqlalchemy import Connection

from queuectl.store.tables import UnixTime, metadata


def render_item(kind: str, item: object, _: AutogenContext) -> str | Literal[False]:
    """Write our column types as what they are in Postgres, so that a migration stands on its own."""
    if kind == "type" and isinstance(item, UnixTime):
        return "sa.DateTime(timezone=True)"
    return False


def run() -> None:
    connection = context.config.attributes.get("connection")
    if not isinstance(connection, Connection):
        message = "alembic is run by queuectl.store.migrate here: 'queuectl db upgrade'"
        raise TypeError(message)
    context.configure(
        connection=connection,
        target_metadata=metadata,
        render_item=render_item,
        compare_server_default=True,
    )
    with context.begin_transaction():
        context.run_migrations()


run()
