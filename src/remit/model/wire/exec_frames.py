"""Frames of an exec session stream.

Parts, and how they lie in a stream of bytes; nothing runs here.

    what it is (1 byte) | length of the body (4) | body

The asker begins, feeds, and says when there is no more; what the command writes comes back, and last how it ended.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct as Layout
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta, Struct

MEDIA: Final = "application/vnd.remit.session"
ARGUMENTS_MAX: Final = 4_096
ARGV_BYTES_MAX: Final = 128 << 10
PART_BYTES_MAX: Final = 256 << 10
"""The longest body of a part: a beginning with all its arguments."""
INPUT_BYTES: Final = 32 << 10
"""So much is fed at once; the next when that was taken."""

_HEADER: Final = Layout(">BI")

Side = Annotated[int, Meta(ge=1, le=10_000)]


class Part(IntEnum):
    # from the asker
    BEGIN = 1
    INPUT = 2
    END = 3
    """There is no more input."""
    WINDOW = 4
    # from the command's side
    BEGUN = 16
    STDOUT = 17
    STDERR = 18
    OVER = 19
    """The last of every session that was begun."""
    REFUSED = 20
    """From an agent: nothing was begun."""


class Spoken(NamedTuple):
    part: int
    body: bytes


class Window(Struct, frozen=True, forbid_unknown_fields=True):
    """How large the asker's terminal is, in letters."""

    rows: Side = 24
    columns: Side = 80


class Begin(Struct, frozen=True, forbid_unknown_fields=True):
    """The command, word by word: no shell reads it. `attempt` 0: the latest. `window`: it gets a terminal of that size.

    `terminal`: what kind it is, as TERM says. `stdin` false: its input is at its end from the beginning.
    """

    argv: Annotated[tuple[str, ...], Meta(min_length=1, max_length=ARGUMENTS_MAX)]
    attempt: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    stdin: bool = False
    window: Window | None = None
    terminal: Annotated[str, Meta(pattern="^[A-Za-z0-9._+-]{0,64}$")] = ""


class Begun(Struct, frozen=True):
    """It runs, beside this attempt."""

    replica: str
    attempt: int
    node: str


class Over(Struct, frozen=True, omit_defaults=True):
    """How it ended: with its exit `code`, or by a `signal`. `why`: what ended it, if it did not end by itself."""

    code: int | None = None
    signal: int | None = None
    why: str = ""


class Unbegun(Struct, frozen=True):
    """Why an agent has begun nothing."""

    code: str
    cause: str
    cure: str


class Unspoken(ValueError):
    """These bytes are no part of a session."""


def spoken(part: Part, body: bytes | Struct = b"") -> bytes:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return _HEADER.pack(part, len(data)) + data


class Ear:
    """Pieces of any size in, whole parts out. Holds no more than one part that is not whole. Raises `Unspoken`."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def hear(self, piece: bytes) -> list[Spoken]:
        self._begun += piece
        found = []
        while len(self._begun) >= _HEADER.size:
            part, length = _HEADER.unpack_from(self._begun)
            if length > PART_BYTES_MAX:
                raise Unspoken(f"a part of {length} bytes; at most {PART_BYTES_MAX} are taken")
            end = _HEADER.size + length
            if len(self._begun) < end:
                break
            found.append(Spoken(part, bytes(self._begun[_HEADER.size : end])))
            del self._begun[:end]
        return found


def begin_of(body: bytes) -> Begin:
    """Raises `Unspoken`, in words for people."""
    try:
        found = msgspec.json.decode(body, type=Begin)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Unspoken(str(error)) from None
    if not found.argv[0]:
        raise Unspoken("argv[0] is empty: name a program")
    if any("\0" in word for word in found.argv):
        raise Unspoken("argv has a word with a NUL in it, which no program can be given")
    try:
        size = sum(len(word.encode()) for word in found.argv)
    except UnicodeEncodeError:
        raise Unspoken("argv has a letter that is none") from None
    if size > ARGV_BYTES_MAX:
        raise Unspoken(f"argv has {size} bytes; at most {ARGV_BYTES_MAX} are taken")
    return found


def window_of(body: bytes) -> Window:
    try:
        return msgspec.json.decode(body, type=Window)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Unspoken(str(error)) from None
