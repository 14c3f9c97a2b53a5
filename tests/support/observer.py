"""Have the demo's observer judge a stage: it watches the API server by itself and takes nobody's word."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from queuectl.demo.observer import Observer
from tests.support.stage import Stage


@asynccontextmanager
async def observing(stage: Stage, *, everywhere: bool = False) -> AsyncIterator[Observer]:
    """Watch while the test goes on; in the end nothing may have been partial or over-booked."""
    observer = Observer(stage.client, namespace="" if everywhere else stage.namespace)
    task = asyncio.create_task(observer.run())
    try:
        async with asyncio.timeout(30):
            await observer.ready()
        yield observer
        await observer.settled()
        assert observer.partial_gangs == []
        assert observer.over_bookings == []
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
