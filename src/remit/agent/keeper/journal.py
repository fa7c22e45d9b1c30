"""Append-only journal of process starts, so that a restarted keeper recovers its children.

Three records are written per start. The first marks the *begin* of the start; it is durable before the start, so that no later
keeper repeats it. The other two hold the *process id* and the *exit status*. They need not survive a crash of the machine,
which ends the process anyway. The file is compacted when most of its records are of forgotten attempts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from remit.agent.attempts import AttemptId
from remit.agent.keeper.protocol import NO_START, ProcessRecord
from remit.world.interfaces import Disk, DiskError, FileMissing, Offload

COMPACT_LINES: Final = 10_000
"""A longer file is compacted once most of its records are obsolete."""

_encoder = msgspec.json.Encoder()
_record_decoder: msgspec.json.Decoder[ProcessRecord] = msgspec.json.Decoder(ProcessRecord)


class Journal:
    """The journal file. Its methods block: they are called through an offload, one at a time. `read` returns the latest record
    of each attempt.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk, self._path = disk, path
        self._line_count = 0
        self._last_line_is_torn = False
        """The last line may be incomplete after a failed write, so the next write begins with a newline."""

    def read(self) -> dict[AttemptId, ProcessRecord]:
        self._disk.make_directory(self._path.parent)
        try:
            data = self._disk.read(self._path)
        except FileMissing:
            return {}
        self._last_line_is_torn = bool(data) and not data.endswith(b"\n")
        records: dict[AttemptId, ProcessRecord] = {}
        for line in data.split(b"\n"):
            record = _decode_line(line)
            if record is None:
                continue
            self._line_count += 1
            if record.number == NO_START:
                records.pop(record.attempt_id, None)
            else:
                records[record.attempt_id] = record
        return records

    def write(self, entries: Sequence[ProcessRecord], *, durably: bool) -> None:
        self._line_count += len(entries)
        lines = b"".join(_encoder.encode(entry) + b"\n" for entry in entries)
        torn, self._last_line_is_torn = self._last_line_is_torn, True
        self._disk.append(self._path, b"\n" * torn + lines, durably=durably)
        self._last_line_is_torn = False

    def needs_compaction(self, live: int) -> bool:
        return self._line_count > COMPACT_LINES + 4 * live

    def compact(self, entries: list[ProcessRecord]) -> None:
        self._disk.write_atomically(self._path, b"".join(_encoder.encode(entry) + b"\n" for entry in entries))
        self._line_count = len(entries)


class GroupCommitWriter:
    """Group commit: entries that arrive during a write go into the next one, with one append and one fsync for the group."""

    def __init__(self, journal: Journal, offload: Offload) -> None:
        self._journal, self._offload = journal, offload
        self._lock = asyncio.Lock()
        self._pending: list[_PendingWrite] = []

    async def write(
        self, entries: Sequence[ProcessRecord], *, durably: bool, prepare: Callable[[], None] | None = None
    ) -> None:
        """Write entries; returns once they are written. `prepare` runs before, in the same offloaded call. Raises `DiskError`;
        the entries may have been written even then.
        """
        pending = _PendingWrite(entries, durably, prepare, asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        if len(self._pending) == 1:  # the first of a group writes for all of it
            await self._write_group()
        await pending.done

    async def _write_group(self) -> None:
        group: list[_PendingWrite] = []
        try:
            async with self._lock:
                await asyncio.sleep(0)  # include writes requested in the same iteration of the event loop
                group, self._pending = self._pending, []
                failures = await self._offload(lambda: self._write_entries(group))
        except BaseException:
            if not group:
                group, self._pending = self._pending, []
            for pending in group:
                pending.done.cancel()
            raise
        for pending, error in zip(group, failures, strict=True):
            if pending.done.done():  # its caller was cancelled
                continue
            if error is None:
                pending.done.set_result(None)
            else:
                pending.done.set_exception(error)

    def _write_entries(self, group: Sequence[_PendingWrite]) -> list[DiskError | None]:
        """Write a group. Returns the error of each entry, or None."""
        failures = [pending.run_prepare() for pending in group]
        writable = [pending for pending, error in zip(group, failures, strict=True) if error is None]
        try:
            entries = [entry for pending in writable for entry in pending.entries]
            self._journal.write(entries, durably=any(pending.durably for pending in writable))
        except DiskError as error:
            return [earlier or error for earlier in failures]
        return failures


class _PendingWrite(NamedTuple):
    entries: Sequence[ProcessRecord]
    durably: bool
    prepare: Callable[[], None] | None
    done: asyncio.Future[None]

    def run_prepare(self) -> DiskError | None:
        try:
            if self.prepare is not None:
                self.prepare()
        except DiskError as error:
            return error
        return None


def tombstone(record: ProcessRecord) -> ProcessRecord:
    """Return the journal record that marks an attempt as forgotten."""
    return msgspec.structs.replace(record, number=NO_START, ports={}, failed="", cure="")


def _decode_line(line: bytes) -> ProcessRecord | None:
    """Decode a line. None for a line that a crash cut off: its write was never acknowledged."""
    try:
        return _record_decoder.decode(line) if line else None
    except (msgspec.DecodeError, ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
        return None
