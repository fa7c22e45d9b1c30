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
SETTLE_MS: Final = 1_000
TEXT_MAX: Final = 512
READ_LINES_MAX: Final = 200_000
"""So many lines are looked at for one answer."""

_encode: Final = msgspec.json.Encoder().encode
_items: Final[msgspec.json.Decoder[AuditItem]] = msgspec.json.Decoder(AuditItem)


class Trail(Protocol):
    """Where lines are kept: see world/files/log_files.py."""

    def add(self, line: bytes) -> None: ...

    def settle(self) -> None: ...

    def backwards(self) -> Iterator[bytes]: ...


class _Fold:
    """The same refusal, over and over."""

    __slots__ = ("count", "last", "until_ms")

    def __init__(self, until_ms: int, last: AuditItem) -> None:
        self.until_ms, self.last, self.count = until_ms, last, 0


class Audit:
    """One server's. `unfold` and `settle` are called now and then, and at the end."""

    def __init__(self, trail: Trail, clock: Clock) -> None:
        self._trail, self._clock = trail, clock
        self._folds: dict[tuple[str, ...], _Fold] = {}
        self._broken = ""

    def check(self) -> None:
        """May something be done that must be written down? Raises `Failure` while nothing can be written."""
        if self._broken:
            self._add(AuditItem(time=self._clock.wall(), action="auditResumed", detail=self._broken))
        if self._broken:
            raise unavailable(
                f"the audit cannot be written: {self._broken}", cure="make room on the server's disk; nothing was done"
            )

    def note(self, item: AuditItem) -> None:
        """Of a deed: at once, and by itself."""
        self._add(_bounded(item))

    def refused(self, item: AuditItem) -> None:
        """The first of its sort at once; those that follow soon are counted."""
        item, now_ms = _bounded(item), self._clock.now_ms()
        key: tuple[str, ...] = (item.token, item.address if not item.token else "", item.action, item.code, str(item.status))
        fold = self._folds.get(key)
        if fold is not None and now_ms < fold.until_ms:
            fold.count, fold.last = fold.count + 1, item
            return
        if fold is None and len(self._folds) >= FOLDS_MAX:
            self._unfold(now_ms)
            if len(self._folds) >= FOLDS_MAX:
                key = ("", "", "", "many", "")
                item = replace(item, detail="too many sorts of refusals at once: these are of several")
                if (fold := self._folds.get(key)) is not None:
                    fold.count, fold.last = fold.count + 1, item
                    return
        if fold is not None:
            self._tell(fold)
        self._folds[key] = _Fold(now_ms + FOLD_MS, item)
        self._add(item)

    def unfold(self, *, all_: bool = False) -> None:
        """Write down what was counted."""
        self._unfold((1 << 62) if all_ else self._clock.now_ms())

    def settle(self) -> None:
        """Force all of it to the disk. It blocks, and may be asked elsewhere than on the event loop."""
        try:
            self._trail.settle()
        except DiskError as error:
            self._broken = str(error)

    def read(self, *, limit: int, tenant: str = "", subject: str = "", action: str = "", since: str = "") -> list[AuditItem]:
        """The newest first. It blocks: ask it elsewhere than on the event loop."""
        found: list[AuditItem] = []
        for looked, line in enumerate(self._trail.backwards()):
            if looked >= READ_LINES_MAX or len(found) >= limit:
                break
            try:
                item = _items.decode(line)
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
            found.append(item)
        return found

    def _unfold(self, now_ms: int) -> None:
        for key, fold in [(key, fold) for key, fold in self._folds.items() if fold.until_ms <= now_ms]:
            del self._folds[key]
            self._tell(fold)

    def _tell(self, fold: _Fold) -> None:
        if fold.count:
            self._add(replace(fold.last, count=fold.count))

    def _add(self, item: AuditItem) -> None:
        try:
            self._trail.add(_encode(item) + b"\n")
            self._broken = ""
        except DiskError as error:
            self._broken = str(error)


def _bounded(item: AuditItem) -> AuditItem:
    if len(item.target) <= TEXT_MAX and len(item.detail) <= TEXT_MAX and len(item.trace) <= TEXT_MAX:
        return item
    long = {name: text[:TEXT_MAX] for name in ("target", "detail", "trace") if len(text := getattr(item, name)) > TEXT_MAX}
    return replace(item, **long)


class MemoryTrail:
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
