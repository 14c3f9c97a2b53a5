"""Room that is promised, claims of preemptors on their victims, quota charged along the tree of queues.

What is active when this runs stays charged to its own queue alone.

Revision: 0002, after 0001
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ROOMS = ("node_room", "quota_room")
STATES = "'Reserved', 'Created', 'Ungated', 'Running', 'Ending', 'Ended'"


def upgrade() -> None:
    for room in ROOMS:
        op.add_column(room, sa.Column("promised", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
        op.execute(f"UPDATE {room} SET promised = reserved")  # noqa: S608 - constants
        op.create_check_constraint(op.f(f"ck_{room}_promised"), room, "promised >= 0")
        op.create_check_constraint(op.f(f"ck_{room}_no_overpromising"), room, "promised - room <= deficit")
    op.add_column("attempt", sa.Column("charged", postgresql.ARRAY(sa.Text()), nullable=True))
    op.execute("UPDATE attempt SET charged = ARRAY[queue]")
    op.alter_column("attempt", "charged", nullable=False)
    op.add_column("attempt", sa.Column("holds", sa.Boolean(), server_default=sa.text("true"), nullable=False))
    op.add_column("attempt", sa.Column("promised", sa.Boolean(), server_default=sa.text("true"), nullable=False))
    op.add_column("attempt", sa.Column("claimed_by_uid", sa.Text(), nullable=True))
    op.add_column("attempt", sa.Column("claimed_by_attempt", sa.Integer(), nullable=True))
    op.create_foreign_key(
        op.f("fk_attempt_claimed_by"),
        "attempt",
        "attempt",
        ["claimed_by_uid", "claimed_by_attempt"],
        ["workload_uid", "number"],
    )
    op.create_index(
        "ix_attempt_claimed_by",
        "attempt",
        ["claimed_by_uid", "claimed_by_attempt"],
        unique=False,
        postgresql_where=sa.text("claimed_by_uid IS NOT NULL"),
    )
    op.drop_constraint(op.f("ck_attempt_state"), "attempt")
    for name, rule in {
        "state": f"state IN ('Claimed', {STATES})",
        "holds": "holds = (state <> 'Claimed') OR state IN ('Ending', 'Ended')",
        "promised": "promised OR state IN ('Ending', 'Ended')",
        "claimed_by": "(claimed_by_uid IS NULL) = (claimed_by_attempt IS NULL)",
        "claimed": "claimed_by_uid IS NULL OR (holds AND NOT promised)",
    }.items():
        op.create_check_constraint(op.f(f"ck_attempt_{name}"), "attempt", rule)


def downgrade() -> None:
    # Refused by Postgres as long as an attempt is Claimed: there is no word for that before.
    for name in ("state", "holds", "promised", "claimed_by", "claimed"):
        op.drop_constraint(op.f(f"ck_attempt_{name}"), "attempt")
    op.create_check_constraint(op.f("ck_attempt_state"), "attempt", f"state IN ({STATES})")
    op.drop_index("ix_attempt_claimed_by", table_name="attempt")
    op.drop_constraint(op.f("fk_attempt_claimed_by"), "attempt")
    for column in ("claimed_by_attempt", "claimed_by_uid", "promised", "holds", "charged"):
        op.drop_column("attempt", column)
    for room in ROOMS:
        op.drop_constraint(op.f(f"ck_{room}_no_overpromising"), room)
        op.drop_constraint(op.f(f"ck_{room}_promised"), room)
        op.drop_column(room, "promised")
