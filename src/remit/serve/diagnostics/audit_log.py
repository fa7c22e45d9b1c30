"""Audit log: every human action and every refusal.

A line for each, kept for months rather than minutes; nothing is decided by it.

Every deed of a person stands here before it is answered, and so does every refusal of anybody. The same refusal again and again
is one line with a count: a flood fills no disk. What the authority decided, with its reasons, is its own record (`outcomes`);
this is the one for people who must answer for what was done. No body, no value of a secret and no token is ever written here.
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
"""So many lines are looked at for one answer."""

_encode: Final = msgspec.json.Encoder().encode
_item_decoder: Final[msgspec.json.Decoder[AuditItem]] = msgspec.json.Decoder(AuditItem)


class AuditStorage(Protocol):
    """Where lines are kept: see world/files/log_files.py."""

    def add(self, line: bytes) -> None: ...

    def settle(self) -> None: ...

    def backwards(self) -> Iterator[bytes]: ...


class _Fold:
    """The same refusal, over and over."""

    __slots__ = ("count", "last", "until_ms")

    def __init__(self, until_ms: int, last: AuditItem) -> None:
        self.until_ms, self.last, self.count = until_ms, last, 0


class AuditLog:
    """One server's. `unfold` and `settle` are called now and then, and at the end."""

    def __init__(self, storage: AuditStorage, clock: Clock) -> None:
        self._storage, self._clock = storage, clock
        self._folds: dict[tuple[str, ...], _Fold] = {}
        self._write_error = ""

    def check_writable(self) -> None:
        """May something be done that must be written down? Raises `Failure` while nothing can be written."""
        if self._write_error:
            self._append(AuditItem(time=self._clock.wall(), action="auditResumed", detail=self._write_error))
        if self._write_error:
            raise unavailable(
                f"the audit cannot be written: {self._write_error}", cure="make room on the server's disk; nothing was done"
            )

    def record(self, item: AuditItem) -> None:
        """Of a deed: at once, and by itself."""
        self._append(_bounded(item))

    def record_refusal(self, item: AuditItem) -> None:
        """The first of its sort at once; those that follow soon are counted."""
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
                item = replace(item, detail="too many sorts of refusals at once: these are of several")
                if (fold := self._folds.get(key)) is not None:
                    fold.count, fold.last = fold.count + 1, item
                    return
        if fold is not None:
            self._write_count(fold)
        self._folds[key] = _Fold(now_ms + FOLD_MS, item)
        self._append(item)

    def flush_counts(self, *, all_: bool = False) -> None:
        """Write down what was counted."""
        self._flush_counts((1 << 62) if all_ else self._clock.now_ms())

    def sync(self) -> None:
        """Force all of it to the disk. It blocks, and may be asked elsewhere than on the event loop."""
        try:
            self._storage.settle()
        except DiskError as error:
            self._write_error = str(error)

    def read(self, *, limit: int, tenant: str = "", subject: str = "", action: str = "", since: str = "") -> list[AuditItem]:
        """The newest first. It blocks: ask it elsewhere than on the event loop."""
        items: list[AuditItem] = []
        for looked, line in enumerate(self._storage.backwards()):
            if looked >= READ_LINES_MAX or len(items) >= limit:
                break
            try:
                item = _item_decoder.decode(line)
            except (msgspec.DecodeError, ValueError):
                continue  # cut short by a kill: what was answered is whole
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
    """For a server that keeps nothing, as one in a test or a simulation does. The last lines only."""

    def __init__(self, lines_max: int = 10_000) -> None:
        self._lines: list[bytes] = []
        self._lines_max = lines_max

    def add(self, line: bytes) -> None:
        self._lines.append(line)
        if len(self._lines) > self._lines_max:
            del self._lines[: self._lines_max // 2]

    def settle(self) -> None:
        return

    def backwards(self) -> Iterator[bytes]:
        yield from reversed(tuple(self._lines))
