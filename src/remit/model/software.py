"""What does work need beside its command? Files from elsewhere, a root, and places to write; how they come is agent/'s."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from remit.model.fields import END, LINE, Name, Record
from remit.model.limits import Distinct, Inside, limited
from remit.model.quantity import parse_quantity
from remit.model.sources import HostOrNetwork, SourceLimit, WholePath

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
