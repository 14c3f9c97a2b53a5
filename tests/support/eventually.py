"""Wait on a state, with a limit."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
LIMIT_SECONDS = 120.0  # generous: a machine may be busy with other things


async def eventually(look: Callable[[], Awaitable[T | None]], what: str, *, seconds: float = LIMIT_SECONDS) -> T:
    """Return the first truthy value of `look`, or fail naming `what` was waited for and the last value seen."""
    deadline = time.monotonic() + seconds
    while True:
        seen = await look()
        if seen:
            return seen
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s; last seen {seen!r}"
        await asyncio.sleep(0.05)
