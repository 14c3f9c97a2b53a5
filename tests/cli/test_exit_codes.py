"""With which code a wait ends."""

from typing import Any

import pytest

from queuectl.cli.change import For, exit_code, reached


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
