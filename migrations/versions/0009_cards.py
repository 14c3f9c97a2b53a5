"""Reservations say what a pod's GPUs count as in cards.

Revision: 0009, after 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("reservation", sa.Column("cards", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    # Until now all were charged by their names; whole GPUs count as a card, 21,000 each.
    op.execute("""
        UPDATE reservation SET cards = 21000 * (
            SELECT coalesce(sum((q ->> 1)::bigint), 0) FROM jsonb_array_elements(requests) AS q
            WHERE q ->> 0 LIKE '%/gpu'
        )
    """)


def downgrade() -> None:
    op.drop_column("reservation", "cards")
