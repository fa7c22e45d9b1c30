"""What has a copy written? Told to whoever has the token: its last lines, all of it, or all that comes until it ends.

What is asked for by name never becomes a path as it stands: a uid is looked up, or must be spelt as uids are. Items of a stream
are the bytes themselves, whole lines as far as they are not too long. Of both streams the one is told, then the other: they are
two files, and nobody has written down which line came first; while it is followed they are told as they come.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from remit.agent.copies import Copy
from remit.model.orders import LogsOf
from remit.world.promises import Missing, Piece, Spool, World

CHUNK_BYTES: Final = 64 << 10
TAIL_MAX: Final = 1_000_000
LOOK_MS: Final = 200
"""So often a followed file is looked at."""

_UID: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9.-]{0,99}")
_words: msgspec.json.Decoder[LogsOf] = msgspec.json.Decoder(LogsOf)

Places = Callable[[Copy], tuple[Iterable[Path], bool]]
"""In which directories the files of a copy may be, and whether it goes on."""


class NotAsked(Exception):
    """Nothing is told: who asked has no right to, or asked for what is no copy."""


class Logs:
    """Satisfies `world.promises.Service`."""

    def __init__(self, world: World, spool: Spool, token: str, places: Places) -> None:
        self._world, self._spool, self._token, self._places = world, spool, token.encode(), places

    async def request(self, body: bytes, /) -> bytes:
        raise NotAsked("what work says is streamed; ask for a stream")

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        asked = self._asked(body)
        copy = Copy(asked.key, asked.uid, asked.attempt)
        names = [name for name, end in zip(copy.log_names, ("stdout", "stderr"), strict=True) if asked.stream in (end, "both")]
        directory = await self._find(copy, names, follow=asked.follow)
        yield b""  # whoever waits for an answer knows now that this one has begun
        if directory is None:
            yield f"-- nothing is kept of attempt {copy.attempt}: it has not begun, or is too old --\n".encode()
            return
        positions = {name: await self._first(directory, name, asked.tail) for name in names}
        while True:
            over = not asked.follow or not self._places(copy)[1]  # before the files are read: what comes later is not missed
            for name in names:
                async for data in self._new(directory, name, positions):
                    yield data
            if over:
                return
            await self._world.clock.sleep_ms(LOOK_MS)

    def _asked(self, body: bytes) -> LogsOf:
        try:
            asked = _words.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise NotAsked(f"that cannot be read ({error}); do both run the same version?") from error
        if not hmac.compare_digest(asked.token.encode(), self._token):
            raise NotAsked("the token is not the one that this agent knows")
        if not _UID.fullmatch(asked.uid) or asked.attempt < 0:
            raise NotAsked("that is no copy of a replica")
        return asked

    async def _find(self, copy: Copy, names: list[str], *, follow: bool) -> Path | None:
        """The directory that has any of these files. One that is still to come is waited for, if that is wanted."""
        while True:
            places, goes_on = self._places(copy)
            for directory in places:
                for name in names:
                    with suppress(Missing):
                        await self._world.offload(partial(self._spool.span, directory, name))
                        return directory
            if not goes_on or not follow:
                return None
            await self._world.clock.sleep_ms(LOOK_MS)

    async def _new(self, directory: Path, name: str, positions: dict[str, int]) -> AsyncGenerator[bytes, None]:
        """What was written since; `positions` says up to where it was told."""
        while True:
            piece = await self._read(directory, name, positions[name])
            if not piece.data:
                return
            if piece.start > positions[name]:
                yield f"-- {piece.start - positions[name]} bytes are not kept any more --\n".encode()
            # Up to the last whole line, so that lines of the two streams do not mix; the rest with what follows it.
            whole = piece.data.rfind(b"\n") + 1 if len(piece.data) == CHUNK_BYTES else len(piece.data)
            data = piece.data[: whole or len(piece.data)]
            positions[name] = piece.start + len(data)
            yield data

    async def _first(self, directory: Path, name: str, tail: int | None) -> int:
        """Where its last lines begin."""
        try:
            first, end = await self._world.offload(partial(self._spool.span, directory, name))
        except Missing:
            return 0
        if tail is None:
            return first
        left, at, last = min(max(tail, 0), TAIL_MAX), end, True
        while left and at > first:
            start = max(first, at - CHUNK_BYTES)
            data = await self._between(directory, name, start, at)
            cut = len(data) - 1 if last and data.endswith(b"\n") else len(data)  # the end of the last line begins none
            last = False
            while (cut := data.rfind(b"\n", 0, cut)) >= 0:
                left -= 1
                if not left:
                    return start + cut + 1
            at = start
        return first if left else end

    async def _between(self, directory: Path, name: str, start: int, end: int) -> bytes:
        """All of it, also where it is in several pieces; nothing of what is not kept any more."""
        data = b""
        while start + len(data) < end:
            piece = await self._read(directory, name, start + len(data))
            if not piece.data or piece.start != start + len(data):
                break
            data += piece.data
        return data[: end - start]

    async def _read(self, directory: Path, name: str, start: int) -> Piece:
        try:
            return await self._world.offload(partial(self._spool.read, directory, name, start, CHUNK_BYTES))
        except Missing:
            return Piece(start, b"")
