"""With which code a wait ends, and what can be held or released."""

from typing import Any

import pytest

from queuectl.cli.change import For, exit_code, reached, too_late


def in_phase(phase: str | None, code: int | None = None) -> dict[str, Any]:
    status = {key: value for key, value in {"phase": phase, "exitCode": code}.items() if value is not None}
    return {"metadata": {"name": "llm"}, "status": status}


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (in_phase("Succeeded", 0), 0),
        (in_phase("Running"), 0),
        (in_phase("Failed", 42), 42),
        (in_phase("Failed", 137), 137),
        (in_phase("Failed", 0), 1),
        (in_phase("Failed"), 1),
    ],
)
def test_a_job_that_failed_gives_its_own_code_or_1(job: dict[str, Any], code: int) -> None:
    assert exit_code(job) == code


@pytest.mark.parametrize("phase", [None, "Pending", "Starting", "Stopping"])
def test_a_job_on_its_way_is_waited_for(phase: str | None) -> None:
    assert not reached(in_phase(phase), For.RUNNING)
    assert not reached(in_phase(phase), For.FINISHED)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_job_that_has_ended_is_not_waited_for(phase: str) -> None:
    assert reached(in_phase(phase), For.RUNNING)
    assert reached(in_phase(phase), For.FINISHED)


def test_a_running_job_runs_and_is_not_finished() -> None:
    assert reached(in_phase("Running"), For.RUNNING)
    assert not reached(in_phase("Running"), For.FINISHED)


HELD = {
    "waits": (in_phase("Pending"), None, None),
    "not seen yet": (in_phase(None), None, None),
    "starts": (in_phase("Starting"), "only a waiting job can be held. To stop it: queuectl cancel llm", None),
    "runs": (in_phase("Running"), "only a waiting job can be held. To stop it: queuectl cancel llm", None),
    "has ended": (in_phase("Succeeded"), "there is nothing to hold", "there is nothing to release"),
    "has failed": (in_phase("Failed", 3), "there is nothing to hold", "there is nothing to release"),
}


@pytest.mark.parametrize("case", HELD)
def test_only_who_waits_can_be_held_and_only_who_has_not_ended_released(case: str) -> None:
    job, *problems = HELD[case]
    for hold, problem in zip((True, False), problems, strict=True):
        told = too_late(job, hold=hold)
        assert told == problem if problem is None else problem in (told or "")


@pytest.mark.parametrize("phase", ["Checkpointing", "Stopping"])
def test_who_goes_back_to_its_queue_can_be_held_there_and_who_is_deleted_cannot(phase: str) -> None:
    job = in_phase(phase)
    assert "only a waiting job can be held" in (too_late(job, hold=True) or "")
    job["status"]["conditions"] = [{"type": "Evicted", "status": "True"}]
    assert too_late(job, hold=True) is None
    job["metadata"]["deletionTimestamp"] = "2026-12-01T00:00:00Z"
    assert too_late(job, hold=True) == "job llm is being deleted, so there is nothing to hold"
    assert too_late(job, hold=False) == "job llm is being deleted, so there is nothing to release"
