"""Console output, table layout and broken pipes. On a terminal, tables are coloured and fit its width.

Importing it loads rich, so commands import it only when they print.
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
    """A table column. `wide`: shown only with -o wide. `fluid`: cut to the remaining width of a terminal. `least`: minimum
    width if rows are printed one by one, so that they stay aligned.
    """

    heading: str
    wide: bool = False
    right: bool = False
    fluid: bool = False
    least: int = 0


class Cell(NamedTuple):
    text: str
    style: str = ""


Cells = Sequence[str | Cell]


class Sheet:
    """A table to which rows can be added. Later rows keep the column widths of the first ones where they fit."""

    def __init__(
        self, console: Console, columns: Sequence[Column], *, wide: bool = False, headings: bool = True, live: bool = False
    ) -> None:
        self._console = console
        self._shown_columns = [number for number, column in enumerate(columns) if wide or not column.wide]
        self._columns = [columns[number] for number in self._shown_columns]
        self._wide, self._headings = wide, headings
        self._widths = [
            max(cell_len(column.heading) if headings else 0, column.least if live else 0) for column in self._columns
        ]
        self._header_printed = False

    def show(self, rows: Iterable[Cells]) -> None:
        cells = [[_cell(row[number]) for number in self._shown_columns] for row in rows]
        for row in cells:
            for number, cell in enumerate(row):
                self._widths[number] = max(self._widths[number], cell_len(cell.text))
        widths = self._fitted()
        if self._headings and not self._header_printed:
            self._line([Cell(column.heading, "bold") for column in self._columns], widths)
        self._header_printed = True
        for row in cells:
            self._line(row, widths)

    def _fitted(self) -> list[int]:
        """Return the column widths. On a terminal the widest fluid columns are cut until a row fits the line."""
        widths = list(self._widths)
        if self._wide or not self._console.file.isatty():
            return widths
        excess = sum(widths) + len(GAP) * (len(widths) - 1) - self._console.width
        fluid = [number for number, column in enumerate(self._columns) if column.fluid]
        for number in sorted(fluid, key=lambda number: -widths[number]):
            if excess > 0:
                cut = min(excess, max(0, widths[number] - FLUID_MIN))
                widths[number] -= cut
                excess -= cut
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


def _cell(cells: str | Cell) -> Cell:
    cell = cells if isinstance(cells, Cell) else Cell(cells)
    return Cell(escaped(cell.text), cell.style)


def _padded(text: str, width: int, column: Column, *, end: bool) -> str:
    size = cell_len(text)
    if size > width:
        return set_cell_size(text, max(0, width - 1)) + "…" if width else text
    if column.right:
        return " " * (width - size) + text
    return text if end else text + " " * (width - size)


def plain(text: str) -> None:
    """Write a line to stdout with control characters escaped."""
    sys.stdout.write(f"{escaped(text)}\n")


WIDTH_MAX: Final = 128
WIDTH_UNLIMITED: Final = 1_000_000
"""Width for output that is not a terminal. Lines are not wrapped, so that grep finds phrases."""


class _PipeAwareConsole(Console):
    """A console that raises BrokenPipeError to the command instead of handling it."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """Escape all control characters in the output except those of the console itself."""
        return super()._render_buffer(
            segment if segment.control else segment._replace(text=_escape(segment.text)) for segment in buffer
        )


def _escape(text: str) -> str:
    return text if text.isprintable() else "\n".join(escaped(line) for line in text.split("\n"))


def console(*, stderr: bool = False) -> Console:
    """Create a console that wraps lines only on terminals, even if colours are forced elsewhere."""
    console_ = _PipeAwareConsole(stderr=stderr, highlight=False, emoji=False, markup=False)
    console_.width = min(console_.width, WIDTH_MAX) if console_.file.isatty() else WIDTH_UNLIMITED
    return console_


@contextmanager
def until_broken_pipe() -> Iterator[None]:
    """Exit quietly, as after SIGPIPE, when the reader of stdout closes it, as in `| head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        sys.exit(128 + signal.SIGPIPE)
