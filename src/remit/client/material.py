"""How does an agent get what a copy reads? Asks one of a scope's servers; one that fails is not asked first again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from remit.model.material import Material, MaterialOf, decode_material
from remit.world.promises import Link, LinkError, Unheard

Source = Callable[[MaterialOf], Awaitable[Material]]


def material_source(link: Link, servers: Sequence[str]) -> Source:
    """Raises `LinkError`."""
    turn = 0

    async def ask(asked: MaterialOf) -> Material:
        nonlocal turn
        name = servers[turn % len(servers)]
        try:
            return decode_material(await link.request(name, msgspec.json.encode(asked)))
        except msgspec.DecodeError as error:
            turn += 1
            raise Unheard(f"{name} answered what cannot be read ({error})", "do both run the same version?") from None
        except LinkError:
            turn += 1
            raise

    return ask
