"""Certificate authority and certificates (PEM in and out).

Every certificate has one purpose. A server certificate names hosts and is for serving only. A client certificate names a
role of Remit and is for connecting only. The certificate that an agent serves with names its nodes and no host, so a client
that verifies host names never accepts it as a server. Files and connections are handled elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from remit.law.certificate_identity import NO_IDENTITY, CertificateIdentity, identity_of
from remit.world.interfaces import WorldError

DAY_S: Final = 86_400
CLOCK_SKEW: Final = timedelta(minutes=5)
"""Certificates are valid from a little before their creation, to tolerate differences between clocks."""
RENEW_FRACTION: Final = 3
"""A certificate is renewed when less than 1/3 of its lifetime is left."""
DIGEST_PREFIX: Final = "sha256:"
REQUEST_BYTES_MAX: Final = 16 << 10


class CertificateLifetimes(NamedTuple):
    """Lifetimes of certificates, in seconds."""

    authority_s: int = 3650 * DAY_S
    server_s: int = 90 * DAY_S
    agent_s: int = 30 * DAY_S


class KeyPair(NamedTuple):
    """A certificate and its key, each in PEM."""

    certificate: bytes
    key: bytes


class AgentCertificates(NamedTuple):
    """Two certificates for one key: `calling` for client connections, `answering` for serving. Neither can be used as the
    other.
    """

    calling: bytes
    answering: bytes


class CertificateError(WorldError):
    """The data is not the expected certificate, key or request."""


class CertificateAuthority:
    """Issues certificates. Its key must stay secret: it allows impersonating every component that trusts it."""

    def __init__(self, pair: KeyPair, lifetimes: CertificateLifetimes = CertificateLifetimes()) -> None:
        self.pem = pair.certificate
        self._certificate = read_certificate(pair.certificate)
        self._key = _read_key(pair.key)
        self._lifetimes = lifetimes
        if _public_bytes(self._certificate.public_key()) != _public_bytes(self._key.public_key()):
            raise CertificateError("the authority's key does not belong to its certificate", "restore both from one backup")

    @staticmethod
    def create(name: str, lifetimes: CertificateLifetimes = CertificateLifetimes()) -> KeyPair:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _common_name(f"remit authority {name}")
        builder = (
            _builder(subject, subject, key.public_key(), lifetimes.authority_s)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
        )
        return KeyPair(_pem(builder.sign(key, hashes.SHA256())), _key_pem(key))

    def issue_server(self, hosts: Sequence[str]) -> KeyPair:
        """Issue a server certificate for these host names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [_host_name(host) for host in hosts]
        return KeyPair(self._sign(key.public_key(), names, ExtendedKeyUsageOID.SERVER_AUTH, "server"), _key_pem(key))

    def issue_client(self, identity: CertificateIdentity) -> KeyPair:
        """Issue a client certificate for a component of Remit."""
        key = ec.generate_private_key(ec.SECP256R1())
        return KeyPair(self._issue_for(key.public_key(), identity, ExtendedKeyUsageOID.CLIENT_AUTH), _key_pem(key))

    def issue_agent(self, request: bytes, identity: CertificateIdentity) -> AgentCertificates:
        """Issue an agent's certificates for the key of a signing request.

        All other contents of the request are ignored: the server decides the identity.
        """
        key = key_of_request(request)
        return AgentCertificates(
            self._issue_for(key, identity, ExtendedKeyUsageOID.CLIENT_AUTH),
            self._issue_for(key, identity, ExtendedKeyUsageOID.SERVER_AUTH),
        )

    def _issue_for(
        self, key: ec.EllipticCurvePublicKey, identity: CertificateIdentity, purpose: x509.ObjectIdentifier
    ) -> bytes:
        names = [x509.UniformResourceIdentifier(name) for name in identity.uris]
        return self._sign(key, names, purpose, identity.role)

    def _sign(
        self, key: ec.EllipticCurvePublicKey, names: Iterable[x509.GeneralName], purpose: x509.ObjectIdentifier, role: str
    ) -> bytes:
        lifetime_s = self._lifetimes.agent_s if role == "agent" else self._lifetimes.server_s
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            _builder(
                _common_name(f"remit {role}"), self._certificate.subject, key, lifetime_s, self._certificate.not_valid_after_utc
            )
            .add_extension(issuer, critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
        )
        return _pem(builder.sign(self._key, hashes.SHA256()))


# -- reading -------------------------------------------------------------------------------------------------------------------


def read_certificate(pem: bytes) -> x509.Certificate:
    """Return the first certificate in `pem`."""
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise CertificateError(f"not a certificate in PEM ({error})", "use a file with a BEGIN CERTIFICATE section") from error


def remaining_s(pem: bytes) -> float:
    """Return the remaining validity in seconds; negative after the expiry."""
    return (read_certificate(pem).not_valid_after_utc - datetime.now(UTC)).total_seconds()


def renew_in_s(pem: bytes) -> float:
    """Return in how many seconds the certificate should be renewed; negative when that is overdue."""
    certificate = read_certificate(pem)
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc - CLOCK_SKEW
    return remaining_s(pem) - life.total_seconds() / RENEW_FRACTION


def hosts_of(pem: bytes) -> tuple[str, ...]:
    """Return the host names and addresses in the certificate."""
    try:
        names = read_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))


def identity_in(pem: bytes) -> CertificateIdentity:
    """Return the identity encoded in the certificate."""
    try:
        names = read_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return NO_IDENTITY
    return identity_of(names.get_values_for_type(x509.UniformResourceIdentifier))


def issued_by(pem: bytes, authority: bytes) -> bool:
    try:
        read_certificate(pem).verify_directly_issued_by(read_certificate(authority))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def certificate_digest(pem: bytes) -> str:
    """Return the digest of the complete certificate, as used for pinning on the command line."""
    return DIGEST_PREFIX + hashlib.sha256(read_certificate(pem).public_bytes(serialization.Encoding.DER)).hexdigest()


def key_digest(pem: bytes) -> str:
    """Return the digest of the public key, which is the same for every certificate of that key."""
    return DIGEST_PREFIX + hashlib.sha256(_public_bytes(read_certificate(pem).public_key())).hexdigest()


# -- signing requests ----------------------------------------------------------------------------------------------------------


def create_key() -> bytes:
    return _key_pem(ec.generate_private_key(ec.SECP256R1()))


def create_request(key: bytes) -> bytes:
    """Create a signing request. It proves possession of the key; the token sent with it proves the identity."""
    built = x509.CertificateSigningRequestBuilder().subject_name(_common_name("remit agent"))
    return built.sign(_read_key(key), hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def key_of_request(request: bytes) -> ec.EllipticCurvePublicKey:
    cure = "send a certificate signing request in PEM for a P-256 key, signed with that key"
    if len(request) > REQUEST_BYTES_MAX:
        raise CertificateError(f"the request is larger than {REQUEST_BYTES_MAX} bytes", cure)
    try:
        csr = x509.load_pem_x509_csr(request)
        key = csr.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise CertificateError("the request is not for a P-256 key", cure)
        good = csr.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise CertificateError(f"the request cannot be read ({error})", cure) from error
    if not good:
        raise CertificateError("the request is not signed with its own key", cure)
    return key


def key_digest_of_request(request: bytes) -> str:
    """Return the digest of the request's public key, equal to `key_digest` of every certificate issued for it."""
    return DIGEST_PREFIX + hashlib.sha256(_public_bytes(key_of_request(request))).hexdigest()


# -- building ------------------------------------------------------------------------------------------------------------------


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise CertificateError(f"{host!r} is not a host name", "use an IP address or a DNS name in ASCII") from error


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lifetime_s: int, not_after: datetime | None = None
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    end = now + timedelta(seconds=lifetime_s)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(end if not_after is None else min(end, not_after))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _read_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CertificateError(f"not a PEM key without a password ({error})", "restore it from a backup") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError("the key is not a P-256 key", "restore the original key from a backup")
    return key


def _public_bytes(key: object) -> bytes:
    encoded: bytes = key.public_bytes(  # type: ignore[attr-defined]  # all public keys have this method, but no common type
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return encoded
