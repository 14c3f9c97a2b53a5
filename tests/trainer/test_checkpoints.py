import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from queuectl.trainer import Superseded
from queuectl.trainer.checkpoints import Checkpoint, Folder
from tests.trainer.moments import at_moment, save

MOMENTS = Path(__file__).with_name("moments.py")


@pytest.fixture
def fast() -> Iterator[Path]:
    """A folder in memory, where there is one: hundreds of syncs to a disk take long."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def text(checkpoint: Checkpoint | None) -> str:
    assert checkpoint is not None
    return (checkpoint.path / "b.txt").read_text()


def begun(path: Path, attempt: int, *, uid: str = "", keep: int = 3) -> Folder:
    folder = Folder(path, attempt=attempt, uid=uid, keep=keep)
    folder.begin()
    return folder


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def test_the_newest_is_found_with_what_was_written(tmp_path: Path) -> None:
    folder = begun(tmp_path, 1)
    for step in (9, 10, 11):
        save(folder, step, f"at {step}")

    found = begun(tmp_path, 2).newest()

    assert found is not None
    assert (found.step, found.attempt, found.world_size, found.skipped) == (11, 1, 1, ())
    assert text(found) == "at 11"
    assert (tmp_path / "latest").read_text() == found.path.name == "step-0000000011"


DAMAGE: dict[str, Callable[[Path], object]] = {
    "is not what was written": lambda path: flip(path / "part" / "a.txt"),
    "bytes instead of": lambda path: (path / "b.txt").write_text("sh"),
    "can't be read": lambda path: (path / "b.txt").unlink(),
    "its manifest can't be read": lambda path: (path / "manifest.json").unlink(),
    "its manifest is damaged": lambda path: (path / "manifest.json").write_text('{"step": 11, "files": {'),
    "its manifest is of step 10": lambda path: shutil.copy(
        path.with_name("step-0000000010") / "manifest.json", path / "manifest.json"
    ),
}


@pytest.mark.parametrize("why", DAMAGE)
def test_of_a_damaged_one_it_is_told_what_is_wrong_and_the_one_before_is_taken(
    tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = begun(tmp_path, 1)
    save(folder, 10, "good one")
    save(folder, 11, "bad one.")
    DAMAGE[why](tmp_path / "step-0000000011")

    found = begun(tmp_path, 2).newest()

    assert text(found) == "good one"
    assert found is not None
    assert len(found.skipped) == 1
    assert why in found.skipped[0]
    assert str(tmp_path / "step-0000000011") in found.skipped[0]
    assert why in caplog.text


def test_a_damaged_one_is_replaced_by_a_good_one_of_the_same_step(tmp_path: Path) -> None:
    save(begun(tmp_path, 1), 10, "damaged")
    flip(tmp_path / "step-0000000010" / "b.txt")
    folder = begun(tmp_path, 2)
    assert folder.newest() is None

    save(folder, 10, "repaired")

    assert text(folder.newest()) == "repaired"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt", "latest", "step-0000000010"]


def test_of_two_of_the_same_step_the_older_stays(tmp_path: Path) -> None:
    folder = begun(tmp_path, 1)
    save(folder, 10, "first")
    save(folder, 10, "second")

    assert text(folder.newest()) == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt", "latest", "step-0000000010"]


def test_the_last_trusted_ones_stay_whatever_is_damaged_among_them(tmp_path: Path) -> None:
    folder = begun(tmp_path, 1, keep=2)
    for step in (1, 2, 3):
        save(folder, step, "text")
    assert folder.steps() == [3, 2]
    flip(tmp_path / "step-0000000003" / "b.txt")
    folder = begun(tmp_path, 2, keep=2)
    found = folder.newest()
    assert found is not None
    assert found.step == 2

    (tmp_path / "step-0000000009").mkdir()  # not one of ours, or all of it lost
    save(folder, 4, "text")
    assert folder.steps() == [9, 4, 3, 2]  # 3 counts for nothing

    save(folder, 5, "text")
    assert folder.steps() == [9, 5, 4]


def test_who_dies_while_saving_leaves_what_can_be_trusted(fast: Path) -> None:
    begin = fast / "begin"
    save(begun(begin, 1), 10, "old")
    moment, found = 0, set()
    while True:
        moment += 1
        path = fast / str(moment)
        shutil.copytree(begin, path)
        died = subprocess.run([sys.executable, MOMENTS, path, str(moment)], check=False, timeout=60).returncode
        folder = begun(path, 2)
        newest = folder.newest()
        assert newest is not None, f"died at moment {moment}"
        assert newest.skipped == ()
        assert text(newest) == {10: "old", 20: "new"}[newest.step]
        found.add(newest.step)
        assert not list(path.glob("*.tmp-*"))
        save(folder, 30, "later")
        assert text(folder.newest()) == "later"
        if died == 0:
            break
        assert died == -9

    assert newest.step == 20
    assert found == {10, 20}
    assert moment > 20


def test_a_superseded_attempt_saves_before_the_next_looks_or_not_at_all(fast: Path) -> None:
    save(begun(fast / "begin", 1), 10, "old")
    outcomes = []
    for race in races(fast, lambda old: save(old, 20, "new"), old_has_begun=True):
        found = race.new.newest()
        outcomes.append((race.old_has_done_it, found and found.step))
        assert found == race.seen, f"{race}: a checkpoint came after the next attempt had looked"
        assert found is not None
        assert found.step == 20 or not race.old_has_done_it, race
        assert found.skipped == ()
        save(race.new, 30, "later")
        assert (race.path / "latest").read_text() == "step-0000000030"
        assert not list(race.path.glob("*.tmp-*"))
        with pytest.raises(Superseded, match="attempt 2 has begun"):
            save(race.old, 40, "too late")

    assert {(False, 10), (True, 20)} <= set(outcomes)
    assert len(outcomes) > 150


def test_of_attempts_that_begin_at_the_same_moment_the_higher_goes_on(fast: Path) -> None:
    save(begun(fast / "begin", 0), 10, "old")
    for race in races(fast, lambda old: old.begin(), old_has_begun=False):
        with pytest.raises(Superseded, match="attempt 2 has begun"):
            save(race.old, 20, "too late")
        save(race.new, 30, "new")
        assert text(race.new.newest()) == "new", race


class Race:
    """Attempt 1 stops at a moment of what it does, until attempt 2 has begun and looked up to a moment of that."""

    def __init__(self, path: Path, action: Callable[[Folder], None], moments: tuple[int, int], old: Folder) -> None:
        self.path, self.action, self.moments = path, action, moments
        self.old, self.new = old, Folder(path, attempt=2)
        self.stopped, self.go_on = threading.Event(), threading.Event()
        self.old_has_done_it = self.old_has_ended = self.old_was_stopped = False
        self.thread = threading.Thread(target=self._act)
        self.thread.start()
        assert self.stopped.wait(60)
        with at_moment(moments[1], path, self._let_old_end):
            self.new.begin()
            self.seen = self.new.newest()
            self.new_was_stopped = self.go_on.is_set()

    def __str__(self) -> str:
        return f"moments {self.moments}"

    def _act(self) -> None:
        with at_moment(self.moments[0], self.path, self._stop):
            with contextlib.suppress(Superseded):
                self.action(self.old)
                self.old_has_done_it = True
            self.old_has_ended = True

    def _stop(self) -> None:
        self.old_was_stopped = not self.old_has_ended
        self.stopped.set()
        assert self.go_on.wait(60)

    def _let_old_end(self) -> None:
        self.go_on.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


def races(folder: Path, action: Callable[[Folder], None], *, old_has_begun: bool) -> Iterator[Race]:
    """Yield a race for each pair of moments."""
    for moment_of_old in itertools.count(1):
        old_was_stopped = False
        for moment_of_new in itertools.count(1):
            path = folder / f"{moment_of_old}-{moment_of_new}"
            shutil.copytree(folder / "begin", path)
            old = begun(path, 1) if old_has_begun else Folder(path, attempt=1)
            race = Race(path, action, (moment_of_old, moment_of_new), old)
            old_was_stopped |= race.old_was_stopped
            yield race
            shutil.rmtree(path)
            if not race.new_was_stopped:
                break
        if not old_was_stopped:
            break


def test_a_job_that_was_submitted_anew_may_begin_where_the_old_one_has_ended(tmp_path: Path) -> None:
    old = begun(tmp_path, 7, uid="aaa")
    save(old, 10, "old")
    old.open(20)

    new = begun(tmp_path, 1, uid="bbb")
    assert text(new.newest()) == "old"
    save(new, 30, "new")

    assert not list(tmp_path.glob("*.tmp-*"))
    with pytest.raises(Superseded, match="another job"):
        save(old, 40, "too late")
    assert text(new.newest()) == "new"


def test_without_a_uid_a_lower_attempt_is_told_what_to_do(tmp_path: Path) -> None:
    begun(tmp_path, 7)

    with pytest.raises(Superseded, match=f"attempt 7 has begun in {tmp_path}.*remove {tmp_path / 'attempt'}"):
        begun(tmp_path, 1)

    (tmp_path / "attempt").unlink()
    save(begun(tmp_path, 1), 10, "text")


def test_a_run_outside_queuectl_leaves_the_number_as_it_is(tmp_path: Path) -> None:
    begun(tmp_path, 7, uid="aaa")
    folder = Folder(tmp_path)
    folder.begin()
    save(folder, 10, "text")

    assert (tmp_path / "attempt").read_text() == "7 aaa"
    assert json.loads((tmp_path / "step-0000000010" / "manifest.json").read_text())["attempt"] == 7


def test_the_name_of_the_manifest_is_taken(tmp_path: Path) -> None:
    folder = begun(tmp_path, 1)
    folder.open(1)
    (folder.unfinished(1) / "manifest.json").write_text("{}")

    with pytest.raises(FileExistsError, match=r"manifest\.json"):
        folder.commit(1)


def test_what_is_no_number_of_an_attempt_is_named(tmp_path: Path) -> None:
    (tmp_path / "attempt").write_text("seven")

    with pytest.raises(OSError, match=f"{tmp_path / 'attempt'} is no number"):
        begun(tmp_path, 1)
    with pytest.raises(ValueError, match="keep is 0"):
        Folder(tmp_path, attempt=1, keep=0)
