"""Artifacts, root file systems, volumes and artifact source URLs.

The form of addresses only; who may reach what is law/fetch_policy.py's.

Files from elsewhere, a root, and places to write; how they come is agent/'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_network
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from msgspec import Meta

from remit.model.constraints import Breach, Distinct, Inside, Limit, limited, text_of
from remit.model.manifests.documents import Node
from remit.model.metadata import END, LINE, Name, Record
from remit.model.problems import Path, shown
from remit.model.resources import parse_quantity

PORTS: Final = {"http": 80, "https": 443}
_HOST: Final = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*")
_HOW: Final = "write https://, http:// or file: and a path of the node, such as file:/srv/artifacts/app.tar.gz"


class Address(NamedTuple):
    """A source, read: an `http` or `https` one has a host and a port, a `file` one a path alone."""

    scheme: str
    host: str
    port: int
    path: str


class Unreadable(ValueError):
    """It is no source. `cure` says what to write."""

    def __init__(self, cause: str, cure: str = _HOW) -> None:
        super().__init__(cause)
        self.cause, self.cure = cause, cure


def read_source(text: str) -> Address:
    """Raises `Unreadable`. One reader for all: what one reads as another host than the next is how checks are passed by."""
    if any(letter.isspace() or letter == "\\" or not letter.isprintable() for letter in text):
        raise Unreadable("has a blank, a backslash or an unprintable letter in it", "write it percent-encoded")
    try:
        parts = urlsplit(text)
        port = parts.port
        host = parts.hostname or ""
    except ValueError:
        raise Unreadable("is no address that can be read") from None
    if parts.scheme == "file":
        return _of_the_node(host, unquote(parts.path), bare=not (parts.query or parts.fragment))
    if parts.scheme not in PORTS:
        raise Unreadable(f"{parts.scheme}: is not a way to fetch a file" if parts.scheme else "does not say how to fetch it")
    if not host:
        raise Unreadable("names no host")
    if "@" in parts.netloc:
        raise Unreadable("has a user or a password in it, which everybody may read", "fetch it from where none is needed")
    if not host.isascii() or "%" in host:
        raise Unreadable(f"{shown(host)} is no host name", "write an international name in its xn-- form")
    if port == 0:
        raise Unreadable("nobody listens on port 0", "write the port, or leave it out")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Address(parts.scheme, host.lower(), port or PORTS[parts.scheme], target)


def _of_the_node(host: str, path: str, *, bare: bool) -> Address:
    if host not in ("", "localhost") or not bare:
        raise Unreadable("file: names a path of the node and nothing else")
    if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise Unreadable("file: needs a whole path, without ..")
    return Address("file", "", 0, path)


class SourceLimit(Limit):
    """A source that can be read. Empty: none."""

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        text = text_of(node)
        if text:
            try:
                read_source(text)
            except Unreadable as error:
                yield Breach(node.place, path, error.cause, error.cure)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"pattern": "^([hH][tT][tT][pP][sS]?://|[fF][iI][lL][eE]:)"}, {"maxLength": 0}]}


class WholePath(Limit):
    """A path of the node, from its root. Empty: none."""

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        text = text_of(node)
        if text and (not text.startswith("/") or ".." in text.split("/")):
            yield Breach(node.place, path, f"{shown(text)} is no whole path", "begin it with /, and leave .. out")

    def schema(self) -> dict[str, Any]:
        return {"pattern": "^(/|$)", "not": {"pattern": r"(^|/)\.\.(/|$)"}}


def is_host_or_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        # What looks like a number is read as an address by some: it is one, in full, or nothing.
        return bool(_HOST.fullmatch(text)) and not text.rpartition(".")[2].isdigit()
    return True


class HostOrNetwork(Limit):
    """A name that is looked up, or a network whose addresses are compared with what it comes to."""

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        text = text_of(node)
        if text and not is_host_or_network(text):
            message = f"{shown(text)} is neither a host nor a network"
            yield Breach(node.place, path, message, "write a name in lower case, an address, or a network such as 10.0.0.0/8")

    def schema(self) -> dict[str, Any]:
        return {"pattern": "^[0-9a-z.:/-]+$"}


Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}" + END, description="SHA-256 in lower case, as sha256sum prints it")]
Source = Annotated[
    str,
    limited(
        SourceLimit(),
        pattern=LINE,
        min_length=1,
        max_length=4096,
        description="https://, http:// or file: and a path of the node",
    ),
]
Below = Annotated[str, limited(Inside(absolute=False), pattern=LINE, min_length=1, max_length=1024)]
HostDirectory = Annotated[
    str, limited(WholePath(), pattern=LINE, max_length=1024, description="a directory of the node, from its root")
]
UserName = Annotated[str, Meta(pattern=LINE, min_length=1, max_length=63, description="a user of the nodes")]
Reachable = Annotated[
    str,
    limited(
        HostOrNetwork(), min_length=1, max_length=253, description="a host name, an address, or a network such as 10.0.0.0/8"
    ),
]


class Artifact(Record, frozen=True):
    """A file from elsewhere, at `path` below the replica's directory; an archive with `unpack` is unpacked there."""

    source: Source
    sha256: Digest
    path: Below = "."
    unpack: bool = False


class Rootfs(Record, frozen=True):
    """What the work sees as /, to read: a `directory` of the node, or an archive from a `source`. It needs bubblewrap."""

    directory: Annotated[
        str, limited(WholePath(), pattern=LINE, max_length=1024, description="a directory of the node, from its root")
    ] = ""
    source: Annotated[str, limited(SourceLimit(), pattern=LINE, max_length=4096)] = ""
    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?" + END)] = ""


class Scratch(Record, frozen=True):
    """A directory of the replica's own, which goes with it. One that grows past its `size` ends the work."""

    size: Annotated[str | int | float, Meta(extra={"quantity": "memory"}, description="how much it may hold")] = ""

    @property
    def bytes_max(self) -> int:
        """0: as much as there is room."""
        return parse_quantity("memory", self.size) if self.size != "" else 0


class HostPath(Record, frozen=True):
    """A directory of the node, where a policy permits it and the node lends it."""

    path: HostDirectory
    read_only: bool = True


class Volume(Record, frozen=True):
    """A place to keep files at `path`: below the replica's directory, or anywhere below a root of its own. One of `scratch` and
    `host`.
    """

    name: Name
    path: Annotated[str, limited(Inside(absolute=True), pattern=LINE, min_length=1, max_length=1024)]
    scratch: Scratch | None = None
    host: HostPath | None = None


class PolicyPermit(Record, frozen=True):
    """What they may have that nobody has otherwise: files from `artifactHosts` (names and networks) that are not public, and
    `hostPaths` of nodes with all that is below them. What any rule permits is permitted. People of a tenant may say as whom of
    the nodes' `users` their work runs, or `sandbox: none`, only where that is permitted.
    """

    artifact_hosts: Annotated[tuple[Reachable, ...], limited(Distinct(), max_length=256)] = ()
    host_paths: Annotated[tuple[HostDirectory, ...], limited(Distinct(), max_length=256)] = ()
    users: Annotated[tuple[UserName, ...], limited(Distinct(), max_length=256)] = ()
    unsandboxed: Annotated[bool, Meta(description="true: their work may do without a sandbox")] = False
