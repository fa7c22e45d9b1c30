"""Escaping of untrusted output; raw mode and window size.

As they are, and all is put back at the end. Nothing is kept.

Colours are dropped, all else that steers a terminal is spelt.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import signal  # noqa: TID251 - the number of the signal that says that a window was resized
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from remit.model.problems import escaped
from remit.model.wire.exec_frames import INPUT_BYTES_MAX, TerminalSize

KEYBOARD = 0


def window() -> TerminalSize:
    """Of the terminal that is typed at, or shown on."""
    for stream in (KEYBOARD, 1, 2):
        with suppress(OSError):
            size = os.get_terminal_size(stream)
            return TerminalSize(max(1, min(size.lines, 10_000)), max(1, min(size.columns, 10_000)))
    return TerminalSize()


@contextmanager
def raw() -> Iterator[None]:
    """Every key goes through, also those that would end this program: they are the command's."""
    before = termios.tcgetattr(KEYBOARD)
    try:
        tty.setraw(KEYBOARD, termios.TCSADRAIN)
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(KEYBOARD, termios.TCSADRAIN, before)


@contextmanager
def resized(tell: Callable[[], None]) -> Iterator[None]:
    """`tell` is called whenever the window has another size."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, tell)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


async def typed() -> bytes:
    """What is next on the standard input; nothing at its end. A file is never waited for."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[None] = loop.create_future()
    try:
        loop.add_reader(KEYBOARD, _tell, came)
    except PermissionError:  # a file, or nothing at all: there is always something to be read
        await asyncio.sleep(0)
    else:
        try:
            await came
        finally:
            loop.remove_reader(KEYBOARD)
    return os.read(KEYBOARD, INPUT_BYTES_MAX)


def is_typed_at() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _tell(came: asyncio.Future[None]) -> None:
    if not came.done():
        came.set_result(None)


LINE_CHARS_MAX: Final = 65_536
"""A longer line is shown in pieces: nobody waits for an end that may never come."""

_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")


class Lines:
    """Pieces of bytes in, lines of text out. A letter that is cut in two by the pieces is put together again."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
        self._begun = ""

    def feed(self, piece: bytes) -> list[str]:
        *whole, self._begun = (self._begun + self._decoder.decode(piece)).split("\n")
        while len(self._begun) > LINE_CHARS_MAX:
            whole.append(self._begun[:LINE_CHARS_MAX])
            self._begun = self._begun[LINE_CHARS_MAX:]
        return whole

    def rest(self) -> list[str]:
        """What came without an end of its line."""
        last, self._begun = self._begun + self._decoder.decode(b"", final=True), ""
        return [last] if last else []


class TerminalFilter:
    """Pieces of bytes in, text out that a terminal may be given: as `harmless`, but lines go on."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")

    def feed(self, piece: bytes, *, last: bool = False) -> str:
        lines = self._decoder.decode(piece, last).replace("\r\n", "\n").split("\n")
        return "\n".join("\t".join(escaped(part) for part in _COLOUR.sub("", line).split("\t")) for line in lines)


def escape_terminal(line: str) -> str:
    """For a terminal: a title, a cursor or a clipboard is nobody's business but its owner's."""
    bare = _COLOUR.sub("", line.removesuffix("\r"))
    return "\t".join(escaped(part) for part in bare.split("\t"))
