"""TLS contexts, peer identity, bounded TLS accept.

All contexts use TLS 1.2 or newer with forward secrecy and verify certificates, except `unverified_context`, which is for
reading public data that the caller then compares with a known digest.

Accepting is bounded before a client is authenticated: the number of handshakes together with the open connections, and the
time a handshake may take. A client that does not use TLS gets a plain-text answer, if one is configured, and is
disconnected.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from remit.law.certificate_identity import NO_IDENTITY, CertificateIdentity, identity_of
from remit.world.interfaces import ListenFailed, WorldError
from remit.world.net.connections import ConnectionLimiter

CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
HANDSHAKE_S_MAX: Final = 10.0
CLOSE_S_MAX: Final = 2.0
"""How long to wait for the peer's close notification."""
HTTP: Final = "http/1.1"


class Trust(NamedTuple):
    """Trusted authority and own certificate of a client; paths of PEM files. Empty `ca_file`: the system's authorities."""

    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""


class LinkTls(NamedTuple):
    """TLS settings of a link: which peers are admitted, and the client and server contexts, read anew for each connection.

    A context of None disables that direction.
    """

    admits: Callable[[CertificateIdentity], bool]
    client_context: Callable[[], ssl.SSLContext] | None = None
    server_context: Callable[[], ssl.SSLContext] | None = None

    def admits_peer(self, transport: asyncio.BaseTransport) -> bool:
        """Return whether the peer's certificate identity is admitted."""
        return self.admits(peer_identity(transport))


class TlsFileError(WorldError):
    """A certificate or key file cannot be used."""


def server_context(
    certificate: Path, key: Path, authority: bytes, *, required: bool = False, http: bool = False
) -> ssl.SSLContext:
    """Return a server context. Clients may present a certificate of `authority`, or must if `required`; others are rejected."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _harden(context)
    context.num_tickets = 0  # no session resumption: each connection presents its current certificate
    context.options |= ssl.OP_NO_TICKET
    context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    if http:
        context.set_alpn_protocols([HTTP])
    try:
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(cadata=authority.decode("ascii"))
    except (OSError, ValueError) as error:
        raise ListenFailed(
            f"{certificate} and {key} cannot be used ({reason_of(error)})",
            "use a certificate and its matching key, both in PEM, the key without a password",
        ) from error
    return context


def client_context(trust: Trust) -> ssl.SSLContext:
    """Return a client context that verifies the host name."""
    try:
        context = ssl.create_default_context(cafile=trust.ca_file or None)
    except (OSError, ValueError) as error:
        cure = "name the file with the certificate of the server's authority, such as tls/ca.pem in its data directory"
        raise TlsFileError(
            f"{trust.ca_file or 'the certificates of this system'} cannot be used ({reason_of(error)})", cure
        ) from error
    _harden(context)
    if trust.certificate_file:
        _load_certificate(context, trust)
    return context


def agent_client_context(authority: bytes, trust: Trust) -> ssl.SSLContext:
    """Return a client context for agents, whose certificates name no host. The caller checks the names that they do contain."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _harden(context)
    context.check_hostname = False
    context.load_verify_locations(cadata=authority.decode("ascii"))
    _load_certificate(context, trust)
    return context


def unverified_context() -> ssl.SSLContext:
    """Return a client context without verification, for public data that is compared with a known digest. Send no secrets over
    it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _harden(context)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def peer_identity(transport: asyncio.BaseTransport) -> CertificateIdentity:
    """Return the identity of the peer from its certificate, once the handshake is done."""
    ssl_object: Any = transport.get_extra_info("ssl_object")
    certificate = None if ssl_object is None else ssl_object.getpeercert()
    if not certificate:
        return NO_IDENTITY
    return identity_of(value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI")


def reason_of(error: Exception) -> str:
    """Return a short reason, without OpenSSL's prefixes."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


def _harden(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION


def _load_certificate(context: ssl.SSLContext, trust: Trust) -> None:
    try:
        context.load_cert_chain(trust.certificate_file, trust.key_file or None, password=_no_password)
    except (OSError, ValueError) as error:
        cause = f"{trust.certificate_file} cannot be used ({reason_of(error)})"
        raise TlsFileError(cause, "use a certificate and its matching key, both in PEM, the key without a password") from error


def _no_password() -> str:
    """Fail instead of letting OpenSSL prompt for a password on the terminal."""
    raise ValueError("the key is protected by a password")


# -- reasons of failed connections ---------------------------------------------------------------------------------------------

_UNTRUSTED: Final = frozenset({2, 18, 19, 20, 21})
"""OpenSSL's error numbers for a certificate of an unknown or untrusted issuer."""
_EXPIRED, _EARLY, _PURPOSE = 10, 9, 26
_HOST: Final = frozenset({62, 64})
CA_FIX: Final = (
    "name the server's certificate authority with --ca-file, REMIT_CA_FILE or the context's caFile: "
    "it is tls/ca.pem in the server's data directory"
)
_PLAINTEXT_REASONS: Final = ("wrong version number", "record layer failure", "http request", "unknown protocol")


def explain_tls_error(error: ssl.SSLError, host: str) -> tuple[str, str] | None:
    """Return what was wrong with the peer and how to fix it, or None if the error is not recognised."""
    if isinstance(error, ssl.SSLCertVerificationError):
        code = error.verify_code
        if code in _UNTRUSTED:
            return "its certificate was not signed by a trusted authority", CA_FIX
        if code == _EXPIRED:
            return "its certificate has expired", "restart the server, which renews it; or correct this machine's clock"
        if code == _EARLY:
            return "its certificate is not valid yet", "correct the clocks of both machines"
        if code in _HOST:
            cure = f"use a host name in its certificate, or start the server with --tls-name {host}"
            return f"its certificate is not for {host}", cure
        if code == _PURPOSE:
            return "its certificate is not for a server", "check which process listens there"
        return f"its certificate is not valid: {error.verify_message}", CA_FIX
    reason = reason_of(error)
    if any(text in reason for text in _PLAINTEXT_REASONS):
        return "it does not use TLS", "use http:// if it is on this machine, or start the server with --tls"
    if "alert" in reason:
        return f"it rejected this client's certificate ({reason})", "use the certificate that this server issued; or join again"
    return None


TLS_RECORD: Final = 0x16
"""First byte of a TLS handshake (since TLS 1.0)."""
READ_BYTES: Final = 64 << 10
ACCEPT_RETRY_S: Final = 0.1
"""Pause after a failed accept, for example when the process is out of file descriptors."""


class TlsAcceptLimits(NamedTuple):
    """Limits and callbacks of `tls_accept`. `context` is called per connection, so a renewed certificate is used at once.

    `open_connections` returns the number of connections that are past their handshake.
    """

    context: Callable[[], ssl.SSLContext]
    open_connections: Callable[[], int]
    connections_max: int
    plaintext_reply: bytes = b""
    """Answer to a client that does not use TLS."""
    on_rejected: Callable[[str, str], None] = lambda address, reason: None
    """Called for each rejected connection with the client address and the reason."""
    limiter: ConnectionLimiter | None = None
    """Counts connections past their handshake by address; None means no limit per address."""


@asynccontextmanager
async def tls_accept(
    bound: socket.socket, factory: Callable[[], asyncio.BaseProtocol], limits: TlsAcceptLimits
) -> AsyncGenerator[None, None]:
    """Accept TLS connections while the context is open; after its handshake each gets a protocol of `factory`.

    The socket stays open.
    """
    acceptor = _TlsAcceptor(factory, limits)
    accepting = asyncio.create_task(acceptor.accept(bound), name="tls accept")
    try:
        yield
    finally:
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        await acceptor.close()


class _TlsAcceptor:
    def __init__(self, factory: Callable[[], asyncio.BaseProtocol], limits: TlsAcceptLimits) -> None:
        self._factory, self._limits = factory, limits
        self._handshakes: set[asyncio.Task[None]] = set()
        self._handshake_limiter = ConnectionLimiter(limits.connections_max)

    async def accept(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(bound)
            except OSError:
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            reason = self._rejection_reason(_address(peer))
            if reason:
                connection.close()  # sending a reason would cost the resources that are short
                self._limits.on_rejected(_address(peer), reason)
                continue
            task = asyncio.create_task(self._handshake(connection, _address(peer)))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    def _rejection_reason(self, address: str) -> str:
        """Return the reason to reject a connection; empty to accept it."""
        limiter = self._limits.limiter
        if len(self._handshakes) + self._limits.open_connections() >= self._limits.connections_max:
            return "too many connections"
        if limiter is not None and not limiter.admits(address, self._handshake_limiter):
            return "too many connections from this address"
        return ""

    async def close(self) -> None:
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    async def _handshake(self, connection: socket.socket, address: str) -> None:
        """Handle a connection from its first byte to the end of the handshake; then it belongs to its protocol."""
        loop = asyncio.get_running_loop()
        handed_over = False
        self._handshake_limiter.opened(address)
        try:
            async with asyncio.timeout(HANDSHAKE_S_MAX):
                first = await _first_byte(connection)
                if first != TLS_RECORD:
                    await _reply_plaintext(connection, self._limits.plaintext_reply if first is not None else b"")
                    if first is not None:  # else the client disconnected
                        self._limits.on_rejected(address, "not a TLS handshake")
                    return
                handed_over = True  # from here on asyncio closes the socket, also after a failure
                await loop.connect_accepted_socket(
                    self._factory,
                    connection,
                    ssl=self._limits.context(),
                    ssl_handshake_timeout=HANDSHAKE_S_MAX,
                    ssl_shutdown_timeout=CLOSE_S_MAX,
                )
        except TimeoutError:
            self._limits.on_rejected(address, "the TLS handshake timed out")
        except OSError as error:  # a failed handshake concerns the client only
            if isinstance(error, ssl.SSLError):
                self._limits.on_rejected(address, f"the TLS handshake failed ({error.reason or 'connection closed'})")
        finally:
            self._handshake_limiter.closed(address)
            if not handed_over:
                connection.close()


def _address(peer: Any) -> str:
    return str(peer[0]) if isinstance(peer, tuple) else ""


async def _first_byte(connection: socket.socket) -> int | None:
    """Peek at the first byte, which stays in the socket buffer. Returns None if the client has closed the connection."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def arrived() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(connection, arrived)
    try:
        await readable
    finally:
        loop.remove_reader(connection)
    data = connection.recv(1, socket.MSG_PEEK)
    return data[0] if data else None


async def _reply_plaintext(connection: socket.socket, reply: bytes) -> None:
    if reply:
        with suppress(BlockingIOError):
            connection.recv(READ_BYTES)  # closing with unread data would reset the connection and drop the answer
        await asyncio.get_running_loop().sock_sendall(connection, reply)
        connection.shutdown(socket.SHUT_WR)
