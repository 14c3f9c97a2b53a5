"""What nodes have done to gangs, on record."""

from collections.abc import Mapping, Sequence

from sqlalchemy import Float, Integer, Text, func, literal, select, update
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model.suspects import Offence
from queuectl.store import tables
from queuectl.store.leadership import fence
from queuectl.store.rows import rowset, why_from_json, why_to_json

MAX_LOADED = 2000  # the latest


async def offend(
    connection: AsyncConnection, epoch: int, offences: Sequence[Offence], forgiven: Mapping[str, float]
) -> None:
    """Write down offences, each once, and which earlier ones are forgiven: of each node those until a time.

    Raises Fenced.
    """
    await fence(connection, epoch)
    o = tables.offence
    if forgiven:
        given = rowset([{"node": node, "at": at} for node, at in sorted(forgiven.items())], node=Text, at=Float(53))
        until = func.to_timestamp(given.c.at)
        statement = update(o).values(forgiven_at=until)
        await connection.execute(statement.where(o.c.node == given.c.node, o.c.at <= until, o.c.forgiven_at.is_(None)))
    if offences:
        given = rowset(
            [
                {
                    "n": n, "node": one.node, "at": one.at, "why": why_to_json(one.why), "uid": one.uid,
                    "attempt": one.attempt,
                }
                for n, one in enumerate(offences)
            ],
            n=Integer, node=Text, at=Float(53), why=JSONB, uid=Text, attempt=Integer,
        )  # fmt: skip
        source = select(
            given.c.node, func.to_timestamp(given.c.at), given.c.why, given.c.uid, given.c.attempt, literal(epoch)
        ).order_by(given.c.n)
        columns = ["node", "at", "why", "workload_uid", "attempt", "epoch"]
        await connection.execute(insert(o).from_select(columns, source).on_conflict_do_nothing())


async def load(connection: AsyncConnection, *, since: float) -> list[Offence]:
    """Return the offences since a time (Unix seconds) that nobody has forgiven, the oldest first."""
    o = tables.offence
    statement = (
        select(o)
        .where(o.c.at > literal(since, tables.UnixTime), o.c.forgiven_at.is_(None))
        .order_by(o.c.at.desc(), o.c.id.desc())
        .limit(MAX_LOADED)
    )
    found = [
        Offence(row["node"], row["at"], why_from_json(row["why"]), row["workload_uid"], row["attempt"])
        for row in (await connection.execute(statement)).mappings()
    ]
    return found[::-1]
