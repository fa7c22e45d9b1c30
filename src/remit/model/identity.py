"""API tokens, principals and the join messages.

Tokens as they are kept: by their digest, never themselves. What they allow is law's.

A token is an opaque line of text. What is stored of it is its SHA-256, which nobody can turn back, since a token has more than
two hundred bits of chance in it. So whoever reads the store, a backup or an answer learns who may ask, and cannot ask.

Words only; who may join is serve/auth/enrollment.py's.

The agent makes its token and its key itself and sends what is public of them, so neither is ever on the way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from remit.model.constraints import Distinct, limited
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
"""At which door each role is heard: a token for one is nothing at another."""

TOKEN_PREFIX: Final = "remit_"  # noqa: S105 - by which a token is known when it turns up where it should not
TOKEN_NODES_MAX: Final = 10_000
INSTANT = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{3})?Z" + END


class TokenSpec(Record, frozen=True):
    """`subject` is whom it was made for. A `member`, or a `viewer`, of a `tenant` sees that one alone; an agent, and whoever
    joins as one, has its `nodes`. It ends at `expires` by the server's wall clock, or when it is `revoked`, for good. `spent`
    is of a join token that was used: by which agent, which may ask again and nobody else. One that `joined` has its nodes for
    itself: there is no other agent of them when it is made.
    """

    role: TokenRole
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}" + END, description="SHA-256 of the token, in hexadecimal")]
    expires: Annotated[str, Meta(pattern=INSTANT, description="an instant in UTC, such as 2027-01-31T12:00:00Z")]
    subject: Annotated[str, Meta(pattern=LINE, max_length=253)] = ""
    tenant: Annotated[str, Meta(pattern=OPTIONAL_LABEL, max_length=63)] = ""
    nodes: Annotated[tuple[Name, ...], limited(Distinct(), max_length=TOKEN_NODES_MAX)] = ()
    revoked: bool = False
    spent: Annotated[str, Meta(pattern="^([0-9a-f]{64})?" + END, description="SHA-256 of who has joined with it")] = ""
    joined: Annotated[bool, Meta(description="true: an agent's, who got it by joining")] = False


class Token(Object, tag="Token", frozen=True, kw_only=True):
    metadata: Metadata
    spec: TokenSpec


class Principal(Struct, frozen=True, gc=False):
    """Whoever asks, as far as their token says. `token` is its name; a `tenant` of nothing is no bound."""

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


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def expiry(wall: str, term_ms: int) -> str:
    """So long after an instant, as a token spells it."""
    until = datetime.fromisoformat(wall) + timedelta(milliseconds=term_ms)
    return until.astimezone(UTC).isoformat(timespec="seconds").removesuffix("+00:00") + "Z"


PEM_MAX = 16 << 10
NODES_MAX = 10_000

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}" + END, description="SHA-256 of the agent's own token, in hexadecimal")]


class Joining(Struct, frozen=True, forbid_unknown_fields=True):
    """`nodes` are all that the join token is for. `request`: for certificates, in PEM; empty where there is no TLS."""

    digest: Digest
    nodes: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=NODES_MAX)]
    request: Annotated[str, Meta(max_length=PEM_MAX)] = ""


class Renewing(Struct, frozen=True, forbid_unknown_fields=True):
    """More time for whoever has joined, and new certificates for the key of `request`."""

    request: Annotated[str, Meta(max_length=PEM_MAX)] = ""


class Joined(Struct, frozen=True):
    """`token` is its name. Certificates in PEM: one to call with, one to answer with, and the authority of both."""

    token: str
    expires: str
    calling: str = ""
    answering: str = ""
    authority: str = ""


def joiner(digest: str, key: str, nodes: Iterable[str]) -> str:
    """Who joins: the same for the same token, key and nodes, however often it asks. `key`: its digest; none without TLS."""
    return hashlib.sha256("\n".join((digest, key, *sorted(set(nodes)))).encode()).hexdigest()
