"""Thread offload, batched offload, cancellation of blocking work, first failure of a task group."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from remit.world.interfaces import Offload, OffloadClosed

T = TypeVar("T")


class ThreadOffload:
    """Runs work in one thread, which starts with the first item.

    Accepted work runs even if the event loop or the program ends before it. The queue has no bound of its own: every item
    has a waiting caller, and the number of callers is bounded.
    """

    def __init__(self, name: str = "offload") -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._closed = False

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        if self._closed:
            raise OffloadClosed(f"offload thread {self._name} is closed", "restart the component")
        return self._submit(work)

    async def close(self) -> None:
        self._closed = True
        try:
            # This item is the last in the queue: when it has run, so has everything before it.
            await self._submit(_do_nothing)
        except OffloadClosed:
            return
        self._pool.shutdown(wait=False)

    def _submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        # Not asyncio.wrap_future: cancelling its future removes the work from the queue, and a commit would be lost silently.
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - passed on to the waiter
                _call_in_loop(loop, _fail, future, error)
            else:
                _call_in_loop(loop, _succeed, future, result)

        try:
            self._pool.submit(run)
        except RuntimeError as error:
            raise OffloadClosed(f"offload thread {self._name} has ended ({error})", "restart the component") from error
        return future


def _do_nothing() -> None:
    pass


def _call_in_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: object) -> None:
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:  # the loop was closed: no waiter is left, and the work itself is done
        return


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if future.done():
        # The waiter was cancelled, but the failure should still be logged.
        context = {"message": "work failed after its waiter was cancelled", "exception": error}
        future.get_loop().call_exception_handler(context)
    elif isinstance(error, StopIteration):  # a future refuses it, since it would end the coroutine that awaits it
        wrapped = RuntimeError("work raised StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    else:
        future.set_exception(error)


class _BatchItem(NamedTuple):
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class BatchedOffload:
    """Batches blocking work: calls made while a batch runs form the next batch, which is offloaded as one item."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._running = asyncio.Lock()
        self._waiting: list[_BatchItem] = []

    async def __call__(self, work: Callable[[], T], /) -> T:
        item = _BatchItem(work, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        if len(self._waiting) == 1:  # the first caller of a batch runs it for all of them
            await self._run_batch()
        result: T = await item.done
        return result

    async def _run_batch(self) -> None:
        group: list[_BatchItem] = []
        try:
            async with self._running:
                await asyncio.sleep(0)  # let callers of the same loop iteration join the batch
                group, self._waiting = self._waiting, []
                answers = await self._offload(lambda: _run_batch(group))
        except BaseException:
            if not group:
                group, self._waiting = self._waiting, []
            for item in group:
                item.done.cancel()
            raise
        for item, (result, error) in zip(group, answers, strict=True):
            if item.done.done():  # its caller was cancelled
                continue
            if error is None:
                item.done.set_result(result)
            else:
                item.done.set_exception(error)


def _run_batch(group: Sequence[_BatchItem]) -> list[tuple[Any, Exception | None]]:
    answers: list[tuple[Any, Exception | None]] = []
    for item in group:
        try:
            answers.append((item.work(), None))
        except Exception as error:  # noqa: BLE001 - passed on to the caller
            answers.append((None, error))
    return answers


@contextmanager
def first_failure() -> Iterator[None]:
    """Raise the first failure of a task group in place of the exception group.

    If the surrounding task was cancelled meanwhile, CancelledError is raised instead. The group would drop the cancellation,
    and a caller that catches the failure would continue.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    except BaseExceptionGroup as failures:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError from None
        raise failures.exceptions[0] from None


class StopSignal:
    """Cancels blocking work from another thread.

    The work notices at its next `check`, and the socket it may be blocked on is shut down.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.requested = False

    def watch(self, connection: socket.socket) -> None:
        with self._lock:
            self._socket = connection
        self.check()

    def stop(self) -> None:
        with self._lock:
            self.requested = True
            if self._socket is not None:
                with suppress(OSError):
                    # Not the TLS socket's own shutdown: that drops its encryption state, and the reader would take ciphertext
                    # for plain text.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def check(self) -> None:
        if self.requested:
            raise WorkStopped


class WorkStopped(Exception):
    """The work was cancelled, or took too long."""
