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
from remit.cli.demo_link import LINE_BYTES_MAX, Call, Reply, call_in, to_line
from remit.client.endpoint import NoVerdict, Overloaded, Silence, Turned
from remit.commitment.authority import Authority
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


async def answer(authority: Authority, call: Call) -> Reply:
    epoch = authority.head.epoch
    try:
        if call.operations:
            return Reply(call.tag, epoch, verdicts=tuple(await authority.ask(call.operations)))
        if call.renew is not None:
            return Reply(call.tag, epoch, held=await authority.renew(call.renew))
        return Reply(call.tag, epoch, status=await authority.status())
    except Turned as error:
        return Reply(call.tag, epoch, failed="turned", why=error.why, hint=error.hint)
    except Overloaded as error:
        return Reply(call.tag, epoch, failed="overloaded", why=error.why, retry_after_ms=error.retry_after_ms)
    except (Silence, NoVerdict) as error:
        return Reply(call.tag, epoch, failed="silence", why=str(error))


async def converse(authority: Authority, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Each line is answered when it can be, whatever came before it: claims that arrive together are decided together."""

    async def one(line: bytes) -> None:
        reply = await answer(authority, call_in(line))
        if not writer.is_closing():
            writer.write(to_line(reply))

    try:
        async with asyncio.TaskGroup() as group:
            while (line := await reader.readline()).endswith(b"\n"):
                group.create_task(one(line))
    finally:
        writer.close()


async def serve(data: Path, socket: Path) -> None:
    world = production()
    try:
        async with embedded(data, world) as authority, asyncio.TaskGroup() as group:
            running = group.create_task(authority.run())
            conversations: set[asyncio.Task[None]] = set()

            async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                conversation = group.create_task(converse(authority, reader, writer))
                conversations.add(conversation)
                conversation.add_done_callback(conversations.discard)

            server = await asyncio.start_unix_server(begin, str(socket), limit=LINE_BYTES_MAX)
            head = authority.head
            revision, replicas = await authority.store.revision(), len(authority.books.replicas)
            say(Ready(os.getpid(), head.epoch, head.sequence, revision, replicas))
            await until_stdin_ends()
            server.close()
            running.cancel()
            for conversation in tuple(conversations):
                conversation.cancel()
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
    socket.unlink(missing_ok=True)  # the one before may have been killed, and left it behind
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
