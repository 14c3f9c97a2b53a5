"""What nodes have done to gangs.

Revision: 0013, after 0012
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "offence",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("why", postgresql.JSONB(), nullable=False),
        sa.Column("workload_uid", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("forgiven_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_offence")),
        sa.UniqueConstraint("node", "at", "workload_uid", "attempt", name=op.f("uq_offence_node")),
    )
    op.create_index("ix_offence_at", "offence", ["at"], postgresql_where=sa.text("forgiven_at IS NULL"))


def downgrade() -> None:
    op.drop_table("offence")
