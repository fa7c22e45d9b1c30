"""Runs the asynchronous calls of `Api` to their end, for blocking.py.

Each call runs the event loop of the client until it returns; the module starts no threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, Self, TypeVar

from remit.client.api import Api

T = TypeVar("T")


class BlockingCalls:
    """An `Api` with an event loop of its own."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._runner = asyncio.Runner()
        self._open_streams: dict[int, AsyncGenerator[Any, None]] = {}

    @property
    def tenant(self) -> str:
        return self._api.tenant

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every open iterator and every connection."""
        try:
            while self._open_streams:
                self._run(_close(self._open_streams.popitem()[1]))
            self._run(self._api.close())
        finally:
            self._runner.close()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(call)

    def _iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Run the event loop until the next item arrives, once per item.

        Nothing runs between two items, so a slow reader applies backpressure to the server.
        """
        self._open_streams[id(items)] = items
        try:
            while True:
                try:
                    item = self._run(_next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if self._open_streams.pop(id(items), None) is not None:
                self._run(_close(items))


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()
