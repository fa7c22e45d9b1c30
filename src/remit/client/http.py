"""How do a scope's components speak to its servers over HTTP? A link: what is said is serve/door.py's, retrying is client.py's.

A request is one POST, a stream is one POST whose answer is lines. Nobody is served here: that is what serve/ is for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Final

from remit.client.remote import ToldToWait
from remit.client.wire import Answered, Wire, server_url
from remit.world.promises import Link, LinkError, NotServed, Service, Unheard, Unreached
from remit.world.tls import Trust

ASK: Final = "/v1/ask"
FOLLOW: Final = "/v1/follow"

NOT_BEGUN: Final = frozenset({301, 302, 303, 307, 308, 400, 401, 403, 404, 405, 406, 411, 413, 414, 415, 421, 429, 431, 503})
"""With these a server says that it has not begun."""

BEGUN: Final = frozenset({"timeout", "fault"})
"""Codes that say otherwise, whatever the status."""


class HttpLink:
    """A name in `urls` is reached by HTTP; any other `beside` this, by another link. Satisfies `world.promises.Link`."""

    def __init__(self, urls: Mapping[str, str], token: str, *, beside: Link | None = None, trust: Trust = Trust()) -> None:
        self._urls = {name: server_url(url) for name, url in urls.items()}
        self._wire = Wire(token, trust)
        self._beside = beside

    def show(self, trust: Trust) -> None:
        self._wire.show(trust)

    async def close(self) -> None:
        """End every connection; what `beside` holds is its own affair."""
        await self._wire.close()

    async def request(self, to: str, body: bytes, /) -> bytes:
        url = self._urls.get(to)
        if url is None:
            return await self._other(to).request(to, body)
        answer = await self._wire.call("POST", url + ASK, body)
        if answer.status != 200:
            raise _failure(to, answer)
        return answer.body

    async def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        url = self._urls.get(to)
        if url is None:
            async with aclosing(self._other(to).stream(to, body)) as items:
                async for item in items:
                    yield item
            return
        async with self._wire.opened("POST", url + FOLLOW, body) as reply:
            if reply.status != 200:
                raise _failure(to, await reply.whole())
            async with aclosing(reply.lines()) as lines:
                async for line in lines:
                    yield line

    def serve(self, at: str, service: Service, /) -> AbstractAsyncContextManager[object]:
        if self._beside is not None and at not in self._urls:
            return self._beside.serve(at, service)
        return _not_served(at)

    def _other(self, to: str) -> Link:
        if self._beside is None:
            raise Unreached(f"no address is known for {to}", "add it to the servers of this process")
        return self._beside


@asynccontextmanager
async def _not_served(at: str) -> AsyncGenerator[None, None]:
    raise NotServed(f"nothing is answered at {at} over a link that only asks", "serve it by `remit server`")
    yield  # type: ignore[unreachable]  # it makes this a context


def _failure(to: str, answer: Answered) -> LinkError:
    problem = answer.problem()
    said = f"{to} said {answer.status}: {problem.detail or problem.title or problem.code or 'no more'}"
    if answer.status not in NOT_BEGUN or problem.code in BEGUN:
        return Unheard(said, problem.cure or "see what it says of that, then ask again")
    cure = problem.cure or ("give the token that this server knows" if answer.status == 401 else "ask again later")
    if answer.status in (429, 503):
        return ToldToWait(said, cure, answer.retry_after_ms())
    return Unreached(said, cure)
