"""How is an interrupt not lost? What it falls into may swallow whatever is raised there: then it comes again."""

from __future__ import annotations

import signal  # noqa: TID251 - the program's own
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

AGAIN_S: Final = 2.0
"""As long as it may take from where it was raised to the end of what is insisted on."""


@contextmanager
def insisting() -> Iterator[None]:
    """An interrupt ends this, at the latest when it is over. Whoever has a handler of their own keeps it."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    before = signal.getsignal(signal.SIGALRM)
    heard = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        heard = True
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, before)
    if heard:
        raise KeyboardInterrupt
