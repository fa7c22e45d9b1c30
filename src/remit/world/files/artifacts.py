"""Artifact interface, and the implementation that fetches, unpacks and places files.

Downloaded bytes are untrusted until their digest is verified. An archive stays untrusted afterwards: the tenant that asks
for it has made it, and its entries may name any path.

The code that fetches and unpacks is imported on first use. Every process builds an artifact fetcher, but the keeper process,
which must stay small, never uses it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from remit.world.concurrency import StopSignal, WorkStopped
from remit.world.files.disk import translating_os_errors
from remit.world.interfaces import FileBusy, WorldError

if TYPE_CHECKING:
    import ssl

    from remit.world.files.archives import Unpacker
    from remit.world.files.http_fetch import Resolver


class FetchPermissions(NamedTuple):
    """Sources that a node allows replicas to fetch from.

    `directories`: `file:` sources are read below these only. `hosts`: names and networks that may be fetched from although
    they are not public.
    """

    directories: tuple[Path, ...] = ()
    hosts: tuple[str, ...] = ()


class FetchLimits(NamedTuple):
    bytes_max: int = 4 << 30
    idle_ms: int = 30_000
    """Longest time without receiving any data."""
    total_ms: int = 540_000
    """Longest time for the complete fetch."""
    redirects_max: int = 5


class UnpackLimits(NamedTuple):
    files_max: int = 200_000
    bytes_max: int = 16 << 30
    ratio_max: int = 200
    """Largest ratio of unpacked to packed size, applied beyond the first few megabytes."""
    depth_max: int = 64
    as_root: bool = False
    """The archive is a root file system. Its links are resolved inside the sandbox only, so their targets are not checked."""


class UnpackResult(NamedTuple):
    files: int
    bytes: int


FetchProgress = Callable[[int, int], None]
"""Receives the number of bytes fetched and the total, or 0 if that is unknown. Called from a worker thread."""


class ArtifactFetcher(Protocol):
    """Fetches artifacts and puts them into a replica's directory.

    Blocking work runs in threads, several items at once. Each call may be cancelled; then it leaves nothing behind.
    """

    async def fetch(
        self,
        source: str,
        to: Path,
        /,
        *,
        sha256: str,
        permissions: FetchPermissions,
        limits: FetchLimits = FetchLimits(),
        on_progress: FetchProgress,
    ) -> int:
        """Fetch `source` into the new file `to` and return its size. If the digest differs, no file is left.

        Raises `NotFetched`. The address is checked at every connection and again after every redirect, because the addresses
        of a host name may change after an earlier check.
        """
        ...

    async def unpack(
        self, archive: Path, into: Path, /, *, below: Path, user: str = "", limits: UnpackLimits = UnpackLimits()
    ) -> UnpackResult:
        """Unpack a tar or zip archive into the directory `into`, created if absent; the files are owned by `user`.

        Raises `NotUnpacked` if an entry would be outside of `below`, or is not a file, a directory, or a link
        to a path inside `below`. Some entries may have been unpacked by then.
        """
        ...

    async def place(self, file: Path, to: Path, /, *, below: Path, user: str = "") -> None:
        """Copy `file` to `to`, owned by `user` and executable, and create missing parent directories.

        No directory on the path under `below` may be a symbolic link, and nothing is replaced. Raises `NotUnpacked`.
        """
        ...

    async def make_directory(self, directory: Path, /, *, below: Path, user: str = "") -> None:
        """Create a directory and its parents if absent, with the same checks as `place`."""
        ...

    async def symlink(self, link: Path, target: Path, /, *, below: Path) -> None:
        """Create a symbolic link to a path of the host, which may be anywhere, with the same checks as `place`."""
        ...

    async def publish(self, source: Path, to: Path, /) -> None:
        """Rename a file or directory to its final name atomically. Raises `FileBusy` if the name exists; other `DiskError`."""
        ...

    async def change_stamp(self, path: Path, /) -> str:
        """Return a value that changes whenever the content of the file may have changed; empty if it is not a regular file."""
        ...

    async def digest(self, path: Path, /) -> str:
        """Return the SHA-256 of a file in hexadecimal. Raises `DiskError`."""
        ...

    async def size(self, directory: Path, /) -> int:
        """Return the disk usage of a directory tree, links not followed; 0 if it does not exist."""
        ...

    async def resolve_allowed(self, directory: Path, allowed: tuple[Path, ...], /) -> Path | None:
        """Resolve a directory of the host. Returns its real path if that is one of `allowed` or below one, otherwise None."""
        ...


class NotFetched(WorldError):
    """The fetch failed. `retryable`: a retry may succeed."""

    def __init__(self, cause: str, cure: str, *, retryable: bool = False) -> None:
        super().__init__(cause, cure)
        self.retryable = retryable


class NotUnpacked(WorldError):
    """The archive or file cannot be unpacked or placed."""


T = TypeVar("T")

THREADS: Final = 4
"""Number of concurrent fetches and unpackings; more are queued."""

STOP_WAIT_S: Final = 1.0
"""How long to wait for a cancelled thread. A name lookup cannot be interrupted."""


class FileArtifactFetcher:
    """Fetches and unpacks in a small thread pool."""

    def __init__(self, resolve: Resolver | None = None, context: ssl.SSLContext | None = None) -> None:
        self._resolve, self._context = resolve, context
        self._pool = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="artifacts")

    async def fetch(
        self,
        source: str,
        to: Path,
        /,
        *,
        sha256: str,
        permissions: FetchPermissions,
        limits: FetchLimits = FetchLimits(),
        on_progress: FetchProgress,
    ) -> int:
        stop = StopSignal()
        deadline = asyncio.get_running_loop().call_later(limits.total_ms / 1000, stop.stop)
        try:
            return await self._in_thread(lambda: self._fetch(source, to, sha256, permissions, limits, on_progress, stop), stop)
        except WorkStopped:
            raise NotFetched(
                f"the fetch took longer than {limits.total_ms // 1000} s",
                "serve the artifact from a nearer host, or make it smaller",
                retryable=True,
            ) from None
        finally:
            deadline.cancel()

    async def unpack(
        self, archive: Path, into: Path, /, *, below: Path, user: str = "", limits: UnpackLimits = UnpackLimits()
    ) -> UnpackResult:
        at, stop = into.relative_to(below), StopSignal()
        return await self._in_thread(lambda: _unpacker(below, user, limits, stop, at).unpack(archive), stop)

    async def place(self, file: Path, to: Path, /, *, below: Path, user: str = "") -> None:
        at, stop = to.relative_to(below), StopSignal()
        await self._in_thread(lambda: _unpacker(below, user, UnpackLimits(), stop).copy(file, at), stop)

    async def make_directory(self, directory: Path, /, *, below: Path, user: str = "") -> None:
        at = directory.relative_to(below)
        await self._in_thread(lambda: _unpacker(below, user, UnpackLimits(), StopSignal()).make_directory(at))

    async def symlink(self, link: Path, target: Path, /, *, below: Path) -> None:
        at = link.relative_to(below)
        await self._in_thread(lambda: _unpacker(below, "", UnpackLimits(), StopSignal()).symlink(at, target))

    async def publish(self, source: Path, to: Path, /) -> None:
        def publish() -> None:
            with translating_os_errors(to):
                if os.path.lexists(to):
                    raise FileBusy(f"{to} exists already", "remove it, or use another name")
                source.rename(to)

        await self._in_thread(publish)

    async def change_stamp(self, path: Path, /) -> str:
        def stamp() -> str:
            try:
                status = os.lstat(path)
            except OSError:
                return ""
            # The last one, the change time, cannot be set by a process that may write the file.
            same = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            return ".".join(map(str, same)) if stat.S_ISREG(status.st_mode) else ""

        return await self._in_thread(stamp)

    async def digest(self, path: Path, /) -> str:
        def digest() -> str:
            with translating_os_errors(path), path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

        return await self._in_thread(digest)

    async def size(self, directory: Path, /) -> int:
        return await self._in_thread(lambda: _size(directory))

    async def resolve_allowed(self, directory: Path, allowed: tuple[Path, ...], /) -> Path | None:
        def stands() -> Path | None:
            try:
                resolved = directory.resolve(strict=True)
                roots = [root.resolve(strict=True) for root in allowed]
            except (OSError, RuntimeError):
                return None
            inside = any(root == resolved or root in resolved.parents for root in roots)
            return resolved if inside and resolved.is_dir() else None

        return await self._in_thread(stands)

    # -- runs in a thread ------------------------------------------------------------------------------------------------------

    def _fetch(
        self,
        source: str,
        to: Path,
        sha256: str,
        permissions: FetchPermissions,
        limits: FetchLimits,
        on_progress: FetchProgress,
        stop: StopSignal,
    ) -> int:
        from remit.world.files.http_fetch import SourceFetch, resolve_host, system_tls_context, too_large_error

        self._context = self._context or system_tls_context()
        fetching = SourceFetch(permissions, limits, stop, self._resolve or resolve_host, self._context)
        digest, received = hashlib.sha256(), 0
        file = _create_file(to)
        try:
            with os.fdopen(file, "wb", buffering=0) as output, fetching.open(source) as opened_source:
                for chunk in opened_source.chunks:
                    stop.check()
                    received += len(chunk)
                    if received > limits.bytes_max:
                        raise too_large_error(limits)
                    digest.update(chunk)
                    _write(output.fileno(), chunk, to)
                    on_progress(received, opened_source.total)
            stop.check()  # a socket that is shut down reads like the end of the data
            if digest.hexdigest() != sha256:
                raise NotFetched(
                    f"the content has digest {digest.hexdigest()}, not {sha256}",
                    "correct sha256 if this is the intended content",
                )
        except BaseException:
            with suppress(OSError):
                to.unlink()
            raise
        return received

    async def _in_thread(self, work: Callable[[], T], stop: StopSignal | None = None) -> T:
        job = self._pool.submit(work)
        future = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if stop is not None:
                stop.stop()
            future.add_done_callback(_retrieve_exception)
            if not job.cancel():  # already running: wait for it to clean up
                await asyncio.wait([future], timeout=STOP_WAIT_S)
            raise


def _unpacker(into: Path, user: str, limits: UnpackLimits, stop: StopSignal, at: Path = Path()) -> Unpacker:
    from remit.world.files.archives import Unpacker

    return Unpacker(into, user, limits, stop, at)


def _retrieve_exception(future: asyncio.Future[T]) -> None:
    """Retrieve the exception of cancelled work, so that asyncio does not log it as never retrieved."""
    if not future.cancelled():
        future.exception()


def _create_file(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise NotFetched(f"cannot write {path} ({error.strerror})", "check the agent's data directory") from error


def _write(file: int, chunk: bytes, to: Path) -> None:
    remaining = memoryview(chunk)
    try:
        while remaining:
            remaining = remaining[os.write(file, remaining) :]
    except OSError as error:
        raise NotFetched(f"cannot write to {to.parent} ({error.strerror})", "free space there", retryable=False) from error


def _size(directory: Path) -> int:
    total = 0
    directories = [str(directory)]
    while directories:
        with suppress(OSError), os.scandir(directories.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.path)
    return total
