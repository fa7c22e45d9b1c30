"""Route, parameter, body and response types, and the request that a handler gets.

Routes are data: `app.py` dispatches by the table of routes, and `openapi.py` describes the same table, so the description
always matches what is served. Nothing is answered here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any, Final, Literal

from msgspec import Struct
from starlette.responses import Response
from starlette.types import Receive

from remit.law.authorization import actor_of
from remit.model.claims import Actor
from remit.model.identity import Audience, Principal
from remit.serve.http.media_types import JSON
from remit.serve.server_context import ServerContext

OBJECT_BYTES_MAX: Final = 1 << 20
MANY_BYTES_MAX: Final = 16 << 20

LIST_COST: Final = 2
AGENT_COST: Final = 5
TRIAL_COST: Final = 10
"""Cost of a route relative to reading one object: a page of a list, a request that opens a connection to an agent, and a trial
placement.
"""

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Handler = Callable[["RequestContext", "ServerContext"], Awaitable[Response]]


class Parameter(Struct, frozen=True):
    """A query parameter or header. Values are converted from text by msgspec, with the limits of `type`.

    A parameter that its route does not declare is rejected, with a suggestion. `summary` is also the fix in the error for an
    invalid value.
    """

    name: str
    type: Any
    summary: str
    default: Any = None
    location: Literal["query", "header"] = "query"


class BodySpec(Struct, frozen=True):
    """Request body: one of `types`. `media` are the accepted content types; the first is the default."""

    types: tuple[Any, ...]
    media: tuple[str, ...] = (JSON,)
    bytes_max: int = OBJECT_BYTES_MAX
    summary: str = ""


class ResponseSpec(Struct, frozen=True):
    """A successful response. Every route may also answer with a problem document (replies.py). `type` None: no body."""

    status: int
    summary: str
    type: Any = None
    media: str = JSON
    headers: tuple[str, ...] = ()


class Route(Struct, frozen=True):
    """One operation. `path` has its variables in braces; `name` is the OpenAPI operation id, which generated clients depend on.

    - `anonymous`: needs no token. Otherwise the token must be for one of `audience`.
    - `kind`: the kind of object it operates on, if any.
    - `tenant_access`: callers of one tenant may use it, and see only that tenant.
    - `read_only`: changes nothing, although it is not a GET. `audited`: audited although it changes nothing.
    - `streams`: lasts as long as the client listens, and counts as an open watch; `streams_if`: the query flag that enables it.
    - `duplex`: the body is not read beforehand. It continues while the response is sent, through `RequestContext.receive`.
    - `waits_for_agent`: the handler waits for another process, which may never answer, so that it holds no seats meanwhile.
    - `unqueued`: does not wait in the fair queue, because the scope depends on it (heartbeats, leases, claims).
    - `cost`: relative to reading one object (fair_queue.py).
    """

    method: Method
    path: str
    name: str
    summary: str
    handler: Handler
    tag: str = "resources"
    parameters: tuple[Parameter, ...] = ()
    body: BodySpec | None = None
    responses: tuple[ResponseSpec, ...] = ()
    anonymous: bool = False
    audience: tuple[Audience, ...] = ("user",)
    kind: str = ""
    tenant_access: bool = True
    read_only: bool = False
    audited: bool = False
    streams: bool = False
    streams_if: str = ""
    duplex: bool = False
    waits_for_agent: bool = False
    unqueued: bool = False
    cost: int = 1

    @property
    def is_read(self) -> bool:
        return self.method == "GET" or self.read_only

    @property
    def flow_class(self) -> str:
        """Class of flows that this route is rate-limited in: `first` before all others, a tenant's, or the scope's."""
        return "first" if self.unqueued else "tenants" if "{tenant}" in self.path else "scope"

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the path variables, in order."""
        return _variables(self.path)


@cache
def _variables(path: str) -> tuple[str, ...]:
    return tuple(part[1:-1] for part in path.split("/") if part.startswith("{"))


ANONYMOUS: Final = Principal("", "", "viewer")
"""Principal of requests to routes that need no token."""


class RequestContext:
    """One request, as passed to its handler.

    `path` and `query` are by name; an omitted query parameter has its default. `body` is complete and within the limit of
    its route. On a duplex route `body` is empty and `receive` yields it piece by piece.
    """

    __slots__ = ("body", "extra_cost", "headers", "media", "path", "principal", "query", "receive", "route", "trace")

    def __init__(
        self,
        route: Route,
        path: Mapping[str, str],
        query: Mapping[str, Any],
        headers: Mapping[str, str],
        trace: str,
        body: bytes = b"",
        media: str = "",
        principal: Principal = ANONYMOUS,
        receive: Receive | None = None,
    ) -> None:
        self.route = route
        self.path = path
        self.query = query
        self.headers = headers
        self.trace = trace
        self.body = body
        self.media = media
        """Media type of the body, one of the route's; empty without a body."""
        self.principal = principal
        self.receive = receive
        self.extra_cost = 0
        """Cost that the handler found beyond what was known before the body was read; charged to the flow afterwards."""

    @property
    def actor(self) -> Actor:
        return actor_of(self.principal)

    @property
    def tenant(self) -> str:
        """The tenant of the path, else the caller's tenant. Empty: all tenants."""
        return self.path.get("tenant", "") or self.principal.tenant
