"""How does an agent learn its orders? A stream from one of a scope's servers; after it ends, another from the next."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from remit.model.orders import Orders, OrdersOf, decode_orders
from remit.world.promises import Link, LinkError, Unheard


def order_feed(
    link: Link, servers: Sequence[str], callback: str = ""
) -> Callable[[Sequence[str]], AsyncGenerator[Orders, None]]:
    """Each call is one stream; a server that failed is not asked first again. Raises `LinkError`."""
    turn = 0

    async def feed(nodes: Sequence[str]) -> AsyncGenerator[Orders, None]:
        nonlocal turn
        name = servers[turn % len(servers)]
        try:
            async with aclosing(link.stream(name, msgspec.json.encode(OrdersOf(tuple(nodes), callback)))) as lines:
                async for line in lines:
                    yield decode_orders(line)
        except (msgspec.DecodeError, ValueError) as error:
            turn += 1
            raise Unheard(f"{name} told orders that cannot be read ({error})", "do both run the same version?") from error
        except LinkError:
            turn += 1
            raise
        turn += 1

    return feed
