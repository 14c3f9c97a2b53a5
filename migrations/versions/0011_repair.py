"""Attempts whose lost pods are replaced while they run; pods that come are named one by one.

Revision: 0011, after 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

STATES = "'Claimed', 'Reserved', 'Created', 'Ungated', 'Running', 'Shrinking', {}'Growing', 'Ending', 'Ended'"
LEAVING = "leaving IS NULL OR (promised AND state IN ('Shrinking', {}'Ending', 'Ended'))"
# The last pods of each role, of those that it has and those that are done.
NAMED = """
UPDATE attempt a SET coming = (
    SELECT coalesce(jsonb_agg(jsonb_build_array(c.role, i)), '[]')
    FROM jsonb_each_text(a.coming) AS c (role, pods)
    CROSS JOIN LATERAL (
        SELECT (SELECT coalesce(sum(r.pods), 0) FROM reservation r
                WHERE r.workload_uid = a.workload_uid AND r.attempt = a.number AND r.role = c.role AND r.freed_at IS NULL)
             + (SELECT count(*) FROM jsonb_array_elements(a.done) AS d WHERE d ->> 0 = c.role) AS pods
    ) AS everything
    CROSS JOIN LATERAL generate_series(everything.pods - c.pods::int, everything.pods - 1) AS i
)
"""
COUNTED = """
UPDATE attempt a SET coming = (
    SELECT coalesce(jsonb_object_agg(role, pods), '{}')
    FROM (SELECT c ->> 0 AS role, count(*) AS pods FROM jsonb_array_elements(a.coming) AS c GROUP BY 1) AS counted
)
"""


def upgrade() -> None:
    _change("'Repairing', ", NAMED, "'[]'", "coming = '[]' OR state IN ('Repairing', 'Growing')")


def downgrade() -> None:
    # Refused by Postgres as long as an attempt is Repairing. One that is Growing by pods in the stead of lost ones is read
    # as growing by its last ones.
    _change("", COUNTED, "'{}'", "coming = '{}' OR state = 'Growing'")


def _change(state: str, move: str, default: str, coming: str) -> None:
    op.drop_constraint(op.f("ck_attempt_coming"), "attempt")
    op.execute(move)
    op.alter_column("attempt", "coming", server_default=sa.text(default))
    op.create_check_constraint(op.f("ck_attempt_coming"), "attempt", coming)
    for name, rule in (("state", f"state IN ({STATES.format(state)})"), ("leaving", LEAVING.format(state))):
        op.drop_constraint(op.f(f"ck_attempt_{name}"), "attempt")
        op.create_check_constraint(op.f(f"ck_attempt_{name}"), "attempt", rule)
