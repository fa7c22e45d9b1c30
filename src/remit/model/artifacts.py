"""Artifacts, root file systems, volumes and artifact source URLs.

Types and URL syntax only. law/fetch_policy.py decides which hosts may be fetched from; agent/ fetches and mounts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_network
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from msgspec import Meta

from remit.model.constraints import ConstraintViolation, ContainedPath, DistinctItems, FieldConstraint, constrained, text_of
from remit.model.manifests.documents import DocumentNode
from remit.model.metadata import END, LINE, Name, Record, share_default
from remit.model.problems import Path, quoted
from remit.model.resources import parse_quantity

DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_HOST: Final = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*")
_SOURCE_FIX: Final = "use https://, http:// or a path on the node, such as file:/srv/app.tar.gz"


class SourceAddress(NamedTuple):
    """A parsed artifact source. An `http` or `https` source has a host and a port; a `file` source has only a path."""

    scheme: str
    host: str
    port: int
    path: str


class InvalidSource(ValueError):
    """The text is not a valid artifact source. `cause` continues a sentence that starts with the source; `cure` is the fix."""

    def __init__(self, cause: str, cure: str = _SOURCE_FIX) -> None:
        super().__init__(cause)
        self.cause, self.cure = cause, cure


def parse_source(text: str) -> SourceAddress:
    """Parses an artifact source; raises `InvalidSource`.

    Admission and fetching must both use this function: two parsers that disagree about the host of a URL would let a source
    pass the check for one host and be fetched from another.
    """
    if any(char.isspace() or char == "\\" or not char.isprintable() for char in text):
        raise InvalidSource("contains whitespace, a backslash or a control character", "write it percent-encoded")
    try:
        parts = urlsplit(text)
        port = parts.port
        host = parts.hostname or ""
    except ValueError:
        raise InvalidSource("is not a valid URL") from None
    if parts.scheme == "file":
        return _file_source(host, unquote(parts.path), bare=not (parts.query or parts.fragment))
    if parts.scheme not in DEFAULT_PORTS:
        raise InvalidSource(f"has the unsupported scheme {parts.scheme}:" if parts.scheme else "has no scheme")
    if not host:
        raise InvalidSource("has no host")
    if "@" in parts.netloc:
        raise InvalidSource(
            "contains a user name or password, which everyone with read access to the workload would see",
            "use a source that needs no credentials",
        )
    if not host.isascii() or "%" in host:
        raise InvalidSource(f"has an invalid host name: {quoted(host)}", "write an international name in its xn-- form")
    if port == 0:
        raise InvalidSource("has port 0, to which nothing can connect", "write the port, or leave it out")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return SourceAddress(parts.scheme, host.lower(), port or DEFAULT_PORTS[parts.scheme], target)


def _file_source(host: str, path: str, *, bare: bool) -> SourceAddress:
    if host not in ("", "localhost") or not bare:
        raise InvalidSource("is a file: source with a host, query or fragment")
    if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise InvalidSource("is a file: source without an absolute path, or with ..")
    return SourceAddress("file", "", 0, path)


class SourceUrl(FieldConstraint):
    """A valid artifact source. An empty text means that there is none."""

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        text = text_of(node)
        if text:
            try:
                parse_source(text)
            except InvalidSource as error:
                yield ConstraintViolation(node.position, path, error.cause, error.cure)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"pattern": "^([hH][tT][tT][pP][sS]?://|[fF][iI][lL][eE]:)"}, {"maxLength": 0}]}


class AbsolutePath(FieldConstraint):
    """An absolute path on the node. An empty text means that there is none."""

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        text = text_of(node)
        if text and (not text.startswith("/") or ".." in text.split("/")):
            yield ConstraintViolation(
                node.position, path, f"{quoted(text)} is not an absolute path", "start it with /, and leave .. out"
            )

    def schema(self) -> dict[str, Any]:
        return {"pattern": "^(/|$)", "not": {"pattern": r"(^|/)\.\.(/|$)"}}


def is_host_or_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        # Some resolvers read abbreviated numbers such as 127.1 as addresses. A numeric last label is accepted only as part of a
        # complete address, which ip_network() has parsed above.
        return bool(_HOST.fullmatch(text)) and not text.rpartition(".")[2].isdigit()
    return True


class HostOrNetwork(FieldConstraint):
    """A host name, compared with the name in a source, or an address or network, compared with the addresses that the name
    resolves to.
    """

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        text = text_of(node)
        if text and not is_host_or_network(text):
            message = f"{quoted(text)} is neither a host nor a network"
            yield ConstraintViolation(
                node.position, path, message, "write a name in lower case, an address, or a network such as 10.0.0.0/8"
            )

    def schema(self) -> dict[str, Any]:
        return {"pattern": "^[0-9a-z.:/-]+$"}


Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}" + END, description="SHA-256 in lower case, as sha256sum prints it")]
Source = Annotated[
    str,
    constrained(
        SourceUrl(),
        pattern=LINE,
        min_length=1,
        max_length=4096,
        description="https://, http:// or file: and a path on the node",
    ),
]
RelativePath = Annotated[str, constrained(ContainedPath(absolute=False), pattern=LINE, min_length=1, max_length=1024)]
HostDirectory = Annotated[
    str, constrained(AbsolutePath(), pattern=LINE, max_length=1024, description="an absolute path of a directory on the node")
]
UserName = Annotated[str, Meta(pattern=LINE, min_length=1, max_length=63, description="a user name on the nodes")]
HostPattern = Annotated[
    str,
    constrained(
        HostOrNetwork(), min_length=1, max_length=253, description="a host name, an address, or a network such as 10.0.0.0/8"
    ),
]


REPLICA_DIRECTORY: Final = "."


class Artifact(Record, frozen=True):
    """A file that the agent fetches to `path` below the replica's directory. With `unpack` it is an archive that is unpacked
    there.
    """

    source: Source
    sha256: Sha256
    path: RelativePath = REPLICA_DIRECTORY
    unpack: bool = False

    def __post_init__(self) -> None:
        share_default(self, "path", REPLICA_DIRECTORY)


class Rootfs(Record, frozen=True):
    """Read-only root file system of a replica: a `directory` on the node, or an archive that is fetched from `source`. It needs
    bubblewrap.
    """

    directory: Annotated[
        str,
        constrained(AbsolutePath(), pattern=LINE, max_length=1024, description="an absolute path of a directory on the node"),
    ] = ""
    source: Annotated[str, constrained(SourceUrl(), pattern=LINE, max_length=4096)] = ""
    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?" + END)] = ""


class Scratch(Record, frozen=True):
    """A temporary directory of one replica, deleted with it. A replica whose directory grows past `size` is stopped."""

    size: Annotated[str | int | float, Meta(extra={"quantity": "memory"}, description="maximum size")] = ""

    @property
    def bytes_max(self) -> int:
        """The size limit in bytes; 0 means no limit."""
        return parse_quantity("memory", self.size) if self.size != "" else 0


class HostPath(Record, frozen=True):
    """A directory on the node. It must be permitted by a policy and by the node's agent (`--host-path`)."""

    path: HostDirectory
    read_only: bool = True


class Volume(Record, frozen=True):
    """A writable directory at `path`: below the replica's directory or, with a rootfs, at any absolute path. Exactly one of
    `scratch` and `host` is set.
    """

    name: Name
    path: Annotated[str, constrained(ContainedPath(absolute=True), pattern=LINE, min_length=1, max_length=1024)]
    scratch: Scratch | None = None
    host: HostPath | None = None


class PolicyPermit(Record, frozen=True):
    """Permissions beyond the default for the matching workloads: artifacts from non-public `artifactHosts` (names and
    networks), and `hostPaths` of nodes, including everything below them. Permissions of several rules add up. Members of a
    tenant may set `user` to one of `users`, or `sandbox: none`, only where a rule permits it.
    """

    artifact_hosts: Annotated[tuple[HostPattern, ...], constrained(DistinctItems(), max_length=256)] = ()
    host_paths: Annotated[tuple[HostDirectory, ...], constrained(DistinctItems(), max_length=256)] = ()
    users: Annotated[tuple[UserName, ...], constrained(DistinctItems(), max_length=256)] = ()
    unsandboxed: Annotated[bool, Meta(description="true: the workloads may run without a sandbox")] = False
