"""Room on nodes and in queues: locked, observed, taken and given back. One code for both tables."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Table,
    TableValuedAlias,
    Text,
    and_,
    delete,
    func,
    not_,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model.policy import Cell
from queuectl.model.resources import MAX_AMOUNT, total
from queuectl.store import tables
from queuectl.store.engine import Conflict
from queuectl.store.rows import rowset

Key = tuple[str, ...]  # (node, resource) or (queue, flavor, resource)


@dataclass(frozen=True, slots=True)
class Amounts:
    """What an attempt takes of either kind of room; nothing of zero."""

    quota: Mapping[Key, int] = field(default_factory=dict)
    nodes: Mapping[Key, int] = field(default_factory=dict)

    @classmethod
    def of(cls, charged: Iterable[str], quota: Mapping[Cell, int], nodes: Mapping[tuple[str, str], int]) -> Self:
        """Charge the quota to each of the queues, and the amounts to their nodes."""
        return cls(
            {(queue, *cell): amount for queue in charged for cell, amount in quota.items() if amount > 0},
            {key: amount for key, amount in nodes.items() if amount > 0},
        )


@dataclass(slots=True)
class Row:
    """A row of room, as read under its lock and changed since."""

    room: int
    reserved: int
    promised: int
    gone: bool

    @property
    def deficit(self) -> int:
        """By how much more is reserved or promised than there is."""
        return max(0, self.reserved - self.room, self.promised - self.room)


@dataclass(slots=True)
class _Change:
    """What happened to a row since it was locked, and what must be true of it in the end."""

    reserved: int = 0
    promised: int = 0
    reserves: bool = False  # somebody took of what is there: both sums must fit
    promises: bool = False  # somebody took of what will be there: the promised must fit


class Room:
    """The rows of one table that a transaction works on, from the moment they are locked."""

    def __init__(self, table: Table) -> None:
        """Hold nothing yet."""
        self._table = table
        self._keys = [column.name for column in table.primary_key.columns]
        self.rows: dict[Key, Row] = {}
        self._changes: dict[Key, _Change] = {}
        self._shrunk: dict[Key, int | None] = {}

    async def lock(self, connection: AsyncConnection, owners: Collection[str]) -> None:
        """Lock all rows of these nodes or queues, in the one order."""
        if not owners:
            return
        t = self._table
        owner = t.c[self._keys[0]]
        given = rowset([{"owner": name} for name in sorted(owners)], owner=Text)
        statement = (
            select(t)
            .where(owner.in_(select(given.c.owner)))
            .order_by(*(t.c[key] for key in self._keys))
            .with_for_update()
        )
        for row in (await connection.execute(statement)).mappings():
            key = tuple(row[name] for name in self._keys)
            self.rows[key] = Row(row["room"], row["reserved"], row["promised"], row["gone"])

    async def observe(self, connection: AsyncConnection, seen: Mapping[Key, int], owners: Collection[str]) -> None:
        """Set the room of the owners' rows to what was seen, and to nothing where nothing was seen."""
        amounts = {key: bounded(amount) for key, amount in seen.items()}
        lost = {key for key, row in self.rows.items() if key[0] in owners and key not in amounts and not row.gone}
        changes: dict[Key, int | None] = dict.fromkeys(lost)
        for key, amount in amounts.items():
            row = self.rows.get(key)
            if row is None or row.gone or row.room != amount:
                changes[key] = amount
        if not changes:
            return
        await self._write_room(connection, changes)
        for key, room in changes.items():
            row = self.rows.setdefault(key, Row(0, 0, 0, gone=False))
            row.room, row.gone = room or 0, room is None
        await self._drop_gone(connection, lost)

    def fits(self, amounts: Mapping[Key, int]) -> bool:
        """Tell whether all of this could be reserved now: no deficit anywhere, and room enough now and later."""
        return all(
            (row := self.rows.get(key)) is not None
            and not row.deficit
            and amount <= row.room - max(row.reserved, row.promised)
            for key, amount in amounts.items()
        )

    def fits_now(self, amounts: Mapping[Key, int]) -> bool:
        """Tell whether what was promised could be reserved now."""
        return all(
            (row := self.rows.get(key)) is not None and not row.deficit and amount <= row.room - row.reserved
            for key, amount in amounts.items()
        )

    def fits_later(self, amounts: Mapping[Key, int], gone: Mapping[Key, int]) -> bool:
        """Tell whether all of this could be promised, once what is ``gone`` is no longer promised."""
        return all(
            (row := self.rows.get(key)) is not None and amount <= row.room - (row.promised - gone.get(key, 0))
            for key, amount in amounts.items()
        )

    def take(self, amounts: Mapping[Key, int], *, reserved: bool, promised: bool) -> None:
        """Count, in memory; ``write`` does it in Postgres."""
        for key, amount in amounts.items():
            row, change = self.rows[key], self._changes.setdefault(key, _Change())
            if reserved:
                row.reserved += amount
                change.reserved += amount
                change.reserves = True
            if promised:
                row.promised += amount
                change.promised += amount
                change.promises = True

    def shrink(self, amounts: Mapping[Key, int]) -> None:
        """Take as much of the room away, in memory, for others use it from now on; not of what is gone."""
        for key, amount in amounts.items():
            row = self.rows.get(key)
            if row is not None and not row.gone:
                self._shrunk[key] = row.room = max(0, row.room - amount)

    def free(self, amounts: Mapping[Key, int], *, reserved: bool, promised: bool) -> None:
        """Stop counting, in memory; never below nothing, so that no contradiction keeps a gang from ending."""
        for key, amount in amounts.items():
            row = self.rows.get(key)
            if row is None:
                continue
            change = self._changes.setdefault(key, _Change())
            if reserved:
                less = min(amount, row.reserved)
                row.reserved -= less
                change.reserved -= less
            if promised:
                less = min(amount, row.promised)
                row.promised -= less
                change.promised -= less

    async def write(self, connection: AsyncConnection) -> None:
        """Write what was taken and freed, under the condition that all that was taken fits.

        A row that is no longer observed goes when nothing is counted in it. Raises Conflict when Postgres sees it
        differently.
        """
        if self._shrunk:
            await self._write_room(connection, self._shrunk)
            self._shrunk = {}
        if not self._changes:
            return
        t = self._table
        given = rowset(
            [
                {
                    **self._named(key),
                    "reserved": change.reserved,
                    "promised": change.promised,
                    "reserves": change.reserves,
                    "promises": change.promises,
                }
                for key, change in sorted(self._changes.items())
            ],
            **dict.fromkeys(self._keys, Text),
            reserved=BigInteger,
            promised=BigInteger,
            reserves=Boolean,
            promises=Boolean,
        )
        reserved, promised = t.c.reserved + given.c.reserved, t.c.promised + given.c.promised
        # Compared by what is left, for a sum could be more than 64 bits hold.
        now, later = given.c.reserved <= t.c.room - t.c.reserved, given.c.promised <= t.c.room - t.c.promised
        statement = (
            update(t)
            .values(
                reserved=reserved,
                promised=promised,
                deficit=func.greatest(0, reserved - t.c.room, promised - t.c.room),
            )
            .where(
                self._same(given),
                or_(not_(given.c.reserves), and_(now, later)),
                or_(not_(given.c.promises), later),
            )
        )
        if (await connection.execute(statement)).rowcount != len(self._changes):
            raise Conflict(f"{t.name} changed while it was locked")
        await self._drop_gone(connection, self._changes)
        self._changes = {}

    async def _write_room(self, connection: AsyncConnection, rooms: Mapping[Key, int | None]) -> None:
        t = self._table
        given = rowset(
            [{**self._named(key), "room": room or 0, "gone": room is None} for key, room in sorted(rooms.items())],
            **dict.fromkeys(self._keys, Text),
            room=BigInteger,
            gone=Boolean,
        )
        columns = [*self._keys, "room", "gone"]
        source = select(*(given.c[name] for name in columns)).order_by(*(given.c[name] for name in self._keys))
        statement = insert(t).from_select(columns, source)
        new = statement.excluded
        await connection.execute(
            statement.on_conflict_do_update(
                index_elements=self._keys,
                set_={
                    "room": new.room,
                    "gone": new.gone,
                    "deficit": func.greatest(0, t.c.reserved - new.room, t.c.promised - new.room),
                },
            )
        )

    async def _drop_gone(self, connection: AsyncConnection, keys: Iterable[Key]) -> None:
        rows = [(key, self.rows.get(key)) for key in keys]
        empty = [key for key, row in rows if row is not None and row.gone and not row.reserved and not row.promised]
        if not empty:
            return
        t = self._table
        given = rowset([self._named(key) for key in sorted(empty)], **dict.fromkeys(self._keys, Text))
        await connection.execute(delete(t).where(self._same(given), t.c.gone, t.c.reserved == 0, t.c.promised == 0))
        for key in empty:
            del self.rows[key]

    def _named(self, key: Key) -> dict[str, str]:
        return dict(zip(self._keys, key, strict=True))

    def _same(self, given: TableValuedAlias) -> ColumnElement[bool]:
        return and_(*(self._table.c[key] == given.c[key] for key in self._keys))


class Rooms:
    """Room of both kinds, as one transaction works on it."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self.quota = Room(tables.quota_room)
        self.nodes = Room(tables.node_room)

    async def lock(
        self,
        connection: AsyncConnection,
        wanted: Iterable[Amounts],
        *,
        queues: Collection[str] = (),
        nodes: Collection[str] = (),
    ) -> None:
        """Lock what is wanted, and all rows of these queues and nodes: quota first, then nodes."""
        all_queues, all_nodes = set(queues), set(nodes)
        for amounts in wanted:
            all_queues.update(key[0] for key in amounts.quota)
            all_nodes.update(key[0] for key in amounts.nodes)
        await self.quota.lock(connection, all_queues)
        await self.nodes.lock(connection, all_nodes)

    def fits(self, amounts: Amounts) -> bool:
        """Tell whether an attempt could be reserved now."""
        return self.quota.fits(amounts.quota) and self.nodes.fits(amounts.nodes)

    def fits_now(self, amounts: Amounts) -> bool:
        """Tell whether an attempt that was promised its room could be reserved now."""
        return self.quota.fits_now(amounts.quota) and self.nodes.fits_now(amounts.nodes)

    def fits_later(self, amounts: Amounts, gone: Collection[Amounts]) -> bool:
        """Tell whether an attempt could be promised its room once these are gone."""
        return self.quota.fits_later(amounts.quota, total(a.quota for a in gone)) and self.nodes.fits_later(
            amounts.nodes, total(a.nodes for a in gone)
        )

    def take(self, amounts: Amounts, *, reserved: bool = False, promised: bool = False) -> None:
        """Count an attempt among what is there, what will be there, or both."""
        self.quota.take(amounts.quota, reserved=reserved, promised=promised)
        self.nodes.take(amounts.nodes, reserved=reserved, promised=promised)

    def free(self, amounts: Amounts, *, reserved: bool = False, promised: bool = False) -> None:
        """Stop counting an attempt among what is there, what will be there, or both."""
        self.quota.free(amounts.quota, reserved=reserved, promised=promised)
        self.nodes.free(amounts.nodes, reserved=reserved, promised=promised)

    async def write(self, connection: AsyncConnection) -> None:
        """Write what was taken and freed. Raises Conflict when it does not fit after all."""
        await self.quota.write(connection)
        await self.nodes.write(connection)


def bounded(amount: int) -> int:
    """Return the amount as a row can hold it."""
    return max(0, min(MAX_AMOUNT, amount))
