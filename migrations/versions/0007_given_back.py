"""What attempts gave back of their quota before their end.

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
    op.create_table(
        "given_back",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("workload_uid", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("quota", postgresql.JSONB(), nullable=False),
        sa.ForeignKeyConstraint(
            ["workload_uid", "attempt"],
            ["attempt.workload_uid", "attempt.number"],
            name=op.f("fk_given_back_attempt"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_given_back")),
    )
    op.create_index("ix_given_back_at", "given_back", ["at"], unique=False)


def downgrade() -> None:
    op.drop_table("given_back")
