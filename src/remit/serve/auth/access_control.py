"""Token lookup and the authorization check of each request.

Tokens are found by digest in the watch cache; what a token allows is decided by law/authorization.py. The watch cache
follows the store, so a revoked token stops working a moment later, and open streams of its holder end.

Expiry is compared with the wall clock, because it must hold over restarts and across machines. A clock that is set back
extends tokens by as much; revocation does not depend on it.

Objects of other tenants do not exist for a caller of one tenant: the answer is 404, since 403 would confirm that they exist.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from remit.client.remote_store import RangeRequest, WatchRequest
from remit.client.rpc import EndpointCall
from remit.law import authorization
from remit.model.identity import Principal, principal_of, token_digest
from remit.model.kinds import Token
from remit.model.kinds.registry import AnyObject
from remit.model.objects import TENANTED
from remit.model.problems import quoted
from remit.model.wire.agent_messages import AssignmentsRequest, SecretMaterialRequest
from remit.observation.watch_cache import WatchCache
from remit.serve.http.replies import ApiProblem, unavailable
from remit.world.interfaces import Clock

CHALLENGE_HEADERS: Final = {"WWW-Authenticate": 'Bearer realm="remit"'}
_SEND_TOKEN: Final = "send the header Authorization: Bearer TOKEN, with a token from `remit token create`"  # noqa: S105 - help text


class TokenIndex:
    """All tokens of a scope, indexed by digest. Satisfies `observation.watch_cache.CacheListener`."""

    def __init__(self, watch_cache: WatchCache, clock: Clock) -> None:
        self._watch_cache, self._clock = watch_cache, clock
        self._by_digest: dict[str, tuple[Token, Principal]] = {}
        self._digest_by_name: dict[str, str] = {}
        self._changed = asyncio.Event()
        for key, row in watch_cache.of_kind("token/"):
            self.on_change(key, None, row.obj)
        watch_cache.subscribe(self)

    def on_change(self, key: str, old: Any, new: Any) -> None:
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

    def on_commit(self) -> None:
        return

    def authenticate(self, authorization: str) -> Principal:
        """Return the principal of an Authorization header. Raises `ApiProblem`: 401, or 503 while the tokens are still being
        loaded.
        """
        kind, _, given = authorization.partition(" ")
        given = given.strip()
        if kind.lower() != "bearer" or not given:
            raise unauthenticated("no bearer token was sent")
        entry = self._by_digest.get(token_digest(given))
        if entry is None:
            if not self._watch_cache.is_current:
                raise unavailable("tokens are still being loaded")
            raise unauthenticated("the token is not valid in this scope")
        token, principal = entry
        if (invalid := self._invalid_reason(token)) is not None:
            raise unauthenticated(invalid[1], reason=invalid[0])
        return principal

    def is_valid(self, principal: Principal) -> bool:
        """Return whether the token that authenticated `principal` is still valid."""
        entry = self._by_digest.get(self._digest_by_name.get(principal.token, ""))
        return entry is not None and entry[1] == principal and self._invalid_reason(entry[0]) is None

    async def wait_until_revoked(self, principal: Principal) -> None:
        """Wait until the token is revoked. Expiry does not end the wait: long-lived streams also call `is_valid` at every
        heartbeat.
        """
        while self.is_valid(principal):
            await self._changed.wait()

    def _invalid_reason(self, token: Token) -> tuple[str, str] | None:
        """Return why a token is not valid, for programs and for people; None if it is valid."""
        spec, name = token.spec, token.metadata.name
        if spec.revoked:
            return "token_revoked", f"token {name} was revoked"
        # Both are RFC 3339 in UTC, so text order is time order.
        return ("token_expired", f"token {name} expired at {spec.expires}") if spec.expires <= self._clock.wall() else None


def unauthenticated(detail: str, cure: str = _SEND_TOKEN, *, reason: str = "") -> ApiProblem:
    return ApiProblem(401, "unauthenticated", detail, cure=cure, reason=reason, headers=CHALLENGE_HEADERS)


def check_may_declare(principal: Principal, objects: tuple[AnyObject, ...]) -> None:
    """Check that `principal` may declare all of these objects. Raises `ApiProblem`, before they are compared with stored
    objects, which would reveal what exists.
    """
    for obj in objects:
        meta, kind = obj.metadata, type(obj).__name__
        if principal.tenant and (kind not in TENANTED or meta.tenant != principal.tenant):
            detail = f"{kind} {quoted(meta.name)}: {principal.subject} is limited to tenant {principal.tenant}"
            raise ApiProblem(
                403, "tenant", detail, field="metadata.tenant", cure="declare it in your own tenant, or ask an admin"
            )


def check_component_call(principal: Principal, call: EndpointCall | RangeRequest | SecretMaterialRequest) -> None:
    """Check that a component may make this call. Raises `ApiProblem`."""
    if isinstance(call, RangeRequest):
        _check_may_read_rows(principal)
    elif isinstance(call, SecretMaterialRequest):
        _raise_if_denied(authorization.actor_denial_reason(principal, call.actor))
    elif call.operations is not None:
        _raise_if_denied(
            next(
                (
                    reason
                    for operation in call.operations
                    if (reason := authorization.claim_denial_reason(principal, operation))
                ),
                "",
            )
        )
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
        raise forbidden(
            f"the role {principal.role} may not read the rows of a scope", "follow the assignments of your own nodes instead"
        )


def _raise_if_denied(reason: str) -> None:
    if reason:
        raise forbidden(reason, "use a token that covers these nodes, leases or claims")


def forbidden(detail: str, cure: str) -> ApiProblem:
    return ApiProblem(403, "not_owner", detail, cure=cure)
