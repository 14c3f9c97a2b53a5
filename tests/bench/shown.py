"""Figures as tables of plain text, and as JSON."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import psutil

from tests.bench.decisions import Decisions
from tests.bench.gangs import Run
from tests.bench.load import Load

MIB = 2**20


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` of the values don't exceed; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(percent) // 100) - 1)] if ordered else float("nan")


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1_5_15": [round(value, 2) for value in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def figures(run: Run, load: Load) -> dict[str, float]:
    """Return what a run comes to. Writes are per pod or per gang."""
    own, pods, gangs = run.own_writes, load.total, load.gangs
    return {
        "all bound, s": run.all_bound,
        "all running, s": run.all_running,
        "pods bound/s": pods / run.all_bound,
        "pods running/s": pods / run.all_running,
        "submit to bound p50, s": percentile(run.bound, 50),
        "submit to bound p99, s": percentile(run.bound, 99),
        "submit to running p50, s": percentile(run.running, 50),
        "submit to running p99, s": percentile(run.running, 99),
        "own writes of pods per pod": sum(n for write, n in own.items() if write.endswith(" pods")) / pods,
        "own writes of statuses per gang": sum(n for write, n in own.items() if write.endswith("/status")) / gangs,
        "own events per gang": own.get("POST events", 0) / gangs,
        "own writes in all, per pod": sum(own.values()) / pods,
        "everybody's writes per pod": sum(run.writes.values()) / pods,
        "refused writes, everybody's": sum(run.refused.values()),
        "attempts per gang": run.attempts / gangs if run.attempts else float("nan"),
        "controller CPU, s": run.cpu.get("controller", float("nan")),
        "controller peak memory, MiB": run.memory / MIB if run.memory else float("nan"),
        "Postgres CPU, s": run.cpu.get("postgres", float("nan")),
        "bench (client and watch) CPU, s": run.cpu["bench"],
        "API server CPU, s": run.cpu["kube-apiserver"],
        "etcd CPU, s": run.cpu["etcd"],
        "scheduler CPU, s": run.cpu["kube-scheduler"],
        "controller manager CPU, s": run.cpu["kube-controller-manager"],
        "kwok CPU, s": run.cpu["kwok"],
        "CPU of all of these, s": sum(run.cpu.values()),
        "foreign processes, % of CPU used": 100 * run.others_share,
        "ledger: admission cycles": run.ledger.get("cycle", float("nan")),
        "ledger: transactions of moves": run.ledger.get("advance", float("nan")),
        "ledger: all commits in its database": run.ledger.get("all", float("nan")),
    }


def summary(runs: Sequence[Run], load: Load) -> dict[str, Any]:
    """Return figures by kind, medians over its runs, and how the controller compares with the fastest bare client."""
    kinds: dict[str, list[dict[str, float]]] = {}
    for run in runs:
        kinds.setdefault(run.kind, []).append(figures(run, load))
    medians = {kind: {name: median(f[name] for f in found) for name in found[0]} for kind, found in kinds.items()}
    result: dict[str, Any] = {"load": asdict(load), "kinds": medians, "rounds": max(map(len, kinds.values()))}
    result["writes"] = {
        run.kind: {"own": run.own_writes, "everybody": run.writes, "refused": run.refused} for run in runs
    }  # of the last round
    result["troubles"] = {f"round {number}": run.troubles for number, run in enumerate(runs, 1) if run.troubles}
    bare = {kind: found for kind, found in medians.items() if kind.startswith("bare")}
    if bare and "controller" in medians:
        best = min(bare, key=lambda kind: bare[kind]["all running, s"])
        mine, theirs = medians["controller"], bare[best]
        result["compared"] = {
            "with": best,
            "time to all running": mine["all running, s"] / theirs["all running, s"],
            "time to all bound": mine["all bound, s"] / theirs["all bound, s"],
            "CPU of all": mine["CPU of all of these, s"] / theirs["CPU of all of these, s"],
            "API server CPU": mine["API server CPU, s"] / theirs["API server CPU, s"],
        }
    return result


def gangs_table(result: dict[str, Any]) -> str:
    load, kinds = result["load"], result["kinds"]
    names = list(next(iter(kinds.values())))
    rows = [["", *kinds], *([name, *(_number(found[name]) for found in kinds.values())] for name in names)]
    lines = [
        "{gangs} gangs x {pods} pods x {gpus} GPUs on {nodes} nodes x 8 GPUs".format(**load)
        + (f", medians of {result['rounds']} runs" if result["rounds"] > 1 else ""),
        *_aligned(rows),
    ]
    if compared := result.get("compared"):
        ratios = ", ".join(f"{name} {value:.2f}" for name, value in compared.items() if name != "with")
        lines.append(f"controller : {compared['with']} (the fastest) = {ratios}")
    return "\n".join(lines)


def decisions_figures(found: Decisions) -> dict[str, float]:
    whole = [a + b for a, b in zip(found.snapshots, found.cycles, strict=True)]
    return {
        "nodes": found.nodes,
        "queues": found.queues,
        "waiting": found.gangs,
        "running": found.running,
        "cold plan, ms": 1000 * found.cold,
        "cold in all, ms": 1000 * (found.cold + found.cold_snapshot),
        "events": len(found.cycles),
        "victims": found.preempted,
        "plan p50, ms": 1000 * percentile(found.cycles, 50),
        "plan p99, ms": 1000 * percentile(found.cycles, 99),
        "in all p50, ms": 1000 * percentile(whole, 50),
        "in all p99, ms": 1000 * percentile(whole, 99),
        "memory, MiB": (found.memory - found.baseline) / MIB,
    }


def decisions_table(found: Sequence[dict[str, float]]) -> str:
    """Return one row for each size, and how much more than the row above it took."""
    names = list(found[0])
    rows = [[*names, "growth"]]
    before: dict[str, float] | None = None
    for row in found:
        growth = f"x{row['in all p50, ms'] / before['in all p50, ms']:.1f}" if before else ""
        rows.append([*(_number(row[name]) for name in names), growth])
        before = row
    return "\n".join(
        ["one decision: plan() alone, and in all (with the snapshot it decides upon); after one event", *_aligned(rows)]
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def _number(value: float) -> str:
    if value != value:  # NaN: not of this kind  # noqa: PLR0124
        return "-"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
