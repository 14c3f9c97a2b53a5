"""The benchmarks work and give their figures; what the figures are is nobody's business here."""

import gzip
import math
from pathlib import Path

from tests.bench import decisions, exporters, gangs, openb, shown, victims
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


NODES = """cluster,node,gpu_model,gpus,cpu_milli,memory_mib
c,n0,T4,2,64000,262144
c,n1,G2,8,96000,393216
c,n2,none,0,32000,65536
"""
PODS = """pod,gpus,gpu_milli,cpu_milli,memory_mib,gpu_models
p0,1,810,3152,16384,
p1,1,1000,11300,16384,T4|G2
p2,8,1000,64000,262144,
p3,0,,12500,16384,
p4,1,190,4000,8192,T4
"""


def test_a_cluster_is_filled_by_each_rule_with_the_same_pods_and_no_device_twice(tmp_path: Path) -> None:
    for name, text in {"nodes": NODES, "pods": PODS}.items():
        with gzip.open(tmp_path / f"{name}-openb2023.csv.gz", "wt") as file:
            file.write(text)
    found = list(openb.measure(tmp_path, seeds=2))
    assert {(one.rule, one.seed) for one in found} == {(rule, seed) for rule in openb.RULES for seed in (0, 1)}
    for one in found:
        assert len(one.shares) == 120
        assert one.shares == sorted(one.shares)
        assert 0 < one.shares[-1] <= 1
    assert all(rule in openb.table(found) for rule in openb.RULES)
    trace = openb.read(tmp_path)
    filled = openb.LeastLost(trace, 0)
    placed = [ask for ask in openb.arrivals(trace, 0) if filled.put(ask)]
    states = [filled.cluster.states[number] for number in filled.cluster.at.tolist()]
    left = sum(sum(state.left) for state in states)
    assert left + sum(ask.gpu for ask in placed) == trace.gpus
    assert all(min((state.cpu, state.memory, *state.left)) >= 0 for state in states)


def test_reading_exporters_is_timed_with_and_without_errors_of_gpus() -> None:
    healthy, faulty = exporters.measure(5)
    assert (healthy.xids, faulty.xids) == (0, 8)
    assert all(cost.bytes > 50_000 and cost.milliseconds > 0 for cost in (healthy, faulty))
    assert "CPU each" in exporters.table([healthy, faulty])
