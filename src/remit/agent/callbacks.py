"""Requests from API servers to the agent: log streaming and exec sessions.

Told to whoever has the token: its last lines, all of it, or all that comes until it ends.

What is asked for by name never becomes a path as it stands: a uid is looked up, or must be spelt as uids are. Items of a stream
are the bytes themselves, whole lines as far as they are not too long. Of both streams the one is told, then the other: they are
two files, and nobody has written down which line came first; while it is followed they are told as they come.

Begun, fed, told and ended within bounds; no shell ever reads it.

It runs as the copy does: its user, environment, directory, limits and sandbox. It ends when the copy does, when the asker
leaves, when nothing was said for long, and after some hours; what it has left running ends with it. What is asked for by name
is looked up among what runs here, and never becomes a path.

That of logs, or of commands beside work: told apart by the first word only.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from remit.agent.attempts import Copy
from remit.model.wire.agent_messages import ExecOf, FeedOf, LogsOf
from remit.model.wire.exec_frames import Begun, Over, Part, Unbegun
from remit.model.wire.exec_frames import Window as Asked
from remit.world.interfaces import Ended, Missing, NotStarted, Order, Piece, Running, Spool, World
from remit.world.process.exec_session import Said, Session, Window

CHUNK_BYTES: Final = 64 << 10
TAIL_MAX: Final = 1_000_000
LOOK_MS: Final = 200
"""So often a followed file is looked at."""

_UID: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9.-]{0,99}")
_decode_logs_request: msgspec.json.Decoder[LogsOf] = msgspec.json.Decoder(LogsOf)

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
            asked = _decode_logs_request.decode(body)
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


WORD_BYTES_MAX: Final = 4 << 20


class _Word(Struct):
    type: str = ""


_decode_tag: msgspec.json.Decoder[_Word] = msgspec.json.Decoder(_Word)


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
        return _decode_tag.decode(body).type
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise NotAsked(f"that cannot be read ({error}); do both run the same version?") from error
