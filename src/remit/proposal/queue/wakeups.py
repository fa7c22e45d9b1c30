"""Which waiting queues an event unblocks, including events that came during an attempt.

This module only matches and remembers events; backlog.py wakes the queues.

`UnblockHistory` prevents lost wake-ups. An attempt sees the view at some version and ends later. If it ends in a wait for an
event that happened in between, no further event would wake the queue. The end of an attempt therefore checks the history
first. The history is bounded, and an event that was dropped counts as happened: a queue may be tried once too often, but
never too rarely.

`WakeupMatcher` selects among the queues that wait for capacity or for a node. A changed row wakes a queue whose replicas fit
there now. It also wakes a queue that the row rejects only for reasons the queue is not waiting for: the recorded reason is
then out of date, and the event that ends the actual reason would not wake the queue.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from remit.observation.node_columns import Ints
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.funnel import refused_only_by
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.plugins import PEER_CHECKS, PluginError, applies
from remit.proposal.queue.class_queues import ClassQueue, UnblockKey

EVENTS_MAX: Final = 4096
PREDICATES_MAX: Final = 64

QueuePredicate = Callable[[ClassQueue], bool]
"""Whether an event concerns this queue. Called when the event happens, or later, at the end of an attempt that was in progress.
"""


class _EventHistory:
    """Versions of one event: the last one for all queues, and later ones for selected queues."""

    __slots__ = ("for_selected", "last_for_all")

    def __init__(self) -> None:
        self.last_for_all = -1
        self.for_selected: deque[tuple[int, QueuePredicate]] = deque()


class UnblockHistory:
    def __init__(self, events_max: int = EVENTS_MAX, predicates_max: int = PREDICATES_MAX) -> None:
        if min(events_max, predicates_max) < 1:
            raise ValueError(f"the limits must be at least 1: events_max={events_max}, predicates_max={predicates_max}")
        self._events_max, self._predicates_max = events_max, predicates_max
        self._events: OrderedDict[UnblockKey, _EventHistory] = OrderedDict()
        self.dropped_version = -1
        """The latest version of which an entry was dropped."""

    def __len__(self) -> int:
        return len(self._events)

    def record(self, event: UnblockKey, version: int, predicate: QueuePredicate | None = None) -> None:
        """Records an event for all queues, or for those that `which` selects."""
        history = self._events.get(event)
        if history is None:
            history = self._events[event] = _EventHistory()
        self._events.move_to_end(event)
        if predicate is None:
            history.last_for_all = max(history.last_for_all, version)
            history.for_selected = deque(entry for entry in history.for_selected if entry[0] > version)
        else:
            history.for_selected.append((version, predicate))
            if len(history.for_selected) > self._predicates_max:
                # The predicate is dropped, so the event counts for all queues.
                history.last_for_all = max(history.last_for_all, history.for_selected.popleft()[0])
        if len(self._events) > self._events_max:
            _, oldest = self._events.popitem(last=False)
            self.dropped_version = max(
                self.dropped_version, oldest.last_for_all, *(version for version, _ in oldest.for_selected)
            )

    def happened_since(self, queue: ClassQueue, events: Iterable[UnblockKey], since: int) -> bool:
        """Whether one of these events happened for this queue after version `since`, or may have happened and was dropped."""
        if since < self.dropped_version:
            return True
        for event in events:
            history = self._events.get(event)
            if history is not None and (
                history.last_for_all > since or any(version > since and which(queue) for version, which in history.for_selected)
            ):
                return True
        return False


class WakeupMatcher:
    """Predicates for changed rows. `class_of` returns the class of a queue; None if its shape no longer exists."""

    def __init__(self, kernel: Kernel, class_of: Callable[[ClassQueue], WorkClass | None]) -> None:
        self._kernel, self._class_of = kernel, class_of

    def fits_on(self, rows: Sequence[int]) -> QueuePredicate:
        """Selects queues whose replicas fit on one of these rows, where capacity was released."""
        at = np.array(rows, dtype=np.int64)
        largest_free = {name: int(column[at].max()) for name, column in self._kernel.columns.free.items()}

        def fits(line: ClassQueue) -> bool:
            try:
                work_class = self._class_of(line)
                if work_class is None:
                    return True
                if any(need > largest_free.get(name, 0) for name, need in work_class.requirements.resources):
                    return False
                return bool((self._kernel.refresh(work_class)[at] >= 0).any()) or self._has_unawaited_blocker(
                    line, work_class, at
                )
            except PluginError:
                return True

        return fits

    def open_on(self, rows: Sequence[int]) -> QueuePredicate:
        """Selects queues whose replicas could run on one of these rows by node attributes, if necessary after preemption."""
        at = np.array(rows, dtype=np.int64)

        def is_open(line: ClassQueue) -> bool:
            try:
                work_class = self._class_of(line)
                if work_class is None:
                    return True
                self._kernel.refresh(work_class)
                return not work_class.closed[at].all() or self._has_unawaited_blocker(line, work_class, at)
            except PluginError:
                return True

        return is_open

    def uses_spread(self, queue: ClassQueue) -> bool:
        """Whether the queue has a topology spread, so that a new or removed domain can unblock it."""
        try:
            work_class = self._class_of(queue)
        except PluginError:
            return True
        return work_class is None or bool(work_class.requirements.spread)

    def _has_unawaited_blocker(self, queue: ClassQueue, work_class: WorkClass, rows: Ints) -> bool:
        """Whether one of these rows is rejected only by filters whose unblock events the queue does not wait for."""
        awaited = (
            {str(event[0]) for event in queue.wait.unblock_events if isinstance(event, tuple)}
            if queue.wait is not None
            else set()
        )
        unawaited = [
            filter_
            for filter_ in self._kernel.all_filters
            if not awaited.issuperset(filter_.unblock_events) and applies(filter_, work_class.requirements)
        ]
        if not work_class.excluded_on_node and all(filter_.check in PEER_CHECKS for filter_ in unawaited):
            return False  # cached scores ignore rules about wider domains, so these rules have closed no row here
        return refused_only_by(self._kernel, work_class, rows, unawaited)
