"""A training of next to no work, so that many run at once: whole numbers, each out of the one before on all ranks.

    python -I -S recurrence.py HOME --steps 1000 --every 20 --pause 0.1

Every rank keeps an account of its own in HOME/account-RANK: lines of attempt, what, step and Unix seconds, for when it
began (the step that it goes on from), each step, each checkpoint and its end. It ends as soon as it can once HOME/fast is
there. The number that comes out is the one line of HOME/result.
"""

import argparse
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from queuectl import trainer

MODULUS = 2**61 - 1
CONNECT_SECONDS = 300.0
_NUMBER = struct.Struct(">q")


def part(value: int, step: int, rank: int) -> int:
    """Return what a rank adds to the next value."""
    return (value * (rank + 3) + step * (rank + 7)) % MODULUS


def result(steps: int, ranks: int) -> int:
    """Return the value after so many steps."""
    value = 1
    for step in range(1, steps + 1):
        value = sum(part(value, step, rank) for rank in range(ranks)) % MODULUS
    return value


class Peers:
    """The other ranks, all connected to rank 0 by a socket in the folder that they share."""

    def __init__(self, rank: int, ranks: int, path: Path) -> None:
        self.rank = rank
        self._others: list[socket.socket] = []
        if ranks == 1:
            return
        deadline = time.monotonic() + CONNECT_SECONDS
        if rank == 0:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path))
                server.listen(ranks)
                server.settimeout(CONNECT_SECONDS)
                self._others = [server.accept()[0] for _ in range(ranks - 1)]
            return
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(path))
            except OSError:
                connection.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                self._others = [connection]
                return

    def reduce(self, value: int, how: Callable[[Iterable[int]], int]) -> int:
        """Return `how` of the values of all ranks. Raises ConnectionError when one of them is lost."""
        if self.rank == 0:
            value = how([value, *(_receive(other) for other in self._others)])
            for other in self._others:
                other.sendall(_NUMBER.pack(value))
            return value
        self._others[0].sendall(_NUMBER.pack(value))
        return _receive(self._others[0])


def _receive(peer: socket.socket) -> int:
    data = peer.recv(_NUMBER.size, socket.MSG_WAITALL)
    if len(data) < _NUMBER.size:
        raise ConnectionError("a peer is lost")
    return int(_NUMBER.unpack(data)[0])


class Account:
    """What this rank says that it has done. Each line is one write, so none is lost with the process."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._attempt = attempt

    def say(self, what: str, step: int, at: float | None = None, *, attempt: int | None = None) -> None:
        line = f"{self._attempt if attempt is None else attempt} {what} {step} {at or time.time():.6f}\n"
        os.write(self._file, line.encode())


class Told:
    """SIGTERM ends the process at once, unless it is kept for the trainer to hear."""

    def __init__(self) -> None:
        self.heard = self.kept = False
        signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, number: int, _: object) -> None:
        self.heard = True
        if not self.kept:
            sys.exit(128 + number)


def train(given: argparse.Namespace, told: Told, account: Account, peers: Peers, ranks: int) -> int:
    """Train; return the exit code."""
    job = trainer.start(agree=lambda value: peers.reduce(value, max), every_steps=given.every)
    told.kept = True
    checkpoint = job.resume()
    step, value = (checkpoint.step, int((checkpoint.path / "value").read_text())) if checkpoint else (0, 1)
    if checkpoint:  # whoever made it may have died before it said so
        account.say("saved", step, checkpoint.at, attempt=checkpoint.attempt)
    account.say("begin", step)
    while step < given.steps:
        step += 1
        value = peers.reduce(part(value, step, peers.rank), sum) % MODULUS
        account.say("step", step)
        if not (given.home / "fast").exists():
            time.sleep(given.pause)
        if job.should_save(step):
            with job.saving(step) as folder:
                if peers.rank == 0:
                    (folder / "value").write_text(str(value))
            account.say("saved", step, job.folder.read(step).at)
        if job.stopping:
            return 143
    if peers.rank == 0:
        (given.home / "result").write_text(str(value))
    peers.reduce(0, max)  # nobody leaves before the result is there
    return 0


def main() -> int:
    """Train, or wait for the end when other ranks are lost; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--pause", type=float, required=True)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for SIGTERM when a peer is lost")
    given, told = parser.parse_args(), Told()
    rank, ranks, attempt = (int(os.environ[f"QUEUECTL_{name}"]) for name in ("RANK", "WORLD_SIZE", "ATTEMPT"))
    account = Account(given.home / f"account-{rank}", attempt)
    account.say("process", os.getpid())
    code = 1
    try:
        peers = Peers(rank, ranks, given.home / f"peers-{attempt}")
        code = train(given, told, account, peers, ranks)
    except ConnectionError as error:
        sys.stderr.write(f"{error}\n")
        told.kept = False
        if not told.heard:
            time.sleep(given.patience)
        code = 143 if told.heard else 1
    finally:
        account.say("end", code)
    return code


if __name__ == "__main__":
    sys.exit(main())
