"""The benchmarks work and give their figures; what the figures are is nobody's business here."""

import math

from tests.bench import decisions, gangs, shown
from tests.bench.load import Load

TINY = Load(gangs=3, pods=2, gpus=4, nodes=4, limit=120)


async def test_both_kinds_start_every_pod_and_are_compared() -> None:
    runs = [await gangs.by_controller(TINY), await gangs.by_bare_client(TINY, 8)]
    for run in runs:
        assert len(run.bound) == len(run.running) == TINY.gangs
        assert run.own_writes["POST pods"] >= TINY.total
        assert run.own_writes["PATCH pods"] >= TINY.total
        assert run.cpu["kube-apiserver"] > 0
    result = shown.summary(runs, TINY)
    mine = result["kinds"]["controller"]
    assert all(math.isfinite(value) for value in mine.values())
    assert mine["ledger: admission cycles"] >= 1
    assert mine["controller peak memory, MiB"] > 1
    assert result["compared"]["with"] == "bare 8"
    assert "(the fastest)" in shown.gangs_table(result)


def test_decisions_are_timed_at_each_size() -> None:
    found = [shown.decisions_figures(size) for size in decisions.measure([(8, 30), (16, 60)], events=3)]
    assert [(row["nodes"], row["waiting"], row["events"]) for row in found] == [(8, 30, 3), (16, 60, 3)]
    assert all(row["plan p99, ms"] >= row["plan p50, ms"] > 0 for row in found)
    assert "growth" in shown.decisions_table(found)
