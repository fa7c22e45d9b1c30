"""Artifact interface, and the implementation that fetches, unpacks and places files (fetch and archive code loaded lazily).

Promises only: carrier.py keeps them for real, the simulator in memory.

What comes from outside is hostile until its digest is known, and an archive also afterwards: it was made by whoever asks for
it, and may say anything of where its parts belong.

In a few threads; who wants them is not asked.

What fetches and unpacks is loaded when it is first needed: every process has a carrier, and a keeper, which is small, never
uses its own.
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

from remit.world.concurrency import Stop, Stopped
from remit.world.files.disk import told
from remit.world.interfaces import Busy, WorldError

if TYPE_CHECKING:
    import ssl

    from remit.world.files.archives import Unpacking
    from remit.world.files.http_fetch import Resolve


class Reach(NamedTuple):
    """What a machine lends to work. `directories`: below which `file:` sources are read; `hosts`: names and networks from which
    files may be fetched although they are not public."""

    directories: tuple[Path, ...] = ()
    hosts: tuple[str, ...] = ()


class FetchBounds(NamedTuple):
    bytes_max: int = 4 << 30
    idle_ms: int = 30_000
    """So long may nothing come."""
    total_ms: int = 540_000
    """So long may all of it take."""
    redirects_max: int = 5


class UnpackBounds(NamedTuple):
    files_max: int = 200_000
    bytes_max: int = 16 << 30
    ratio_max: int = 200
    """So many times its own size may an archive come to, beyond its first few megabytes."""
    depth_max: int = 64
    as_root: bool = False
    """It is somebody's whole root: its links are followed there and nowhere else, so they may say anything."""


class Unpacked(NamedTuple):
    files: int
    bytes: int


Progress = Callable[[int, int], None]
"""So many bytes have come, of how many in all; 0: nobody knows. Called from wherever the work is done."""


class Carrier(Protocol):
    """Blocking work is done elsewhere, several pieces at once, and each may be cancelled: then nothing of it is left."""

    async def fetch(
        self, source: str, to: Path, /, *, sha256: str, reach: Reach, bounds: FetchBounds = FetchBounds(), tell: Progress
    ) -> int:
        """The bytes of `source` in a new file `to`, and how many they are. They have this digest, or nothing is there.

        Raises `NotFetched`. Every address is looked at when it is connected to, after every redirect anew: what a name comes to
        may have changed since somebody looked.
        """
        ...

    async def unpack(
        self, archive: Path, into: Path, /, *, below: Path, user: str = "", bounds: UnpackBounds = UnpackBounds()
    ) -> Unpacked:
        """All parts of a tar or zip archive at the directory `into`, made if absent, owned by `user`. Raises `NotUnpacked` if
        any would be outside of `below`, or is anything but a file, a directory or a link among them; some may be there then.
        """
        ...

    async def place(self, file: Path, to: Path, /, *, below: Path, user: str = "") -> None:
        """A copy of `file` at `to`, with the directories on the way, owned by `user`, which may run it. None of those `below`
        may be a link, and nothing is replaced. Raises `NotUnpacked`.
        """
        ...

    async def make(self, directory: Path, /, *, below: Path, user: str = "") -> None:
        """A directory, unless it is there, with those on the way. As `place`."""
        ...

    async def lead(self, link: Path, target: Path, /, *, below: Path) -> None:
        """A link to a place of the machine, which may be anywhere. As `place`."""
        ...

    async def publish(self, made: Path, to: Path, /) -> None:
        """Give a file or directory its name, at once and whole. Raises `Busy` if somebody has it, and other `DiskError`."""
        ...

    async def stamp(self, path: Path, /) -> str:
        """Changes whenever the content of a file may have; empty if it is not there, or no file."""
        ...

    async def digest(self, path: Path, /) -> str:
        """SHA-256 of a file, in hexadecimal. Raises `DiskError`."""
        ...

    async def size(self, directory: Path, /) -> int:
        """How many bytes all that is below it takes; links are not followed. 0 if it is not there."""
        ...

    async def stands(self, directory: Path, lent: tuple[Path, ...], /) -> Path | None:
        """Where a directory of the machine truly is, if that is one of those `lent` or below one; None if it is not."""
        ...


class NotFetched(WorldError):
    """It did not come. `again`: it may if it is tried again soon."""

    def __init__(self, cause: str, cure: str, *, again: bool = False) -> None:
        super().__init__(cause, cure)
        self.again = again


class NotUnpacked(WorldError):
    """It is no archive that may be unpacked here."""


T = TypeVar("T")

THREADS: Final = 4
"""So many fetches and unpackings go on at once; the others wait for their turn."""

LEAVE_S: Final = 1.0
"""For so long is waited for a thread that was told to stop: one that looks up a name hears nothing meanwhile."""


class FileCarrier:
    """Keeps the promise `carriage.Carrier`."""

    def __init__(self, resolve: Resolve | None = None, context: ssl.SSLContext | None = None) -> None:
        self._resolve, self._context = resolve, context
        self._pool = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="carrier")

    async def fetch(
        self, source: str, to: Path, /, *, sha256: str, reach: Reach, bounds: FetchBounds = FetchBounds(), tell: Progress
    ) -> int:
        stop = Stop()
        late = asyncio.get_running_loop().call_later(bounds.total_ms / 1000, stop.now)
        try:
            return await self._elsewhere(lambda: self._fetch(source, to, sha256, reach, bounds, tell, stop), stop)
        except Stopped:
            raise NotFetched(
                f"it took longer than {bounds.total_ms // 1000} s", "serve it from nearer, or make it smaller", again=True
            ) from None
        finally:
            late.cancel()

    async def unpack(
        self, archive: Path, into: Path, /, *, below: Path, user: str = "", bounds: UnpackBounds = UnpackBounds()
    ) -> Unpacked:
        at, stop = into.relative_to(below), Stop()
        return await self._elsewhere(lambda: _unpacking(below, user, bounds, stop, at).unpack(archive), stop)

    async def place(self, file: Path, to: Path, /, *, below: Path, user: str = "") -> None:
        at, stop = to.relative_to(below), Stop()
        await self._elsewhere(lambda: _unpacking(below, user, UnpackBounds(), stop).copy(file, at), stop)

    async def make(self, directory: Path, /, *, below: Path, user: str = "") -> None:
        at = directory.relative_to(below)
        await self._elsewhere(lambda: _unpacking(below, user, UnpackBounds(), Stop()).make(at))

    async def lead(self, link: Path, target: Path, /, *, below: Path) -> None:
        at = link.relative_to(below)
        await self._elsewhere(lambda: _unpacking(below, "", UnpackBounds(), Stop()).lead(at, target))

    async def publish(self, made: Path, to: Path, /) -> None:
        def publish() -> None:
            with told(to):
                if os.path.lexists(to):
                    raise Busy(f"{to} is there already", "remove it, or use another name")
                made.rename(to)

        await self._elsewhere(publish)

    async def stamp(self, path: Path, /) -> str:
        def stamp() -> str:
            try:
                found = os.lstat(path)
            except OSError:
                return ""
            # The last of these cannot be set by whoever may write there.
            same = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            return ".".join(map(str, same)) if stat.S_ISREG(found.st_mode) else ""

        return await self._elsewhere(stamp)

    async def digest(self, path: Path, /) -> str:
        def digest() -> str:
            with told(path), path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

        return await self._elsewhere(digest)

    async def size(self, directory: Path, /) -> int:
        return await self._elsewhere(lambda: _size(directory))

    async def stands(self, directory: Path, lent: tuple[Path, ...], /) -> Path | None:
        def stands() -> Path | None:
            try:
                found = directory.resolve(strict=True)
                places = [one.resolve(strict=True) for one in lent]
            except (OSError, RuntimeError):
                return None
            inside = any(one == found or one in found.parents for one in places)
            return found if inside and found.is_dir() else None

        return await self._elsewhere(stands)

    # -- in a thread -----------------------------------------------------------------------------------------------------------

    def _fetch(self, source: str, to: Path, sha256: str, reach: Reach, bounds: FetchBounds, tell: Progress, stop: Stop) -> int:
        from remit.world.files.http_fetch import Fetching, resolved, too_large, trusting

        self._context = self._context or trusting()
        fetching = Fetching(reach, bounds, stop, self._resolve or resolved, self._context)
        sum_, come = hashlib.sha256(), 0
        file = _new(to)
        try:
            with os.fdopen(file, "wb", buffering=0) as into, fetching.opened(source) as opened:
                for piece in opened.pieces:
                    stop.check()
                    come += len(piece)
                    if come > bounds.bytes_max:
                        raise too_large(bounds)
                    sum_.update(piece)
                    _write(into.fileno(), piece, to)
                    tell(come, opened.total)
            stop.check()  # what is closed under its reader looks like its end
            if sum_.hexdigest() != sha256:
                raise NotFetched(
                    f"what came has the digest {sum_.hexdigest()}, not {sha256}", "correct sha256, if that is what it should be"
                )
        except BaseException:
            with suppress(OSError):
                to.unlink()
            raise
        return come

    async def _elsewhere(self, work: Callable[[], T], stop: Stop | None = None) -> T:
        begun = self._pool.submit(work)
        future = asyncio.wrap_future(begun)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if stop is not None:
                stop.now()
            future.add_done_callback(_heard)
            if not begun.cancel():  # it has begun: it leaves nothing behind, and is waited for
                await asyncio.wait([future], timeout=LEAVE_S)
            raise


def _unpacking(into: Path, user: str, bounds: UnpackBounds, stop: Stop, at: Path = Path()) -> Unpacking:
    from remit.world.files.archives import Unpacking

    return Unpacking(into, user, bounds, stop, at)


def _heard(future: asyncio.Future[T]) -> None:
    """Nobody waits for what came of it: it was told to stop, and says so."""
    if not future.cancelled():
        future.exception()


def _new(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise NotFetched(f"{path} cannot be written ({error.strerror})", "see whether the agent's directory is well") from error


def _write(file: int, piece: bytes, to: Path) -> None:
    left = memoryview(piece)
    try:
        while left:
            left = left[os.write(file, left) :]
    except OSError as error:
        raise NotFetched(f"no room for it at {to.parent} ({error.strerror})", "free space there", again=False) from error


def _size(directory: Path) -> int:
    total = 0
    places = [str(directory)]
    while places:
        with suppress(OSError), os.scandir(places.pop()) as found:
            for one in found:
                with suppress(OSError):
                    total += one.stat(follow_symlinks=False).st_blocks * 512
                    if one.is_dir(follow_symlinks=False):
                        places.append(one.path)
    return total
