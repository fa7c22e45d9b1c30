"""Who is decided next? Those who ask, in turn; a large ask takes its turn again and again. Nothing is decided here."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from remit.client.endpoint import NoVerdict, Silence
from remit.model.claims import Operation, Verdict


class BatchMax(NamedTuple):
    """How much goes into one batch: operations, and replicas that may be changed before it ends."""

    operations: int = 256
    replicas: int = 10_000


BATCH_MAX: Final = BatchMax()

Future = asyncio.Future[list[Verdict]]


class Waiting:
    """One ask: how much of it was taken, and how much of it has been answered."""

    __slots__ = ("answer", "operations", "queued", "taken", "verdicts")

    def __init__(self, operations: Sequence[Operation], answer: Future) -> None:
        self.operations, self.answer = operations, answer
        self.taken = 0
        self.verdicts: list[Verdict] = []
        self.queued = True

    def fail(self, error: NoVerdict) -> None:
        if not self.answer.done():
            self.answer.set_exception(Silence("part of it is done; ask the same ids again") if self.verdicts else error)


class Piece(NamedTuple):
    """Some operations of an ask, in a batch."""

    waiting: Waiting
    start: int
    end: int

    @property
    def operations(self) -> Sequence[Operation]:
        return self.waiting.operations[self.start : self.end]


class Queue:
    """Asks that wait. One that fits into a batch is never split; a larger one goes to the back of the queue with its rest."""

    def __init__(self, batch_max: int = BATCH_MAX.operations) -> None:
        self.batch_max = batch_max
        self._waiting: deque[Waiting] = deque()
        self.count = 0
        """Operations that wait."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def full(self) -> bool:
        """Is there a whole batch, so that nothing is gained by waiting for more?"""
        return self.count >= self.batch_max

    def put(self, operations: Sequence[Operation]) -> Future:
        waiting = Waiting(operations, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self.count += len(operations)
        return waiting.answer

    def take(self, *, one: bool = False) -> list[Piece]:
        """A batch of operations, or only the very next one."""
        pieces: list[Piece] = []
        room = 1 if one else self.batch_max
        while self._waiting and (room > 0 or not self._waiting[0].operations):
            waiting = self._waiting[0]
            left = len(waiting.operations) - waiting.taken
            if pieces and room < left <= self.batch_max and not waiting.answer.done():
                break
            self._waiting.popleft()
            waiting.queued = False
            if waiting.answer.done():
                # Nobody waits for it any more: cancelled before it was begun, or failed in its middle.
                self.count -= left
                continue
            piece = Piece(waiting, waiting.taken, waiting.taken + min(left, room))
            self._move(piece, piece.end)
            pieces.append(piece)
            room -= piece.end - piece.start
            if piece.end < len(waiting.operations):
                (self._waiting.appendleft if one else self._waiting.append)(waiting)
                waiting.queued = True
        return pieces

    def give_back(self, pieces: Sequence[Piece]) -> None:
        """What was taken last is to be decided anew, before everything else."""
        for piece in reversed(pieces):
            if piece.waiting.queued:
                self._waiting.remove(piece.waiting)
            self._waiting.appendleft(piece.waiting)
            piece.waiting.queued = True
            self._move(piece, piece.start)

    def answer(self, pieces: Sequence[Piece], verdicts: Sequence[Verdict]) -> None:
        at = 0
        for waiting, start, end in pieces:
            waiting.verdicts += verdicts[at : at + end - start]
            at += end - start
            if len(waiting.verdicts) == len(waiting.operations) and not waiting.answer.done():
                waiting.answer.set_result(waiting.verdicts)

    def fail_all(self, error: NoVerdict) -> None:
        """Nobody waits for ever for an authority that has stopped."""
        for waiting in self._waiting:
            waiting.fail(error)
        self._waiting.clear()
        self.count = 0

    def _move(self, piece: Piece, to: int) -> None:
        self.count -= to - piece.waiting.taken
        piece.waiting.taken = to


def cut(pieces: Sequence[Piece], count: int) -> tuple[list[Piece], list[Piece]]:
    """The first `count` operations, and the rest."""
    first, rest = list[Piece](), list[Piece]()
    for piece in pieces:
        middle = min(piece.end, piece.start + count)
        count -= middle - piece.start
        if middle > piece.start or piece.start == piece.end:
            first.append(Piece(piece.waiting, piece.start, middle))
        if middle < piece.end:
            rest.append(Piece(piece.waiting, middle, piece.end))
    return first, rest
