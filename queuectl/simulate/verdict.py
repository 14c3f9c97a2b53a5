"""What differs between a run and what its scenario wants of it."""

from collections import Counter
from collections.abc import Iterator

from queuectl.model.reasons import counted
from queuectl.simulate.clockwork import EVICTED, PREEMPTED, REQUEUED, RUNNING, SHRUNK, Run, State
from queuectl.simulate.form import Scenario, WantForm

_PHASES = {
    "pending": {"Pending"},
    "starting": {"Starting"},
    "running": {"Running"},
    "checkpointing": {"Checkpointing"},
    "stopping": {"Stopping"},
    "succeeded": {"Succeeded"},
    "failed": {"Failed"},
    "finished": {"Succeeded", "Failed"},
}
_NOWHERE = State("not submitted", "none", "it has not been submitted", 0)


def differences(scenario: Scenario, run: Run) -> list[str]:
    """Return a sentence for everything that is not as wanted; defects that showed in the run come first."""
    return [*run.faults, *(line for i, want in enumerate(scenario.want) for line in _of(f"want[{i}]", want, run))]


def _of(field: str, want: WantForm, run: Run) -> Iterator[str]:
    if want.at is not None:
        yield from _at(f"{field}, at {want.at:g} s", want, run.looks[want.at])
    evicted = Counter(entry.job for entry in run.of(PREEMPTED, EVICTED) if want.at is None or entry.at <= want.at)
    if want.evictions is not None and evicted.total() != want.evictions:
        whom = ", ".join(f"{job} {counted(count, 'time')}" for job, count in sorted(evicted.items()))
        yield f"{field}.evictions: {want.evictions} wanted, {evicted.total()} made{f' ({whom})' if whom else ''}"
    for job, count in (want.evictions_of or {}).items():
        if evicted[job] != count:
            yield f"{field}.evictionsOf.{job}: {count} wanted, {evicted[job]} made"
    yield from _moved(field, want, run)
    started: dict[str, float] = {}
    for entry in run.of(RUNNING):
        started.setdefault(entry.job, entry.at)
    for job, limit in (want.started_by or {}).items():
        if started.get(job, limit + 1) > limit:
            yield f"{field}.startedBy.{job}: {limit:g} s wanted, {_when(started.get(job))}"
    for job, limit in (want.started_after or {}).items():
        if started.get(job, -1.0) < limit:
            yield f"{field}.startedAfter.{job}: not before {limit:g} s wanted, {_when(started.get(job))}"


def _at(field: str, want: WantForm, states: dict[str, State]) -> Iterator[str]:
    for name, phases in _PHASES.items():
        for job in getattr(want, name) or ():
            state = states.get(job, _NOWHERE)
            if state.phase not in phases:
                yield f"{field}: {job} is to be {name}, and is {state.phase}: {state.why}"
    for job, code in (want.reason or {}).items():
        state = states.get(job, _NOWHERE)
        if state.code != code:
            yield f"{field}.reason.{job}: {code} wanted, it is {state.code}: {state.why}"
    for job, pods in (want.pods or {}).items():
        state = states.get(job, _NOWHERE)
        if state.pods != pods:
            yield f"{field}.pods.{job}: {pods} ready wanted, {state.pods} are"


def _moved(field: str, want: WantForm, run: Run) -> Iterator[str]:
    for job in want.never_moved or ():
        entry = next((e for e in run.timeline if e.job == job and e.what in {PREEMPTED, EVICTED, REQUEUED}), None)
        if entry is not None:
            yield f"{field}.neverMoved: {job} was moved at {entry.at:g} s: {entry.why}"
    if want.rest_after is not None:
        restless = [entry for entry in run.of(PREEMPTED, EVICTED, SHRUNK) if entry.at > want.rest_after]
        if restless:
            first = restless[0]
            yield f"{field}.restAfter: {len(restless)} evictions after {want.rest_after:g} s; the first at {first.at:g} s, of {first.job}: {first.why}"


def _when(at: float | None) -> str:
    return "it never started" if at is None else f"it started at {at:g} s"
