"""What runs in the process that the demo kills? The real authority on a real SQLite store, behind a Unix socket.

    python -m remit.cli.demo_server DATA SOCKET

It says on stdout, in one JSON line, where it took over or why it could not. It ends when its stdin does, so it never outlives
whoever started it; being killed is the other way, and needs no cleaning up.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from remit.assembly import embedded
from remit.cli.demo_endpoint import AUTHORITY, Stamping, address_of
from remit.store.protocol import StoreError
from remit.world.production import production
from remit.world.promises import WorldError


class Ready(msgspec.Struct, omit_defaults=True):
    """The first line on stdout: where the chain stood at the takeover, or what `failed`."""

    pid: int
    epoch: int = 0
    sequence: int = 0
    revision: int = 0
    replicas: int = 0
    failed: str = ""


async def serve(data: Path, socket: Path) -> None:
    world = production(address_of(socket))
    try:
        async with embedded(data, world) as authority, asyncio.TaskGroup() as group:
            running = group.create_task(authority.run())
            async with world.link.serve(AUTHORITY, Stamping(authority)):
                head = authority.head
                revision, replicas = await authority.store.revision(), len(authority.books.replicas)
                say(Ready(os.getpid(), head.epoch, head.sequence, revision, replicas))
                await until_stdin_ends()
            running.cancel()
    finally:
        await world.offload.close()


async def until_stdin_ends() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


def say(ready: Ready) -> None:
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    sys.stdout.flush()


def main() -> int:
    data, socket = (Path(argument) for argument in sys.argv[1:3])
    try:
        asyncio.run(serve(data, socket))
    except (StoreError, WorldError) as error:
        say(Ready(os.getpid(), failed=str(error)))
        return 1
    except ExceptionGroup as group:
        found = group.subgroup((StoreError, WorldError))
        if found is None:
            raise
        say(Ready(os.getpid(), failed=str(found.exceptions[0])))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
