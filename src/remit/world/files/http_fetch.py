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
from remit.world.interfaces import FetchLimits, FetchPermissions, NotFetched

READ_BYTES: Final = 256 << 10
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_TRANSIENT: Final = (408, 425, 429, 500, 502, 503, 504)
_ALLOW_FIX: Final = "allow it with `remit agent --artifact-allow` and in a policy's permit.artifactHosts, or use a public host"

Resolver = Callable[[str, int], Sequence[str]]
"""Resolves a host name to its current addresses. Raises OSError."""


def resolve_host(host: str, port: int) -> Sequence[str]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


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
        self, permissions: FetchPermissions, limits: FetchLimits, stop: StopSignal, resolve: Resolver, context: ssl.SSLContext
    ) -> None:
        self._permissions, self._limits, self._stop = permissions, limits, stop
        self._resolve, self._context = resolve, context

    @contextmanager
    def open(self, source: str) -> Iterator[OpenSource]:
        """Open a source. Raises `NotFetched`, also while its pieces are read."""
        with ExitStack() as stack:
            address = _parse(source)
            try:
                if address.scheme == "file":
                    yield self._open_file(address, stack)
                else:
                    yield self._open_http(source, address, stack)
            except ssl.SSLCertVerificationError as error:
                cure = "serve it with a certificate of an authority that the node trusts"
                raise NotFetched(
                    f"the certificate of {address.host} cannot be verified ({error.verify_message})", cure
                ) from error
            except (http.client.HTTPException, TimeoutError, ssl.SSLError, ConnectionError) as error:
                if self._stop.requested:
                    raise WorkStopped from error
                reason = str(error) or type(error).__name__
                raise NotFetched(
                    f"the connection to {address.host} failed ({reason})", "check the server", retryable=True
                ) from error

    # -- files of the node -----------------------------------------------------------------------------------------------------

    def _open_file(self, address: SourceAddress, stack: ExitStack) -> OpenSource:
        path = Path(address.path)
        allowed = next((directory for directory in self._permissions.directories if directory in path.parents), None)
        if allowed is None:
            raise NotFetched(
                f"{path} is in no directory that this node allows",
                "start its agent with --artifact-dir, or move the file to an allowed directory",
            )
        try:
            file = stack.enter_context(os.fdopen(_open_below(allowed, path.relative_to(allowed)), "rb"))
            status = os.fstat(file.fileno())
        except OSError as error:
            raise NotFetched(
                f"{path} cannot be read ({_reason(error)})", "put a regular file there, without symbolic links on its path"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise NotFetched(f"{path} is not a regular file", "name a file")
        return OpenSource(status.st_size, iter(lambda: file.read(READ_BYTES), b""))

    # -- http and https --------------------------------------------------------------------------------------------------------

    def _open_http(self, source: str, address: SourceAddress, stack: ExitStack) -> OpenSource:
        for _ in range(self._limits.redirects_max + 1):
            response = self._request(address, stack)
            if response.status not in _REDIRECTS:
                return self._open_body(address, response)
            source = urljoin(source, response.getheader("Location", ""))
            target = _parse(source)
            if target.scheme == "file" or (address.scheme, target.scheme) == ("https", "http"):
                raise NotFetched(
                    f"{address.host} redirects from {address.scheme} to {target.scheme}", "use the final URL as the source"
                )
            address = target
        raise NotFetched(f"more than {self._limits.redirects_max} redirects", "use the final URL as the source")

    def _open_body(self, address: SourceAddress, response: http.client.HTTPResponse) -> OpenSource:
        if response.status != 200:
            again = response.status in _TRANSIENT
            raise NotFetched(f"{address.host} answered with status {response.status}", "check the URL", retryable=again)
        total = response.length or 0
        if total > self._limits.bytes_max:
            raise too_large_error(self._limits)
        return OpenSource(total, self._read_chunks(response))

    def _read_chunks(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        expected, received = response.length, 0
        while chunk := response.read1(READ_BYTES):
            received += len(chunk)
            yield chunk
        if expected is not None and received < expected:
            raise http.client.IncompleteRead(b"", expected - received)

    def _request(self, address: SourceAddress, stack: ExitStack) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(address.host, address.port)
        connection.sock = self._connect(address, stack)
        host = f"[{address.host}]" if ":" in address.host else address.host
        connection.putrequest("GET", address.path, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", host if address.port == DEFAULT_PORTS[address.scheme] else f"{host}:{address.port}")
        for name, value in (("User-Agent", "remit-agent"), ("Accept-Encoding", "identity"), ("Connection", "close")):
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        stack.callback(response.close)
        return response

    def _connect(self, address: SourceAddress, stack: ExitStack) -> socket.socket:
        addresses = self._allowed_addresses(address)
        last: OSError | None = None
        for ip in addresses:
            self._stop.check()
            try:
                raw = socket.create_connection((ip, address.port), timeout=self._limits.idle_ms / 1000)
            except OSError as error:
                last = error
                continue
            stack.callback(raw.close)
            if address.scheme == "http":
                self._stop.watch(raw)
                return raw
            secured = self._context.wrap_socket(raw, server_hostname=address.host, do_handshake_on_connect=False)
            stack.callback(secured.close)
            self._stop.watch(secured)
            secured.do_handshake()
            return secured
        reason = "no address" if last is None else _reason(last)
        raise NotFetched(f"cannot connect to {address.host}:{address.port} ({reason})", "check the server", retryable=True)

    def _allowed_addresses(self, address: SourceAddress) -> Sequence[str]:
        """Resolve the host and return its addresses. One forbidden address refuses the host: a mixed answer is an attack."""
        reason = host_denial_reason(address.host, self._permissions.hosts)
        if reason:
            raise NotFetched(f"fetching is not allowed: {reason}", _ALLOW_FIX)
        try:
            addresses = self._resolve(address.host, address.port)
        except OSError as error:
            transient = getattr(error, "errno", 0) == socket.EAI_AGAIN
            cure = "correct the name, or check name resolution on the node"
            raise NotFetched(f"{address.host} cannot be resolved ({_reason(error)})", cure, retryable=transient) from error
        for ip in addresses:
            reason = address_denial_reason(ip_address(ip.partition("%")[0]), address.host, self._permissions.hosts)
            if reason:
                raise NotFetched(f"fetching from {address.host} is not allowed: {reason}", _ALLOW_FIX)
        return addresses


def too_large_error(limits: FetchLimits) -> NotFetched:
    return NotFetched(f"the artifact has more than {limits.bytes_max >> 20} MiB", "make it smaller, or split it")


def _parse(source: str) -> SourceAddress:
    try:
        return parse_source(source)
    except InvalidSource as error:
        raise NotFetched(f"the URL {error.cause}", error.cure) from error


def _open_below(directory: Path, below: Path) -> int:
    """Open a file below a directory without following symbolic links, so that whoever can write there cannot lead out of it."""
    with ExitStack() as stack:
        at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, at)
        for part in below.parts[:-1]:
            at = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            stack.callback(os.close, at)
        return os.open(below.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "its path contains a symbolic link"
    return (error.strerror or str(error) or type(error).__name__).lower()
