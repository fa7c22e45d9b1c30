"""Fair queue of submitted operations: one lane per tenant, and one for the scope's components.

Lanes take turns, and every second turn belongs to the components' lane. No operation is decided here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from remit.client.endpoint import EndpointError, OutcomeUnknown
from remit.model.claims import Actor, Operation, Verdict
from remit.model.roles import PEOPLE


class BatchLimits(NamedTuple):
    """Limits of one batch: operations, and replicas changed. The operation that crosses the replica limit is still included."""

    operations: int = 512
    replicas: int = 2_000


BATCH_LIMITS: Final = BatchLimits()


VerdictsFuture = asyncio.Future[list[Verdict]]


class QueuedSubmission:
    """One submission of operations: how many were taken into batches, and the verdicts so far."""

    __slots__ = ("future", "lane", "operations", "queued", "taken", "verdicts")

    def __init__(self, operations: Sequence[Operation], future: VerdictsFuture, lane: str = "") -> None:
        self.operations, self.future, self.lane = operations, future, lane
        self.taken = 0
        self.verdicts: list[Verdict] = []
        self.queued = True

    def fail(self, error: EndpointError) -> None:
        if not self.future.done():
            self.future.set_exception(
                OutcomeUnknown("part of this submission was committed; retry with the same operation ids")
                if self.verdicts
                else error
            )


class BatchSlice(NamedTuple):
    """A contiguous range of one submission's operations, taken into one batch."""

    submission: QueuedSubmission
    start: int
    end: int

    @property
    def operations(self) -> Sequence[Operation]:
        return self.submission.operations[self.start : self.end]


COMPONENT_LANE: Final = "/own"
"""Lane of the scope's components: schedulers, agents, controllers. A tenant name cannot contain a slash."""


def lane_of(operations: Sequence[Operation]) -> str:
    """Return the lane of a submission: the components' lane, or the tenant's if the actor is a user or an operator."""
    # In-process callers may pass any object as an operation, so its attributes are not certain.
    actor = getattr(operations[0], "actor", None) if operations else None
    return COMPONENT_LANE if not isinstance(actor, Actor) or actor.role not in PEOPLE else actor.tenant


class OperationQueue:
    """Queued submissions, in lanes. A submission that fits into one batch is never split; the rest of a larger one goes to the
    back.

    Lanes take turns, and every second turn belongs to the components' lane. However many manifests a tenant has sent, a
    bind, a start or a lease waits for at most one turn of another lane, and so does an operation of another tenant. A turn
    is at most one batch. The length of each lane is limited separately, so one tenant cannot fill the queue for all.
    """

    def __init__(self, batch_operations_max: int = BATCH_LIMITS.operations) -> None:
        self.batch_operations_max = batch_operations_max
        self._returned: deque[QueuedSubmission] = deque()
        """Submissions returned to the queue. They are decided before all others, in their original order."""
        self._lanes: dict[str, deque[QueuedSubmission]] = {}
        self._lane_turns: deque[str] = deque()
        """Tenant lanes that are not empty, in the order of their turns."""
        self._components_went_last = False
        self._counts: dict[str, int] = {}
        self.count = 0
        """Number of queued operations."""

    def __bool__(self) -> bool:
        return bool(self._returned or self._lanes)

    @property
    def has_full_batch(self) -> bool:
        """Whether a full batch is queued, so that waiting for more operations gains nothing."""
        return self.count >= self.batch_operations_max

    def has_capacity(self, operations: Sequence[Operation], limit: int) -> bool:
        """Return whether the lane accepts these operations. An empty lane always accepts one submission."""
        queued = self._counts.get(lane_of(operations), 0)
        return not queued or queued + len(operations) <= limit

    def put(self, operations: Sequence[Operation]) -> VerdictsFuture:
        submission = QueuedSubmission(operations, asyncio.get_running_loop().create_future(), lane_of(operations))
        self._append(submission)
        self._adjust_count(submission, len(operations))
        return submission.future

    def take(self, *, single: bool = False) -> list[BatchSlice]:
        """Take a batch of operations, or only the next one."""
        slices: list[BatchSlice] = []
        remaining = 1 if single else self.batch_operations_max
        while self:
            lane = None if self._returned else self._next_lane()
            taken = self._take_from(self._returned if lane is None else self._lanes[lane], slices, remaining, single=single)
            if lane is not None:
                self._end_turn(lane, keeps_turn=taken is None)
            if taken is None:
                break  # the next submission does not fit into this batch; it is first in the next one
            remaining -= taken
            if remaining <= 0:
                break
        return slices

    def _take_from(
        self, submissions: deque[QueuedSubmission], slices: list[BatchSlice], remaining: int, *, single: bool
    ) -> int | None:
        """Take as many operations as fit. Return None if the first submission does not fit as a whole but would fit into
        another batch.
        """
        limit = remaining
        while submissions and (remaining > 0 or not submissions[0].operations):
            submission = submissions[0]
            untaken = len(submission.operations) - submission.taken
            if slices and remaining < untaken <= self.batch_operations_max and not submission.future.done():
                return limit - remaining or None
            submissions.popleft()
            submission.queued = False
            if submission.future.done():
                # The caller no longer waits: it cancelled before this was taken, or part of the submission failed.
                self._adjust_count(submission, -untaken)
                continue
            part = BatchSlice(submission, submission.taken, submission.taken + min(untaken, remaining))
            self._set_taken(part, part.end)
            slices.append(part)
            remaining -= part.end - part.start
            if part.end < len(submission.operations):
                if single:
                    self._returned.appendleft(submission)
                else:
                    self._append(submission)
                submission.queued = True
        return limit - remaining

    def _next_lane(self) -> str:
        own = COMPONENT_LANE in self._lanes and not (self._components_went_last and self._lane_turns)
        return COMPONENT_LANE if own else self._lane_turns[0]

    def _end_turn(self, lane: str, *, keeps_turn: bool) -> None:
        """End the turn of a lane. With `keeps_turn` the lane took nothing and stays next in order."""
        self._components_went_last = (lane == COMPONENT_LANE) != keeps_turn
        if lane != COMPONENT_LANE and not keeps_turn:
            self._lane_turns.popleft()
        if not self._lanes[lane]:
            del self._lanes[lane]
        elif lane != COMPONENT_LANE and not keeps_turn:
            self._lane_turns.append(lane)

    def _append(self, submission: QueuedSubmission, *, first: bool = False) -> None:
        lane = self._lanes.get(submission.lane)
        if lane is None:
            lane = self._lanes[submission.lane] = deque()
            if submission.lane != COMPONENT_LANE:
                self._lane_turns.append(submission.lane)
        (lane.appendleft if first else lane.append)(submission)

    def return_to_queue(self, slices: Sequence[BatchSlice]) -> None:
        """Return slices of the last batch to the queue. They are decided again before everything else."""
        for part in reversed(slices):
            if part.submission.queued:
                self._withdraw(part.submission)
            self._returned.appendleft(part.submission)
            part.submission.queued = True
            self._set_taken(part, part.start)

    def defer(self, rest: Sequence[BatchSlice], decided: Sequence[BatchSlice]) -> None:
        """Put operations that did not fit into their batch back into their lanes.

        They wait for the lane's next turn, which comes immediately for lanes of which nothing was decided. A partly decided
        submission goes behind the others of its lane. Putting it first would block all other lanes for as long as a client
        keeps sending operations that each change many replicas.
        """
        served, begun = {part.submission.lane for part in decided}, {id(part.submission) for part in decided}
        for part in reversed(rest):
            lane = part.submission.lane
            if part.submission.queued:
                self._withdraw(part.submission)
            self._append(part.submission, first=id(part.submission) not in begun)
            part.submission.queued = True
            self._set_taken(part, part.start)
            if lane == COMPONENT_LANE:
                self._components_went_last = lane in served
            elif lane not in served:
                self._lane_turns.remove(lane)
                self._lane_turns.appendleft(lane)

    def _withdraw(self, submission: QueuedSubmission) -> None:
        if submission in self._returned:
            self._returned.remove(submission)
            return
        lane = self._lanes[submission.lane]
        lane.remove(submission)
        if not lane:
            del self._lanes[submission.lane]
            if submission.lane != COMPONENT_LANE:
                self._lane_turns.remove(submission.lane)

    def answer(self, slices: Sequence[BatchSlice], verdicts: Sequence[Verdict]) -> None:
        at = 0
        for submission, start, end in slices:
            submission.verdicts += verdicts[at : at + end - start]
            at += end - start
            if len(submission.verdicts) == len(submission.operations) and not submission.future.done():
                submission.future.set_result(submission.verdicts)

    def fail_all(self, error: EndpointError) -> None:
        """Fail every queued submission when the authority stops, so that no caller waits forever."""
        for lane in (self._returned, *self._lanes.values()):
            for submission in lane:
                submission.fail(error)
            lane.clear()
        self._lanes.clear()
        self._lane_turns.clear()
        self._counts.clear()
        self.count = 0

    def _set_taken(self, part: BatchSlice, taken: int) -> None:
        self._adjust_count(part.submission, part.submission.taken - taken)
        part.submission.taken = taken

    def _adjust_count(self, submission: QueuedSubmission, change: int) -> None:
        self.count += change
        count = self._counts.get(submission.lane, 0) + change
        if count:
            self._counts[submission.lane] = count
        else:
            self._counts.pop(submission.lane, None)


def split_slices(slices: Sequence[BatchSlice], count: int) -> tuple[list[BatchSlice], list[BatchSlice]]:
    """Split slices after `count` operations: the first part, and the rest."""
    first, rest = list[BatchSlice](), list[BatchSlice]()
    for part in slices:
        split = min(part.end, part.start + count)
        count -= split - part.start
        if split > part.start or part.start == part.end:
            first.append(BatchSlice(part.submission, part.start, split))
        if split < part.end:
            rest.append(BatchSlice(part.submission, split, part.end))
    return first, rest
