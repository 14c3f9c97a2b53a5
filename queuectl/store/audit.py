"""Everything in the ledger that would contradict itself, said in sentences."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_BY_NODE = """
SELECT r.node, q ->> 0 AS resource, sum((q ->> 1)::numeric * ({pods})) AS amount
FROM reservation r JOIN attempt a ON a.workload_uid = r.workload_uid AND a.number = r.attempt
CROSS JOIN LATERAL jsonb_array_elements(r.requests) AS q
WHERE r.freed_at IS NULL AND a.{counted} GROUP BY 1, 2
"""
_BY_QUEUE = """
SELECT charged.queue, q ->> 0 AS flavor, q ->> 1 AS resource, sum((q ->> 2)::numeric) AS amount
FROM attempt a CROSS JOIN LATERAL unnest(a.charged) AS charged (queue)
CROSS JOIN LATERAL ({amounts}) AS given (q)
WHERE a.state <> 'Ended' AND a.{counted} GROUP BY 1, 2, 3
"""
_NODE_SUMS = """
SELECT format('Node %s: %s of %s is {sum}, attempts {verb} %s.', node, coalesce(n.{sum}, 0), resource,
              coalesce(h.amount, 0))
FROM node_room n FULL JOIN ({attempts}) h USING (node, resource)
WHERE coalesce(n.{sum}, 0) <> coalesce(h.amount, 0)
"""
_QUEUE_SUMS = """
SELECT format('Queue %s: %s of %s in flavor %s is {sum}, attempts {verb} %s.', queue, coalesce(n.{sum}, 0), resource,
              flavor, coalesce(h.amount, 0))
FROM quota_room n FULL JOIN ({attempts}) h USING (queue, flavor, resource)
WHERE coalesce(n.{sum}, 0) <> coalesce(h.amount, 0)
"""
_WRONG = """
WHERE reserved < 0 OR promised < 0 OR room < 0
    OR deficit <> greatest(0, reserved::numeric - room, promised::numeric - room)
"""
_ALL = "SELECT jsonb_array_elements(a.quota)"
_LEAVING = "SELECT jsonb_set(e, '{2}', to_jsonb(-(e ->> 2)::numeric)) FROM jsonb_array_elements(a.leaving) AS e"
_RESERVED = {"sum": "reserved", "counted": "holds", "verb": "hold", "pods": "r.pods", "amounts": _ALL}
_PROMISED = {
    "sum": "promised", "counted": "promised", "verb": "are promised", "pods": "r.pods - r.leaving",
    "amounts": f"{_ALL} UNION ALL {_LEAVING}",
}  # fmt: skip
# Each query returns one column: the sentence.
_CHECKS = (
    *(
        sums.format(attempts=attempts.format(**kind), **kind)
        for sums, attempts in ((_NODE_SUMS, _BY_NODE), (_QUEUE_SUMS, _BY_QUEUE))
        for kind in (_RESERVED, _PROMISED)
    ),
    f"""
    SELECT format('Node %s, %s: reserved %s, promised %s, room %s, deficit %s.', node, resource, reserved, promised,
                  room, deficit)
    FROM node_room {_WRONG}
    """,  # noqa: S608 - constants
    f"""
    SELECT format('Queue %s, flavor %s, %s: reserved %s, promised %s, room %s, deficit %s.', queue, flavor, resource,
                  reserved, promised, room, deficit)
    FROM quota_room {_WRONG}
    """,  # noqa: S608 - constants
    """
    SELECT format('Attempt %s of workload %s is claimed by attempt %s of workload %s, which does not wait.', v.number,
                  v.workload_uid, c.number, c.workload_uid)
    FROM attempt v JOIN attempt c ON c.workload_uid = v.claimed_by_uid AND c.number = v.claimed_by_attempt
    WHERE v.state <> 'Ended' AND (c.holds OR c.state = 'Ended')
    """,
    """
    SELECT format('Attempt %s of workload %s is %s and holds no reservation.', a.number, a.workload_uid, a.state)
    FROM attempt a WHERE a.state <> 'Ended' AND NOT EXISTS (
        SELECT FROM reservation r
        WHERE r.workload_uid = a.workload_uid AND r.attempt = a.number AND r.freed_at IS NULL)
    """,
    """
    SELECT format('Attempt %s of workload %s has ended and still holds %s reservations.', a.number, a.workload_uid,
                  count(*))
    FROM attempt a JOIN reservation r ON r.workload_uid = a.workload_uid AND r.attempt = a.number
    WHERE a.state = 'Ended' AND r.freed_at IS NULL GROUP BY a.number, a.workload_uid
    """,
    """
    SELECT format('Workload %s is %s and has %s active attempts.', w.uid, w.state, count(a.number))
    FROM workload w LEFT JOIN attempt a ON a.workload_uid = w.uid AND a.state <> 'Ended'
    GROUP BY w.uid HAVING count(a.number) <> CASE w.state WHEN 'Active' THEN 1 ELSE 0 END
    """,
    """
    SELECT format('Workload %s counts %s attempts, the last one known is %s.', w.uid, w.attempt,
                  coalesce(max(a.number), 0))
    FROM workload w LEFT JOIN attempt a ON a.workload_uid = w.uid
    GROUP BY w.uid HAVING w.attempt <> coalesce(max(a.number), 0)
    """,
    """
    SELECT format('Attempt %s of workload %s is %s and its open step is %s.', a.number, a.workload_uid, a.state,
                  coalesce(s.step, 'none'))
    FROM attempt a
    LEFT JOIN step s ON s.workload_uid = a.workload_uid AND s.attempt = a.number AND s.done_at IS NULL
    WHERE coalesce(s.step, '') <> CASE a.state WHEN 'Reserved' THEN 'Create' WHEN 'Created' THEN 'Ungate'
        WHEN 'Shrinking' THEN 'Shrink' WHEN 'Repairing' THEN 'Shrink' WHEN 'Growing' THEN 'Grow'
        WHEN 'Checkpointing' THEN 'Ask' WHEN 'Ending' THEN 'Remove' ELSE '' END
    """,
    """
    SELECT format('Attempt %s of workload %s is %s, and %s of its pods leave it.', a.number, a.workload_uid, a.state,
                  sum(r.leaving))
    FROM attempt a JOIN reservation r ON r.workload_uid = a.workload_uid AND r.attempt = a.number
    WHERE a.state <> 'Ended' AND r.freed_at IS NULL
    GROUP BY a.number, a.workload_uid, a.state, a.leaving
    HAVING (a.state = 'Shrinking' AND sum(r.leaving) = 0) OR (sum(r.leaving) > 0) <> (a.leaving IS NOT NULL)
        OR sum(r.leaving) = sum(r.pods)
    """,
)


async def audit(connection: AsyncConnection) -> list[str]:
    """Return a sentence about each broken invariant."""
    return [sentence for check in _CHECKS for sentence in (await connection.scalars(text(check))).all()]
