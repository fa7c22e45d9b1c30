"""Which part of an agent answers its server? That of logs, or of commands beside work: told apart by the first word only."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import msgspec
from msgspec import Struct

from remit.agent.logs import Logs, NotAsked
from remit.agent.sessions import Sessions

WORD_BYTES_MAX: Final = 4 << 20


class _Word(Struct):
    type: str = ""


_words: msgspec.json.Decoder[_Word] = msgspec.json.Decoder(_Word)


class Answering:
    """Satisfies `world.promises.Service`. Who may ask is looked at by each."""

    def __init__(self, logs: Logs, sessions: Sessions) -> None:
        self._logs, self._sessions = logs, sessions

    async def request(self, body: bytes, /) -> bytes:
        if _word(body) == "feed":
            return await self._sessions.request(body)
        return await self._logs.request(body)

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        answered = self._sessions.stream(body) if _word(body) == "exec" else self._logs.stream(body)
        async with aclosing(answered) as items:
            async for item in items:
                yield item


def _word(body: bytes) -> str:
    if len(body) > WORD_BYTES_MAX:
        raise NotAsked(f"{len(body)} bytes are more than anybody has to say here")
    try:
        return _words.decode(body).type
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise NotAsked(f"that cannot be read ({error}); do both run the same version?") from error
