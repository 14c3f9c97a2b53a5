"""How things are shown: tables, ages, and objects in machine-readable forms. Data goes to stdout."""

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import typer

NONE = "-"  # an empty cell would shift the columns of whoever splits at spaces
_GAP = "   "
_STYLES = {
    "Pending": "yellow",
    "Starting": "cyan",
    "Running": "green",
    "Checkpointing": "magenta",
    "Stopping": "magenta",
    "Succeeded": "dim",
    "Failed": "red",
    "Deleted": "dim",
    "Ready": "green",
    "NotReady": "red",
}


class Table:
    """Aligned columns; on a terminal with colour and cut to its width, unless ``wide``."""

    def __init__(self, columns: Sequence[str], *, wide: bool = False) -> None:
        """Start with the headings, which the first ``show`` prints."""
        self._columns = columns
        self._widths = [len(column) for column in columns]
        self._fits = sys.stdout.isatty() and not wide
        self._begun = False

    def show(self, rows: Iterable[Sequence[object]]) -> None:
        """Print rows; those of later calls stand under those of the first."""
        cells = [[clean(cell) for cell in row] for row in rows]
        for row in cells:
            self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, row, strict=True)]
        if self._fits:
            self._show_fitting(cells)
        else:
            lines = cells if self._begun else [list(self._columns), *cells]
            for line in lines:
                padded = (cell.ljust(width) for cell, width in zip(line, self._widths, strict=True))
                typer.echo(_GAP.join(padded).rstrip())
        self._begun = True
        sys.stdout.flush()

    def _show_fitting(self, cells: Sequence[Sequence[str]]) -> None:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=not self._begun)
        for column, width in zip(self._columns, self._widths, strict=True):
            table.add_column(column, no_wrap=True, overflow="ellipsis", width=width, header_style="bold")
        for row in cells:
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        Console().print(table)


def clean(value: object) -> str:
    """Return a cell's text: in one line, and without anything that a terminal would obey."""
    if value is None or value == "":
        return NONE
    return "".join(char if char.isprintable() else " " for char in str(value))


def age(stamp: str | None, now: float | None = None) -> str:
    """Return how long ago a time of the API server was, in kubectl's form: 45s, 5m, 3h12m, 3d4h."""
    if not stamp:
        return NONE
    return duration((time.time() if now is None else now) - datetime.fromisoformat(stamp).timestamp())


def duration(seconds: float) -> str:
    """Return a length of time in kubectl's form, of at most two units."""
    total = max(0, int(seconds))
    minutes, hours, days = total // 60, total // 3600, total // 86400
    # (below this many seconds, large unit, its letter, small unit, its letter; no small unit: not shown)
    for limit, large, letter, small, small_letter in (
        (120, total, "s", 0, ""),
        (600, minutes, "m", total % 60, "s"),
        (3 * 3600, minutes, "m", 0, ""),
        (8 * 3600, hours, "h", minutes % 60, "m"),
        (48 * 3600, hours, "h", 0, ""),
        (8 * 86400, days, "d", hours % 24, "h"),
        (2 * 365 * 86400, days, "d", 0, ""),
        (8 * 365 * 86400, days // 365, "y", days % 365, "d"),
    ):
        if total < limit:
            return f"{large}{letter}" + (f"{small}{small_letter}" if small else "")
    return f"{days // 365}y"


def resource_name(item: Mapping[str, Any]) -> str:
    """Return ``trainingjob.queuectl.dev/llm``, as kubectl's -o name does."""
    group, _, version = str(item["apiVersion"]).rpartition("/")
    kind = str(item["kind"]).lower()
    return f"{kind}.{group}/{item['metadata']['name']}" if group and version else f"{kind}/{item['metadata']['name']}"


def show_objects(items: Sequence[Mapping[str, Any]], form: str, *, one: bool = False) -> None:
    """Print objects by name, as JSON or as YAML; several make a List unless only ``one`` was asked for."""
    if form == "name":
        for item in items:
            typer.echo(resource_name(item))
        return
    shown = [_tidy(item) for item in items]
    show_data(shown[0] if one else {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": shown}, form)


def show_data(data: object, form: str) -> None:
    """Print JSON, or a YAML document that others may follow."""
    if form == "json":
        typer.echo(json.dumps(data, indent=2))
    else:
        import yaml

        typer.echo("---\n" + yaml.safe_dump(data, sort_keys=False, width=1_000_000), nl=False)
    sys.stdout.flush()


def _tidy(item: Mapping[str, Any]) -> dict[str, Any]:
    meta = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    return {**item, "metadata": meta}
