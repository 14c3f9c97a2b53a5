"""The append-only record of what happened."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Integer, Text, insert, literal, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model.reasons import Why
from queuectl.store import tables
from queuectl.store.rows import clean, plain, rowset


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, to a workload or (without uid) to the cluster."""

    kind: str
    message: str
    uid: str | None = None
    attempt: int | None = None
    facts: Mapping[str, object] = field(default_factory=dict)


def told(why: Why, uid: str, attempt: int | None) -> Event:
    """Return the event of a reason."""
    return Event(why.code, str(why), uid, attempt, why.facts)


async def record(connection: AsyncConnection, epoch: int, events: Sequence[Event], *, now: float) -> None:
    """Append the events in their order, in one statement."""
    if not events:
        return
    given = rowset(
        [
            {
                "n": n,
                "uid": event.uid,
                "attempt": event.attempt,
                "kind": event.kind,
                "message": clean(event.message),
                "facts": plain(event.facts),
            }
            for n, event in enumerate(events)
        ],
        n=Integer,
        uid=Text,
        attempt=Integer,
        kind=Text,
        message=Text,
        facts=JSONB,
    )
    columns = ["at", "workload_uid", "attempt", "kind", "message", "facts", "epoch"]
    source = select(
        literal(now, tables.UnixTime),
        given.c.uid,
        given.c.attempt,
        given.c.kind,
        given.c.message,
        given.c.facts,
        literal(epoch),
    ).order_by(given.c.n)
    await connection.execute(insert(tables.event).from_select(columns, source))
