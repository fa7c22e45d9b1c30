"""HTTP connection pool; tells "not sent" from "sent, no answer".

Nothing is retried here. Two failures are kept apart, because they decide whether a retry is safe. `NotSent`: no connection
was made, or the pooled one had been closed before anything was written to it. `ReplyLost`: something was written and no
complete response arrived. The caller interprets the response.
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
from remit.world.interfaces import LinkError, NotSent, ReplyLost
from remit.world.net.frames import os_error_text
from remit.world.net.tls import Trust, client_context, explain_tls_error

LINE_BYTES_MAX: Final = 64 << 20
"""Maximum length of a line of a stream; the stream is aborted if the server sends a longer one."""

CONNECTIONS_MAX: Final = 1_000
CONNECT_S: Final = 5.0
KEEPALIVE_S: Final = 4.0
"""How long an idle connection is kept. This is shorter than the keep-alive timeout of servers, so that the client closes first
and never writes to a connection that the server is closing.
"""

IDLE_CHECK_S: Final = 0.05
"""After this long without a request, check first whether the server has closed the pooled connections."""

_problem_decoder: msgspec.json.Decoder[ProblemAnswer] = msgspec.json.Decoder(ProblemAnswer)


class UntrustedCertificate(NotSent):
    """TLS verification failed, on either side. Nothing was sent; `cure` names what to change."""


class HttpResponse(NamedTuple):
    """A complete HTTP response. Header names are case-insensitive."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def problem(self) -> ProblemAnswer:
        """Decode the body as a problem document (RFC 9457). Responses that Remit did not produce yield a problem without a
        code.
        """
        try:
            return _problem_decoder.decode(self.body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return ProblemAnswer(status=self.status, code="", detail=f"HTTP status {self.status} without a reason")

    def retry_after_ms(self) -> int:
        """Return the Retry-After time; 0 if the server sent none. The date form of the header is ignored."""
        text = self.headers.get("retry-after", "")
        return int(text) * 1000 if text.isascii() and text.isdigit() and len(text) < 7 else 0


class HttpTransport:
    """One connection pool for all servers, opened on first use. A connection is kept for `KEEPALIVE_S` after a response.

    `trust` holds the CA to verify `https://` servers with and the client certificate to present; certificates are always
    verified. Its files are read in the constructor, which raises `world.net.tls.TlsFileError`.
    """

    def __init__(self, token: str, trust: Trust = Trust()) -> None:
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError("the token must be printable ASCII without spaces; use the one that `remit server` wrote")
        self._headers = {"Authorization": f"Bearer {token}", "User-Agent": f"remit/{__version__}"}
        self._tls: ssl.SSLContext | bool = client_context(trust) if any(trust) else True
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._last_used_s = 0.0

    def disable_verification(self, context: ssl.SSLContext) -> None:
        """Disable certificate verification and stop sending the token. Only for public data that is verified afterwards: see
        `world.net.tls.unverified_context`.
        """
        self._tls = context
        del self._headers["Authorization"]

    def use_certificate(self, trust: Trust) -> None:
        """Use this client certificate for new connections. Open connections keep the previous one."""
        if isinstance(self._tls, ssl.SSLContext):
            self._tls.load_cert_chain(trust.certificate_file, trust.key_file or None)

    async def close(self) -> None:
        """Close every connection. Requests in flight fail with `ReplyLost`."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        content_type: str = "",
    ) -> HttpResponse:
        """Send one request and read its complete response, with any status. `content_type` is the media type of the body."""
        async with self.open_stream(method, url, body, headers=headers, content_type=content_type) as reply:
            return await reply.read_all()

    @asynccontextmanager
    async def open_stream(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        content_type: str = "",
    ) -> AsyncGenerator[StreamedResponse, None]:
        """Send one request and yield the response as a stream. Leaving before its end closes the connection."""
        session = self._open_session()
        loop = asyncio.get_running_loop()
        if loop.time() - self._last_used_s > IDLE_CHECK_S:
            # The event loop needs one iteration to notice connections that the server closed and a second to run their
            # callbacks.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        self._last_used_s = loop.time()
        request_body = None if body is None else _RequestBody(body, content_type)
        try:
            response = await session.request(
                method, URL(url, encoded=True), data=request_body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if (untrusted := _certificate_error(url, error)) is not None:
                raise untrusted from error
            raise NotSent(
                f"no server answers at {_origin_of(url)} ({_error_text(error)})", "start it, or name another server"
            ) from error
        except aiohttp.InvalidURL as error:
            raise NotSent(f"{url} is not a valid address", "write http://HOST:PORT") from error
        except (aiohttp.ClientError, OSError) as error:
            if (untrusted := _certificate_error(url, error)) is not None:
                raise untrusted from error
            if request_body is not None and not request_body.sent:
                raise NotSent(f"{_origin_of(url)} had closed the connection", "retry") from error
            raise ReplyLost(
                f"{_origin_of(url)} did not answer: {_error_text(error)}", "retry with the same operation id"
            ) from error
        try:
            yield StreamedResponse(response, _origin_of(url))
        finally:
            response.close() if not response.content.at_eof() else response.release()

    @asynccontextmanager
    async def open_duplex(
        self, url: str, chunks: AsyncIterable[bytes], content_type: str
    ) -> AsyncGenerator[StreamedResponse, None]:
        """Send a POST whose body is still being sent while the response arrives. Leaving closes the connection."""
        try:
            response = await self._open_session().post(
                URL(url, encoded=True), data=chunks, headers={"Content-Type": content_type}, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotSent(
                f"no server answers at {_origin_of(url)} ({_error_text(error)})", "start it, or name another server"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ReplyLost(
                f"{_origin_of(url)} did not answer: {_error_text(error)}", "check whether the command ran"
            ) from error
        try:
            yield StreamedResponse(response, _origin_of(url))
        finally:
            response.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise NotSent("this client was closed", "create a new one")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX, keepalive_timeout=KEEPALIVE_S, ssl=self._tls),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                skip_auto_headers=("Accept-Encoding",),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        return self._session


class StreamedResponse:
    """A response whose headers have arrived and whose body is read as a stream."""

    __slots__ = ("_origin", "_response", "status")

    def __init__(self, response: aiohttp.ClientResponse, origin: str) -> None:
        self._response, self._origin = response, origin
        self.status = response.status

    async def read_all(self) -> HttpResponse:
        try:
            body = await self._response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._interrupted(error) from error
        return HttpResponse(self.status, self._response.headers, body)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body in chunks of any size. Raises `ReplyLost` if it breaks off before its end."""
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise self._interrupted(error) from error

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Yield the body line by line, without line ends. Empty lines are skipped."""
        partial: list[bytes] = []
        partial_bytes = 0
        async for chunk in self.chunks():
            first, *rest = chunk.split(b"\n")
            if rest:
                partial.append(first)
                rest.insert(0, b"".join(partial))
                first = rest.pop()
                partial.clear()
                partial_bytes = 0
                for line in rest:
                    if line:
                        yield line
            partial.append(first)
            partial_bytes += len(first)
            if partial_bytes > LINE_BYTES_MAX:
                raise ReplyLost(
                    f"{self._origin} sent a line of more than {LINE_BYTES_MAX} bytes",
                    "check that client and server run the same version",
                )
        if partial_bytes:
            raise ReplyLost(f"{self._origin} broke off in the middle of a line", "retry")

    def _interrupted(self, error: Exception) -> LinkError:
        return ReplyLost(f"{self._origin} broke off its answer: {_error_text(error)}", "retry with the same operation id")


class _RequestBody(Payload):
    """A request body that records whether anything was written. aiohttp writes the request headers together with the first body
    chunk.
    """

    def __init__(self, value: bytes, content_type: str) -> None:
        super().__init__(value, content_type=content_type or "application/json")
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
    """Return a server's address without a trailing slash. Raises ValueError with the expected form."""
    try:
        url = URL(text)
        port = url.port
    except ValueError as error:
        raise ValueError(f"{text!r} is not a server address ({error}); write http://HOST:PORT") from error
    if url.scheme not in ("http", "https") or not url.host or not port or url.query_string or url.fragment:
        raise ValueError(f"{text!r} is not a server address; write http://HOST:PORT")
    return str(url).rstrip("/")


def _origin_of(url: str) -> str:
    return "/".join(url.split("/", 3)[:3])


def _certificate_error(url: str, error: BaseException) -> UntrustedCertificate | None:
    """Return the certificate error behind a connection failure, of either side; None if it has another cause."""
    cause: BaseException | None = error
    while cause is not None and (isinstance(cause, aiohttp.ClientError) or not isinstance(cause, ssl.SSLError)):
        cause = cause.__cause__  # aiohttp's own error is an SSLError too, but of a class that does not carry the reason
    described = None if cause is None else explain_tls_error(cause, URL(url).host or "")
    return None if described is None else UntrustedCertificate(f"{_origin_of(url)}: {described[0]}", described[1])


def _error_text(error: BaseException) -> str:
    """Return the operating system's message, without the text that aiohttp puts around it."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, TimeoutError):
        return "connecting timed out"
    if isinstance(cause, aiohttp.ServerDisconnectedError):
        return "the connection was closed"
    if isinstance(cause, aiohttp.ClientPayloadError):
        return "the response ended early"
    return os_error_text(cause) if isinstance(cause, OSError) else str(cause) or type(cause).__name__
