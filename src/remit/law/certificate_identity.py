"""Role and nodes that a client certificate's URIs name.

Names only: whether it can be believed is for world/net/tls.py to say.

A certificate has one role. One that names a server and a node as well was made by nobody of ours, and its bearer is nobody: to
have been signed by the right authority is not to have every right.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

SERVER_URI: Final = "remit://server"
_NODE_URI_PREFIX: Final = "remit://node/"


class CertificateIdentity(NamedTuple):
    """`role` is empty for whoever showed no certificate, or one that says nothing we know. `nodes`: of an agent, sorted."""

    role: Literal["", "server", "agent"] = ""
    nodes: tuple[str, ...] = ()

    @property
    def uris(self) -> tuple[str, ...]:
        """As a certificate has them."""
        match self.role:
            case "server":
                return (SERVER_URI,)
            case "agent":
                return tuple(map(node_uri, self.nodes))
            case _:
                return ()


NO_IDENTITY: Final = CertificateIdentity()
SERVER_IDENTITY: Final = CertificateIdentity("server")


def agent_identity(nodes: Iterable[str]) -> CertificateIdentity:
    return CertificateIdentity("agent", tuple(sorted(set(nodes))))


def node_uri(node: str) -> str:
    """What a certificate calls the agent of a node."""
    return _NODE_URI_PREFIX + node


def identity_of(names: Iterable[str]) -> CertificateIdentity:
    """By all the names that are URIs; one that is none of ours makes it nobody's."""
    found = sorted(set(names))
    if found == [SERVER_URI]:
        return SERVER_IDENTITY
    nodes = [name.removeprefix(_NODE_URI_PREFIX) for name in found]
    if found and all(name.startswith(_NODE_URI_PREFIX) for name in found) and all(nodes):
        return agent_identity(nodes)
    return NO_IDENTITY


def acts_for(bearer: CertificateIdentity, nodes: Iterable[str]) -> bool:
    """May it speak for all of these? A server's certificate is no agent's."""
    return bearer.role == "agent" and set(nodes) <= set(bearer.nodes)
