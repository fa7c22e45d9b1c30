"""Parsed request: headers, query, actor; Host and Origin checks.

Read once, by name; nothing is judged here.

Browsers tell where a page came from; nothing else is looked at.

A page from elsewhere may have its own name point at this machine, or send a form here on somebody's behalf. Neither has the
token, and neither gets as far as being asked for it.

Its path, query, headers and body, read and bounded; the meaning is the handler's.

Each field by its name and type, within bounds; one that the route does not have is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope

from remit.law.authorization import actor_of
from remit.model.claims import Actor
from remit.model.identity import Principal
from remit.model.problems import did_you_mean, escaped, meant, one_of, shown
from remit.serve.http.replies import Failure
from remit.serve.http.routes import Parameter, Route


class Headers(dict[str, str]):
    """By their names, in small letters; of several of one name the first counts."""

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> Headers:
        """The names are in small letters already, as ASGI has it."""
        return cls([(name.decode("latin-1"), value.decode("latin-1")) for name, value in reversed(scope["headers"])])


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


T = TypeVar("T")

NOBODY: Final = Principal("", "", "viewer")
"""Who asks where no token is asked for."""


class Asked:
    """`path` and `query` by name; what the query does not say has its default. `body` is whole, and within its bound; of a
    route that converses there is `receive` instead, from which it comes.
    """

    __slots__ = ("body", "headers", "media", "more_cost", "path", "principal", "query", "receive", "route", "trace")

    def __init__(
        self,
        route: Route,
        path: Mapping[str, str],
        query: Mapping[str, Any],
        headers: Headers,
        trace: str,
        body: bytes = b"",
        media: str = "",
        principal: Principal = NOBODY,
        receive: Receive | None = None,
    ) -> None:
        self.route = route
        self.path = path
        self.query = query
        self.headers = headers
        self.trace = trace
        self.body = body
        self.media = media
        """Which of the route's media the body is; empty without one."""
        self.principal = principal
        self.receive = receive
        self.more_cost = 0
        """What the handler found it to cost beyond what could be told before its body was read."""

    @property
    def actor(self) -> Actor:
        return actor_of(self.principal)

    @property
    def tenant(self) -> str:
        """Whose things are meant: the path's, or those of whoever belongs to one tenant. Empty: everybody's."""
        return self.path.get("tenant", "") or self.principal.tenant


QUERY_BYTES_MAX: Final = 48 << 10
QUERY_FIELDS_MAX: Final = 64


class Fields:
    """What may stand in the query of a route, and what counts where it does not."""

    __slots__ = ("defaults", "known")

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.known = {one.name: one for one in parameters if one.place == "query"}
        self.defaults = {name: one.default for name, one in self.known.items()}


def read_query(raw: bytes, fields: Fields) -> dict[str, Any]:
    known, found = fields.known, dict(fields.defaults)
    if not raw:
        return found
    if len(raw) > QUERY_BYTES_MAX:
        raise Failure(414, "too_large", f"the query has more than {QUERY_BYTES_MAX} bytes", cure="use shorter selectors")
    try:
        pairs = parse_qsl(raw.decode(), keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX, errors="strict")
    except (ValueError, UnicodeDecodeError) as error:
        raise Failure(
            400, "malformed", f"the query cannot be read ({error})", cure="write it as name=value&name=value"
        ) from None
    seen: set[str] = set()
    for name, value in pairs:
        parameter = known.get(name)
        if parameter is None:
            cure = did_you_mean(meant(name, known)) or (
                f"known here: {one_of(known)}" if known else "nothing is asked for here"
            )
            raise Failure(400, "malformed", f"the query has no {shown(name)}", field=escaped(name), cure=cure)
        if name in seen:
            raise Failure(400, "malformed", f"{name} stands in the query twice", field=name, cure="keep one of the two")
        seen.add(name)
        found[name] = _read(parameter, value)
    return found


def _read(parameter: Parameter, value: str) -> Any:
    try:
        return msgspec.convert(value, parameter.type, strict=False)
    except msgspec.ValidationError as error:
        detail = f"{parameter.name}={shown(value)} cannot be read: {escaped(str(error))}"
        raise Failure(400, "malformed", detail, field=parameter.name, cure=parameter.summary) from None
