"""What queues have used before, read from the attempts on record."""

from collections.abc import Mapping

from sqlalchemy import Integer, Text, bindparam, insert, literal, select, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model.policy import Amounts, Cell
from queuectl.store import tables
from queuectl.store.rows import quota_to_json, rowset
from queuectl.store.tables import UnixTime

HALF_LIVES = 12  # what ended longer ago has less than a 4000th of its weight left

# Each attempt has held its quota from admitted_at to ended_at, and what it gave back before, until then;
# 2^-(age of its end) - 2^-(age of its begin), ages in half-lives, is the weight of that time. Beyond 1000 half-lives a
# power would underflow, which Postgres refuses.
_PAST = text(
    """
    SELECT queue, q ->> 0 AS flavor, q ->> 1 AS resource, sum((q ->> 2)::float8 * (
        power(2, -least(1000, greatest(0, extract(epoch FROM :now - until)::float8 / :half_life)))
        - power(2, -least(1000, greatest(0, extract(epoch FROM :now - admitted_at)::float8 / :half_life)))
    )) AS amount
    FROM (
        SELECT queue, admitted_at, ended_at AS until, quota FROM attempt WHERE ended_at > :since AND holds
        UNION ALL
        SELECT a.queue, a.admitted_at, g.at, g.quota FROM given_back g
        JOIN attempt a ON a.workload_uid = g.workload_uid AND a.number = g.attempt WHERE g.at > :since
    ) AS held CROSS JOIN LATERAL jsonb_array_elements(quota) AS q
    GROUP BY 1, 2, 3
    """
).bindparams(bindparam("now", type_=UnixTime), bindparam("since", type_=UnixTime))


async def past(connection: AsyncConnection, *, half_life: float, now: float) -> dict[str, dict[Cell, float]]:
    """Return what is over by ``now`` of what attempts held, in each queue's average of that time (``core.usage``)."""
    given = {"now": now, "since": now - HALF_LIVES * half_life, "half_life": half_life}
    found: dict[str, dict[Cell, float]] = {}
    for row in await connection.execute(_PAST, given):
        found.setdefault(row.queue, {})[row.flavor, row.resource] = row.amount
    return found


async def give_back(connection: AsyncConnection, parts: Mapping[tuple[str, int], Amounts], *, now: float) -> None:
    """Write down that attempts, by workload uid and number, hold this much less of their quota from now on."""
    if not parts:
        return
    given = rowset(
        [{"uid": uid, "attempt": n, "quota": quota_to_json(quota)} for (uid, n), quota in sorted(parts.items())],
        uid=Text,
        attempt=Integer,
        quota=JSONB,
    )
    source = select(given.c.uid, given.c.attempt, literal(now, UnixTime), given.c.quota)
    columns = ["workload_uid", "attempt", "at", "quota"]
    await connection.execute(insert(tables.given_back).from_select(columns, source))
