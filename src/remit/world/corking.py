"""How does an answer leave in one piece, and arrive? The head of one is held until its body comes, or nobody writes any more.

Each write to a socket is a system call, and wakes whoever reads: a head by itself costs both sides as much as the body does.
What is held leaves before anything else is done with the connection, and at the latest once the event loop comes round.

Who is answered before its body has come sends on for a while, and would hear of a closed connection instead of the answer: what
still comes is let pass for a moment before it is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

LINGER_S: Final = 2.0
LINGER_BYTES: Final = 64 << 20
"""So much is let pass at most."""
_HEAD: Final = b"HTTP/1."


class Corked(asyncio.Transport):
    """A transport in front of another. Only the first piece of an answer is ever held. `sends_on`: is there more to come of
    what was asked? Whoever reads must let it pass once `lingers`.
    """

    def __init__(
        self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop, sends_on: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__()
        self._inner, self._loop, self._held = inner, loop, b""
        self._sends_on = sends_on
        self.lingers = False
        self._passes = LINGER_BYTES
        # Asked for at every turn: straight from the other.
        self.is_closing = inner.is_closing  # type: ignore[method-assign]
        self.get_extra_info = inner.get_extra_info  # type: ignore[method-assign]
        self.pause_reading = inner.pause_reading  # type: ignore[method-assign]
        self.resume_reading = inner.resume_reading  # type: ignore[method-assign]

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._held:
            data, self._held = self._held + bytes(data), b""
        elif data[:7] == _HEAD:
            self._held = bytes(data)
            self._loop.call_soon(self._flush)
            return
        self._inner.write(data)

    def write_whole(self, data: bytes) -> None:
        """A head with its body."""
        self._flush()
        self._inner.write(data)

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            if not self._inner.is_closing():
                self._inner.write(held)

    def close(self) -> None:
        self._flush()
        if self.lingers or self._inner.is_closing() or not self._sends_on() or not self._inner.can_write_eof():
            self._inner.close()
            return
        self.lingers = True
        self.is_closing = lambda: True  # type: ignore[method-assign]
        self._inner.write_eof()
        self._inner.resume_reading()
        self._loop.call_later(LINGER_S, self._inner.close)

    def passed(self, size: int) -> None:
        """So much has come since, and was let pass."""
        self._passes -= size
        if self._passes < 0:
            self._inner.abort()

    def abort(self) -> None:
        self._held = b""
        self._inner.abort()

    def get_write_buffer_size(self) -> int:
        return len(self._held) + self._inner.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._inner.set_write_buffer_limits(high, low)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._inner.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._inner.get_protocol()

    def is_reading(self) -> bool:
        return self._inner.is_reading()
