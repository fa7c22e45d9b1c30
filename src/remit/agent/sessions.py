"""How is a command run beside a copy, for whoever may ask? Begun, fed, told and ended within bounds; no shell ever reads it.

It runs as the copy does: its user, environment, directory, limits and sandbox. It ends when the copy does, when the asker
leaves, when nothing was said for long, and after some hours; what it has left running ends with it. What is asked for by name
is looked up among what runs here, and never becomes a path.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec

from remit.agent.copies import Copy
from remit.agent.logs import NotAsked
from remit.model.orders import ExecOf, FeedOf
from remit.model.sessions import Begun, Over, Part, Unbegun
from remit.model.sessions import Window as Asked
from remit.world.promises import Ended, NotStarted, Order, Running, World
from remit.world.sessions import Said, Session, Window

SESSIONS_MAX: Final = 64
TENANT_SESSIONS_MAX: Final = 16
IDLE_MS_MAX: Final = 30 * 60_000
"""So long may pass without a word from either side."""
SESSION_MS_MAX: Final = 8 * 3_600_000
DRAIN_MS: Final = 5_000
"""So long what was written before the end is still read."""

GONE: Final = "gone"
FULL: Final = "overloaded"
NOT_STARTED: Final = "not_started"

_execs: msgspec.json.Decoder[ExecOf] = msgspec.json.Decoder(ExecOf)
_feeds: msgspec.json.Decoder[FeedOf] = msgspec.json.Decoder(FeedOf)
_encode = msgspec.json.Encoder().encode


class Beside(NamedTuple):
    """A copy that runs: on which node, as which process, and by which order."""

    node: str
    running: Running
    order: Order


Find = Callable[[Copy], Beside | None]
"""None: it does not run here. Raises `NotStarted` while that cannot be told."""


class _Talk:
    """One session. Until `session` is there it only holds its place."""

    def __init__(self, tenant: str, now_ms: int) -> None:
        self.tenant = tenant
        self.began_ms = self.spoke_ms = now_ms
        self.session: Session | None = None


class Sessions:
    """All that run here, for whoever has the token."""

    def __init__(self, world: World, token: str, find: Find) -> None:
        self._world, self._token, self._find = world, token.encode(), find
        self._talks: dict[str, _Talk] = {}

    def __len__(self) -> int:
        return len(self._talks)

    async def request(self, body: bytes, /) -> bytes:
        fed = self._read(_feeds, body)
        talk = self._talks.get(fed.session)
        if talk is None or talk.session is None:
            return b""  # it has ended meanwhile, as its stream says
        talk.spoke_ms = self._world.clock.now_ms()
        if fed.window is not None:
            talk.session.resize(_window(fed.window))
        await talk.session.feed(fed.data)
        if fed.over:
            talk.session.end_input()
        return b""

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        asked = self._read(_execs, body)
        if asked.session in self._talks:
            raise NotAsked("a session of that name is under way")
        copy = Copy(asked.key, asked.uid, asked.attempt)
        tenant = asked.key.split("/")[1] if asked.key.count("/") == 2 else ""
        if (full := self._full(tenant)) is not None:
            yield _said(Part.REFUSED, full)
            return
        talk = self._talks[asked.session] = _Talk(tenant, self._world.clock.now_ms())
        try:
            try:
                found = self._find(copy)
                if found is not None:
                    talk.session = await self._begin(found, asked)
            except NotStarted as error:
                yield _said(Part.REFUSED, Unbegun(NOT_STARTED, error.cause, error.cure))
                return
            if found is None or talk.session is None:
                cause = f"attempt {copy.attempt} does not run on this node"
                yield _said(Part.REFUSED, Unbegun(GONE, cause, "look where it is, and ask again"))
                return
            yield _said(Part.BEGUN, Begun(asked.key.rpartition("/")[2], copy.attempt, found.node))
            async for item in self._told(talk, talk.session, found.running):
                yield item
        finally:
            del self._talks[asked.session]
            if talk.session is not None:
                await talk.session.close()

    def _read(self, decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
        try:
            asked = decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise NotAsked(f"that cannot be read ({error}); do both run the same version?") from error
        if not hmac.compare_digest(asked.token.encode(), self._token):
            raise NotAsked("the token is not the one that this agent knows")
        return asked

    def _full(self, tenant: str) -> Unbegun | None:
        cure = "end one that is not needed, or ask again later"
        if len(self._talks) >= SESSIONS_MAX:
            return Unbegun(FULL, f"{len(self._talks)} sessions are under way on this node", cure)
        if sum(talk.tenant == tenant for talk in self._talks.values()) >= TENANT_SESSIONS_MAX:
            return Unbegun(FULL, f"{TENANT_SESSIONS_MAX} sessions of this tenant are under way on this node", cure)
        return None

    async def _begin(self, found: Beside, asked: ExecOf) -> Session:
        begin, env = asked.begin, dict(found.order.env)
        if begin.window is not None and begin.terminal:
            env["TERM"] = begin.terminal
        order = found.order._replace(argv=begin.argv, env=env, stdout=None, stderr=None)
        window = None if begin.window is None else _window(begin.window)
        session = await self._world.runner.enter(found.running, order, window=window)
        if not begin.stdin and window is None:
            session.end_input()
        return session

    async def _told(self, talk: _Talk, session: Session, beside: Running) -> AsyncGenerator[bytes, None]:
        """What it writes, until it has ended and all of that is told; then how it ended."""
        clock, why, ending_ms, silent = self._world.clock, "", 0, False
        reading: asyncio.Future[Said | None] = asyncio.ensure_future(session.read())
        waiting: asyncio.Future[Ended] = asyncio.ensure_future(session.wait())
        try:
            while not (silent and ending_ms):
                now_ms = clock.now_ms()
                if not ending_ms and (waiting.done() or now_ms >= _limit_ms(talk)):
                    why = "" if waiting.done() else _limit_words(talk, now_ms)
                    ending_ms = now_ms
                    await session.end()  # and what it has left running, which may hold its streams open
                until_ms = ending_ms + DRAIN_MS if ending_ms else _limit_ms(talk)
                await self._until(until_ms, [*([] if silent else [reading]), *([] if ending_ms else [waiting])])
                if not silent and reading.done():
                    said = reading.result()
                    if said is None:
                        silent = True  # it may run on without a voice
                        continue
                    talk.spoke_ms = clock.now_ms()
                    yield bytes((Part.STDERR if said.stream == "stderr" else Part.STDOUT,)) + said.data
                    reading = asyncio.ensure_future(session.read())
                elif ending_ms and clock.now_ms() >= until_ms:
                    break
            ended = await session.wait()
            if not why and ended.signal is not None and not self._world.runner.alive(beside):
                why = "its replica ended"
            yield _said(Part.OVER, Over(ended.code, ended.signal, why))
        finally:
            for task in (reading, waiting):
                task.cancel()
            await asyncio.wait((reading, waiting))

    async def _until(self, at_ms: int, tasks: list[asyncio.Future[Any]]) -> None:
        if not tasks:
            return
        with suppress(TimeoutError):
            async with self._world.clock.timeout_ms(max(1, at_ms - self._world.clock.now_ms())):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _limit_ms(talk: _Talk) -> int:
    return min(talk.spoke_ms + IDLE_MS_MAX, talk.began_ms + SESSION_MS_MAX)


def _limit_words(talk: _Talk, now_ms: int) -> str:
    if now_ms >= talk.began_ms + SESSION_MS_MAX:
        return f"a session lasts {SESSION_MS_MAX // 3_600_000} hours at most"
    return f"nothing was said for {IDLE_MS_MAX // 60_000} minutes"


def _said(part: Part, what: msgspec.Struct) -> bytes:
    return bytes((part,)) + _encode(what)


def _window(asked: Asked) -> Window:
    return Window(asked.rows, asked.columns)
