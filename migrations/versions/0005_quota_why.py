"""Versions of quotas tell why, and their limits too.

What changed before this keeps no why. Limits that are older show as a change when the controller first looks.

Revision: 0005, after 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

LIMITS = ("from_borrowing_limit", "to_borrowing_limit", "from_lending_limit", "to_lending_limit")


def upgrade() -> None:
    for limit in LIMITS:
        op.add_column("quota_version", sa.Column(limit, sa.BigInteger(), nullable=True))
    op.add_column("quota_version", sa.Column("why", sa.Text(), server_default=sa.text("''"), nullable=False))


def downgrade() -> None:
    for column in ("why", *reversed(LIMITS)):
        op.drop_column("quota_version", column)
