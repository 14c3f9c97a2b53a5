"""What queues have used before, read from the attempts on record, and from what they gave back before their end."""

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model.policy import Cell
from queuectl.store.tables import UnixTime

HALF_LIVES = 12  # what ended longer ago has less than a 4000th of its weight left

# Each attempt held its quota from admitted_at to ended_at, and what it gave back earlier until then; 2^-(age of its end) - 2^-(age of its begin), ages in
# half-lives, is the weight of that time. Beyond 1000 half-lives a power would underflow, which Postgres refuses.
_PAST = text(
    """
    SELECT held.queue, q ->> 0 AS flavor, q ->> 1 AS resource, sum((q ->> 2)::float8 * (
        power(2, -least(1000, greatest(0, extract(epoch FROM :now - held.until)::float8 / :half_life)))
        - power(2, -least(1000, greatest(0, extract(epoch FROM :now - held.since)::float8 / :half_life)))
    )) AS amount
    FROM (
        SELECT queue, quota, admitted_at AS since, ended_at AS until FROM attempt WHERE ended_at > :since AND holds
        UNION ALL
        SELECT a.queue, f.quota, a.admitted_at, f.at
        FROM freed f JOIN attempt a ON a.workload_uid = f.workload_uid AND a.number = f.attempt WHERE f.at > :since
    ) AS held CROSS JOIN LATERAL jsonb_array_elements(held.quota) AS q
    GROUP BY 1, 2, 3
    """
).bindparams(bindparam("now", type_=UnixTime), bindparam("since", type_=UnixTime))


async def past(connection: AsyncConnection, *, half_life: float, now: float) -> dict[str, dict[Cell, float]]:
    """Return what is held no more by ``now`` is in each queue's average of that time (``core.usage``)."""
    given = {"now": now, "since": now - HALF_LIVES * half_life, "half_life": half_life}
    found: dict[str, dict[Cell, float]] = {}
    for row in await connection.execute(_PAST, given):
        found.setdefault(row.queue, {})[row.flavor, row.resource] = row.amount
    return found
