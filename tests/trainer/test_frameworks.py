"""The adapters with the real frameworks, where these are installed; 6 GB are too much to be needed for the other tests.

python -m pip install torch lightning transformers accelerate
python -m pytest tests/trainer/test_frameworks.py
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from queuectl.trainer.checkpoints import Folder
from tests.trainer.training import LIMIT_SECONDS, OURS, until

STEPS = 40
HERE = Path(__file__).parent
CASES = [
    pytest.param("pytorch", 1, id="pytorch"),
    pytest.param("pytorch", 2, id="pytorch-2-ranks"),
    pytest.param("pytorch-sharded", 2, id="pytorch-2-shards"),
    pytest.param("lightning", 1, id="lightning"),
    pytest.param("lightning", 2, id="lightning-2-ranks"),
    pytest.param("huggingface", 1, id="huggingface"),
    pytest.param("huggingface", 2, id="huggingface-2-ranks"),
]
NEEDS = {"pytorch": ["torch"], "lightning": ["lightning"], "huggingface": ["transformers", "accelerate"]}


class Run:
    """Processes of one attempt."""

    def __init__(self, home: Path, kind: str, ranks: int, attempt: int, port: int) -> None:
        self.home = home
        home.mkdir(exist_ok=True)
        command = [sys.executable, str(HERE / "frameworks.py"), kind, str(home), str(STEPS)]
        plain = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        torchrun = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if ranks > 1 else {}
        self.errors = [home / f"error-{attempt}-{rank}" for rank in range(ranks)]
        self.processes = []
        for rank, errors in enumerate(self.errors):
            env = plain | torchrun | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
            env |= {"QUEUECTL_ATTEMPT": str(attempt), "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
            env |= {"QUEUECTL_TERMINATION_LOG": str(home / f"message-{attempt}-{rank}"), "CUDA_VISIBLE_DEVICES": ""}
            with errors.open("w") as file:
                self.processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=file))

    def until_step(self, step: int) -> None:
        until(
            lambda: len(self.steps()) >= step or any(one.poll() is not None for one in self.processes), f"step {step}"
        )

    def steps(self) -> list[str]:
        log = self.home / "log"
        return log.read_text().splitlines() if log.exists() else []

    def end(self) -> list[int]:
        return [process.wait(LIMIT_SECONDS) for process in self.processes]

    def clear(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def said(self) -> str:
        return "".join(error.read_text()[-3000:] for error in self.errors)


@pytest.mark.parametrize(("kind", "ranks"), CASES)
def test_what_is_told_to_stop_goes_on_as_if_nothing_had_been(
    tmp_path: Path, kind: str, ranks: int, request: Any, unused_tcp_port_factory: Any
) -> None:
    for name in NEEDS[kind.partition("-")[0]]:
        pytest.importorskip(name)
    runs: list[Run] = []

    def run(folder: str, attempt: int) -> Run:
        runs.append(Run(tmp_path / folder, kind, ranks, attempt, unused_tcp_port_factory()))
        return runs[-1]

    def clear() -> None:
        for one in runs:
            one.clear()

    request.addfinalizer(clear)

    undisturbed = run("undisturbed", 1)
    assert undisturbed.end() == [0] * ranks, undisturbed.said()

    first = run("disturbed", 1)
    first.until_step(13)
    first.processes[-1].send_signal(signal.SIGTERM)
    assert first.end() == [143] * ranks, first.said()
    saved = Folder(tmp_path / "disturbed" / "checkpoints").steps()[0]
    assert saved == len(first.steps())
    reports = [(tmp_path / "disturbed" / f"message-1-{rank}").exists() for rank in range(ranks)]
    assert reports == [rank == 0 for rank in range(ranks)]  # of the processes in one container one reports

    second = run("disturbed", 2)
    assert second.end() == [0] * ranks, second.said()
    assert second.steps() == undisturbed.steps()
    assert (tmp_path / "disturbed" / "result").read_bytes() == (tmp_path / "undisturbed" / "result").read_bytes()
