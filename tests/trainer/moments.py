"""Stop at each moment at which something changes or is read in a folder, one after the other.

    python moments.py DIRECTORY MOMENT

saves step 20 of attempt 1 in the directory, keeping one checkpoint, and is killed at that moment (from 1 on) on its way.
Exits with 0 if it came to its end before.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from queuectl.trainer import Superseded
from queuectl.trainer.checkpoints import Folder

ACCESSES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}


@dataclass
class _Watch:
    left: int
    below: str
    interrupt: Callable[[], object]


_watches: dict[int, _Watch] = {}  # by thread


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    watch = _watches.get(threading.get_ident()) if event in ACCESSES else None
    if watch is None or not str(arguments[0]).startswith(watch.below):
        return
    watch.left -= 1
    if watch.left == 0:
        del _watches[threading.get_ident()]
        watch.interrupt()


sys.addaudithook(_hook)


@contextmanager
def at_moment(moment: int, below: Path, interrupt: Callable[[], object]) -> Iterator[None]:
    """Call `interrupt` before the `moment`-th access of the block, in this thread, to what is in the folder.

    Or after the block, if that has fewer.
    """
    _watches[threading.get_ident()] = _Watch(moment, str(below), interrupt)
    try:
        yield
    finally:
        if _watches.pop(threading.get_ident(), None):
            interrupt()


def save(folder: Folder, step: int, content: str) -> None:
    """Save as `Job.saving` does on one rank."""
    try:
        folder.open(step)
        (folder.unfinished(step) / "part").mkdir()
        (folder.unfinished(step) / "part" / "a.txt").write_text(content)
        (folder.unfinished(step) / "b.txt").write_text(content)
        folder.commit(step)
    except (OSError, Superseded):
        folder.discard(step)
        folder.check()
        raise
    folder.prune()


if __name__ == "__main__":
    mine = Folder(Path(sys.argv[1]), attempt=1, keep=1)
    mine.begin()
    _watches[threading.get_ident()] = _Watch(int(sys.argv[2]), sys.argv[1], lambda: os.kill(os.getpid(), 9))
    save(mine, 20, "new")
