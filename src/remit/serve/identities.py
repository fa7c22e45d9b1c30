"""Whose is a token, and is it good? Looked up by its digest among the tokens on the board; what it allows is law/access.py's.

The board follows the store, so a token that is revoked is unknown here a moment later, and whatever was being told to its
holder ends. When a token runs out is the one thing here that a wall clock decides: it is a promise to people, over restarts and
machines. A clock that is set back lengthens tokens by that much, and nothing else; revoking does not depend on it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from remit.model.identity import Principal, Token, digest_of, principal_of
from remit.observation.board import Board
from remit.serve.failures import Failure, unavailable
from remit.world.promises import Clock

HEADERS: Final = {"WWW-Authenticate": 'Bearer realm="remit"'}
_CURE: Final = "send the header Authorization: Bearer TOKEN, with a token that `remit token create` made"


class Identities:
    """Every token of a scope, from one board. Satisfies `observation.board.Listener`."""

    def __init__(self, board: Board, clock: Clock) -> None:
        self._board, self._clock = board, clock
        self._found: dict[str, tuple[Token, Principal]] = {}
        self._names: dict[str, str] = {}
        self._changed = asyncio.Event()
        for key, kept in board.kind("token/"):
            self.changed(key, None, kept.thing)
        board.subscribe(self)

    def changed(self, key: str, old: Any, new: Any) -> None:
        if not key.startswith("token/"):
            return
        if isinstance(old, Token):
            self._found.pop(old.spec.digest, None)
            self._names.pop(old.metadata.name, None)
        if isinstance(new, Token):
            self._found[new.spec.digest] = new, principal_of(new)
            self._names[new.metadata.name] = new.spec.digest
        self._changed.set()
        self._changed = asyncio.Event()

    def reached(self) -> None:
        return

    def principal(self, authorization: str) -> Principal:
        """Whoever sends this header. Raises `Failure`: 401, or 503 while nobody can be known yet."""
        kind, _, given = authorization.partition(" ")
        given = given.strip()
        if kind.lower() != "bearer" or not given:
            raise unknown("no token was given")
        found = self._found.get(digest_of(given))
        if found is None:
            if not self._board.sober:
                raise unavailable("who may ask here is still being read")
            raise unknown("the token is none of this scope's")
        token, principal = found
        wrong = self._wrong(token)
        if wrong:
            raise unknown(wrong)
        return principal

    def good(self, principal: Principal) -> bool:
        """Is the token still good by which somebody was let in?"""
        found = self._found.get(self._names.get(principal.token, ""))
        return found is not None and found[1] == principal and not self._wrong(found[0])

    async def lapse(self, principal: Principal) -> None:
        """Until it was revoked. That it ran out nobody tells: whoever goes on for long asks `good` now and then."""
        while self.good(principal):
            await self._changed.wait()

    def _wrong(self, token: Token) -> str:
        spec, name = token.spec, token.metadata.name
        if spec.revoked:
            return f"the token {name} was revoked"
        # Both are RFC 3339 in UTC, so their order is that of their letters.
        return f"the token {name} ran out at {spec.expires}" if spec.expires <= self._clock.wall() else ""


def unknown(detail: str, cure: str = _CURE) -> Failure:
    return Failure(401, "unauthenticated", detail, cure=cure, headers=HEADERS)
