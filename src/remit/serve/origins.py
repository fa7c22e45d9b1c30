"""Was a request meant for this server, and by its own asker? Browsers tell where a page came from; nothing else is looked at.

A page from elsewhere may have its own name point at this machine, or send a form here on somebody's behalf. Neither has the
token, and neither gets as far as being asked for it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from starlette.types import Scope

from remit.model.problems import shown
from remit.serve.failures import Failure
from remit.serve.heads import Headers

_READING: Final = frozenset({"GET", "HEAD"})


def check_origin(scope: Scope, headers: Headers, hosts: Collection[str] = ()) -> None:
    """`hosts`: what this server is called beyond its own machine, in small letters."""
    host = headers.get("host")
    hosts_said = 1 if len(headers) == len(scope["headers"]) else sum(name == b"host" for name, _ in scope["headers"])
    if hosts_said > 1 or (host is None and scope.get("http_version") == "1.1"):
        cure = "send the header Host once: the name and port that this server is asked by"
        detail = "it names several hosts" if host is not None else "it does not say which host it is for"
        raise Failure(400, "malformed", detail, field="Host", cure=cure)
    if host is not None and not _is_here(host, scope, hosts):
        cure = "ask it by its address or as localhost; a server that is to have more names is started with --tls-name"
        raise Failure(421, "misdirected", f"the host {shown(host)} is not this server", field="Host", cure=cure)
    origin = headers.get("origin")
    if origin is None or scope["method"] in _READING:
        return
    if host is None or origin.lower() != f"{scope.get('scheme', 'http')}://{host}".lower():
        cure = "send it from a page of this server, or from a program, which sends no Origin"
        raise Failure(403, "cross_site", f"a page of {shown(origin)} may not write here", field="Origin", cure=cure)


def _is_here(host: str, scope: Scope, hosts: Collection[str]) -> bool:
    """By a loopback address, the address that the connection came to, or a name that was given to it: a name of somebody else's
    may lead here as well.
    """
    name = (host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]).lower()
    if name == "localhost" or name in hosts:
        return True
    address = _address(name)
    return address is not None and (address.is_loopback or str(address) in hosts or address == _came_to(scope))


@lru_cache(256)
def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _came_to(scope: Scope) -> IPv4Address | IPv6Address | None:
    found = _address((scope.get("server") or ("",))[0])
    return found.ipv4_mapped or found if isinstance(found, IPv6Address) else found
