"""The schema: what the migrations make is what the code expects."""

import asyncio
import subprocess
import sys

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, create_engine, make_url, text

from queuectl.model.resources import CARD, MAX_AMOUNT
from queuectl.store import migrate
from queuectl.store.engine import StoreUnavailable, open_engine, parse_url
from queuectl.store.tables import metadata
from tests.support.databases import Databases

# Everything that Postgres knows of our tables, alembic's own aside.
SCHEMA = (
    """
    SELECT table_name || '.' || column_name, data_type || ' ' || is_nullable || ' ' || coalesce(column_default, '')
           || ' ' || is_identity
    FROM information_schema.columns WHERE table_schema = 'public' AND table_name <> 'alembic_version' ORDER BY 1
    """,
    """
    SELECT conrelid::regclass || '.' || conname, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text <> 'alembic_version' ORDER BY 1
    """,
    """
    SELECT indexname, indexdef FROM pg_indexes
    WHERE schemaname = 'public' AND tablename <> 'alembic_version' ORDER BY 1
    """,
)


# Pod 1 of role w is done; 0 and 2 run, and 3 and 4 come.
GROWING = """
INSERT INTO workload (uid, namespace, name, queue, priority, submitted_at, seq, state, attempt)
VALUES ('g', 'ns', 'g', 'q', 0, now(), 1, 'Active', 1);
INSERT INTO attempt (workload_uid, number, state, generation, plan_id, epoch, queue, charged, quota, admitted_at, coming,
                     growing_at, done)
VALUES ('g', 1, 'Growing', 1, gen_random_uuid(), 1, 'q', '{q}', '[]', now(), '{"w": 2}', now(), '[["w", 1]]');
INSERT INTO reservation (workload_uid, attempt, role, flavor, node, pods, first, requests)
VALUES ('g', 1, 'w', 'f', 'n1', 2, 0, '[]'), ('g', 1, 'w', 'f', 'n2', 2, 3, '[]')
"""

# It has grown and was asked to save its work, which is on record for a day.
HAS_GROWN = """
INSERT INTO workload (uid, namespace, name, queue, priority, submitted_at, seq, state, attempt)
VALUES ('g', 'ns', 'g', 'q', 0, now(), 1, 'Active', 1);
INSERT INTO attempt (workload_uid, number, state, generation, plan_id, epoch, queue, charged, quota, admitted_at)
VALUES ('g', 1, 'Running', 1, gen_random_uuid(), 1, 'q', '{q}', '[]', now());
INSERT INTO step (workload_uid, attempt, step, created_at, epoch, done_at)
SELECT 'g', 1, step, now(), 1, now() FROM unnest('{Create,Grow,Ask}'::text[]) AS step
"""


CARDS = """
INSERT INTO quota_room (queue, flavor, resource, room, reserved, promised)
VALUES ('q', 'f', 'queuectl.dev/gpu', 42000, 21000, 24000), ('q', 'f', 'nvidia.com/gpu', 2, 1, 1),
       ('big', 'f', 'queuectl.dev/gpu', 9223372036854775807, 0, 0);
INSERT INTO workload (uid, namespace, name, queue, priority, submitted_at, seq, state, attempt, last_end)
VALUES ('g', 'ns', 'g', 'q', 0, now(), 1, 'Active', 1, '{"reason": "Moved", "facts": {"until": 1.5,
        "quota": [["f", "queuectl.dev/gpu", 42000]],
        "to": [["w", "f", "n1", 2, [["nvidia.com/gpu", 1]], 21000, 0]]}}'),
       ('h', 'ns', 'h', 'q', 0, now(), 2, 'Queued', 1, '{"reason": "PodLost", "facts": {}}');
INSERT INTO attempt (workload_uid, number, state, generation, plan_id, epoch, queue, charged, quota, admitted_at)
VALUES ('g', 1, 'Running', 1, gen_random_uuid(), 1, 'q', '{q}',
        '[["f", "nvidia.com/gpu", 1], ["f", "queuectl.dev/gpu", 21000]]', now());
INSERT INTO reservation (workload_uid, attempt, role, flavor, node, pods, requests, cards)
VALUES ('g', 1, 'w', 'f', 'n1', 1, '[["nvidia.com/gpu", 1]]', 21000);
INSERT INTO freed (workload_uid, attempt, at, quota) VALUES ('g', 1, now(), '[["f", "queuectl.dev/gpu", 3000]]');
INSERT INTO quota_version (queue, flavor, resource, to_nominal, changed_by, changed_at)
VALUES ('q', 'f', 'queuectl.dev/gpu', 42000, 'admin', now());
INSERT INTO event (at, kind, message, facts, epoch)
VALUES (now(), 'PartlyDone', '', '{"freed": [["f", "queuectl.dev/gpu", 3000]], "pods": 1}', 1),
       (now(), 'Other', '', '{}', 1)
"""


def engine_of(url: str) -> Engine:
    return create_engine(parse_url(url))


def schema_of(url: str) -> list[tuple[str, str]]:
    engine = engine_of(url)
    try:
        with engine.connect() as connection:
            return [(row[0], row[1]) for query in SCHEMA for row in connection.execute(text(query))]
    finally:
        engine.dispose()


def test_migrations_make_exactly_the_tables_of_the_code(postgres: Databases) -> None:
    with postgres.empty() as migrated, postgres.empty() as created:
        migrate.upgrade(migrated)
        engine = engine_of(created)
        metadata.create_all(engine)
        engine.dispose()
        assert schema_of(migrated) == schema_of(created)
        engine = engine_of(migrated)
        with engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        engine.dispose()


def test_every_migration_goes_down_and_up_again(postgres: Databases) -> None:
    with postgres.empty() as url:
        assert migrate.current(url) is None
        migrate.upgrade(url)
        migrate.upgrade(url)
        assert migrate.current(url) == migrate.head()
        up = schema_of(url)
        engine = engine_of(url)
        with engine.connect() as connection:
            command.downgrade(migrate._config(connection), "base")
            connection.commit()
        engine.dispose()
        assert schema_of(url) == []
        migrate.upgrade(url)
        assert schema_of(url) == up


def test_pods_by_which_an_attempt_grew_are_named_from_then_on_and_counted_before(postgres: Databases) -> None:
    with postgres.empty() as url:
        engine = engine_of(url)
        with engine.connect() as connection:
            config = migrate._config(connection)
            command.upgrade(config, "0010")
            connection.execute(text(GROWING))
            connection.commit()
            for go, revision, coming in (
                (command.upgrade, "0011", [["w", 3], ["w", 4]]),
                (command.downgrade, "0010", {"w": 2}),
                (command.upgrade, "head", [["w", 3], ["w", 4]]),
            ):
                go(config, revision)
                connection.commit()
                assert connection.scalar(text("SELECT coming FROM attempt")) == coming
        engine.dispose()


def test_what_has_been_done_is_in_nobodys_way_down(postgres: Databases) -> None:
    with postgres.empty() as url:
        engine = engine_of(url)
        with engine.connect() as connection:
            config = migrate._config(connection)
            command.upgrade(config, "head")
            connection.execute(text(HAS_GROWN))
            connection.commit()
            command.downgrade(config, "0009")
            assert connection.scalars(text("SELECT step FROM step")).all() == ["Create"]
        engine.dispose()


def test_cards_are_counted_more_finely_everywhere_and_so_that_nothing_overflows(postgres: Databases) -> None:
    def amounts() -> list[object]:
        return [
            connection.execute(text(query)).all()
            for query in (
                "SELECT resource, room, reserved, promised FROM quota_room ORDER BY 1, 2",
                "SELECT quota, leaving FROM attempt",
                "SELECT cards, requests FROM reservation",
                "SELECT quota FROM freed",
                "SELECT from_nominal, to_nominal FROM quota_version",
                "SELECT facts FROM event ORDER BY id",
                "SELECT last_end -> 'facts' FROM workload ORDER BY uid",
            )
        ]

    def counted(card: int, most: int) -> list[object]:
        gpu, cards = "nvidia.com/gpu", "queuectl.dev/gpu"
        return [
            [(gpu, 2, 1, 1), (cards, 2 * card, card, card * 8 // 7), (cards, most, 0, 0)],
            [([["f", gpu, 1], ["f", cards, card]], None)],
            [(card, [[gpu, 1]])],
            [([["f", cards, card // 7]],)],
            [(None, 2 * card)],
            [({"freed": [["f", cards, card // 7]], "pods": 1},), ({},)],
            [
                ({"until": 1.5, "quota": [["f", cards, 2 * card]], "to": [["w", "f", "n1", 2, [[gpu, 1]], card, 0]]},),
                ({},),
            ],
        ]

    with postgres.empty() as url:
        engine = engine_of(url)
        with engine.connect() as connection:
            config = migrate._config(connection)
            command.upgrade(config, "0016")
            connection.execute(text(CARDS))
            connection.commit()
            before = counted(21_000, MAX_AMOUNT)
            assert amounts() == before
            command.upgrade(config, "0017")
            connection.commit()
            assert amounts() == counted(CARD, MAX_AMOUNT)
            command.downgrade(config, "0016")
            assert amounts() == counted(21_000, -(-MAX_AMOUNT * 21_000 // CARD))
        engine.dispose()


async def test_several_processes_migrate_at_once(postgres: Databases) -> None:
    with postgres.empty() as url:
        await asyncio.gather(*(asyncio.to_thread(migrate.upgrade, url) for _ in range(4)))
        assert migrate.current(url) == migrate.head()


def test_a_newer_database_is_left_alone(database_url: str) -> None:
    engine = engine_of(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(migrate.SchemaNewer, match=r"at revision 9999, this queuectl knows \d{4}"):
        migrate.upgrade(database_url)
    with pytest.raises(migrate.SchemaNewer):
        migrate.current(database_url)


def test_waiting_for_another_migration_has_an_end(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "LOCK_SECONDS", 0.3)
    engine = engine_of(database_url)
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": migrate._LOCK})
        with pytest.raises(StoreUnavailable, match="another process"):
            migrate.upgrade(database_url)
    engine.dispose()


def test_no_server(database_url: str) -> None:
    nowhere = make_url(database_url).set(port=1).render_as_string(hide_password=False)
    with pytest.raises(StoreUnavailable, match="not available"):
        migrate.upgrade(nowhere)


@pytest.mark.parametrize(
    ("url", "said"),
    [("nonsense", "is not a URL"), ("mysql://h/db", r"starts with mysql://"), ("sqlite:///x", "needs postgresql://")],
)
def test_a_url_that_is_no_postgres(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        open_engine(url)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_plain_urls_mean_psycopg(scheme: str) -> None:
    assert parse_url(f"{scheme}://u:p@h:1/d").drivername == "postgresql+psycopg"


def test_the_command_for_a_new_revision_needs_its_message() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "queuectl.store.migrate"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "MESSAGE" in done.stderr
