"""Failures of jobs that are not charged to them, and what GPUs of nodes have reported.

Revision: 0014, after 0013
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workload", sa.Column("ignored", postgresql.JSONB(), nullable=True))
    op.create_table(
        "gpu_reading",
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("levels", postgresql.JSONB(), nullable=False),
        sa.Column("faults", postgresql.JSONB(), nullable=False),
        sa.PrimaryKeyConstraint("node", name=op.f("pk_gpu_reading")),
    )


def downgrade() -> None:
    op.drop_table("gpu_reading")
    op.drop_column("workload", "ignored")
