"""A training process as part of its job: when to save, how, where to resume."""

import atexit
import contextlib
import json
import logging
import operator
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from queuectl.trainer.asks import Ask, Asks, Server
from queuectl.trainer.checkpoints import LAST_STEP, Checkpoint, Folder, seal
from queuectl.trainer.reports import Reports

LOOK_SECONDS = 0.2  # between looks at the file of asks; SIGTERM and requests are seen at once
RETRY_SECONDS = 10.0  # after a save that failed, doubled each time
MOST_RETRY_SECONDS = 300.0
FLUSH_SECONDS = 5.0  # for the last report, at the end
_SAVE, _STOP = 1, 2  # what ranks wish; the greatest counts

Agree = Callable[[int], int]

log = logging.getLogger("queuectl.trainer")


class NotSaved(OSError):  # noqa: N818
    """Another rank could not save its part, so there is no checkpoint of this step."""


class Job:
    """A process of a training job; `start` makes it. Not for use by several threads, but for `heartbeat`."""

    def __init__(
        self,
        folder: Folder,
        *,
        rank: int,
        world_size: int,
        agree: Agree | None,
        every_steps: int | None,
        every_seconds: float | None,
        sharded: bool,
        port: int | None,
        heartbeat_file: Path | None,
    ) -> None:
        """See `start`."""
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must be from 0 to {world_size - 1}, as world_size is {world_size}")
        if world_size > 1 and agree is None:
            raise ValueError(
                f"world_size is {world_size} and agree is missing: all ranks must save after the same step. Give a function"
                " that returns the greatest of the numbers that the ranks call it with, such as an all-reduce; or, if"
                " these processes train each for itself, a directory for each, rank=0 and world_size=1"
            )
        for name, value in (("every_steps", every_steps), ("every_seconds", every_seconds)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be greater than 0, or None")
        self.rank, self.world_size = rank, world_size
        self.folder = folder
        self.stopping = False
        """Whether to leave the loop: a process of the job has got SIGTERM. As of the last `should_save`."""
        self._agree: Agree = agree or (lambda value: value)
        self._every_steps, self._every_seconds, self._sharded = every_steps, every_seconds, sharded
        self._heartbeat_file = heartbeat_file
        self._last: dict[str, Any] | None = None  # the last checkpoint, as it is reported
        self._from: int | None = None  # the step that intervals are counted from
        self._ask: str | None = None  # the last one that was answered
        self._due: tuple[Ask, ...] = ()  # what the checkpoint answers that `should_save` has called for
        self._saved_to_stop = False
        self._looked = self._saved_at = time.monotonic()
        self._failures, self._retry_at = 0, 0.0
        self._tried_for: set[str] = set()  # the asks for which the last save, which failed, was made
        if rank == 0:
            folder.begin()
        ask_file = os.environ.get("QUEUECTL_ASK_FILE")
        self._asks = Asks(Path(ask_file) if ask_file else None)
        first_here = int(os.environ.get("LOCAL_RANK") or 0) == 0  # of the processes in this container: it talks for all
        self._reports = Reports(os.environ) if first_here else None
        host = os.environ.get("QUEUECTL_CHECKPOINT_ADDRESS", "")
        self._server = Server(host, port, self._asks) if port is not None and first_here else None
        self.port = self._server.server_port if self._server else None
        """Where asks are taken by HTTP, if they are."""
        self._stop_hearing = self._asks.hear_sigterm()
        self.heartbeat()
        atexit.register(self.close)

    def resume(self) -> Checkpoint | None:
        """Return the newest checkpoint that can be trusted, None if there is none. To be called by all ranks.

        Its `skipped` says what is wrong with newer ones, so does the log. Reads all of it once, for the checksums.
        """
        found = self.folder.newest(rank=self.rank, world_size=self.world_size, agree=self._agree)
        hint = os.environ.get("QUEUECTL_RESUME_STEP", "")
        if self.rank == 0 and hint.isdecimal() and int(hint) > (found.step if found else -1):
            log.warning(
                "queuectl knows of a checkpoint of step %s, but the newest to be trusted here is %s", hint, found
            )
        self._last = _reported(found) if found else None
        self._from = found.step if found else 0
        self._saved_at = time.monotonic()
        return found

    def should_save(self, step: int) -> bool:
        """Tell whether to save now that `step` steps are done. To be called by all ranks after the same steps.

        It is true if anybody asks, if an interval has passed, and once after SIGTERM. Without `agree` it costs about a
        microsecond. It is the heartbeat, too.
        """
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._asks.look()
            self.heartbeat()
        self._due = self._asks.waiting() if self._asks else ()
        wish = self._agree(self._wish(step, now))
        if wish == 0:
            return False
        if wish == _STOP:
            self.stopping = True
        if self._last and self._last["step"] == step:
            self._report(self._last, self._due, stopping=self.stopping)
            return False
        return True

    @contextlib.contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """Make what is written to the folder that this gives the checkpoint of `step`. To be called by all ranks.

        All ranks get the same folder, in which rank 0 writes, or all if they agree on names; if the job saves in shards
        each gets its own. Afterwards it is on disk, reported, and older ones are removed. If anything goes wrong in the
        block or after it, what was written is removed, older checkpoints stay as they are, and the error goes on: OSError,
        for a full disk, say; NotSaved when it went wrong on another rank; Superseded when a later attempt has begun.
        """
        step = operator.index(step)
        if not 0 <= step <= LAST_STEP:
            raise ValueError(f"step is {step}; it must be from 0 to {LAST_STEP}")
        self.heartbeat()
        asks, stopping = self._asks.waiting(), self.stopping
        whole = self.folder.unfinished(step)
        mine = whole / f"rank-{self.rank}" if self._sharded else whole
        try:
            with self._jointly(step):
                if self.rank == 0:
                    self.folder.open(step)
            with self._jointly(step):
                if self._sharded:
                    mine.mkdir()
                yield mine
                if self._sharded:
                    seal(mine, {"step": step, "attempt": self.folder.attempt, "rank": self.rank})
            with self._jointly(step):
                if self.rank == 0:
                    self.folder.commit(step, world_size=self.world_size, sharded=self._sharded)
        except BaseException as error:
            if self.rank == 0:
                self.folder.discard(step)
            self._tried_for = {ask.id for ask in self._asks.waiting()}
            self._asks.failed(error)
            if self._reports:
                self._reports.not_saved(f"step {step}: {error!r}")
            self._retry_at = time.monotonic() + min(RETRY_SECONDS * 2**self._failures, MOST_RETRY_SECONDS)
            self._failures += 1
            raise
        self._failures, self._retry_at, self._tried_for = 0, 0.0, set()
        self._report(_reported(self.folder.read(step)), asks, stopping=stopping)
        if self.rank == 0:
            self.folder.prune()

    def saved(self, step: int, path: str) -> None:
        """Report a checkpoint that was saved after `should_save(step)` by other means than `saving`, at `path`.

        Where to resume is then up to the training code, and so is what happens to old ones.
        """
        self._report({"step": step, "at": time.time(), "path": path, "digest": None}, self._due, stopping=self.stopping)

    @property
    def deadline(self) -> float | None:
        """Until when somebody waits for a checkpoint, in Unix seconds; None if nobody has asked this process.

        Nobody tells a process how long it has after SIGTERM: that is the pod's terminationGracePeriodSeconds.
        """
        return min((ask.deadline for ask in self._asks.waiting()), default=None)

    def heartbeat(self) -> None:
        """Show that the process gets on, by the time of the heartbeat file if there is one; for long work between steps."""
        if self._heartbeat_file is None:
            return
        try:
            self._heartbeat_file.touch()
        except OSError as error:
            log.warning("no heartbeat: %s", error)

    def close(self) -> None:
        """Send the last report, within seconds, and hear nothing more. Done at the end of the process by itself."""
        atexit.unregister(self.close)
        self._asks.failed(OSError("the process ends"))
        if self._server:
            self._server.close(FLUSH_SECONDS)
        if self._reports:
            self._reports.close(FLUSH_SECONDS)
        self._stop_hearing()

    def _wish(self, step: int, now: float) -> int:
        if self._asks.told_to_stop and not self._saved_to_stop:
            return _STOP
        if now < self._retry_at and all(ask.id in self._tried_for for ask in self._asks.waiting()):
            return 0
        if self._asks or (self._every_seconds and now - self._saved_at >= self._every_seconds):
            return _SAVE
        if self._from is None:
            self._from = step - 1
        return _SAVE if self._every_steps and step // self._every_steps > self._from // self._every_steps else 0

    @contextlib.contextmanager
    def _jointly(self, step: int) -> Iterator[None]:
        """Have what goes wrong on one rank go wrong on all."""
        failed = False
        try:
            yield
        except BaseException as error:
            failed = True
            if isinstance(error, OSError):
                self.folder.check()  # a later attempt has removed the folder, perhaps
            raise
        finally:
            failed_somewhere = self._agree(int(failed))
        if failed_somewhere:
            self.folder.check()
            raise NotSaved(f"step {step} was not saved: another rank failed, and its log says why")

    def _report(self, checkpoint: dict[str, Any], asks: tuple[Ask, ...], *, stopping: bool) -> None:
        self._last, self._from, self._saved_at = checkpoint, checkpoint["step"], time.monotonic()
        self._saved_to_stop = stopping
        # A later checkpoint answers the last ask, too; so its answer is not lost to who sees only the last report.
        self._ask = asks[-1].id if asks else self._ask
        self._asks.answer(asks, lambda ask: json.dumps({"ask": ask} | checkpoint))
        if self._reports:
            self._reports.saved(json.dumps({"ask": self._ask} | checkpoint))


def _reported(checkpoint: Checkpoint) -> dict[str, Any]:
    path, digest = str(checkpoint.path), checkpoint.digest
    return {"step": checkpoint.step, "at": checkpoint.at, "path": path, "digest": digest}


def start(
    directory: str | os.PathLike[str] | None = None,
    *,
    every_steps: int | None = None,
    every_seconds: float | None = None,
    keep: int = 3,
    rank: int | None = None,
    world_size: int | None = None,
    agree: Agree | None = None,
    sharded: bool = False,
    port: int | None = None,
    heartbeat_file: str | os.PathLike[str] | None = None,
) -> Job:
    """Begin to train. Call it once, in the main thread, before `Job.resume`.

    directory: where the checkpoints are, on a file system that all ranks share. QUEUECTL_CHECKPOINT_DIR, which a
        TrainingJob with `checkpoint.path` sets, comes before it.
    every_steps, every_seconds: save without being asked, too.
    keep: how many trusted checkpoints stay; the oldest go first.
    rank, world_size: of this process; else RANK and WORLD_SIZE (as torchrun sets them), else QUEUECTL_RANK and
        QUEUECTL_WORLD_SIZE, else 0 and 1.
    agree: returns the greatest of the numbers (0 to 10^10) that all ranks call it with, as an all-reduce does. Needed if
        there is more than one rank; `should_save` calls it once, `saving` three times, `resume` about twice.
    sharded: every rank writes files of its own.
    port: take asks by POST to it; else QUEUECTL_CHECKPOINT_PORT, else not. 0 takes any.
    heartbeat_file: is touched while steps get done; else QUEUECTL_HEARTBEAT_FILE, else none.

    Raises ValueError for what can't be right, Superseded if a later attempt of the job has begun in the directory, OSError
    if the directory or the port can't be used.
    """
    prefix = "" if "RANK" in os.environ and "WORLD_SIZE" in os.environ else "QUEUECTL_"
    beat = heartbeat_file or os.environ.get("QUEUECTL_HEARTBEAT_FILE")
    return Job(
        folder_of(directory, keep=keep),
        rank=rank if rank is not None else _number(f"{prefix}RANK") or 0,
        world_size=world_size if world_size is not None else _number(f"{prefix}WORLD_SIZE") or 1,
        agree=agree,
        every_steps=every_steps,
        every_seconds=every_seconds,
        sharded=sharded,
        port=port if port is not None else _number("QUEUECTL_CHECKPOINT_PORT"),
        heartbeat_file=Path(beat) if beat else None,
    )


def folder_of(directory: str | os.PathLike[str] | None, *, keep: int = 3) -> Folder:
    """Return the folder of checkpoints as the environment has it, else `directory`. Raises as `start`."""
    path = os.environ.get("QUEUECTL_CHECKPOINT_DIR") or directory
    if not path:
        raise ValueError("directory is missing, and QUEUECTL_CHECKPOINT_DIR is not set: where are checkpoints to be?")
    uid = os.environ.get("QUEUECTL_WORKLOAD_UID", "")
    return Folder(Path(path).absolute(), attempt=_number("QUEUECTL_ATTEMPT"), uid=uid, keep=keep)


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; it must be a whole number")
    return int(text)
