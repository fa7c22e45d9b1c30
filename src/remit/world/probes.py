"""How does work answer? Asked over TCP, within a time; what follows from the answer is not known here: see agent/probing.py."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from remit.world.promises import Clock, Probed

HEAD_BYTES_MAX: Final = 16 << 10
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})(?: ([^\r\n]{0,100}))?\r?\n")
_BAD: Final = re.compile(r"[\x00-\x20\x7f]")


class SocketProber:
    """Real connections, one a question."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def http(self, host: str, port: int, path: str, /, *, timeout_ms: int) -> Probed:
        if _BAD.search(path) or not path.startswith("/"):
            return Probed(ok=False, detail="the path is none that can be asked for")
        head = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUser-Agent: remit-probe\r\nConnection: close\r\n\r\n"
        return await self._asked(host, port, head.encode(), timeout_ms)

    async def tcp(self, host: str, port: int, /, *, timeout_ms: int) -> Probed:
        return await self._asked(host, port, b"", timeout_ms)

    async def _asked(self, host: str, port: int, head: bytes, timeout_ms: int) -> Probed:
        try:
            async with self._clock.timeout_ms(timeout_ms), _connection(host, port) as (reader, writer):
                if not head:
                    return Probed(ok=True, detail=f"port {port} takes connections")
                writer.write(head)
                return _judged(await _first_line(reader))
        except TimeoutError:
            return Probed(ok=False, detail=f"no answer within {timeout_ms} ms")
        except OSError as error:
            # What asyncio says of a failed connection names only itself and the address again.
            why = (os.strerror(error.errno) if error.errno else str(error)).lower()
            return Probed(ok=False, detail=f"port {port} cannot be reached ({why})")


@asynccontextmanager
async def _connection(host: str, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(host, port, limit=HEAD_BYTES_MAX)
    try:
        yield reader, writer
    finally:
        # Dropped, not closed politely: one that never reads must not hold us up.
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


async def _first_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError:
        return b"too long"


def _judged(line: bytes) -> Probed:
    if not line:
        return Probed(ok=False, detail="the connection was closed without an answer")
    found = _STATUS.fullmatch(line)
    if found is None:
        return Probed(ok=False, detail="the answer was not HTTP")
    status, word = int(found[1]), (found[2] or b"").decode("ascii", "replace").strip()
    shown = "".join(letter if letter.isprintable() else "?" for letter in word)
    return Probed(ok=200 <= status < 400, detail=f"status {status} {shown}".strip())
