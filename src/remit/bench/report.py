"""The report of a benchmark: measured rows and goals, as tables for people or as one JSON line for programs."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import click
import msgspec

from remit.cli.session.source_revision import revision

COLUMNS_MAX: Final = 12
"""Up to this many measured values are printed as columns; with more, each row becomes a column."""


class BenchAim(NamedTuple):
    name: str
    unit: str
    aim: float
    value: float
    better: Literal["higher", "lower"]

    @property
    def met(self) -> bool:
        return self.value >= self.aim if self.better == "higher" else self.value <= self.aim


class BenchReport(NamedTuple):
    bench: str
    rows: list[dict[str, Any]]
    aims: list[BenchAim]

    def json_line(self) -> str:
        """Return the report as one line of JSON. Names and number types are stable for programs."""
        report = {
            "bench": self.bench,
            "revision": revision(),
            "machine": machine_info(),
            "rows": self.rows,
            "aims": [{**aim._asdict(), "met": aim.met} for aim in self.aims],
        }
        return msgspec.json.encode(report).decode()


def machine_info() -> dict[str, Any]:
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


def print_progress(text: str) -> None:
    click.echo(text, err=True)


def print_report(report: BenchReport, as_json: bool) -> None:
    """Print the report. Exits with code 1 if a goal is missed."""
    from remit.cli.output.console import until_broken_pipe

    with until_broken_pipe():
        if as_json:
            click.echo(report.json_line())
        else:
            _print_tables(report)
    if not all(aim.met for aim in report.aims):
        raise SystemExit(1)


def _print_tables(report: BenchReport) -> None:
    from rich.table import Table
    from rich.text import Text

    from remit.cli.output.console import console

    output = console()
    rows = Table(title=f"remit bench {report.bench}")
    names = list(dict.fromkeys(name for row in report.rows for name in row))
    cells = [[name.replace("_", " "), *(_format(row.get(name, "")) for row in report.rows)] for name in names]
    if len(names) <= max(COLUMNS_MAX, len(report.rows)):
        cells = [list(row) for row in zip(*cells, strict=True)]
    for index, head in enumerate(cells[0]):
        rows.add_column(head, justify="right" if index else "left")
    for row in cells[1:]:
        rows.add_row(*row)
    output.print(rows)
    aims = Table(title="goals")
    for name in ("goal", "required", "measured", ""):
        aims.add_column(name, justify="left" if name == "goal" else "right")
    for aim in report.aims:
        sign = "≥" if aim.better == "higher" else "≤"
        mark = Text("met", "green") if aim.met else Text("missed", "red")
        aims.add_row(aim.name, f"{sign} {_format(aim.aim)} {aim.unit}", f"{_format(aim.value)} {aim.unit}", mark)
    output.print(aims)


def _format(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
