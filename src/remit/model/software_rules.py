"""Which of the things that work asks for beside its command are at odds? Between values only; see rules.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from remit.model.documents import Node
from remit.model.limits import Breach, text_of
from remit.model.problems import Path, shown

_OWN = ".volumes"


def software_breaches(template: Node | None, path: Path) -> Iterator[Breach]:
    if template is None or template.form != "mapping":
        return
    root = template.get("rootfs")
    if root is not None and root.form == "mapping":
        yield from _root(template, root, (*path, "rootfs"))
    yield from _volumes(template, path, rooted=root is not None and root.form != "null")
    yield from _places(template, path)


def _root(template: Node, root: Node, path: Path) -> Iterator[Breach]:
    directory, source, digest = (text_of(root.get(name)) or "" for name in ("directory", "source", "sha256"))
    if bool(directory) == bool(source):
        message = "directory and source exclude each other" if directory else "asks for nothing"
        yield Breach(root.place, path, message, "write directory: and a path of the nodes, or source: and sha256:")
    elif source and not digest:
        yield Breach(root.place, (*path, "sha256"), "is missing: what is fetched is known by it", "add the output of sha256sum")
    elif directory and digest:
        yield Breach(root.place, (*path, "sha256"), "a directory of the node has no digest", "remove it")
    sandbox = template.get("sandbox")
    if sandbox is not None and sandbox.scalar == "none":
        yield Breach(sandbox.place, (*path[:-1], "sandbox"), "a root of its own is a sandbox", "remove it, or rootfs")


def _volumes(template: Node, path: Path, *, rooted: bool) -> Iterator[Breach]:
    volumes = template.get("volumes")
    for number, volume in enumerate(volumes.items if volumes is not None else ()):
        here: Path = (*path, "volumes", number)
        if volume.form != "mapping":
            continue
        sorts = [name for name in ("scratch", "host") if name in volume.fields and volume.fields[name].value.form != "null"]
        if len(sorts) != 1:
            message = "scratch and host exclude each other" if sorts else "is neither scratch nor host"
            yield Breach(volume.place, here, message, "write scratch: {}, or host: {path: /srv/data}")
        at = text_of(volume.get("path"))
        place = volume.get("path")
        if at is None or place is None:
            continue
        if at.startswith("/") and not rooted:
            cure = "write a path below the replica's directory, or give it a rootfs"
            yield Breach(place.place, (*here, "path"), f"{shown(at)} is the machine's own without a rootfs", cure)
        if not PurePosixPath(at).parts or PurePosixPath(at).parts in (("/",), (_OWN,)):
            yield Breach(place.place, (*here, "path"), f"{shown(at)} is taken", "write a path below it, such as data")


def _places(template: Node, path: Path) -> Iterator[Breach]:
    """Two that want the same place: archives may share a directory, the rest may not."""
    seen: dict[tuple[str, ...], str] = {}
    for name in ("artifacts", "volumes"):
        listed = template.get(name)
        for number, one in enumerate(listed.items if listed is not None else ()):
            at, unpack = text_of(one.get("path")), one.get("unpack")
            if at is None or (unpack is not None and unpack.scalar is True):
                continue
            steps = PurePosixPath(at).parts
            if steps and steps in seen:
                where: Path = (*path, name, number, "path")
                yield Breach(one.place, where, f"{shown(at)} is also the place of {seen[steps]}", "give each a path of its own")
            seen.setdefault(steps, f"{name}[{number}]")
