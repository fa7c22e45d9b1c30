"""When does a simulated process do its blocking work? Inline, in turn, in the loop's time. What it means is not known here."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from remit.world.promises import OffloadClosed

T = TypeVar("T")


class _Piece(NamedTuple):
    work: Callable[[], Any]
    answer: asyncio.Future[Any]


class SimOffload:
    """Each piece takes `delay_ms()` of the loop's time, drawn when its turn comes, and then happens at one instant.

    When `alive()` turns false the process was killed: nothing of its queue runs any more, and whoever waits is cancelled,
    now and later: a cancelled task ends without a complaint, and its finally blocks get through.
    """

    def __init__(self, delay_ms: Callable[[], int], alive: Callable[[], bool]) -> None:
        self._delay_ms, self._alive = delay_ms, alive
        self._queue: deque[_Piece] = deque()
        self._idle: asyncio.Event | None = None
        """There while work is under way; set when the queue has run empty."""
        self._closed = False

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        if self._closed:
            raise OffloadClosed("the offload was closed", "start the component anew")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if not self._alive():
            answer.cancel()
            return answer
        self._queue.append(_Piece(work, answer))
        if self._idle is None:
            self._idle = asyncio.Event()
            self._begin_next()
        return answer

    async def close(self) -> None:
        self._closed = True
        if self._idle is not None:
            await self._idle.wait()

    def _begin_next(self) -> None:
        delay_ms = self._delay_ms()
        if delay_ms < 0:
            raise ValueError(f"a delay of {delay_ms} ms")
        # A timer and not a task: a waiter, or whoever made the call, may be cancelled, and the work still has its turn.
        asyncio.get_running_loop().call_later(delay_ms / 1000, self._end_first)

    def _end_first(self) -> None:
        if self._alive():
            piece = self._queue.popleft()
            _run(piece, self._alive)
        if not self._alive():
            for piece in self._queue:
                piece.answer.cancel()
            self._queue.clear()
        if self._queue:
            self._begin_next()
        elif self._idle is not None:
            self._idle.set()
            self._idle = None


def _run(piece: _Piece, alive: Callable[[], bool]) -> None:
    try:
        result = piece.work()
    except (KeyboardInterrupt, SystemExit):
        raise  # these are for the simulator itself
    except BaseException as error:  # noqa: BLE001 - it is the waiter's, whatever it is
        _fail(piece.answer, error, alive)
    else:
        if not alive():  # the work itself ended its process: nobody is left to be told
            piece.answer.cancel()
        elif not piece.answer.done():
            piece.answer.set_result(result)


def _fail(answer: asyncio.Future[Any], error: BaseException, alive: Callable[[], bool]) -> None:
    if not alive():
        answer.cancel()
    elif answer.done():
        # The waiter was cancelled. Its work failed all the same, and somebody should be able to read that.
        told = {"message": "work failed after its waiter was cancelled", "exception": error}
        answer.get_loop().call_exception_handler(told)
    elif isinstance(error, StopIteration):  # a future refuses it, since it would end whatever awaits
        wrapped = RuntimeError("work raised StopIteration")
        wrapped.__cause__ = error
        answer.set_exception(wrapped)
    else:
        answer.set_exception(error)
