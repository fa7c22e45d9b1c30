"""Frames and addresses of the RPC protocol.

Frames and addresses; what a body means is not known here.

    length of the body (4 bytes) | kind (1) | tag (8) | body

A tag is the asker's name for one call, so that many share a connection. Anything that is not a frame ends the connection.
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
"""How much of a stream may be under way before its reader has taken some. One item may always be."""

ITEM_BYTES: Final = 64
"""What an item counts in addition to its body: empty ones fill memory as well."""

_HEADER: Final = Struct(">IBQ")
_LOOPBACK_CURE: Final = "use unix:/path, or tcp:127.0.0.1:port, which are not encrypted; tls:host:port is, for any host"


class Kind(IntEnum):
    # from the asker
    REQUEST = 1
    STREAM = 2
    TAKEN = 3
    """The reader of a stream has taken items; the body counts their bytes."""
    LEAVE = 4
    """The reader of a stream wants no more."""
    # from the answerer
    REPLY = 16
    ITEM = 17
    END = 18
    BROKEN = 19
    """It was begun, and there will be no answer, or no more of it."""
    REFUSED = 20
    """It was not begun."""


class Frame(NamedTuple):
    kind: int
    tag: int
    body: bytes


class NoFrame(Exception):
    """The far side does not speak this, or sends more than is allowed."""


def framed(kind: Kind, tag: int, body: bytes = b"") -> bytes:
    if len(body) > BODY_BYTES_MAX:
        raise ValueError(f"a body of {len(body)} bytes; at most {BODY_BYTES_MAX} are sent in one piece")
    return _HEADER.pack(len(body), kind, tag) + body


async def next_frame(reader: asyncio.StreamReader, bytes_max: int = BODY_BYTES_MAX) -> Frame:
    """Raises `NoFrame`, or what asyncio raises at the end of a connection: `OSError` or `IncompleteReadError`."""
    length, kind, tag = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if length > bytes_max:
        raise NoFrame(f"a body of {length} bytes")
    return Frame(kind, tag, await reader.readexactly(length) if length else b"")


def reason(error: OSError) -> str:
    """What the system says of it. asyncio puts longer words of its own around that, which tell no more."""
    return os.strerror(error.errno).lower() if error.errno else str(error)


class Address(NamedTuple):
    """Where a process listens: `path` of a Unix socket, or a `host` and its `port`: of this machine, unless it is `secure`."""

    path: str = ""
    host: str = ""
    port: int = 0
    secure: bool = False

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"{'tls' if self.secure else 'tcp'}:{self.host}:{self.port}"


def address(text: str) -> Address:
    """Raises ValueError, with what to write instead."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest.startswith("/"):
        return Address(path=rest)
    host, _, port = rest.rpartition(":")
    if scheme not in ("tcp", "tls") or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r} is no address; {_LOOPBACK_CURE}")
    host = host.removeprefix("[").removesuffix("]")
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{text!r} is no address in numbers; {_LOOPBACK_CURE}") from None
    if not found.is_loopback and scheme != "tls":
        raise ValueError(f"{text!r} is not on this machine; {_LOOPBACK_CURE}")
    return Address(host=host, port=int(port), secure=scheme == "tls")
