"""For Lightning: a callback.

    callback = QueuectlCallback("/checkpoints")
    trainer = Trainer(..., callbacks=[callback])
    trainer.fit(model, ckpt_path=callback.resume_path())

After SIGTERM all ranks save after the same step, and end with exit code 143. In the middle of an epoch Lightning goes on
with the right batch only if the data loader has `state_dict` and `load_state_dict`.
"""

import os
import signal
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from queuectl.trainer import pytorch
from queuectl.trainer.job import Job, folder_of

FILE = "lightning.ckpt"
EXIT_CODE = 143  # as of a process that SIGTERM ends


class QueuectlCallback(Callback):
    """Saves when asked, and leaves after SIGTERM. Takes the options of `start` but ranks and `sharded`."""

    def __init__(self, directory: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """Do nothing yet."""
        self.job: Job | None = None
        """There from the beginning of `fit` on."""
        self._directory, self._options = directory, options
        self._heard: Any = None
        self._step = 0

    def resume_path(self) -> str | None:
        """Return what `Trainer.fit` takes as `ckpt_path`. Raises as `queuectl.trainer.start`.

        Ranks don't know of each other yet: each checks all files.
        """
        folder = folder_of(self._directory)
        if int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0) == 0:
            folder.begin()
        checkpoint = folder.newest()
        return str(checkpoint.path / FILE) if checkpoint else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin, now that ranks are known."""
        if stage == "fit" and self.job is None:
            ranks = {"rank": trainer.global_rank, "world_size": trainer.world_size}
            self.job = pytorch.start(self._directory, sharded=False, **self._options, **ranks)
            self._heard = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hear SIGTERM alone: Lightning would leave at once, and without asking the other ranks."""
        signal.signal(signal.SIGTERM, self._heard)
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if somebody asks, once an optimizer step is done."""
        if self.job is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self.job.should_save(self._step):
            with self.job.saving(self._step) as folder:
                trainer.save_checkpoint(folder / FILE)
        if self.job.stopping:
            raise SystemExit(EXIT_CODE)
