"""Who is at the other end of a connection, and can that be believed? TLS contexts, what a peer showed; nobody is let in here.

TLS 1.2 and newer, with keys that are forgotten after each connection. Nothing here turns the checking of a certificate off but
`unchecked`, which is for reading what is public and is then compared with what was known before.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from remit.law.bearers import NOBODY, Bearer, bearer_of
from remit.world.promises import NotServed, WorldError

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
