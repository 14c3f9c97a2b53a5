"""Attempts are found by when they ended, and done steps; steps bear no fields that nobody writes.

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
    op.create_index(
        "ix_step_done_at", "step", ["done_at"], unique=False, postgresql_where=sa.text("done_at IS NOT NULL")
    )
    for column in ("due_at", "tries", "last_error"):
        op.drop_column("step", column)


def downgrade() -> None:
    op.add_column("step", sa.Column("due_at", sa.DateTime(timezone=True), nullable=True))
    op.execute("UPDATE step SET due_at = created_at")
    op.alter_column("step", "due_at", nullable=False)
    op.add_column("step", sa.Column("tries", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.add_column("step", sa.Column("last_error", sa.Text(), nullable=True))
    op.drop_index("ix_step_done_at", table_name="step", postgresql_where=sa.text("done_at IS NOT NULL"))
    op.drop_index("ix_attempt_ended_at", table_name="attempt", postgresql_where=sa.text("ended_at IS NOT NULL"))
