"""When does an agent's name run out, and who gives it more time? Its token and certificates; how it got them: see joining.py.

It asks any of its servers, well before the end. To fail is no reason to hurry: a third of the time is left then, so it asks
again after a pause that grows and differs from that of others, and says so each time. A name that has run out is beyond that:
no server hears who shows an old certificate. It still asks, since a clock may be wrong, and says what a person can do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from remit.agent.joining import Credentials, Term, ask_any, new_key
from remit.client.retry import RetryShape
from remit.model.joining import Joined, Renewing
from remit.world.promises import Missing, World, WorldError
from remit.world.tls import Trust

LOOK_S_MAX: Final = 3_600.0
"""So often it is looked at, at least: a wall clock may be set, and other hands may write the files."""
LOOK_S_MIN: Final = 1.0
RENEW_PART: Final = 3
"""When less than a third is left."""
AGAIN: Final = RetryShape(base_ms=2_000, cap_ms=600_000)
JOIN_AGAIN: Final = "make a join token for it with `remit token create --role join --node NODE`, and start it again with --join"
_terms: msgspec.json.Decoder[Term] = msgspec.json.Decoder(Term)


class Lasting(NamedTuple):
    """In how many seconds it should be renewed, and in how many it ends."""

    due_s: float
    left_s: float


def lasting(credentials: Credentials, world: World) -> Lasting:
    """By whatever ends first. If nothing says when that is, it is due at once. Raises `WorldError`."""
    found: list[Lasting] = []
    with suppress(Missing, msgspec.DecodeError, ValueError):
        term = _terms.decode(world.disk.read(credentials.place / "term"))
        now, begun, ends = map(datetime.fromisoformat, (world.clock.wall(), term.begun, term.ends))
        left_s = (ends - now).total_seconds()
        found = [Lasting(left_s - (ends - begun).total_seconds() / RENEW_PART, left_s)]
    if credentials.secure:
        from remit.world import certificates

        pem = world.disk.read(credentials.place / "calling.pem")
        found.append(Lasting(certificates.due_s(pem), certificates.left_s(pem)))
    return min(found, default=Lasting(0.0, math.inf))


def has_run_out(credentials: Credentials, world: World) -> bool:
    """By the clock of this machine. Raises `WorldError`."""
    return lasting(credentials, world).left_s <= 0


async def renewing(
    credentials: Credentials, urls: Sequence[str], world: World, shown: Callable[[Trust], None], tell: Callable[[str], None]
) -> None:
    """For ever. `shown`: is told of new certificates, if there are any."""
    failures = 0
    while True:
        left_s = math.inf
        try:
            due_s, left_s = lasting(credentials, world)
            if due_s <= 0:
                await renew(credentials, urls, world)
                if credentials.secure:
                    shown(credentials.trust)
                due_s, left_s = lasting(credentials, world)
            failures = 0
            await world.clock.sleep_ms(int(min(LOOK_S_MAX, max(LOOK_S_MIN, due_s)) * 1000))
        except WorldError as error:
            failures += 1
            tell(f"its name was not renewed, and {_ends(left_s)}: {error}" + (f"; {JOIN_AGAIN}" if left_s <= 0 else ""))
            await world.clock.sleep_ms(pause_ms(failures, world))


def pause_ms(failures: int, world: World) -> int:
    """From half of a ceiling that doubles, up to all of it."""
    ceiling = min(AGAIN.cap_ms, AGAIN.base_ms << min(failures - 1, 20))
    return ceiling // 2 + world.chance.uniform_ms(ceiling // 2)


async def renew(credentials: Credentials, urls: Sequence[str], world: World) -> Joined:
    """Asked twice, it is given twice; no harm is in that. Raises `WorldError`."""
    from remit.world.certificates import request_for

    key = new_key() if credentials.secure else b""
    asked = msgspec.json.encode(Renewing(request_for(key).decode() if key else ""))
    begun = world.clock.wall()
    said = await ask_any(urls, "/v1/renew", credentials.token, credentials.trust, asked, world)
    credentials.keep(world.disk, key=key, said=said, begun=begun)
    return said


def _ends(left_s: float) -> str:
    if left_s == math.inf:
        return "nothing says when it runs out"
    if left_s <= 0:
        return "has run out"
    return f"runs out in {left_s / 86_400:.1f} days" if left_s > 86_400 else f"runs out in {left_s / 60:.0f} minutes"
