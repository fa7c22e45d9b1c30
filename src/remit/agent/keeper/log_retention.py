"""Size and age limits of replica log files.

Bounds, and who holds to them; how files are cut is world/files/log_files.py's.

A copy that runs has a file a stream, and a few older pieces of each. When it has been forgotten its files stay for a while:
somebody may want to read why it ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from remit.agent.attempts import Copy
from remit.agent.keeper.protocol import Begun
from remit.world.interfaces import DiskError, Spool, World

LOOK_MS: Final = 1_000
FLOOD_MS: Final = 100
"""So soon it looks again while something writes more than a file between two looks."""
SWEEP_LOOKS: Final = 60
"""In looks: so often what is too old is removed."""


class LogBounds(NamedTuple):
    """The first two bound each stream of a copy, the others what is left of a node's ended copies."""

    file_bytes: int = 10 << 20
    older: int = 2
    copies: int = 500
    node_bytes: int = 256 << 20
    age_ms: int = 7 * 24 * 3_600_000

    def written(self) -> str:
        """As the command line has it: `file_bytes=1024,older=2`."""
        return ",".join(f"{name}={value}" for name, value in self._asdict().items())


def log_bounds(text: str) -> LogBounds:
    """Reads what `written` writes; what is not named stays as usual. Raises ValueError."""
    named: dict[str, int] = {}
    for word in text.split(",") if text else ():
        name, _, value = word.partition("=")
        if name not in LogBounds._fields or not (value.isascii() and value.isdigit()):
            raise ValueError(f"{word!r} is no bound; write {LogBounds().written()}")
        named[name] = int(value)
    return LogBounds()._replace(**named)


class Sayings:
    """All logs of one keeper: below `root`, a directory a node."""

    def __init__(self, world: World, spool: Spool, root: Path, bounds: LogBounds = LogBounds()) -> None:
        self._world, self._spool, self._root, self._bounds = world, spool, root, bounds

    async def hold(self, starts: Mapping[Copy, Begun]) -> None:
        """For ever. `starts` is read at each look."""
        looks = 0
        while True:
            if looks % SWEEP_LOOKS == 0:
                kept: dict[str, list[str]] = {}
                for copy, one in starts.items():
                    kept.setdefault(one.node, []).append(copy.file_name)
                await self._world.offload(partial(self._sweep, kept))
            looks += 1
            rest_ms, flooded = LOOK_MS, [(one.node, copy) for copy, one in starts.items() if one.alive]
            while rest_ms > 0:
                if flooded:
                    flooded = await self._world.offload(partial(self._rotate, flooded))
                pause_ms = min(rest_ms, FLOOD_MS) if flooded else rest_ms
                await self._world.clock.sleep_ms(pause_ms)
                rest_ms -= pause_ms

    def _rotate(self, running: list[tuple[str, Copy]]) -> list[tuple[str, Copy]]:
        """Answers of whom a file was too long."""
        return [(node, copy) for node, copy in running if sum(self._cut(node, name) for name in copy.log_names)]

    def _cut(self, node: str, name: str) -> bool:
        with suppress(DiskError):
            return self._spool.rotate(self._root / node, name, bytes_max=self._bounds.file_bytes, older=self._bounds.older)
        return False

    def _sweep(self, kept: dict[str, list[str]]) -> None:
        bounds = self._bounds
        for node in self._nodes():
            names = kept.get(node, [])
            with suppress(DiskError):
                self._spool.sweep(
                    self._root / node, names, files=bounds.copies, bytes_max=bounds.node_bytes, age_ms=bounds.age_ms
                )

    def _nodes(self) -> Iterator[str]:
        with suppress(DiskError):
            yield from self._world.disk.list(self._root)
