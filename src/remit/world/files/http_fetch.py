"""HTTP(S) and file fetch with address checks on every connection.

A host name is resolved once per connection, all of its addresses are checked, and the connection is made to one of exactly
these addresses. A name that resolves differently a moment later (DNS rebinding) has no effect. A redirect is checked like a
new source; redirects from the network to a file of the node and from https to http are refused. All calls block;
artifacts.py runs them in threads.
"""

from __future__ import annotations

import errno
import http.client
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urljoin

from remit.law.fetch_policy import address_denial_reason, host_denial_reason
from remit.model.artifacts import DEFAULT_PORTS, InvalidSource, SourceAddress, parse_source
from remit.world.concurrency import StopSignal, WorkStopped
from remit.world.files.artifacts import FetchLimits, FetchPermissions, NotFetched

READ_BYTES: Final = 256 << 10
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_TRANSIENT: Final = (408, 425, 429, 500, 502, 503, 504)
_ALLOW_FIX: Final = "allow it with `remit agent --artifact-allow` and in a policy's permit.artifactHosts, or use a public host"

Resolver = Callable[[str, int], Sequence[str]]
"""Resolves a host name to its current addresses. Raises OSError."""


def resolve_host(host: str, port: int) -> Sequence[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def system_tls_context() -> ssl.SSLContext:
    """Return a TLS context that trusts the certificate authorities of this machine."""
    return ssl.create_default_context()


class OpenSource(NamedTuple):
    """A source that is open for reading. `total` is the number of bytes to come, or 0 if unknown."""

    total: int
    chunks: Iterator[bytes]


class SourceFetch:
    """One fetch. `resolve` and `context` replace the machine's name resolution and trusted authorities in tests."""

    def __init__(
        self, reach: FetchPermissions, bounds: FetchLimits, stop: StopSignal, resolve: Resolver, context: ssl.SSLContext
    ) -> None:
        self._permissions, self._limits, self._stop = reach, bounds, stop
        self._resolve, self._context = resolve, context

    @contextmanager
    def open(self, source: str) -> Iterator[OpenSource]:
        """Open a source. Raises `NotFetched`, also while its pieces are read."""
        with ExitStack() as held:
            address = _parse(source)
            try:
                if address.scheme == "file":
                    yield self._open_file(address, held)
                else:
                    yield self._open_http(source, address, held)
            except ssl.SSLCertVerificationError as error:
                cure = "serve it with a certificate of an authority that the node trusts"
                raise NotFetched(
                    f"the certificate of {address.host} cannot be verified ({error.verify_message})", cure
                ) from error
            except (http.client.HTTPException, TimeoutError, ssl.SSLError, ConnectionError) as error:
                if self._stop.requested:
                    raise WorkStopped from error
                why = str(error) or type(error).__name__
                raise NotFetched(
                    f"the connection to {address.host} failed ({why})", "check the server", retryable=True
                ) from error

    # -- files of the node -----------------------------------------------------------------------------------------------------

    def _open_file(self, address: SourceAddress, held: ExitStack) -> OpenSource:
        path = Path(address.path)
        lent = next((one for one in self._permissions.directories if one in path.parents), None)
        if lent is None:
            raise NotFetched(
                f"{path} is in no directory that this node allows",
                "start its agent with --artifact-dir, or move the file to an allowed directory",
            )
        try:
            file = held.enter_context(os.fdopen(_open_below(lent, path.relative_to(lent)), "rb"))
            found = os.fstat(file.fileno())
        except OSError as error:
            raise NotFetched(
                f"{path} cannot be read ({_reason(error)})", "put a regular file there, without symbolic links on its path"
            ) from error
        if not stat.S_ISREG(found.st_mode):
            raise NotFetched(f"{path} is not a regular file", "name a file")
        return OpenSource(found.st_size, iter(lambda: file.read(READ_BYTES), b""))

    # -- http and https --------------------------------------------------------------------------------------------------------

    def _open_http(self, source: str, address: SourceAddress, held: ExitStack) -> OpenSource:
        for _ in range(self._limits.redirects_max + 1):
            answer = self._request(address, held)
            if answer.status not in _REDIRECTS:
                return self._open_body(address, answer)
            source = urljoin(source, answer.getheader("Location", ""))
            onward = _parse(source)
            if onward.scheme == "file" or (address.scheme, onward.scheme) == ("https", "http"):
                raise NotFetched(
                    f"{address.host} redirects from {address.scheme} to {onward.scheme}", "use the final URL as the source"
                )
            address = onward
        raise NotFetched(f"more than {self._limits.redirects_max} redirects", "use the final URL as the source")

    def _open_body(self, address: SourceAddress, answer: http.client.HTTPResponse) -> OpenSource:
        if answer.status != 200:
            again = answer.status in _TRANSIENT
            raise NotFetched(f"{address.host} answered with status {answer.status}", "check the URL", retryable=again)
        total = answer.length or 0
        if total > self._limits.bytes_max:
            raise too_large_error(self._limits)
        return OpenSource(total, self._read_chunks(answer))

    def _read_chunks(self, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        expected, come = answer.length, 0
        while piece := answer.read1(READ_BYTES):
            come += len(piece)
            yield piece
        if expected is not None and come < expected:
            raise http.client.IncompleteRead(b"", expected - come)

    def _request(self, address: SourceAddress, held: ExitStack) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(address.host, address.port)
        connection.sock = self._connect(address, held)
        shown = f"[{address.host}]" if ":" in address.host else address.host
        connection.putrequest("GET", address.path, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", shown if address.port == DEFAULT_PORTS[address.scheme] else f"{shown}:{address.port}")
        for name, value in (("User-Agent", "remit-agent"), ("Accept-Encoding", "identity"), ("Connection", "close")):
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        held.callback(answer.close)
        return answer

    def _connect(self, address: SourceAddress, held: ExitStack) -> socket.socket:
        to = self._allowed_addresses(address)
        last: OSError | None = None
        for one in to:
            self._stop.check()
            try:
                raw = socket.create_connection((one, address.port), timeout=self._limits.idle_ms / 1000)
            except OSError as error:
                last = error
                continue
            held.callback(raw.close)
            if address.scheme == "http":
                self._stop.watch(raw)
                return raw
            secured = self._context.wrap_socket(raw, server_hostname=address.host, do_handshake_on_connect=False)
            held.callback(secured.close)
            self._stop.watch(secured)
            secured.do_handshake()
            return secured
        why = "no address" if last is None else _reason(last)
        raise NotFetched(f"cannot connect to {address.host}:{address.port} ({why})", "check the server", retryable=True)

    def _allowed_addresses(self, address: SourceAddress) -> Sequence[str]:
        """Resolve the host and return its addresses. One forbidden address refuses the host: a mixed answer is an attack."""
        why = host_denial_reason(address.host, self._permissions.hosts)
        if why:
            raise NotFetched(f"fetching is not allowed: {why}", _ALLOW_FIX)
        try:
            found = self._resolve(address.host, address.port)
        except OSError as error:
            passing = getattr(error, "errno", 0) == socket.EAI_AGAIN
            cure = "correct the name, or check name resolution on the node"
            raise NotFetched(f"{address.host} cannot be resolved ({_reason(error)})", cure, retryable=passing) from error
        for one in found:
            why = address_denial_reason(ip_address(one.partition("%")[0]), address.host, self._permissions.hosts)
            if why:
                raise NotFetched(f"fetching from {address.host} is not allowed: {why}", _ALLOW_FIX)
        return found


def too_large_error(bounds: FetchLimits) -> NotFetched:
    return NotFetched(f"the artifact is larger than {bounds.bytes_max >> 20} MiB", "make it smaller, or split it")


def _parse(source: str) -> SourceAddress:
    try:
        return parse_source(source)
    except InvalidSource as error:
        raise NotFetched(f"the URL {error.cause}", error.cure) from error


def _open_below(lent: Path, below: Path) -> int:
    """Open a file below a directory without following symbolic links, so that whoever can write there cannot lead out of it."""
    with ExitStack() as held:
        at = os.open(lent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        held.callback(os.close, at)
        for part in below.parts[:-1]:
            at = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            held.callback(os.close, at)
        return os.open(below.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "its path contains a symbolic link"
    return (error.strerror or str(error) or type(error).__name__).lower()
