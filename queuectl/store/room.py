"""Room on nodes and in queues: locked, observed, taken and given back. One code for both tables."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Table,
    TableValuedAlias,
    Text,
    and_,
    case,
    delete,
    func,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model.resources import MAX_AMOUNT
from queuectl.store import tables
from queuectl.store.engine import Conflict
from queuectl.store.rows import rowset

Key = tuple[str, ...]  # (node, resource) or (queue, flavor, resource)


@dataclass(slots=True)
class Row:
    """A row of room, as read under its lock."""

    room: int
    reserved: int
    deficit: int
    gone: bool


class Room:
    """The rows of one table that a transaction works on, from the moment they are locked."""

    def __init__(self, table: Table) -> None:
        """Hold nothing yet."""
        self._table = table
        self._keys = [column.name for column in table.primary_key.columns]
        self.rows: dict[Key, Row] = {}
        self._taken: dict[Key, int] = {}

    @classmethod
    def of_quota(cls) -> "Room":
        """Room in queues: (queue, flavor, resource)."""
        return cls(tables.quota_room)

    @classmethod
    def of_nodes(cls) -> "Room":
        """Room on nodes: (node, resource)."""
        return cls(tables.node_room)

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
            self.rows[key] = Row(row["room"], row["reserved"], row["deficit"], row["gone"])

    async def observe(
        self, connection: AsyncConnection, seen: Mapping[Key, int], owners: Collection[str]
    ) -> list[tuple[Key, int | None, int | None]]:
        """Set the room of the owners' rows to what was seen, and to nothing where nothing was seen.

        Returns what changed: key, room before, room now; None for a row that wasn't there or isn't any longer.
        """
        amounts = {key: max(0, min(MAX_AMOUNT, amount)) for key, amount in seen.items()}
        lost = {key for key, row in self.rows.items() if key[0] in owners and key not in amounts and not row.gone}
        changes: list[tuple[Key, int | None, int | None]] = []
        for key, amount in amounts.items():
            row = self.rows.get(key)
            before = None if row is None or row.gone else row.room
            if before != amount:
                changes.append((key, before, amount))
        changes.extend((key, self.rows[key].room, None) for key in lost)
        if not changes:
            return []
        changes.sort(key=lambda change: change[0])
        await self._write(connection, changes)
        for key, _, now in changes:
            row = self.rows.setdefault(key, Row(0, 0, 0, gone=False))
            row.room, row.gone = now or 0, now is None
            row.deficit = max(0, row.reserved - row.room)
        if lost:
            await self._drop_gone(connection, [key for key in lost if self.rows[key].reserved == 0])
        return changes

    def fits(self, amounts: Mapping[Key, int]) -> bool:
        """Tell whether all of this could be reserved now: no deficit anywhere, and room enough."""
        for key, amount in amounts.items():
            row = self.rows.get(key)
            if row is None or row.deficit > 0 or amount > row.room - row.reserved:
                return False
        return True

    def take(self, amounts: Mapping[Key, int]) -> None:
        """Reserve, in memory; ``write_taken`` does it in Postgres."""
        for key, amount in amounts.items():
            self.rows[key].reserved += amount
            self._taken[key] = self._taken.get(key, 0) + amount

    async def write_taken(self, connection: AsyncConnection) -> None:
        """Reserve everything taken, under the condition that it fits.

        Raises Conflict when Postgres sees it differently.
        """
        if not self._taken:
            return
        t = self._table
        given = self._given(self._taken)
        statement = (
            update(t)
            .values(reserved=t.c.reserved + given.c.amount)
            .where(self._same(given), t.c.deficit == 0, given.c.amount <= t.c.room - t.c.reserved)
        )
        if (await connection.execute(statement)).rowcount != len(self._taken):
            raise Conflict(f"{t.name} changed while it was locked")

    async def free(self, connection: AsyncConnection, amounts: Mapping[Key, int]) -> None:
        """Give reserved room back; a row that is no longer observed goes when nothing is reserved in it."""
        if not amounts:
            return
        t = self._table
        given = self._given(amounts)
        left = func.greatest(t.c.reserved - given.c.amount, 0)
        await connection.execute(
            update(t).values(reserved=left, deficit=func.greatest(left - t.c.room, 0)).where(self._same(given))
        )
        await self._drop_gone(connection, list(amounts))

    async def _write(self, connection: AsyncConnection, changes: Iterable[tuple[Key, int | None, int | None]]) -> None:
        t = self._table
        given = rowset(
            [{**self._named(key), "room": now or 0, "gone": now is None} for key, _, now in changes],
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
                    "deficit": case((t.c.reserved > new.room, t.c.reserved - new.room), else_=0),
                },
            )
        )

    async def _drop_gone(self, connection: AsyncConnection, keys: Collection[Key]) -> None:
        if not keys:
            return
        t = self._table
        given = self._given(dict.fromkeys(keys, 0))
        await connection.execute(delete(t).where(self._same(given), t.c.gone, t.c.reserved == 0))
        for key in keys:
            row = self.rows.get(key)
            if row is not None and row.gone:
                del self.rows[key]

    def _named(self, key: Key) -> dict[str, str]:
        return dict(zip(self._keys, key, strict=True))

    def _given(self, amounts: Mapping[Key, int]) -> TableValuedAlias:
        rows = [{**self._named(key), "amount": amount} for key, amount in sorted(amounts.items())]
        return rowset(rows, **dict.fromkeys(self._keys, Text), amount=BigInteger)

    def _same(self, given: TableValuedAlias) -> ColumnElement[bool]:
        return and_(*(self._table.c[key] == given.c[key] for key in self._keys))
