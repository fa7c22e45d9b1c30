"""Does each certificate serve its one purpose? Handshakes in memory: two ends, no socket."""

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


def made(lifespans: CertificateLifetimes = CertificateLifetimes()) -> CertificateAuthority:
    return CertificateAuthority(CertificateAuthority.create("test", lifespans), lifespans)


def kept(directory: Path, name: str, *pieces: bytes) -> str:
    (directory / name).write_bytes(b"".join(pieces))
    return str(directory / name)


def shaken(caller: ssl.SSLContext, answerer: ssl.SSLContext, host: str = "localhost") -> tuple[list[str], list[str]]:
    """The URIs that each end saw of the other. Raises what either end raises."""
    to_answerer, to_caller = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = caller.wrap_bio(to_caller, to_answerer, server_hostname=host)
    other = answerer.wrap_bio(to_answerer, to_caller, server_side=True)
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
    for end in (one, other):  # a caller that was refused learns it only when it reads
        with pytest.raises(ssl.SSLWantReadError):
            end.read(1)
    return _uris(one), _uris(other)


def _uris(end: ssl.SSLObject) -> list[str]:
    shown: dict[str, Any] = dict(end.getpeercert() or {})
    return [str(value) for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]


class Ends:
    """An authority, and contexts for every end."""

    def __init__(self, root: Path) -> None:
        self.root, self.authority = root, made()
        self.ca = kept(root, "ca.pem", self.authority.pem)
        server = self.authority.issue_server(["localhost", "127.0.0.1"])
        self.server = kept(root, "server.pem", server.key, server.certificate)
        caller = self.authority.issue_client(SERVER_IDENTITY)
        self.caller = kept(root, "caller.pem", caller.key, caller.certificate)
        key = create_key()
        pair = self.authority.issue_agent(create_request(key), agent_identity(["n1"]))
        self.agent = kept(root, "agent.pem", key, pair.calling)
        self.listener = kept(root, "listener.pem", key, pair.answering)

    def answering(self, file: str, *, required: bool = False) -> ssl.SSLContext:
        return server_context(Path(file), Path(file), self.authority.pem, required=required)

    def calling(self, file: str = "") -> ssl.SSLContext:
        return client_context(Trust(self.ca, file, file))

    def calling_agents(self, file: str) -> ssl.SSLContext:
        return agent_client_context(self.authority.pem, Trust("", file, file))


@pytest.fixture
def ends(tmp_path: Path) -> Ends:
    return Ends(tmp_path)


def test_a_server_is_believed_and_an_agent_is_known(ends: Ends) -> None:
    assert shaken(ends.calling(), ends.answering(ends.server)) == ([], [])
    _, seen = shaken(ends.calling(ends.agent), ends.answering(ends.server))
    assert identity_of(seen) == agent_identity(["n1"])


def test_a_server_calls_an_agent_and_each_knows_the_other(ends: Ends) -> None:
    there, here = shaken(ends.calling_agents(ends.caller), ends.answering(ends.listener, required=True))
    assert identity_of(there) == agent_identity(["n1"]) and identity_of(here) == SERVER_IDENTITY


@pytest.mark.parametrize("file", ["agent", "caller"])
def test_what_is_made_to_call_answers_nobody(ends: Ends, file: str) -> None:
    """A05: a client's certificate as a server's."""
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        shaken(ends.calling(), ends.answering(getattr(ends, file)))
    told = explain_tls_error(refused.value, "localhost")
    assert told is not None and "not for a server" in told[0]
    with pytest.raises(ssl.SSLCertVerificationError):  # nor an agent: that it names a node is not enough
        shaken(ends.calling_agents(ends.caller), ends.answering(getattr(ends, file)))


@pytest.mark.parametrize("file", ["server", "listener"])
def test_what_is_made_to_answer_calls_nobody(ends: Ends, file: str) -> None:
    """A05."""
    with pytest.raises(ssl.SSLError):
        shaken(ends.calling(getattr(ends, file)), ends.answering(ends.server))


def test_what_an_agent_answers_with_is_no_server_to_whoever_looks_for_a_host(ends: Ends) -> None:
    """A05: the right authority and the right purpose, but it names no host."""
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        shaken(ends.calling(), ends.answering(ends.listener))
    told = explain_tls_error(refused.value, "localhost")
    assert told is not None and "--tls-name localhost" in told[1]


def test_whoever_calls_an_agent_shows_a_certificate(ends: Ends) -> None:
    with pytest.raises(ssl.SSLError):
        shaken(_without_certificate(ends), ends.answering(ends.listener, required=True))


def _without_certificate(ends: Ends) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=ends.authority.pem.decode())
    return context


def test_another_authority_is_believed_by_nobody(ends: Ends, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Ends(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        shaken(other.calling(), ends.answering(ends.server))
    told = explain_tls_error(refused.value, "localhost")
    assert told is not None and "--ca-file" in told[1]
    with pytest.raises(ssl.SSLError):  # its agent is turned away, too
        context = client_context(Trust(ends.ca, other.agent, other.agent))
        shaken(context, ends.answering(ends.server))


def test_old_protocols_are_not_spoken(ends: Ends) -> None:
    context = ends.calling()
    context.set_ciphers("ALL:@SECLEVEL=0")  # so that it is the other end that refuses
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError, match=r"PROTOCOL"):
        shaken(context, ends.answering(ends.server))


def test_one_that_has_run_out_is_told_as_such(tmp_path: Path) -> None:
    authority = made(CertificateLifetimes(server_s=-10))
    pair = authority.issue_server(["localhost"])
    file = Path(kept(tmp_path, "server.pem", pair.key, pair.certificate))
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        shaken(client_context(Trust(kept(tmp_path, "ca.pem", authority.pem))), server_context(file, file, authority.pem))
    told = explain_tls_error(refused.value, "localhost")
    assert told is not None and "expired" in told[0]


def test_nobody_outlives_the_authority() -> None:
    authority = made(CertificateLifetimes(authority_s=1_000, server_s=10_000))
    assert remaining_s(authority.issue_server(["x"]).certificate) <= 1_000


def test_a_third_before_its_end_it_is_due() -> None:
    pair = made(CertificateLifetimes(server_s=300)).issue_server(["x"])
    assert 295 < remaining_s(pair.certificate) <= 300
    assert 190 < renew_in_s(pair.certificate) <= 200


def test_certificates_are_known_by_digest_and_by_key() -> None:
    authority = made()
    key = create_key()
    request = create_request(key)
    first, second = authority.issue_agent(request, agent_identity(["a"])), authority.issue_agent(request, agent_identity(["b"]))
    assert certificate_digest(first.calling) != certificate_digest(second.calling)
    assert key_digest(first.calling) == key_digest(second.answering) == key_digest_of_request(request)
    assert key_digest_of_request(create_request(create_key())) != key_digest_of_request(request)
    assert issued_by(first.calling, authority.pem) and not issued_by(first.calling, made().pem)


def test_whoever_signs_says_who_it_is() -> None:
    """A request may ask for any name and to be an authority; only its key is taken."""
    key = ec.generate_private_key(ec.SECP256R1())
    wish = x509.SubjectAlternativeName([x509.UniformResourceIdentifier("remit://server"), x509.DNSName("localhost")])
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .add_extension(wish, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    for pem in made().issue_agent(request, agent_identity(["n1"])):
        found = read_certificate(pem)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert [one.value for one in names] == ["remit://node/n1"]
        assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def _request(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM)


def test_requests_that_are_none_are_refused_with_the_cure() -> None:
    good = create_request(create_key())
    lines = good.splitlines(keepends=True)
    turned = b"B" if lines[3][10:11] == b"A" else b"A"
    bad = [
        b"",
        b"hello",
        good[: len(good) // 2],
        lines[0] + lines[1] + lines[2] + lines[3][:10] + turned + lines[3][11:] + b"".join(lines[4:]),
        _request(ec.generate_private_key(ec.SECP384R1())),
        _request(rsa.generate_private_key(65537, 2048)),
        b"x" * 20_000,
    ]
    for request in bad:
        with pytest.raises(CertificateError) as refused:
            key_digest_of_request(request)
        assert "P-256" in refused.value.cure


def test_keys_and_certificates_belong_together() -> None:
    one, other = CertificateAuthority.create("a"), CertificateAuthority.create("b")
    with pytest.raises(CertificateError):
        CertificateAuthority(KeyPair(one.certificate, other.key))
    for key in (b"", b"none", one.certificate):
        with pytest.raises(CertificateError):
            CertificateAuthority(KeyPair(one.certificate, key))


# -- the directory -------------------------------------------------------------------------------------------------------------


def keyring(root: Path, secured: TlsOptions = TlsOptions(), listen: str = "127.0.0.1") -> TlsKeys:
    return TlsKeys(root / "tls", FileDisk(), secured, listen)


def test_a_directory_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    first = keyring(tmp_path)
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    files = sorted((tmp_path / "tls").iterdir())
    assert [file.name for file in files] == ["ca.key", "ca.pem", "caller.pem", "server.pem"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    before = [file.read_bytes() for file in files]
    again = keyring(tmp_path)
    assert [file.read_bytes() for file in files] == before and again.ca == first.ca
    assert not again.renew()
    assert {"localhost", "127.0.0.1", "::1"} <= set(hosts_of((tmp_path / "tls/server.pem").read_bytes())) == again.hosts


def test_a_new_name_makes_a_new_certificate_and_keeps_the_authority(tmp_path: Path) -> None:
    first = keyring(tmp_path)
    second = keyring(tmp_path, TlsOptions(("Remit.Example", "2001:DB8::1")), "10.1.2.3")
    assert second.ca == first.ca
    assert {"remit.example", "2001:db8::1", "10.1.2.3"} <= second.hosts
    trust = Trust(str(second.ca_file))
    shaken(client_context(trust), second.server_context, "remit.example")
    shaken(client_context(trust), second.server_context, "10.1.2.3")
    shaken(client_context(trust), second.server_context, "2001:db8::1")


def test_what_is_due_is_renewed_and_whoever_comes_next_sees_it(tmp_path: Path) -> None:
    keys = keyring(tmp_path, TlsOptions(lifetimes=CertificateLifetimes(server_s=10_000)))
    before, file = keys.server_context, tmp_path / "tls" / "server.pem"
    spent = CertificateAuthority(
        KeyPair(keys.ca, (tmp_path / "tls" / "ca.key").read_bytes()), CertificateLifetimes(server_s=-1)
    ).issue_server(sorted(keys.hosts))
    file.write_bytes(spent.key + spent.certificate)
    assert keys.renew() and keys.server_context is not before
    assert renew_in_s(file.read_bytes()) > 6_000
    shaken(client_context(Trust(str(keys.ca_file))), keys.server_context)
    assert not keys.renew()


def test_half_made_or_spoilt_files_are_made_again_but_never_the_authority(tmp_path: Path) -> None:
    tls = tmp_path / "tls"
    keyring(tmp_path)
    (tls / "ca.pem").unlink()  # cut off between its key and its certificate: nobody has seen it yet
    keys = keyring(tmp_path)
    for name in ("server.pem", "caller.pem"):
        (tls / name).write_bytes(b"spoilt")
    assert keyring(tmp_path).ca == keys.ca
    (tls / "ca.key").unlink()
    with pytest.raises(ListenFailed) as refused:
        keyring(tmp_path)
    assert "backup" in refused.value.cure
    pair = CertificateAuthority.create("x", CertificateLifetimes(authority_s=-5))
    (tls / "ca.pem").write_bytes(pair.certificate)
    with pytest.raises(ListenFailed, match="expired"):
        keyring(tmp_path)


def test_one_of_somebody_elses_is_used_and_taken_up_when_it_changes(tmp_path: Path) -> None:
    import trustme

    theirs = trustme.CA()
    theirs.cert_pem.write_to_path(str(tmp_path / "their-ca.pem"))

    def issue(*names: str) -> None:
        leaf = theirs.issue_cert(*names)
        leaf.private_key_pem.write_to_path(str(tmp_path / "own.key"))
        leaf.cert_chain_pems[0].write_to_path(str(tmp_path / "own.pem"))

    issue("own.example")
    own = ProvidedCertificate(tmp_path / "own.pem", tmp_path / "own.key", tmp_path / "their-ca.pem")
    keys = keyring(tmp_path, TlsOptions(provided=own))
    assert "own.example" in keys.hosts and keys.ca_file == own.ca
    trust = Trust(str(own.ca))
    shaken(client_context(trust), keys.server_context, "own.example")
    issue("new.example")
    assert keys.renew() and "new.example" in keys.hosts
    shaken(client_context(trust), keys.server_context, "new.example")
    # Agents are signed for here all the same.
    key = create_key()
    pair = keys.authority.issue_agent(create_request(key), agent_identity(["n1"]))
    agent = kept(tmp_path, "agent.pem", key, pair.calling)
    _, seen = shaken(client_context(Trust(str(own.ca), agent, agent)), keys.server_context, "new.example")
    assert identity_of(seen) == CertificateIdentity("agent", ("n1",))
    (tmp_path / "own.key").write_bytes(create_key())
    with pytest.raises(ListenFailed, match="cannot be used"):
        keyring(tmp_path, TlsOptions(provided=own))


def test_every_address_is_named_where_all_are_listened_at() -> None:
    hosts = local_hosts("0.0.0.0", ["A.example"])
    assert {"localhost", "127.0.0.1", "::1", "a.example"} <= set(hosts) and "0.0.0.0" not in hosts
    assert "10.0.0.9" in local_hosts("10.0.0.9")


def test_files_that_are_no_certificates_are_told_by_name(tmp_path: Path) -> None:
    for content in (b"", b"hello", made().pem[:100]):
        file = kept(tmp_path, "ca.pem", content)
        with pytest.raises(TlsFileError, match=r"ca\.pem"):
            client_context(Trust(file))
    with pytest.raises(TlsFileError):
        client_context(Trust(str(tmp_path / "nowhere")))
    locked = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    good = kept(tmp_path, "good.pem", made().pem)
    with pytest.raises(TlsFileError, match="cannot be used"):  # and nobody is asked for it on the terminal
        client_context(Trust(good, kept(tmp_path, "pair.pem", made().issue_server(["x"]).certificate, locked)))
