"""How do the demo's processes speak? One JSON object a line over a Unix socket; nothing is retried here: see client.py.

This is the demo's own wire, not the product's. What each failure means is kept exactly: no connection is `Turned` (nothing was
heard), a connection that breaks is `Silence` (it may have happened), and only a reply is an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec

from remit.client.endpoint import Overloaded, Silence, Status, Turned
from remit.model.claims import Actor, Operation, OperationID, Verdict
from remit.model.objects import dec_hook, enc_hook
from remit.world.promises import Clock

LINE_BYTES_MAX: Final = 16 << 20
CANNOT_MS_MAX: Final = 2_000
"""How long the authority may say that it cannot write, and why, before the demo ends with that reason."""


class DemoFailed(Exception):
    """Something that the demo shows did not hold, or could not be shown. The text says what to do next."""


class Call(msgspec.Struct, omit_defaults=True):
    """One line to the authority: `operations` to ask, an actor to `renew`, or neither for the status."""

    tag: int
    operations: tuple[Operation, ...] = ()
    renew: Actor | None = None


class Reply(msgspec.Struct, omit_defaults=True):
    """One line back. `epoch` is that of the authority which answered, so that one can tell the dead from the living."""

    tag: int
    epoch: int
    verdicts: tuple[Verdict, ...] = ()
    status: Status | None = None
    held: bool = False
    failed: Literal["", "silence", "turned", "overloaded"] = ""
    why: str = ""
    hint: str = ""
    retry_after_ms: int = 0


_encoder = msgspec.json.Encoder(enc_hook=enc_hook)
_calls: msgspec.json.Decoder[Call] = msgspec.json.Decoder(Call, dec_hook=dec_hook)
_replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply, dec_hook=dec_hook)


def to_line(thing: Call | Reply) -> bytes:
    return _encoder.encode(thing) + b"\n"


def call_in(line: bytes) -> Call:
    return _calls.decode(line)


class Listener(Protocol):
    """Who wants to know what went over a link, and when."""

    def sent(self, operations: Sequence[Operation]) -> None: ...

    def answered(self, ids: Sequence[OperationID], verdicts: Sequence[Verdict], epoch: int) -> None: ...


class SocketLink:
    """One asker's connection; made when first needed, and again after it broke. Satisfies `client.endpoint.Endpoint`."""

    def __init__(self, path: Path, listener: Listener, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._cannot_since_ms: int | None = None
        self._listener = listener
        self._turn = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._ids: dict[int, tuple[OperationID, ...]] = {}
        self._tag = 0

    async def ask(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        return (await self._call(Call(0, operations=tuple(operations)))).verdicts

    async def status(self) -> Status:
        status = (await self._call(Call(0))).status
        if status is None:
            raise Silence("an answer to something else")
        return status

    async def renew(self, actor: Actor, /) -> bool:
        return (await self._call(Call(0, renew=actor))).held

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            with suppress(asyncio.CancelledError):
                await self._reading
        self._break_off("the link was closed")

    async def _call(self, call: Call) -> Reply:
        self._tag = call.tag = self._tag + 1
        async with self._turn:
            writer = self._writer or await self._connect()
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call.tag] = answer
        self._ids[call.tag] = tuple(operation.id for operation in call.operations)
        try:
            self._listener.sent(call.operations)
            writer.write(to_line(call))
            reply = await answer
        finally:
            self._waiting.pop(call.tag, None)
            self._ids.pop(call.tag, None)
        self._end_if_it_cannot(reply)
        match reply.failed:
            case "silence":
                raise Silence(reply.why)
            case "turned":
                raise Turned(reply.hint, reply.why)
            case "overloaded":
                raise Overloaded(reply.retry_after_ms, reply.why)
            case _:
                return reply

    def _end_if_it_cannot(self, reply: Reply) -> None:
        """A client has good reason to wait a minute for a disk with room. Whoever watches the demo has none."""
        if reply.failed != "overloaded" or not reply.why:
            if reply.verdicts:
                self._cannot_since_ms = None
            return
        now_ms = self._clock.now_ms()
        if self._cannot_since_ms is None:
            self._cannot_since_ms = now_ms
        if now_ms - self._cannot_since_ms >= CANNOT_MS_MAX:
            raise DemoFailed(f"the authority cannot go on: {reply.why}; or name another directory with --data")

    async def _connect(self) -> asyncio.StreamWriter:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._path), limit=LINE_BYTES_MAX)
        except OSError:
            raise Turned from None  # no `why`: a process that is being restarted is part of the show
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader, writer), name="demo link")
        return writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the far side is gone. What it had written before is still read: those are answers."""
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                self._take(_replies.decode(line))
        except (OSError, ValueError) as error:
            self._break_off(str(error))
        else:
            self._break_off("the far side is gone")
        finally:
            writer.close()

    def _take(self, reply: Reply) -> None:
        answer = self._waiting.get(reply.tag)
        if answer is None or answer.done():
            return
        if reply.verdicts:
            # Here, and not where it is awaited: whoever counts must know of an answer as soon as it is there.
            self._listener.answered(self._ids[reply.tag], reply.verdicts, reply.epoch)
        answer.set_result(reply)

    def _break_off(self, why: str) -> None:
        self._writer = None
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(Silence(why))
