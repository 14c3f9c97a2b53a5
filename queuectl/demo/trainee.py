"""What the demo trains: a classifier of random points, by gradient descent with momentum. It saves when it has to go.

    python -m queuectl.demo.trainee CURVE SECONDS

Each step is a line of the file CURVE: attempt, step, loss. The last one is the digest of the final weights. In the first
attempt a step takes so many seconds longer, so that there is time to disturb it.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from queuectl import trainer

STEPS = 150
BATCH, INPUTS, CLASSES, RATE, MOMENTUM = 64, 20, 5, 0.1, 0.9


def main(curve: Path, seconds: float) -> int:
    """Train, from the last checkpoint on if there is one; return the exit code."""
    job, attempt = trainer.start(), os.environ["QUEUECTL_ATTEMPT"]
    random = np.random.default_rng(1)
    truth = random.normal(size=(INPUTS, CLASSES))
    weights, momentum = np.zeros_like(truth), np.zeros_like(truth)
    checkpoint = job.resume()
    if checkpoint:
        with np.load(checkpoint.path / "model.npz") as saved:
            weights, momentum = saved["weights"], saved["momentum"]
        random.bit_generator.state = json.loads((checkpoint.path / "random.json").read_text())
    for step in range(checkpoint.step + 1 if checkpoint else 1, STEPS + 1):
        points = random.normal(size=(BATCH, INPUTS))
        labels = (points @ truth).argmax(axis=1)
        scores = points @ weights
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        loss = -np.log(chances[np.arange(BATCH), labels]).mean()
        chances[np.arange(BATCH), labels] -= 1
        momentum = MOMENTUM * momentum - RATE * (points.T @ chances) / BATCH
        weights = weights + momentum
        _write(curve, f"{attempt} {step} {float(loss)!r}")
        if attempt == "1":
            time.sleep(seconds)
        if job.should_save(step):
            with job.saving(step) as folder:
                np.savez(folder / "model.npz", weights=weights, momentum=momentum)
                (folder / "random.json").write_text(json.dumps(random.bit_generator.state))
        if job.stopping:
            return 143
    _write(curve, hashlib.sha256(weights.tobytes()).hexdigest())
    return 0


def _write(curve: Path, line: str) -> None:
    with curve.open("a") as file:
        file.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
