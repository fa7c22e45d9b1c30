"""Checks of a request before its handler runs: Host and Origin, authorization, query parameters.

The query accepts only the parameters of its route, each converted to its type.

The Host and Origin checks run before authentication. They stop DNS rebinding (a foreign name that resolves to this machine)
and cross-site requests (a form of another site that is submitted here).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Scope

from remit.law import authorization
from remit.model.identity import Principal
from remit.model.objects import TENANTED
from remit.model.problems import an, closest_name, did_you_mean, escaped, one_of, quoted
from remit.serve.auth.access_control import forbidden, unauthenticated
from remit.serve.http.replies import ApiProblem
from remit.serve.http.routes import Parameter, Route


class Headers(dict[str, str]):
    """Header values by lower-case name. If a header is repeated, the first value counts."""

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> Headers:
        """ASGI guarantees lower-case names."""
        return cls([(name.decode("latin-1"), value.decode("latin-1")) for name, value in reversed(scope["headers"])])


_SAFE_METHODS: Final = frozenset({"GET", "HEAD"})


def check_origin(scope: Scope, headers: Headers, hosts: Collection[str] = ()) -> None:
    """Raise `ApiProblem` unless the request is meant for this server. `hosts`: lower-case names and addresses of this server
    besides loopback.
    """
    host = headers.get("host")
    host_count = 1 if len(headers) == len(scope["headers"]) else sum(name == b"host" for name, _ in scope["headers"])
    if host_count > 1 or (host is None and scope.get("http_version") == "1.1"):
        cure = "send one Host header with the name and port of this server"
        detail = "Host: sent more than once" if host is not None else "Host: missing"
        raise ApiProblem(400, "malformed", detail, field="Host", cure=cure)
    if host is not None and not _is_this_server(host, scope, hosts):
        cure = "use the server's address or localhost; start the server with --tls-name to give it more names"
        raise ApiProblem(421, "misdirected", f"Host: {quoted(host)} is not a name of this server", field="Host", cure=cure)
    origin = headers.get("origin")
    if origin is None or scope["method"] in _SAFE_METHODS:
        return
    if host is None or origin.lower() != f"{scope.get('scheme', 'http')}://{host}".lower():
        cure = "send the request from a page of this server, or from a program that sends no Origin header"
        raise ApiProblem(403, "cross_site", f"Origin: pages of {quoted(origin)} may not write here", field="Origin", cure=cure)


def _is_this_server(host: str, scope: Scope, hosts: Collection[str]) -> bool:
    """Accept loopback, the address the connection was made to, and configured names. Any other name may be a foreign one that
    resolves to this machine.
    """
    name = (host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]).lower()
    if name == "localhost" or name in hosts:
        return True
    address = _parse_address(name)
    return address is not None and (address.is_loopback or str(address) in hosts or address == _local_address(scope))


@lru_cache(256)
def _parse_address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _local_address(scope: Scope) -> IPv4Address | IPv6Address | None:
    address = _parse_address((scope.get("server") or ("",))[0])
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address


_AUDIENCES: Final = {"user": "users", "agent": "agents", "component": "schedulers and controllers", "join": "joining agents"}


def authorize(route: Route, principal: Principal, path: Mapping[str, str]) -> None:
    """Check that `principal` may use `route` with these path variables. Raises `ApiProblem`."""
    if principal.audience not in route.audience:
        detail = f"token {principal.token} is for {_AUDIENCES[principal.audience]} and is not accepted here"
        raise unauthenticated(detail, "use a token with a suitable role: `remit token create --role ROLE`")
    if principal.audience != "user":
        return
    tenant = path.get("name" if route.kind == "Tenant" else "tenant", "")
    if tenant and principal.tenant not in ("", tenant):
        raise ApiProblem(404, "not_found", f"there is no tenant {quoted(tenant)}", field="tenant", cure="use your own tenant")
    if not route.is_read and not authorization.may_write(principal):
        raise forbidden(
            f"{principal.subject} has the role viewer, which cannot write", "ask an admin for a token with the role member"
        )
    if not principal.tenant:
        return
    if route.kind in TENANTED:
        return
    if route.kind and not (route.is_read and authorization.may_read(principal, route.kind, "", path.get("name", ""))):
        cure = (
            f"read your own tenant: /v1/tenants/{principal.tenant}"
            if route.kind == "Tenant"
            else "use a token without a tenant, or ask an admin"
        )
        raise forbidden(
            f"{an(route.kind)} belongs to no tenant, and {principal.subject} is limited to tenant {principal.tenant}", cure
        )
    if not route.kind and not route.tenant_access:
        raise forbidden(
            f"not available to {principal.subject}, who is limited to tenant {principal.tenant}",
            "use a token without a tenant, or ask an admin",
        )


QUERY_BYTES_MAX: Final = 48 << 10
QUERY_FIELDS_MAX: Final = 64


class QueryFields:
    """Query parameters of a route, and their defaults."""

    __slots__ = ("defaults", "known")

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.known = {parameter.name: parameter for parameter in parameters if parameter.location == "query"}
        self.defaults = {name: parameter.default for name, parameter in self.known.items()}


def read_query(raw: bytes, fields: QueryFields) -> dict[str, Any]:
    known, values = fields.known, dict(fields.defaults)
    if not raw:
        return values
    if len(raw) > QUERY_BYTES_MAX:
        raise ApiProblem(
            414, "too_large", f"the query string is longer than {QUERY_BYTES_MAX} bytes", cure="use shorter selectors"
        )
    try:
        pairs = parse_qsl(raw.decode(), keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX, errors="strict")
    except (ValueError, UnicodeDecodeError) as error:
        raise ApiProblem(
            400, "malformed", f"the query string is malformed ({error})", cure="write it as name=value&name=value"
        ) from None
    seen: set[str] = set()
    for name, value in pairs:
        parameter = known.get(name)
        if parameter is None:
            cure = did_you_mean(closest_name(name, known)) or (
                f"supported parameters: {one_of(known)}" if known else "this path takes no query parameters"
            )
            raise ApiProblem(400, "malformed", f"unknown query parameter {quoted(name)}", field=escaped(name), cure=cure)
        if name in seen:
            raise ApiProblem(400, "malformed", f"{name}: given twice", field=name, cure="keep one of the two")
        seen.add(name)
        values[name] = _convert(parameter, value)
    return values


def _convert(parameter: Parameter, value: str) -> Any:
    try:
        return msgspec.convert(value, parameter.type, strict=False)
    except msgspec.ValidationError as error:
        detail = f"{parameter.name}: invalid value {quoted(value)}: {escaped(str(error))}"
        raise ApiProblem(400, "malformed", detail, field=parameter.name, cure=parameter.summary) from None
