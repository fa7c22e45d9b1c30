"""How is a process that is not ours asked to go? By its number, which whoever asks has from that process's own lock."""

from __future__ import annotations

import os
import signal


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
