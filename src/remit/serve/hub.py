"""Who hears of which change? A board's changes, shared out to those who listen: each row is written out once for all of them.

One who does not keep up has its changes folded, the last of each object staying; beyond a bound it is told that it lags.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from remit.observation.board import Board, Kept
from remit.serve.shown import gone, parts_of, shown

CHANGES_MAX: Final = 8_192
"""So many objects may have changed that a listener has not been told of."""

_encode: Final = msgspec.json.Encoder().encode


class Told:
    """What became of one object. `old` and `new` are None where there was none, or is none; its lines are written once."""

    __slots__ = ("_changed", "_deleted", "key", "new", "old", "revision", "value")

    def __init__(self, key: str, value: bytes | None, revision: int, old: Any, new: Any) -> None:
        self.key, self.value, self.revision, self.old, self.new = key, value, revision, old, new
        self._changed = self._deleted = b""

    def changed(self) -> bytes:
        if not self._changed and self.value is not None:
            told = shown(parts_of(self.key)[0], self.value, self.revision)
            self._changed = b'{"type":"changed","revision":%d,"object":%b}\n' % (self.revision, told)
        return self._changed

    def deleted(self) -> bytes:
        if not self._deleted:
            self._deleted = b'{"type":"deleted","revision":%d,"object":%b}\n' % (self.revision, _encode(gone(self.key)))
        return self._deleted


class Listening:
    """One watch: what has changed for it since it was last told, by key."""

    __slots__ = ("_came", "_changes", "lagging")

    def __init__(self) -> None:
        self._changes: dict[str, tuple[Any, Told]] = {}
        self._came = asyncio.Event()
        self.lagging = False

    def tell(self, told: Told) -> None:
        """Of several changes of one object the first `old` counts, and the last of all else."""
        before = self._changes.pop(told.key, None)
        self._changes[told.key] = (told.old if before is None else before[0], told)
        if len(self._changes) > CHANGES_MAX:
            self.lagging = True
            self._changes.clear()

    def wake(self) -> None:
        self._came.set()

    async def wait(self) -> None:
        await self._came.wait()

    def take(self) -> list[tuple[Any, Told]]:
        self._came.clear()
        changes, self._changes = self._changes, {}
        return list(changes.values())


class Hub:
    """Shares a board's changes out. Satisfies `observation.board.Listener`; it costs little while nobody listens."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._by_prefix: dict[str, dict[Listening, None]] = {}
        self._pending: list[tuple[Told, tuple[str, str]]] = []
        board.subscribe(self)

    @property
    def revision(self) -> int:
        return self._board.revision

    @property
    def incarnation(self) -> str:
        return self._board.head.incarnation if self._board.head is not None else ""

    def changed(self, key: str, old: Any, new: Any) -> None:
        if not self._by_prefix:
            return
        word, _, rest = key.partition("/")
        prefixes = f"{word}/", f"{word}/{rest.partition('/')[0]}/"
        if prefixes[0] in self._by_prefix or prefixes[1] in self._by_prefix:
            kept = self._board.rows.get(key)
            old, new = (one.thing if isinstance(one, Kept) else one for one in (old, new))
            told = Told(key, kept.value, kept.revision, old, new) if kept is not None else Told(key, None, 0, old, None)
            self._pending.append((told, prefixes))

    def reached(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        woken: dict[Listening, None] = {}
        for told, prefixes in pending:
            told.revision = told.revision or self._board.revision  # of a deletion the board knows no more
            for prefix in prefixes:
                for listening in self._by_prefix.get(prefix, ()):
                    listening.tell(told)
                    woken[listening] = None
        for listening in woken:
            listening.wake()

    @contextmanager
    def listening(self, prefix: str) -> Iterator[Listening]:
        mine = Listening()
        self._by_prefix.setdefault(prefix, {})[mine] = None
        try:
            yield mine
        finally:
            del self._by_prefix[prefix][mine]
            if not self._by_prefix[prefix]:
                del self._by_prefix[prefix]
