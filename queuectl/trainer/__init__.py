"""The trainer's side of queuectl: when to save, checkpoints that can be trusted, where to resume.

It needs Python alone, and nothing else of queuectl; outside queuectl it does the same. `docs/trainer.md` shows how::

    job = trainer.start("/checkpoints")
    checkpoint = job.resume()
    ...                                    # load from checkpoint.path, unless it is None
    for step in range(checkpoint.step + 1 if checkpoint else 1, steps + 1):
        ...                                # one step of training
        if job.should_save(step):
            with job.saving(step) as folder:
                ...                        # write files into folder
        if job.stopping:
            sys.exit(143)
"""

from queuectl.trainer.checkpoints import Checkpoint, Superseded
from queuectl.trainer.job import Agree, Job, NotSaved, start

__all__ = ["Agree", "Checkpoint", "Job", "NotSaved", "Superseded", "start"]
