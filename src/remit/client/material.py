"""How does an agent get what a copy reads? Asks one of a scope's servers; one that fails is not asked first again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from remit.model.material import Material, MaterialOf, decode_material
from remit.world.promises import Clock, Link, LinkError, Unheard

TRY_MS: Final = 10_000
"""Of one question. What is lost on the way is never answered, and whoever waited for it would wait for ever."""

Source = Callable[[MaterialOf], Awaitable[Material]]


def material_source(link: Link, servers: Sequence[str], clock: Clock) -> Source:
    """Raises `LinkError`."""
    turn = 0

    async def ask(asked: MaterialOf) -> Material:
        nonlocal turn
        name = servers[turn % len(servers)]
        try:
            async with clock.timeout_ms(TRY_MS):
                return decode_material(await link.request(name, msgspec.json.encode(asked)))
        except TimeoutError:
            turn += 1
            raise Unheard(f"{name} has not answered for {TRY_MS // 1000} s", "nothing to do: it is asked again") from None
        except msgspec.DecodeError as error:
            turn += 1
            raise Unheard(f"{name} answered what cannot be read ({error})", "do both run the same version?") from None
        except LinkError:
            turn += 1
            raise

    return ask
