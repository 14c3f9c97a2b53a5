"""The directory of checkpoints: what is in it can be trusted, and only the latest attempt writes there.

    attempt                        the highest attempt that has begun, and the uid of its job where that is known
    latest                         the name of the newest checkpoint, for people and scripts; nothing here relies on it
    step-0000001200/               a checkpoint: files, and manifest.json with the SHA-256 and size of each
    step-0000001300.tmp-2-0/       one that attempt 2 is writing, or was when it died

A checkpoint gets its name by one rename, when all of it is on disk. So who dies while saving leaves what was there
before; what is damaged later shows by the manifest.

**Only the latest attempt.** An attempt that begins first raises `attempt`, then removes what lower ones have not
finished, then looks where to resume. A lower one that still runs makes its temporary folder first, then looks at
`attempt`, then renames. If it looks too early to see the new number, its folder is there to be removed: either the rename
comes first, and the new attempt resumes from that very checkpoint, or it fails for want of the folder. `latest` and
`attempt` itself are replaced in the same way, so no lock is needed. What the file system must give: a rename is atomic,
and what is opened or listed is as the last writer left it. That holds on one machine, on cluster file systems and, by
close-to-open consistency, on NFS; it does not hold for object stores that are mounted as folders.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
LAST_STEP = 9_999_999_999  # names have ten digits, so that they sort
_BEGINNINGS = 10  # each but the last was undone by another attempt that began at the same moment
_THREADS = 8  # for hashing, in which other threads run on
_CHECKPOINT = re.compile(r"step-(\d{10})")
_UNFINISHED = re.compile(r"(?:step-\d{10}|attempt)\.tmp-(\d+)-.+")

log = logging.getLogger("queuectl.trainer")


class Superseded(RuntimeError):  # noqa: N818 - a state, not a fault of the program
    """A later attempt of the job has begun: this one must not save any more, so end the process."""


class NotTrusted(ValueError):  # noqa: N818
    """A checkpoint is damaged or can't be read; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are as they were written."""

    step: int
    """How many steps were done."""
    path: Path
    """Its folder. What rank N has written is in `rank-N` of it, if the job saves in shards."""
    digest: str
    """Of its manifest: `sha256:` and 64 hexadecimal digits."""
    at: float
    """When it was written, in Unix seconds."""
    attempt: int
    world_size: int
    """Of the attempt that wrote it."""
    skipped: tuple[str, ...] = ()
    """Why newer ones were not taken, a sentence for each."""


class Folder:
    """The checkpoints below `path`, as one attempt of a job has them.

    `attempt` None takes the number found there, as runs outside queuectl do. `uid` is the job's, "" if not known: another
    job begins anew at attempt 1. `keep` is how many trusted checkpoints stay.
    """

    def __init__(self, path: Path, *, attempt: int | None = None, uid: str = "", keep: int = 3) -> None:
        """Make the folder if need be. Raises ValueError for a bad `keep`, OSError if the folder can't be used."""
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least 1 checkpoint has to stay")
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.keep = keep
        self.attempt, self.uid = attempt or 0, uid
        if attempt is None:
            number, self.uid = self._begun()
            self.attempt = max(number, 0)
        self._damaged: set[int] = set()  # steps of those whose sizes are right and whose checksums are not

    def begin(self) -> None:
        """Begin the attempt: lower ones can't save from now on. Raises Superseded when a higher one has begun."""
        mine = (self.attempt, self.uid)
        temporary = self.path / f"attempt.tmp-{self.attempt}-0"
        for _ in range(_BEGINNINGS):
            _write(temporary, f"{self.attempt} {self.uid}".strip())
            before, uid = self._begun()
            another_job = bool(self.uid and uid and self.uid != uid)
            if not another_job:
                self.check()
            self._replace(temporary, self.path / "attempt")
            for entry in list(os.scandir(self.path)):
                found = _UNFINISHED.fullmatch(entry.name)
                if found and int(found[1]) <= (max(before, self.attempt) if another_job else self.attempt):
                    log.info("removing %s, which was not finished", entry.path)
                    _remove(Path(entry.path))
            if self._begun() == mine:
                _sync(self.path)
                return
        self.check()
        raise OSError(f"{self.path / 'attempt'} is written by others all the time")

    def check(self) -> None:
        """Raise Superseded when a later attempt, or another job, has begun here."""
        number, uid = self._begun()
        if self.uid and uid and uid != self.uid:
            raise Superseded(f"another job, of uid {uid}, has begun in {self.path}: this one must not save there")
        if number > self.attempt:
            raise Superseded(
                f"attempt {number} has begun in {self.path}: attempt {self.attempt} must not save there. If whoever wrote"
                f" that is gone for good, remove {self.path / 'attempt'}"
            )

    def unfinished(self, step: int) -> Path:
        """Return where the checkpoint of `step` is written until it is committed."""
        return self.path / f"{_name(step)}.tmp-{self.attempt}-0"

    def open(self, step: int) -> None:
        """Make an empty folder at `unfinished(step)`. Raises Superseded, OSError."""
        self.check()
        _remove(self.unfinished(step))
        self.unfinished(step).mkdir()

    def commit(self, step: int, *, world_size: int = 1, sharded: bool = False) -> Checkpoint:
        """Turn what is at `unfinished(step)` into a checkpoint that outlives a crash of the machine.

        If `sharded`, every rank has sealed its `rank-N` there. Of a trusted checkpoint of the same step the older one
        stays: it is the state after the same steps. Raises Superseded, OSError.
        """
        temporary, final = self.unfinished(step), self.path / _name(step)
        about = {"step": step, "attempt": self.attempt, "world_size": world_size, "at": time.time()}
        seal(temporary, about, shards=world_size if sharded else 0)
        latest, damaged = (temporary.with_name(f"{temporary.name}-{what}") for what in ("latest", "damaged"))
        _write(latest, final.name)
        is_there = final.exists()
        is_good = is_there and self._why_not(step) is None
        self.check()
        if is_there and not is_good:
            self._replace(final, damaged)
        if not is_good:
            self._replace(temporary, final)
        self._replace(latest, self.path / "latest")
        _sync(self.path)
        self._damaged.discard(step)
        self.discard(step)
        return self.read(step)

    def discard(self, step: int) -> None:
        """Remove what is at `unfinished(step)`, and what a commit that failed left beside it. Raises nothing."""
        for path in self.path.glob(f"{self.unfinished(step).name}*"):
            try:
                _remove(path)
            except OSError as error:
                log.warning("%s can't be removed: %s", path, error)

    def prune(self) -> None:
        """Remove all but the newest `keep` trusted checkpoints; failures are logged. Raises Superseded."""
        self.check()
        trusted = 0
        for step in self.steps():
            if trusted == self.keep:
                try:
                    (self.path / _name(step)).replace(self.unfinished(step))
                except OSError as error:
                    log.warning("an old checkpoint can't be removed: %s", error)
                self.discard(step)
            elif step not in self._damaged and self._why_not(step, parts=0) is None:
                trusted += 1

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, damaged or not, the highest first."""
        found = (_CHECKPOINT.fullmatch(entry.name) for entry in os.scandir(self.path))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def newest(
        self, *, rank: int = 0, world_size: int = 1, agree: Callable[[int], int] = lambda value: value
    ) -> Checkpoint | None:
        """Return the newest trusted checkpoint, None if there is none; what is wrong with newer ones is logged.

        Ranks share the work: each reads a part of the files, and all return the same (`agree` as in `trainer.start`).
        """
        skipped: list[str] = []
        steps = iter(self.steps() if rank == 0 else [])
        while True:
            step = agree(next(steps, -1) + 1) - 1
            if step < 0:
                return None
            why = self._why_not(step, part=rank, parts=world_size)
            if not agree(int(why is not None)):
                return replace(self.read(step), skipped=tuple(skipped))
            self._damaged.add(step)
            skipped.append(why or f"{self.path / _name(step)}: another rank does not trust it")
            log.warning("a checkpoint is not trusted, so an older one is looked for: %s", skipped[-1])

    def read(self, step: int) -> Checkpoint:
        """Return the checkpoint of `step` by its manifest alone. Raises NotTrusted when that is no good."""
        return self._parsed(step)[0]

    def _parsed(self, step: int) -> tuple[Checkpoint, dict[str, tuple[str, int]]]:
        path = self.path / _name(step)
        try:
            raw = (path / MANIFEST).read_bytes()
            found = json.loads(raw)
            files = {str(name): (str(file["sha256"]), int(file["size"])) for name, file in found["files"].items()}
            digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
            at, attempt, world_size = float(found["at"]), int(found["attempt"]), int(found["world_size"])
            if found["step"] != step:
                raise NotTrusted(f"{path}: its manifest is of step {found['step']}")
        except OSError as error:
            raise NotTrusted(f"{path}: its manifest can't be read: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, NotTrusted):
                raise
            raise NotTrusted(f"{path}: its manifest is damaged: {error!r}") from error
        return Checkpoint(step, path, digest, at, attempt, world_size), files

    def _why_not(self, step: int, *, part: int = 0, parts: int = 1) -> str | None:
        """Tell why the checkpoint of `step` is not trusted; None if it is.

        Sizes are looked at of all files, checksums of every `parts`-th from `part` on, of none if `parts` is 0.
        """
        try:
            checkpoint, files = self._parsed(step)
            for name, (_, size) in files.items():
                found = (checkpoint.path / name).stat().st_size
                if found != size:
                    return f"{checkpoint.path / name} has {found} bytes instead of {size}"
            mine = sorted(files)[part::parts] if parts else []
            for name, found_sum in _sums(checkpoint.path, mine):
                if found_sum != files[name][0]:
                    return f"{checkpoint.path / name} is not what was written: its SHA-256 differs"
        except NotTrusted as error:
            return str(error)
        except OSError as error:
            return f"{self.path / _name(step)} can't be read: {error}"
        return None

    def _begun(self) -> tuple[int, str]:
        """Return the number and the job's uid of the attempt that has begun last; -1 if none has."""
        try:
            words = (self.path / "attempt").read_text().split()
            return int(words[0]), words[1] if len(words) > 1 else ""
        except FileNotFoundError:
            return -1, ""
        except (ValueError, IndexError) as error:
            raise OSError(f"{self.path / 'attempt'} is no number of an attempt; repair or remove it") from error

    def _replace(self, source: Path, target: Path) -> None:
        try:
            source.replace(target)
        except FileNotFoundError:
            self.check()  # it is not there because a later attempt has removed it
            raise


def seal(folder: Path, about: dict[str, Any], *, shards: int = 0) -> None:
    """Write `folder`'s manifest and put all of it on disk. `rank-0` to `rank-N` of `shards` are sealed already."""
    parts = {f"rank-{rank}" for rank in range(shards)}
    names = sorted(_files(folder, parts)) + [f"{part}/{MANIFEST}" for part in sorted(parts)]
    entries = {
        name: {"sha256": digest, "size": (folder / name).stat().st_size}
        for name, digest in _sums(folder, names, sync=True)
    }
    for part in parts:
        sealed = json.loads((folder / part / MANIFEST).read_bytes())["files"]
        entries |= {f"{part}/{name}": entry for name, entry in sealed.items()}
    _write(folder / MANIFEST, json.dumps(about | {"files": entries}, indent=1, sort_keys=True), mode="x")
    for path, _, _ in os.walk(folder):
        _sync(Path(path))


def _files(folder: Path, without: set[str]) -> Iterator[str]:
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] not in without and str(name) != MANIFEST:
            yield str(name)


def _sums(folder: Path, names: list[str], *, sync: bool = False) -> Iterator[tuple[str, str]]:
    def sum_of(name: str) -> str:
        with (folder / name).open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(_THREADS) as pool:
        yield from zip(names, pool.map(sum_of, names), strict=True)


def _name(step: int) -> str:
    return f"step-{step:010d}"


def _write(path: Path, text: str, *, mode: str = "w") -> None:
    with path.open(mode) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """Remove a file or folder, if it is there. Raises OSError unless it has lost its name; what is left then is logged."""
    try:
        if not path.is_dir():
            path.unlink()
            return
        gone = path if path.name.endswith("-gone") else path.with_name(f"{path.name}-gone")
        if path != gone:
            shutil.rmtree(gone, ignore_errors=True)
            path.replace(gone)
    except FileNotFoundError:
        return
    try:
        shutil.rmtree(gone)
    except FileNotFoundError:
        return  # another attempt removes it, too
    except OSError as error:
        log.warning("%s can't be removed: %s", gone, error)
