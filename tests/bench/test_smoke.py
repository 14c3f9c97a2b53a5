"""The benchmarks work and give their figures; what the figures are is nobody's business here."""

import math

from tests.bench import decisions, gangs, shown, victims
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


def test_searches_for_victims_are_timed_and_held_against_the_optimum() -> None:
    found = list(victims.searches([16]))
    assert [(one.nodes, one.wanted) for one in found] == [(4, 1), (4, 2)]
    assert all(one.victims >= 4 and one.least > 0 for one in found)
    assert "victims" in victims.table(found)
    distances = victims.distances(60)
    assert all(ratio >= 1 for ratios in distances.values() for ratio in ratios)
    assert "optimal" in victims.distance_table(distances)
