"""A server's TLS directory: CA, server and client certificates, renewal.

    ca.pem      certificate of the authority, which clients need to verify this server
    ca.key      its key, which leaves this directory only in a backup
    server.pem  key and certificate that the server uses, unless it was given its own certificate
    caller.pem  client certificate for connections to agents

Only the owner can read the directory. The authority is valid for years. The other certificates are renewed when a third of
their lifetime is left, also while the server runs: new connections use the new certificate, and open ones continue.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Final, NamedTuple

from remit.law.certificate_identity import SERVER_IDENTITY
from remit.world.interfaces import Clock, Disk, DiskError, Missing, NotServed, Offload, WorldError
from remit.world.net.certificates import (
    CertificateAuthority,
    KeyPair,
    Lifespans,
    NoCertificate,
    due_s,
    hosts_of,
    issued_by,
    left_s,
)
from remit.world.net.tls import Trust, answering, calling_agents

LOOK_S_MAX: Final = 60.0
LOOK_S_MIN: Final = 0.5
FILE_BYTES_MAX: Final = 1 << 20
ADDRESSES_MAX: Final = 64
_LOCAL: Final = re.compile(r"\|-- (\S+)\n\s+/32 host LOCAL")


class OwnCertificate(NamedTuple):
    """A certificate issued elsewhere for this server. `ca`: what clients need to verify it; None if the systems trust it
    anyway.
    """

    certificate: Path
    key: Path
    ca: Path | None = None


class Secured(NamedTuple):
    """TLS options of a server. `names`: host names of this server besides those that it detects."""

    names: tuple[str, ...] = ()
    own: OwnCertificate | None = None
    lifespans: Lifespans = Lifespans()


class TlsKeys:
    """Keys and certificates of a server. The constructor and `renew` block: async code calls them through an `Offload`."""

    def __init__(self, directory: Path, disk: Disk, secured: Secured, listen_host: str) -> None:
        self._directory, self._disk, self._secured = directory, disk, secured
        disk.make_directory(directory)
        directory.chmod(0o700)
        self.authority = self._authority()
        self.ca = self.authority.pem
        self._wanted = hosts_here(listen_host, secured.names)
        self._shown = b""
        self._called = b""
        self.hosts: frozenset[str] = frozenset()
        """Host names under which clients may address this server."""
        self.context: ssl.SSLContext
        self.calling: ssl.SSLContext
        self.renew()

    @property
    def ca_file(self) -> Path | None:
        """The CA file that a client needs; None if the systems trust the certificate anyway."""
        return self._directory / "ca.pem" if self._secured.own is None else self._secured.own.ca

    def renew(self) -> bool:
        """Renew what is due, and load files changed by others. Returns whether anything changed. Raises `WorldError`."""
        changed = False
        if (shown := self._server()) != self._shown:
            self.context = answering(*self._answers_with(), self.ca, http=True)
            self.hosts = frozenset((*hosts_of(shown), *self._wanted))
            self._shown, changed = shown, True
        file = self._directory / "caller.pem"
        if (called := self._issued(file, lambda: self.authority.caller(SERVER_IDENTITY))) != self._called:
            self.calling = calling_agents(self.ca, Trust("", str(file), str(file)))
            self._called, changed = called, True
        return changed

    async def renewing(self, clock: Clock, offload: Offload, tell: Callable[[str], None]) -> None:
        """Renew certificates when they are due, until cancelled."""
        while True:
            look_s = min(LOOK_S_MAX, max(LOOK_S_MIN, min(due_s(self._shown), due_s(self._called))))
            await clock.sleep_ms(int(look_s * 1000))
            try:
                if await offload(self.renew):
                    tell("certificates renewed")
            except WorldError as error:
                tell(f"certificates not renewed: {error}")

    # ----------------------------------------------------------------------------------------------------------- files

    def _authority(self) -> CertificateAuthority:
        key, certificate = self._directory / "ca.key", self._directory / "ca.pem"
        try:
            pem = self._disk.read(certificate, bytes_max=FILE_BYTES_MAX)
        except Missing:
            made = CertificateAuthority.made(socket.gethostname(), self._secured.lifespans)
            self._disk.write_atomically(key, made.key)
            self._disk.write_atomically(certificate, made.certificate)
            return CertificateAuthority(made, self._secured.lifespans)
        if left_s(pem) <= 0:
            cause = f"the authority in {certificate} has expired, and so have all certificates that it signed"
            raise NotServed(cause, f"move {self._directory} away: a new one is created, and all agents must join again")
        try:
            return CertificateAuthority(KeyPair(pem, self._disk.read(key, bytes_max=FILE_BYTES_MAX)), self._secured.lifespans)
        except (DiskError, NoCertificate) as error:
            cure = f"restore {key} from a backup; or move {self._directory} away, and let all agents join again"
            raise NotServed(f"the authority's key cannot be used ({error.cause})", cure) from error

    def _answers_with(self) -> tuple[Path, Path]:
        own = self._secured.own
        file = self._directory / "server.pem"
        return (file, file) if own is None else (own.certificate, own.key)

    def _server(self) -> bytes:
        own = self._secured.own
        if own is None:
            return self._issued(self._directory / "server.pem", lambda: self.authority.server(self._wanted), self._wanted)
        found = self._disk.read(own.certificate, bytes_max=FILE_BYTES_MAX)
        if left_s(found) <= 0:
            raise NotServed(f"the certificate in {own.certificate} has expired", "renew it, and restart")
        return found

    def _issued(self, file: Path, issue: Callable[[], KeyPair], hosts: Iterable[str] = ()) -> bytes:
        """Return the certificate in the file if it is not due for renewal and covers `hosts`; otherwise issue and write a new
        one.
        """
        try:
            found = self._disk.read(file, bytes_max=FILE_BYTES_MAX)
            if due_s(found) > 0 and issued_by(found, self.ca) and set(hosts) <= set(hosts_of(found)):
                return found
        except (Missing, NoCertificate):
            pass
        made = issue()
        self._disk.write_atomically(file, made.key + made.certificate)
        return made.key + made.certificate


def hosts_here(listen: str, names: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names and addresses of this machine that its certificate should contain."""
    found = ["localhost", "127.0.0.1", "::1", *names]
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", machine := socket.gethostname()):
        found.append(machine.lower())
    with suppress(ValueError):  # an invalid address is reported when it is bound
        found += own_addresses() if ip_address(listen).is_unspecified else [str(ip_address(listen))]
    return tuple(dict.fromkeys(_written(name) for name in found))


def _written(name: str) -> str:
    """Normalise a host name or address."""
    try:
        return str(ip_address(name))
    except ValueError:
        return name.lower()


def own_addresses() -> list[str]:
    """Return the addresses of all interfaces from the kernel's tables, without link-local ones, which others cannot use."""
    found = _LOCAL.findall(_text("/proc/net/fib_trie"))
    for line in _text("/proc/net/if_inet6").splitlines():
        address = IPv6Address(bytes.fromhex(line.split()[0]))
        if not address.is_link_local:
            found.append(str(address))
    return sorted(set(found))[:ADDRESSES_MAX]


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
