"""The window is what its rule picks, and what the demo makes of it fits its cluster."""

from importlib.resources import files

import pytest

from queuectl.demo import script, window
from queuectl.demo.act import Result
from queuectl.demo.window import TraceJob

FILLER = 100


def trace(*sizes: int) -> list[TraceJob]:
    """Return jobs of these sizes between many of one GPU."""
    padded = [1] * FILLER + list(sizes) + [1] * FILLER
    return [TraceJob(f"j{n}", n, 60, gpus, "vc") for n, gpus in enumerate(padded)]


def test_the_window_holds_a_job_of_64_and_none_larger() -> None:
    chosen = window.choose(trace(64, 128, 4, *[1] * 60, 64))
    assert [job.gpus for job in chosen] == [1] * 59 + [64]
    assert chosen[-1].name == f"j{FILLER}"  # the earliest of equals


def test_a_window_without_a_job_of_64_is_not_to_be_had() -> None:
    with pytest.raises(ValueError, match="no 60 consecutive jobs"):
        window.choose(trace(32, 128))


def test_most_different_sizes_come_first_then_most_large_gangs() -> None:
    sizes = [job.gpus for job in window.choose(trace(64, 8, 8, *[1] * 60, 64, 8, 4))]
    assert sorted(set(sizes)) == [1, 4, 8, 64]
    sizes = [job.gpus for job in window.choose(trace(64, 8, *[1] * 60, 64, 8, 8))]
    assert sizes.count(8) == 2


def test_the_shipped_window_is_as_the_command_writes_it_and_names_source_and_licence() -> None:
    text = (files("queuectl.demo") / "philly-window.csv").read_text()
    jobs = window.shipped()
    assert window.render(jobs) == text
    assert "msr-fiddle/philly-traces, licensed CC BY 4.0" in text
    assert [jobs[0].name, jobs[-1].name, len(jobs)] == ["ph-80475", "ph-80534", 60]
    assert {job.gpus for job in jobs} == {1, 2, 4, 8, 16, 32, 64}
    assert jobs == sorted(jobs, key=lambda job: job.submit)
    assert window.choose(jobs) == jobs


def test_every_gang_fits_its_quota_and_all_quotas_the_cluster() -> None:
    jobs = window.shipped()
    quotas = script.quotas(jobs)
    assert len(quotas) >= 3
    assert all(job.gpus <= quotas[job.vc] for job in jobs)
    assert sum(quotas.values()) <= script.NODES * script.GPUS_PER_NODE


def test_the_result_is_good_only_without_a_violation_and_with_every_job_finished() -> None:
    assert Result(60, 60, 0, 0).good
    assert not Result(60, 60, 1, 0).good
    assert not Result(60, 60, 0, 1).good
    assert not Result(60, 59, 0, 0).good
    assert str(Result(60, 59, 1, 2)) == "demo: 59 jobs finished, 1 partial gangs, 2 over-bookings"
