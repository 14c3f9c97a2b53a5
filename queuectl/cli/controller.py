"""``queuectl controller`` and ``queuectl db``."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from queuectl.cli.errors import CommandError, Exit

if TYPE_CHECKING:
    from queuectl.control.settings import Settings

db = typer.Typer(help="The ledger's database.", no_args_is_help=True)

DatabaseUrl = Annotated[
    str | None, typer.Option(help="PostgreSQL that holds the ledger; default $DATABASE_URL, else an embedded one.")
]
Data = Annotated[Path | None, typer.Option(help="Folder of the embedded PostgreSQL.")]
Kubeconfig = Annotated[str | None, typer.Option(help="Path of the kubeconfig; default as for kubectl.")]


def run(
    kubeconfig: Kubeconfig = None,
    database_url: DatabaseUrl = None,
    data: Data = None,
    host: Annotated[str | None, typer.Option(help="Address of /healthz, /readyz and /metrics.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the same; 0 takes a free one.")] = None,
) -> None:
    """Run a controller. Every setting can also come from the environment, as QUEUECTL_NAME."""
    settings = read_settings(kubeconfig=kubeconfig, database_url=database_url, data=data, host=host, port=port)
    _log(settings.log_format)
    with database(settings) as url:
        from queuectl.store.engine import WrongCluster
        from queuectl.store.migrate import upgrade

        upgrade(url)
        try:
            with asyncio.Runner(loop_factory=_faster_loop()) as runner:
                runner.run(_run(settings, url))
        except WrongCluster as error:
            if settings.database_url:
                raise
            raise CommandError(
                f"{error}, name another folder with --data, or remove {settings.data}", Exit.REFUSED
            ) from error


@db.command("upgrade")
def upgrade(database_url: DatabaseUrl = None, data: Data = None) -> None:
    """Bring the ledger's schema up to date. A controller does the same on its start."""
    settings = read_settings(database_url=database_url, data=data)
    with database(settings) as url:
        from queuectl.store import migrate

        migrate.upgrade(url)
        typer.echo(migrate.current(url))


def _faster_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes uvloop's event loop, if that extra is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _run(settings: "Settings", database_url: str) -> None:
    from queuectl.control import server
    from queuectl.control.manager import Manager
    from queuectl.kube.client import KubeClient

    try:
        listener = server.bind(settings.host, settings.port)
    except OSError as error:
        raise CommandError(
            f"port {settings.port} of {settings.host} can't be used ({error.strerror}); name another with --port"
        ) from error
    typer.echo(f"serving http://{settings.host}:{listener.getsockname()[1]}", err=True)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with await KubeClient.open(settings.kubeconfig or None) as client:
        manager = Manager(settings, client, database_url)
        tasks = [
            asyncio.create_task(manager.run()),
            asyncio.create_task(server.serve(manager.health, listener)),
            asyncio.create_task(stop.wait()),
        ]
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        for task in done:
            task.result()


def read_settings(**flags: Any) -> "Settings":
    """Return the settings, flags that are given before the environment. Raises CommandError."""
    from pydantic import ValidationError

    from queuectl.control.settings import Settings

    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        told = first["msg"].removeprefix("Value error, ")
        raise CommandError(f"{_as_given(field, flags)}: {first['input']!r}: {told}", Exit.USAGE) from error


def _as_given(field: str, flags: Mapping[str, Any]) -> str:
    """Return the name of a setting as its user wrote it: the flag, or the environment variable."""
    from queuectl.control.settings import Settings

    if flags.get(field) is not None:
        return f"--{field.replace('_', '-')}"
    alias = Settings.model_fields[field].validation_alias if field in Settings.model_fields else field
    return str(alias or f"{Settings.model_config['env_prefix']}{field.upper()}")


def ledger_settings(database_url: str | None, data: Path | None) -> "Settings":
    """Return the settings of a controller whose ledger exists. Raises CommandError."""
    settings = read_settings(database_url=database_url, data=data)
    if not settings.database_url and not (settings.data / "postgres").exists():
        raise CommandError(
            f"no ledger in {settings.data}; name the controller's folder with --data, or set DATABASE_URL",
            Exit.NOT_FOUND,
        )
    return settings


@contextlib.contextmanager
def database(settings: "Settings", *, shared: bool = False) -> Iterator[str]:
    """Yield the URL of the database; an embedded one runs as long as the caller.

    ``shared``: use the embedded one of a controller that runs, if there is one.
    """
    if settings.database_url:
        from queuectl.store.engine import parse_url

        try:
            parse_url(settings.database_url)
        except ValueError as error:
            raise CommandError(str(error), Exit.USAGE) from error
        yield settings.database_url
        return
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        raise CommandError(
            "DATABASE_URL is not set; in a cluster it is required, such as postgresql://user:password@host:5432/queuectl",
            Exit.USAGE,
        )
    from queuectl.store.embedded import EmbeddedPostgres

    server = EmbeddedPostgres(settings.data / "postgres")
    if shared and server.running:
        yield server.url
        return
    try:
        yield server.start()
    finally:
        server.stop()


def _log(form: str) -> None:
    import structlog

    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
