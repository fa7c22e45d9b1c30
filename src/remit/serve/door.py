"""What do a scope's components say to a server? One door for all: claims, beats, rows, orders and what work reads, by word.

Agents, schedulers and controllers come in here, whatever the way: a link in a simulated network, or HTTP (app.py). Words that
cannot be read are answered, not raised.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import msgspec

from remit.client.endpoint import Endpoint
from remit.client.remote import Answering, Call, Judged, Unread
from remit.client.rows import RangeOf, RowsFrom, RowsService
from remit.model.identity import Principal
from remit.model.material import MaterialOf
from remit.model.objects import dec_hook
from remit.model.orders import OrdersOf
from remit.serve.entering import check_asked, forbidden
from remit.serve.keyring import Keyring
from remit.serve.materials import Materials, encode
from remit.serve.orders import OrderFeed
from remit.store.protocol import Store

_asked: msgspec.json.Decoder[Call | RangeOf | MaterialOf] = msgspec.json.Decoder(Call | RangeOf | MaterialOf, dec_hook=dec_hook)
_streamed: msgspec.json.Decoder[OrdersOf | RowsFrom] = msgspec.json.Decoder(OrdersOf | RowsFrom)


class Door:
    """Satisfies `world.promises.Service`. `keyring` opens what work reads."""

    def __init__(self, endpoint: Endpoint, store: Store, orders: OrderFeed, keyring: Keyring) -> None:
        self.keyring = keyring
        self._answering = Answering(endpoint)
        self._materials = Materials(endpoint, store, keyring)
        self._rows = RowsService(store)
        self._orders = orders

    @property
    def callbacks(self) -> Mapping[str, str]:
        return self._orders.callbacks

    async def request(self, body: bytes, principal: Principal | None = None, judged: Judged | None = None, /) -> bytes:
        """`principal` is who asks, where that is known: over a network that is trusted, everybody is believed. `judged` hears
        what became of what was claimed.
        """
        try:
            asked = _asked.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return await self._answering.request(body)  # it says what cannot be read
        if principal is not None:
            check_asked(principal, asked)
        if isinstance(asked, RangeOf):
            return await self._rows.page(asked)
        if isinstance(asked, MaterialOf):
            material = await self._materials.of(asked)
            if material.failed == "refused" and principal is not None:
                raise forbidden(material.why, material.cure)
            return encode(material)
        return await self._answering.answer(asked, judged)

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
