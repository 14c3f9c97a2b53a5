"""Cards of GPUs are counted in 72,072,000ths instead of 21,000ths, so that halves down to sixteenths are exact.

Revision: 0017, after 0016
"""

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

CARDS = "queuectl.dev/gpu"
FINER = 3432
MOST = 2**63 - 1
COLUMNS = {
    "quota_room": ("room", "reserved", "promised", "deficit"),
    "quota_version": tuple(
        f"{when}_{limit}" for when in ("from", "to") for limit in ("nominal", "borrowing_limit", "lending_limit")
    ),
}
QUOTAS = {"attempt": ("quota", "leaving"), "freed": ("quota",)}  # [[flavor, resource, amount], ...]


def upgrade() -> None:
    _scale(f"CASE WHEN {{0}}::numeric > {MOST // FINER} THEN {MOST} ELSE {{0}}::numeric * {FINER} END")  # keeps nulls


def downgrade() -> None:
    _scale(f"ceil({{}}::numeric / {FINER})")


def _scale(by: str) -> None:
    for table, columns in COLUMNS.items():
        changes = ", ".join(f"{column} = {by.format(column)}" for column in columns)
        op.execute(f"UPDATE {table} SET {changes} WHERE resource = '{CARDS}'")  # noqa: S608 - constants
    op.execute(f"UPDATE reservation SET cards = {by.format('cards')} WHERE cards <> 0")  # noqa: S608 - constants
    for table, columns in QUOTAS.items():
        for column in columns:
            op.execute(f"UPDATE {table} SET {column} = {_scaled(column, by)} WHERE {_has_cards(column)}")  # noqa: S608 - constants
    for table, end in (("attempt", '"end"'), ("workload", "last_end")):  # of who moves, for whom room is kept
        quota, places = f"{end} #> '{{facts,quota}}'", f"{end} #> '{{facts,to}}'"
        kept = f"coalesce({_scaled(quota, by)}, '[]')"
        changed = (
            f"jsonb_set(jsonb_set({end}, '{{facts,quota}}', {kept}), '{{facts,to}}', {_scaled_places(places, by)})"
        )
        op.execute(f"UPDATE {table} SET {end} = {changed} WHERE {end} ->> 'reason' = 'Moved'")  # noqa: S608 - constants
    freed = "facts -> 'freed'"
    op.execute(
        f"UPDATE event SET facts = jsonb_set(facts, '{{freed}}', {_scaled(freed, by)}) WHERE {_has_cards(freed)}"  # noqa: S608 - constants
    )


def _has_cards(quota: str) -> str:
    return f"jsonb_path_exists({quota}, 'strict $[*] ? (@[1] == \"{CARDS}\")')"


def _scaled(quota: str, by: str) -> str:
    amount = f"CASE WHEN part ->> 1 = '{CARDS}' THEN to_jsonb({by.format('(part ->> 2)')}) ELSE part -> 2 END"
    parts = f"jsonb_agg(jsonb_build_array(part -> 0, part -> 1, {amount}) ORDER BY place)"
    return f"(SELECT {parts} FROM jsonb_array_elements({quota}) WITH ORDINALITY AS each (part, place))"  # noqa: S608 - constants


def _scaled_places(places: str, by: str) -> str:
    """Scale the cards of [[role, flavor, node, pods, requests, cards, first], ...]."""
    part = f"jsonb_set(part, '{{5}}', to_jsonb({by.format('(part ->> 5)')}))"
    each = f"jsonb_array_elements({places}) WITH ORDINALITY AS each (part, place)"
    return f"coalesce((SELECT jsonb_agg({part} ORDER BY place) FROM {each}), '[]')"  # noqa: S608 - constants
