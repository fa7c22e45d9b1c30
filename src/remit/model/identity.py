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

from remit.model.constraints import DistinctItems, constrained
from remit.model.metadata import END, LINE, OPTIONAL_LABEL, Metadata, Name, Object, Record

Audience = Literal["user", "agent", "component", "join"]
TokenRole = Literal["admin", "member", "viewer", "agent", "scheduler", "controllers", "join"]

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
TOKEN_NODES_MAX: Final = 10_000
INSTANT = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{3})?Z" + END


class TokenSpec(Record, frozen=True):
    """`subject` is the person or program that the token was issued to. A `member` or `viewer` with a `tenant` has access to
    that tenant only; an agent or join token lists its `nodes`. The token is valid until `expires` on the server's wall
    clock, or until it is `revoked`, which is permanent. `spent` identifies the agent that has used a join token; only that
    agent may use it again. A token that was issued by joining (`joined`) has its nodes exclusively: no other agent token
    covers them when it is issued.
    """

    role: TokenRole
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}" + END, description="SHA-256 of the token, in hexadecimal")]
    expires: Annotated[str, Meta(pattern=INSTANT, description="an instant in UTC, such as 2027-01-31T12:00:00Z")]
    subject: Annotated[str, Meta(pattern=LINE, max_length=253)] = ""
    tenant: Annotated[str, Meta(pattern=OPTIONAL_LABEL, max_length=63)] = ""
    nodes: Annotated[tuple[Name, ...], constrained(DistinctItems(), max_length=TOKEN_NODES_MAX)] = ()
    revoked: bool = False
    spent: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?" + END, description="SHA-256 that identifies the agent which has joined with this token"
        ),
    ] = ""
    joined: Annotated[bool, Meta(description="true: an agent's token, issued when it joined")] = False


class Token(Object, tag="Token", frozen=True, kw_only=True):
    metadata: Metadata
    spec: TokenSpec


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
