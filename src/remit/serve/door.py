"""What do a scope's components say to a server? One door for all of them: claims, beats, rows and orders, by what they are.

Agents, schedulers and controllers come in here, whatever the way: a link in a simulated network, or HTTP (app.py). Words that
cannot be read are answered, not raised.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from remit.client.endpoint import Endpoint
from remit.client.remote import Answering, Call, Unread
from remit.client.rows import RangeOf, RowsFrom, RowsService
from remit.model.objects import dec_hook
from remit.model.orders import OrdersOf
from remit.serve.orders import OrderFeed
from remit.store.protocol import Store

_asked: msgspec.json.Decoder[Call | RangeOf] = msgspec.json.Decoder(Call | RangeOf, dec_hook=dec_hook)
_streamed: msgspec.json.Decoder[OrdersOf | RowsFrom] = msgspec.json.Decoder(OrdersOf | RowsFrom)


class Door:
    """Satisfies `world.promises.Service`."""

    def __init__(self, endpoint: Endpoint, store: Store, orders: OrderFeed) -> None:
        self._answering = Answering(endpoint)
        self._rows = RowsService(store)
        self._orders = orders

    async def request(self, body: bytes, /) -> bytes:
        try:
            asked = _asked.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return await self._answering.request(body)  # it says what cannot be read
        if isinstance(asked, RangeOf):
            return await self._rows.page(asked)
        return await self._answering.answer(asked)

    def streamed(self, body: bytes) -> OrdersOf | RowsFrom:
        """Which stream is meant. Raises `Unread`, before anything has begun."""
        try:
            return _streamed.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise Unread(f"no stream is called this ({error}); ask for orders or rows") from error

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        asked = self.streamed(body)
        told = self._orders.stream(asked) if isinstance(asked, OrdersOf) else self._rows.events(asked)
        async with aclosing(told) as items:
            async for item in items:
                yield item
