"""A link to one service in memory, which can fail or garble the reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from remit.world.interfaces import LinkError, Service


@dataclass
class Wire:
    """A link to one service. Fails with `failure` if set; `garbled` replaces the reply."""

    service: Service
    failure: LinkError | None = None
    garbled: bytes | None = None
    sent: list[tuple[str, bytes]] = field(default_factory=list)

    async def request(self, to: str, body: bytes, /) -> bytes:
        self.sent.append((to, body))
        if self.failure is not None:
            raise self.failure
        reply = await self.service.request(body)
        return reply if self.garbled is None else self.garbled

    async def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        async for item in self.service.stream(body):
            yield item

    def serve(self, at: str, service: Service, /) -> AbstractAsyncContextManager[object]:
        return nullcontext()
