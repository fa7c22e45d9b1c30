"""Fan-out of watch cache changes to watchers, encoded once.

A board's changes, shared out to those who listen: written out once for all of them.

One who does not keep up has its changes folded, the last of each object staying; beyond a bound it is told that it lags.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from remit.observation.watch_cache import Board, Kept
from remit.serve.http.streams import Bookmark, line
from remit.serve.objects.rendering import gone, parts_of, shown

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


class News:
    """What has changed, one entry an object: what it was before, and what became of it. Most who listen hear the same news, so
    all of it is written out once.
    """

    __slots__ = ("_piece", "_until", "changes", "first")

    def __init__(self, changes: dict[str, tuple[Any, Told]]) -> None:
        self.changes = changes
        self.first = min((told.revision for _, told in changes.values()), default=0)
        """Nothing in it is of an earlier revision."""
        self._piece, self._until = b"", -1

    def piece(self, until: int) -> bytes:
        """All of it, and that everything up to `until` has been told."""
        if self._until != until:
            lines = [told.deleted() if told.value is None else told.changed() for _, told in self.changes.values()]
            self._piece, self._until = b"".join(lines) + line(Bookmark(until)), until
        return self._piece


class Listening:
    """One watch: what has changed for it since it was last told. `at_once`, while it waits: tell it without waking it; False if
    that cannot be done.
    """

    __slots__ = ("_came", "_mine", "_news", "at_once", "lagging")

    def __init__(self) -> None:
        self._news: News | None = None
        self._mine = False
        """Is it ours alone, so that more can be added?"""
        self._came = asyncio.Event()
        self.at_once: Callable[[News], bool] | None = None
        self.lagging = False

    def tell(self, news: News) -> None:
        if self._news is None:
            if self.at_once is not None and self.at_once(news):
                return
            self._news, self._mine = news, False
        else:
            changes = self._news.changes if self._mine else dict(self._news.changes)
            for _, told in news.changes.values():
                fold(changes, told)
            self._news, self._mine = News(changes), True
        if len(self._news.changes) > CHANGES_MAX:
            self.lagging, self._news = True, None
        self._came.set()

    def wake(self) -> None:
        self._came.set()

    async def wait(self) -> None:
        await self._came.wait()

    def take(self) -> News | None:
        self._came.clear()
        news, self._news = self._news, None
        return news


def fold(changes: dict[str, tuple[Any, Told]], told: Told) -> None:
    """Of several changes of one object the first `old` counts, and the last of all else."""
    before = changes.pop(told.key, None)
    changes[told.key] = (told.old if before is None else before[0], told)


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
        by_prefix: dict[str, dict[str, tuple[Any, Told]]] = {}
        for told, prefixes in pending:
            told.revision = told.revision or self._board.revision  # of a deletion the board knows no more
            for prefix in prefixes:
                if prefix in self._by_prefix:
                    fold(by_prefix.setdefault(prefix, {}), told)
        for prefix, changes in by_prefix.items():
            news = News(changes)
            for listening in self._by_prefix[prefix]:
                listening.tell(news)

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
