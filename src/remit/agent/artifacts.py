"""How do the files and the root that work asks for get to it? Two steps of its preparing; what is kept of them: caching.py."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote, urlsplit

from remit.agent.caching import Shelf, Wanted
from remit.agent.copies import Copy
from remit.agent.preparing import NotPrepared, Subject, Tell
from remit.agent.work import NOTHING, Prepared
from remit.model.kinds import Template
from remit.model.software import Artifact
from remit.world.carriage import NotUnpacked
from remit.world.promises import World

_BWRAP: Final = "install bubblewrap on the node (apt install bubblewrap), or keep this work to nodes that have it"


class Artifacts:
    """Satisfies `preparing.Step`. Each is copied to its place: what the work makes of its copy is nobody else's."""

    def __init__(self, world: World, shelf: Shelf) -> None:
        self._world, self._shelf = world, shelf

    def wanted(self, template: Template, /) -> bool:
        return bool(template.artifacts)

    async def prepare(self, subject: Subject, room: Path, tell: Tell, /) -> Prepared:
        if subject.fresh:
            for number, artifact in enumerate(subject.template.artifacts):
                try:
                    await self._bring(subject, artifact, room, tell)
                except NotUnpacked as error:
                    cause = f"template.artifacts[{number}] cannot be put in its place: {error.cause}"
                    raise NotPrepared(cause, error.cure) from error
        return NOTHING

    def forget(self, copy: Copy, /) -> None:
        pass

    def forget_all_but(self, known: Collection[str], /) -> None:
        pass

    async def _bring(self, subject: Subject, artifact: Artifact, room: Path, tell: Tell) -> None:
        user, carrier = subject.user, self._world.carrier
        wanted = Wanted(subject.replica.metadata.tenant, artifact.source, artifact.sha256)
        async with self._shelf.file(wanted, tell) as file:
            if artifact.unpack:
                tell(f"unpacking {artifact.source[:120]}")
                await carrier.unpack(file, room / artifact.path, below=room, user=user)
            else:
                await carrier.place(file, room / _file_path(artifact), below=room, user=user)


def _file_path(artifact: Artifact) -> PurePosixPath:
    """A file that is not given a path of its own is called as its source calls it."""
    path = PurePosixPath(artifact.path)
    if path.parts:
        return path
    name = PurePosixPath(unquote(urlsplit(artifact.source).path)).name
    return PurePosixPath(name if name not in ("", "..") and "\0" not in name else "artifact")


class Roots:
    """Satisfies `preparing.Step`. A root is unpacked once, and shown to read: all copies of one tenant have the same."""

    def __init__(self, world: World, shelf: Shelf, lent: tuple[Path, ...]) -> None:
        self._world, self._shelf, self._lent = world, shelf, lent
        self._pins: dict[Copy, Callable[[], None]] = {}

    def wanted(self, template: Template, /) -> bool:
        return template.rootfs is not None

    async def prepare(self, subject: Subject, room: Path, tell: Tell, /) -> Prepared:
        root = subject.template.rootfs
        if root is None:
            return NOTHING
        if not self._world.runner.confinement().sandbox:
            raise NotPrepared("a root of its own needs bubblewrap, which this node does not have", _BWRAP)
        if root.directory:
            found = await self._world.carrier.stands(Path(root.directory), self._lent)
            if found is None:
                cure = "start its agent with --host-path and that directory, or use one that is lent"
                raise NotPrepared(f"{root.directory} is no directory that this node lends", cure)
            return Prepared(root=found)
        wanted = Wanted(subject.replica.metadata.tenant, root.source, root.sha256)
        if subject.copy not in self._pins:
            self._pins[subject.copy] = self._shelf.pin(wanted)
        try:
            return Prepared(root=await self._shelf.tree(wanted, tell))
        except NotUnpacked as error:
            raise NotPrepared(f"template.rootfs cannot be unpacked: {error.cause}", error.cure) from error

    def forget(self, copy: Copy, /) -> None:
        let_go = self._pins.pop(copy, None)
        if let_go is not None:
            let_go()

    def forget_all_but(self, known: Collection[str], /) -> None:
        pass
