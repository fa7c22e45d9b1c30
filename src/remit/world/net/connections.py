"""Listening sockets, connection limit per address, write coalescing.

`CoalescingTransport` holds back the head of a response until its body is written, or until the next iteration of the event
loop. Each write is a system call and wakes the reader, so a separate head would cost both sides as much as the body. It also
keeps reading for a moment when a response was sent before the request body had arrived: closing at once would reset the
connection, and the client would see an error in place of the response.

`BoundSocket` listens on loopback addresses only, unless it is served with TLS: tokens must not cross a network unencrypted.

`ConnectionLimiter` lets an address hold as many connections as are still free: a single address gets half of all, the next
one half of the rest, and so on. So an address without connections is always admitted, even if another address holds
very many. A few connections per address are always admitted while there is any capacity.
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

from remit.world.interfaces import ListenFailed

LINGER_S: Final = 2.0
LINGER_BYTES: Final = 64 << 20
"""Upper bound of the data that is discarded before closing."""
_HEAD: Final = b"HTTP/1."


class CoalescingTransport(asyncio.Transport):
    """A transport in front of another one that holds back only the first part of a response (its head).

    `request_incomplete` returns whether more of the request is to come. While `lingering` is set, the protocol must discard
    received data and report it to `discarded`.
    """

    def __init__(
        self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop, request_incomplete: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__()
        self._inner, self._loop, self._held = inner, loop, b""
        self._request_incomplete = request_incomplete
        self.lingering = False
        self._discard_bytes_left = LINGER_BYTES
        # Called very often: bind the inner methods directly.
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

    def write_through(self, data: bytes) -> None:
        """Write a complete response or chunk without holding it back."""
        self._flush()
        self._inner.write(data)

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            if not self._inner.is_closing():
                self._inner.write(held)

    def close(self) -> None:
        self._flush()
        if self.lingering or self._inner.is_closing() or not self._request_incomplete() or not self._inner.can_write_eof():
            self._inner.close()
            return
        self.lingering = True
        self.is_closing = lambda: True  # type: ignore[method-assign]
        self._inner.write_eof()
        self._inner.resume_reading()
        self._loop.call_later(LINGER_S, self._inner.close)

    def discarded(self, size: int) -> None:
        """Account for discarded data."""
        self._discard_bytes_left -= size
        if self._discard_bytes_left < 0:
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
UNACKNOWLEDGED_MS_MAX: Final = 60_000
LOCALHOST: Final = "localhost"
_LOCAL_OF_WILDCARD: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound here


class ListenAddress(NamedTuple):
    """Address to listen on; port 0 chooses a free one."""

    host: str = "127.0.0.1"
    port: int = 7420


class BoundSocket:
    """A listening socket of this process; `url` is its address. `secure`: it is served with TLS only."""

    def __init__(self, listen: ListenAddress, *, secure: bool = False) -> None:
        self.secure = secure
        self.socket = _bind(listen, secure)
        self.host, self.port = self.socket.getsockname()[:2]

    @property
    def url(self) -> str:
        """URL of the socket. If it listens on all addresses, the URL names the loopback address."""
        host = _LOCAL_OF_WILDCARD.get(self.host, self.host)
        return f"{'https' if self.secure else 'http'}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def close(self) -> None:
        self.socket.close()


def _bind(listen: ListenAddress, secure: bool) -> socket.socket:
    host = "127.0.0.1" if listen.host == LOCALHOST else listen.host
    try:
        address = ip_address(host)
    except ValueError:
        raise ListenFailed(f"{listen.host!r} is not an IP address", "use an address of this machine, or localhost") from None
    if not address.is_loopback and not secure:
        cause = f"{listen.host} is reachable from other machines, and tokens would be sent unencrypted"
        raise ListenFailed(cause, "use --tls, which creates a certificate authority and certificates; or listen on 127.0.0.1")
    bound = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit this: one whose peer acknowledges nothing is dropped.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS_MAX)
        bound.bind((host, listen.port))
        bound.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        bound.close()
        where = f"{listen.host}:{listen.port}"
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ListenFailed(
                f"{where} is already in use", "stop the process that listens there, or use another --listen"
            ) from error
        raise ListenFailed(f"cannot listen at {where} ({error})", "use another --listen") from error
    bound.setblocking(False)
    return bound


ALWAYS_ADMITTED: Final = 32
_IPV6_HOST_BITS: Final = 64
"""Prefix length by which IPv6 addresses are counted: the rest of an address is chosen by its owner."""


class ConnectionLimiter:
    """Limits the connections of one listener, in all and per client address.

    When the listener is nearly full, addresses that hold many connections are refused first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._by_address: Counter[str] = Counter()

    def admits(self, address: str, other: ConnectionLimiter | None = None) -> bool:
        """Return whether `address` may open one more connection. Connections counted by `other` (for example those still in
        their TLS handshake) count as well.
        """
        key = address_key(address)
        of_address, total = self._by_address[key], self.count
        if other is not None:
            of_address, total = of_address + other._by_address[key], total + other.count
        return of_address < max(ALWAYS_ADMITTED, self.limit - total)

    def opened(self, address: str) -> None:
        self.count += 1
        self._by_address[address_key(address)] += 1

    def closed(self, address: str) -> None:
        key = address_key(address)
        self.count -= 1
        self._by_address[key] -= 1
        if self._by_address[key] <= 0:
            del self._by_address[key]


def address_key(address: str) -> str:
    """Return the key under which an address is counted: the IPv4 address, or the /64 network of an IPv6 address."""
    if ":" not in address:
        return address
    try:
        ip = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(ip) >> _IPV6_HOST_BITS << _IPV6_HOST_BITS))
