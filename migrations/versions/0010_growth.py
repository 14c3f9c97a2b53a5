"""Attempts that grow while they run; a second reservation on one node begins with another index.

Revision: 0010, after 0009
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

STATES = "'Claimed', 'Reserved', 'Created', 'Ungated', 'Running', 'Shrinking', {}'Ending', 'Ended'"
STEPS = "'Create', 'Ungate', 'Shrink', {}'Remove'"
PLACE = ["workload_uid", "attempt", "role", "flavor", "node"]


def upgrade() -> None:
    op.add_column("attempt", sa.Column("coming", postgresql.JSONB(), server_default=sa.text("'{}'"), nullable=False))
    op.add_column("attempt", sa.Column("growing_at", sa.DateTime(timezone=True), nullable=True))
    _replace("'Growing', ", "'Grow', ")
    _check("attempt", "coming", "coming = '{}' OR state = 'Growing'")
    op.drop_constraint(op.f("pk_reservation"), "reservation")
    op.create_primary_key(op.f("pk_reservation"), "reservation", [*PLACE, "first"])


def downgrade() -> None:
    # Refused by Postgres as long as an attempt is Growing, or has two reservations for one role on one node.
    op.drop_constraint(op.f("pk_reservation"), "reservation")
    op.create_primary_key(op.f("pk_reservation"), "reservation", PLACE)
    op.drop_constraint(op.f("ck_attempt_coming"), "attempt")
    op.execute("DELETE FROM step WHERE step = 'Grow' AND done_at IS NOT NULL")
    _replace("", "")
    op.drop_column("attempt", "growing_at")
    op.drop_column("attempt", "coming")


def _replace(state: str, step: str) -> None:
    for table, name, rule in (
        ("attempt", "state", f"state IN ({STATES.format(state)})"),
        ("step", "step", f"step IN ({STEPS.format(step)})"),
    ):
        op.drop_constraint(op.f(f"ck_{table}_{name}"), table)
        _check(table, name, rule)


def _check(table: str, name: str, rule: str) -> None:
    op.create_check_constraint(op.f(f"ck_{table}_{name}"), table, rule)
