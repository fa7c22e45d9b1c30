"""Certificates serve only their purpose: handshakes in memory, without sockets."""

from __future__ import annotations

import ssl
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from remit.law.certificate_identity import SERVER_IDENTITY, CertificateIdentity, agent_identity, identity_of
from remit.world.files.disk import FileDisk
from remit.world.interfaces import ListenFailed
from remit.world.net.certificates import (
    CertificateAuthority,
    CertificateError,
    CertificateLifetimes,
    KeyPair,
    certificate_digest,
    create_key,
    create_request,
    hosts_of,
    issued_by,
    key_digest,
    key_digest_of_request,
    read_certificate,
    remaining_s,
    renew_in_s,
)
from remit.world.net.server_keys import ProvidedCertificate, TlsKeys, TlsOptions, local_hosts
from remit.world.net.tls import TlsFileError, Trust, agent_client_context, client_context, explain_tls_error, server_context


def create_authority(lifespans: CertificateLifetimes = CertificateLifetimes()) -> CertificateAuthority:
    return CertificateAuthority(CertificateAuthority.create("test", lifespans), lifespans)


def write_file(directory: Path, name: str, *pieces: bytes) -> str:
    (directory / name).write_bytes(b"".join(pieces))
    return str(directory / name)


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, host: str = "localhost") -> tuple[list[str], list[str]]:
    """Complete a handshake and return the URIs that each end saw of the other. Raises what either end raises."""
    to_answerer, to_caller = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_caller, to_answerer, server_hostname=host)
    other = server.wrap_bio(to_answerer, to_caller, server_side=True)
    left = {one, other}
    for _ in range(20):
        for end in (one, other):
            if end in left:
                try:
                    end.do_handshake()
                    left.discard(end)
                except ssl.SSLWantReadError:
                    pass
    assert not left
    for end in (one, other):  # a refused client learns of it only when it reads
        with pytest.raises(ssl.SSLWantReadError):
            end.read(1)
    return _uris(one), _uris(other)


def _uris(end: ssl.SSLObject) -> list[str]:
    shown: dict[str, Any] = dict(end.getpeercert() or {})
    return [str(value) for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]


class Ends:
    """An authority, and TLS contexts for every end."""

    def __init__(self, root: Path) -> None:
        self.root, self.authority = root, create_authority()
        self.ca = write_file(root, "ca.pem", self.authority.pem)
        server = self.authority.issue_server(["localhost", "127.0.0.1"])
        self.server = write_file(root, "server.pem", server.key, server.certificate)
        client = self.authority.issue_client(SERVER_IDENTITY)
        self.caller = write_file(root, "caller.pem", client.key, client.certificate)
        key = create_key()
        pair = self.authority.issue_agent(create_request(key), agent_identity(["n1"]))
        self.agent = write_file(root, "agent.pem", key, pair.calling)
        self.listener = write_file(root, "listener.pem", key, pair.answering)

    def answering(self, file: str, *, required: bool = False) -> ssl.SSLContext:
        return server_context(Path(file), Path(file), self.authority.pem, required=required)

    def calling(self, file: str = "") -> ssl.SSLContext:
        return client_context(Trust(self.ca, file, file))

    def calling_agents(self, file: str) -> ssl.SSLContext:
        return agent_client_context(self.authority.pem, Trust("", file, file))


@pytest.fixture
def ends(tmp_path: Path) -> Ends:
    return Ends(tmp_path)


def test_server_is_verified_and_agent_identified(ends: Ends) -> None:
    assert handshake(ends.calling(), ends.answering(ends.server)) == ([], [])
    _, seen = handshake(ends.calling(ends.agent), ends.answering(ends.server))
    assert identity_of(seen) == agent_identity(["n1"])


def test_server_calls_agent_with_mutual_identification(ends: Ends) -> None:
    there, here = handshake(ends.calling_agents(ends.caller), ends.answering(ends.listener, required=True))
    assert identity_of(there) == agent_identity(["n1"]) and identity_of(here) == SERVER_IDENTITY


@pytest.mark.parametrize("file", ["agent", "caller"])
def test_client_certificate_cannot_serve(ends: Ends, file: str) -> None:
    """A05: a client certificate used as a server certificate."""
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        handshake(ends.calling(), ends.answering(getattr(ends, file)))
    explanation = explain_tls_error(refused.value, "localhost")
    assert explanation is not None and "not for a server" in explanation[0]
    with pytest.raises(ssl.SSLCertVerificationError):  # nor as an agent: naming a node is not enough
        handshake(ends.calling_agents(ends.caller), ends.answering(getattr(ends, file)))


@pytest.mark.parametrize("file", ["server", "listener"])
def test_server_certificate_cannot_act_as_client(ends: Ends, file: str) -> None:
    """A05."""
    with pytest.raises(ssl.SSLError):
        handshake(ends.calling(getattr(ends, file)), ends.answering(ends.server))


def test_agents_listener_certificate_does_not_verify_as_host(ends: Ends) -> None:
    """A05: the right authority and purpose, but it names no host."""
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        handshake(ends.calling(), ends.answering(ends.listener))
    explanation = explain_tls_error(refused.value, "localhost")
    assert explanation is not None and "--tls-name localhost" in explanation[1]


def test_client_of_agent_must_present_certificate(ends: Ends) -> None:
    with pytest.raises(ssl.SSLError):
        handshake(_without_certificate(ends), ends.answering(ends.listener, required=True))


def _without_certificate(ends: Ends) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=ends.authority.pem.decode())
    return context


def test_certificate_of_other_authority_is_rejected(ends: Ends, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Ends(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        handshake(other.calling(), ends.answering(ends.server))
    explanation = explain_tls_error(refused.value, "localhost")
    assert explanation is not None and "--ca-file" in explanation[1]
    with pytest.raises(ssl.SSLError):  # its agent is rejected, too
        context = client_context(Trust(ends.ca, other.agent, other.agent))
        handshake(context, ends.answering(ends.server))


def test_old_tls_versions_are_rejected(ends: Ends) -> None:
    context = ends.calling()
    context.set_ciphers("ALL:@SECLEVEL=0")  # so that the other end refuses
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError, match=r"PROTOCOL"):
        handshake(context, ends.answering(ends.server))


def test_expired_certificate_is_explained(tmp_path: Path) -> None:
    authority = create_authority(CertificateLifetimes(server_s=-10))
    pair = authority.issue_server(["localhost"])
    file = Path(write_file(tmp_path, "server.pem", pair.key, pair.certificate))
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        handshake(
            client_context(Trust(write_file(tmp_path, "ca.pem", authority.pem))), server_context(file, file, authority.pem)
        )
    explanation = explain_tls_error(refused.value, "localhost")
    assert explanation is not None and "expired" in explanation[0]


def test_certificate_does_not_outlive_authority() -> None:
    authority = create_authority(CertificateLifetimes(authority_s=1_000, server_s=10_000))
    assert remaining_s(authority.issue_server(["x"]).certificate) <= 1_000


def test_certificate_is_due_for_renewal_after_two_thirds() -> None:
    pair = create_authority(CertificateLifetimes(server_s=300)).issue_server(["x"])
    assert 295 < remaining_s(pair.certificate) <= 300
    assert 190 < renew_in_s(pair.certificate) <= 200


def test_certificates_are_identified_by_digest_and_key() -> None:
    authority = create_authority()
    key = create_key()
    request = create_request(key)
    first, second = authority.issue_agent(request, agent_identity(["a"])), authority.issue_agent(request, agent_identity(["b"]))
    assert certificate_digest(first.calling) != certificate_digest(second.calling)
    assert key_digest(first.calling) == key_digest(second.answering) == key_digest_of_request(request)
    assert key_digest_of_request(create_request(create_key())) != key_digest_of_request(request)
    assert issued_by(first.calling, authority.pem) and not issued_by(first.calling, create_authority().pem)


def test_signer_determines_identity_not_request() -> None:
    """A request may ask for any name and for CA rights; only its key is used."""
    key = ec.generate_private_key(ec.SECP256R1())
    requested_names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier("remit://server"), x509.DNSName("localhost")])
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .add_extension(requested_names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    for pem in create_authority().issue_agent(request, agent_identity(["n1"])):
        found = read_certificate(pem)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert [one.value for one in names] == ["remit://node/n1"]
        assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def _request(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    create_authority = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return create_authority.public_bytes(serialization.Encoding.PEM)


def test_invalid_certificate_requests_are_refused_with_fix() -> None:
    good = create_request(create_key())
    lines = good.splitlines(keepends=True)
    flipped = b"B" if lines[3][10:11] == b"A" else b"A"
    bad = [
        b"",
        b"hello",
        good[: len(good) // 2],
        lines[0] + lines[1] + lines[2] + lines[3][:10] + flipped + lines[3][11:] + b"".join(lines[4:]),
        _request(ec.generate_private_key(ec.SECP384R1())),
        _request(rsa.generate_private_key(65537, 2048)),
        b"x" * 20_000,
    ]
    for request in bad:
        with pytest.raises(CertificateError) as refused:
            key_digest_of_request(request)
        assert "P-256" in refused.value.cure


def test_key_must_match_certificate() -> None:
    one, other = CertificateAuthority.create("a"), CertificateAuthority.create("b")
    with pytest.raises(CertificateError):
        CertificateAuthority(KeyPair(one.certificate, other.key))
    for key in (b"", b"none", one.certificate):
        with pytest.raises(CertificateError):
            CertificateAuthority(KeyPair(one.certificate, key))


# -- key directory -------------------------------------------------------------------------------------------------------------


def tls_keys(root: Path, options: TlsOptions = TlsOptions(), listen: str = "127.0.0.1") -> TlsKeys:
    return TlsKeys(root / "tls", FileDisk(), options, listen)


def test_tls_directory_is_created_once_and_private(tmp_path: Path) -> None:
    first = tls_keys(tmp_path)
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    files = sorted((tmp_path / "tls").iterdir())
    assert [file.name for file in files] == ["ca.key", "ca.pem", "caller.pem", "server.pem"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    before = [file.read_bytes() for file in files]
    again = tls_keys(tmp_path)
    assert [file.read_bytes() for file in files] == before and again.ca == first.ca
    assert not again.renew()
    assert {"localhost", "127.0.0.1", "::1"} <= set(hosts_of((tmp_path / "tls/server.pem").read_bytes())) == again.hosts


def test_new_host_name_renews_certificate_and_keeps_authority(tmp_path: Path) -> None:
    first = tls_keys(tmp_path)
    second = tls_keys(tmp_path, TlsOptions(("Remit.Example", "2001:DB8::1")), "10.1.2.3")
    assert second.ca == first.ca
    assert {"remit.example", "2001:db8::1", "10.1.2.3"} <= second.hosts
    trust = Trust(str(second.ca_file))
    handshake(client_context(trust), second.server_context, "remit.example")
    handshake(client_context(trust), second.server_context, "10.1.2.3")
    handshake(client_context(trust), second.server_context, "2001:db8::1")


def test_due_certificate_is_renewed_and_served_to_next_client(tmp_path: Path) -> None:
    keys = tls_keys(tmp_path, TlsOptions(lifetimes=CertificateLifetimes(server_s=10_000)))
    before, file = keys.server_context, tmp_path / "tls" / "server.pem"
    spent = CertificateAuthority(
        KeyPair(keys.ca, (tmp_path / "tls" / "ca.key").read_bytes()), CertificateLifetimes(server_s=-1)
    ).issue_server(sorted(keys.hosts))
    file.write_bytes(spent.key + spent.certificate)
    assert keys.renew() and keys.server_context is not before
    assert renew_in_s(file.read_bytes()) > 6_000
    handshake(client_context(Trust(str(keys.ca_file))), keys.server_context)
    assert not keys.renew()


def test_damaged_certificates_are_recreated_but_never_the_authority(tmp_path: Path) -> None:
    tls = tmp_path / "tls"
    tls_keys(tmp_path)
    (tls / "ca.pem").unlink()  # interrupted between writing the key and the certificate: nothing has used it yet
    keys = tls_keys(tmp_path)
    for name in ("server.pem", "caller.pem"):
        (tls / name).write_bytes(b"spoilt")
    assert tls_keys(tmp_path).ca == keys.ca
    (tls / "ca.key").unlink()
    with pytest.raises(ListenFailed) as refused:
        tls_keys(tmp_path)
    assert "backup" in refused.value.cure
    pair = CertificateAuthority.create("x", CertificateLifetimes(authority_s=-5))
    (tls / "ca.pem").write_bytes(pair.certificate)
    with pytest.raises(ListenFailed, match="expired"):
        tls_keys(tmp_path)


def test_provided_certificate_is_used_and_reloaded_on_change(tmp_path: Path) -> None:
    import trustme

    theirs = trustme.CA()
    theirs.cert_pem.write_to_path(str(tmp_path / "their-ca.pem"))

    def issue(*names: str) -> None:
        leaf = theirs.issue_cert(*names)
        leaf.private_key_pem.write_to_path(str(tmp_path / "own.key"))
        leaf.cert_chain_pems[0].write_to_path(str(tmp_path / "own.pem"))

    issue("own.example")
    own = ProvidedCertificate(tmp_path / "own.pem", tmp_path / "own.key", tmp_path / "their-ca.pem")
    keys = tls_keys(tmp_path, TlsOptions(provided=own))
    assert "own.example" in keys.hosts and keys.ca_file == own.ca
    trust = Trust(str(own.ca))
    handshake(client_context(trust), keys.server_context, "own.example")
    issue("new.example")
    assert keys.renew() and "new.example" in keys.hosts
    handshake(client_context(trust), keys.server_context, "new.example")
    # Agent certificates are signed by Remit's own authority all the same.
    key = create_key()
    pair = keys.authority.issue_agent(create_request(key), agent_identity(["n1"]))
    agent = write_file(tmp_path, "agent.pem", key, pair.calling)
    _, seen = handshake(client_context(Trust(str(own.ca), agent, agent)), keys.server_context, "new.example")
    assert identity_of(seen) == CertificateIdentity("agent", ("n1",))
    (tmp_path / "own.key").write_bytes(create_key())
    with pytest.raises(ListenFailed, match="cannot be used"):
        tls_keys(tmp_path, TlsOptions(provided=own))


def test_wildcard_listen_address_names_every_local_host() -> None:
    hosts = local_hosts("0.0.0.0", ["A.example"])
    assert {"localhost", "127.0.0.1", "::1", "a.example"} <= set(hosts) and "0.0.0.0" not in hosts
    assert "10.0.0.9" in local_hosts("10.0.0.9")


def test_invalid_certificate_file_is_named_in_error(tmp_path: Path) -> None:
    for content in (b"", b"hello", create_authority().pem[:100]):
        file = write_file(tmp_path, "ca.pem", content)
        with pytest.raises(TlsFileError, match=r"ca\.pem"):
            client_context(Trust(file))
    with pytest.raises(TlsFileError):
        client_context(Trust(str(tmp_path / "nowhere")))
    locked = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    good = write_file(tmp_path, "good.pem", create_authority().pem)
    with pytest.raises(TlsFileError, match="cannot be used"):  # and no password is asked for on the terminal
        client_context(
            Trust(good, write_file(tmp_path, "pair.pem", create_authority().issue_server(["x"]).certificate, locked))
        )
