"""What interruptions have cost: as the processes say it, as the ledger does, and what it may be."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from queuectl.kube.names import ATTEMPT_LABEL, JOB_LABEL
from tests.support.accounts import Gang, Run

REPORT_SECONDS = 3.0  # from a checkpoint until all its ranks have told of it, at most
Attempt = tuple[str, int]  # job, number
Row = Mapping[str, Any]

ATTEMPTS = """
SELECT w.uid, w.name, w.failures, w.lost, a.number, a.end, a.running_at, a.ended_at,
       i.at, i.saved_at, i.saved_step, i.gpu_seconds, i.answered
FROM attempt a JOIN workload w ON w.uid = a.workload_uid
LEFT JOIN interruption i ON i.workload_uid = a.workload_uid AND i.attempt = a.number
WHERE w.namespace = :namespace ORDER BY w.name, a.number
"""
EVENTS = """
SELECT w.name, event.at, event.kind, event.message, event.facts
FROM event JOIN workload w ON w.uid = event.workload_uid
WHERE w.namespace = :namespace AND event.kind IN ('WaitingForVictims', 'Preempted')
"""


@dataclass
class Interruption:
    """Something that was done to gangs, nodes or the controller, `at` Unix seconds."""

    what: str
    whom: str
    at: float
    killed: set[Attempt] = field(default_factory=set)  # of which a process had no time to save

    def __str__(self) -> str:
        killed = ", ".join(f"{job} {number}" for job, number in sorted(self.killed))
        return f"{self.what} {self.whom}{f': killed {killed}' if killed else ''}"


@dataclass(frozen=True)
class Verdict:
    """`rows` are of ATTEMPTS. `outages`: from when to when nobody led, in Unix seconds."""

    rows: Sequence[Row]
    done: Sequence[Interruption]
    outages: Sequence[tuple[float, float]]
    sums: Counter[str] = field(default_factory=Counter)

    def judge(self, gang: Gang) -> None:
        """See that no work was lost that need not be, and that the ledger says the same as the processes."""
        runs, rows = gang.runs(), [row for row in self.rows if row["name"] == gang.name]
        for row in rows[:-1]:
            number, run = row["number"], runs.get(row["number"])
            hits = [done for done in self.done if (gang.name, number) in done.killed]
            where = (
                f"{gang.name}, attempt {number}, {row['end']['reason']}, hit by: {'; '.join(map(str, hits)) or 'none'}"
            )
            assert row["end"]["outcome"] == "Requeue", where
            assert (row["at"] is None) == (row["running_at"] is None), where
            if row["end"]["charged"]:
                self.sums["failures"] += 1
                assert any(hit.what == "crash" for hit in hits), where
            later = [runs[one] for one in sorted(runs) if one > number]
            if run and later:
                again = run.last - later[0].began_after
                assert 0 <= again <= (gang.every if hits else 0), f"{where}: {again} steps are taken again"
                self.sums["steps taken again"] += again
            if run and row["at"] is not None:
                self._compare(gang, row, run, hits, where)
        assert rows[-1]["end"]["reason"] == "Succeeded", gang.name
        assert rows[-1]["failures"] == sum(row["end"]["charged"] for row in rows), gang.name
        assert rows[-1]["lost"] == sum(row["gpu_seconds"] or 0 for row in rows), gang.name

    def judge_evictions(self, events: Sequence[Row]) -> None:
        """See that nobody was evicted but by a plan. `events` are of EVENTS."""
        planned = [event for event in events if event["kind"] == "WaitingForVictims"]
        evicted = [event for event in events if event["kind"] == "Preempted"]
        for event in evicted:
            name = f"{event['facts']['job'].split('/')[0]}/{event['name']} (queue"
            plans = [plan for plan in planned if plan["at"] == event["at"] and name in plan["message"]]
            assert [plan["name"] for plan in plans] == [event["facts"]["job"].split("/")[1]], event
        victims = sum(plan["facts"]["count"] for plan in planned)
        assert len(evicted) <= victims
        self.sums.update({"planned victims": victims, "evictions": len(evicted)})

    def _compare(self, gang: Gang, row: Row, run: Run, hits: Sequence[Interruption], where: str) -> None:
        """Compare an interruption's row with the account of the processes."""
        at, ended, gpus = row["at"].timestamp(), row["ended_at"].timestamp(), gang.pods * gang.gpus
        saved = [one_at for step, one_at in run.saves if step == row["saved_step"]]
        assert bool(saved) == (row["saved_step"] is not None), where
        assert not saved or abs(row["saved_at"].timestamp() - saved[0]) < 0.001, where
        unheard = [(step, one_at) for step, one_at in run.saves if not saved or step > row["saved_step"]]
        for step, one_at in unheard:  # only if the controller is dead, or whoever was to tell
            soon = any(one_at > hit.at - REPORT_SECONDS for hit in hits)
            assert soon or self._is_deaf(one_at, ended), f"{where}: nobody knows of step {step}"
        since = max([run.steps[0][1] if run.steps else at, *(one_at for _, one_at in run.saves)])
        lost = gpus * max(0.0, at - since)
        if saved and not unheard:  # the ledger counts whole seconds
            assert abs(row["gpu_seconds"] - lost) <= gpus / 2, f"{where}: {row['gpu_seconds']} GPU-seconds, not {lost}"
            self.sums.update({
                "GPU-seconds since known checkpoints, in the ledger": row["gpu_seconds"],
                "GPU-seconds since known checkpoints, by the processes": round(lost),
            })  # fmt: skip
        ask = row["end"]["ask"]
        if ask and not hits and not self._is_deaf(ask["at"], ended):
            assert row["answered"] is True, where
            self.sums["asked"] += 1
        self.sums.update({
            "interrupted attempts": 1, "GPU-seconds in the ledger": row["gpu_seconds"],
            "GPU-seconds by the processes": round(lost), "checkpoints unheard": len(unheard),
        })  # fmt: skip

    def _is_deaf(self, begin: float, end: float) -> bool:
        return any(first < end and begin < last for first, last in self.outages)


def attempt_of(pod: Mapping[str, Any]) -> Attempt:
    """Return whose pod it is."""
    labels = pod["metadata"]["labels"]
    return labels[JOB_LABEL], int(labels[ATTEMPT_LABEL])
