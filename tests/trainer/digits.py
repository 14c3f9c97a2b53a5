"""Train a small network on handwritten digits (those that scikit-learn ships), with numpy and `queuectl.trainer`.

    python digits.py CHECKPOINTS --steps 300 --every 50 --result final.npz --log steps.txt [--peers PORT] [--sharded]

It is the same to the last bit however often it is interrupted: what a step takes of the data follows from its number, the
noise on it from a random state that is saved. With several ranks each takes a part of every batch, and gradients are added
up in the order of ranks. Each step is a line of the log: attempt, step, loss.
"""

import argparse
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from queuectl import trainer

Floats = npt.NDArray[np.float64]
T = TypeVar("T")
BATCH, HIDDEN, RATE, MOMENTUM, NOISE = 64, 32, 0.1, 0.9, 0.05
CONNECT_SECONDS = 30.0
LATE_SECONDS = 120.0  # at most


def digits() -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return 1797 pictures of 64 pixels from 0 to 1, and their digits."""
    found = importlib.util.find_spec("sklearn")
    assert found is not None
    assert found.origin is not None
    table = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return table[:, :64] / 16, table[:, 64].astype(np.int64)


class Peers:
    """The other ranks, all connected to rank 0."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        self.rank = rank
        self.connections: list[Connection[Any, Any]] = []
        address = ("127.0.0.1", port)
        if world_size == 1:
            return
        if rank == 0:
            with Listener(address, backlog=world_size) as listener:
                arrived = [listener.accept() for _ in range(world_size - 1)]
            self.connections = sorted(arrived, key=lambda connection: int(connection.recv()))
            self._send_at_once()
            return
        deadline = time.monotonic() + CONNECT_SECONDS
        while not self.connections:
            try:
                self.connections = [Client(address)]
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        self._send_at_once()
        self.connections[0].send(rank)

    def _send_at_once(self) -> None:
        for connection in self.connections:
            with socket.socket(fileno=os.dup(connection.fileno())) as same:
                same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def reduce(self, value: T, how: Callable[[Sequence[T]], T]) -> T:
        """Return the same on all ranks: `how` of the values of all, in the order of ranks."""
        if self.rank == 0:
            result = how([value, *(connection.recv() for connection in self.connections)])
            for connection in self.connections:
                connection.send(result)
            return result
        self.connections[0].send(value)
        received: T = self.connections[0].recv()
        return received


class Model:
    """Two layers, their momentum, and the state of the noise."""

    def __init__(self, seed: int) -> None:
        self.noise = np.random.default_rng(seed)
        self.weights = [
            self.noise.normal(0, 0.2, (64, HIDDEN)),
            np.zeros(HIDDEN),
            self.noise.normal(0, 0.2, (HIDDEN, 10)),
            np.zeros(10),
        ]
        self.momentum = [np.zeros_like(weight) for weight in self.weights]

    def gradients(self, pictures: Floats, labels: npt.NDArray[np.int64]) -> list[Floats]:
        """Return the sums of the gradients over the pictures, and that of the loss."""
        first, first_bias, second, second_bias = self.weights
        hidden = np.tanh(pictures @ first + first_bias)
        scores = hidden @ second + second_bias
        scores -= scores.max(axis=1, keepdims=True)
        chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        loss = -np.log(chances[np.arange(len(labels)), labels]).sum()
        chances[np.arange(len(labels)), labels] -= 1
        back = (chances @ second.T) * (1 - hidden**2)
        return [pictures.T @ back, back.sum(axis=0), hidden.T @ chances, chances.sum(axis=0), np.array(loss)]

    def apply(self, gradients: Sequence[Floats]) -> None:
        """Take a step down the mean gradient."""
        for index, gradient in enumerate(gradients):
            self.momentum[index] = MOMENTUM * self.momentum[index] - RATE * gradient / BATCH
            self.weights[index] += self.momentum[index]

    def right(self, pictures: Floats, labels: npt.NDArray[np.int64]) -> float:
        """Return the share of the pictures that it gets right."""
        first, first_bias, second, second_bias = self.weights
        scores = np.tanh(pictures @ first + first_bias) @ second + second_bias
        return float((scores.argmax(axis=1) == labels).mean())

    def save(self, folder: Path) -> None:
        """Write all of it."""
        arrays = {f"{kind}{index}": array for kind, index, array in self._arrays()}
        np.savez(folder / "model.npz", allow_pickle=False, **arrays)
        (folder / "noise.json").write_text(json.dumps(self.noise.bit_generator.state))

    def load(self, folder: Path) -> None:
        """Read all of it."""
        with np.load(folder / "model.npz") as found:
            for kind, index, array in self._arrays():
                array[...] = found[f"{kind}{index}"]
        self.noise.bit_generator.state = json.loads((folder / "noise.json").read_text())

    def _arrays(self) -> list[tuple[str, int, Floats]]:
        return [("weight", *pair) for pair in enumerate(self.weights)] + [
            ("momentum", *pair) for pair in enumerate(self.momentum)
        ]


def summed(gradients: Sequence[list[Floats]]) -> list[Floats]:
    """Return the sums over the ranks."""
    return [np.sum(parts, axis=0) for parts in zip(*gradients, strict=True)]


def batch(step: int, size: int, seed: int) -> npt.NDArray[np.int64]:
    """Return which pictures the step is of: each is taken once in an epoch."""
    epoch, place = divmod((step - 1) * BATCH, size - size % BATCH)
    return np.random.default_rng([seed, epoch]).permutation(size)[place : place + BATCH]


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each step takes longer")
    parser.add_argument("--fast", type=Path, help="a file from whose appearance on no step takes longer")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--peers", type=int, default=0, help="the port at which rank 0 waits for the others")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--die-saving", type=int, help="be killed while the checkpoint of this step is half written")
    parser.add_argument("--full-at", type=int, help="the disk is full when the checkpoint of this step is written")
    parser.add_argument(
        "--when-asked",
        choices=("ignore", "be-late", "repeat", "die"),
        help="what to do instead of answering: never save again, and ignore SIGTERM; save when SIGTERM comes, after the"
        " deadline; save again and again; be killed while the checkpoint is half written",
    )
    parser.add_argument("--patient", action="store_true", help="train on when a checkpoint can't be written")
    return parser.parse_args()


class Asked:
    """What is done when somebody asks: as it should be, or what the command line says instead."""

    def __init__(self, instead: str | None) -> None:
        self.now = False
        self._instead = instead
        self._told_to_stop = False
        signal.signal(signal.SIGTERM, lambda *_: self._hear())  # the trainer calls it, too

    def should_save(self, job: trainer.Job, step: int) -> bool:
        """Tell whether to save."""
        if self._instead == "ignore" and (self._told_to_stop or job.deadline is not None):
            return False
        due = job.should_save(step) or (self.now and self._instead == "repeat")
        self.now = self.now or (due and (job.stopping or job.deadline is not None))
        late = time.monotonic() + LATE_SECONDS
        while self.now and self._instead == "be-late" and not self._told_to_stop and time.monotonic() < late:
            time.sleep(0.02)
        return due

    def _hear(self) -> None:
        self._told_to_stop = True


def pause(given: argparse.Namespace) -> None:
    """Take longer, if it is still to be slow."""
    if not (given.fast and given.fast.exists()):
        time.sleep(given.pause)


def write(model: Model, folder: Path, step: int, given: argparse.Namespace, *, asked: bool) -> None:
    """Write a checkpoint, or suffer what the command line has in store."""
    if step == given.full_at:
        (folder / "noise.json").symlink_to("/dev/full")
    model.save(folder)
    if step == given.die_saving or (asked and given.when_asked == "die"):
        os.kill(os.getpid(), signal.SIGKILL)


def train(given: argparse.Namespace, peers: Peers, model: Model, rank: int, world_size: int) -> int:
    """Take all steps that are left; return the exit code."""
    pictures, labels = digits()
    asked = Asked(given.when_asked)
    writes = rank == 0 or given.sharded
    job = trainer.start(
        given.directory,
        every_steps=given.every,
        sharded=given.sharded,
        agree=lambda value: peers.reduce(value, max),
    )
    checkpoint = job.resume()
    first = 1
    if checkpoint:
        model.load(checkpoint.path / f"rank-{rank}" if given.sharded else checkpoint.path)
        first = checkpoint.step + 1
        say("\n".join(["resumed", *checkpoint.skipped]))
    say(f"port {job.port}")

    for step in range(first, given.steps + 1):
        taken = batch(step, len(labels), given.seed)
        noisy = pictures[taken] + model.noise.normal(0, NOISE, (BATCH, 64))
        mine = slice(rank, None, world_size)
        *gradients, loss = peers.reduce(model.gradients(noisy[mine], labels[taken][mine]), summed)
        model.apply(gradients)
        if given.log and rank == 0:
            with given.log.open("a") as log:
                log.write(f"{job.folder.attempt} {step} {float(loss)!r}\n")
        pause(given)
        if asked.should_save(job, step):
            try:
                with job.saving(step) as folder:
                    if writes:
                        write(model, folder, step, given, asked=asked.now)
            except OSError as error:
                if not given.patient:
                    raise
                say(f"not saved: {error}")
        if job.stopping:
            return 143
    if given.result and rank == 0:
        np.savez(
            given.result, allow_pickle=False, **{f"w{index}": weight for index, weight in enumerate(model.weights)}
        )
        say(f"right: {model.right(pictures, labels):.3f}")
    return 0


def say(text: str) -> None:
    """Print it at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Train; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = arguments()
    rank, world_size = int(os.environ.get("QUEUECTL_RANK", "0")), int(os.environ.get("QUEUECTL_WORLD_SIZE", "1"))
    return train(given, Peers(rank, world_size, given.peers), Model(given.seed), rank, world_size)


if __name__ == "__main__":
    sys.exit(main())
