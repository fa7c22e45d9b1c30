"""Program: opens many watch connections and counts changes.

The watches use raw streams, and changes are counted without parsing them.

    python -m remit.bench.load.watch_clients HOST PORT TOKEN PATH COUNT

Prints `ready` once all watches are answered, and the total number of changes for every line on its stdin.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

import uvloop

CHANGED: Final = b'{"type":"changed"'


class WatchConnection(asyncio.Protocol):
    """One watch. A marker that is split between two reads is counted when its rest arrives."""

    def __init__(self, request: bytes) -> None:
        self._request, self._rest = request, b""
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.changes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if not self.answered.done():
            self.answered.set_result(None)
        self.changes += (self._rest + data).count(CHANGED)
        self._rest = data[1 - len(CHANGED) :]


async def main(host: str, port: int, token: str, path: str, count: int) -> None:
    stdin = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    request = f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\nauthorization: Bearer {token}\r\n\r\n".encode()
    connections = [(await loop.create_connection(lambda: WatchConnection(request), host, port))[1] for _ in range(count)]
    for connection in connections:
        await connection.answered
    _print_line("ready")
    while await stdin.readline():
        _print_line(str(sum(connection.changes for connection in connections)))


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    host, port, token, path, count = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(host, int(port), token, path, int(count)))
