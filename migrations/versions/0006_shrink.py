"""Attempts that give up a part of their pods to a preemptor and run on.

Revision: 0006, after 0005
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

STATES = "'Claimed', 'Reserved', 'Created', 'Ungated', 'Running', {}'Ending', 'Ended'"
STEPS = "'Create', 'Ungate', {}'Remove'"


def upgrade() -> None:
    op.add_column("attempt", sa.Column("leaving", postgresql.JSONB(), nullable=True))
    op.add_column("attempt", sa.Column("shrunk", postgresql.JSONB(), nullable=True))
    op.add_column("reservation", sa.Column("leaving", sa.Integer(), server_default=sa.text("0"), nullable=False))
    _check("attempt", "leaving", "leaving IS NULL OR (promised AND state IN ('Shrinking', 'Ending', 'Ended'))")
    _check("reservation", "leaving", "leaving BETWEEN 0 AND pods")
    _replace(
        "claimed_by_uid IS NULL OR (holds AND (NOT promised OR leaving IS NOT NULL))", "'Shrinking', ", "'Shrink', "
    )


def downgrade() -> None:
    # Refused by Postgres as long as an attempt is Shrinking, or has left that state to end.
    _replace("claimed_by_uid IS NULL OR (holds AND NOT promised)", "", "")
    for table in ("attempt", "reservation"):
        op.drop_constraint(op.f(f"ck_{table}_leaving"), table)
        op.drop_column(table, "leaving")
    op.drop_column("attempt", "shrunk")


def _replace(claimed: str, state: str, step: str) -> None:
    for table, name, rule in (
        ("attempt", "claimed", claimed),
        ("attempt", "state", f"state IN ({STATES.format(state)})"),
        ("step", "step", f"step IN ({STEPS.format(step)})"),
    ):
        op.drop_constraint(op.f(f"ck_{table}_{name}"), table)
        _check(table, name, rule)


def _check(table: str, name: str, rule: str) -> None:
    op.create_check_constraint(op.f(f"ck_{table}_{name}"), table, rule)
