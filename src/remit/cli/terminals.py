"""How are the keys and the size of this terminal passed on? As they are, and all is put back at the end. Nothing is kept."""

from __future__ import annotations

import asyncio
import os
import signal  # noqa: TID251 - the number of the signal that says that a window was resized
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from remit.model.sessions import INPUT_BYTES, Window

KEYBOARD = 0


def window() -> Window:
    """Of the terminal that is typed at, or shown on."""
    for stream in (KEYBOARD, 1, 2):
        with suppress(OSError):
            size = os.get_terminal_size(stream)
            return Window(max(1, min(size.lines, 10_000)), max(1, min(size.columns, 10_000)))
    return Window()


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
    return os.read(KEYBOARD, INPUT_BYTES)


def is_typed_at() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _tell(came: asyncio.Future[None]) -> None:
    if not came.done():
        came.set_result(None)
