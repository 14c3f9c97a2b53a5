"""`python -m queuectl.local.agent NODE...`: the nodes of the local control plane that run pods as processes."""

import argparse
import asyncio
import contextlib
import signal
import sys
from pathlib import Path

import structlog

from queuectl.kube.client import KubeClient
from queuectl.local.agent.command import mounts_work
from queuectl.local.agent.node import Node, manifest, run
from queuectl.local.agent.pod import Host
from queuectl.local.agent.server import serving

log = structlog.get_logger()


def main() -> None:
    """Run the agent until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="Run the pods of some nodes as processes of this machine.")
    parser.add_argument("nodes", nargs="+", metavar="NODE", help="name of a node to be")
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where pods have their files")
    parser.add_argument(
        "--certificates", type=Path, required=True, help="folder of apiserver.crt, with its CA, and apiserver.key"
    )
    parser.add_argument("--gpus", type=int, default=0, help="that each node pretends to have")
    parser.add_argument("--lease-seconds", type=int, default=40)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    asyncio.run(_run(parser.parse_args()))


async def _run(asked: argparse.Namespace) -> None:
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    begin = "-----BEGIN CERTIFICATE-----"
    authority = begin + (asked.certificates / "apiserver.crt").read_text().rpartition(begin)[2]
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(await KubeClient.open(asked.kubeconfig))
        resources = manifest("", asked.gpus)["status"]["allocatable"]
        host = Host(client, folder, authority, resources, await mounts_work(folder))
        port = await stack.enter_async_context(serving(host, asked.certificates))
        log.info("serving", port=port, mounts=host.mounts_work)
        nodes = [
            Node(host, name, port=port, gpus=asked.gpus, lease_seconds=asked.lease_seconds) for name in asked.nodes
        ]
        await run(host, nodes, told)


if __name__ == "__main__":
    main()
