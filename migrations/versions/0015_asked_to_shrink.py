"""Attempts that give up a part, and whose pods are asked to save their work before.

Revision: 0015, after 0014
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempt", sa.Column("ask", postgresql.JSONB(), nullable=True))
    op.create_check_constraint(op.f("ck_attempt_ask"), "attempt", "ask IS NULL OR state = 'Shrinking'")


def downgrade() -> None:
    op.drop_constraint(op.f("ck_attempt_ask"), "attempt")
    op.drop_column("attempt", "ask")
