"""How wide is what people are told, and what if nobody reads on? It loads rich, so only what prints tables loads it."""

from __future__ import annotations

import signal  # noqa: TID251 - only the number of SIGPIPE
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.segment import Segment

from remit.cli.main import drop_output
from remit.model.problems import escaped

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
def until_nobody_reads() -> Iterator[None]:
    """Nobody reads on, as in `| head`: nothing is broken or missed by that, so it must not end as if something were."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        sys.exit(128 + signal.SIGPIPE)
