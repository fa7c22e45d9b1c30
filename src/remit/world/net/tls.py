"""TLS contexts, peer identity, bounded TLS accept.

TLS contexts, what a peer showed; nobody is let in here.

TLS 1.2 and newer, with keys that are forgotten after each connection. Nothing here turns the checking of a certificate off but
`unchecked`, which is for reading what is public and is then compared with what was known before.

Taken, looked at and shaken hands with, in time; nothing is read from it.

All of that is bounded before anybody is known: how many at once, together with those that are known already, and for how long.
Whoever speaks something else than TLS is told so in plain words, if there are any, and is let go.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from remit.law.certificate_identity import NOBODY, Bearer, bearer_of
from remit.world.interfaces import NotServed, WorldError
from remit.world.net.connections import ConnectionLimiter

CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
HANDSHAKE_S_MAX: Final = 10.0
CLOSING_S_MAX: Final = 2.0
"""How long the other end may take to say that it, too, is closing."""
HTTP: Final = "http/1.1"


class Trust(NamedTuple):
    """Whom to believe, and as whom to call; paths of files in PEM. Without `ca_file`: those that the system believes."""

    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""


class Secure(NamedTuple):
    """How a link speaks TLS: to whom alone, and with which context, asked for when a connection begins. None: it does not."""

    admits: Callable[[Bearer], bool]
    calling: Callable[[], ssl.SSLContext] | None = None
    answering: Callable[[], ssl.SSLContext] | None = None

    def knows(self, transport: asyncio.BaseTransport) -> bool:
        """Is it one of those, at the other end?"""
        return self.admits(bearer_at(transport))


class Unusable(WorldError):
    """A file of certificates or keys cannot be used."""


def answering(certificate: Path, key: Path, authority: bytes, *, required: bool = False, http: bool = False) -> ssl.SSLContext:
    """To answer with. Whoever calls may show a certificate of `authority`, or must if it is `required`; another is refused."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _modern(context)
    context.num_tickets = 0  # nobody comes back on an old handshake: who comes back shows what is good now
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
            "give a certificate and its own key, both in PEM, the key without a password",
        ) from error
    return context


def calling(trust: Trust) -> ssl.SSLContext:
    """To call a host by its name."""
    try:
        context = ssl.create_default_context(cafile=trust.ca_file or None)
    except (OSError, ValueError) as error:
        cure = "name the file with the certificate of the server's authority, such as tls/ca.pem of its directory"
        raise Unusable(
            f"{trust.ca_file or 'the certificates of this system'} cannot be used ({reason_of(error)})", cure
        ) from error
    _modern(context)
    if trust.certificate_file:
        _show(context, trust)
    return context


def calling_agents(authority: bytes, trust: Trust) -> ssl.SSLContext:
    """To call one of our own, whose certificate names no host: whoever calls looks at what it does name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _modern(context)
    context.check_hostname = False
    context.load_verify_locations(cadata=authority.decode("ascii"))
    _show(context, trust)
    return context


def unchecked() -> ssl.SSLContext:
    """For what is public, and is compared afterwards with what is known already. Nothing secret may be sent over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _modern(context)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def bearer_at(transport: asyncio.BaseTransport) -> Bearer:
    """Who is at the other end of a connection whose handshake is done."""
    found: Any = transport.get_extra_info("ssl_object")
    shown = None if found is None else found.getpeercert()
    if not shown:
        return NOBODY
    return bearer_of(value for kind, value in shown.get("subjectAltName", ()) if kind == "URI")


def reason_of(error: Exception) -> str:
    """In few words, without those that OpenSSL puts around them."""
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
        raise Unusable(cause, "give a certificate and its own key, both in PEM, the key without a password") from error


def _no_password() -> str:
    """OpenSSL would ask for it on the terminal."""
    raise ValueError("the key is locked with a password")


# -- why a call was not made ---------------------------------------------------------------------------------------------------

_UNKNOWN: Final = frozenset({2, 18, 19, 20, 21})
"""OpenSSL's numbers: nobody who is believed here has signed it."""
_EXPIRED, _EARLY, _PURPOSE = 10, 9, 26
_HOST: Final = frozenset({62, 64})
CA_CURE: Final = (
    "name the server's own authority with --ca-file, REMIT_CA_FILE or the context's caFile: "
    "it is tls/ca.pem in the server's directory"
)
_PLAIN: Final = ("wrong version number", "record layer failure", "http request", "unknown protocol")


def mistrust(error: ssl.SSLError, host: str) -> tuple[str, str] | None:
    """What was wrong with the other end, and the cure; None if it is nothing that we know."""
    if isinstance(error, ssl.SSLCertVerificationError):
        code = error.verify_code
        if code in _UNKNOWN:
            return "its certificate was not signed by anybody that is believed here", CA_CURE
        if code == _EXPIRED:
            return "its certificate has run out", "start the server anew, which renews it; or set this machine's clock right"
        if code == _EARLY:
            return "its certificate is not good yet", "set the clocks of both machines right"
        if code in _HOST:
            cure = f"ask it by a name that it has, or start the server with --tls-name {host}"
            return f"its certificate is not for {host}", cure
        if code == _PURPOSE:
            return "its certificate is not a server's", "that is somebody else: see what listens there"
        return f"its certificate is not good: {error.verify_message}", CA_CURE
    said = reason_of(error)
    if any(words in said for words in _PLAIN):
        return "it does not speak TLS", "write http:// if it is on this machine, or start the server with --tls"
    if "alert" in said:
        return f"it refused this end's certificate ({said})", "use the certificate that this server gave; or join anew"
    return None


TLS_RECORD: Final = 0x16
"""What the first byte of a handshake is, since TLS 1.0."""
READ_BYTES: Final = 64 << 10
REST_S: Final = 0.1
"""After the system could not give a connection, for want of numbers for files, say."""


class Doorstep(NamedTuple):
    """`context` is asked anew for each: a certificate that was renewed is shown to the next. `known` counts those inside."""

    context: Callable[[], ssl.SSLContext]
    known: Callable[[], int]
    connections_max: int
    plain: bytes = b""
    """What whoever does not speak TLS is told."""
    turned: Callable[[str, str], None] = lambda address, why: None
    """Hears of whoever was not let in: from which address, and why."""
    crowd: ConnectionLimiter | None = None
    """Those inside, by their addresses; None: all who come are as good."""


@asynccontextmanager
async def greeting(
    bound: socket.socket, factory: Callable[[], asyncio.BaseProtocol], doorstep: Doorstep
) -> AsyncGenerator[None, None]:
    """For as long as this lasts, whoever comes has a protocol of the factory, once it is known. The socket stays open."""
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
                connection.close()  # to say why would cost what there is too little of
                self._doorstep.turned(_address(peer), why)
                continue
            task = asyncio.create_task(self._greet(connection, _address(peer)))
            self._greeted.add(task)
            task.add_done_callback(self._greeted.discard)

    def _why_not(self, address: str) -> str:
        """Empty: it is let in."""
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
        """From the first byte to the last of the handshake; then the connection is its protocol's."""
        loop = asyncio.get_running_loop()
        handed = False
        self._coming.came(address)
        try:
            async with asyncio.timeout(HANDSHAKE_S_MAX):
                first = await _first_byte(connection)
                if first != TLS_RECORD:
                    await _told(connection, self._doorstep.plain if first is not None else b"")
                    if first is not None:  # else it came and went
                        self._doorstep.turned(address, "this is no TLS")
                    return
                handed = True  # whatever happens, it is closed by whom it was given to
                await loop.connect_accepted_socket(
                    self._factory,
                    connection,
                    ssl=self._doorstep.context(),
                    ssl_handshake_timeout=HANDSHAKE_S_MAX,
                    ssl_shutdown_timeout=CLOSING_S_MAX,
                )
        except TimeoutError:
            self._doorstep.turned(address, "the handshake did not come to its end in time")
        except OSError as error:  # it was none of ours; nobody waits for an answer
            if isinstance(error, ssl.SSLError):
                self._doorstep.turned(address, f"the handshake failed ({error.reason or 'broken off'})")
        finally:
            self._coming.left(address)
            if not handed:
                connection.close()


def _address(peer: Any) -> str:
    return str(peer[0]) if isinstance(peer, tuple) else ""


async def _first_byte(connection: socket.socket) -> int | None:
    """It stays where it is: whoever reads the connection next has it too. None: there is none."""
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
            connection.recv(READ_BYTES)  # what is unread when it is closed would take the answer with it
        await asyncio.get_running_loop().sock_sendall(connection, words)
        connection.shutdown(socket.SHUT_WR)
