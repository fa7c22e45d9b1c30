"""Client side of an exec session.

Input frames are sent while output frames are received. The caller decides what to do with the output.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Final

import msgspec

from remit.client.api_caller import ApiCaller, ServerBusy, Unanswered
from remit.client.http_transport import StreamedResponse
from remit.model.wire.exec_frames import (
    INPUT_BYTES_MAX,
    MEDIA_TYPE,
    ExecExit,
    ExecFrame,
    ExecFrameError,
    ExecFrameReader,
    ExecFrameType,
    ExecStart,
    ExecStarted,
    TerminalSize,
    encode_frame,
)
from remit.world.interfaces import LinkError

UNSENT_FRAMES_MAX: Final = 8
"""Maximum number of frames that wait to be sent; `feed` blocks when the queue is full."""

_SERVER_FRAMES: Final = frozenset({ExecFrameType.STARTED, ExecFrameType.STDOUT, ExecFrameType.STDERR, ExecFrameType.EXITED})


class ExecClientSession:
    """One command. Read `parts` once, to its end; `feed` may be called meanwhile. `over` is set when the output has ended."""

    def __init__(self, begin: ExecStart) -> None:
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue(UNSENT_FRAMES_MAX)
        self._outgoing.put_nowait(encode_frame(ExecFrameType.START, begin))
        self._ended = False
        self.reply: StreamedResponse | None = None
        self.begun: ExecStarted | None = None
        self.over: ExecExit | None = None

    async def feed(self, data: bytes) -> None:
        for first in range(0, len(data), INPUT_BYTES_MAX):
            await self._send(encode_frame(ExecFrameType.INPUT, data[first : first + INPUT_BYTES_MAX]))

    async def end_input(self) -> None:
        await self._send(encode_frame(ExecFrameType.INPUT_END))
        self._ended = True

    async def resize(self, window: TerminalSize) -> None:
        await self._send(encode_frame(ExecFrameType.TERMINAL_SIZE, window))

    async def parts(self) -> AsyncGenerator[ExecFrame, None]:
        """Yield output frames (STDOUT and STDERR). Raises `Unanswered` if the stream breaks off before the command's end is
        reported.
        """
        if self.reply is None:
            raise RuntimeError("this session is not open; open one with `Api.exec`")
        ear = ExecFrameReader()
        try:
            async with aclosing(self.reply.chunks()) as chunks:
                async for chunk in chunks:
                    for frame in ear.feed(chunk):
                        if self._is_output(frame):
                            yield frame
                        if self.over is not None:
                            return
        except LinkError as error:
            raise Unanswered(error.cause) from error
        except (ExecFrameError, msgspec.DecodeError) as error:
            raise Unanswered(
                f"the response cannot be decoded ({error}): check that client and server run the same version"
            ) from error
        raise Unanswered("the stream ended before the command did; its exit status is unknown")

    async def request_body(self) -> AsyncGenerator[bytes, None]:
        """Yield the request body until the session is closed."""
        while (chunk := await self._outgoing.get()) is not None:
            yield chunk

    def close(self) -> None:
        """Stop sending and drop frames that are still queued."""
        self._ended = True
        while self._outgoing.full():
            self._outgoing.get_nowait()
        self._outgoing.put_nowait(None)

    def _is_output(self, frame: ExecFrame) -> bool:
        """Record control frames; return whether the frame is output for the caller."""
        if frame.type not in _SERVER_FRAMES:
            raise ExecFrameError("the server sent an unexpected frame type")
        if frame.type == ExecFrameType.STARTED:
            self.begun = msgspec.json.decode(frame.body, type=ExecStarted)
        elif frame.type == ExecFrameType.EXITED:
            self.over = msgspec.json.decode(frame.body, type=ExecExit)
        return frame.type in (ExecFrameType.STDOUT, ExecFrameType.STDERR) and bool(frame.body)

    async def _send(self, chunk: bytes) -> None:
        if not self._ended:
            await self._outgoing.put(chunk)


@asynccontextmanager
async def open_exec_session(caller: ApiCaller, path: str, begin: ExecStart) -> AsyncGenerator[ExecClientSession, None]:
    session = ExecClientSession(begin)
    try:
        async with caller.open_duplex(path, session.request_body(), MEDIA_TYPE) as reply:
            session.reply = reply
            try:
                yield session
            finally:
                session.close()
    except LinkError as error:
        raise Unanswered(error.cause) from error
    except ServerBusy as busy:
        raise Unanswered(str(busy)) from busy
