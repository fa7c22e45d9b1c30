"""Which addresses artifacts may be fetched from (SSRF protection).

The public ones, and what somebody has named; nothing is looked up here.

Admission asks it of what is written, and the node again of every address that a name comes to, before it connects there: else a
tenant could read through its node what only the node may read, such as the machine's own credentials.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

_NUMERIC_LABEL: Final = re.compile(r"0[xX][0-9a-fA-F]*|[0-9]+")
_LOCAL_DOMAINS: Final = ("localhost", "local", "internal", "home.arpa", "localdomain")
"""Names that end so are of the machine or of its network, whatever they come to."""
_NAT64: Final = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))

AnyAddress = IPv4Address | IPv6Address


def host_denial_reason(host: str, allow: Sequence[str]) -> str:
    """Why nothing is fetched from there, by its name alone; empty: nothing is known against it."""
    try:
        return address_denial_reason(ip_address(host), host, allow)
    except ValueError:
        pass
    name = host.rstrip(".").lower()
    if name in allow:
        return ""
    if _NUMERIC_LABEL.fullmatch(name.rpartition(".")[2]):
        return f"{host} is an address that is not written in full"
    if any(name == own or name.endswith(f".{own}") for own in _LOCAL_DOMAINS) or "." not in name:
        return f"{host} is a name of the node's own network"
    return ""


def address_denial_reason(address: AnyAddress, host: str, allow: Iterable[str]) -> str:
    """Why nobody connects there on behalf of `host`; empty if one may."""
    address, allow = _embedded_ipv4(address), tuple(allow)
    networks = [ip_network(one) for one in allow if _is_network(one)]
    if any(address in network for network in networks if network.version == address.version):
        return ""
    if address.is_link_local:  # where clouds keep the machine's credentials: a name that is allowed does not open it
        return f"{address} is a link-local address"
    if host.rstrip(".").lower() in allow:
        return ""
    for word in ("loopback", "unspecified", "multicast", "private", "reserved"):
        if getattr(address, f"is_{word}"):
            return f"{address} is {'an' if word == 'unspecified' else 'a'} {word} address"
    return "" if address.is_global else f"{address} is no public address"


def _embedded_ipv4(address: AnyAddress) -> AnyAddress:
    """An IPv4 address may be written inside one of IPv6, and is reached all the same."""
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
