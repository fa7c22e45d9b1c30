"""Role and nodes that a client certificate's URIs name.

Only parses names; world/net/tls.py verifies the certificate. A certificate has one role. One with URIs of several roles, or
with an unknown URI, was not issued by Remit and has no identity, even if it is signed by the right CA.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

SERVER_URI: Final = "remit://server"
_NODE_URI_PREFIX: Final = "remit://node/"


class CertificateIdentity(NamedTuple):
    """`role` is empty without a certificate, or for one with unknown URIs. `nodes` are those of an agent, sorted."""

    role: Literal["", "server", "agent"] = ""
    nodes: tuple[str, ...] = ()

    @property
    def uris(self) -> tuple[str, ...]:
        """The URIs of a certificate with this identity."""
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
    """Returns the URI of the agent of a node."""
    return _NODE_URI_PREFIX + node


def identity_of(uris: Iterable[str]) -> CertificateIdentity:
    """Returns the identity for all URIs of a certificate; a single unknown URI gives no identity."""
    distinct = sorted(set(uris))
    if distinct == [SERVER_URI]:
        return SERVER_IDENTITY
    nodes = [name.removeprefix(_NODE_URI_PREFIX) for name in distinct]
    if distinct and all(name.startswith(_NODE_URI_PREFIX) for name in distinct) and all(nodes):
        return agent_identity(nodes)
    return NO_IDENTITY


def acts_for(identity: CertificateIdentity, nodes: Iterable[str]) -> bool:
    """Whether this is an agent that may act for all of these nodes. A server's certificate does not qualify."""
    return identity.role == "agent" and set(nodes) <= set(identity.nodes)
