"""API tokens, principals and the join messages.

A token is an opaque line of text with more than 200 random bits. Only its SHA-256 is stored, so that reading the store, a
backup or an API response reveals who has access and gives no access. When an agent joins, it generates its own token and key
and sends only the digest and the public part, so that neither is ever transmitted.

Types only: law/authorization.py decides what a token allows, serve/auth/enrollment.py decides who may join.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from remit.model.kinds.token import Token, TokenRole
from remit.model.metadata import END, Name

Audience = Literal["user", "agent", "component", "join"]

AUDIENCES: Final[dict[str, Audience]] = {
    "admin": "user",
    "member": "user",
    "viewer": "user",
    "agent": "agent",
    "scheduler": "component",
    "controllers": "component",
    "join": "join",
}
"""The API that accepts each role; a token for one API is rejected by the others."""

TOKEN_PREFIX: Final = "remit_"  # noqa: S105 - makes a leaked token recognisable, for example to secret scanners


class Principal(Struct, frozen=True, gc=False):
    """The authenticated caller, as described by its token. `token` is the token's name; an empty `tenant` means no
    restriction.
    """

    token: str
    subject: str
    role: TokenRole
    tenant: str = ""
    nodes: frozenset[str] = frozenset()

    @property
    def audience(self) -> Audience:
        return AUDIENCES[self.role]


def principal_of(token: Token) -> Principal:
    spec, name = token.spec, token.metadata.name
    return Principal(name, spec.subject or name, spec.role, spec.tenant, frozenset(spec.nodes))


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def expiry_after(start: str, term_ms: int) -> str:
    """Returns the instant `term_ms` after `start`, in the format of `TokenSpec.expires`."""
    until = datetime.fromisoformat(start) + timedelta(milliseconds=term_ms)
    return until.astimezone(UTC).isoformat(timespec="seconds").removesuffix("+00:00") + "Z"


PEM_MAX = 16 << 10
JOIN_NODES_MAX = 10_000

TokenDigest = Annotated[
    str, Meta(pattern="^[0-9a-f]{64}" + END, description="SHA-256 of the agent's own token, in hexadecimal")
]


class JoinRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Request of an agent to join. `nodes` must be exactly the nodes of the join token. `request` is a certificate signing
    request in PEM; it is empty without TLS.
    """

    digest: TokenDigest
    nodes: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=JOIN_NODES_MAX)]
    request: Annotated[str, Meta(max_length=PEM_MAX)] = ""


class RenewRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Request of an agent that has joined for a later expiry, and for new certificates for the key of `request`."""

    request: Annotated[str, Meta(max_length=PEM_MAX)] = ""


class JoinResponse(Struct, frozen=True):
    """`token` is the name of the new token. The certificates are in PEM: `calling` for the agent as a client, `answering` for
    the agent as a server, and `authority` is the CA certificate of both.
    """

    token: str
    expires: str
    calling: str = ""
    answering: str = ""
    authority: str = ""


def join_fingerprint(digest: str, key: str, nodes: Iterable[str]) -> str:
    """Returns a digest that identifies a joining agent: the same token, key and nodes give the same result on every retry.
    `key` is the digest of the agent's public key; it is empty without TLS.
    """
    return hashlib.sha256("\n".join((digest, key, *sorted(set(nodes)))).encode()).hexdigest()
