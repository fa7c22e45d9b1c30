"""Listening sockets, connection limit per address, write coalescing.

The head of one is held until its body comes, or nobody writes any more.

Each write to a socket is a system call, and wakes whoever reads: a head by itself costs both sides as much as the body does.
What is held leaves before anything else is done with the connection, and at the latest once the event loop comes round.

Who is answered before its body has come sends on for a while, and would hear of a closed connection instead of the answer: what
still comes is let pass for a moment before it is closed.

A socket that is bound; who is answered there is not known.

Loopback only, unless whoever calls is spoken to over TLS: a token that goes over a network in the clear is everybody's.

Counted by address; what is said on it is not known here.

An address may hold as many connections as are still free: one alone gets half of all, the next half of the rest, and so on. So
whoever has none yet finds a place, however many another has. A few are taken from each address while there is any room.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections import Counter
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, Final, NamedTuple

from remit.world.interfaces import NotServed

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


BACKLOG: Final = 1_024
STALLED_MS_MAX: Final = 60_000
LOCALHOST: Final = "localhost"
_SELF: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - every address, and the one among them that is always there


class Listen(NamedTuple):
    """Where to listen; port 0 is any that is free."""

    host: str = "127.0.0.1"
    port: int = 7420


class Bound:
    """A socket that nobody else has; `url` is where it is reached. `secure`: only over TLS."""

    def __init__(self, listen: Listen, *, secure: bool = False) -> None:
        self.secure = secure
        self.socket = _bind(listen, secure)
        self.host, self.port = self.socket.getsockname()[:2]

    @property
    def url(self) -> str:
        """From this machine, if it is reached at every address."""
        host = _SELF.get(self.host, self.host)
        return f"{'https' if self.secure else 'http'}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def close(self) -> None:
        self.socket.close()


def _bind(listen: Listen, secure: bool) -> socket.socket:
    host = "127.0.0.1" if listen.host == LOCALHOST else listen.host
    try:
        address = ip_address(host)
    except ValueError:
        raise NotServed(f"{listen.host!r} is no address", "use an address of this machine, or localhost") from None
    if not address.is_loopback and not secure:
        cause = f"{listen.host} can be reached from other machines, where tokens would go in the clear"
        raise NotServed(cause, "say --tls, which makes a certificate authority and all that it needs; or listen on 127.0.0.1")
    found = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Every connection that is taken here has this from it: one whose far side takes nothing does not stay for ever.
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS_MAX)
        found.bind((host, listen.port))
        found.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        found.close()
        place = f"{listen.host}:{listen.port}"
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise NotServed(f"somebody listens at {place} already", "end that one, or use another --listen") from error
        raise NotServed(f"cannot listen at {place} ({error})", "use another --listen") from error
    found.setblocking(False)
    return found


FEW: Final = 32
_OWN_BITS: Final = 64
"""Of an address of IPv6 the rest is its holder's to choose, so that counts as one."""


class ConnectionLimiter:
    """Limits the connections of one listener, in all and per client address.

    When the listener is nearly full, addresses that hold many connections are refused first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._held: Counter[str] = Counter()

    def admits(self, address: str, other: ConnectionLimiter | None = None) -> bool:
        """Return whether `address` may open one more connection. Connections counted by `other` (for example those still in
        their TLS handshake) count as well.
        """
        at = origin(address)
        mine, all_ = self._held[at], self.count
        if other is not None:
            mine, all_ = mine + other._held[at], all_ + other.count
        return mine < max(FEW, self.limit - all_)

    def came(self, address: str) -> None:
        self.count += 1
        self._held[origin(address)] += 1

    def left(self, address: str) -> None:
        at = origin(address)
        self.count -= 1
        self._held[at] -= 1
        if self._held[at] <= 0:
            del self._held[at]


def origin(address: str) -> str:
    """Whose it is, as far as an address tells: one machine of IPv4, one network of IPv6."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(found) >> _OWN_BITS << _OWN_BITS))
