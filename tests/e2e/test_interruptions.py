"""Gangs of real processes, interrupted at random in all ways: each comes to its end, and loses no more than it must.

INTERRUPTIONS says how many, INTERRUPTED_GANGS of how many gangs, INTERRUPTIONS_SEED which.
"""

import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from queuectl.local.controlplane import Running
from tests.support import ledger
from tests.support.chaos import Chaos, say
from tests.support.observer import observing
from tests.support.stage import Stage

COUNT = int(os.environ.get("INTERRUPTIONS", "25"))
GANGS = int(os.environ.get("INTERRUPTED_GANGS", "8"))
SEED = int(os.environ.get("INTERRUPTIONS_SEED", "1"))


@pytest.fixture
async def chaos(mounts: None, stage: Stage, control_plane: Running, tmp_path: Path) -> AsyncIterator[Chaos]:
    result = Chaos(stage, control_plane, tmp_path, random.Random(SEED))
    try:
        yield result
    finally:
        await result.close()


async def test_whatever_interrupts_gangs_they_end_as_if_nothing_had_and_lose_no_more_than_they_must(
    stage: Stage, chaos: Chaos
) -> None:
    say(f"seed {SEED}: {COUNT} interruptions of {GANGS} gangs")
    await chaos.open(GANGS, steps=60 * COUNT)
    async with observing(stage):
        for _ in range(COUNT):
            await chaos.interrupt()
        await chaos.over()
    await chaos.judge()
    await ledger.until_free(stage)
