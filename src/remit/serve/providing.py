"""How does a scope come by its first tokens? The server makes them known that runs on its data; all others a person makes.

A token is called after its digest. So making the same one known twice is one deed, and one that was revoked stays so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from remit.model.claims import Actor, Apply, Code, Refused, Role
from remit.model.fields import Metadata
from remit.model.identity import Token, TokenRole, TokenSpec, digest_of, expiry
from remit.model.objects import decode, key_of
from remit.world.promises import WorldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remit.serve.desk import Desk

BOOTSTRAP: Final = Actor("bootstrap", Role.OPERATOR)
TERM_MS: Final = 365 * 86_400_000
SPARE_MS: Final = 30 * 86_400_000
"""One that runs out sooner is not relied on any more."""


class NotProvided(WorldError):
    """The authority did not take a first token."""


def called(role: str, token: str) -> str:
    return f"{role}-{digest_of(token)[:12]}"


async def provide(desk: Desk, token: str, role: TokenRole, *, subject: str, nodes: Sequence[str] = ()) -> bool:
    """Make it known, if it is not. False: it cannot be relied on: it was revoked, runs out soon, or is for other nodes."""
    name, wall = called(role, token), desk.clock.wall()
    row = await desk.store.get(key_of("Token", name))
    if row is not None:
        await known_here(desk, name)
        known = decode(row.value)
        spec = known.spec if isinstance(known, Token) else None
        return spec is not None and not spec.revoked and spec.expires > expiry(wall, SPARE_MS) and set(spec.nodes) == set(nodes)
    spec = TokenSpec(
        role=role, digest=digest_of(token), expires=expiry(wall, TERM_MS), subject=subject, nodes=tuple(sorted(nodes))
    )
    verdict = await desk.client(BOOTSTRAP).ask(Apply(Token(metadata=Metadata(name=name), spec=spec), expect=0))
    if isinstance(verdict, Refused) and verdict.code is not Code.EXISTS:
        raise NotProvided(
            f"the token {name} could not be made known: {verdict.detail}", "see what the store holds, and start again"
        )
    await known_here(desk, name)
    return True


async def known_here(desk: Desk, name: str) -> None:
    """Until this server's board shows it: whoever is told of a token may use it at once."""
    while not desk.board.sober or desk.board.get(key_of("Token", name)) is None:
        await desk.clock.sleep_ms(2)
