"""Attempts whose pods are asked to save their work, the last checkpoint of a job, and what interruptions cost.

Revision: 0012, after 0011
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

STATES = (
    "'Claimed', 'Reserved', 'Created', 'Ungated', 'Running', 'Shrinking', 'Repairing', 'Growing', {}'Ending', 'Ended'"
)
STEPS = "'Create', 'Ungate', 'Shrink', 'Grow', {}'Remove'"


def upgrade() -> None:
    op.add_column("workload", sa.Column("saved", postgresql.JSONB(), nullable=True))
    op.add_column("workload", sa.Column("lost", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    op.add_column("attempt", sa.Column("asked_at", sa.DateTime(timezone=True), nullable=True))
    op.create_table(
        "interruption",
        sa.Column("workload_uid", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("saved_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("saved_step", sa.BigInteger(), nullable=True),
        sa.Column("gpu_seconds", sa.BigInteger(), nullable=False),
        sa.Column("pod_seconds", sa.BigInteger(), nullable=False),
        sa.Column("answered", sa.Boolean(), nullable=True),
        sa.CheckConstraint("gpu_seconds >= 0 AND pod_seconds >= 0", name=op.f("ck_interruption_lost")),
        sa.ForeignKeyConstraint(
            ["workload_uid", "attempt"],
            ["attempt.workload_uid", "attempt.number"],
            name=op.f("fk_interruption_attempt"),
        ),
        sa.PrimaryKeyConstraint("workload_uid", "attempt", name=op.f("pk_interruption")),
    )
    _replace("'Checkpointing', ", "'Ask', ")


def downgrade() -> None:
    op.execute("DELETE FROM step WHERE step = 'Ask' AND done_at IS NOT NULL")
    _replace("", "")  # refused by Postgres as long as an attempt is Checkpointing
    op.drop_table("interruption")
    op.drop_column("attempt", "asked_at")
    op.drop_column("workload", "lost")
    op.drop_column("workload", "saved")


def _replace(state: str, step: str) -> None:
    leaving = f"{state}'Ending', 'Ended'"
    for table, name, rule in (
        ("attempt", "state", f"state IN ({STATES.format(state)})"),
        ("attempt", "end", f'(state IN ({leaving})) = ("end" IS NOT NULL)'),
        ("attempt", "promised", f"promised OR state IN ({leaving})"),
        ("step", "step", f"step IN ({STEPS.format(step)})"),
    ):
        op.drop_constraint(op.f(f"ck_{table}_{name}"), table)
        op.create_check_constraint(op.f(f"ck_{table}_{name}"), table, rule)
