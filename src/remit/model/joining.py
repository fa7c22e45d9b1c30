"""What do an agent that joins and a server say to each other? Words only; who may join is serve/joining.py's.

The agent makes its token and its key itself and sends what is public of them, so neither is ever on the way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct

from remit.model.fields import END, Name

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
