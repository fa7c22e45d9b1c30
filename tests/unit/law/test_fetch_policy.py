"""Addresses that artifacts may not be fetched from, and the permits that allow them."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from remit.law.admission import Permissions, permission_violation, permissions_of
from remit.law.fetch_policy import address_denial_reason, host_denial_reason
from remit.model.artifacts import Artifact, HostPath, InvalidSource, PolicyPermit, Rootfs, Volume, parse_source
from remit.model.kinds import PolicySpec, Template
from remit.model.policies import PolicyMatch, PolicyRule

DIGEST = "0" * 64
OWN = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1",
    "240.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:a9fe:a9fe", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "::127.0.0.1", "2001:db8::1",
]  # fmt: skip
HIDDEN = ["localhost", "LOCALHOST.", "a.localhost", "metadata.google.internal", "printer.local", "intranet", "2130706433",
          "127.1", "0x7f.0.0.1", "0177.0.0.1", "1.2.3.4.5", "host.0x1"]  # fmt: skip


@pytest.mark.parametrize("address", OWN)
def test_non_public_address_is_denied_as_host_and_as_resolved_address(address: str) -> None:
    assert host_denial_reason(address, ())
    assert address_denial_reason(ip_address(address), "good.example.org", ())


@pytest.mark.parametrize("host", HIDDEN)
def test_local_name_or_obfuscated_address_is_denied(host: str) -> None:
    assert host_denial_reason(host, ())


@pytest.mark.parametrize("host", ["example.org", "8.8.8.8", "2606:4700::1111", "a.b-c.example"])
def test_public_host_is_permitted(host: str) -> None:
    assert not host_denial_reason(host, ())


def test_permitted_host_may_resolve_to_private_but_not_link_local() -> None:
    allow = ("files.internal",)
    assert not host_denial_reason("files.internal", allow)
    assert not address_denial_reason(ip_address("10.0.0.7"), "files.internal", allow)
    assert not address_denial_reason(ip_address("127.0.0.1"), "files.internal", allow)
    assert address_denial_reason(ip_address("10.0.0.7"), "other.example.org", allow)
    assert "link-local" in address_denial_reason(ip_address("169.254.169.254"), "files.internal", allow)


def test_permitted_network_permits_only_itself() -> None:
    allow = ("10.0.0.0/8", "fd00::/8")
    assert not address_denial_reason(ip_address("10.200.0.1"), "any.example.org", allow)
    assert not address_denial_reason(ip_address("fd00::7"), "any.example.org", allow)
    assert not address_denial_reason(ip_address("::ffff:10.0.0.1"), "any.example.org", allow)
    assert address_denial_reason(ip_address("192.168.0.1"), "any.example.org", allow)


# -- parsing of sources --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    ["ftp://a.example/x", "a.example/x", "//a.example/x", "http:///x", "http://u:p@a.example/", "http://a.example@127.0.0.1/",
     "http://a.example\\@127.0.0.1/", "http://a .example/", "http://ä.example/", "http://a.example:99999/", "http://a.example:0/",
     "http://[::1/", "file:relative", "file:/a/../b", "file://other/a", "file:/a?x", "http://fe80::1%25eth0/", "javascript:1",
     "file:/srv/%2e%2e/etc/passwd", "http://a.example\t/", "gopher://a.example/"],
)  # fmt: skip
def test_ambiguous_source_is_refused_with_cure(source: str) -> None:
    with pytest.raises(InvalidSource) as error:
        parse_source(source)
    assert error.value.cure


def test_source_is_parsed_into_scheme_host_port_and_path() -> None:
    assert tuple(parse_source("HTTPS://Files.Example.org:8443/a/b?c=d#e")) == ("https", "files.example.org", 8443, "/a/b?c=d")
    assert tuple(parse_source("http://[2606:4700::1]/")) == ("http", "2606:4700::1", 80, "/")
    assert tuple(parse_source("file:///srv/a%20b")) == ("file", "", 0, "/srv/a b")


# -- permits of policies -------------------------------------------------------------------------------------------------------


def policy(permit: PolicyPermit, **match: object) -> PolicySpec:
    return PolicySpec(rules=(PolicyRule(match=PolicyMatch(**match), permit=permit),))  # type: ignore[arg-type]


def template_with(**more: object) -> Template:
    return Template(command=("true",), **more)  # type: ignore[arg-type]


def template_from(source: str) -> Template:
    return template_with(
        artifacts=(Artifact(source="https://example.org/a", sha256=DIGEST), Artifact(source=source, sha256=DIGEST))
    )


def test_permits_of_matching_rules_are_combined() -> None:
    policies = [
        policy(PolicyPermit(artifact_hosts=("a.internal",)), tenants=("risk",)),
        policy(PolicyPermit(artifact_hosts=("10.0.0.0/8",), host_paths=("/srv/data",)), labels={"app": "x"}),
        policy(PolicyPermit(host_paths=("/",)), tenants=("other",)),
    ]
    assert permissions_of(policies, "risk", {"app": "x"}) == Permissions(("a.internal", "10.0.0.0/8"), ("/srv/data",))
    assert permissions_of(policies, "risk", {}) == Permissions(("a.internal",))
    assert permissions_of([], "risk", {}) == Permissions()


@pytest.mark.parametrize("source", ["http://169.254.169.254/latest", "http://localhost/x", "https://10.0.0.1/x"])
def test_non_public_source_is_refused_with_field_and_cure(source: str) -> None:
    violation = permission_violation(template_from(source), Permissions())
    assert violation is not None
    assert violation.field == "artifacts[1].source"
    assert "permit.artifactHosts" in violation.cure
    assert permission_violation(template_from(source), Permissions(hosts=("169.254.0.0/16", "localhost", "10.0.0.1"))) is None


def test_rootfs_needs_same_permits() -> None:
    violation = permission_violation(template_with(rootfs=Rootfs(source="http://127.0.0.1/r", sha256=DIGEST)), Permissions())
    assert violation is not None
    assert violation.field == "rootfs.source"
    violation = permission_violation(template_with(rootfs=Rootfs(directory="/srv/root")), Permissions(paths=("/srv/roots",)))
    assert violation is not None
    assert violation.field == "rootfs.directory"


@pytest.mark.parametrize("path", ["/", "/srv", "/srv/database", "/etc"])
def test_host_path_needs_permit_for_itself_or_parent(path: str) -> None:
    template = template_with(volumes=(Volume(name="v", path="v", host=HostPath(path=path)),))
    violation = permission_violation(template, Permissions(paths=("/srv/data",)))
    assert violation is not None
    assert (violation.field, "permit.hostPaths" in violation.cure) == ("volumes[0].host.path", True)
    assert permission_violation(template, Permissions(paths=(path,))) is None
    assert permission_violation(template, Permissions(paths=("/",))) is None
