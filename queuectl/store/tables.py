"""The ledger's tables. What must never be broken is a constraint here, not only a rule in code.

Times are ``timestamptz`` in Postgres and Unix seconds in Python. Amounts are integers as in
``queuectl.model.resources``, at most ``MAX_AMOUNT``. Room is kept twice, for nodes and for quota, with two sums each:

* ``room``: what may be reserved, as last observed (nodes) or as the queue tree allows (quota);
* ``reserved``: what attempts hold whose pods may be there, victims of preemption included;
* ``promised``: what will be held once the victims are gone: without them, and with those who wait for them;
* ``deficit``: how much more either sum is than the room. An observation may raise it, a reservation may not.
"""

from datetime import UTC, datetime

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Dialect,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB


class UnixTime(TypeDecorator[float]):
    """A ``timestamptz`` that Python sees as Unix seconds."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Give the driver an aware datetime."""
        return None if value is None else datetime.fromtimestamp(value, UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> float | None:  # noqa: ARG002
        """Return Unix seconds."""
        return None if value is None else value.timestamp()


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)

cluster = Table(
    "cluster",
    metadata,
    Column("singleton", Boolean, primary_key=True, server_default=text("true")),
    Column("uid", Text, nullable=False),
    Column("bound_at", UnixTime, nullable=False, server_default=text("now()")),
    Column("ledger", Text, nullable=False, server_default=text("gen_random_uuid()::text")),
    CheckConstraint("singleton", name="singleton"),
)

# The epoch is the key, so that a ledger transaction's FOR KEY SHARE blocks a takeover (which changes the key)
# and lets a renewal pass (which does not).
leadership = Table(
    "leadership",
    metadata,
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    Column("singleton", Boolean, nullable=False, server_default=text("true")),
    Column("holder", Text, nullable=False),
    Column("expires_at", UnixTime, nullable=False),
    Column("renewed_at", UnixTime, nullable=False),
    CheckConstraint("singleton", name="singleton"),
    UniqueConstraint("singleton"),
)


def _room(name: str, *keys: str) -> Table:
    return Table(
        name,
        metadata,
        *(Column(key, Text, primary_key=True) for key in keys),
        Column("room", BigInteger, nullable=False),
        Column("reserved", BigInteger, nullable=False, server_default=text("0")),
        Column("promised", BigInteger, nullable=False, server_default=text("0")),
        Column("deficit", BigInteger, nullable=False, server_default=text("0")),
        # No longer observed, kept only because something is still counted there.
        Column("gone", Boolean, nullable=False, server_default=text("false")),
        CheckConstraint("room >= 0", name="room"),
        CheckConstraint("reserved >= 0", name="reserved"),
        CheckConstraint("promised >= 0", name="promised"),
        CheckConstraint("deficit >= 0", name="deficit"),
        # reserved <= room + deficit and promised <= room + deficit, written so that they can't overflow
        CheckConstraint("reserved - room <= deficit", name="no_overbooking"),
        CheckConstraint("promised - room <= deficit", name="no_overpromising"),
    )


node_room = _room("node_room", "node", "resource")
quota_room = _room("quota_room", "queue", "flavor", "resource")

workload = Table(
    "workload",
    metadata,
    Column("uid", Text, primary_key=True),
    Column("namespace", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("queue", Text, nullable=False),
    Column("priority", BigInteger, nullable=False),
    Column("submitted_at", UnixTime, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("state", Text, nullable=False, server_default=text("'Queued'")),
    Column("attempt", Integer, nullable=False, server_default=text("0")),
    Column("failures", Integer, nullable=False, server_default=text("0")),
    Column("late_starts", Integer, nullable=False, server_default=text("0")),
    Column("ignored", JSONB),  # failures that were not charged: times, step, nodes
    Column("not_before", UnixTime, nullable=False, server_default=text("to_timestamp(0)")),
    Column("preemptions", Integer, nullable=False, server_default=text("0")),
    Column("first_admitted_at", UnixTime),
    Column("requeued_at", UnixTime),
    Column("last_end", JSONB),
    Column("finished_at", UnixTime),
    Column("saved", JSONB),  # its last checkpoint, of whatever attempt: at (Unix seconds), step, path, attempt
    Column("lost", BigInteger, nullable=False, server_default=text("0")),  # GPU-seconds, over all interruptions
    CheckConstraint("state IN ('Queued', 'Active', 'Finished')", name="state"),
    CheckConstraint("(state = 'Finished') = (finished_at IS NOT NULL)", name="finished"),
    Index("ix_workload_unfinished", "uid", postgresql_where=text("state <> 'Finished'")),
    Index("ix_workload_seq", "seq"),
)

gpu_reading = Table(
    "gpu_reading",
    metadata,
    Column("node", Text, primary_key=True),
    Column("levels", JSONB, nullable=False),  # what its exporter showed last: key of a Xid → how many
    Column("faults", JSONB, nullable=False),  # what came of it: [[gpu, xid, Unix seconds], ...]
)

attempt = Table(
    "attempt",
    metadata,
    Column("workload_uid", Text, ForeignKey("workload.uid"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("state", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("plan_id", Uuid, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("queue", Text, nullable=False),
    Column("charged", ARRAY(Text), nullable=False),  # the queue and its ancestors at that time
    Column("quota", JSONB, nullable=False),  # charged to each of them: [[flavor, resource, amount], ...]
    Column("holds", Boolean, nullable=False, server_default=text("true")),  # counted in reserved
    Column("promised", Boolean, nullable=False, server_default=text("true")),  # counted in promised, but what leaves
    # Who was promised this victim's room, or what leaves of it. Stays on record when the victim has ended.
    Column("claimed_by_uid", Text),
    Column("claimed_by_attempt", Integer),
    # What of the quota it gives up and still holds, nothing of lost places; the pods are in its reservations.
    Column("leaving", JSONB),
    Column("shrunk", JSONB),  # why it has fewer pods than it had: reason, facts
    # What its pods are asked before they go: at, until (Unix seconds), pods, answered. Null: nothing, or no longer.
    Column("ask", JSONB),
    # While it is repaired or grows, the pods that it runs without yet: [[role, index], ...]. Quota and reservations have them
    # already.
    Column("coming", JSONB, nullable=False, server_default=text("'[]'")),
    Column("growing_at", UnixTime),  # the last time that it was repaired or grew
    # Pods that have succeeded while others run on: [[role, index], ...]. Neither quota nor reservations have them any more.
    Column("done", JSONB, nullable=False, server_default=text("'[]'")),
    Column("admitted_at", UnixTime, nullable=False),
    Column("created_at", UnixTime),
    Column("ungated_at", UnixTime),
    Column("running_at", UnixTime),
    Column("asked_at", UnixTime),  # its pods were asked to save their work, for it has to go
    Column("ending_at", UnixTime),
    Column("ended_at", UnixTime),
    Column("end", JSONB),
    ForeignKeyConstraint(
        ["claimed_by_uid", "claimed_by_attempt"],
        ["attempt.workload_uid", "attempt.number"],
        name="fk_attempt_claimed_by",
    ),
    CheckConstraint(
        "state IN ('Claimed', 'Reserved', 'Created', 'Ungated', 'Running', 'Shrinking', 'Repairing', 'Growing',"
        " 'Checkpointing', 'Ending', 'Ended')",
        name="state",
    ),
    CheckConstraint("holds = (state <> 'Claimed') OR state IN ('Ending', 'Ended')", name="holds"),
    CheckConstraint("promised OR state IN ('Checkpointing', 'Ending', 'Ended')", name="promised"),
    CheckConstraint("(claimed_by_uid IS NULL) = (claimed_by_attempt IS NULL)", name="claimed_by"),
    CheckConstraint("claimed_by_uid IS NULL OR (holds AND (NOT promised OR leaving IS NOT NULL))", name="claimed"),
    CheckConstraint(
        "leaving IS NULL OR (promised AND state IN ('Shrinking', 'Repairing', 'Ending', 'Ended'))", name="leaving"
    ),
    CheckConstraint("ask IS NULL OR state = 'Shrinking'", name="ask"),
    CheckConstraint("coming = '[]' OR state IN ('Repairing', 'Growing')", name="coming"),
    CheckConstraint("done = '[]' OR state NOT IN ('Claimed', 'Reserved', 'Created')", name="done"),
    CheckConstraint("(state IN ('Checkpointing', 'Ending', 'Ended')) = (\"end\" IS NOT NULL)", name="end"),
    CheckConstraint("(state = 'Ended') = (ended_at IS NOT NULL)", name="ended"),
    Index("uq_attempt_active", "workload_uid", unique=True, postgresql_where=text("state <> 'Ended'")),
    Index("ix_attempt_plan_id", "plan_id"),
    Index("ix_attempt_ended_at", "ended_at", postgresql_where=text("ended_at IS NOT NULL")),
    Index(
        "ix_attempt_claimed_by",
        "claimed_by_uid",
        "claimed_by_attempt",
        postgresql_where=text("claimed_by_uid IS NOT NULL"),
    ),
)

# What running attempts cost that ended although their jobs go on: the work since the last checkpoint.
interruption = Table(
    "interruption",
    metadata,
    Column("workload_uid", Text, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("at", UnixTime, nullable=False),  # its pods were told to go
    Column("cause", Text, nullable=False),  # the reason's code
    Column("saved_at", UnixTime),  # the attempt's last checkpoint
    Column("saved_step", BigInteger),
    Column("gpu_seconds", BigInteger, nullable=False),
    Column("pod_seconds", BigInteger, nullable=False),  # of gangs without GPUs
    Column("answered", Boolean),  # whether all pods that were asked to save their work did; none: nobody was asked
    ForeignKeyConstraint(["workload_uid", "attempt"], ["attempt.workload_uid", "attempt.number"]),
    CheckConstraint("gpu_seconds >= 0 AND pod_seconds >= 0", name="lost"),
)

# A row stays after its room was given back (``freed_at``), so that every attempt can be asked for later.
reservation = Table(
    "reservation",
    metadata,
    Column("workload_uid", Text, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("role", Text, primary_key=True),
    Column("flavor", Text, primary_key=True),
    Column("node", Text, primary_key=True),
    Column("pods", Integer, nullable=False),
    Column("leaving", Integer, nullable=False, server_default=text("0")),  # of them, until they are gone
    # Index of the role with which they began.
    Column("first", Integer, primary_key=True, autoincrement=False, server_default=text("0")),
    Column("requests", JSONB, nullable=False),  # per pod: [[resource, amount], ...]
    Column("cards", BigInteger, nullable=False, server_default=text("0")),  # per pod: what its GPUs count as
    Column("freed_at", UnixTime),
    ForeignKeyConstraint(["workload_uid", "attempt"], ["attempt.workload_uid", "attempt.number"]),
    CheckConstraint("pods > 0", name="pods"),
    CheckConstraint("leaving BETWEEN 0 AND pods", name="leaving"),
    Index("ix_reservation_held", "workload_uid", "attempt", postgresql_where=text("freed_at IS NULL")),
)

# What attempts gave back before their end: parts that they gave up, and pods that were done; and with negative amounts
# what they got only then, by growing.
freed = Table(
    "freed",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("workload_uid", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("at", UnixTime, nullable=False),
    Column(
        "quota", JSONB, nullable=False
    ),  # held until then, from the attempt's admission: [[flavor, resource, amount], ...]
    ForeignKeyConstraint(["workload_uid", "attempt"], ["attempt.workload_uid", "attempt.number"]),
    Index("ix_freed_at", "at"),
)

# The outbox: what is still to be carried out on the API server, a row for each step of a gang. What is done is dropped
# after a day; what happened stays in the events.
step = Table(
    "step",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("workload_uid", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("step", Text, nullable=False),
    Column("created_at", UnixTime, nullable=False),
    Column("done_at", UnixTime),
    Column("epoch", BigInteger, nullable=False),
    ForeignKeyConstraint(["workload_uid", "attempt"], ["attempt.workload_uid", "attempt.number"]),
    CheckConstraint("step IN ('Create', 'Ungate', 'Shrink', 'Grow', 'Ask', 'Remove')", name="step"),
    Index("uq_step_open", "workload_uid", "attempt", unique=True, postgresql_where=text("done_at IS NULL")),
    Index("ix_step_done_at", "done_at", postgresql_where=text("done_at IS NOT NULL")),
)

event = Table(
    "event",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("at", UnixTime, nullable=False),
    Column("workload_uid", Text),
    Column("attempt", Integer),
    Column("kind", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("facts", JSONB, nullable=False, server_default=text("'{}'")),
    Column("epoch", BigInteger, nullable=False),
    Index("ix_event_workload_uid", "workload_uid", "id", postgresql_where=text("workload_uid IS NOT NULL")),
)

# What nodes have done to gangs; who is suspect follows from it.
offence = Table(
    "offence",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("node", Text, nullable=False),
    Column("at", UnixTime, nullable=False),
    Column("why", JSONB, nullable=False),  # reason, facts
    # On whom it was seen; empty: on no gang.
    Column("workload_uid", Text, nullable=False, server_default=text("''")),
    Column("attempt", Integer, nullable=False, server_default=text("0")),
    Column("forgiven_at", UnixTime),  # an admin said that until then nothing counts
    Column("epoch", BigInteger, nullable=False),
    UniqueConstraint("node", "at", "workload_uid", "attempt"),
    Index("ix_offence_at", "at", postgresql_where=text("forgiven_at IS NULL")),
)

quota_version = Table(
    "quota_version",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("queue", Text, nullable=False),
    Column("flavor", Text, nullable=False),
    Column("resource", Text, nullable=False),
    # No nominal: there was, or is, no such quota. No limit: nothing limits.
    Column("from_nominal", BigInteger),
    Column("to_nominal", BigInteger),
    Column("changed_by", Text, nullable=False),
    Column("changed_at", UnixTime, nullable=False),
    Column("from_borrowing_limit", BigInteger),
    Column("to_borrowing_limit", BigInteger),
    Column("from_lending_limit", BigInteger),
    Column("to_lending_limit", BigInteger),
    Column("why", Text, nullable=False, server_default=text("''")),
    Index("ix_quota_version_queue", "queue", "id"),
)

# Says whether a COMMIT whose answer was lost took place; rows older than a day are dropped.
plan = Table(
    "plan",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("committed_at", UnixTime, nullable=False, server_default=text("now()")),
    Column("admitted", Integer, nullable=False, server_default=text("0")),
    Index("ix_plan_committed_at", "committed_at"),
)
