"""The ledger: room, workloads, attempts, reservations, outbox, events, quota versions, leadership.

Revision: 0001, the first
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "cluster",
        sa.Column("singleton", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("bound_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("singleton", name=op.f("ck_cluster_singleton")),
        sa.PrimaryKeyConstraint("singleton", name=op.f("pk_cluster")),
    )
    op.create_table(
        "event",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("workload_uid", sa.Text(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("facts", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event")),
    )
    op.create_index(
        "ix_event_workload_uid",
        "event",
        ["workload_uid", "id"],
        unique=False,
        postgresql_where=sa.text("workload_uid IS NOT NULL"),
    )
    op.create_table(
        "leadership",
        sa.Column("epoch", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("singleton", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("renewed_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("singleton", name=op.f("ck_leadership_singleton")),
        sa.PrimaryKeyConstraint("epoch", name=op.f("pk_leadership")),
        sa.UniqueConstraint("singleton", name=op.f("uq_leadership_singleton")),
    )
    op.create_table(
        "node_room",
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("resource", sa.Text(), nullable=False),
        sa.Column("room", sa.BigInteger(), nullable=False),
        sa.Column("reserved", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("deficit", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("gone", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.CheckConstraint("deficit >= 0", name=op.f("ck_node_room_deficit")),
        sa.CheckConstraint("reserved - room <= deficit", name=op.f("ck_node_room_no_overbooking")),
        sa.CheckConstraint("reserved >= 0", name=op.f("ck_node_room_reserved")),
        sa.CheckConstraint("room >= 0", name=op.f("ck_node_room_room")),
        sa.PrimaryKeyConstraint("node", "resource", name=op.f("pk_node_room")),
    )
    op.create_table(
        "plan",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("committed_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("admitted", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_plan")),
    )
    op.create_index("ix_plan_committed_at", "plan", ["committed_at"], unique=False)
    op.create_table(
        "quota_room",
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("flavor", sa.Text(), nullable=False),
        sa.Column("resource", sa.Text(), nullable=False),
        sa.Column("room", sa.BigInteger(), nullable=False),
        sa.Column("reserved", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("deficit", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("gone", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.CheckConstraint("deficit >= 0", name=op.f("ck_quota_room_deficit")),
        sa.CheckConstraint("reserved - room <= deficit", name=op.f("ck_quota_room_no_overbooking")),
        sa.CheckConstraint("reserved >= 0", name=op.f("ck_quota_room_reserved")),
        sa.CheckConstraint("room >= 0", name=op.f("ck_quota_room_room")),
        sa.PrimaryKeyConstraint("queue", "flavor", "resource", name=op.f("pk_quota_room")),
    )
    op.create_table(
        "quota_version",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("flavor", sa.Text(), nullable=False),
        sa.Column("resource", sa.Text(), nullable=False),
        sa.Column("from_nominal", sa.BigInteger(), nullable=True),
        sa.Column("to_nominal", sa.BigInteger(), nullable=True),
        sa.Column("changed_by", sa.Text(), nullable=False),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_quota_version")),
    )
    op.create_index("ix_quota_version_queue", "quota_version", ["queue", "id"], unique=False)
    op.create_table(
        "workload",
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("priority", sa.BigInteger(), nullable=False),
        sa.Column("submitted_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("'Queued'"), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("failures", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("late_starts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), server_default=sa.text("to_timestamp(0)"), nullable=False),
        sa.Column("last_end", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'Finished') = (finished_at IS NOT NULL)", name=op.f("ck_workload_finished")),
        sa.CheckConstraint("state IN ('Queued', 'Active', 'Finished')", name=op.f("ck_workload_state")),
        sa.PrimaryKeyConstraint("uid", name=op.f("pk_workload")),
    )
    op.create_index("ix_workload_seq", "workload", ["seq"], unique=False)
    op.create_index(
        "ix_workload_unfinished", "workload", ["uid"], unique=False, postgresql_where=sa.text("state <> 'Finished'")
    )
    op.create_table(
        "attempt",
        sa.Column("workload_uid", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("plan_id", sa.Uuid(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("quota", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("admitted_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ungated_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("running_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ending_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("end", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.CheckConstraint("(state = 'Ended') = (ended_at IS NOT NULL)", name=op.f("ck_attempt_ended")),
        sa.CheckConstraint(
            "state IN ('Reserved', 'Created', 'Ungated', 'Running', 'Ending', 'Ended')", name=op.f("ck_attempt_state")
        ),
        sa.CheckConstraint("(state IN ('Ending', 'Ended')) = (\"end\" IS NOT NULL)", name=op.f("ck_attempt_end")),
        sa.ForeignKeyConstraint(["workload_uid"], ["workload.uid"], name=op.f("fk_attempt_workload")),
        sa.PrimaryKeyConstraint("workload_uid", "number", name=op.f("pk_attempt")),
    )
    op.create_index("ix_attempt_plan_id", "attempt", ["plan_id"], unique=False)
    op.create_index(
        "uq_attempt_active", "attempt", ["workload_uid"], unique=True, postgresql_where=sa.text("state <> 'Ended'")
    )
    op.create_table(
        "reservation",
        sa.Column("workload_uid", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("flavor", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("pods", sa.Integer(), nullable=False),
        sa.Column("requests", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("freed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("pods > 0", name=op.f("ck_reservation_pods")),
        sa.ForeignKeyConstraint(
            ["workload_uid", "attempt"], ["attempt.workload_uid", "attempt.number"], name=op.f("fk_reservation_attempt")
        ),
        sa.PrimaryKeyConstraint("workload_uid", "attempt", "role", "flavor", "node", name=op.f("pk_reservation")),
    )
    op.create_index(
        "ix_reservation_held",
        "reservation",
        ["workload_uid", "attempt"],
        unique=False,
        postgresql_where=sa.text("freed_at IS NULL"),
    )
    op.create_table(
        "step",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("workload_uid", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tries", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("done_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("step IN ('Create', 'Ungate', 'Remove')", name=op.f("ck_step_step")),
        sa.ForeignKeyConstraint(
            ["workload_uid", "attempt"], ["attempt.workload_uid", "attempt.number"], name=op.f("fk_step_attempt")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_step")),
    )
    op.create_index(
        "uq_step_open", "step", ["workload_uid", "attempt"], unique=True, postgresql_where=sa.text("done_at IS NULL")
    )


def downgrade() -> None:
    op.drop_index("uq_step_open", table_name="step", postgresql_where=sa.text("done_at IS NULL"))
    op.drop_table("step")
    op.drop_index("ix_reservation_held", table_name="reservation", postgresql_where=sa.text("freed_at IS NULL"))
    op.drop_table("reservation")
    op.drop_index("uq_attempt_active", table_name="attempt", postgresql_where=sa.text("state <> 'Ended'"))
    op.drop_index("ix_attempt_plan_id", table_name="attempt")
    op.drop_table("attempt")
    op.drop_index("ix_workload_unfinished", table_name="workload", postgresql_where=sa.text("state <> 'Finished'"))
    op.drop_index("ix_workload_seq", table_name="workload")
    op.drop_table("workload")
    op.drop_index("ix_quota_version_queue", table_name="quota_version")
    op.drop_table("quota_version")
    op.drop_table("quota_room")
    op.drop_index("ix_plan_committed_at", table_name="plan")
    op.drop_table("plan")
    op.drop_table("node_room")
    op.drop_table("leadership")
    op.drop_index("ix_event_workload_uid", table_name="event", postgresql_where=sa.text("workload_uid IS NOT NULL"))
    op.drop_table("event")
    op.drop_table("cluster")
