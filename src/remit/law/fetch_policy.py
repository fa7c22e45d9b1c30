"""Decides from which addresses artifacts may be fetched (SSRF protection).

Allowed are public addresses, and others that are explicitly permitted. No name resolution here: admission checks the URL as
written, and the agent checks every address that the name resolves to before it connects. Otherwise a tenant could read
through the node what only the node may read, such as the cloud credentials of the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

_NUMERIC_LABEL: Final = re.compile(r"0[xX][0-9a-fA-F]*|[0-9]+")
_LOCAL_DOMAINS: Final = ("localhost", "local", "internal", "home.arpa", "localdomain")
"""Names under these domains always belong to the machine or its network, independent of their addresses."""
_NAT64: Final = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))

AnyAddress = IPv4Address | IPv6Address


def host_denial_reason(host: str, allow: Sequence[str]) -> str:
    """Returns why nothing may be fetched from this host, judged by its name alone; empty if its name is allowed."""
    try:
        return address_denial_reason(ip_address(host), host, allow)
    except ValueError:
        pass
    name = host.rstrip(".").lower()
    if name in allow:
        return ""
    if _NUMERIC_LABEL.fullmatch(name.rpartition(".")[2]):
        return f"{host} is an incomplete address"
    if any(name == own or name.endswith(f".{own}") for own in _LOCAL_DOMAINS) or "." not in name:
        return f"{host} is a name in the node's own network"
    return ""


def address_denial_reason(address: AnyAddress, host: str, allow: Iterable[str]) -> str:
    """Returns why a connection to this address is denied for `host`; empty if it is allowed."""
    address, allow = _embedded_ipv4(address), tuple(allow)
    networks = [ip_network(text) for text in allow if _is_network(text)]
    if any(address in network for network in networks if network.version == address.version):
        return ""
    # Cloud metadata services with the machine's credentials are link-local: an allowed name does not make them reachable.
    if address.is_link_local:
        return f"{address} is a link-local address"
    if host.rstrip(".").lower() in allow:
        return ""
    for category in ("loopback", "unspecified", "multicast", "private", "reserved"):
        if getattr(address, f"is_{category}"):
            return f"{address} is {'an' if category == 'unspecified' else 'a'} {category} address"
    return "" if address.is_global else f"{address} is not a public address"


def _embedded_ipv4(address: AnyAddress) -> AnyAddress:
    """Returns the IPv4 address that is embedded in an IPv6 address (mapped, 6to4, Teredo, NAT64), because a connection reaches
    it; otherwise the address itself.
    """
    if isinstance(address, IPv4Address):
        return address
    inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
    if inner is None and (any(address in network for network in _NAT64) or (int(address) >> 32 == 0 and int(address) > 1)):
        inner = IPv4Address(int(address) & 0xFFFF_FFFF)
    return address if inner is None else inner


def _is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True
