"""Program: plain ASGI echo server, the baseline of API benchmarks.

The smallest ASGI application on the same socket and HTTP parser as the API server.

    python -m remit.bench.load.echo_server

Prints its port, and exits when its stdin ends.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing
from typing import Any

import uvloop

from remit.world.net.connections import BoundSocket, ListenAddress
from remit.world.net.http_server import serve_http


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def main() -> None:
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    with closing(BoundSocket(ListenAddress(port=0))) as bound:
        async with serve_http(echo, bound, on_closing=lambda: None):
            sys.stdout.write(f"{bound.port}\n")
            sys.stdout.flush()
            await stdin.read()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
