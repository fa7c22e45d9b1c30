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

from remit.client.remote_store import RangeRequest, WatchRequest
from remit.client.rpc import EndpointCall
from remit.law import authorization
from remit.model.identity import Principal, Token, token_digest, principal_of
from remit.model.objects import TENANTED, AnyObject
from remit.model.problems import an, quoted
from remit.model.wire.agent_messages import SecretMaterialRequest, AssignmentsRequest
from remit.observation.watch_cache import Board
from remit.serve.http.replies import ApiProblem, unavailable
from remit.serve.http.routes import Route
from remit.world.interfaces import Clock

CHALLENGE_HEADERS: Final = {"WWW-Authenticate": 'Bearer realm="remit"'}
_SEND_TOKEN: Final = "send the header Authorization: Bearer TOKEN, with a token that `remit token create` made"


class TokenIndex:
    """Every token of a scope, from one board. Satisfies `observation.board.Listener`."""

    def __init__(self, watch_cache: Board, clock: Clock) -> None:
        self._watch_cache, self._clock = watch_cache, clock
        self._by_digest: dict[str, tuple[Token, Principal]] = {}
        self._digest_by_name: dict[str, str] = {}
        self._changed = asyncio.Event()
        for key, row in watch_cache.kind("token/"):
            self.changed(key, None, row.thing)
        watch_cache.subscribe(self)

    def changed(self, key: str, old: Any, new: Any) -> None:
        if not key.startswith("token/"):
            return
        if isinstance(old, Token):
            self._by_digest.pop(old.spec.digest, None)
            self._digest_by_name.pop(old.metadata.name, None)
        if isinstance(new, Token):
            self._by_digest[new.spec.digest] = new, principal_of(new)
            self._digest_by_name[new.metadata.name] = new.spec.digest
        self._changed.set()
        self._changed = asyncio.Event()

    def reached(self) -> None:
        return

    def authenticate(self, authorization: str) -> Principal:
        """Whoever sends this header. Raises `ApiProblem`: 401, or 503 while nobody can be known yet."""
        kind, _, given = authorization.partition(" ")
        given = given.strip()
        if kind.lower() != "bearer" or not given:
            raise unauthenticated("no token was given")
        entry = self._by_digest.get(token_digest(given))
        if entry is None:
            if not self._watch_cache.sober:
                raise unavailable("who may ask here is still being read")
            raise unauthenticated("the token is none of this scope's")
        token, principal = entry
        reason = self._why_invalid(token)
        if reason:
            raise unauthenticated(reason)
        return principal

    def is_valid(self, principal: Principal) -> bool:
        """Is the token still good by which somebody was let in?"""
        entry = self._by_digest.get(self._digest_by_name.get(principal.token, ""))
        return entry is not None and entry[1] == principal and not self._why_invalid(entry[0])

    async def wait_until_revoked(self, principal: Principal) -> None:
        """Until it was revoked. That it ran out nobody tells: whoever goes on for long asks `good` now and then."""
        while self.is_valid(principal):
            await self._changed.wait()

    def _why_invalid(self, token: Token) -> str:
        spec, name = token.spec, token.metadata.name
        if spec.revoked:
            return f"the token {name} was revoked"
        # Both are RFC 3339 in UTC, so their order is that of their letters.
        return f"the token {name} ran out at {spec.expires}" if spec.expires <= self._clock.wall() else ""


def unauthenticated(detail: str, cure: str = _SEND_TOKEN) -> ApiProblem:
    return ApiProblem(401, "unauthenticated", detail, cure=cure, headers=CHALLENGE_HEADERS)


_AUDIENCES: Final = {"user": "people", "agent": "agents", "component": "schedulers and controllers", "join": "joining, once"}


def authorize(route: Route, principal: Principal, path: Mapping[str, str]) -> None:
    """Raises `ApiProblem`."""
    if principal.audience not in route.audience:
        detail = f"the token {principal.token} is for {_AUDIENCES[principal.audience]}, and is not taken here"
        raise unauthenticated(detail, "use a token that was made for this: `remit token create --role ROLE`")
    if principal.audience != "user":
        return
    tenant = path.get("name" if route.kind == "Tenant" else "tenant", "")
    if tenant and principal.tenant not in ("", tenant):
        raise ApiProblem(404, "not_found", f"there is no tenant {quoted(tenant)}", field="tenant", cure="use the one you belong to")
    if not route.is_read and not authorization.may_write(principal):
        raise forbidden(f"{principal.subject} is a viewer, and may not change anything", "ask an admin for a token of a member")
    if not principal.tenant:
        return
    if route.kind in TENANTED:
        return
    if route.kind and not (route.is_read and authorization.may_read(principal, route.kind, "", path.get("name", ""))):
        cure = f"read your own: /v1/tenants/{principal.tenant}" if route.kind == "Tenant" else "let an admin ask"
        raise forbidden(f"{an(route.kind)} belongs to no tenant, and {principal.subject} to {principal.tenant}", cure)
    if not route.kind and not route.tenant_access:
        raise forbidden(
            f"this is not for somebody of one tenant, as {principal.subject} is of {principal.tenant}", "let an admin ask"
        )


def check_may_declare(principal: Principal, objects: tuple[AnyObject, ...]) -> None:
    """May this person speak of all of these? Raises `ApiProblem`, before anything is compared with what is there."""
    for obj in objects:
        meta, kind = obj.metadata, type(obj).__name__
        if principal.tenant and (kind not in TENANTED or meta.tenant != principal.tenant):
            detail = f"{kind} {quoted(meta.name)}: {principal.subject} acts in tenant {principal.tenant} alone"
            raise ApiProblem(
                403, "tenant", detail, field="metadata.tenant", cure="declare it in your own tenant, or let an admin do it"
            )


def check_component_call(principal: Principal, call: EndpointCall | RangeRequest | SecretMaterialRequest) -> None:
    """May this component ask this? Raises `ApiProblem`."""
    if isinstance(call, RangeRequest):
        _check_may_read_rows(principal)
    elif isinstance(call, SecretMaterialRequest):
        _raise_if_denied(authorization.actor_denial_reason(principal, call.actor))
    elif call.operations is not None:
        _raise_if_denied(next((reason for operation in call.operations if (reason := authorization.claim_denial_reason(principal, operation))), ""))
    elif call.renew is not None:
        _raise_if_denied(authorization.actor_denial_reason(principal, call.renew))
    elif call.beats is not None:
        _raise_if_denied(authorization.heartbeat_denial_reason(principal, call.beats))
    elif call.heard or call.states is not None:
        _check_may_read_rows(principal)


def check_component_stream(principal: Principal, stream_request: AssignmentsRequest | WatchRequest) -> None:
    if isinstance(stream_request, WatchRequest):
        _check_may_read_rows(principal)
    else:
        _raise_if_denied(authorization.assignments_denial_reason(principal, stream_request.nodes))


def _check_may_read_rows(principal: Principal) -> None:
    if principal.audience != "component":
        raise forbidden(f"the rows of a scope are not told to {principal.role}s", "ask for the orders of your own nodes")


def _raise_if_denied(reason: str) -> None:
    if reason:
        raise forbidden(reason, "ask only for what is yours")


def forbidden(detail: str, cure: str) -> ApiProblem:
    return ApiProblem(403, "not_owner", detail, cure=cure)
