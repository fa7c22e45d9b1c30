"""What can be fetched in a simulated world, and how long does it take? Files by their source, in memory; nothing is reached.

The twin of `world.carrier.FileCarrier`. Its disk knows no links and no owners, so an archive with a link in it is refused here.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Final

from remit.law.reaching import why_no_host
from remit.model.sources import Unreadable, read_source
from remit.simulate.disks import SimDisk
from remit.world.carriage import FetchBounds, NotFetched, NotUnpacked, Progress, Reach, UnpackBounds, Unpacked
from remit.world.promises import Busy, DiskError, Missing

PIECES: Final = 4


class Depot:
    """All that can be fetched: what each source has, and how long it takes. Whoever runs the simulation fills it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.takes_s = 0.02
        self.fails = False
        """Nothing can be reached for now."""


class SimCarrier:
    def __init__(self, disk: SimDisk, depot: Depot, alive: Callable[[], bool]) -> None:
        self._disk, self._entries, self._depot = disk.mount(alive), disk, depot

    async def fetch(
        self, source: str, to: Path, /, *, sha256: str, reach: Reach, bounds: FetchBounds = FetchBounds(), tell: Progress
    ) -> int:
        _check_source(source, reach)
        content = self._depot.files.get(source)
        await asyncio.sleep(self._depot.takes_s / PIECES)
        if content is None or self._depot.fails:
            raise NotFetched(f"{source} cannot be reached", "see whether it is well", again=self._depot.fails)
        if len(content) > bounds.bytes_max:
            raise NotFetched(f"it has more than {bounds.bytes_max >> 20} MiB", "make it smaller, or several of it")
        for part in range(1, PIECES):
            tell(len(content) * part // PIECES, len(content))
            await asyncio.sleep(self._depot.takes_s / PIECES)
        tell(len(content), len(content))
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise NotFetched(f"what came has the digest {found}, not {sha256}", "correct sha256, if that is what it should be")
        self._disk.write_atomically(to, content)
        return len(content)

    async def unpack(
        self, archive: Path, into: Path, /, *, below: Path, user: str = "", bounds: UnpackBounds = UnpackBounds()
    ) -> Unpacked:
        await asyncio.sleep(self._depot.takes_s / PIECES)
        files = size = 0
        self._disk.make_directory(into, durably=False)
        try:
            with tarfile.open(fileobj=io.BytesIO(self._disk.read(archive))) as tar:
                for one in tar:
                    files, size = files + 1, size + one.size
                    steps = PurePosixPath(one.name)
                    if steps.is_absolute() or ".." in steps.parts or not (one.isreg() or one.isdir()):
                        raise NotUnpacked(f"{one.name!r} leads out of its directory", "make it anew with names below it")
                    if files > bounds.files_max or size > bounds.bytes_max:
                        raise NotUnpacked("it comes to more than it may", "make it smaller")
                    content = tar.extractfile(one)
                    if content is None:
                        self._disk.make_directory(into / steps, durably=False)
                    else:
                        self._put(into / steps, content.read())
        except tarfile.TarError as error:
            raise NotUnpacked(f"it is no archive that can be read ({error})", "make a tar or zip archive of it") from error
        return Unpacked(files, size)

    async def place(self, file: Path, to: Path, /, *, below: Path, user: str = "") -> None:
        content = self._disk.read(file)
        if self._disk.exists(to):
            raise NotUnpacked(f"{to.name} cannot be put there (file exists)", "give each artifact a path of its own")
        self._put(to, content)

    async def make(self, directory: Path, /, *, below: Path, user: str = "") -> None:
        self._disk.make_directory(directory, durably=False)

    async def lead(self, link: Path, target: Path, /, *, below: Path) -> None:
        raise NotUnpacked("this disk knows no links", "use a sandbox")

    async def publish(self, made: Path, to: Path, /) -> None:
        if self._disk.exists(to):
            raise Busy(f"{to} is there already", "remove it, or use another name")
        if not self._disk.exists(made):
            raise Missing(f"{made} is not there", "make it, or correct the path")
        self._entries.move(made, to)

    async def stamp(self, path: Path, /) -> str:
        try:
            return hashlib.sha256(self._disk.read(path)).hexdigest()
        except DiskError:
            return ""

    async def digest(self, path: Path, /) -> str:
        return hashlib.sha256(self._disk.read(path)).hexdigest()

    async def size(self, directory: Path, /) -> int:
        return self._entries.bytes_below(directory)

    async def stands(self, directory: Path, lent: tuple[Path, ...], /) -> Path | None:
        inside = any(one == directory or one in directory.parents for one in lent)
        return directory if inside and self._disk.exists(directory) else None

    def _put(self, path: Path, content: bytes) -> None:
        self._disk.make_directory(path.parent, durably=False)
        self._disk.write_atomically(path, content)


def _check_source(source: str, reach: Reach) -> None:
    try:
        address = read_source(source)
    except Unreadable as error:
        raise NotFetched(f"an address {error.cause}", error.cure) from error
    if address.scheme == "file":
        if not any(one in Path(address.path).parents for one in reach.directories):
            raise NotFetched(f"{address.path} is in no directory that this node lends", "start its agent with --artifact-dir")
        return
    why = why_no_host(address.host, reach.hosts)
    if why:
        raise NotFetched(f"nothing is fetched from there: {why}", "use a public one")
