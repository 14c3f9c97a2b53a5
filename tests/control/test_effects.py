import asyncio

import pytest

from queuectl.control.effects import _all
from queuectl.kube.client import ApiUnreachableError


async def test_work_that_fails_in_the_moment_in_which_it_is_cancelled_ends() -> None:
    failing = asyncio.Event()
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        await failing.wait()
        raise ApiUnreachableError("away")

    task = asyncio.create_task(_all([work()]))
    await started.wait()
    failing.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_that_fails_says_how() -> None:
    async def work() -> None:
        raise ApiUnreachableError("away")

    with pytest.raises(ApiUnreachableError):
        await _all([work()])
