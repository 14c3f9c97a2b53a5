"""What queues have used before, read from the attempts on record."""

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model.policy import Cell
from queuectl.store.tables import UnixTime

HALF_LIVES = 12  # what ended longer ago has less than a 4000th of its weight left

# Each attempt held its quota from admitted_at to ended_at; 2^-(age of its end) - 2^-(age of its begin), ages in
# half-lives, is the weight of that time. Beyond 1000 half-lives a power would underflow, which Postgres refuses.
_PAST = text(
    """
    SELECT a.queue, q ->> 0 AS flavor, q ->> 1 AS resource, sum((q ->> 2)::float8 * (
        power(2, -least(1000, greatest(0, extract(epoch FROM :now - a.ended_at)::float8 / :half_life)))
        - power(2, -least(1000, greatest(0, extract(epoch FROM :now - a.admitted_at)::float8 / :half_life)))
    )) AS amount
    FROM attempt a CROSS JOIN LATERAL jsonb_array_elements(a.quota) AS q
    WHERE a.ended_at > :since AND a.holds
    GROUP BY 1, 2, 3
    """
).bindparams(bindparam("now", type_=UnixTime), bindparam("since", type_=UnixTime))


async def past(connection: AsyncConnection, *, half_life: float, now: float) -> dict[str, dict[Cell, float]]:
    """Return what attempts that have ended by ``now`` are in each queue's average of that time (``core.usage``)."""
    given = {"now": now, "since": now - HALF_LIVES * half_life, "half_life": half_life}
    found: dict[str, dict[Cell, float]] = {}
    for row in await connection.execute(_PAST, given):
        found.setdefault(row.queue, {})[row.flavor, row.resource] = row.amount
    return found
