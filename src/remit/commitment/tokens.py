"""May this token be declared, and which tokens end with something else? What a token then allows is law/access.py's. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from remit.commitment.draft import Draft
from remit.commitment.rulings import refuse
from remit.model.claims import Code, Refused
from remit.model.identity import Token
from remit.model.objects import key_of

TOKENS_MAX = 100_000
_TOKENS = key_of("Token", "")


def allowed_token(draft: Draft, token: Token, before: Token | None) -> Refused | None:
    """Whose token it is, and for what, does not change: an answer that was given to one must never be another's by its name."""
    spec, name = token.spec, token.metadata.name
    if spec.tenant and draft.thing(key_of("Tenant", spec.tenant)) is None:
        return refuse(Code.NOT_FOUND, f"spec.tenant: there is no tenant {spec.tenant}")
    if before is None:
        if len(draft.keys(_TOKENS)) >= TOKENS_MAX:
            return refuse(Code.LIMIT, f"there are {TOKENS_MAX} tokens already; delete those that have ended")
        if any(one.spec.digest == spec.digest for one in _tokens(draft)):  # else whoever shows it would be somebody else now
            return refuse(Code.EXISTS, "spec.digest: another token has it; make a new one")
        return _alone(draft, token) if spec.joined else None
    was = before.spec
    if was.revoked and not spec.revoked:
        return refuse(Code.EXISTS, f"token {name} was revoked, for good; make a new one")
    if was.spent and spec.spent != was.spent:
        return refuse(Code.EXISTS, f"token {name} was used, by one agent for good; make a new one")
    if replace(spec, revoked=was.revoked, expires=was.expires, spent=was.spent) != was:
        return refuse(Code.EXISTS, f"token {name} exists; only when it ends may be changed. Make a new one for anything else")
    return None


def _alone(draft: Draft, token: Token) -> Refused | None:
    """Whoever looked before asking may have looked at the same time as another, at another server: here one comes first."""
    for one in _tokens(draft):
        if one.spec.role != "agent" or one.spec.revoked or one.spec.expires <= draft.moment.wall:
            continue
        if taken := sorted(set(one.spec.nodes) & set(token.spec.nodes)):
            known = f"known by the token {one.metadata.name}"
            return refuse(Code.EXISTS, f"spec.nodes: node {taken[0]} has an agent already, {known}")
    return None


def void_with_tenant(draft: Draft, tenant: str) -> None:
    """Else a later tenant of the same name would be open to the members of this one."""
    for token in _tokens(draft):
        if token.spec.tenant == tenant:
            _revoke(draft, token)


def void_with_node(draft: Draft, node: str) -> None:
    """An agent whose last node is gone has nothing left to speak for."""
    for token in _tokens(draft):
        spec = token.spec
        if node in spec.nodes and all(draft.thing(key_of("Node", one)) is None for one in spec.nodes if one != node):
            _revoke(draft, token)


def _tokens(draft: Draft) -> list[Token]:
    found = (draft.thing(name) for name in draft.keys(_TOKENS))
    return [one[0] for one in found if one is not None]


def _revoke(draft: Draft, token: Token) -> None:
    if not token.spec.revoked:
        meta = replace(token.metadata, generation=token.metadata.generation + 1)
        draft.put(replace(token, metadata=meta, spec=replace(token.spec, revoked=True)))
