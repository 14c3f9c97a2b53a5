"""Real training in processes of its own that are asked, told to stop, killed: it ends as if nothing had been."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from queuectl.trainer.checkpoints import Folder
from queuectl.trainer.reports import FAILURE, LINE
from tests.trainer.training import LIMIT_SECONDS, STEPS, Training, until

EVERY = 20


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path / "job", options=("--every", str(EVERY)))
    yield training
    training.clear()


@pytest.fixture(params=["replicated", "sharded"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Training]:
    options = ("--every", str(EVERY), *(["--sharded"] if request.param == "sharded" else []))
    training = Training(tmp_path / "pair", ranks=2, options=options)
    yield training
    training.clear()


def test_killed_at_random_it_loses_an_interval_at_most(training: Training, undisturbed: Training) -> None:
    chance = random.Random(6)
    for _ in range(8):
        found = training.newest() if training.checkpoints.exists() else None
        step = (found.step if found else 0) + chance.randint(1, 2 * EVERY)
        training.start(pause=0.004)
        training.until_step(min(step, STEPS - 1))
        training.processes[0].kill()
        training.end()
    training.run()

    training.is_as_undisturbed(undisturbed)
    assert 0 < max(training.lost_steps()) <= EVERY


def test_killed_while_saving_it_goes_on_from_the_checkpoint_before(training: Training, undisturbed: Training) -> None:
    training.start("--die-saving", "60")
    assert training.end()[0] == [-signal.SIGKILL]
    assert [path.name for path in training.checkpoints.glob("*.tmp-*")] == ["step-0000000060.tmp-1-0"]

    training.run()

    assert training.lost_steps() == [EVERY]
    assert not list(training.checkpoints.glob("*.tmp-*"))
    training.is_as_undisturbed(undisturbed)


def test_told_to_stop_it_loses_nothing(training: Training, undisturbed: Training) -> None:
    chance = random.Random(6)
    for lowest in range(1, STEPS // 2, 2 * EVERY):
        training.start(pause=0.004)
        training.until_step(lowest + chance.randint(0, EVERY))
        training.processes[0].terminate()
        codes, said = training.end()
        assert codes == [143], said
        report, newest = training.report(), training.newest()
        assert report is not None
        assert newest is not None
        assert report["step"] == newest.step == training.steps()[-1][1]
        assert (report["path"], report["digest"], report["ask"]) == (str(newest.path), newest.digest, None)
    training.run()

    assert training.lost_steps() == [0] * 3
    training.is_as_undisturbed(undisturbed)


def test_of_ranks_of_which_one_is_told_to_stop_all_save_after_the_same_step(
    pair: Training, undisturbed_pair: Training
) -> None:
    for rank, step in ((1, 30), (0, 90)):
        pair.start(pause=0.001)
        pair.until_step(step)
        pair.processes[rank].terminate()
        codes, said = pair.end()
        assert codes == [143, 143], said
        reports = [pair.report(rank) for rank in (0, 1)]
        assert reports[0] == reports[1]
        assert reports[0] is not None
        assert reports[0]["step"] == pair.steps()[-1][1]
    pair.run()

    assert pair.lost_steps() == [0, 0]
    pair.is_as_undisturbed(undisturbed_pair)


def test_of_ranks_of_which_one_is_killed_all_go_on_from_the_same_checkpoint(
    pair: Training, undisturbed_pair: Training
) -> None:
    for rank, options in ((1, ()), (0, ()), (0, ("--die-saving", "200"))):
        pair.start(*options, pause=0.001)
        if not options:
            pair.until_step(max((step for _, step, _ in pair.steps()), default=0) + EVERY + 5)
            pair.processes[rank].kill()
        codes, said = pair.end()
        assert -signal.SIGKILL in codes, said
        assert 0 not in codes
    pair.run()

    assert max(pair.lost_steps()) <= EVERY
    pair.is_as_undisturbed(undisturbed_pair)


def test_a_damaged_checkpoint_is_told_and_the_one_before_taken(training: Training, undisturbed: Training) -> None:
    training.start("--die-saving", "80")
    training.end()
    damaged = training.checkpoints / "step-0000000060" / "model.npz"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)

    said = training.run()

    assert f"{damaged} is not what was written" in said
    assert training.steps()[80:81] == [(2, 41, training.steps()[40][2])]
    training.is_as_undisturbed(undisturbed)


def test_a_full_disk_is_an_error_and_leaves_what_was_saved_before(training: Training, undisturbed: Training) -> None:
    training.start("--full-at", "60")
    codes, said = training.end()

    assert codes == [1]
    assert "No space left on device" in said
    assert sorted(path.name for path in training.checkpoints.glob("step-*")) == ["step-0000000020", "step-0000000040"]
    failure, saved = (training.home / "message-0").read_text().splitlines()
    assert failure.startswith(FAILURE + "step 60: OSError(28")
    assert json.loads(saved.removeprefix(LINE))["step"] == 40

    training.run()
    assert training.lost_steps() == [EVERY]
    training.is_as_undisturbed(undisturbed)


def test_a_job_may_train_on_when_the_disk_is_full(training: Training, undisturbed: Training) -> None:
    said = training.run("--full-at", "60", "--patient")

    assert said.count("not saved: [Errno 28]") == 1  # it is not tried again at once
    training.is_as_undisturbed(undisturbed)


def test_a_volume_that_is_really_full(training: Training) -> None:
    training.checkpoints.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "none", training.checkpoints], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        training.start()
        codes, said = training.end()
        assert codes == [1]
        assert "No space left on device" in said
        assert [path.name for path in training.checkpoints.glob("step-*")] == ["step-0000000020"]
        newest = training.newest()
        assert newest is not None
        assert newest.step == EVERY
    finally:
        subprocess.run(["umount", training.checkpoints], check=True)


def test_an_attempt_that_was_left_for_dead_does_not_save_any_more(training: Training, undisturbed: Training) -> None:
    training.start(pause=0.001)
    training.until_step(30)
    zombie = training.processes.pop()
    zombie.send_signal(signal.SIGSTOP)
    try:
        training.run()
        before = training.newest()
        zombie.send_signal(signal.SIGCONT)
        _, said = zombie.communicate(timeout=LIMIT_SECONDS)
    finally:
        zombie.kill()

    assert zombie.returncode == 1
    assert f"attempt 2 has begun in {training.checkpoints}" in said
    assert training.newest() == before
    assert not list(training.checkpoints.glob("*.tmp-*"))
    with np.load(training.home / "result.npz") as mine, np.load(undisturbed.home / "result.npz") as theirs:
        assert all(mine[name].tobytes() == theirs[name].tobytes() for name in theirs)


def test_asked_by_the_pods_annotation_it_saves_and_trains_on(training: Training, undisturbed: Training) -> None:
    """The file is as the kubelet writes it: a link to a link to a folder, which is replaced."""
    training.options = ()  # nobody else asks
    shown = training.home / "etc"
    shown.mkdir()
    (shown / "ask").symlink_to("..data/ask")

    def show(number: int, text: str) -> None:
        (shown / f"..{number}").mkdir()
        (shown / f"..{number}" / "ask").write_text(text)
        (shown / "new").symlink_to(f"..{number}")
        (shown / "new").rename(shown / "..data")

    show(0, "")
    training.start(pause=0.02, QUEUECTL_ASK_FILE=str(shown / "ask"))
    training.until_step(3)
    assert training.report() is None
    for number, deadline in ((1, time.time() + 60), (2, time.time() - 60)):  # the second is heard late, and answered
        ask = f"1-{number}"
        show(number, json.dumps({"id": ask, "deadline": deadline}))
        until(partial(training.has_answered, ask), "the answer")
        report, newest = training.report(), training.newest()
        assert report is not None
        assert newest is not None
        assert (report["step"], report["digest"], report["at"]) == (newest.step, newest.digest, newest.at)
        last = newest.step
    show(3, json.dumps({"id": "1-2", "deadline": time.time() + 60}))  # again
    show(4, "")
    show(5, "{not an ask")
    codes, said = training.end()

    assert codes == [0], said
    assert Folder(training.checkpoints).steps()[0] == last
    training.is_as_undisturbed(undisturbed)


def post(port: int, body: bytes) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/checkpoint", body, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_asked_by_http_it_answers_when_it_has_saved(training: Training, undisturbed: Training) -> None:
    training.options = ()
    training.start(pause=0.02, QUEUECTL_CHECKPOINT_PORT="0")
    stdout = training.processes[0].stdout
    assert stdout is not None
    port = int(stdout.readline().removeprefix("port "))

    asked = json.dumps({"id": "1-1", "deadline": time.time() + 60}).encode()
    status, report = post(port, asked)
    newest = training.newest()
    assert newest is not None
    assert status == 200
    assert (report["ask"], report["step"], report["digest"]) == ("1-1", newest.step, newest.digest)
    assert training.report() == report
    assert post(port, asked) == (200, report)  # again: the same answer, and nothing is saved
    assert training.newest() == newest

    assert post(port, b"save!")[0] == 400
    assert "Unix seconds" in str(post(port, b'{"id": "1-2"}')[1]["error"])
    assert post(port, b'{"id": "1-3", "deadline": 0}')[0] == 504

    command = subprocess.run(
        [sys.executable, "-m", "queuectl.trainer"],
        env=os.environ
        | {
            "QUEUECTL_CHECKPOINT_PORT": str(port),
            "QUEUECTL_ASK_ID": "1-4",
            "QUEUECTL_ASK_DEADLINE": str(time.time() + 60),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=True,
    )
    answer = json.loads(command.stdout.splitlines()[-1])
    assert answer["ask"] == "1-4"
    assert answer["step"] > newest.step

    codes, said = training.end()
    assert codes == [0], said
    training.is_as_undisturbed(undisturbed)


def test_a_heartbeat_shows_while_steps_are_taken(training: Training) -> None:
    beat = training.home / "beat"
    training.start(pause=0.02, QUEUECTL_HEARTBEAT_FILE=str(beat))
    until(beat.exists, "a heartbeat")
    first = beat.stat().st_mtime_ns
    until(lambda: beat.stat().st_mtime_ns > first, "another")


def test_a_job_that_is_submitted_anew_goes_on_where_the_old_one_has_ended(training: Training) -> None:
    training.run("--steps", "100", QUEUECTL_WORKLOAD_UID="aaa")
    training.run("--steps", "140", QUEUECTL_WORKLOAD_UID="aaa")
    training.attempt = 0
    training.run(QUEUECTL_WORKLOAD_UID="bbb")

    assert [step for _, step, _ in training.steps()] == list(range(1, STEPS + 1))
