"""Frames and addresses of the RPC protocol.

    length of the body (4 bytes) | kind (1) | tag (8) | body

A tag is the client's id of one call, so that many calls share a connection. Any malformed frame ends the connection. Bodies
are opaque here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

BODY_BYTES_MAX: Final = 16 << 20
WINDOW_BYTES: Final = 1 << 20
"""How much of a stream may be sent before its reader has taken some. One item may always be sent."""

ITEM_BYTES: Final = 64
"""Added to the size of each item in window accounting, because empty items use memory too."""

_HEADER: Final = Struct(">IBQ")
_ADDRESS_FIX: Final = "use unix:/path or tcp:127.0.0.1:port, which are not encrypted, or tls:host:port for other hosts"


class FrameKind(IntEnum):
    # sent by the client
    REQUEST = 1
    STREAM = 2
    TAKEN = 3
    """The reader of a stream has consumed items; the body is the number of bytes."""
    LEAVE = 4
    """The reader cancels a stream."""
    # sent by the server
    REPLY = 16
    ITEM = 17
    END = 18
    BROKEN = 19
    """The call was started and failed: no reply, or no more items, will follow."""
    REFUSED = 20
    """The call was not started."""


class Frame(NamedTuple):
    kind: int
    tag: int
    body: bytes


class FrameError(Exception):
    """The peer sent a malformed frame, or more than allowed."""


def pack_frame(kind: FrameKind, tag: int, body: bytes = b"") -> bytes:
    if len(body) > BODY_BYTES_MAX:
        raise ValueError(f"body of {len(body)} bytes; the limit of one frame is {BODY_BYTES_MAX}")
    return _HEADER.pack(len(body), kind, tag) + body


async def read_frame(reader: asyncio.StreamReader, bytes_max: int = BODY_BYTES_MAX) -> Frame:
    """Read one frame. Raises `FrameError`, or at the end of the connection `OSError` or `IncompleteReadError`."""
    length, kind, tag = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if length > bytes_max:
        raise FrameError(f"a body of {length} bytes exceeds the limit")
    return Frame(kind, tag, await reader.readexactly(length) if length else b"")


def os_error_text(error: OSError) -> str:
    """Return the system's text for an error, without what asyncio adds around it."""
    return os.strerror(error.errno).lower() if error.errno else str(error)


class RpcAddress(NamedTuple):
    """Where a process listens: the `path` of a Unix socket, or `host` and `port`. Unless `secure` (TLS), the host is the
    loopback.
    """

    path: str = ""
    host: str = ""
    port: int = 0
    secure: bool = False

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"{'tls' if self.secure else 'tcp'}:{self.host}:{self.port}"


def parse_address(text: str) -> RpcAddress:
    """Parse an address. Raises ValueError with the accepted forms."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest.startswith("/"):
        return RpcAddress(path=rest)
    host, _, port = rest.rpartition(":")
    if scheme not in ("tcp", "tls") or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r} is not an address; {_ADDRESS_FIX}")
    host = host.removeprefix("[").removesuffix("]")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{text!r} has no numeric IP address; {_ADDRESS_FIX}") from None
    if not ip.is_loopback and scheme != "tls":
        raise ValueError(f"{text!r} is not a loopback address; {_ADDRESS_FIX}")
    return RpcAddress(host=host, port=int(port), secure=scheme == "tls")
