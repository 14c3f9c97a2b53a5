"""What the choice of victims looks at: how often a workload has given way, since when it is there and waits.

Revision: 0003, after 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workload", sa.Column("preemptions", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.add_column("workload", sa.Column("first_admitted_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("workload", sa.Column("requeued_at", sa.DateTime(timezone=True), nullable=True))
    op.execute(
        """
        UPDATE workload SET preemptions = was.preemptions, first_admitted_at = was.first, requeued_at = was.last
        FROM (
            SELECT workload_uid, min(admitted_at) AS first, max(ended_at) AS last,
                   count(*) FILTER (WHERE state = 'Ended' AND "end" ->> 'reason' = 'Preempted') AS preemptions
            FROM attempt GROUP BY workload_uid
        ) was
        WHERE was.workload_uid = workload.uid
        """
    )


def downgrade() -> None:
    for column in ("requeued_at", "first_admitted_at", "preemptions"):
        op.drop_column("workload", column)
