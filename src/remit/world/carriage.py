"""How do files from elsewhere come to this machine? Promises only: carrier.py keeps them for real, the simulator in memory.

What comes from outside is hostile until its digest is known, and an archive also afterwards: it was made by whoever asks for
it, and may say anything of where its parts belong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from remit.world.promises import WorldError


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
