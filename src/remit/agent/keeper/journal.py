"""Append-only journal of process starts, so that a restarted keeper recovers its children.

A file that is only added to, so that one who was killed finds again what it had started.

Three things are written of each start. That it is *begun*, durably, before it is: whoever reads this starts it never again. As
what it *runs*, and how it *ended*: these need not outlive the machine, which would end it too. A file of mostly forgotten
starts is written anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from remit.agent.attempts import Copy
from remit.agent.keeper.protocol import NEVER, Begun
from remit.world.interfaces import Disk, DiskError, Missing, Offload

REWRITE_LINES: Final = 10_000
"""A longer file is written anew once most of what it tells is forgotten."""

_encoder = msgspec.json.Encoder()
_lines: msgspec.json.Decoder[Begun] = msgspec.json.Decoder(Begun)


class Journal:
    """It blocks: called through an offload, one call at a time. `starts` is what was read, by copy: the latest of each."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk, self._path = disk, path
        self._lines = 0
        self._torn = False
        """May the last line have been cut off? Then the next one begins on a line of its own."""

    def read(self) -> dict[Copy, Begun]:
        self._disk.make_directory(self._path.parent)
        try:
            data = self._disk.read(self._path)
        except Missing:
            return {}
        self._torn = bool(data) and not data.endswith(b"\n")
        found: dict[Copy, Begun] = {}
        for line in data.split(b"\n"):
            kept = _read_line(line)
            if kept is None:
                continue
            self._lines += 1
            if kept.number == NEVER:
                found.pop(kept.copy, None)
            else:
                found[kept.copy] = kept
        return found

    def write(self, entries: Sequence[Begun], *, durably: bool) -> None:
        self._lines += len(entries)
        lines = b"".join(_encoder.encode(one) + b"\n" for one in entries)
        torn, self._torn = self._torn, True
        self._disk.append(self._path, b"\n" * torn + lines, durably=durably)
        self._torn = False

    def grown(self, live: int) -> bool:
        return self._lines > REWRITE_LINES + 4 * live

    def rewrite(self, entries: list[Begun]) -> None:
        self._disk.write_atomically(self._path, b"".join(_encoder.encode(one) + b"\n" for one in entries))
        self._lines = len(entries)


class Scribe:
    """Writes in groups: whoever comes while one group is being written is in the next, with one write and one force for all."""

    def __init__(self, journal: Journal, offload: Offload) -> None:
        self._journal, self._offload = journal, offload
        self._turn = asyncio.Lock()
        self._waiting: list[_Line] = []

    async def write(self, entries: Sequence[Begun], *, durably: bool, first: Callable[[], None] | None = None) -> None:
        """Returns once they are written, and `first` was done before. Raises `DiskError`: then they may be written or not."""
        line = _Line(entries, durably, first, asyncio.get_running_loop().create_future())
        self._waiting.append(line)
        if len(self._waiting) == 1:  # the first of a group writes for all of it
            await self._write_group()
        await line.written

    async def _write_group(self) -> None:
        group: list[_Line] = []
        try:
            async with self._turn:
                await asyncio.sleep(0)  # whoever asks in the same moment is in it, too
                group, self._waiting = self._waiting, []
                failures = await self._offload(lambda: self._written(group))
        except BaseException:
            if not group:
                group, self._waiting = self._waiting, []
            for line in group:
                line.written.cancel()
            raise
        for line, error in zip(group, failures, strict=True):
            if line.written.done():  # nobody waits for it any more
                continue
            if error is None:
                line.written.set_result(None)
            else:
                line.written.set_exception(error)

    def _written(self, group: Sequence[_Line]) -> list[DiskError | None]:
        """What has failed for each."""
        failures = [line.prepared() for line in group]
        lines = [line for line, error in zip(group, failures, strict=True) if error is None]
        try:
            entries = [entry for line in lines for entry in line.entries]
            self._journal.write(entries, durably=any(line.durably for line in lines))
        except DiskError as error:
            return [earlier or error for earlier in failures]
        return failures


class _Line(NamedTuple):
    entries: Sequence[Begun]
    durably: bool
    first: Callable[[], None] | None
    written: asyncio.Future[None]

    def prepared(self) -> DiskError | None:
        try:
            if self.first is not None:
                self.first()
        except DiskError as error:
            return error
        return None


def forgotten(kept: Begun) -> Begun:
    """What is written when a copy is forgotten."""
    return msgspec.structs.replace(kept, number=NEVER, ports={}, failed="", cure="")


def _read_line(line: bytes) -> Begun | None:
    """None for a line that was cut off by a crash: what it would have told was not relied on yet."""
    try:
        return _lines.decode(line) if line else None
    except (msgspec.DecodeError, ValueError, RecursionError):  # no JSON, no text, or brackets without end
        return None
