"""What was read last of the GPUs of nodes, so that the next leader tells new errors from old ones."""

from collections.abc import Mapping

from sqlalchemy import Text, delete, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from queuectl.model.faults import Reading
from queuectl.store import tables
from queuectl.store.leadership import fence
from queuectl.store.rows import plain, rowset


async def keep(connection: AsyncConnection, epoch: int, found: Mapping[str, Reading | None]) -> None:
    """Write down what was read of each of these nodes, or that there is nothing any more. Raises Fenced."""
    await fence(connection, epoch)
    t = tables.gpu_reading
    rows = [
        {
            "node": node,
            "levels": plain(reading.levels),
            "faults": [[gpu, code, at] for (gpu, code), at in sorted(reading.faults.items())],
        }
        for node, reading in sorted(found.items())
        if reading is not None
    ]
    if rows:
        given = rowset(rows, node=Text, levels=JSONB, faults=JSONB)
        columns = [given.c.node, given.c.levels, given.c.faults]
        statement = upsert(t).from_select(["node", "levels", "faults"], select(*columns))
        values = {"levels": statement.excluded.levels, "faults": statement.excluded.faults}
        await connection.execute(statement.on_conflict_do_update(index_elements=[t.c.node], set_=values))
    gone = [node for node, reading in found.items() if reading is None]
    if gone:
        await connection.execute(delete(t).where(t.c.node.in_(gone)))


async def load(connection: AsyncConnection) -> dict[str, Reading]:
    """Return what was read last, by node."""
    rows = (await connection.execute(select(tables.gpu_reading))).mappings()
    return {row["node"]: Reading(row["levels"], {(gpu, code): at for gpu, code, at in row["faults"]}) for row in rows}
