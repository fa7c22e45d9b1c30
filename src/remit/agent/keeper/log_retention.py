"""Size and age limits of replica log files.

Decides when to rotate and sweep; world/files/log_files.py performs it. A running attempt has one file per stream and a few
rotated ones. Files of a forgotten attempt are retained for a while, so that a user can find out why it ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from remit.agent.attempts import AttemptId
from remit.agent.keeper.protocol import ProcessRecord
from remit.world.interfaces import DiskError, LogFiles, World

ROTATE_MS: Final = 1_000
FAST_ROTATE_MS: Final = 100
"""Interval between two rotations while a process writes more than a whole file in the usual interval."""
SWEEP_ROUNDS: Final = 60
"""Old files are swept once in this many rotation rounds."""


class LogBounds(NamedTuple):
    """Limits of log files. Each stream of an attempt has files of at most `file_bytes` and keeps `older` rotated ones. The
    other limits apply to the log files of ended attempts of a node: their number, total size and age.
    """

    file_bytes: int = 10 << 20
    older: int = 2
    copies: int = 500
    node_bytes: int = 256 << 20
    age_ms: int = 7 * 24 * 3_600_000

    def to_text(self) -> str:
        """Format as `file_bytes=1024,older=2`, for the keeper's command line."""
        return ",".join(f"{name}={value}" for name, value in self._asdict().items())


def parse_log_bounds(text: str) -> LogBounds:
    """Parse the format of `to_text`. Bounds that are not named keep their defaults. Raises ValueError."""
    values: dict[str, int] = {}
    for item in text.split(",") if text else ():
        name, _, value = item.partition("=")
        if name not in LogBounds._fields or not (value.isascii() and value.isdigit()):
            raise ValueError(f"{item!r} is not a log bound; expected a list such as {LogBounds().to_text()}")
        values[name] = int(value)
    return LogBounds()._replace(**values)


class LogRetention:
    """Bounds the log files of one keeper. They are below `root`, one directory per node."""

    def __init__(self, world: World, log_files: LogFiles, root: Path, bounds: LogBounds = LogBounds()) -> None:
        self._world, self._log_files, self._root, self._bounds = world, log_files, root, bounds

    async def run(self, starts: Mapping[AttemptId, ProcessRecord]) -> None:
        """Rotate and sweep until cancelled. `starts` is read again in each round."""
        rounds = 0
        while True:
            if rounds % SWEEP_ROUNDS == 0:
                retained: dict[str, list[str]] = {}
                for attempt, record in starts.items():
                    retained.setdefault(record.node, []).append(attempt.file_name)
                await self._world.offload(partial(self._sweep, retained))
            rounds += 1
            remaining_ms, fast = ROTATE_MS, [(record.node, attempt) for attempt, record in starts.items() if record.alive]
            while remaining_ms > 0:
                if fast:
                    fast = await self._world.offload(partial(self._rotate, fast))
                pause_ms = min(remaining_ms, FAST_ROTATE_MS) if fast else remaining_ms
                await self._world.clock.sleep_ms(pause_ms)
                remaining_ms -= pause_ms

    def _rotate(self, running: list[tuple[str, AttemptId]]) -> list[tuple[str, AttemptId]]:
        """Rotate the files of running attempts. Returns the attempts with a file over the limit."""
        return [
            (node, attempt) for node, attempt in running if sum(self._rotate_file(node, name) for name in attempt.log_names)
        ]

    def _rotate_file(self, node: str, name: str) -> bool:
        with suppress(DiskError):
            return self._log_files.rotate(
                self._root / node, name, bytes_max=self._bounds.file_bytes, rotated_max=self._bounds.older
            )
        return False

    def _sweep(self, retained: dict[str, list[str]]) -> None:
        bounds = self._bounds
        for node in self._nodes():
            names = retained.get(node, [])
            with suppress(DiskError):
                self._log_files.prune(
                    self._root / node, names, files_max=bounds.copies, bytes_max=bounds.node_bytes, age_ms_max=bounds.age_ms
                )

    def _nodes(self) -> Iterator[str]:
        with suppress(DiskError):
            yield from self._world.disk.list(self._root)
