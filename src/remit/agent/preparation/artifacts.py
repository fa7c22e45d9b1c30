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
from remit.agent.directory import CACHE_FILES, CACHE_TREES
from remit.agent.preparation.preparer import NotPrepared, OnProgress, PreparationContext
from remit.agent.run_spec import NO_INPUTS, PreparedInputs
from remit.model.artifacts import Artifact
from remit.model.kinds import Template
from remit.world.interfaces import DiskError, FetchLimits, FetchPermissions, NotFetched, NotUnpacked, UnpackLimits, World

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
    async def file(self, ref: ArtifactRef, on_progress: OnProgress) -> AsyncGenerator[Path, None]:
        """Yield the path of the file, which stays in the cache within this context. Raises `NotFetched` and `NotPrepared`."""
        name = f"{CACHE_FILES}/{ref.name}"
        with self._pinned(name):
            async with self._locked(name, on_progress):
                if not await self._is_intact(name, ref.sha256):
                    await self._fetch(name, ref, on_progress)
                await self._mark_used(name)
            yield self._root / name

    async def tree(self, ref: ArtifactRef, on_progress: OnProgress) -> Path:
        """Return the directory of an unpacked archive, used as a root file system. The caller pins it."""
        name = f"{CACHE_TREES}/{ref.name}"
        with self._pinned(name):
            async with self._locked(name, on_progress):
                entries = await self._load_entries()
                if name not in entries or not await self._world.offload(partial(self._world.disk.exists, self._root / name)):
                    await self._unpack(name, ref, on_progress)
                await self._mark_used(name)
        return self._root / name

    def pin(self, ref: ArtifactRef) -> Callable[[], None]:
        """Keep the tree of `ref` in the cache until the returned function is called."""
        pinned = self._pinned(f"{CACHE_TREES}/{ref.name}")
        pinned.__enter__()
        return lambda: pinned.__exit__(None, None, None)

    # -- fetching and unpacking ----------------------------------------------------------------------------------------

    async def _fetch(self, name: str, ref: ArtifactRef, on_progress: OnProgress) -> None:
        final, temporary = self._root / name, self._root / f"{name}{PARTIAL_SUFFIX}"
        bounds = FetchLimits()._replace(bytes_max=min(self._bytes_max, FetchLimits().bytes_max))
        until_ms = self._world.clock.now_ms() + bounds.total_ms
        source = ref.source[:120]

        def report(received: int, total: int) -> None:
            of = f" of {_mib(total)}" if total else ""
            on_progress(f"fetching {_mib(received)}{of} MiB of {source}")

        on_progress(f"fetching {source}")
        for attempt in range(1, FETCH_ATTEMPTS + 1):
            try:
                limits = bounds._replace(total_ms=max(1, until_ms - self._world.clock.now_ms()))
                size = await self._world.artifacts.fetch(
                    ref.source, temporary, sha256=ref.sha256, permissions=self._permissions, limits=limits, on_progress=report
                )
                break
            except NotFetched as error:
                pause_ms = FETCH_BACKOFF_MS << (attempt - 1)
                if not error.retryable or attempt == FETCH_ATTEMPTS or self._world.clock.now_ms() + pause_ms >= until_ms:
                    raise NotPrepared(f"{source} was not fetched: {error.cause}", error.cure) from error
                on_progress(f"retrying to fetch {source} after a failure ({error.cause})")
                await self._world.clock.sleep_ms(pause_ms)
        await self._publish(name, temporary, final, CacheEntry(size))

    async def _unpack(self, name: str, ref: ArtifactRef, on_progress: OnProgress) -> None:
        temporary = self._root / f"{name}{PARTIAL_SUFFIX}"
        async with self.file(ref, on_progress) as archive:
            on_progress(f"unpacking {ref.source[:120]}")
            await self._world.offload(partial(self._world.disk.remove_tree, temporary))
            try:
                unpacked = await self._world.artifacts.unpack(archive, temporary, below=temporary, limits=ROOTFS_BOUNDS)
            except BaseException:
                await self._world.offload(partial(self._world.disk.remove_tree, temporary))
                raise
            await self._publish(name, temporary, self._root / name, CacheEntry(unpacked.bytes))

    async def _publish(self, name: str, temporary: Path, final: Path, entry: CacheEntry) -> None:
        """Move a complete entry to its final name, after evicting least recently used entries."""
        entries = await self._load_entries()
        async with self._index_lock:
            await self._remove(final)
            if not await self._evict_for(entries, entry.bytes):
                await self._remove(temporary)
                cause = f"{_mib(entry.bytes)} MiB do not fit in the artifact cache of {_mib(self._bytes_max)} MiB"
                cure = "raise the agent's --artifact-cache, or use fewer or smaller artifacts at the same time"
                raise NotPrepared(cause, cure)
            await self._world.artifacts.publish(temporary, final)
            entry.stamp = await self._world.artifacts.change_stamp(final)
            entries[name] = entry

    async def _is_intact(self, name: str, sha256: str) -> bool:
        """Return whether the cached file is unchanged. An unchanged stamp is proof; otherwise (moved or restored files) it is
        hashed.
        """
        entries, path = await self._load_entries(), self._root / name
        entry, stamp = entries.get(name), await self._world.artifacts.change_stamp(path)
        if entry is None or not stamp:
            return False
        if stamp == entry.stamp:
            return True
        with suppress(DiskError):
            if await self._world.artifacts.digest(path) == sha256:
                entry.stamp = stamp
                return True
        return False

    # -- index and eviction --------------------------------------------------------------------------------------------

    async def _evict_for(self, entries: dict[str, CacheEntry], size: int) -> bool:
        total = sum(entry.bytes for entry in entries.values())
        for name in sorted(entries, key=lambda name: entries[name].used):
            if total + size <= self._bytes_max:
                break
            if name not in self._pins:
                total -= entries.pop(name).bytes
                await self._remove(self._root / name)
        return total + size <= self._bytes_max

    async def _remove(self, path: Path) -> None:
        """Remove a file or a tree."""
        await self._world.offload(partial(self._world.disk.remove_tree, path))
        with suppress(DiskError):
            await self._world.offload(partial(self._world.disk.remove, path))

    async def _mark_used(self, name: str) -> None:
        entries = await self._load_entries()
        self._uses += 1
        entries[name].used = self._uses
        async with self._index_lock:
            with suppress(DiskError):  # a lost index only causes files to be fetched again
                data = msgspec.json.encode(entries)
                await self._world.offload(partial(self._world.disk.write_atomically, self._root / INDEX, data))

    async def _load_entries(self) -> dict[str, CacheEntry]:
        if self._entries is None:
            async with self._index_lock:
                if self._entries is None:  # another task may have read it meanwhile
                    entries = await self._world.offload(self._read_index)
                    self._uses = max((entry.used for entry in entries.values()), default=0)
                    self._entries = entries
        return self._entries

    def _read_index(self) -> dict[str, CacheEntry]:
        """Read the index and remove all entries it does not name: they are incomplete, or of an unknown tenant."""
        disk, index = self._world.disk, {}
        with suppress(DiskError, msgspec.DecodeError):
            index = msgspec.json.decode(disk.read(self._root / INDEX), type=dict[str, CacheEntry])
        entries: dict[str, CacheEntry] = {}
        for kind in (CACHE_FILES, CACHE_TREES):
            disk.make_directory(self._root / kind, durably=False)
            for name in disk.list(self._root / kind):
                path = f"{kind}/{name}"
                if path in index:
                    entries[path] = index[path]
                else:
                    disk.remove_tree(self._root / path)
                    with suppress(DiskError):
                        disk.remove(self._root / path)
        return entries

    # -- locks and pins ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _locked(self, name: str, on_progress: OnProgress) -> AsyncGenerator[None, None]:
        lock = self._locks.setdefault(name, asyncio.Lock())
        if lock.locked():
            on_progress("waiting for another replica that is fetching the same file")
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


_INSTALL_BWRAP: Final = (
    "install bubblewrap on the node (apt install bubblewrap), or restrict the workload to nodes that have it"
)


class ArtifactStep:
    """Implements `PreparationStep`. Each artifact is copied from the cache, so that a process can modify its own copy only."""

    def __init__(self, world: World, cache: ArtifactCache) -> None:
        self._world, self._cache = world, cache

    def applies_to(self, template: Template, /) -> bool:
        return bool(template.artifacts)

    async def prepare(self, context: PreparationContext, directory: Path, on_progress: OnProgress, /) -> PreparedInputs:
        if context.is_new:
            for index, artifact in enumerate(context.template.artifacts):
                try:
                    await self._place(context, artifact, directory, on_progress)
                except NotUnpacked as error:
                    cause = f"template.artifacts[{index}] cannot be placed: {error.cause}"
                    raise NotPrepared(cause, error.cure) from error
        return NO_INPUTS

    def forget(self, attempt: AttemptId, /) -> None:
        pass

    def retain_only(self, known: Collection[str], /) -> None:
        pass

    async def _place(self, context: PreparationContext, artifact: Artifact, directory: Path, on_progress: OnProgress) -> None:
        user, artifacts = context.user, self._world.artifacts
        ref = ArtifactRef(context.replica.metadata.tenant, artifact.source, artifact.sha256)
        async with self._cache.file(ref, on_progress) as file:
            if artifact.unpack:
                on_progress(f"unpacking {artifact.source[:120]}")
                await artifacts.unpack(file, directory / artifact.path, below=directory, user=user)
            else:
                await artifacts.place(file, directory / _file_path(artifact), below=directory, user=user)


def _file_path(artifact: Artifact) -> PurePosixPath:
    """Return the path of an artifact; without a path of its own, the file name in its source URL."""
    path = PurePosixPath(artifact.path)
    if path.parts:
        return path
    name = PurePosixPath(unquote(urlsplit(artifact.source).path)).name
    return PurePosixPath(name if name not in ("", "..") and "\0" not in name else "artifact")


class RootfsStep:
    """Implements `PreparationStep`. A root file system is unpacked once and mounted read-only, shared by all attempts of a
    tenant.
    """

    def __init__(self, world: World, cache: ArtifactCache, host_paths: tuple[Path, ...]) -> None:
        self._world, self._cache, self._host_paths = world, cache, host_paths
        self._pins: dict[AttemptId, Callable[[], None]] = {}

    def applies_to(self, template: Template, /) -> bool:
        return template.rootfs is not None

    async def prepare(self, context: PreparationContext, directory: Path, on_progress: OnProgress, /) -> PreparedInputs:
        root = context.template.rootfs
        if root is None:
            return NO_INPUTS
        if not self._world.runner.isolation_support().sandbox:
            raise NotPrepared("template.rootfs needs bubblewrap, which this node does not have", _INSTALL_BWRAP)
        if root.directory:
            resolved = await self._world.artifacts.resolve_allowed(Path(root.directory), self._host_paths)
            if resolved is None:
                cure = "start the agent with --host-path for that directory, or use a permitted one"
                raise NotPrepared(f"root directory {root.directory} is not permitted on this node", cure)
            return PreparedInputs(root=resolved)
        ref = ArtifactRef(context.replica.metadata.tenant, root.source, root.sha256)
        if context.attempt not in self._pins:
            self._pins[context.attempt] = self._cache.pin(ref)
        try:
            return PreparedInputs(root=await self._cache.tree(ref, on_progress))
        except NotUnpacked as error:
            raise NotPrepared(f"template.rootfs cannot be unpacked: {error.cause}", error.cure) from error

    def forget(self, attempt: AttemptId, /) -> None:
        unpin = self._pins.pop(attempt, None)
        if unpin is not None:
            unpin()

    def retain_only(self, known: Collection[str], /) -> None:
        pass
