"""Terminal handling: raw mode, window size, reading stdin, and escaping of untrusted output.

Escaping drops colours and makes all other control sequences visible.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import signal  # noqa: TID251 - SIGWINCH
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from remit.model.problems import escaped
from remit.model.wire.exec_frames import INPUT_BYTES_MAX, TerminalSize

STDIN = 0


def window_size() -> TerminalSize:
    """Return the window size of the terminal on stdin, stdout or stderr."""
    for stream in (STDIN, 1, 2):
        with suppress(OSError):
            size = os.get_terminal_size(stream)
            return TerminalSize(max(1, min(size.lines, 10_000)), max(1, min(size.columns, 10_000)))
    return TerminalSize()


@contextmanager
def raw_mode() -> Iterator[None]:
    """Pass every key to the remote command, including Ctrl-C. The previous mode is restored at the end."""
    before = termios.tcgetattr(STDIN)
    try:
        tty.setraw(STDIN, termios.TCSADRAIN)
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(STDIN, termios.TCSADRAIN, before)


@contextmanager
def on_resize(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` whenever the window is resized."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, callback)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


async def read_stdin() -> bytes:
    """Return the next bytes of stdin; empty at its end."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    try:
        loop.add_reader(STDIN, _set_done, readable)
    except PermissionError:  # a regular file cannot be polled, and is always readable
        await asyncio.sleep(0)
    else:
        try:
            await readable
        finally:
            loop.remove_reader(STDIN)
    return os.read(STDIN, INPUT_BYTES_MAX)


def stdin_is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _set_done(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


LINE_CHARS_MAX: Final = 65_536
"""Longer lines are split, because a line without an end would be buffered for ever."""

_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")


class LineDecoder:
    """Decodes a byte stream into lines. Characters split over two pieces are joined."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
        self._partial = ""

    def feed(self, piece: bytes) -> list[str]:
        *lines, self._partial = (self._partial + self._decoder.decode(piece)).split("\n")
        while len(self._partial) > LINE_CHARS_MAX:
            lines.append(self._partial[:LINE_CHARS_MAX])
            self._partial = self._partial[LINE_CHARS_MAX:]
        return lines

    def rest(self) -> list[str]:
        """Return the last line if it had no line end."""
        last, self._partial = self._partial + self._decoder.decode(b"", final=True), ""
        return [last] if last else []


class TerminalFilter:
    """Decodes a byte stream into text that is safe for a terminal, as `escape_terminal` does for single lines."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")

    def feed(self, piece: bytes, *, last: bool = False) -> str:
        lines = self._decoder.decode(piece, last).replace("\r\n", "\n").split("\n")
        return "\n".join("\t".join(escaped(part) for part in _COLOUR.sub("", line).split("\t")) for line in lines)


def escape_terminal(line: str) -> str:
    """Make a line safe for a terminal: programs must not change its title, cursor or clipboard."""
    text = _COLOUR.sub("", line.removesuffix("\r"))
    return "\t".join(escaped(part) for part in text.split("\t"))
