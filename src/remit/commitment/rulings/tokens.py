"""Rules of declared tokens: what never changes, and revocation with their tenant or nodes. Pure.

law/authorization.py decides what a token allows; this module decides which tokens may be declared.
"""

from __future__ import annotations

from msgspec.structs import replace

from remit.commitment.draft import Draft
from remit.commitment.rulings.registry import refuse
from remit.model.claims import Code, Operation, Refused
from remit.model.kinds import Node, Tenant, Token
from remit.model.objects import key_of

TOKENS_MAX = 100_000
_TOKENS = key_of("Token", "")


def check_token(draft: Draft, operation: Operation, token: Token, before: Token | None) -> Refused | None:
    """Check a declared token. Its owner and role never change: an answer given to one holder must not reach another by reuse of
    the name.
    """
    spec, name = token.spec, token.metadata.name
    if spec.tenant and draft.lookup(key_of("Tenant", spec.tenant)) is None:
        return refuse(Code.NOT_FOUND, f"spec.tenant: tenant {spec.tenant} does not exist")
    if before is None:
        if len(draft.keys(_TOKENS)) >= TOKENS_MAX:
            return refuse(Code.LIMIT, f"the scope has reached its limit of {TOKENS_MAX} tokens; delete expired or revoked ones")
        if any(
            other.spec.digest == spec.digest for other in _tokens(draft)
        ):  # otherwise one secret would authenticate as two tokens
            return refuse(Code.EXISTS, "spec.digest: another token has the same secret; generate a new one")
        return _check_nodes_unclaimed(draft, token) if spec.joined else None
    old = before.spec
    if old.revoked and not spec.revoked:
        return refuse(Code.EXISTS, f"token {name} was revoked, which is final; create a new token")
    if old.spent and spec.spent != old.spent:
        return refuse(Code.EXISTS, f"token {name} was already used by an agent to join, which is final; create a new token")
    if replace(spec, revoked=old.revoked, expires=old.expires, spent=old.spent) != old:
        return refuse(
            Code.EXISTS,
            f"token {name} exists, and only spec.expires, spec.revoked and spec.spent may change; create a new token instead",
        )
    return None


def _check_nodes_unclaimed(draft: Draft, token: Token) -> Refused | None:
    """Refuse a join token's nodes that another agent has. Two servers may have checked this at the same time; here one comes
    first.
    """
    for other in _tokens(draft):
        if other.spec.role != "agent" or other.spec.revoked or other.spec.expires <= draft.time.wall:
            continue
        if taken := sorted(set(other.spec.nodes) & set(token.spec.nodes)):
            how = f"by token {other.metadata.name}"
            return refuse(
                Code.EXISTS,
                f"spec.nodes: node {taken[0]} already has an agent, identified {how}; revoke that token first, or choose "
                "another name",
            )
    return None


def revoke_tenant_tokens(draft: Draft, tenant: Tenant) -> None:
    """Revoke the tokens of a deleted tenant. Otherwise they would be valid for a later tenant of the same name."""
    for token in _tokens(draft):
        if token.spec.tenant == tenant.metadata.name:
            _revoke(draft, token)


def revoke_node_tokens(draft: Draft, node: Node) -> None:
    """Revoke the tokens of agents whose last node is deleted."""
    deleted = node.metadata.name
    for token in _tokens(draft):
        others = [name for name in token.spec.nodes if name != deleted]
        if deleted in token.spec.nodes and all(draft.lookup(key_of("Node", name)) is None for name in others):
            _revoke(draft, token)


def _tokens(draft: Draft) -> list[Token]:
    entries = (draft.lookup(name) for name in draft.keys(_TOKENS))
    return [entry[0] for entry in entries if entry is not None]


def _revoke(draft: Draft, token: Token) -> None:
    if not token.spec.revoked:
        meta = replace(token.metadata, generation=token.metadata.generation + 1)
        draft.put(replace(token, metadata=meta, spec=replace(token.spec, revoked=True)))
