"""Fan-out of watch cache changes to watchers, encoded once.

Each change is encoded once for all watches. A watch that falls behind gets only the latest change of each object; past
`PENDING_CHANGES_MAX` objects it is marked as lagging and must list again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from remit.observation.watch_cache import CachedRow, WatchCache
from remit.serve.http.streams import BookmarkLine, json_line
from remit.serve.objects.rendering import deleted_object, render_object, split_key

PENDING_CHANGES_MAX: Final = 8_192
"""Objects with changes that a watch has not received."""

_encode: Final = msgspec.json.Encoder().encode


class ObjectChange:
    """A change of one object, encoded on demand and once. `old` or `new` is None if the object did not exist before, or was
    deleted.
    """

    __slots__ = ("_changed_line", "_deleted_line", "key", "new", "old", "revision", "value")

    def __init__(self, key: str, value: bytes | None, revision: int, old: Any, new: Any) -> None:
        self.key, self.value, self.revision, self.old, self.new = key, value, revision, old, new
        self._changed_line = self._deleted_line = b""

    def changed_line(self) -> bytes:
        if not self._changed_line and self.value is not None:
            rendered = render_object(split_key(self.key)[0], self.value, self.revision)
            self._changed_line = b'{"type":"changed","revision":%d,"object":%b}\n' % (self.revision, rendered)
        return self._changed_line

    def deleted_line(self) -> bytes:
        if not self._deleted_line:
            self._deleted_line = b'{"type":"deleted","revision":%d,"object":%b}\n' % (
                self.revision,
                _encode(deleted_object(self.key)),
            )
        return self._deleted_line


class ChangeBatch:
    """Changes by object key: the object before the first change, and the last change. Most watches get the same batch, so it is
    encoded once.
    """

    __slots__ = ("_encoded", "_encoded_until", "changes", "first_revision")

    def __init__(self, changes: dict[str, tuple[Any, ObjectChange]]) -> None:
        self.changes = changes
        self.first_revision = min((change.revision for _, change in changes.values()), default=0)
        """Lowest revision of the changes in the batch."""
        self._encoded, self._encoded_until = b"", -1

    def encode(self, until: int) -> bytes:
        """Return all changes as lines, followed by a bookmark for revision `until`."""
        if self._encoded_until != until:
            lines = [
                change.deleted_line() if change.value is None else change.changed_line() for _, change in self.changes.values()
            ]
            self._encoded, self._encoded_until = b"".join(lines) + json_line(BookmarkLine(until)), until
        return self._encoded


class Subscription:
    """Changes that one watch has not received yet. `try_send` is set while the watch is idle: it sends a batch without waking
    the watch's task, and returns False if it cannot.
    """

    __slots__ = ("_owns_pending", "_pending", "_woken", "is_lagging", "try_send")

    def __init__(self) -> None:
        self._pending: ChangeBatch | None = None
        self._owns_pending = False
        """Whether the pending batch belongs to this watch alone, so that changes can be added in place."""
        self._woken = asyncio.Event()
        self.try_send: Callable[[ChangeBatch], bool] | None = None
        self.is_lagging = False

    def deliver(self, batch: ChangeBatch) -> None:
        if self._pending is None:
            if self.try_send is not None and self.try_send(batch):
                return
            self._pending, self._owns_pending = batch, False
        else:
            changes = self._pending.changes if self._owns_pending else dict(self._pending.changes)
            for _, change in batch.changes.values():
                merge_change(changes, change)
            self._pending, self._owns_pending = ChangeBatch(changes), True
        if len(self._pending.changes) > PENDING_CHANGES_MAX:
            self.is_lagging, self._pending = True, None
        self._woken.set()

    def wake(self) -> None:
        self._woken.set()

    async def wait(self) -> None:
        await self._woken.wait()

    def take(self) -> ChangeBatch | None:
        self._woken.clear()
        batch, self._pending = self._pending, None
        return batch


def merge_change(changes: dict[str, tuple[Any, ObjectChange]], change: ObjectChange) -> None:
    """Add a change. For several changes of one object, the first `old` and the last change count."""
    previous = changes.pop(change.key, None)
    changes[change.key] = (change.old if previous is None else previous[0], change)


class WatchHub:
    """Distributes changes of a watch cache by key prefix. Satisfies `observation.watch_cache.CacheListener`; costs little
    without watches.
    """

    def __init__(self, watch_cache: WatchCache) -> None:
        self._watch_cache = watch_cache
        self._by_prefix: dict[str, dict[Subscription, None]] = {}
        self._pending: list[tuple[ObjectChange, tuple[str, str]]] = []
        watch_cache.subscribe(self)

    @property
    def revision(self) -> int:
        return self._watch_cache.revision

    @property
    def incarnation(self) -> str:
        return self._watch_cache.head.incarnation if self._watch_cache.head is not None else ""

    def on_change(self, key: str, old: Any, new: Any) -> None:
        if not self._by_prefix:
            return
        kind_prefix, _, rest = key.partition("/")
        prefixes = f"{kind_prefix}/", f"{kind_prefix}/{rest.partition('/')[0]}/"
        if prefixes[0] in self._by_prefix or prefixes[1] in self._by_prefix:
            row = self._watch_cache.rows.get(key)
            old, new = (value.obj if isinstance(value, CachedRow) else value for value in (old, new))
            change = (
                ObjectChange(key, row.value, row.revision, old, new)
                if row is not None
                else ObjectChange(key, None, 0, old, None)
            )
            self._pending.append((change, prefixes))

    def on_commit(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        by_prefix: dict[str, dict[str, tuple[Any, ObjectChange]]] = {}
        for change, prefixes in pending:
            change.revision = change.revision or self._watch_cache.revision  # a deleted row has no revision in the watch cache
            for prefix in prefixes:
                if prefix in self._by_prefix:
                    merge_change(by_prefix.setdefault(prefix, {}), change)
        for prefix, changes in by_prefix.items():
            batch = ChangeBatch(changes)
            for subscription in self._by_prefix[prefix]:
                subscription.deliver(batch)

    @contextmanager
    def subscribe(self, prefix: str) -> Iterator[Subscription]:
        subscription = Subscription()
        self._by_prefix.setdefault(prefix, {})[subscription] = None
        try:
            yield subscription
        finally:
            del self._by_prefix[prefix][subscription]
            if not self._by_prefix[prefix]:
                del self._by_prefix[prefix]
