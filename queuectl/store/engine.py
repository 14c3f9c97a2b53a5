"""Connections to Postgres: limits on everything, and one error for "it can't be reached now"."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

CONNECT_SECONDS = 5
CALL_SECONDS = 20.0  # longest that any call waits for its transaction, whatever the server or the network does
_SESSION = {
    "application_name": "queuectl",
    "statement_timeout": "15000",
    "lock_timeout": "5000",
    "idle_in_transaction_session_timeout": "15000",
}
_KEEPALIVE = {
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}

# Classes 08 (connection), 28 (authorization), 53 (resources), 57 (operator intervention); 3D000: no such database;
# 55P03: a lock not granted in time; 25P03 and 25P04: a transaction idle for too long, or too long.
_UNAVAILABLE = ("08", "28", "53", "57", "3D000", "55P03", "25P03", "25P04")
_TRIES = 2
_TRIES_UNKNOWN = 4
_CONFLICT = ("40001", "40P01")  # serialization failure, deadlock

T = TypeVar("T")


class StoreUnavailable(Exception):  # noqa: N818 - a state, not a fault of the program
    """Postgres can't be reached or doesn't answer in time; the call may be repeated later."""


class CommitUnknown(StoreUnavailable):
    """The connection was lost while COMMIT was on its way: it may or may not have taken place."""


class Conflict(StoreUnavailable):
    """Two transactions were in each other's way (deadlock, serialization); Postgres rolled this one back."""


class Fenced(Exception):  # noqa: N818
    """The epoch is no longer the ledger's: another controller leads, and nothing was written."""


class WrongCluster(Exception):  # noqa: N818
    """The ledger belongs to another cluster."""


def parse_url(url: str) -> URL:
    """Return the URL with its driver filled in (psycopg).

    Raises ValueError when it is no PostgreSQL URL.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ValueError("DATABASE_URL is not a URL; write postgresql://user:password@host:5432/database") from error
    if parsed.drivername in {"postgres", "postgresql"}:
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in {"postgresql+psycopg", "postgresql+asyncpg"}:
        raise ValueError(f"DATABASE_URL starts with {parsed.drivername}://; queuectl needs postgresql://")
    return parsed


def open_engine(url: str) -> AsyncEngine:
    """Return a pool of at most 5 connections. Nothing connects before the first call.

    Raises ValueError when the URL is not a PostgreSQL URL.
    """
    parsed = parse_url(url)
    connect: dict[str, Any]
    if parsed.drivername == "postgresql+asyncpg":
        connect = {"timeout": CONNECT_SECONDS, "server_settings": _SESSION}
    else:
        connect = psycopg_arguments()
    return create_async_engine(
        parsed,
        connect_args=connect,
        pool_size=5,
        max_overflow=0,
        pool_timeout=CONNECT_SECONDS * 2,
        pool_pre_ping=True,
        pool_recycle=1800,
    )


def psycopg_arguments() -> dict[str, Any]:
    """Return psycopg's connection arguments: time limits and keepalives."""
    options = " ".join(f"-c {name}={value}" for name, value in _SESSION.items() if name != "application_name")
    return {
        "connect_timeout": CONNECT_SECONDS,
        "application_name": _SESSION["application_name"],
        "options": options,
        **_KEEPALIVE,
    }


@asynccontextmanager
async def translated(limit: float = CALL_SECONDS) -> AsyncIterator[None]:
    """Bound what happens inside to ``limit`` seconds, and raise StoreUnavailable for whatever keeps Postgres away."""
    try:
        async with asyncio.timeout(limit):
            yield
    except Exception as error:
        unavailable = _as_unavailable(error)
        if unavailable is None:
            raise
        raise unavailable from error


def _as_unavailable(error: Exception) -> StoreUnavailable | None:
    """Return what the error means to the callers, if it is about reaching Postgres and not about what was asked."""
    # While connecting, asyncpg's own errors come through unwrapped.
    cause = error.orig if isinstance(error, DBAPIError) else error
    state = getattr(cause, "sqlstate", None) or ""
    if state in _CONFLICT:
        return Conflict(str(cause))
    if (
        state.startswith(_UNAVAILABLE)
        or isinstance(cause, (OSError, TimeoutError, PoolTimeout))
        or (isinstance(error, DBAPIError) and error.connection_invalidated)
        or (isinstance(error, (OperationalError, InterfaceError)) and not state)
    ):
        return StoreUnavailable(f"Postgres is not available: {str(cause) or type(cause).__name__}")
    return None


@asynccontextmanager
async def transaction(engine: AsyncEngine, limit: float = CALL_SECONDS) -> AsyncIterator[AsyncConnection]:
    """Open a transaction that commits at the end of the block; all of it takes at most ``limit`` seconds.

    Raises StoreUnavailable, Conflict, or CommitUnknown when the answer to COMMIT was lost.
    """
    committing = False
    try:
        async with translated(limit), engine.connect() as connection:
            begun = await connection.begin()
            try:
                yield connection
                committing = True
                await begun.commit()
            except asyncio.CancelledError:
                # Whatever the driver was doing is half done: such a connection goes, and is not asked to roll back.
                await connection.invalidate()
                raise
            except BaseException:
                if not committing:
                    await begun.rollback()
                raise
    except Conflict:
        raise
    except StoreUnavailable as error:
        if committing:
            raise CommitUnknown(str(error)) from error
        raise


async def retried(work: Callable[[bool], Awaitable[T]]) -> T:
    """Do the work, and do it over: once after a conflict, up to three times after a lost COMMIT.

    ``work`` is told whether an earlier try may have committed; a lost COMMIT is worth a short wait for Postgres.
    """
    unknown = False

    def worth_it(error: BaseException) -> bool:
        nonlocal unknown
        unknown = unknown or isinstance(error, CommitUnknown)
        return isinstance(error, Conflict) or (unknown and isinstance(error, StoreUnavailable))

    def enough(state: RetryCallState) -> bool:
        return state.attempt_number >= (_TRIES_UNKNOWN if unknown else _TRIES)

    async for attempt in AsyncRetrying(
        retry=retry_if_exception(worth_it),
        stop=enough,
        wait=wait_random_exponential(multiplier=0.2, max=3.0),
        reraise=True,
    ):
        with attempt:
            return await work(unknown)
    raise AssertionError("unreachable")
