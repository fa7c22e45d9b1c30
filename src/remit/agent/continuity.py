"""Did this agent's data hold its node last? Only then does its keeper know all that may run there. One small file.

A lease's epoch grows by one each time that it is acquired. So whoever wrote down the one before has missed nobody in between;
and whoever cannot tell, since its data was lost or another machine had its name, must not say that nothing runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from remit.world.promises import DiskError, Missing, World

_epochs: msgspec.json.Decoder[dict[str, int]] = msgspec.json.Decoder(dict[str, int])


class Continuity:
    """`path`: where the epochs are written down. Without one everything is taken to follow."""

    def __init__(self, world: World, path: Path | None) -> None:
        self._world, self._path = world, path
        self._known: dict[str, int] | None = None

    async def took_over(self, epochs: Mapping[str, int]) -> frozenset[str]:
        """These nodes' leases were acquired at these epochs. Of which is it known that nobody else held them since?"""
        path = self._path
        if path is None or not epochs:
            return frozenset(epochs)
        if self._known is None:
            self._known = await self._world.offload(lambda: _read(self._world, path))
        follows = frozenset(node for node, epoch in epochs.items() if self._known.get(node, 0) == epoch - 1)
        self._known |= epochs
        data = msgspec.json.encode(self._known, order="sorted")
        with suppress(DiskError):  # then the next one to start here cannot tell, and waits
            await self._world.offload(lambda: self._world.disk.write_atomically(path, data))
        return follows


def _read(world: World, path: Path) -> dict[str, int]:
    try:
        world.disk.make_directory(path.parent)
        return _epochs.decode(world.disk.read(path))
    except (Missing, DiskError, msgspec.DecodeError):
        return {}
