"""What of the machines and their networks may work ask for? Public hosts, and what the policies in force permit; no I/O here.

The node has its own word in it (`remit agent --artifact-allow`, `--host-path`): a policy says who may, a machine what it lends,
and both must agree. Rules that `allow` narrow each other; what is permitted adds up, since without a rule nothing is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from remit.law.asks import speaks_of
from remit.law.reaching import why_no_host
from remit.model.kinds import PolicySpec, Template
from remit.model.sources import Unreadable, read_source


class Unpermitted(NamedTuple):
    """Which field of a template asks for it, why it may not, and what to do."""

    field: str
    why: str
    cure: str


class Permitted(NamedTuple):
    hosts: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    unsandboxed: bool = False


def permitted(policies: Iterable[PolicySpec], tenant: str, labels: Mapping[str, str]) -> Permitted:
    rules = [rule.permit for policy in policies for rule in policy.rules if speaks_of(rule.match, tenant, labels)]
    return Permitted(
        tuple(dict.fromkeys(host for one in rules for host in one.artifact_hosts)),
        tuple(dict.fromkeys(path for one in rules for path in one.host_paths)),
        tuple(dict.fromkeys(user for one in rules for user in one.users)),
        any(one.unsandboxed for one in rules),
    )


def unpermitted(template: Template, permit: Permitted) -> Unpermitted | None:
    """The first thing that a template asks for and may not have."""
    for field, source in _sources(template):
        why = _why_no_source(source, permit.hosts)
        if why:
            cure = "use a public host, or let a policy permit it in permit.artifactHosts"
            return Unpermitted(field, f"nothing is fetched from there: {why}", cure)
    for field, path in _host_paths(template):
        if not _is_below(path, permit.paths):
            cure = "use scratch, or let a policy permit it in permit.hostPaths"
            return Unpermitted(field, f"no policy in force permits {path} of the nodes", cure)
    return None


def loosens(template: Template) -> bool:
    """Does it say for itself as whom it runs, or that nothing holds it?"""
    return bool(template.user) or template.sandbox == "none"


def unheld(template: Template, permit: Permitted) -> Unpermitted | None:
    """What somebody of a tenant may not say of how its work is held: an agent that is root would make it root, or anybody
    else whose files are on the node.
    """
    if template.sandbox == "none" and not permit.unsandboxed:
        cure = "leave it out, or let a policy permit it in permit.unsandboxed"
        return Unpermitted("sandbox", "no policy in force permits work of this tenant without a sandbox", cure)
    if template.user and template.user not in permit.users:
        cure = "leave it out, or let a policy permit it in permit.users"
        return Unpermitted("user", f"no policy in force permits work of this tenant to run as {template.user}", cure)
    return None


def _sources(template: Template) -> Iterator[tuple[str, str]]:
    for number, artifact in enumerate(template.artifacts):
        yield f"artifacts[{number}].source", artifact.source
    if template.rootfs is not None and template.rootfs.source:
        yield "rootfs.source", template.rootfs.source


def _host_paths(template: Template) -> Iterator[tuple[str, str]]:
    for number, volume in enumerate(template.volumes):
        if volume.host is not None:
            yield f"volumes[{number}].host.path", volume.host.path
    if template.rootfs is not None and template.rootfs.directory:
        yield "rootfs.directory", template.rootfs.directory


def _why_no_source(source: str, hosts: Sequence[str]) -> str:
    try:
        address = read_source(source)
    except Unreadable as error:
        return error.cause
    return "" if address.scheme == "file" else why_no_host(address.host, hosts)


def _is_below(path: str, permitted: Sequence[str]) -> bool:
    steps = PurePosixPath(path)
    places = [PurePosixPath(one) for one in permitted]
    return ".." not in steps.parts and any(place == steps or place in steps.parents for place in places)
