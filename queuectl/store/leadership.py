"""Who leads: one row with an epoch, held for ``ttl`` seconds by the database's clock.

    nobody ──acquire──▶ held(epoch) ──renew──▶ held(epoch)
                           │   │
                           │   └──resign──▶ nobody (epoch + 1: the old one is fenced at once)
                           └──expires──▶ anybody's acquire ──▶ held(epoch + 1)

The epoch only grows. Every transaction of the ledger takes ``SELECT ... WHERE epoch = :e FOR KEY SHARE`` first:
a takeover, which changes the key, waits for it; a renewal, which doesn't, passes. So a transaction that has passed
its fence commits before anybody else leads, and one that comes later finds no row.

The holder trusts its term by its own monotonic clock, counted from before the request was sent, less a margin:
it stops acting before anybody else may start.
"""

import time
from dataclasses import dataclass

from sqlalchemy import func, literal, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from queuectl.store.engine import Fenced, transaction
from queuectl.store.tables import leadership

_NOBODY = ""


@dataclass(frozen=True, slots=True)
class Term:
    """A time of leading."""

    epoch: int
    trusted_until: float  # by time.monotonic()

    def trusted(self) -> bool:
        """Tell whether nobody else can lead yet."""
        return time.monotonic() < self.trusted_until


class Leadership:
    """The leadership row as one candidate sees it.

    ``holder`` names the candidate and must be different for every process. ``ttl`` and ``margin`` are in seconds.
    Every method raises StoreUnavailable when Postgres can't be reached within ``ttl``.
    """

    def __init__(self, engine: AsyncEngine, *, holder: str, ttl: float = 6.0, margin: float = 1.0) -> None:
        """Don't connect yet. Raises ValueError when the margin leaves no time to lead."""
        if not holder:
            raise ValueError("holder is empty; give every controller a name of its own")
        if not 0 <= margin < ttl:
            raise ValueError(f"margin is {margin} s; it must be at least 0 and less than the ttl of {ttl} s")
        self._engine = engine
        self._holder = holder
        self._ttl = ttl
        self._margin = margin

    async def acquire(self) -> Term | None:
        """Take the lead with a new epoch if nobody else holds it; None when somebody does."""
        started = time.monotonic()
        clock = func.clock_timestamp()
        expires = clock + func.make_interval(0, 0, 0, 0, 0, 0, literal(self._ttl))
        statement = insert(leadership).values(epoch=1, holder=self._holder, expires_at=expires, renewed_at=clock)
        statement = statement.on_conflict_do_update(
            index_elements=[leadership.c.singleton],
            set_={
                "epoch": leadership.c.epoch + 1,
                "holder": statement.excluded.holder,
                "expires_at": expires,
                "renewed_at": clock,
            },
            where=or_(leadership.c.expires_at <= clock, leadership.c.holder == self._holder),
        )
        try:
            async with transaction(self._engine, limit=self._ttl) as connection:
                epoch = await connection.scalar(statement.returning(leadership.c.epoch))
        except IntegrityError:
            return None  # of two candidates for a lead that nobody has had yet, the other was faster
        return None if epoch is None else self._term(epoch, started)

    async def renew(self, epoch: int) -> Term | None:
        """Hold the lead for another ``ttl``; None when the epoch is no longer ours."""
        started = time.monotonic()
        clock = func.clock_timestamp()
        expires = clock + func.make_interval(0, 0, 0, 0, 0, 0, literal(self._ttl))
        statement = (
            update(leadership)
            .where(leadership.c.epoch == epoch, leadership.c.holder == self._holder)
            .values(expires_at=expires, renewed_at=clock)
        )
        async with transaction(self._engine, limit=self._ttl) as connection:
            found = await connection.scalar(statement.returning(leadership.c.epoch))
        return None if found is None else self._term(epoch, started)

    async def resign(self, epoch: int) -> bool:
        """Give the lead up, if it is still ours, and tell whether it was; nothing is written under this epoch afterwards."""
        statement = (
            update(leadership)
            .where(leadership.c.epoch == epoch, leadership.c.holder == self._holder)
            .values(epoch=leadership.c.epoch + 1, holder=_NOBODY, expires_at=func.clock_timestamp())
        )
        async with transaction(self._engine, limit=self._ttl) as connection:
            return bool((await connection.execute(statement)).rowcount)

    async def current(self) -> tuple[str, int, float] | None:
        """Return holder, epoch and the seconds left, or None when nobody leads."""
        left = func.extract("epoch", leadership.c.expires_at - func.clock_timestamp())
        statement = select(leadership.c.holder, leadership.c.epoch, left).where(
            leadership.c.holder != _NOBODY, leadership.c.expires_at > func.clock_timestamp()
        )
        async with transaction(self._engine, limit=self._ttl) as connection:
            row = (await connection.execute(statement)).one_or_none()
        return None if row is None else (row[0], row[1], float(row[2]))

    def _term(self, epoch: int, started: float) -> Term:
        return Term(epoch, started + self._ttl - self._margin)


async def fence(connection: AsyncConnection, epoch: int) -> None:
    """Make sure that the epoch is the ledger's until this transaction ends. Raises Fenced when it isn't."""
    statement = select(leadership.c.epoch).where(leadership.c.epoch == epoch).with_for_update(read=True, key_share=True)
    if await connection.scalar(statement) is None:
        raise Fenced(f"epoch {epoch} is over; another controller leads")
