"""Attempts some of whose pods are done hold less than before; how much was given back when is on record.

Revision: 0007, after 0006
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempt", sa.Column("done", postgresql.JSONB(), server_default=sa.text("'[]'"), nullable=False))
    op.create_check_constraint(
        op.f("ck_attempt_done"), "attempt", "done = '[]' OR state NOT IN ('Claimed', 'Reserved', 'Created')"
    )
    op.create_table(
        "freed",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("workload_uid", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("quota", postgresql.JSONB(), nullable=False),
        sa.ForeignKeyConstraint(
            ["workload_uid", "attempt"],
            ["attempt.workload_uid", "attempt.number"],
            name=op.f("fk_freed_attempt"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_freed")),
    )
    op.create_index("ix_freed_at", "freed", ["at"], unique=False)


def downgrade() -> None:
    op.drop_index("ix_freed_at", table_name="freed")
    op.drop_table("freed")
    op.drop_constraint(op.f("ck_attempt_done"), "attempt")
    op.drop_column("attempt", "done")
