"""For training loops in plain PyTorch: ranks agree by torch.distributed; states and random numbers in one file a writer.

    job = pytorch.start("/checkpoints")            # after init_process_group, if there is one
    checkpoint = job.resume()
    if checkpoint:
        pytorch.load(job, checkpoint, model=model, optimizer=optimizer)
    ...
        with job.saving(step) as folder:
            pytorch.save(job, folder, model=model, optimizer=optimizer)

`torch.distributed.checkpoint` can write to `folder` as well: all ranks get the same one.
"""

import logging
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from queuectl.trainer.checkpoints import Checkpoint
from queuectl.trainer.job import Job
from queuectl.trainer.job import start as start_job

FILE = "state.pt"

log = logging.getLogger("queuectl.trainer")
_group: tuple[Any, Any] = (None, None)  # the default group, and ours beside it


def start(directory: str | os.PathLike[str] | None = None, **options: Any) -> Job:
    """`queuectl.trainer.start` with what torch.distributed knows; call it after `init_process_group`, if at all."""
    if distributed.is_available() and distributed.is_initialized():
        options = {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()} | options
    return start_job(directory, **{"agree": agree} | options)


def agree(value: int) -> int:
    """Return the greatest value of all ranks. On the CPU, so that it waits for no work on a GPU."""
    if not (distributed.is_available() and distributed.is_initialized()):
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise RuntimeError("there are several ranks and no torch.distributed: call init_process_group first")
        return value
    tensor = torch.tensor(value, dtype=torch.int64)
    distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX, group=_on_cpu())
    return int(tensor)


def save(job: Job, folder: Path, **parts: Any) -> None:
    """Write the `state_dict()` of each of `parts`, and the random states of all ranks. To be called by all ranks.

    Rank 0 writes; all do, each for itself, if the job saves in shards (then every folder is another).
    """
    random_states = [_random_state()]
    if job.world_size > 1:
        random_states = [None] * job.world_size
        distributed.all_gather_object(random_states, _random_state(), group=_on_cpu())
    if job.rank == 0 or folder.name == f"rank-{job.rank}":
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({"parts": states, "random": random_states}, folder / FILE)


def load(job: Job, checkpoint: Checkpoint, **parts: Any) -> None:
    """Load what `save` has written into `parts`, by their names, and set the random state of this rank.

    Raises KeyError for a part that is not in the checkpoint, OSError for a shard that isn't there.
    """
    whole = checkpoint.path / FILE
    file = whole if whole.exists() else checkpoint.path / f"rank-{job.rank}" / FILE
    found = torch.load(file, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(found["parts"][name])
    if len(found["random"]) == job.world_size:
        _set_random_state(found["random"][job.rank])
    else:
        log.warning("%s is of %d ranks: no random state is restored", checkpoint.path, len(found["random"]))


def _on_cpu() -> Any:
    """Return a group of all ranks that works on the CPU."""
    global _group  # noqa: PLW0603 - as the default group is
    default = distributed.group.WORLD
    if _group[0] is not default:
        backend = distributed.get_backend()
        _group = default, default if backend == "gloo" else distributed.new_group(backend="gloo")
    return _group[1]


def _random_state() -> Any:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def _set_random_state(state: Any) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(state["numpy"])
