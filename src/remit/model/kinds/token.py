"""Kind Token: an API token, stored as its digest.

Types only: identity.py has principals, law/authorization.py decides what a token allows.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from remit.model.constraints import DistinctItems, constrained
from remit.model.kinds.definition import KindDefinition, ListColumn, sample
from remit.model.metadata import END, LINE, OPTIONAL_LABEL, Metadata, Name, Object, ObjectStatus, Record
from remit.model.roles import OPERATORS

TokenRole = Literal["admin", "member", "viewer", "agent", "scheduler", "controllers", "join"]
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
    status: ObjectStatus = ObjectStatus()


TOKEN: Final = KindDefinition(
    struct=Token,
    summary="an API token: its role, its expiry and its digest",
    plural="tokens",
    aliases=("tok",),
    declared_by=OPERATORS,
    sample=sample(
        "member-risk-ann",
        {"role": "member", "tenant": "risk", "subject": "ann", "digest": "0" * 64, "expires": "2027-01-31T12:00:00Z"},
    ),
    columns=(
        ListColumn("ROLE", "spec.role"),
        ListColumn("SUBJECT", "spec.subject", fluid=True),
        ListColumn("TENANT", "spec.tenant"),
        ListColumn("NODES", "spec.nodes", "names"),
        ListColumn("AUDIENCE", wide=True),
        ListColumn("EXPIRES"),
    ),
)
