"""Client side of an exec session.

Parts go up while others come down; what they mean is the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Final

import msgspec

from remit.client.api_caller import Caller, Held, Unanswered
from remit.client.http_transport import Reply
from remit.model.wire.exec_frames import (
    INPUT_BYTES,
    MEDIA,
    Begin,
    Begun,
    Ear,
    Over,
    Part,
    Spoken,
    Unspoken,
    Window,
    spoken,
)
from remit.world.interfaces import LinkError

UNSENT_MAX: Final = 8
"""So many parts may wait to be sent: who feeds faster waits."""

_DOWN: Final = frozenset({Part.BEGUN, Part.STDOUT, Part.STDERR, Part.OVER})


class Session:
    """One command. `parts` is read once, to its end; meanwhile it may be fed. `over` is there after that."""

    def __init__(self, begin: Begin) -> None:
        self._up: asyncio.Queue[bytes | None] = asyncio.Queue(UNSENT_MAX)
        self._up.put_nowait(spoken(Part.BEGIN, begin))
        self._ended = False
        self.reply: Reply | None = None
        self.begun: Begun | None = None
        self.over: Over | None = None

    async def feed(self, data: bytes) -> None:
        for first in range(0, len(data), INPUT_BYTES):
            await self._send(spoken(Part.INPUT, data[first : first + INPUT_BYTES]))

    async def end_input(self) -> None:
        await self._send(spoken(Part.END))
        self._ended = True

    async def resize(self, window: Window) -> None:
        await self._send(spoken(Part.WINDOW, window))

    async def parts(self) -> AsyncGenerator[Spoken, None]:
        """What it writes: STDOUT and STDERR. Raises `Unanswered` if it breaks off before the end of the command is told."""
        if self.reply is None:
            raise RuntimeError("a session is made by `Api.exec`")
        ear = Ear()
        try:
            async with aclosing(self.reply.pieces()) as pieces:
                async for piece in pieces:
                    for part in ear.hear(piece):
                        if self._noted(part):
                            yield part
                        if self.over is not None:
                            return
        except LinkError as error:
            raise Unanswered(error.cause) from error
        except (Unspoken, msgspec.DecodeError) as error:
            raise Unanswered(f"an answer that cannot be read ({error}): do both run the same version?") from error
        raise Unanswered("it ended before the command did; what became of that is not known")

    async def sent(self) -> AsyncGenerator[bytes, None]:
        """The body of the request, for as long as it goes on."""
        while (piece := await self._up.get()) is not None:
            yield piece

    def hang_up(self) -> None:
        """Nothing more is sent, also not what still waits."""
        self._ended = True
        while self._up.full():
            self._up.get_nowait()
        self._up.put_nowait(None)

    def _noted(self, part: Spoken) -> bool:
        """Is it for the caller?"""
        if part.part not in _DOWN:
            raise Unspoken("that is no part of a session")
        if part.part == Part.BEGUN:
            self.begun = msgspec.json.decode(part.body, type=Begun)
        elif part.part == Part.OVER:
            self.over = msgspec.json.decode(part.body, type=Over)
        return part.part in (Part.STDOUT, Part.STDERR) and bool(part.body)

    async def _send(self, piece: bytes) -> None:
        if not self._ended:
            await self._up.put(piece)


@asynccontextmanager
async def conversed(caller: Caller, path: str, begin: Begin) -> AsyncGenerator[Session, None]:
    session = Session(begin)
    try:
        async with caller.conversing(path, session.sent(), MEDIA) as reply:
            session.reply = reply
            try:
                yield session
            finally:
                session.hang_up()
    except LinkError as error:
        raise Unanswered(error.cause) from error
    except Held as held:
        raise Unanswered(str(held)) from held
