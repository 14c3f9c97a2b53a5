"""What it costs the leader to read exporters of GPUs' metrics: CPU for each, and for a fleet."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from queuectl.control.exporters import AT_ONCE, RATE
from queuectl.kube.exporters import Exporter, Reader

READS = 2000
SHOWN_METRICS = 40  # of each GPU, in what dcgm-exporter shows by default and with its profiling metrics
_SERVER = """
import sys
from aiohttp import web
text = sys.stdin.buffer.read()
async def show(_): return web.Response(body=text, content_type="text/plain")
app = web.Application()
app.router.add_get("/metrics", show)
web.run_app(app, host="127.0.0.1", port=0, access_log=None, print=lambda line: print(line, flush=True))
"""


@dataclass(frozen=True)
class Cost:
    xids: int  # of the 8 GPUs
    bytes: int
    milliseconds: float  # of CPU for one reading, the client's alone
    busy_percent: float  # of one core, at the rate at which many are read


def shown(xids: int) -> bytes:
    lines = []
    for number in range(SHOWN_METRICS):
        name = "DCGM_FI_DEV_XID_ERRORS" if number == 0 else f"DCGM_FI_DEV_METRIC_{number}"
        lines += [f"# HELP {name} Something of a GPU (in units).", f"# TYPE {name} gauge"]
        for gpu in range(8):
            value = 79 if number == 0 and gpu < xids else 0
            labels = f'gpu="{gpu}",UUID="GPU-{gpu:036}",pci_bus_id="00000000:0{gpu}:00.0",device="nvidia{gpu}"'
            labels += ',modelName="NVIDIA H100 80GB HBM3",Hostname="node-1234",DCGM_FI_DRIVER_VERSION="580.95.05"'
            labels += ',container="main",namespace="team-a",pod="llm-worker-1-17",pod_uid=""'
            lines.append(f"{name}{{{labels}}} {value}")
    return "\n".join((*lines, "")).encode()


@asynccontextmanager
async def serving(text: bytes) -> AsyncIterator[int]:
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", _SERVER, stdin=pipe, stdout=pipe)
    try:
        assert server.stdin
        assert server.stdout
        server.stdin.write(text)
        server.stdin.close()
        said = await asyncio.wait_for(server.stdout.readline(), 30)
        yield int(said.rpartition(b":")[2].split()[0].rstrip(b"/"))
    finally:
        server.kill()
        await server.wait()


async def _cost(xids: int, reads: int) -> Cost:
    text = shown(xids)
    async with serving(text) as port, Reader() as reader:
        exporter = Exporter("node", "127.0.0.1", port, runs=True)
        slots = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with slots:
                await reader.read(exporter)

        await asyncio.gather(*(one() for _ in range(AT_ONCE)))
        before = time.process_time()
        await asyncio.gather(*(one() for _ in range(reads)))
        each = (time.process_time() - before) / reads
    return Cost(xids, len(text), 1000 * each, 100 * each * RATE)


def measure(reads: int = READS) -> list[Cost]:
    return [asyncio.run(_cost(xids, reads)) for xids in (0, 8)]


def table(costs: list[Cost]) -> str:
    lines = [f"reading exporters of 8 GPUs with {SHOWN_METRICS} metrics each, {RATE:g} a second"]
    lines.append(f"{'XIDs shown':>12}{'KiB each':>12}{'CPU each, ms':>16}{'of a core, %':>16}")
    lines += [f"{c.xids:>12}{c.bytes / 1024:>12.1f}{c.milliseconds:>16.2f}{c.busy_percent:>16.1f}" for c in costs]
    return "\n".join(lines)
