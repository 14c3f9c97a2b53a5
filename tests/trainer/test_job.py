import http.client
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from queuectl import trainer
from queuectl.trainer.checkpoints import Folder
from queuectl.trainer.reports import FAILURE, LINE, PodAnnotation, TerminationMessage


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("QUEUECTL_", "RANK", "WORLD_SIZE", "LOCAL_RANK")):
            monkeypatch.delenv(name)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., trainer.Job]]:
    """Start jobs in a folder; they end with the test."""
    jobs = []

    def started(**options: Any) -> trainer.Job:
        jobs.append(trainer.start(tmp_path / "checkpoints", **options))
        return jobs[-1]

    yield started
    for job in reversed(jobs):
        job.close()


def save(job: trainer.Job, step: int, content: str = "text") -> None:
    with job.saving(step) as folder:
        (folder / "a.txt").write_text(content)


def test_it_needs_nothing_but_python() -> None:
    root = Path(__file__).parents[2]
    code = (
        f"import sys; sys.path.append({str(root)!r}); before = set(sys.modules); import queuectl.trainer;"
        "print(*{name for name in set(sys.modules) - before if name.startswith('queuectl')});"
        "assert not any('site-packages' in str(getattr(module, '__file__', '')) for module in sys.modules.values())"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    found = {name.removeprefix("queuectl").lstrip(".") for name in done.stdout.split()}
    assert found == {"", "trainer", "trainer.asks", "trainer.checkpoints", "trainer.job", "trainer.reports"}


def test_without_asks_it_saves_by_steps_or_by_time(start: Callable[..., trainer.Job]) -> None:
    job = start(every_steps=10)
    assert job.resume() is None
    due = []
    for step in (1, 9, 10, 11, 19, 20, 35, 36):  # a step that is not there is made up for
        if job.should_save(step):
            save(job, step)
            due.append(step)
    assert due == [10, 20, 35]

    job = start(every_steps=10)
    checkpoint = job.resume()
    assert checkpoint is not None
    assert checkpoint.step == 35
    assert not job.should_save(36)
    assert job.should_save(40)

    assert not start().should_save(1)
    assert start(every_seconds=1e-9).should_save(1)
    assert not start(every_seconds=1e9).should_save(1)


def test_without_resume_intervals_count_from_the_first_step(start: Callable[..., trainer.Job]) -> None:
    job = start(every_steps=100)
    assert next(step for step in range(1042, 1203) if job.should_save(step)) == 1100


def test_sigterm_is_told_once_and_then_to_whom_it_was_told_before(start: Callable[..., trainer.Job]) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        job = start()
        assert not job.should_save(1)
        assert not job.stopping

        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        assert job.should_save(2)
        assert job.stopping
        save(job, 2)
        assert not job.should_save(2)
        assert not job.should_save(3)
        assert job.stopping

        job.close()
        signal.raise_signal(signal.SIGTERM)
        assert len(heard) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_that_comes_while_saving_is_not_lost(start: Callable[..., trainer.Job]) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        job = start(every_steps=1)
        assert job.should_save(1)
        with job.saving(1):
            signal.raise_signal(signal.SIGTERM)
        assert not job.stopping
        assert not job.should_save(1)  # that step is saved
        assert job.stopping
    finally:
        job.close()
        signal.signal(signal.SIGTERM, before)


def test_a_worker_that_was_forked_ends_by_sigterm(start: Callable[..., trainer.Job]) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        start()
        fork = multiprocessing.get_context("fork")
        mine, its = fork.Pipe()

        def work() -> None:
            its.send("at work")
            threading.Event().wait(60)

        worker = fork.Process(target=work)
        worker.start()
        assert mine.recv() == "at work"
        worker.terminate()
        worker.join(60)
        assert worker.exitcode == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def test_that_a_later_attempt_began_while_it_was_saving_is_said_whatever_failed(
    start: Callable[..., trainer.Job], tmp_path: Path
) -> None:
    job = start()

    def save_too_late() -> None:
        with job.saving(1) as folder:
            Folder(tmp_path / "checkpoints", attempt=1).begin()
            (folder / "a.txt").write_text("its folder is gone")

    with pytest.raises(trainer.Superseded, match="attempt 1 has begun"):
        save_too_late()


def test_a_later_checkpoint_answers_the_last_ask_as_well(
    start: Callable[..., trainer.Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nothing is lost on who sees only the last report."""
    monkeypatch.setenv("QUEUECTL_TERMINATION_LOG", str(tmp_path / "message"))
    monkeypatch.setenv("QUEUECTL_ASK_FILE", str(tmp_path / "ask"))
    (tmp_path / "ask").write_text('{"id": "1-1", "deadline": 1}')
    monkeypatch.setattr("queuectl.trainer.job.LOOK_SECONDS", 0.0)
    job = start(every_steps=10)
    assert job.should_save(3)
    assert job.deadline == 1
    save(job, 3)
    assert job.deadline is None
    assert not job.should_save(4)
    assert job.should_save(10)
    save(job, 10)

    assert '"ask": "1-1", "step": 10' in (tmp_path / "message").read_text()


def test_an_ask_is_not_lost_when_nothing_could_be_saved(
    start: Callable[..., trainer.Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUECTL_ASK_FILE", str(tmp_path / "ask"))
    (tmp_path / "ask").write_text('{"id": "1-1", "deadline": 1}')
    monkeypatch.setattr("queuectl.trainer.job.LOOK_SECONDS", 0.0)
    job = start()
    assert job.should_save(3)

    def save_to_full_disk() -> None:
        with job.saving(3) as folder:
            (folder / "a.txt").symlink_to("/dev/full")
            (folder / "a.txt").write_text("text")

    with pytest.raises(OSError, match="No space left"):
        save_to_full_disk()
    assert not job.should_save(4)  # not at once
    (tmp_path / "ask").write_text('{"id": "1-2", "deadline": 1}')
    assert job.should_save(5)  # another ask does not wait for what an earlier one has met with
    with pytest.raises(OSError, match="No space left"):
        save_to_full_disk()
    assert not job.should_save(6)
    monkeypatch.setattr(job, "_retry_at", 0.0)
    assert job.should_save(7)
    save(job, 7)
    assert not job.should_save(8)


def test_asks_are_taken_at_one_address_only_where_pods_share_a_network(
    start: Callable[..., trainer.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUECTL_CHECKPOINT_ADDRESS", "127.0.0.2")
    port = start(port=0).port
    monkeypatch.setenv("QUEUECTL_CHECKPOINT_ADDRESS", "127.0.0.3")
    assert start(port=port).port == port


def test_asks_by_http_are_bounded_and_do_not_keep_others_out(
    start: Callable[..., trainer.Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUECTL_ASK_FILE", str(tmp_path / "ask"))
    monkeypatch.setenv("QUEUECTL_TERMINATION_LOG", str(tmp_path / "message"))
    monkeypatch.setattr("queuectl.trainer.job.LOOK_SECONDS", 0.0)
    job = start(port=0)
    statuses = [post(job.port, f'{{"id": "http-{number}", "deadline": 0}}') for number in range(20)]
    assert statuses == [504] * 16 + [503] * 4

    (tmp_path / "ask").write_text('{"id": "1-1", "deadline": 1}')
    assert job.should_save(1)
    save(job, 1)
    assert '"ask": "1-1"' in (tmp_path / "message").read_text()
    assert post(job.port, '{"id": "http-9", "deadline": 0}') == 200  # it was answered, late
    assert post(job.port, '{"id": "http-19", "deadline": 0}') == 504


def post(port: int | None, body: str) -> int:
    assert port is not None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/checkpoint", body)
    return connection.getresponse().status


def test_own_storage_can_be_reported(start: Callable[..., trainer.Job], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("QUEUECTL_TERMINATION_LOG", str(tmp_path / "message"))
    job = start(every_steps=5)
    assert job.should_save(5)
    job.saved(5, "s3://bucket/llm/5")

    assert not job.should_save(6)
    assert '"step": 5' in (tmp_path / "message").read_text()
    assert '"path": "s3://bucket/llm/5", "digest": null' in (tmp_path / "message").read_text()


def test_what_can_not_be_right_is_named(start: Callable[..., trainer.Job], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="directory is missing, and QUEUECTL_CHECKPOINT_DIR is not set"):
        trainer.start()
    with pytest.raises(ValueError, match="rank is 2; it must be from 0 to 1"):
        start(rank=2, world_size=2, agree=max)
    with pytest.raises(ValueError, match="world_size is 2 and agree is missing"):
        start(rank=1, world_size=2)
    with pytest.raises(ValueError, match="every_steps is 0"):
        start(every_steps=0)
    with pytest.raises(ValueError, match="step is -1"), start().saving(-1):
        pass
    monkeypatch.setenv("QUEUECTL_ATTEMPT", "first")
    with pytest.raises(ValueError, match="QUEUECTL_ATTEMPT is 'first'"):
        start()


def test_the_directory_of_the_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUECTL_CHECKPOINT_DIR", str(tmp_path / "volume"))
    job = trainer.start("checkpoints")
    try:
        save(job, 1)
    finally:
        job.close()

    assert Folder(tmp_path / "volume").steps() == [1]


def test_older_ones_than_queuectl_knows_are_told(
    start: Callable[..., trainer.Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = start()
    save(job, 10)
    monkeypatch.setenv("QUEUECTL_RESUME_STEP", "10")
    assert start().resume() is not None
    assert not caplog.records

    monkeypatch.setenv("QUEUECTL_RESUME_STEP", "20")
    start().resume()
    assert "queuectl knows of a checkpoint of step 20" in caplog.text


class Ranks:
    """Two ranks in threads, that agree."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.values = [0, 0]
        self.barrier = threading.Barrier(2, timeout=60)
        self.pool = ThreadPoolExecutor(2)
        self.jobs = self.each(
            lambda rank: trainer.start(
                directory, rank=rank, world_size=2, agree=lambda value: self.agree(rank, value), **options
            )
        )

    def agree(self, rank: int, value: int) -> int:
        self.values[rank] = value
        self.barrier.wait()
        greatest = max(self.values)
        self.barrier.wait()
        return greatest

    def each(self, action: Callable[[int], Any]) -> list[Any]:
        return list(self.pool.map(action, (0, 1)))

    def save(self, step: int, failing: int | None = None, *, sharded: bool = True) -> list[str]:
        """Return what was raised on each rank, by its name."""

        def saved(rank: int) -> str:
            try:
                with self.jobs[rank].saving(step) as folder:
                    if sharded or rank == 0:
                        (folder / "a.txt").write_text(f"{rank} at {step}")
                    if rank == failing:
                        (folder / "full.txt").symlink_to("/dev/full")
                        (folder / "full.txt").write_text("No space left on device")
            except (OSError, trainer.Superseded) as error:
                return type(error).__name__
            return ""

        return self.each(saved)

    def close(self) -> None:
        self.each(lambda rank: self.jobs[rank].close())
        self.pool.shutdown()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(**options: Any) -> Ranks:
        made.append(Ranks(tmp_path / "checkpoints", **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("sharded", [False, True])
def test_what_one_rank_can_not_save_no_rank_has_saved(
    ranks: Callable[..., Ranks], tmp_path: Path, failing: int, *, sharded: bool
) -> None:
    pair = ranks(sharded=sharded)
    assert pair.save(10, sharded=sharded) == ["", ""]
    outcomes = pair.save(20, failing, sharded=sharded)
    assert outcomes[failing] == "OSError"
    assert outcomes[1 - failing] == "NotSaved"

    assert [found.step for found in pair.each(lambda rank: pair.jobs[rank].resume())] == [10, 10]
    assert not list((tmp_path / "checkpoints").glob("*.tmp-*"))
    assert pair.save(30, sharded=sharded) == ["", ""]


def test_a_shard_that_is_damaged_has_all_ranks_take_the_one_before(
    ranks: Callable[..., Ranks], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = ranks(sharded=True)
    for step in (10, 20):
        pair.save(step)
    damaged = tmp_path / "checkpoints" / "step-0000000020" / "rank-1" / "a.txt"
    damaged.write_text("1 at 02")

    found = pair.each(lambda rank: pair.jobs[rank].resume())

    assert [checkpoint.step for checkpoint in found] == [10, 10]
    assert found[0].world_size == 2
    assert [(found[0].path / f"rank-{rank}" / "a.txt").read_text() for rank in (0, 1)] == ["0 at 10", "1 at 10"]
    assert f"{damaged} is not what was written" in caplog.text


def test_all_ranks_of_a_superseded_attempt_are_told(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    pair = ranks()
    Folder(tmp_path / "checkpoints", attempt=1).begin()

    assert pair.save(10, sharded=False) == ["Superseded", "Superseded"]


def test_ranks_have_the_numbers_of_torchrun_before_those_of_their_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("QUEUECTL_RANK", "1"), ("QUEUECTL_WORLD_SIZE", "2"), ("RANK", "5"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    job = trainer.start(tmp_path, agree=int)
    job.close()
    assert (job.rank, job.world_size) == (5, 8)

    monkeypatch.delenv("RANK")
    job = trainer.start(tmp_path, agree=int)
    job.close()
    assert (job.rank, job.world_size) == (1, 2)


def test_the_termination_message_keeps_the_lines_of_others_and_is_never_too_long(tmp_path: Path) -> None:
    path = tmp_path / "message"
    path.write_text("from the training code\n")
    message = TerminationMessage({"QUEUECTL_TERMINATION_LOG": str(path)})
    for number in range(100):
        message.saved(f'{{"step": {number}}}')
    assert path.read_text() == f'from the training code\n{LINE}{{"step": 99}}\n'

    message.not_saved("no\nspace " + 9999 * "x")
    lines = path.read_text().splitlines()
    assert [lines[0], lines[2]] == ["from the training code", f'{LINE}{{"step": 99}}']
    assert lines[1].startswith(FAILURE + "no space")
    assert path.stat().st_size < 4096
    message.saved("{}")
    assert path.read_text() == f"from the training code\n{LINE}{{}}\n"


def test_what_can_not_be_told_does_not_disturb_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "queuectl.trainer"):
        TerminationMessage({"QUEUECTL_TERMINATION_LOG": str(tmp_path / "no" / "such" / "folder")}).saved("{}")
    assert "termination message can't be written" in caplog.text


def test_that_there_is_no_service_account_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = {"QUEUECTL_POD": "llm-0", "KUBERNETES_SERVICE_HOST": "10.0.0.1", "QUEUECTL_SERVICE_ACCOUNT": str(tmp_path)}
    annotation = PodAnnotation(where)
    with caplog.at_level(logging.WARNING, "queuectl.trainer"):
        annotation.send("{}")
        annotation.send("{}")
        PodAnnotation({}).send("{}")
    [told] = caplog.messages
    assert "pod llm-0 is not written: there is no token" in told
