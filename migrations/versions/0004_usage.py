"""Attempts are found by when they ended.

Revision: 0004, after 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        "ix_attempt_ended_at",
        "attempt",
        ["ended_at"],
        unique=False,
        postgresql_where=sa.text("ended_at IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_attempt_ended_at", table_name="attempt", postgresql_where=sa.text("ended_at IS NOT NULL"))
