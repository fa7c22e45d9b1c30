"""How is a process that is not ours asked to go? By its number, which whoever asks has from that process's own lock."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def ask_to_go(pid: int, *, at_once: bool = False) -> bool:
    """SIGTERM, or SIGKILL. False if there is nobody of that number. Raises PermissionError if it is somebody else's."""
    try:
        handle = os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError, ValueError, OSError):
        return False
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL if at_once else signal.SIGTERM)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


@contextmanager
def watched(pid: int | None) -> Iterator[Callable[[], bool]]:
    """Yields what tells whether the process that has this number now is still there; one that takes the number later is not
    meant. Locks are let go of a moment before their holder has ended.
    """
    try:
        handle = os.pidfd_open(pid or 0)
    except (OverflowError, ValueError, OSError):
        yield lambda: False
        return
    ends = select.poll()
    ends.register(handle, select.POLLIN)
    try:
        yield lambda: not ends.poll(0)
    finally:
        os.close(handle)
