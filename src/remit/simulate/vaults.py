"""Where do a simulated copy's files lie that no disk may keep? In the memory of its machine, which forgets them with its power.

The twin of `world.vault.FileVault`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

_ROOT: Final = Path("/vault")


class SimVault:
    def __init__(self) -> None:
        self.held: dict[str, dict[PurePosixPath, bytes]] = {}

    def put(self, name: str, files: Mapping[PurePosixPath, bytes], user: str, /) -> Path:
        self.held[name] = dict(files)
        return self.place(name)

    def place(self, name: str, /) -> Path:
        return _ROOT / name

    def has(self, name: str, /) -> bool:
        return name in self.held

    def remove(self, name: str, /) -> None:
        self.held.pop(name, None)

    def names(self) -> tuple[str, ...]:
        return tuple(self.held)
