"""What a cycle records before it decides: room as it was seen, quota edits, submissions."""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from sqlalchemy import BigInteger, Float, Text, and_, func, literal, or_, select
from sqlalchemy.dialects.postgresql import distinct_on, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model.lifecycle import Workload, WorkloadState
from queuectl.model.policy import Cell, Quota
from queuectl.store import tables
from queuectl.store.events import Event
from queuectl.store.room import Key, bounded
from queuectl.store.rows import clean, rowset

_PARTS = ("nominal", "borrowing_limit", "lending_limit")
_COLUMNS = [f"{way}_{part}" for part in _PARTS for way in ("from", "to")]
_Parts = tuple[int | None, ...]
_NO_QUOTA: _Parts = (None, None, None)


async def quota_edits(
    connection: AsyncConnection,
    quotas: Mapping[str, Mapping[Cell, Quota]],
    gone: Collection[str],
    *,
    by: Mapping[str, str],
    because: Mapping[str, str],
    now: float,
) -> list[Event]:
    """Write a version of each quota that is not as it last was, and return what to say of it.

    ``by`` and ``because``: who changed each queue, and why.
    """
    edited = {*quotas, *gone}
    if not edited:
        return []
    before = await _last(connection, edited)
    after: dict[Key, _Parts] = {
        (queue, *cell): tuple(None if (part := getattr(quota, name)) is None else bounded(part) for name in _PARTS)
        for queue, vector in quotas.items()
        if queue not in gone
        for cell, quota in vector.items()
    }
    rows = []
    for key in sorted({*before, *after}):
        old, new = before.get(key, _NO_QUOTA), after.get(key, _NO_QUOTA)
        if old != new:
            row = dict(zip(("queue", "flavor", "resource"), key, strict=True))
            row |= {"changed_by": clean(by.get(key[0], "")), "why": clean(because.get(key[0], ""))}
            rows.append(row | dict(zip(_COLUMNS, chain.from_iterable(zip(old, new, strict=True)), strict=True)))
    if not rows:
        return []
    texts: dict[str, type[Text]] = dict.fromkeys(("queue", "flavor", "resource", "changed_by", "why"), Text)
    given = rowset(rows, **texts, **dict.fromkeys(_COLUMNS, BigInteger))
    columns = [*texts, *_COLUMNS]
    source = select(*(given.c[name] for name in columns), literal(now, tables.UnixTime))
    await connection.execute(insert(tables.quota_version).from_select([*columns, "changed_at"], source))
    return [Event("QuotaChanged", _sentence(row), facts=row) for row in rows]


async def _last(connection: AsyncConnection, queues: Collection[str]) -> dict[Key, _Parts]:
    v = tables.quota_version
    key = (v.c.queue, v.c.flavor, v.c.resource)
    given = rowset([{"queue": queue} for queue in sorted(queues)], queue=Text)
    statement = (
        select(*key, *(v.c[f"to_{part}"] for part in _PARTS))
        .ext(distinct_on(*key))
        .where(v.c.queue.in_(select(given.c.queue)))
        .order_by(*key, v.c.id.desc())
    )
    rows = await connection.execute(statement)
    return {tuple(row[:3]): tuple(row[3:]) for row in rows if row.to_nominal is not None}


def _sentence(row: Mapping[str, Any]) -> str:
    changes = []
    for part, none in zip(_PARTS, ("nothing", "none", "none"), strict=True):
        old, new = row[f"from_{part}"], row[f"to_{part}"]
        if old != new:
            name = "" if part == "nominal" else part.replace("_", " ") + " "
            changes.append(f"{name}from {none if old is None else old} to {none if new is None else new}")
    who = row["changed_by"] or "somebody unknown"
    because = f": {row['why']}" if row["why"] else "."
    return f"Quota of queue {row['queue']} in flavor {row['flavor']}: {row['resource']} {', '.join(changes)} by {who}{because}"


async def submissions(connection: AsyncConnection, workloads: Sequence[Workload]) -> None:
    """Write new workloads, and the queue and priority of those that still wait."""
    if not workloads:
        return
    columns = ["uid", "namespace", "name", "queue", "priority", "submitted_at", "seq", "attempt"]
    # By uid, the last one counts: one statement may touch a row only once.
    rows = {workload.uid: {name: getattr(workload, name) for name in columns} for workload in workloads}
    given = rowset(
        list(rows.values()),
        uid=Text,
        namespace=Text,
        name=Text,
        queue=Text,
        priority=BigInteger,
        submitted_at=Float(53),
        seq=BigInteger,
        attempt=BigInteger,
    )
    values = [func.to_timestamp(given.c[name]) if name == "submitted_at" else given.c[name] for name in columns]
    statement = insert(tables.workload).from_select(columns, select(*values).order_by(given.c.uid))
    new, w = statement.excluded, tables.workload
    await connection.execute(
        statement.on_conflict_do_update(
            index_elements=["uid"],
            set_={"queue": new.queue, "priority": new.priority},
            where=and_(
                w.c.state == WorkloadState.QUEUED.value, or_(w.c.queue != new.queue, w.c.priority != new.priority)
            ),
        )
    )
