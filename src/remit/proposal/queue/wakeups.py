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
from remit.proposal.queue.class_queues import UnblockKey, ClassQueue

EVENTS_MAX: Final = 4096
PREDICATES_MAX: Final = 64

QueuePredicate = Callable[[ClassQueue], bool]
"""Whether an event concerns this queue. Called when the event happens, or later, at the end of an attempt that was in progress.
"""


class _EventHistory:
    """Versions of one event: the last one for all queues, and later ones for selected queues."""

    __slots__ = ("everybody", "some")

    def __init__(self) -> None:
        self.everybody = -1
        self.some: deque[tuple[int, QueuePredicate]] = deque()


class UnblockHistory:
    def __init__(self, cures_max: int = EVENTS_MAX, partly_max: int = PREDICATES_MAX) -> None:
        if min(cures_max, partly_max) < 1:
            raise ValueError(f"the limits must be at least 1: cures_max={cures_max}, partly_max={partly_max}")
        self._cures_max, self._partly_max = cures_max, partly_max
        self._seen: OrderedDict[UnblockKey, _EventHistory] = OrderedDict()
        self.forgotten = -1
        """The latest version of which an entry was dropped."""

    def __len__(self) -> int:
        return len(self._seen)

    def note(self, cure: UnblockKey, version: int, which: QueuePredicate | None = None) -> None:
        """Records an event for all queues, or for those that `which` selects."""
        seen = self._seen.get(cure)
        if seen is None:
            seen = self._seen[cure] = _EventHistory()
        self._seen.move_to_end(cure)
        if which is None:
            seen.everybody = max(seen.everybody, version)
            seen.some = deque(one for one in seen.some if one[0] > version)
        else:
            seen.some.append((version, which))
            if len(seen.some) > self._partly_max:
                # The predicate is dropped, so the event counts for all queues.
                seen.everybody = max(seen.everybody, seen.some.popleft()[0])
        if len(self._seen) > self._cures_max:
            _, oldest = self._seen.popitem(last=False)
            self.forgotten = max(self.forgotten, oldest.everybody, *(version for version, _ in oldest.some))

    def cured(self, line: ClassQueue, cures: Iterable[UnblockKey], since: int) -> bool:
        """Whether one of these events happened for this queue after version `since`, or may have happened and was dropped."""
        if since < self.forgotten:
            return True
        for cure in cures:
            seen = self._seen.get(cure)
            if seen is not None and (
                seen.everybody > since or any(version > since and which(line) for version, which in seen.some)
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
        most = {name: int(column[at].max()) for name, column in self._kernel.columns.free.items()}

        def fits(line: ClassQueue) -> bool:
            try:
                one = self._class_of(line)
                if one is None:
                    return True
                if any(need > most.get(name, 0) for name, need in one.ask.resources):
                    return False
                return bool((self._kernel.refresh(one)[at] >= 0).any()) or self._is_misled(line, one, at)
            except PluginError:
                return True

        return fits

    def open_on(self, rows: Sequence[int]) -> QueuePredicate:
        """Selects queues whose replicas could run on one of these rows by its node attributes, if necessary after preemption.
        """
        at = np.array(rows, dtype=np.int64)

        def is_open(line: ClassQueue) -> bool:
            try:
                one = self._class_of(line)
                if one is None:
                    return True
                self._kernel.refresh(one)
                return not one.closed[at].all() or self._is_misled(line, one, at)
            except PluginError:
                return True

        return is_open

    def spreads(self, line: ClassQueue) -> bool:
        """Selects queues with a topology spread: for them the set of domains matters."""
        try:
            one = self._class_of(line)
        except PluginError:
            return True
        return one is None or bool(one.ask.spread)

    def _is_misled(self, line: ClassQueue, one: WorkClass, rows: Ints) -> bool:
        """Whether one of these rows is rejected only by filters whose unblock events the queue does not wait for."""
        waits = {str(cure[0]) for cure in line.wait.cures if isinstance(cure, tuple)} if line.wait is not None else set()
        others = [
            filter_ for filter_ in self._kernel.all_filters if not waits.issuperset(filter_.cures) and applies(filter_, one.ask)
        ]
        if not one.alone and all(filter_.check in PEER_CHECKS for filter_ in others):
            return False  # cached scores ignore rules about wider domains, so these rules have closed no row here
        return refused_only_by(self._kernel, one, rows, others)
