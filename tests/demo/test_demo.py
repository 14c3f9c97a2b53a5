"""The demo as its user runs it: a process of its own."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from queuectl.kube.client import KubeClient
from queuectl.kube.names import jobs_path

SECONDS = 300.0


class Demo:
    """A running demo; its output is a file, or a terminal that fills a file."""

    def __init__(self, state: Path, *options: str, terminal: bool = False) -> None:
        self.state = state
        self._out = state.with_suffix(".out")
        # As if the user worked with another cluster and another database.
        strange = {"DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none", "KUBECONFIG": "/nowhere"}
        command = [sys.executable, "-m", "queuectl.demo", "--state", str(state), *options]
        env = os.environ | strange | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        self._terminal: int | None = None
        with self._out.open("wb") as out:
            target: int = out.fileno()
            if terminal:
                self._terminal, target = pty.openpty()
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=target, stderr=target, start_new_session=True
            )
            if terminal:
                os.close(target)

    def wait(self) -> int:
        """Return its exit code."""
        if self._terminal is not None:
            self._read_terminal()
        return self.process.wait(SECONDS)

    def until(self, text: str) -> None:
        deadline = time.monotonic() + SECONDS
        while text not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, f"{text!r} not within {SECONDS:g} s:\n{self.output}"
            time.sleep(0.05)

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        return self.output.rstrip().splitlines()[-1]

    def processes(self) -> list[psutil.Process]:
        """Return what it has started: all of it has the demo's folder on its command line."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if str(self.state) in " ".join(process.info["cmdline"] or ()) and process.pid != self.process.pid
        ]

    def clean(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        subprocess.run(
            [sys.executable, "-m", "queuectl.demo", "--state", str(self.state), "--end"], check=True, timeout=SECONDS
        )

    def _read_terminal(self) -> None:
        assert self._terminal is not None
        with self._out.open("ab") as out:
            while True:
                try:
                    out.write(os.read(self._terminal, 65536))
                except OSError:  # its other end is closed
                    break
        os.close(self._terminal)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "demo"


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_the_demo_runs_the_window_and_leaves_nothing(state: Path) -> None:
    demo = Demo(state, "--speed", "3")
    try:
        demo.until("setup  done")
        started = demo.processes()
        assert len(running(started)) == 8  # five components, the node agent, the controller, its Postgres
        assert demo.wait() == 0, demo.output
        assert demo.last_line == "demo: 60 jobs finished, 0 partial gangs, 0 over-bookings"
        assert "jobs ph-80475 to ph-80534" in demo.output
        assert "saw all pods of 60 gangs succeed" in demo.output
        waited = re.search(r"(\d+) gangs had to wait, (\d+) of them of 2 GPUs or more", demo.output)
        assert waited
        assert int(waited[1]) >= 10
        assert re.search(r"ph-805\d\d \(32 GPUs, vc14\) waits: Queue vc14 ", demo.output)
        assert "ph-80513 (64 GPUs, vc14) runs" in demo.output
        gave_way = re.search(
            r"after step (\d+) of \d+; saved was step (\d+)\n +lost: 0 steps, 0 GPU-seconds", demo.output
        )
        assert gave_way
        assert gave_way[1] == gave_way[2]
        assert "against those of undisturbed: equal to the last bit" in demo.output
        assert not running(started)
        assert not demo.processes()
        assert [path.name for path in state.iterdir()] == [".demo.lock"]
    finally:
        demo.clean()


async def test_kept_on_a_terminal_it_goes_on_until_it_is_ended(state: Path) -> None:
    demo = Demo(state, "--speed", "10", "--keep", terminal=True)
    try:
        assert demo.wait() == 0, demo.output
        assert demo.last_line == "demo: 60 jobs finished, 0 partial gangs, 0 over-bookings"
        for shown in ("GPUS USED OF QUOTA", "WAITS BECAUSE", "node-0016", "observer: 0 partial gangs"):
            assert shown in demo.output
        started = demo.processes()
        assert len(running(started)) == 8
        told = re.search(r"export KUBECONFIG=(\S+)", demo.output)
        assert told
        async with await KubeClient.open(told[1]) as client:
            jobs = (await client.request("GET", jobs_path()))["items"]
        assert {job["status"]["phase"] for job in jobs} == {"Succeeded"}
        second = Demo(state)
        assert second.wait() == 1
        assert "A demo was left running" in second.output
        assert f"--end --state {state}" in second.output
    finally:
        demo.clean()
    assert not running(started)


@pytest.mark.parametrize(
    ("number", "when"),
    [(signal.SIGTERM, "6 queues there"), (signal.SIGINT, "ph-80475 (2 GPUs, vc14) runs")],
    ids=["in setup", "in the act"],
)
def test_interrupted_it_ends_what_it_started(state: Path, number: signal.Signals, when: str) -> None:
    demo = Demo(state)
    try:
        demo.until(when)
        started = demo.processes()
        assert len(started) >= 5
        demo.process.send_signal(number)
        assert demo.wait() == 130, demo.output
        assert "interrupted" in demo.last_line
        assert not running(started)
        assert not demo.processes()
        assert [path.name for path in state.iterdir()] == [".demo.lock"]
    finally:
        demo.clean()


def test_what_a_killed_demo_left_is_ended_by_a_later_call(state: Path) -> None:
    demo = Demo(state)
    try:
        demo.until("setup  done")
        started = demo.processes()
        demo.process.kill()
        demo.process.wait(10)
        assert len(running(started)) == 8
    finally:
        demo.clean()
    assert not running(started)
