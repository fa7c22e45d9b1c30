"""How does blocking work leave the event loop? One thread, in order. What the work means is not known here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from remit.world.promises import OffloadClosed

T = TypeVar("T")


class ThreadOffload:
    """The thread begins with the first work. Work that was accepted runs even if the loop or the program ends before it.

    The queue has no bound of its own: every piece has a caller who waits for it, and callers are bounded.
    """

    def __init__(self, name: str = "offload") -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._closed = False

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        if self._closed:
            raise OffloadClosed(f"the thread {self._name} was closed", "start the component anew")
        return self._put(work)

    async def close(self) -> None:
        self._closed = True
        try:
            # The last in the queue: when it has run, so has everything before it.
            await self._put(_nothing)
        except OffloadClosed:
            return
        self._pool.shutdown(wait=False)

    def _put(self, work: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        # Not asyncio.wrap_future: cancelling that one takes work out of the queue, and a commit would be lost in silence.
        answer: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - it is the waiter's, whatever it is
                _tell(loop, _fail, answer, error)
            else:
                _tell(loop, _succeed, answer, result)

        try:
            self._pool.submit(run)
        except RuntimeError as error:
            raise OffloadClosed(f"the thread {self._name} has ended ({error})", "start the component anew") from error
        return answer


def _nothing() -> None:
    pass


def _tell(loop: asyncio.AbstractEventLoop, deed: Callable[..., None], *arguments: object) -> None:
    try:
        loop.call_soon_threadsafe(deed, *arguments)
    except RuntimeError:  # the loop was closed: nobody is left to hear it, and the work is done all the same
        return


def _succeed(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[T], error: BaseException) -> None:
    if answer.done():
        # The waiter was cancelled. Its work failed all the same, and somebody should be able to read that.
        told = {"message": "work failed after its waiter was cancelled", "exception": error}
        answer.get_loop().call_exception_handler(told)
    elif isinstance(error, StopIteration):  # a future refuses it, since it would end whatever awaits
        wrapped = RuntimeError("work raised StopIteration")
        wrapped.__cause__ = error
        answer.set_exception(wrapped)
    else:
        answer.set_exception(error)
