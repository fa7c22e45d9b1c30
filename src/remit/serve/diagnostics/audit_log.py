"""Audit log: every action of a user and every refusal.

Every action of a user is written before it is answered, and so is every refusal of any caller. Repeated refusals are one
entry with a count, so that a flood does not fill the disk. The log is kept for months, for people who must account for what
was done; the verdicts of the authority with their reasons are its own record (commitment/outcomes.py). Bodies, secret values
and tokens are never written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from remit.model.wire.api_types import AuditItem
from remit.serve.http.replies import unavailable
from remit.world.interfaces import Clock, DiskError

FOLD_MS: Final = 10_000
FOLDS_MAX: Final = 1_024
SYNC_INTERVAL_MS: Final = 1_000
TEXT_MAX: Final = 512
READ_LINES_MAX: Final = 200_000
"""Lines examined for one answer."""

_encode: Final = msgspec.json.Encoder().encode
_item_decoder: Final[msgspec.json.Decoder[AuditItem]] = msgspec.json.Decoder(AuditItem)


class AuditStorage(Protocol):
    """Where audit lines are kept: see world/files/log_files.py."""

    def add(self, line: bytes) -> None: ...

    def sync(self) -> None: ...

    def read_backwards(self) -> Iterator[bytes]: ...


class _Fold:
    """Repetitions of one refusal."""

    __slots__ = ("count", "last", "until_ms")

    def __init__(self, until_ms: int, last: AuditItem) -> None:
        self.until_ms, self.last, self.count = until_ms, last, 0


class AuditLog:
    """The audit log of one server. `flush_counts` and `sync` are called periodically, and at shutdown."""

    def __init__(self, storage: AuditStorage, clock: Clock) -> None:
        self._storage, self._clock = storage, clock
        self._folds: dict[tuple[str, ...], _Fold] = {}
        self._write_error = ""

    def check_writable(self) -> None:
        """Raise `ApiProblem` while the log cannot be written, before an action that must be audited."""
        if self._write_error:
            self._append(AuditItem(time=self._clock.wall(), action="auditResumed", detail=self._write_error))
        if self._write_error:
            raise unavailable(
                f"the audit log cannot be written: {self._write_error}", cure="nothing was done; free disk space on the server"
            )

    def record(self, item: AuditItem) -> None:
        """Record an action at once, as an entry of its own."""
        self._append(_bounded(item))

    def record_refusal(self, item: AuditItem) -> None:
        """Record a refusal. The first of its kind is written at once; repetitions within `FOLD_MS` are counted."""
        item, now_ms = _bounded(item), self._clock.now_ms()
        key: tuple[str, ...] = (item.token, item.address if not item.token else "", item.action, item.code, str(item.status))
        fold = self._folds.get(key)
        if fold is not None and now_ms < fold.until_ms:
            fold.count, fold.last = fold.count + 1, item
            return
        if fold is None and len(self._folds) >= FOLDS_MAX:
            self._flush_counts(now_ms)
            if len(self._folds) >= FOLDS_MAX:
                key = ("", "", "", "many", "")
                item = replace(item, detail="refusals of several kinds, counted together because there were too many")
                if (fold := self._folds.get(key)) is not None:
                    fold.count, fold.last = fold.count + 1, item
                    return
        if fold is not None:
            self._write_count(fold)
        self._folds[key] = _Fold(now_ms + FOLD_MS, item)
        self._append(item)

    def record_rejected_connection(self, address: str, status: int, code: str, reason: str) -> None:
        """Record a connection that was closed before a request was read. Only its address is known."""
        self.record_refusal(
            AuditItem(time=self._clock.wall(), address=address, action="connect", status=status, code=code, detail=reason)
        )

    def flush_counts(self, *, all_: bool = False) -> None:
        """Write the counts of repeated refusals whose interval has ended, or of all."""
        self._flush_counts((1 << 62) if all_ else self._clock.now_ms())

    def sync(self) -> None:
        """Force the log to disk. Blocks; may be called off the event loop."""
        try:
            self._storage.sync()
        except DiskError as error:
            self._write_error = str(error)

    def read(self, *, limit: int, tenant: str = "", subject: str = "", action: str = "", since: str = "") -> list[AuditItem]:
        """Return matching entries, the newest first. Blocks: call it off the event loop."""
        items: list[AuditItem] = []
        for looked, line in enumerate(self._storage.read_backwards()):
            if looked >= READ_LINES_MAX or len(items) >= limit:
                break
            try:
                item = _item_decoder.decode(line)
            except (msgspec.DecodeError, ValueError):
                continue  # truncated by a crash; entries of answered requests are complete
            if since and item.time < since:
                break
            if (
                (tenant and item.tenant != tenant)
                or (subject and item.subject != subject)
                or (action and item.action != action)
            ):
                continue
            items.append(item)
        return items

    def _flush_counts(self, now_ms: int) -> None:
        for key, fold in [(key, fold) for key, fold in self._folds.items() if fold.until_ms <= now_ms]:
            del self._folds[key]
            self._write_count(fold)

    def _write_count(self, fold: _Fold) -> None:
        if fold.count:
            self._append(replace(fold.last, count=fold.count))

    def _append(self, item: AuditItem) -> None:
        try:
            self._storage.add(_encode(item) + b"\n")
            self._write_error = ""
        except DiskError as error:
            self._write_error = str(error)


def _bounded(item: AuditItem) -> AuditItem:
    if len(item.target) <= TEXT_MAX and len(item.detail) <= TEXT_MAX and len(item.trace) <= TEXT_MAX:
        return item
    long = {name: text[:TEXT_MAX] for name in ("target", "detail", "trace") if len(text := getattr(item, name)) > TEXT_MAX}
    return replace(item, **long)


class MemoryAuditStorage:
    """Keeps the latest lines in memory, for tests and simulations."""

    def __init__(self, lines_max: int = 10_000) -> None:
        self._lines: list[bytes] = []
        self._lines_max = lines_max

    def add(self, line: bytes) -> None:
        self._lines.append(line)
        if len(self._lines) > self._lines_max:
            del self._lines[: self._lines_max // 2]

    def sync(self) -> None:
        return

    def read_backwards(self) -> Iterator[bytes]:
        yield from reversed(tuple(self._lines))
