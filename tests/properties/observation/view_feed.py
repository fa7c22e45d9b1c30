"""Feeds a scheduler's view from a store: by lists, by single events and by folded events."""

from __future__ import annotations

from collections.abc import Sequence

from remit.observation.scheduler_view import LIST_RANGES, SchedulerView
from remit.store import chain
from remit.store.memory import MemoryStore
from remit.store.protocol import HEAD, WatchEvent


async def listed(view: SchedulerView, store: MemoryStore) -> None:
    page = await store.range(HEAD, limit=1)
    view.begin_list(chain.decode_head(page.rows[0].value), page.revision)
    for prefix, after in LIST_RANGES:
        rows = (await store.range(prefix, after=after, limit=10_000, revision=page.revision)).rows
        # In pages that break where they like: a grant may come before its parent.
        for start in range(0, len(rows), 3):
            view.add_page(rows[start : start + 3])
    view.end_list()


def folded(events: Sequence[WatchEvent]) -> WatchEvent:
    """Fold events as a store does for a lagging watcher, in arbitrary order."""
    last = {change.key: change for event in events for change in event.changes}
    changes = tuple(last[key] for key in sorted(last, reverse=True))
    return events[-1]._replace(changes=changes)


async def events_after(store: MemoryStore, after: int) -> list[WatchEvent]:
    watch, events = await store.watch("", after=after), list[WatchEvent]()
    try:
        now = await store.revision()
        reader = aiter(watch)
        while after < now:
            events.append(await anext(reader))
            after = events[-1].revision
    finally:
        await watch.close()
    return events
