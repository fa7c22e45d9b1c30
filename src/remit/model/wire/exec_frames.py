"""Frames of an exec session stream.

    type (1 byte) | length of the body (4 bytes) | body

The client starts a command, sends input, and signals the end of input. The server returns the output of the command and, in
the last frame, how it ended. Encoding only; no I/O.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct as Layout
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta, Struct

MEDIA_TYPE: Final = "application/vnd.remit.session"
ARGUMENTS_MAX: Final = 4_096
ARGV_BYTES_MAX: Final = 128 << 10
FRAME_BYTES_MAX: Final = 256 << 10
"""Maximum length of a frame's body: a start frame with all its arguments."""
INPUT_BYTES_MAX: Final = 32 << 10
"""Maximum input of one frame. The client sends the next one after this one was accepted."""

_HEADER: Final = Layout(">BI")

TerminalDimension = Annotated[int, Meta(ge=1, le=10_000)]


class ExecFrameType(IntEnum):
    # sent by the client
    START = 1
    INPUT = 2
    INPUT_END = 3
    """End of input."""
    TERMINAL_SIZE = 4
    # sent by the server
    STARTED = 16
    STDOUT = 17
    STDERR = 18
    EXITED = 19
    """The last frame of every session that was started."""
    REFUSED = 20
    """Sent by an agent: nothing was started."""


class ExecFrame(NamedTuple):
    type: int
    body: bytes


class TerminalSize(Struct, frozen=True, forbid_unknown_fields=True):
    """Size of the client's terminal, in characters."""

    rows: TerminalDimension = 24
    columns: TerminalDimension = 80


class ExecStart(Struct, frozen=True, forbid_unknown_fields=True):
    """The command as an argument list; no shell interprets it. An `attempt` of 0 means the latest one. With `window` the
    command gets a terminal of that size.

    `terminal` is the terminal type, the value of TERM. Without `stdin` the command's input is empty.
    """

    argv: Annotated[tuple[str, ...], Meta(min_length=1, max_length=ARGUMENTS_MAX)]
    attempt: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    stdin: bool = False
    window: TerminalSize | None = None
    terminal: Annotated[str, Meta(pattern="^[A-Za-z0-9._+-]{0,64}$")] = ""


class ExecStarted(Struct, frozen=True):
    """The command runs, beside this attempt of the replica."""

    replica: str
    attempt: int
    node: str


class ExecExit(Struct, frozen=True, omit_defaults=True):
    """How the command ended: with an exit `code`, or by a `signal`. `why` is the cause if the command did not end by itself."""

    code: int | None = None
    signal: int | None = None
    why: str = ""


class ExecRejected(Struct, frozen=True):
    """Why an agent has not started the command."""

    code: str
    cause: str
    cure: str


class ExecFrameError(ValueError):
    """The bytes are not a valid frame."""


def encode_frame(type_: ExecFrameType, body: bytes | Struct = b"") -> bytes:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return _HEADER.pack(type_, len(data)) + data


class ExecFrameReader:
    """Incremental decoder: takes chunks of any size and returns complete frames. It buffers at most one incomplete frame.
    Raises `ExecFrameError`.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[ExecFrame]:
        self._buffer += chunk
        frames = []
        while len(self._buffer) >= _HEADER.size:
            type_, length = _HEADER.unpack_from(self._buffer)
            if length > FRAME_BYTES_MAX:
                raise ExecFrameError(f"frame of {length} bytes exceeds the limit of {FRAME_BYTES_MAX} bytes")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append(ExecFrame(type_, bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return frames


def decode_start(body: bytes) -> ExecStart:
    """Decodes the body of a start frame. Raises `ExecFrameError` with a message for people."""
    try:
        start = msgspec.json.decode(body, type=ExecStart)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ExecFrameError(str(error)) from None
    if not start.argv[0]:
        raise ExecFrameError("argv[0] is empty: name a program")
    if any("\0" in word for word in start.argv):
        raise ExecFrameError("argv contains a NUL character, which cannot be passed to a program")
    try:
        size = sum(len(word.encode()) for word in start.argv)
    except UnicodeEncodeError:
        raise ExecFrameError("argv contains an unpaired surrogate, which is not a character") from None
    if size > ARGV_BYTES_MAX:
        raise ExecFrameError(f"argv has {size} bytes; use at most {ARGV_BYTES_MAX}")
    return start


def decode_terminal_size(body: bytes) -> TerminalSize:
    try:
        return msgspec.json.decode(body, type=TerminalSize)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ExecFrameError(str(error)) from None
