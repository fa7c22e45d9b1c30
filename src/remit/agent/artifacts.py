"""Artifact and rootfs preparation, with a per-tenant cache keyed by digest.

By digest and tenant, within bounds; who needs them is not known here.

A file is fetched once, however many copies want it at once, and is there whole or not at all. A tenant finds what it fetched
itself and nothing else: that somebody knows a digest does not say that it may have the file. What was used last goes last, and
what is in use stays.

Two steps of its preparing; what is kept of them: caching.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from remit.agent.attempts import Copy
from remit.agent.preparation import NotPrepared, Subject, Tell
from remit.agent.run_spec import NOTHING, Prepared
from remit.agent.setup import FILES, TREES
from remit.model.artifacts import Artifact
from remit.model.kinds import Template
from remit.world.files.artifacts import FetchBounds, NotFetched, NotUnpacked, Reach, UnpackBounds
from remit.world.interfaces import DiskError, World

BYTES_MAX: Final = 10 << 30
TRIES: Final = 4
PAUSE_MS: Final = 1_000
INDEX: Final = "index"
COMING: Final = ".coming"
"""What is not whole yet has this after its name."""
ROOT: Final = UnpackBounds(as_root=True)


class Wanted(NamedTuple):
    """A file from elsewhere, and whose."""

    tenant: str
    source: str
    sha256: str

    @property
    def name(self) -> str:
        return f"{self.sha256}.{self.tenant}"


class Entry(msgspec.Struct):
    """What is known of a file or tree that is kept. `used` counts up over all uses: the lowest was used longest ago."""

    bytes: int
    stamp: str = ""
    used: int = 0


class Shelf:
    """One agent's, in `root`. `bytes_max` bounds all that is kept, and each file of it."""

    def __init__(self, world: World, root: Path, reach: Reach, bytes_max: int = BYTES_MAX) -> None:
        self._world, self._root, self._reach, self._bytes_max = world, root, reach, bytes_max
        self._entries: dict[str, Entry] | None = None
        self._turns: dict[str, asyncio.Lock] = {}
        self._pins: dict[str, int] = {}
        self._uses = 0
        self._changing = asyncio.Lock()
        """Held by whoever changes what is kept."""

    @asynccontextmanager
    async def file(self, wanted: Wanted, tell: Tell) -> AsyncGenerator[Path, None]:
        """The file, which stays as long as this lasts. Raises `NotFetched` and `NotPrepared`."""
        name = f"{FILES}/{wanted.name}"
        with self._pinned(name):
            async with self._turn(name, tell):
                if not await self._is_sound(name, wanted.sha256):
                    await self._fetch(name, wanted, tell)
                await self._use(name)
            yield self._root / name

    async def tree(self, wanted: Wanted, tell: Tell) -> Path:
        """What is in an archive, as somebody's root. Whoever holds it pins it."""
        name = f"{TREES}/{wanted.name}"
        with self._pinned(name):
            async with self._turn(name, tell):
                known = await self._known()
                if name not in known or not await self._world.offload(partial(self._world.disk.exists, self._root / name)):
                    await self._unpack(name, wanted, tell)
                await self._use(name)
        return self._root / name

    def pin(self, wanted: Wanted) -> Callable[[], None]:
        """Keep its tree until what is answered is called."""
        pinned = self._pinned(f"{TREES}/{wanted.name}")
        pinned.__enter__()
        return lambda: pinned.__exit__(None, None, None)

    # -- getting it ------------------------------------------------------------------------------------------------------------

    async def _fetch(self, name: str, wanted: Wanted, tell: Tell) -> None:
        to, coming = self._root / name, self._root / f"{name}{COMING}"
        bounds = FetchBounds()._replace(bytes_max=min(self._bytes_max, FetchBounds().bytes_max))
        until_ms = self._world.clock.now_ms() + bounds.total_ms
        shown = wanted.source[:120]

        def told(come: int, total: int) -> None:
            of = f" of {_mib(total)}" if total else ""
            tell(f"fetching {_mib(come)}{of} MiB of {shown}")

        tell(f"fetching {shown}")
        for number in range(1, TRIES + 1):
            try:
                left = bounds._replace(total_ms=max(1, until_ms - self._world.clock.now_ms()))
                size = await self._world.carrier.fetch(
                    wanted.source, coming, sha256=wanted.sha256, reach=self._reach, bounds=left, tell=told
                )
                break
            except NotFetched as error:
                pause_ms = PAUSE_MS << (number - 1)
                if not error.again or number == TRIES or self._world.clock.now_ms() + pause_ms >= until_ms:
                    raise NotPrepared(f"{shown} was not fetched: {error.cause}", error.cure) from error
                tell(f"fetching {shown} failed ({error.cause}); it is tried again")
                await self._world.clock.sleep_ms(pause_ms)
        await self._keep(name, coming, to, Entry(size))

    async def _unpack(self, name: str, wanted: Wanted, tell: Tell) -> None:
        coming = self._root / f"{name}{COMING}"
        async with self.file(wanted, tell) as archive:
            tell(f"unpacking {wanted.source[:120]}")
            await self._world.offload(partial(self._world.disk.remove_tree, coming))
            try:
                unpacked = await self._world.carrier.unpack(archive, coming, below=coming, bounds=ROOT)
            except BaseException:
                await self._world.offload(partial(self._world.disk.remove_tree, coming))
                raise
            await self._keep(name, coming, self._root / name, Entry(unpacked.bytes))

    async def _keep(self, name: str, coming: Path, to: Path, entry: Entry) -> None:
        """It has come whole: it gets its name, and what was used longest ago makes room for it."""
        known = await self._known()
        async with self._changing:
            await self._remove(to)
            if not await self._make_room(known, entry.bytes):
                await self._remove(coming)
                cure = "give the agent more by --artifact-cache, or ask for less at once"
                raise NotPrepared(f"{_mib(entry.bytes)} MiB more do not fit in its cache of {_mib(self._bytes_max)} MiB", cure)
            await self._world.carrier.publish(coming, to)
            entry.stamp = await self._world.carrier.stamp(to)
            known[name] = entry

    async def _is_sound(self, name: str, sha256: str) -> bool:
        """Is it there, as it came? A look at its stamp tells; one that was moved or restored is read again."""
        known, path = await self._known(), self._root / name
        entry, stamp = known.get(name), await self._world.carrier.stamp(path)
        if entry is None or not stamp:
            return False
        if stamp == entry.stamp:
            return True
        with suppress(DiskError):
            if await self._world.carrier.digest(path) == sha256:
                entry.stamp = stamp
                return True
        return False

    # -- what is kept ----------------------------------------------------------------------------------------------------------

    async def _make_room(self, known: dict[str, Entry], wanted: int) -> bool:
        total = sum(one.bytes for one in known.values())
        for name in sorted(known, key=lambda name: known[name].used):
            if total + wanted <= self._bytes_max:
                break
            if name not in self._pins:
                total -= known.pop(name).bytes
                await self._remove(self._root / name)
        return total + wanted <= self._bytes_max

    async def _remove(self, path: Path) -> None:
        """A file or a tree."""
        await self._world.offload(partial(self._world.disk.remove_tree, path))
        with suppress(DiskError):
            await self._world.offload(partial(self._world.disk.remove, path))

    async def _use(self, name: str) -> None:
        known = await self._known()
        self._uses += 1
        known[name].used = self._uses
        async with self._changing:
            with suppress(DiskError):  # it is only lost, and fetched again
                written = msgspec.json.encode(known)
                await self._world.offload(partial(self._world.disk.write_atomically, self._root / INDEX, written))

    async def _known(self) -> dict[str, Entry]:
        if self._entries is None:
            async with self._changing:
                if self._entries is None:  # else another was quicker
                    entries = await self._world.offload(self._read)
                    self._uses = max((one.used for one in entries.values()), default=0)
                    self._entries = entries
        return self._entries

    def _read(self) -> dict[str, Entry]:
        """What the index names and is there. What it does not name was not whole, or nobody knows whose it is."""
        disk, found = self._world.disk, {}
        with suppress(DiskError, msgspec.DecodeError):
            found = msgspec.json.decode(disk.read(self._root / INDEX), type=dict[str, Entry])
        kept: dict[str, Entry] = {}
        for sort in (FILES, TREES):
            disk.make_directory(self._root / sort, durably=False)
            for name in disk.list(self._root / sort):
                place = f"{sort}/{name}"
                if place in found:
                    kept[place] = found[place]
                else:
                    disk.remove_tree(self._root / place)
                    with suppress(DiskError):
                        disk.remove(self._root / place)
        return kept

    # -- several at once -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _turn(self, name: str, tell: Tell) -> AsyncGenerator[None, None]:
        lock = self._turns.setdefault(name, asyncio.Lock())
        if lock.locked():
            tell("waits for the same file, which another replica fetches")
        async with lock:
            yield
        if name not in self._pins or self._pins[name] <= 1:
            self._turns.pop(name, None)

    def _pinned(self, name: str) -> _Pinned:
        return _Pinned(self._pins, name)


class _Pinned:
    """What is pinned is not removed to make room."""

    def __init__(self, pins: dict[str, int], name: str) -> None:
        self._pins, self._name = pins, name

    def __enter__(self) -> None:
        self._pins[self._name] = self._pins.get(self._name, 0) + 1

    def __exit__(self, *_: object) -> None:
        self._pins[self._name] -= 1
        if not self._pins[self._name]:
            del self._pins[self._name]


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f}" if size >= 10 << 20 else f"{size / (1 << 20):.1f}"


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
