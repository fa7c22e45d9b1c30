"""HTTP connection pool; tells "not sent" from "sent, no answer".

Nothing is tried twice here.

The two failures of a link hold here as well. `Unreached`: no connection was made, or the one at hand had been closed before
anything was written on it. `Unheard`: something was written, and no whole answer came. What an answer means is the caller's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from yarl import URL

from remit import __version__
from remit.model.wire.api_types import ProblemAnswer
from remit.world.interfaces import LinkError, Unheard, Unreached
from remit.world.net.frames import reason
from remit.world.net.tls import Trust, calling, mistrust

LINE_BYTES_MAX: Final = 64 << 20
"""The longest line of a stream; one that sends more is broken off."""

CONNECTIONS_MAX: Final = 1_000
CONNECT_S: Final = 5.0
KEEP_S: Final = 4.0
"""How long an idle connection is kept: shorter than servers do, so that it is we who close it, and nothing is sent into a
connection that is being closed."""

LOOK_S: Final = 0.05
"""After so long without a request, look first whether the far side has closed the connection meanwhile."""

_problems: msgspec.json.Decoder[ProblemAnswer] = msgspec.json.Decoder(ProblemAnswer)


class Untrusted(Unreached):
    """There is somebody, but nobody who could be believed. Nothing was sent; `cure` says what would help."""


class Answered(NamedTuple):
    """What came back, whole. `headers` by their names, however those are written."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def problem(self) -> ProblemAnswer:
        """What the server says is wrong. Also of an answer that was not made by Remit."""
        try:
            return _problems.decode(self.body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return ProblemAnswer(status=self.status, code="", detail=f"HTTP status {self.status} without a reason")

    def retry_after_ms(self) -> int:
        """How long the server wants to be left alone; 0 if it does not say. A date is nothing to go by."""
        text = self.headers.get("retry-after", "")
        return int(text) * 1000 if text.isascii() and text.isdigit() and len(text) < 7 else 0


class Wire:
    """One pool of connections, for every server; each is kept for a while after an answer. Made when first needed.

    `trust` is who is believed at the other end of `https://`, and as whom one calls there; certificates are always checked.
    Its files are read when this is made: raises `world.tls.Unusable`.
    """

    def __init__(self, token: str, trust: Trust = Trust()) -> None:
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError("a token is printable ASCII without spaces; give the one that `remit server` wrote")
        self._headers = {"Authorization": f"Bearer {token}", "User-Agent": f"remit/{__version__}"}
        self._secure: ssl.SSLContext | bool = calling(trust) if any(trust) else True
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._used_s = 0.0

    def unchecked(self, context: ssl.SSLContext) -> None:
        """Only for what is public, and compared afterwards with what is known: see `world.tls.unchecked`."""
        self._secure = context
        del self._headers["Authorization"]

    def show(self, trust: Trust) -> None:
        """From now on call with this certificate; connections that are there go on with the one before."""
        if isinstance(self._secure, ssl.SSLContext):
            self._secure.load_cert_chain(trust.certificate_file, trust.key_file or None)

    async def close(self) -> None:
        """End every connection. Whoever still waits for an answer gets `Unheard`."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(
        self, method: str, url: str, body: bytes | None = None, *, headers: Mapping[str, str] | None = None, kind: str = ""
    ) -> Answered:
        """One request and its whole answer, whatever its status; `kind` is the body's media type."""
        async with self.opened(method, url, body, headers=headers, kind=kind) as reply:
            return await reply.whole()

    @asynccontextmanager
    async def opened(
        self, method: str, url: str, body: bytes | None = None, *, headers: Mapping[str, str] | None = None, kind: str = ""
    ) -> AsyncGenerator[Reply, None]:
        """One request, and its answer as it comes. Leaving before the end of it closes the connection."""
        session = self._opened()
        loop = asyncio.get_running_loop()
        if loop.time() - self._used_s > LOOK_S:
            # What the far side has done to idle connections is seen in the first turn, and heeded in the second.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        self._used_s = loop.time()
        carried = None if body is None else _Body(body, kind)
        try:
            response = await session.request(
                method, URL(url, encoded=True), data=carried, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if (untrusted := _untrusted(url, error)) is not None:
                raise untrusted from error
            raise Unreached(f"nobody answers at {_place(url)} ({_said(error)})", "start it, or name another server") from error
        except aiohttp.InvalidURL as error:
            raise Unreached(f"{url} is no address", "write http://HOST:PORT") from error
        except (aiohttp.ClientError, OSError) as error:
            if (untrusted := _untrusted(url, error)) is not None:
                raise untrusted from error
            if carried is not None and not carried.sent:
                raise Unreached(f"{_place(url)} had closed the connection", "ask again") from error
            raise Unheard(f"{_place(url)} did not answer: {_said(error)}", "ask again under the same id") from error
        try:
            yield Reply(response, _place(url))
        finally:
            response.close() if not response.content.at_eof() else response.release()

    @asynccontextmanager
    async def conversing(self, url: str, pieces: AsyncIterable[bytes], kind: str) -> AsyncGenerator[Reply, None]:
        """A POST whose body goes on while it is answered. Leaving closes the connection."""
        try:
            response = await self._opened().post(
                URL(url, encoded=True), data=pieces, headers={"Content-Type": kind}, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreached(f"nobody answers at {_place(url)} ({_said(error)})", "start it, or name another server") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unheard(f"{_place(url)} did not answer: {_said(error)}", "look what came of it") from error
        try:
            yield Reply(response, _place(url))
        finally:
            response.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:
            raise Unreached("this link was closed", "make a new one")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX, keepalive_timeout=KEEP_S, ssl=self._secure),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                skip_auto_headers=("Accept-Encoding",),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        return self._session


class Reply:
    """An answer whose head has come."""

    __slots__ = ("_place", "_response", "status")

    def __init__(self, response: aiohttp.ClientResponse, place: str) -> None:
        self._response, self._place = response, place
        self.status = response.status

    async def whole(self) -> Answered:
        try:
            body = await self._response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(error) from error
        return Answered(self.status, self._response.headers, body)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes, in pieces of any size. Raises `Unheard` if it breaks off before its end."""
        try:
            async for piece in self._response.content.iter_any():
                yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(error) from error

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """The body line by line, without their ends. Empty ones are passed over."""
        begun: list[bytes] = []
        held = 0
        async for piece in self.pieces():
            first, *rest = piece.split(b"\n")
            if rest:
                begun.append(first)
                rest.insert(0, b"".join(begun))
                first = rest.pop()
                begun.clear()
                held = 0
                for line in rest:
                    if line:
                        yield line
            begun.append(first)
            held += len(first)
            if held > LINE_BYTES_MAX:
                raise Unheard(f"{self._place} sent a line of more than {LINE_BYTES_MAX} bytes", "do both run the same version?")
        if held:
            raise Unheard(f"{self._place} broke off in the middle of a line", "ask again")

    def _broken(self, error: Exception) -> LinkError:
        return Unheard(f"{self._place} broke off its answer: {_said(error)}", "ask again under the same id")


class _Body(Payload):
    """The body of a request, which knows whether anything was written: the head goes out together with it."""

    def __init__(self, value: bytes, kind: str) -> None:
        super().__init__(value, content_type=kind or "application/json")
        self._size = len(value)
        self.sent = False

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return str(self._value, encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        transport: asyncio.Transport | None = getattr(writer, "transport", None)
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the connection was closed before anything was written")
        self.sent = True
        await writer.write(self._value)


def server_url(text: str) -> str:
    """The address of a server, without a slash at its end. Raises ValueError, with what to write instead."""
    try:
        url = URL(text)
        port = url.port
    except ValueError as error:
        raise ValueError(f"{text!r} is no address of a server ({error}); write http://HOST:PORT") from error
    if url.scheme not in ("http", "https") or not url.host or not port or url.query_string or url.fragment:
        raise ValueError(f"{text!r} is no address of a server; write http://HOST:PORT")
    return str(url).rstrip("/")


def _place(url: str) -> str:
    return "/".join(url.split("/", 3)[:3])


def _untrusted(url: str, error: BaseException) -> Untrusted | None:
    """If it is the other end's certificate, or this end's, that nothing came of it."""
    cause: BaseException | None = error
    while cause is not None and (isinstance(cause, aiohttp.ClientError) or not isinstance(cause, ssl.SSLError)):
        cause = cause.__cause__  # what aiohttp raises is an SSLError too, of a kind that does not say why
    found = None if cause is None else mistrust(cause, URL(url).host or "")
    return None if found is None else Untrusted(f"{_place(url)}: {found[0]}", found[1])


def _said(error: BaseException) -> str:
    """The system's own words for it, without those that aiohttp puts around them."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, TimeoutError):
        return "it took too long to connect"
    if isinstance(cause, aiohttp.ServerDisconnectedError):
        return "the connection was closed"
    if isinstance(cause, aiohttp.ClientPayloadError):
        return "it ended in the middle"
    return reason(cause) if isinstance(cause, OSError) else str(cause) or type(cause).__name__
