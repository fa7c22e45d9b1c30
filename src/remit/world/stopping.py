"""How is blocking work ended from another thread? It is told to, and what it waits for is closed; why is not asked."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Stop:
    """Ends blocking work from another thread: it sees so at its next piece, and what it waits for is closed under it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: socket.socket | None = None
        self.asked = False

    def hold(self, one: socket.socket) -> None:
        with self._lock:
            self._held = one
        self.check()

    def now(self) -> None:
        with self._lock:
            self.asked = True
            if self._held is not None:
                with suppress(OSError):
                    # Not the TLS socket's own: that one forgets its encryption, and its reader would take cipher for text.
                    socket.socket.shutdown(self._held, socket.SHUT_RDWR)

    def check(self) -> None:
        if self.asked:
            raise Stopped


class Stopped(Exception):
    """Nobody waits for it any more, or it has taken too long."""
