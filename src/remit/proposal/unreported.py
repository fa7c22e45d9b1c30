"""Pending replicas whose reason has not been recorded yet.

Replicas in a waiting queue share the queue's reason; this module tracks which of them still need a record of it. It writes
no records itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Final, cast

from remit.proposal.attempts import REPORT_INTERVAL_MS
from remit.proposal.queue.class_queues import ClassQueue

REPORTS_MAX: Final = 4_096
"""Replicas reported in one cycle that were not part of an attempt themselves."""

REPORT_AGAIN_MS: Final = 45_000
"""How often all members of a queue longer than a batch are reported again."""


class UnreportedReplicas:
    def __init__(self) -> None:
        self._slots: dict[int, None] = {}
        """Replicas to report. Some of their queues wait; others are about to be tried."""
        self._due_ms: dict[ClassQueue, int] = {}
        """Queues of which not all members were reported, and when all of them are due."""
        self._check_needed = False
        """Whether a queue may have started to wait since the last check."""

    def add(self, slot: int, queue: ClassQueue) -> None:
        self._slots[slot] = None
        self._check_needed = self._check_needed or queue.wait is not None

    def remove(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def on_attempt(self, queue: ClassQueue, slots: Collection[int], recorded: bool, now_ms: int) -> None:
        """These members were tried without success. `recorded`: a record was written; it is omitted if the same was recorded a
        moment ago.
        """
        self._check_needed = True
        for slot in slots if queue.wait is not None else ():
            self._slots.pop(slot, None)
        if queue.queued > len(slots):
            self._due_ms.setdefault(queue, now_ms)
        elif not recorded:
            self._due_ms.setdefault(queue, now_ms + REPORT_AGAIN_MS - REPORT_INTERVAL_MS)

    def on_refusal(self, queue: ClassQueue, now_ms: int) -> None:
        """Schedule a report for the members behind those that were claimed, refused and reported. They wait for the
        same reason, but no attempt has reached them.
        """
        self._check_needed = True
        self._due_ms.setdefault(queue, now_ms + REPORT_AGAIN_MS)

    def due_times_ms(self) -> Iterable[int]:
        return self._due_ms.values()

    def take_due(self, now_ms: int, line_of: Callable[[int], ClassQueue | None]) -> dict[ClassQueue, list[int]]:
        """Replicas to report now, by queue."""
        for queue in [queue for queue, at_ms in self._due_ms.items() if at_ms <= now_ms]:
            del self._due_ms[queue]
            if len(queue):  # a queue that is about to be tried may keep waiting after that; its members are reported then
                self._slots.update(dict.fromkeys(cast(Iterable[int], queue.members())))
                self._due_ms[queue], self._check_needed = now_ms + REPORT_AGAIN_MS, True
        queues: dict[ClassQueue, list[int]] = {}
        batch = list(islice(self._slots, REPORTS_MAX)) if self._check_needed else []
        self._check_needed = self._check_needed and len(self._slots) > len(batch)
        for slot in batch:
            del self._slots[slot]
            queue_of_slot = line_of(slot)
            if queue_of_slot is not None and queue_of_slot.wait is not None:
                queues.setdefault(queue_of_slot, []).append(slot)
            elif queue_of_slot is not None:
                self._slots[slot] = None
        return queues
