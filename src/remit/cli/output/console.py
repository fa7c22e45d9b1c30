"""Console, table layout, broken pipes.

For a terminal within its width and in colours, else whole and plain. It loads rich.

It loads rich, so only what prints tables loads it.
"""

from __future__ import annotations

import signal  # noqa: TID251 - only the number of SIGPIPE
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from remit.cli.main import drop_output
from remit.model.problems import escaped

GAP: Final = "   "
FLUID_MIN: Final = 12
GOOD: Final = "green"
BAD: Final = "red"
UNSURE: Final = "yellow"
FAINT: Final = "dim"


class Column(NamedTuple):
    """`wide`: shown only where it was asked for more. `fluid`: on a terminal it is cut to what room is left. `least`: how wide
    it is from the beginning where rows come one by one, so that they stay below each other.
    """

    head: str
    wide: bool = False
    right: bool = False
    fluid: bool = False
    least: int = 0


class Cell(NamedTuple):
    text: str
    style: str = ""


Cells = Sequence[str | Cell]


class Sheet:
    """A table that may grow: what comes later keeps the widths of what came first, as far as it fits."""

    def __init__(
        self, console: Console, columns: Sequence[Column], *, wide: bool = False, heads: bool = True, live: bool = False
    ) -> None:
        self._console = console
        self._kept = [number for number, column in enumerate(columns) if wide or not column.wide]
        self._columns = [columns[number] for number in self._kept]
        self._wide, self._heads = wide, heads
        self._widths = [max(cell_len(column.head) if heads else 0, column.least if live else 0) for column in self._columns]
        self._begun = False

    def show(self, rows: Iterable[Cells]) -> None:
        made = [[_cell(row[number]) for number in self._kept] for row in rows]
        for row in made:
            for number, cell in enumerate(row):
                self._widths[number] = max(self._widths[number], cell_len(cell.text))
        widths = self._fitted()
        if self._heads and not self._begun:
            self._line([Cell(column.head, "bold") for column in self._columns], widths)
        self._begun = True
        for row in made:
            self._line(row, widths)

    def _fitted(self) -> list[int]:
        """The widest fluid columns give way until the line fits a terminal; nothing is cut for anybody else."""
        widths = list(self._widths)
        if self._wide or not self._console.file.isatty():
            return widths
        over = sum(widths) + len(GAP) * (len(widths) - 1) - self._console.width
        fluid = [number for number, column in enumerate(self._columns) if column.fluid]
        for number in sorted(fluid, key=lambda number: -widths[number]):
            if over > 0:
                less = min(over, max(0, widths[number] - FLUID_MIN))
                widths[number] -= less
                over -= less
        return widths

    def _line(self, row: Sequence[Cell], widths: Sequence[int]) -> None:
        last = len(row) - 1
        if self._console.color_system is None and not self._console.file.isatty():
            parts = (_padded(cell.text, width, column, end=number == last) for number, (cell, width, column) in
                     enumerate(zip(row, widths, self._columns, strict=True)))  # fmt: skip
            self._console.file.write(GAP.join(parts).rstrip() + "\n")
            return
        line = Text()
        for number, (cell, width, column) in enumerate(zip(row, widths, self._columns, strict=True)):
            line.append(_padded(cell.text, width, column, end=number == last), style=cell.style)
            line.append("" if number == last else GAP)
        line.rstrip()
        self._console.print(line, soft_wrap=True)


def _cell(made: str | Cell) -> Cell:
    cell = made if isinstance(made, Cell) else Cell(made)
    return Cell(escaped(cell.text), cell.style)


def _padded(text: str, width: int, column: Column, *, end: bool) -> str:
    size = cell_len(text)
    if size > width:
        return set_cell_size(text, max(0, width - 1)) + "…" if width else text
    if column.right:
        return " " * (width - size) + text
    return text if end else text + " " * (width - size)


def plain(text: str) -> None:
    """A line for whoever reads on, in the order of everything else that is printed."""
    sys.stdout.write(f"{escaped(text)}\n")


WIDTH_MAX: Final = 128
UNBROKEN: Final = 1_000_000
"""Wider than any line: a program that looks for words finds them on one line."""


class _Told(Console):
    """A console that leaves a reader who is gone to whoever runs the command."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """The last hand on all that is shown: what would steer a terminal and is none of our colours is spelt out."""
        return super()._render_buffer(one if one.control else one._replace(text=_tame(one.text)) for one in buffer)


def _tame(text: str) -> str:
    return text if text.isprintable() else "\n".join(escaped(line) for line in text.split("\n"))


def console(*, stderr: bool = False) -> Console:
    """Lines are broken for terminals alone, even where colours are asked for elsewhere."""
    found = _Told(stderr=stderr, highlight=False, emoji=False, markup=False)
    found.width = min(found.width, WIDTH_MAX) if found.file.isatty() else UNBROKEN
    return found


@contextmanager
def until_broken_pipe() -> Iterator[None]:
    """Nobody reads on, as in `| head`: nothing is broken or missed by that, so it must not end as if something were."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        sys.exit(128 + signal.SIGPIPE)
