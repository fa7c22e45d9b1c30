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
from remit.world.interfaces import Clock, Disk, DiskError, FileMissing, ListenFailed, Offload, WorldError
from remit.world.net.certificates import (
    CertificateAuthority,
    CertificateError,
    CertificateLifetimes,
    KeyPair,
    hosts_of,
    issued_by,
    remaining_s,
    renew_in_s,
)
from remit.world.net.tls import Trust, agent_client_context, server_context

CHECK_S_MAX: Final = 60.0
CHECK_S_MIN: Final = 0.5
FILE_BYTES_MAX: Final = 1 << 20
ADDRESSES_MAX: Final = 64
_LOCAL: Final = re.compile(r"\|-- (\S+)\n\s+/32 host LOCAL")


class ProvidedCertificate(NamedTuple):
    """A certificate issued elsewhere for this server. `ca`: what clients need to verify it; None if the systems trust it
    anyway.
    """

    certificate: Path
    key: Path
    ca: Path | None = None


class TlsOptions(NamedTuple):
    """TLS options of a server. `names`: host names of this server besides those that it detects."""

    names: tuple[str, ...] = ()
    provided: ProvidedCertificate | None = None
    lifetimes: CertificateLifetimes = CertificateLifetimes()


class TlsKeys:
    """Keys and certificates of a server. The constructor and `renew` block: async code calls them through an `Offload`."""

    def __init__(self, directory: Path, disk: Disk, options: TlsOptions, listen_host: str) -> None:
        self._directory, self._disk, self._options = directory, disk, options
        disk.make_directory(directory)
        directory.chmod(0o700)
        self.authority = self._load_authority()
        self.ca = self.authority.pem
        self._expected_hosts = local_hosts(listen_host, options.names)
        self._server_pem = b""
        self._client_pem = b""
        self.hosts: frozenset[str] = frozenset()
        """Host names under which clients may address this server."""
        self.server_context: ssl.SSLContext
        self.client_context: ssl.SSLContext
        self.renew()

    @property
    def ca_file(self) -> Path | None:
        """The CA file that a client needs; None if the systems trust the certificate anyway."""
        return self._directory / "ca.pem" if self._options.provided is None else self._options.provided.ca

    def renew(self) -> bool:
        """Renew what is due, and load files changed by others. Returns whether anything changed. Raises `WorldError`."""
        changed = False
        if (server_pem := self._server_certificate()) != self._server_pem:
            self.server_context = server_context(*self._server_files(), self.ca, http=True)
            self.hosts = frozenset((*hosts_of(server_pem), *self._expected_hosts))
            self._server_pem, changed = server_pem, True
        file = self._directory / "caller.pem"
        if (client_pem := self._load_or_issue(file, lambda: self.authority.issue_client(SERVER_IDENTITY))) != self._client_pem:
            self.client_context = agent_client_context(self.ca, Trust("", str(file), str(file)))
            self._client_pem, changed = client_pem, True
        return changed

    async def run_renewal(self, clock: Clock, offload: Offload, log: Callable[[str], None]) -> None:
        """Renew certificates when they are due, until cancelled."""
        while True:
            look_s = min(CHECK_S_MAX, max(CHECK_S_MIN, min(renew_in_s(self._server_pem), renew_in_s(self._client_pem))))
            await clock.sleep_ms(int(look_s * 1000))
            try:
                if await offload(self.renew):
                    log("certificates renewed")
            except WorldError as error:
                log(f"certificates not renewed: {error}")

    # -- files -----------------------------------------------------------------------------------------------------------------

    def _load_authority(self) -> CertificateAuthority:
        key, certificate = self._directory / "ca.key", self._directory / "ca.pem"
        try:
            pem = self._disk.read(certificate, bytes_max=FILE_BYTES_MAX)
        except FileMissing:
            created = CertificateAuthority.create(socket.gethostname(), self._options.lifetimes)
            self._disk.write_atomically(key, created.key)
            self._disk.write_atomically(certificate, created.certificate)
            return CertificateAuthority(created, self._options.lifetimes)
        if remaining_s(pem) <= 0:
            cause = f"the authority in {certificate} has expired, and so have all certificates that it signed"
            raise ListenFailed(cause, f"move {self._directory} away: a new one is created, and all agents must join again")
        try:
            return CertificateAuthority(KeyPair(pem, self._disk.read(key, bytes_max=FILE_BYTES_MAX)), self._options.lifetimes)
        except (DiskError, CertificateError) as error:
            cure = f"restore {key} from a backup; or move {self._directory} away, and let all agents join again"
            raise ListenFailed(f"the authority's key cannot be used ({error.cause})", cure) from error

    def _server_files(self) -> tuple[Path, Path]:
        provided = self._options.provided
        file = self._directory / "server.pem"
        return (file, file) if provided is None else (provided.certificate, provided.key)

    def _server_certificate(self) -> bytes:
        provided = self._options.provided
        if provided is None:
            return self._load_or_issue(
                self._directory / "server.pem", lambda: self.authority.issue_server(self._expected_hosts), self._expected_hosts
            )
        pem = self._disk.read(provided.certificate, bytes_max=FILE_BYTES_MAX)
        if remaining_s(pem) <= 0:
            raise ListenFailed(f"the certificate in {provided.certificate} has expired", "renew it, and restart")
        return pem

    def _load_or_issue(self, file: Path, issue: Callable[[], KeyPair], hosts: Iterable[str] = ()) -> bytes:
        """Return the certificate in the file if it is not due for renewal and covers `hosts`; otherwise issue and write a new
        one.
        """
        try:
            pem = self._disk.read(file, bytes_max=FILE_BYTES_MAX)
            if renew_in_s(pem) > 0 and issued_by(pem, self.ca) and set(hosts) <= set(hosts_of(pem)):
                return pem
        except (FileMissing, CertificateError):
            pass
        issued = issue()
        self._disk.write_atomically(file, issued.key + issued.certificate)
        return issued.key + issued.certificate


def local_hosts(listen: str, names: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names and addresses of this machine that its certificate should contain."""
    hosts = ["localhost", "127.0.0.1", "::1", *names]
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", machine := socket.gethostname()):
        hosts.append(machine.lower())
    with suppress(ValueError):  # an invalid address is reported when it is bound
        hosts += local_addresses() if ip_address(listen).is_unspecified else [str(ip_address(listen))]
    return tuple(dict.fromkeys(_normalized(name) for name in hosts))


def _normalized(name: str) -> str:
    """Normalise a host name or address."""
    try:
        return str(ip_address(name))
    except ValueError:
        return name.lower()


def local_addresses() -> list[str]:
    """Return the addresses of all interfaces from the kernel's tables, without link-local ones, which others cannot use."""
    addresses = _LOCAL.findall(_text("/proc/net/fib_trie"))
    for line in _text("/proc/net/if_inet6").splitlines():
        address = IPv6Address(bytes.fromhex(line.split()[0]))
        if not address.is_link_local:
            addresses.append(str(address))
    return sorted(set(addresses))[:ADDRESSES_MAX]


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
