"""A name of the ledger's own, by which controllers tell it from others.

Revision: 0016, after 0015
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    name = sa.text("gen_random_uuid()::text")
    op.add_column("cluster", sa.Column("ledger", sa.Text(), nullable=False, server_default=name))


def downgrade() -> None:
    op.drop_column("cluster", "ledger")
