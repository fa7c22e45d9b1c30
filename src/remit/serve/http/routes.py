"""Route, parameter, body and response types.

Routes are data: `app.py` dispatches by the table of routes, and `openapi.py` describes the same table, so the description
always matches what is served. Nothing is answered here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct
from starlette.responses import Response

from remit.model.identity import Audience
from remit.model.wire.api_types import LINES_TYPE, PATCH_TYPE

if TYPE_CHECKING:
    from remit.serve.http.request_context import RequestContext
    from remit.serve.server_context import ServerContext

JSON: Final = "application/json"
NDJSON: Final = LINES_TYPE
MERGE_PATCH: Final = PATCH_TYPE
TEXT: Final = "text/plain"

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
    def variables(self) -> tuple[str, ...]:
        """Names of the path variables, in order."""
        return _variables(self.path)


@cache
def _variables(path: str) -> tuple[str, ...]:
    return tuple(part[1:-1] for part in path.split("/") if part.startswith("{"))
