"""Token lookup and the authorization check of each request.

Looked up by its digest among the tokens on the board; what it allows is law/authorization.py's.

The board follows the store, so a token that is revoked is unknown here a moment later, and whatever was being told to its
holder ends. When a token runs out is the one thing here that a wall clock decides: it is a promise to people, over restarts and
machines. A clock that is set back lengthens tokens by that much, and nothing else; revoking does not depend on it.

Who they are, at which door, and for what: law/authorization.py decides, this finds what to ask it.

For somebody of one tenant the others' objects are not there: 404, and not 403, which would tell that they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from remit.client.remote_store import RangeOf, RowsFrom
from remit.client.rpc import Call
from remit.law import authorization
from remit.model.identity import Principal, Token, digest_of, principal_of
from remit.model.objects import TENANTED, AnyObject
from remit.model.problems import an, shown
from remit.model.wire.agent_messages import MaterialOf, OrdersOf
from remit.observation.watch_cache import Board
from remit.serve.http.replies import Failure, unavailable
from remit.serve.http.routes import Route
from remit.world.interfaces import Clock

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


_DOORS: Final = {"user": "people", "agent": "agents", "component": "schedulers and controllers", "join": "joining, once"}


def enter(route: Route, principal: Principal, path: Mapping[str, str]) -> None:
    """Raises `Failure`."""
    if principal.audience not in route.audience:
        detail = f"the token {principal.token} is for {_DOORS[principal.audience]}, and is not taken here"
        raise unknown(detail, "use a token that was made for this: `remit token create --role ROLE`")
    if principal.audience != "user":
        return
    tenant = path.get("name" if route.kind == "Tenant" else "tenant", "")
    if tenant and principal.tenant not in ("", tenant):
        raise Failure(404, "not_found", f"there is no tenant {shown(tenant)}", field="tenant", cure="use the one you belong to")
    if not route.reading and not authorization.may_write(principal):
        raise forbidden(f"{principal.subject} is a viewer, and may not change anything", "ask an admin for a token of a member")
    if not principal.tenant:
        return
    if route.kind in TENANTED:
        return
    if route.kind and not (route.reading and authorization.sees(principal, route.kind, "", path.get("name", ""))):
        cure = f"read your own: /v1/tenants/{principal.tenant}" if route.kind == "Tenant" else "let an admin ask"
        raise forbidden(f"{an(route.kind)} belongs to no tenant, and {principal.subject} to {principal.tenant}", cure)
    if not route.kind and not route.tenants:
        raise forbidden(
            f"this is not for somebody of one tenant, as {principal.subject} is of {principal.tenant}", "let an admin ask"
        )


def check_declared(principal: Principal, things: tuple[AnyObject, ...]) -> None:
    """May this person speak of all of these? Raises `Failure`, before anything is compared with what is there."""
    for thing in things:
        meta, kind = thing.metadata, type(thing).__name__
        if principal.tenant and (kind not in TENANTED or meta.tenant != principal.tenant):
            detail = f"{kind} {shown(meta.name)}: {principal.subject} acts in tenant {principal.tenant} alone"
            raise Failure(
                403, "tenant", detail, field="metadata.tenant", cure="declare it in your own tenant, or let an admin do it"
            )


def check_asked(principal: Principal, asked: Call | RangeOf | MaterialOf) -> None:
    """May this component ask this? Raises `Failure`."""
    if isinstance(asked, RangeOf):
        _check_rows(principal)
    elif isinstance(asked, MaterialOf):
        _check(authorization.may_act(principal, asked.actor))
    elif asked.operations is not None:
        _check(next((wrong for one in asked.operations if (wrong := authorization.may_claim(principal, one))), ""))
    elif asked.renew is not None:
        _check(authorization.may_act(principal, asked.renew))
    elif asked.beats is not None:
        _check(authorization.may_beat(principal, asked.beats))
    elif asked.heard or asked.states is not None:
        _check_rows(principal)


def check_followed(principal: Principal, asked: OrdersOf | RowsFrom) -> None:
    if isinstance(asked, RowsFrom):
        _check_rows(principal)
    else:
        _check(authorization.may_follow(principal, asked.nodes))


def _check_rows(principal: Principal) -> None:
    if principal.audience != "component":
        raise forbidden(f"the rows of a scope are not told to {principal.role}s", "ask for the orders of your own nodes")


def _check(wrong: str) -> None:
    if wrong:
        raise forbidden(wrong, "ask only for what is yours")


def forbidden(detail: str, cure: str) -> Failure:
    return Failure(403, "not_owner", detail, cure=cure)
