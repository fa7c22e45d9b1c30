"""Artifact and rootfs preparation, with a per-tenant cache keyed by digest.

A file is fetched once even if several attempts need it at the same time, and appears in the cache only when complete.
Entries are separate per tenant: knowing a digest does not entitle a tenant to a file that another tenant fetched. Least
recently used entries are evicted first; entries in use are pinned.
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

from remit.agent.attempts import AttemptId
from remit.agent.preparation import NotPrepared, PreparationContext, OnProgress
from remit.agent.run_spec import NO_INPUTS, PreparedInputs
from remit.agent.setup import CACHE_FILES, CACHE_TREES
from remit.model.artifacts import Artifact
from remit.model.kinds import Template
from remit.world.files.artifacts import FetchLimits, NotFetched, NotUnpacked, FetchPermissions, UnpackLimits
from remit.world.interfaces import DiskError, World

CACHE_BYTES_MAX: Final = 10 << 30
FETCH_ATTEMPTS: Final = 4
FETCH_BACKOFF_MS: Final = 1_000
INDEX: Final = "index"
PARTIAL_SUFFIX: Final = ".coming"
"""Suffix of entries that are not complete yet."""
ROOTFS_BOUNDS: Final = UnpackLimits(as_root=True)


class ArtifactRef(NamedTuple):
    """A file to fetch, and the tenant it is fetched for."""

    tenant: str
    source: str
    sha256: str

    @property
    def name(self) -> str:
        return f"{self.sha256}.{self.tenant}"


class CacheEntry(msgspec.Struct):
    """Index record of a cached file or tree. `used` is a counter over all uses: the lowest value is the least recently used."""

    bytes: int
    stamp: str = ""
    used: int = 0


class ArtifactCache:
    """Artifact cache of one agent, in `root`. `bytes_max` bounds the whole cache and each file."""

    def __init__(self, world: World, root: Path, permissions: FetchPermissions, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._world, self._root, self._permissions, self._bytes_max = world, root, permissions, bytes_max
        self._entries: dict[str, CacheEntry] | None = None
        self._locks: dict[str, asyncio.Lock] = {}
        self._pins: dict[str, int] = {}
        self._uses = 0
        self._index_lock = asyncio.Lock()
        """Held while entries are added, removed or written to the index."""

    @asynccontextmanager
    async def file(self, wanted: ArtifactRef, tell: OnProgress) -> AsyncGenerator[Path, None]:
        """Yield the path of the file, which stays in the cache within this context. Raises `NotFetched` and `NotPrepared`."""
        name = f"{CACHE_FILES}/{wanted.name}"
        with self._pinned(name):
            async with self._locked(name, tell):
                if not await self._is_intact(name, wanted.sha256):
                    await self._fetch(name, wanted, tell)
                await self._mark_used(name)
            yield self._root / name

    async def tree(self, wanted: ArtifactRef, tell: OnProgress) -> Path:
        """Return the directory of an unpacked archive, used as a root file system. The caller pins it."""
        name = f"{CACHE_TREES}/{wanted.name}"
        with self._pinned(name):
            async with self._locked(name, tell):
                known = await self._load_entries()
                if name not in known or not await self._world.offload(partial(self._world.disk.exists, self._root / name)):
                    await self._unpack(name, wanted, tell)
                await self._mark_used(name)
        return self._root / name

    def pin(self, wanted: ArtifactRef) -> Callable[[], None]:
        """Keep the tree of `wanted` in the cache until the returned function is called."""
        pinned = self._pinned(f"{CACHE_TREES}/{wanted.name}")
        pinned.__enter__()
        return lambda: pinned.__exit__(None, None, None)

    # -- fetching and unpacking
    # ---------------------------------------------------------------------------------------------------

    async def _fetch(self, name: str, wanted: ArtifactRef, tell: OnProgress) -> None:
        to, coming = self._root / name, self._root / f"{name}{PARTIAL_SUFFIX}"
        bounds = FetchLimits()._replace(bytes_max=min(self._bytes_max, FetchLimits().bytes_max))
        until_ms = self._world.clock.now_ms() + bounds.total_ms
        shown = wanted.source[:120]

        def told(come: int, total: int) -> None:
            of = f" of {_mib(total)}" if total else ""
            tell(f"fetching {_mib(come)}{of} MiB of {shown}")

        tell(f"fetching {shown}")
        for number in range(1, FETCH_ATTEMPTS + 1):
            try:
                left = bounds._replace(total_ms=max(1, until_ms - self._world.clock.now_ms()))
                size = await self._world.artifacts.fetch(
                    wanted.source, coming, sha256=wanted.sha256, permissions=self._permissions, limits=left, on_progress=told
                )
                break
            except NotFetched as error:
                pause_ms = FETCH_BACKOFF_MS << (number - 1)
                if not error.retryable or number == FETCH_ATTEMPTS or self._world.clock.now_ms() + pause_ms >= until_ms:
                    raise NotPrepared(f"{shown} was not fetched: {error.cause}", error.cure) from error
                tell(f"retrying to fetch {shown} after a failure ({error.cause})")
                await self._world.clock.sleep_ms(pause_ms)
        await self._publish(name, coming, to, CacheEntry(size))

    async def _unpack(self, name: str, wanted: ArtifactRef, tell: OnProgress) -> None:
        coming = self._root / f"{name}{PARTIAL_SUFFIX}"
        async with self.file(wanted, tell) as archive:
            tell(f"unpacking {wanted.source[:120]}")
            await self._world.offload(partial(self._world.disk.remove_tree, coming))
            try:
                unpacked = await self._world.artifacts.unpack(archive, coming, below=coming, limits=ROOTFS_BOUNDS)
            except BaseException:
                await self._world.offload(partial(self._world.disk.remove_tree, coming))
                raise
            await self._publish(name, coming, self._root / name, CacheEntry(unpacked.bytes))

    async def _publish(self, name: str, coming: Path, to: Path, entry: CacheEntry) -> None:
        """Move a complete entry to its final name, after evicting least recently used entries to make room."""
        known = await self._load_entries()
        async with self._index_lock:
            await self._remove(to)
            if not await self._evict_for(known, entry.bytes):
                await self._remove(coming)
                cause = f"{_mib(entry.bytes)} MiB do not fit in the artifact cache of {_mib(self._bytes_max)} MiB"
                cure = "raise the agent's --artifact-cache, or use fewer or smaller artifacts at the same time"
                raise NotPrepared(cause, cure)
            await self._world.artifacts.publish(coming, to)
            entry.stamp = await self._world.artifacts.change_stamp(to)
            known[name] = entry

    async def _is_intact(self, name: str, sha256: str) -> bool:
        """Return whether the cached file is unchanged. An unchanged stamp is proof; otherwise (moved or restored files) it is
        hashed.
        """
        known, path = await self._load_entries(), self._root / name
        entry, stamp = known.get(name), await self._world.artifacts.change_stamp(path)
        if entry is None or not stamp:
            return False
        if stamp == entry.stamp:
            return True
        with suppress(DiskError):
            if await self._world.artifacts.digest(path) == sha256:
                entry.stamp = stamp
                return True
        return False

    # -- index and eviction
    # -------------------------------------------------------------------------------------------------------

    async def _evict_for(self, known: dict[str, CacheEntry], wanted: int) -> bool:
        total = sum(one.bytes for one in known.values())
        for name in sorted(known, key=lambda name: known[name].used):
            if total + wanted <= self._bytes_max:
                break
            if name not in self._pins:
                total -= known.pop(name).bytes
                await self._remove(self._root / name)
        return total + wanted <= self._bytes_max

    async def _remove(self, path: Path) -> None:
        """Remove a file or a tree."""
        await self._world.offload(partial(self._world.disk.remove_tree, path))
        with suppress(DiskError):
            await self._world.offload(partial(self._world.disk.remove, path))

    async def _mark_used(self, name: str) -> None:
        known = await self._load_entries()
        self._uses += 1
        known[name].used = self._uses
        async with self._index_lock:
            with suppress(DiskError):  # a lost index only causes files to be fetched again
                written = msgspec.json.encode(known)
                await self._world.offload(partial(self._world.disk.write_atomically, self._root / INDEX, written))

    async def _load_entries(self) -> dict[str, CacheEntry]:
        if self._entries is None:
            async with self._index_lock:
                if self._entries is None:  # another task may have read it meanwhile
                    entries = await self._world.offload(self._read_index)
                    self._uses = max((one.used for one in entries.values()), default=0)
                    self._entries = entries
        return self._entries

    def _read_index(self) -> dict[str, CacheEntry]:
        """Read the index and remove all entries it does not name: they are incomplete, or of an unknown tenant."""
        disk, found = self._world.disk, {}
        with suppress(DiskError, msgspec.DecodeError):
            found = msgspec.json.decode(disk.read(self._root / INDEX), type=dict[str, CacheEntry])
        kept: dict[str, CacheEntry] = {}
        for sort in (CACHE_FILES, CACHE_TREES):
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

    # -- locks and pins
    # -----------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _locked(self, name: str, tell: OnProgress) -> AsyncGenerator[None, None]:
        lock = self._locks.setdefault(name, asyncio.Lock())
        if lock.locked():
            tell("waiting for another replica that is fetching the same file")
        async with lock:
            yield
        if name not in self._pins or self._pins[name] <= 1:
            self._locks.pop(name, None)

    def _pinned(self, name: str) -> _Pin:
        return _Pin(self._pins, name)


class _Pin:
    """Pins a cache entry: it is not evicted while the context is open."""

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


_INSTALL_BWRAP: Final = "install bubblewrap on the node (apt install bubblewrap), or restrict the workload to nodes that have it"


class ArtifactStep:
    """Implements `preparation.Step`. Each artifact is copied from the cache, so that a process can modify its own copy only."""

    def __init__(self, world: World, cache: ArtifactCache) -> None:
        self._world, self._cache = world, cache

    def applies_to(self, template: Template, /) -> bool:
        return bool(template.artifacts)

    async def prepare(self, subject: PreparationContext, room: Path, tell: OnProgress, /) -> PreparedInputs:
        if subject.is_new:
            for number, artifact in enumerate(subject.template.artifacts):
                try:
                    await self._place(subject, artifact, room, tell)
                except NotUnpacked as error:
                    cause = f"template.artifacts[{number}] cannot be placed: {error.cause}"
                    raise NotPrepared(cause, error.cure) from error
        return NO_INPUTS

    def forget(self, copy: AttemptId, /) -> None:
        pass

    def retain_only(self, known: Collection[str], /) -> None:
        pass

    async def _place(self, subject: PreparationContext, artifact: Artifact, room: Path, tell: OnProgress) -> None:
        user, carrier = subject.user, self._world.artifacts
        wanted = ArtifactRef(subject.replica.metadata.tenant, artifact.source, artifact.sha256)
        async with self._cache.file(wanted, tell) as file:
            if artifact.unpack:
                tell(f"unpacking {artifact.source[:120]}")
                await carrier.unpack(file, room / artifact.path, below=room, user=user)
            else:
                await carrier.place(file, room / _file_path(artifact), below=room, user=user)


def _file_path(artifact: Artifact) -> PurePosixPath:
    """Return the path of an artifact; without a path of its own, the file name in its source URL."""
    path = PurePosixPath(artifact.path)
    if path.parts:
        return path
    name = PurePosixPath(unquote(urlsplit(artifact.source).path)).name
    return PurePosixPath(name if name not in ("", "..") and "\0" not in name else "artifact")


class RootfsStep:
    """Implements `preparation.Step`. A root file system is unpacked once and mounted read-only, shared by all attempts of a
    tenant.
    """

    def __init__(self, world: World, cache: ArtifactCache, host_paths: tuple[Path, ...]) -> None:
        self._world, self._cache, self._host_paths = world, cache, host_paths
        self._pins: dict[AttemptId, Callable[[], None]] = {}

    def applies_to(self, template: Template, /) -> bool:
        return template.rootfs is not None

    async def prepare(self, subject: PreparationContext, room: Path, tell: OnProgress, /) -> PreparedInputs:
        root = subject.template.rootfs
        if root is None:
            return NO_INPUTS
        if not self._world.runner.isolation_support().sandbox:
            raise NotPrepared("template.rootfs needs bubblewrap, which this node does not have", _INSTALL_BWRAP)
        if root.directory:
            found = await self._world.artifacts.resolve_allowed(Path(root.directory), self._host_paths)
            if found is None:
                cure = "start the agent with --host-path for that directory, or use a permitted one"
                raise NotPrepared(f"root directory {root.directory} is not permitted on this node", cure)
            return PreparedInputs(root=found)
        wanted = ArtifactRef(subject.replica.metadata.tenant, root.source, root.sha256)
        if subject.attempt not in self._pins:
            self._pins[subject.attempt] = self._cache.pin(wanted)
        try:
            return PreparedInputs(root=await self._cache.tree(wanted, tell))
        except NotUnpacked as error:
            raise NotPrepared(f"template.rootfs cannot be unpacked: {error.cause}", error.cure) from error

    def forget(self, copy: AttemptId, /) -> None:
        let_go = self._pins.pop(copy, None)
        if let_go is not None:
            let_go()

    def retain_only(self, known: Collection[str], /) -> None:
        pass
