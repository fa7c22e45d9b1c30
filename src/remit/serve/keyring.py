"""Where are the keys of secrets kept? In one file beside the store, for the server's eyes alone; what they do is sealing.py's.

A line a key, in base 64; the first one seals. It is made when a server first starts. It is no part of the store nor of its
backups: whoever has both can read every secret, and whoever has lost it can read none.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from remit.serve.sealing import KEY_BYTES, KEYS_MAX, Key, Seals
from remit.world.promises import Disk, DiskError, Forbidden, Ids, Missing

NAME: Final = "seal.keys"
_BYTES_MAX: Final = 64 << 10
_NONCES: Final = 8
"""80 bits each: more than any key of these can be attacked by."""


class Keyring:
    """`seals` are the keys as they are now, read when they are first asked for. Without a `path` they live as long as this
    does, as in a simulated world.

    It blocks. Raises `DiskError`.
    """

    def __init__(self, disk: Disk, ids: Ids, path: Path | None = None) -> None:
        self._disk, self._ids, self._path = disk, ids, path
        self._seals: Seals | None = None
        self._writing: Counter[str] = Counter()
        self.made_by = ""
        """Which request made the newest, if it was one of this server's since it began."""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around all that happens between the sealing of a value and the answer to whoever sent it."""
        first = self.seals.first
        self._writing[first] += 1
        try:
            yield
        finally:
            self._writing[first] -= 1

    @property
    def is_settled(self) -> bool:
        """Is nothing under way that may be sealed by another key than the first?"""
        return not any(many for key, many in self._writing.items() if key != self.seals.first)

    @property
    def seals(self) -> Seals:
        if self._seals is None:
            self._seals = Seals(self._read() or self._written([self._new()]))
        return self._seals

    def add(self) -> Seals:
        """A new key comes first. It is on disk before anything is sealed with it. Raises ValueError if there are too many."""
        if len(self.seals.keys) >= KEYS_MAX:
            raise ValueError(f"there are {KEYS_MAX} keys already")
        self._seals = Seals(self._written([self._new(), *self.seals.keys]))
        return self._seals

    def forget(self) -> Seals:
        """All but the first."""
        self._seals = Seals(self._written(list(self.seals.keys[:1])))
        return self._seals

    def _new(self) -> Key:
        drawn = "".join(self._ids.nonce() for _ in range(_NONCES))
        return Key.of(hashlib.sha512(b"remit key" + drawn.encode()).digest())

    def _written(self, keys: list[Key]) -> list[Key]:
        if self._path is not None:
            self._disk.make_directory(self._path.parent)
            self._disk.write_atomically(self._path, b"".join(base64.b64encode(one.material) + b"\n" for one in keys))
        return keys

    def _read(self) -> list[Key]:
        """None at all if there is no such file."""
        if self._path is None:
            return []
        try:
            data = self._disk.read(self._path, bytes_max=_BYTES_MAX)
        except Missing:
            return []
        _check_private(self._path)
        try:
            keys = [Key.of(base64.b64decode(line, validate=True)) for line in data.split()]
            return list(Seals(keys).keys)
        except (binascii.Error, ValueError) as error:
            cure = "put the file back as it was: without its keys no secret that is stored can be read"
            raise DiskError(f"{self._path} holds no keys of {KEY_BYTES} bytes, one a line ({error})", cure) from None


def _check_private(path: Path) -> None:
    """A key that others may read is none: it is not used, so that somebody notices."""
    found = path.stat()
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise Forbidden(
            f"{path} may be read by others than its owner", f"chmod 600 {path}, and turn the key: remit secrets rotate"
        )
    if found.st_uid != os.geteuid():
        raise Forbidden(
            f"{path} belongs to another user", f"chown it to the user whom the server runs as, and chmod 600 {path}"
        )
