"""Fair queue of submitted operations: one lane per tenant, and one for the scope's components.

Lanes take turns, and every second turn belongs to the components' lane. No operation is decided here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from remit.client.endpoint import EndpointError, OutcomeUnknown
from remit.model.claims import Actor, Operation, Role, Verdict


class BatchMax(NamedTuple):
    """Limits of one batch: operations, and replicas changed. The operation that crosses the replica limit is still included."""

    operations: int = 512
    replicas: int = 2_000


BATCH_MAX: Final = BatchMax()

PEOPLE: Final = frozenset({Role.USER, Role.OPERATOR})

Future = asyncio.Future[list[Verdict]]


class Waiting:
    """One submission of operations: how many were taken into batches, and the verdicts so far."""

    __slots__ = ("answer", "lane", "operations", "queued", "taken", "verdicts")

    def __init__(self, operations: Sequence[Operation], answer: Future, lane: str = "") -> None:
        self.operations, self.answer, self.lane = operations, answer, lane
        self.taken = 0
        self.verdicts: list[Verdict] = []
        self.queued = True

    def fail(self, error: EndpointError) -> None:
        if not self.answer.done():
            self.answer.set_exception(
                OutcomeUnknown("part of this submission was committed; retry with the same operation ids")
                if self.verdicts
                else error
            )


class Piece(NamedTuple):
    """A contiguous range of one submission's operations, taken into one batch."""

    waiting: Waiting
    start: int
    end: int

    @property
    def operations(self) -> Sequence[Operation]:
        return self.waiting.operations[self.start : self.end]


OWN: Final = "/own"
"""Lane of the scope's components: schedulers, agents, controllers. A tenant name cannot contain a slash."""


def lane_of(operations: Sequence[Operation]) -> str:
    """Return the lane of a submission: the components' lane, or the tenant's if the actor is a user or an operator."""
    actor = (
        getattr(operations[0], "actor", None) if operations else None
    )  # in-process callers may pass any object as an operation
    return OWN if not isinstance(actor, Actor) or actor.role not in PEOPLE else actor.tenant


class Queue:
    """Queued submissions, in lanes. A submission that fits into one batch is never split; the rest of a larger one goes to the
    back.

    Lanes take turns, and every second turn belongs to the components' lane. However many manifests a tenant has sent, a
    bind, a start or a lease waits for at most one turn of another lane, and so does an operation of another tenant. A turn
    is at most one batch. The length of each lane is limited separately, so one tenant cannot fill the queue for all.
    """

    def __init__(self, batch_max: int = BATCH_MAX.operations) -> None:
        self.batch_max = batch_max
        self._again: deque[Waiting] = deque()
        """Submissions returned to the queue. They are decided before all others, in their original order."""
        self._lanes: dict[str, deque[Waiting]] = {}
        self._turns: deque[str] = deque()
        """Tenant lanes that are not empty, in the order of their turns."""
        self._own_was_last = False
        self._counts: dict[str, int] = {}
        self.count = 0
        """Number of queued operations."""

    def __bool__(self) -> bool:
        return bool(self._again or self._lanes)

    @property
    def full(self) -> bool:
        """Whether a full batch is queued, so that waiting for more operations gains nothing."""
        return self.count >= self.batch_max

    def has_room(self, operations: Sequence[Operation], most: int) -> bool:
        """Return whether the lane accepts these operations. An empty lane always accepts one submission."""
        waiting = self._counts.get(lane_of(operations), 0)
        return not waiting or waiting + len(operations) <= most

    def put(self, operations: Sequence[Operation]) -> Future:
        waiting = Waiting(operations, asyncio.get_running_loop().create_future(), lane_of(operations))
        self._append(waiting)
        self._count(waiting, len(operations))
        return waiting.answer

    def take(self, *, one: bool = False) -> list[Piece]:
        """Take a batch of operations, or only the next one."""
        pieces: list[Piece] = []
        room = 1 if one else self.batch_max
        while self:
            lane = None if self._again else self._next_lane()
            taken = self._take_from(self._again if lane is None else self._lanes[lane], pieces, room, one=one)
            if lane is not None:
                self._turn_over(lane, kept=taken is None)
            if taken is None:
                break  # the next submission does not fit into this batch; it is first in the next one
            room -= taken
            if room <= 0:
                break
        return pieces

    def _take_from(self, waiting: deque[Waiting], pieces: list[Piece], room: int, *, one: bool) -> int | None:
        """Take as many operations as fit. Return None if the first submission does not fit as a whole but would fit into
        another batch.
        """
        most = room
        while waiting and (room > 0 or not waiting[0].operations):
            ask = waiting[0]
            left = len(ask.operations) - ask.taken
            if pieces and room < left <= self.batch_max and not ask.answer.done():
                return most - room or None
            waiting.popleft()
            ask.queued = False
            if ask.answer.done():
                # The caller no longer waits: it cancelled before this was taken, or part of the submission failed.
                self._count(ask, -left)
                continue
            piece = Piece(ask, ask.taken, ask.taken + min(left, room))
            self._move(piece, piece.end)
            pieces.append(piece)
            room -= piece.end - piece.start
            if piece.end < len(ask.operations):
                if one:
                    self._again.appendleft(ask)
                else:
                    self._append(ask)
                ask.queued = True
        return most - room

    def _next_lane(self) -> str:
        own = OWN in self._lanes and not (self._own_was_last and self._turns)
        return OWN if own else self._turns[0]

    def _turn_over(self, lane: str, *, kept: bool) -> None:
        """End the turn of a lane. With `kept` the lane took nothing and stays next in order."""
        self._own_was_last = (lane == OWN) != kept
        if lane != OWN and not kept:
            self._turns.popleft()
        if not self._lanes[lane]:
            del self._lanes[lane]
        elif lane != OWN and not kept:
            self._turns.append(lane)

    def _append(self, waiting: Waiting, *, first: bool = False) -> None:
        lane = self._lanes.get(waiting.lane)
        if lane is None:
            lane = self._lanes[waiting.lane] = deque()
            if waiting.lane != OWN:
                self._turns.append(waiting.lane)
        (lane.appendleft if first else lane.append)(waiting)

    def give_back(self, pieces: Sequence[Piece]) -> None:
        """Return slices of the last batch to the queue. They are decided again before everything else."""
        for piece in reversed(pieces):
            if piece.waiting.queued:
                self._withdraw(piece.waiting)
            self._again.appendleft(piece.waiting)
            piece.waiting.queued = True
            self._move(piece, piece.start)

    def put_off(self, rest: Sequence[Piece], decided: Sequence[Piece]) -> None:
        """Put operations that did not fit into their batch back into their lanes.

        They wait for the lane's next turn, which comes immediately for lanes of which nothing was decided. A partly decided
        submission goes behind the others of its lane. Putting it first would block all other lanes for as long as a client
        keeps sending operations that each change many replicas.
        """
        served, begun = {piece.waiting.lane for piece in decided}, {id(piece.waiting) for piece in decided}
        for piece in reversed(rest):
            lane = piece.waiting.lane
            if piece.waiting.queued:
                self._withdraw(piece.waiting)
            self._append(piece.waiting, first=id(piece.waiting) not in begun)
            piece.waiting.queued = True
            self._move(piece, piece.start)
            if lane == OWN:
                self._own_was_last = lane in served
            elif lane not in served:
                self._turns.remove(lane)
                self._turns.appendleft(lane)

    def _withdraw(self, waiting: Waiting) -> None:
        if waiting in self._again:
            self._again.remove(waiting)
            return
        lane = self._lanes[waiting.lane]
        lane.remove(waiting)
        if not lane:
            del self._lanes[waiting.lane]
            if waiting.lane != OWN:
                self._turns.remove(waiting.lane)

    def answer(self, pieces: Sequence[Piece], verdicts: Sequence[Verdict]) -> None:
        at = 0
        for waiting, start, end in pieces:
            waiting.verdicts += verdicts[at : at + end - start]
            at += end - start
            if len(waiting.verdicts) == len(waiting.operations) and not waiting.answer.done():
                waiting.answer.set_result(waiting.verdicts)

    def fail_all(self, error: EndpointError) -> None:
        """Fail every queued submission when the authority stops, so that no caller waits forever."""
        for lane in (self._again, *self._lanes.values()):
            for waiting in lane:
                waiting.fail(error)
            lane.clear()
        self._lanes.clear()
        self._turns.clear()
        self._counts.clear()
        self.count = 0

    def _move(self, piece: Piece, to: int) -> None:
        self._count(piece.waiting, piece.waiting.taken - to)
        piece.waiting.taken = to

    def _count(self, waiting: Waiting, more: int) -> None:
        self.count += more
        now = self._counts.get(waiting.lane, 0) + more
        if now:
            self._counts[waiting.lane] = now
        else:
            self._counts.pop(waiting.lane, None)


def cut(pieces: Sequence[Piece], count: int) -> tuple[list[Piece], list[Piece]]:
    """Split slices after `count` operations: the first part, and the rest."""
    first, rest = list[Piece](), list[Piece]()
    for piece in pieces:
        middle = min(piece.end, piece.start + count)
        count -= middle - piece.start
        if middle > piece.start or piece.start == piece.end:
            first.append(Piece(piece.waiting, piece.start, middle))
        if middle < piece.end:
            rest.append(Piece(piece.waiting, middle, piece.end))
    return first, rest
