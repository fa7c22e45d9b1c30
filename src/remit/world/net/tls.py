"""TLS contexts, peer identity, bounded TLS accept.

All contexts use TLS 1.2 or newer with forward secrecy and verify certificates, except `unchecked`, which is for reading
public data that the caller then compares with a known digest.

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
from remit.world.interfaces import NotServed, WorldError
from remit.world.net.connections import ConnectionLimiter

CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
HANDSHAKE_S_MAX: Final = 10.0
CLOSING_S_MAX: Final = 2.0
"""How long to wait for the peer's close notification."""
HTTP: Final = "http/1.1"


class Trust(NamedTuple):
    """Trusted authority and own certificate of a client; paths of PEM files. Empty `ca_file`: the system's authorities."""

    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""


class Secure(NamedTuple):
    """TLS settings of a link: which peers are admitted, and the client and server contexts, read anew for each connection.

    A context of None disables that direction.
    """

    admits: Callable[[CertificateIdentity], bool]
    calling: Callable[[], ssl.SSLContext] | None = None
    answering: Callable[[], ssl.SSLContext] | None = None

    def knows(self, transport: asyncio.BaseTransport) -> bool:
        """Return whether the peer's certificate identity is admitted."""
        return self.admits(bearer_at(transport))


class Unusable(WorldError):
    """A certificate or key file cannot be used."""


def answering(certificate: Path, key: Path, authority: bytes, *, required: bool = False, http: bool = False) -> ssl.SSLContext:
    """Return a server context. Clients may present a certificate of `authority`, or must if `required`; others are rejected."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _modern(context)
    context.num_tickets = 0  # no session resumption: each connection presents its current certificate
    context.options |= ssl.OP_NO_TICKET
    context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    if http:
        context.set_alpn_protocols([HTTP])
    try:
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(cadata=authority.decode("ascii"))
    except (OSError, ValueError) as error:
        raise NotServed(
            f"{certificate} and {key} cannot be used ({reason_of(error)})",
            "use a certificate and its matching key, both in PEM, the key without a password",
        ) from error
    return context


def calling(trust: Trust) -> ssl.SSLContext:
    """Return a client context that verifies the host name."""
    try:
        context = ssl.create_default_context(cafile=trust.ca_file or None)
    except (OSError, ValueError) as error:
        cure = "name the file with the certificate of the server's authority, such as tls/ca.pem in its data directory"
        raise Unusable(
            f"{trust.ca_file or 'the certificates of this system'} cannot be used ({reason_of(error)})", cure
        ) from error
    _modern(context)
    if trust.certificate_file:
        _show(context, trust)
    return context


def calling_agents(authority: bytes, trust: Trust) -> ssl.SSLContext:
    """Return a client context for agents, whose certificates name no host. The caller checks the names that they do contain."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _modern(context)
    context.check_hostname = False
    context.load_verify_locations(cadata=authority.decode("ascii"))
    _show(context, trust)
    return context


def unchecked() -> ssl.SSLContext:
    """Return a client context without verification, for public data that is compared with a known digest. Send no secrets over
    it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _modern(context)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def bearer_at(transport: asyncio.BaseTransport) -> CertificateIdentity:
    """Return the identity of the peer from its certificate, once the handshake is done."""
    found: Any = transport.get_extra_info("ssl_object")
    shown = None if found is None else found.getpeercert()
    if not shown:
        return NO_IDENTITY
    return identity_of(value for kind, value in shown.get("subjectAltName", ()) if kind == "URI")


def reason_of(error: Exception) -> str:
    """Return a short reason, without OpenSSL's prefixes."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


def _modern(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION


def _show(context: ssl.SSLContext, trust: Trust) -> None:
    try:
        context.load_cert_chain(trust.certificate_file, trust.key_file or None, password=_no_password)
    except (OSError, ValueError) as error:
        cause = f"{trust.certificate_file} cannot be used ({reason_of(error)})"
        raise Unusable(cause, "use a certificate and its matching key, both in PEM, the key without a password") from error


def _no_password() -> str:
    """Fail instead of letting OpenSSL prompt for a password on the terminal."""
    raise ValueError("the key is protected by a password")


# -- reasons of failed connections -------------------------------------------------------------------------------------------

_UNKNOWN: Final = frozenset({2, 18, 19, 20, 21})
"""OpenSSL's error numbers for a certificate of an unknown or untrusted issuer."""
_EXPIRED, _EARLY, _PURPOSE = 10, 9, 26
_HOST: Final = frozenset({62, 64})
CA_CURE: Final = (
    "name the server's certificate authority with --ca-file, REMIT_CA_FILE or the context's caFile: "
    "it is tls/ca.pem in the server's data directory"
)
_PLAIN: Final = ("wrong version number", "record layer failure", "http request", "unknown protocol")


def mistrust(error: ssl.SSLError, host: str) -> tuple[str, str] | None:
    """Return what was wrong with the peer and how to fix it, or None if the error is not recognised."""
    if isinstance(error, ssl.SSLCertVerificationError):
        code = error.verify_code
        if code in _UNKNOWN:
            return "its certificate was not signed by a trusted authority", CA_CURE
        if code == _EXPIRED:
            return "its certificate has expired", "restart the server, which renews it; or correct this machine's clock"
        if code == _EARLY:
            return "its certificate is not valid yet", "correct the clocks of both machines"
        if code in _HOST:
            cure = f"use a host name in its certificate, or start the server with --tls-name {host}"
            return f"its certificate is not for {host}", cure
        if code == _PURPOSE:
            return "its certificate is not for a server", "check which process listens there"
        return f"its certificate is not valid: {error.verify_message}", CA_CURE
    said = reason_of(error)
    if any(words in said for words in _PLAIN):
        return "it does not use TLS", "use http:// if it is on this machine, or start the server with --tls"
    if "alert" in said:
        return f"it rejected this client's certificate ({said})", "use the certificate that this server issued; or join again"
    return None


TLS_RECORD: Final = 0x16
"""First byte of a TLS handshake (since TLS 1.0)."""
READ_BYTES: Final = 64 << 10
REST_S: Final = 0.1
"""Pause after a failed accept, for example when the process is out of file descriptors."""


class Doorstep(NamedTuple):
    """Limits and callbacks of `tls_accept`. `context` is called per connection, so a renewed certificate is used at once.

    `known` returns the number of connections that are past their handshake.
    """

    context: Callable[[], ssl.SSLContext]
    known: Callable[[], int]
    connections_max: int
    plain: bytes = b""
    """Answer to a client that does not use TLS."""
    turned: Callable[[str, str], None] = lambda address, why: None
    """Called for each rejected connection with the client address and the reason."""
    crowd: ConnectionLimiter | None = None
    """Counts connections past their handshake by address; None means no limit per address."""


@asynccontextmanager
async def greeting(
    bound: socket.socket, factory: Callable[[], asyncio.BaseProtocol], doorstep: Doorstep
) -> AsyncGenerator[None, None]:
    """Accept TLS connections while the context is open; after its handshake each gets a protocol of `factory`.

    The socket stays open.
    """
    greeter = _Greeter(factory, doorstep)
    taking = asyncio.create_task(greeter.take(bound), name="greeting")
    try:
        yield
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await greeter.close()


class _Greeter:
    def __init__(self, factory: Callable[[], asyncio.BaseProtocol], doorstep: Doorstep) -> None:
        self._factory, self._doorstep = factory, doorstep
        self._greeted: set[asyncio.Task[None]] = set()
        self._coming = ConnectionLimiter(doorstep.connections_max)

    async def take(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(bound)
            except OSError:
                await asyncio.sleep(REST_S)
                continue
            why = self._why_not(_address(peer))
            if why:
                connection.close()  # sending a reason would cost the resources that are short
                self._doorstep.turned(_address(peer), why)
                continue
            task = asyncio.create_task(self._greet(connection, _address(peer)))
            self._greeted.add(task)
            task.add_done_callback(self._greeted.discard)

    def _why_not(self, address: str) -> str:
        """Return the reason to reject a connection; empty to accept it."""
        crowd = self._doorstep.crowd
        if len(self._greeted) + self._doorstep.known() >= self._doorstep.connections_max:
            return "too many connections"
        if crowd is not None and not crowd.admits(address, self._coming):
            return "too many connections from this address"
        return ""

    async def close(self) -> None:
        for task in self._greeted:
            task.cancel()
        await asyncio.gather(*self._greeted, return_exceptions=True)

    async def _greet(self, connection: socket.socket, address: str) -> None:
        """Handle a connection from its first byte to the end of the handshake; then it belongs to its protocol."""
        loop = asyncio.get_running_loop()
        handed = False
        self._coming.came(address)
        try:
            async with asyncio.timeout(HANDSHAKE_S_MAX):
                first = await _first_byte(connection)
                if first != TLS_RECORD:
                    await _told(connection, self._doorstep.plain if first is not None else b"")
                    if first is not None:  # else the client disconnected
                        self._doorstep.turned(address, "not a TLS handshake")
                    return
                handed = True  # from here on asyncio closes the socket, whatever happens
                await loop.connect_accepted_socket(
                    self._factory,
                    connection,
                    ssl=self._doorstep.context(),
                    ssl_handshake_timeout=HANDSHAKE_S_MAX,
                    ssl_shutdown_timeout=CLOSING_S_MAX,
                )
        except TimeoutError:
            self._doorstep.turned(address, "the TLS handshake timed out")
        except OSError as error:  # a failed handshake concerns the client only
            if isinstance(error, ssl.SSLError):
                self._doorstep.turned(address, f"the TLS handshake failed ({error.reason or 'connection closed'})")
        finally:
            self._coming.left(address)
            if not handed:
                connection.close()


def _address(peer: Any) -> str:
    return str(peer[0]) if isinstance(peer, tuple) else ""


async def _first_byte(connection: socket.socket) -> int | None:
    """Peek at the first byte, which stays in the socket buffer. Returns None if the client has closed the connection."""
    loop = asyncio.get_running_loop()
    came = loop.create_future()

    def arrived() -> None:
        if not came.done():
            came.set_result(None)

    loop.add_reader(connection, arrived)
    try:
        await came
    finally:
        loop.remove_reader(connection)
    found = connection.recv(1, socket.MSG_PEEK)
    return found[0] if found else None


async def _told(connection: socket.socket, words: bytes) -> None:
    if words:
        with suppress(BlockingIOError):
            connection.recv(READ_BYTES)  # closing with unread data would reset the connection and drop the answer
        await asyncio.get_running_loop().sock_sendall(connection, words)
        connection.shutdown(socket.SHUT_WR)
