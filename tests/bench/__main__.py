"""The benchmarks: `python -m tests.bench`. They print what they measure and assert nothing; see docs/benchmarks.md."""

import argparse
import asyncio
import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from tests.bench import decisions, exporters, gangs, openb, racks, shown, victims
from tests.bench.load import Load

SIZE = Load()
Part = tuple[dict[str, object], str]  # figures, and a table of them


def main(arguments: list[str] | None = None) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what a run has started ends with it
    options = _options(arguments)
    result: dict[str, object] = {"machine": shown.machine()}
    if not options.json:
        typer.echo("machine: " + ", ".join(f"{name} {value}" for name, value in shown.machine().items()))
    for name, part in PARTS.items():
        if options.only == name or (options.only is None and (name not in OF_TRACES or options.traces)):
            figures, shown_as = part(options)
            result |= figures
            if not options.json:
                typer.echo(f"\n{shown_as}")
    if options.json:
        typer.echo(json.dumps(result, indent=2))


def _gangs(options: argparse.Namespace) -> Part:
    load = Load(gangs=options.gangs, pods=options.pods, gpus=options.gpus, nodes=options.nodes)
    summary = shown.summary(list(_runs(load, options.connections, options.rounds)), load)
    return {"gangs": summary}, shown.gangs_table(summary)


def _decisions(options: argparse.Namespace) -> Part:
    figures: dict[str, object] = {}
    tables = []
    for name, shapes in _shapes(options.sizes).items():
        found = []
        for size in decisions.measure(options.sizes, options.events, shapes):
            _say(f"decided, {name}: {size.nodes} nodes, {size.gangs} waiting")
            found.append(shown.decisions_figures(size))
        figures[f"decisions, {name}"] = found
        tables.append(f"{name}\n{shown.decisions_table(found)}")
    return figures, "\n\n".join(tables)


def _openb(options: argparse.Namespace) -> Part:
    filled = list(openb.measure(options.traces, options.seeds))
    return {"openb": [asdict(one) for one in filled]}, openb.table(filled)


def _racks(options: argparse.Namespace) -> Part:
    outcomes = racks.measure(options.traces / racks.INVENTORY)
    return {"racks": [asdict(one) for one in outcomes]}, racks.table(outcomes)


def _victims(_: argparse.Namespace) -> Part:
    searches, distances = list(victims.searches()), victims.distances()
    figures = {"searches": [asdict(one) for one in searches], "loss / optimum": distances}
    return {"victims": figures}, f"{victims.table(searches)}\n\n{victims.distance_table(distances)}"


def _exporters(_: argparse.Namespace) -> Part:
    costs = exporters.measure()
    return {"exporters": [asdict(one) for one in costs]}, exporters.table(costs)


PARTS = {
    "gangs": _gangs, "decisions": _decisions, "victims": _victims, "exporters": _exporters, "openb": _openb,
    "racks": _racks,
}  # fmt: skip
OF_TRACES = {"openb", "racks"}  # these read inventories


def _runs(load: Load, connections: list[int], rounds: int) -> Iterator[gangs.Run]:
    """Measure every kind in each round, one after the other, so that a drift of the machine's speed meets all."""
    for number in range(1, rounds + 1):
        for kind in (0, *connections):
            run = asyncio.run(gangs.by_bare_client(load, kind) if kind else gangs.by_controller(load))
            _say(f"round {number} of {rounds}, {run.kind}: {load.total} pods running in {run.all_running:.2f} s")
            yield run


def _shapes(sizes: Sequence[tuple[int, int]]) -> dict[str, list[decisions.Shape]]:
    cohorts = [(max(10, nodes // 10), max(1, nodes // 100)) for nodes, _ in sizes]  # queues, cohorts
    return {
        "separate queues": [decisions.Shape()] * len(sizes),
        "cohorts": [decisions.Shape(queues, cohorts) for queues, cohorts in cohorts],
        "cohorts, fair sharing": [decisions.Shape(queues, cohorts, fair=True) for queues, cohorts in cohorts],
    }


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _size(text: str) -> tuple[int, int]:
    nodes, _, waiting = text.partition("x")
    return int(nodes), int(waiting)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", choices=tuple(PARTS), help="one of them")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--gangs", type=int, default=SIZE.gangs)
    parser.add_argument("--pods", type=int, default=SIZE.pods, help="of a gang")
    parser.add_argument("--gpus", type=int, default=SIZE.gpus, help="of a pod")
    parser.add_argument("--nodes", type=int, default=SIZE.nodes, help="simulated ones, of 8 GPUs")
    parser.add_argument(
        "--connections", type=int, nargs="*", default=list(gangs.CONNECTIONS), help="of the bare client, one run each"
    )
    parser.add_argument("--rounds", type=int, default=1, help="runs of each kind; medians are shown")
    parser.add_argument(
        "--sizes", type=_size, nargs="+", default=decisions.SIZES, metavar="NODESxWAITING", help="to decide upon"
    )
    parser.add_argument("--events", type=int, default=decisions.EVENTS, help="to decide after, at each size")
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        help="with nodes-openb2023.csv.gz, pods-openb2023.csv.gz, nodes-spot2026.csv.gz; else no openb, no racks",
    )
    parser.add_argument("--seeds", type=int, default=openb.SEEDS, help="orders in which the pods of openb come")
    options = parser.parse_args(arguments)
    if options.only in OF_TRACES and not options.traces:
        parser.error(f"--only {options.only} needs --traces FOLDER")
    return options


if __name__ == "__main__":
    main()
