"""For the Trainer of Hugging Face transformers: a callback.

    callback = QueuectlCallback("/checkpoints")    # after TrainingArguments, which start torch.distributed
    trainer = Trainer(..., callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume())

Each checkpoint that the Trainer saves, when asked or by its own `save_strategy`, is committed to the directory. Its files
are linked where that is possible, so they take no further room as long as the Trainer keeps its own
(`save_total_limit=1` keeps one). After SIGTERM the process saves and ends with exit code 143.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from queuectl.trainer import pytorch

EXIT_CODE = 143  # as of a process that SIGTERM ends


class QueuectlCallback(TrainerCallback):
    """Saves when asked, and makes the Trainer's checkpoints ones that can be trusted. Takes the options of `start` but `sharded`."""

    def __init__(self, directory: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """Begin the attempt. Raises as `queuectl.trainer.start`."""
        self.job = pytorch.start(directory, sharded=False, **options)

    def resume(self) -> str | None:
        """Return what `Trainer.train` takes as `resume_from_checkpoint`. To be called by all ranks."""
        checkpoint = self.job.resume()
        return str(checkpoint.path) if checkpoint else None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Have the Trainer save if somebody asks."""
        if self.job.should_save(state.global_step):
            control.should_save = True
        elif self.job.stopping:
            raise SystemExit(EXIT_CODE)
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Commit what the Trainer has saved; leave if it was for SIGTERM."""
        pytorch.agree(0)  # all ranks have written their part
        source = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        with self.job.saving(state.global_step) as folder:
            if self.job.rank == 0:
                shutil.copytree(source, folder, dirs_exist_ok=True, copy_function=_link)
        if self.job.stopping:
            raise SystemExit(EXIT_CODE)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system, or one without links
        shutil.copy2(source, target)
