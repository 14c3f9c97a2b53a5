"""What a cycle records before it decides: room as it was seen, quota edits, submissions."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import BigInteger, Float, Text, and_, func, literal, or_, select
from sqlalchemy.dialects.postgresql import distinct_on, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model.lifecycle import Workload, WorkloadState
from queuectl.model.policy import Amounts
from queuectl.store import tables
from queuectl.store.events import Event
from queuectl.store.room import Key, bounded
from queuectl.store.rows import rowset


async def quota_edits(
    connection: AsyncConnection,
    quotas: Mapping[str, Amounts],
    gone: Collection[str],
    *,
    changed_by: Mapping[str, str],
    now: float,
) -> list[Event]:
    """Write a version of each nominal quota that is not as it last was, and return what to say of it."""
    edited = {*quotas, *gone}
    if not edited:
        return []
    before = await _last_nominal(connection, edited)
    after: dict[Key, int] = {
        (queue, *cell): bounded(nominal)
        for queue, vector in quotas.items()
        if queue not in gone
        for cell, nominal in vector.items()
    }
    columns = ["queue", "flavor", "resource", "from_nominal", "to_nominal", "changed_by"]
    rows = [
        dict(zip(columns, (*key, before.get(key), after.get(key), changed_by.get(key[0], "")), strict=True))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]
    if not rows:
        return []
    given = rowset(
        rows, queue=Text, flavor=Text, resource=Text, from_nominal=BigInteger, to_nominal=BigInteger, changed_by=Text
    )
    source = select(*(given.c[name] for name in columns), literal(now, tables.UnixTime))
    await connection.execute(insert(tables.quota_version).from_select([*columns, "changed_at"], source))
    return [Event("QuotaChanged", _sentence(row), facts=row) for row in rows]


async def _last_nominal(connection: AsyncConnection, queues: Collection[str]) -> dict[Key, int]:
    v = tables.quota_version
    key = (v.c.queue, v.c.flavor, v.c.resource)
    given = rowset([{"queue": queue} for queue in sorted(queues)], queue=Text)
    statement = (
        select(*key, v.c.to_nominal)
        .ext(distinct_on(*key))
        .where(v.c.queue.in_(select(given.c.queue)))
        .order_by(*key, v.c.id.desc())
    )
    rows = await connection.execute(statement)
    return {(row.queue, row.flavor, row.resource): row.to_nominal for row in rows if row.to_nominal is not None}


def _sentence(row: Mapping[str, Any]) -> str:
    before = "nothing" if row["from_nominal"] is None else row["from_nominal"]
    after = "nothing" if row["to_nominal"] is None else row["to_nominal"]
    who = row["changed_by"] or "somebody unknown"
    return (
        f"Quota of queue {row['queue']} in flavor {row['flavor']}: {row['resource']} from {before} to {after} by {who}."
    )


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
