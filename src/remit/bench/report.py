"""The report of a benchmark: rows and aims, as tables for people or as one JSON line for programs."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import click
import msgspec

from remit.cli.session.source_revision import revision

COLUMNS_MAX: Final = 12
"""Up to this many measured values are printed as columns; with more, each row becomes a column."""


class Aim(NamedTuple):
    name: str
    unit: str
    aim: float
    value: float
    better: Literal["higher", "lower"]

    @property
    def met(self) -> bool:
        return self.value >= self.aim if self.better == "higher" else self.value <= self.aim


class Report(NamedTuple):
    bench: str
    rows: list[dict[str, Any]]
    aims: list[Aim]

    def line(self) -> str:
        """Stable for programs: numbers as numbers, everything on one line."""
        whole = {
            "bench": self.bench,
            "revision": revision(),
            "machine": machine(),
            "rows": self.rows,
            "aims": [{**aim._asdict(), "met": aim.met} for aim in self.aims],
        }
        return msgspec.json.encode(whole).decode()


def machine() -> dict[str, Any]:
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine()
    )
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    cores = sum(line.startswith("processor") for line in _lines("/proc/cpuinfo"))
    load = float((_lines("/proc/loadavg") or ["0"])[0].split()[0])
    return {"cpu": cpu, "cores": cores, "memory_mib": memory // 1024, "python": platform.python_version(), "load": load}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def say(text: str) -> None:
    click.echo(text, err=True)


def finish(report: Report, as_json: bool) -> None:
    """Print for people or for programs; the exit code tells whether every aim was met."""
    from remit.cli.output.console import until_nobody_reads

    with until_nobody_reads():
        if as_json:
            click.echo(report.line())
        else:
            _table(report)
    if not all(aim.met for aim in report.aims):
        raise SystemExit(1)


def _table(report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    from remit.cli.output.console import console

    shown = console()
    rows = Table(title=f"remit bench {report.bench}")
    names = list(dict.fromkeys(name for row in report.rows for name in row))
    cells = [[name.replace("_", " "), *(_shown(row.get(name, "")) for row in report.rows)] for name in names]
    if len(names) <= max(COLUMNS_MAX, len(report.rows)):
        cells = [list(row) for row in zip(*cells, strict=True)]
    for at, head in enumerate(cells[0]):
        rows.add_column(head, justify="right" if at else "left")
    for row in cells[1:]:
        rows.add_row(*row)
    shown.print(rows)
    aims = Table(title="aims")
    for name in ("aim", "wanted", "seen", ""):
        aims.add_column(name, justify="left" if name == "aim" else "right")
    for aim in report.aims:
        sign = "≥" if aim.better == "higher" else "≤"
        mark = Text("met", "green") if aim.met else Text("missed", "red")
        aims.add_row(aim.name, f"{sign} {_shown(aim.aim)} {aim.unit}", f"{_shown(aim.value)} {aim.unit}", mark)
    shown.print(aims)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
