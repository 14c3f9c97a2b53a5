"""A gang whose pods are processes that work together, admitted by queuectl and bound by kube-scheduler."""

import json
import textwrap
from pathlib import Path

import pytest

from queuectl.kube.names import pods_path
from queuectl.local.controlplane import Running
from queuectl.local.prepare import nodes_are_ready
from tests.support.real import Agent
from tests.support.stage import Stage

RANKS = 4
RING = """
    import os, socket, time
    rank, size = int(os.environ["QUEUECTL_RANK"]), int(os.environ["QUEUECTL_WORLD_SIZE"])
    job, domain = os.environ["QUEUECTL_MASTER_ADDR"].split(".")

    def address(peer):
        while True:  # until the peer is bound to a node
            try:
                return socket.gethostbyname(f"{job[:-1]}{peer % size}.{domain}")
            except OSError:
                time.sleep(0.05)

    def connect(peer):
        while True:  # until the peer listens
            try:
                return socket.create_connection((address(peer), 9123), 5)
            except OSError:
                time.sleep(0.05)

    with socket.create_server((os.environ["ADDRESS"], 9123)) as server:
        to_next = connect(rank + 1)
        from_last, _ = server.accept()
        with to_next, from_last, from_last.makefile("r") as lines:
            total, passed = 0, 10**rank
            for _ in range(size):  # everybody's part comes by once
                total += passed
                to_next.sendall(f"{passed}\\n".encode())
                passed = int(lines.readline())
    print(total)
"""


@pytest.fixture
def agent(mounts: None, control_plane: Running, tmp_path: Path, stage: Stage) -> Agent:
    return Agent(control_plane, tmp_path, [f"{stage.name}-real-{number}" for number in range(2)], gpus=RANKS // 2)


async def test_a_gang_of_processes_adds_up_what_each_has(stage: Stage, agent: Agent) -> None:
    await stage.nodes(1)  # simulated, and too full
    await stage.others_pod("other", 8)
    await stage.queue(RANKS)
    try:
        agent.start()
        await nodes_are_ready(stage.client, agent.nodes)
        await stage.adopt(agent.nodes)
        job = stage.job("ring", RANKS, 1, pod={"subdomain": "ring"})
        container = job["spec"]["roles"][0]["template"]["spec"]["containers"][0]
        container["command"] = ["python", "-c", textwrap.dedent(RING)]
        container["env"] = [{"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
        await stage.create(job)
        stage.controller().start()
        done = await stage.until_phase("ring", "Succeeded", "Failed")
        pods = await stage.pods("ring")
        path = pods_path(stage.namespace)
        said = [
            await stage.client.request_raw("GET", f"{path}/{pod['metadata']['name']}/log", accept="*/*") for pod in pods
        ]
        assert done["status"]["phase"] == "Succeeded", (json.dumps(done["status"]), said)
        assert said == [b"1111\n"] * RANKS
        assert {pod["spec"]["nodeName"] for pod in pods} == set(agent.nodes)
    finally:
        agent.end()
