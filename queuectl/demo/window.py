"""The window of the Philly trace that the demo runs, and how it was chosen.

``python -m queuectl.demo.window jobs-philly2017.csv.gz > philly-window.csv`` makes the shipped file anew from the
trace, a CSV (gzipped or not) of the columns job, submit_s, duration_s, gpus and vc in order of submission.
"""

import csv
import gzip
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

JOBS = 60
LARGEST = 64
RULE = (
    f"of all runs of {JOBS} consecutive jobs that hold a {LARGEST}-GPU job and none larger, "
    "those with the most different gang sizes; of these the one with the most gangs of 8 and more; the earliest such"
)
COLUMNS = ("job", "submit_s", "duration_s", "gpus", "vc")
_HEADER = f"""\
# {JOBS} consecutive jobs of the Philly trace of Microsoft (2017), unchanged: submission and run time in seconds, GPUs of
# the gang, virtual cluster. Chosen so: {RULE}.
# Made by: python -m queuectl.demo.window TRACE
# Source: github.com/msr-fiddle/philly-traces, licensed CC BY 4.0 (creativecommons.org/licenses/by/4.0); M. Jeon et al.,
# "Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training Workloads", USENIX ATC 2019. Taken by way of the
# subset that github.com/pkusys/ElasticFlow (Apache-2.0) ships; job and virtual cluster names were replaced by short ids.
"""


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job as the trace has it; times are in seconds."""

    name: str
    submit: int
    duration: int
    gpus: int
    vc: str


def choose(jobs: Sequence[TraceJob]) -> Sequence[TraceJob]:
    """Return the window that RULE picks. Raises ValueError when no run of jobs satisfies it."""
    windows = [jobs[start : start + JOBS] for start in range(len(jobs) - JOBS + 1)]
    fitting = [window for window in windows if max(job.gpus for job in window) == LARGEST]
    if not fitting:
        raise ValueError(f"no {JOBS} consecutive jobs hold one of {LARGEST} GPUs and none larger")
    # max keeps the first of equals: the earliest.
    return max(fitting, key=lambda w: (len({job.gpus for job in w}), sum(job.gpus >= 8 for job in w)))  # noqa: PLR2004


def read(lines: Iterable[str]) -> list[TraceJob]:
    """Read jobs from the lines of a CSV; lines that start with # are remarks."""
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return [
        TraceJob(row["job"], int(row["submit_s"]), int(row["duration_s"]), int(row["gpus"]), row["vc"]) for row in rows
    ]


def shipped() -> list[TraceJob]:
    """Return the window that comes with the package."""
    return read((files("queuectl.demo") / "philly-window.csv").read_text(encoding="utf-8").splitlines())


def render(window: Iterable[TraceJob]) -> str:
    """Return the content of the shipped file."""
    rows = [f"{job.name},{job.submit},{job.duration},{job.gpus},{job.vc}\n" for job in window]
    return _HEADER + ",".join(COLUMNS) + "\n" + "".join(rows)


def main() -> None:
    """Choose the window from the trace named on the command line and print it as CSV."""
    if len(sys.argv) != 2:  # noqa: PLR2004
        sys.exit("usage: python -m queuectl.demo.window TRACE")
    trace = Path(sys.argv[1])
    with (gzip.open if trace.suffix == ".gz" else open)(trace, "rt", encoding="utf-8") as file:
        sys.stdout.write(render(choose(read(file))))


if __name__ == "__main__":
    main()
