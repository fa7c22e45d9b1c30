"""Role and nodes that a client certificate's URIs name.

Names only: whether it can be believed is for world/net/tls.py to say.

A certificate has one role. One that names a server and a node as well was made by nobody of ours, and its bearer is nobody: to
have been signed by the right authority is not to have every right.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

SERVER_NAME: Final = "remit://server"
_NODE: Final = "remit://node/"


class Bearer(NamedTuple):
    """`role` is empty for whoever showed no certificate, or one that says nothing we know. `nodes`: of an agent, sorted."""

    role: Literal["", "server", "agent"] = ""
    nodes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """As a certificate has them."""
        match self.role:
            case "server":
                return (SERVER_NAME,)
            case "agent":
                return tuple(map(node_name, self.nodes))
            case _:
                return ()


NOBODY: Final = Bearer()
SERVER: Final = Bearer("server")


def agent_of(nodes: Iterable[str]) -> Bearer:
    return Bearer("agent", tuple(sorted(set(nodes))))


def node_name(node: str) -> str:
    """What a certificate calls the agent of a node."""
    return _NODE + node


def bearer_of(names: Iterable[str]) -> Bearer:
    """By all the names that are URIs; one that is none of ours makes it nobody's."""
    found = sorted(set(names))
    if found == [SERVER_NAME]:
        return SERVER
    nodes = [name.removeprefix(_NODE) for name in found]
    if found and all(name.startswith(_NODE) for name in found) and all(nodes):
        return agent_of(nodes)
    return NOBODY


def acts_for(bearer: Bearer, nodes: Iterable[str]) -> bool:
    """May it speak for all of these? A server's certificate is no agent's."""
    return bearer.role == "agent" and set(nodes) <= set(bearer.nodes)
