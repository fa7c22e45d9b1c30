"""Was a request meant for this server, and by its own asker? Browsers tell where a page came from; nothing else is looked at.

A page from elsewhere may have its own name point at this machine, or send a form here on somebody's behalf. Neither has the
token, and neither gets as far as being asked for it.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from remit.model.problems import shown
from remit.serve.failures import Failure

_READING: Final = frozenset({"GET", "HEAD"})


def check_origin(method: str, headers: Headers) -> None:
    host = headers.get("host")
    if host is not None and not _is_here(host):
        cure = "ask it by its address, such as 127.0.0.1, or as localhost"
        raise Failure(421, "misdirected", f"the host {shown(host)} is not this server", field="Host", cure=cure)
    origin = headers.get("origin")
    if origin is None or method in _READING:
        return
    try:
        there = urlsplit(origin).netloc
    except ValueError:
        there = ""
    if there != host:
        cure = "send it from a page of this server, or from a program, which sends no Origin"
        raise Failure(403, "cross_site", f"a page of {shown(origin)} may not write here", field="Origin", cure=cure)


def _is_here(host: str) -> bool:
    """By a loopback address or the one name that always means one: a name of somebody else's may lead here as well."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
