"""Route, parameter, body and answer types.

Routes as data: what each takes, answers and says of itself; nothing is answered here.

`app.py` answers by this table, and `openapi.py` describes it: so what is described is what is served.
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
"""What a route costs: a page of many, what a connection to an agent is opened for, and what places things on trial."""

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Handler = Callable[["RequestContext", "ServerContext"], Awaitable[Response]]


class Parameter(Struct, frozen=True):
    """One that stands in the query, or in a header. `type` is read as msgspec reads a string: with its limits, if it has any.

    What is not in the table of its route is refused, with the name that was probably meant.
    """

    name: str
    type: Any
    summary: str
    default: Any = None
    location: Literal["query", "header"] = "query"


class BodySpec(Struct, frozen=True):
    """What is sent. Of several `types` it is one; of several `media` the first is taken if none is named."""

    types: tuple[Any, ...]
    media: tuple[str, ...] = (JSON,)
    bytes_max: int = OBJECT_BYTES_MAX
    summary: str = ""


class ResponseSpec(Struct, frozen=True):
    """One that is no failure; every route may also answer with a problem (failures.py). `type` None: nothing is sent."""

    status: int
    summary: str
    type: Any = None
    media: str = JSON
    headers: tuple[str, ...] = ()


class Route(Struct, frozen=True):
    """`path` has its variables in braces. `name` is the operation's own, stable for programs that are generated from it.

    `open`: no token is asked for; else one for its `audience`. `kind`: of which objects it is, if of any. `tenants`: whoever
    belongs to one tenant may ask it, and is answered for that one. `looks`: nothing changes by it, although it is no GET.
    `audited`: who asks it is written down, although nothing changes by it. `streams`: it lasts for as long as the asker
    listens, and counts as a watcher. `streams_if` names the flag of the query that makes it so. `converses`: its body is not
    read beforehand, and goes on while it is answered; `Asked.receive` gives it piece by piece. `elsewhere`: it is another
    process that is waited for, which may never answer, so nobody's turn is spent on it. `first`: it does not wait behind
    others, as what keeps a scope alive must not. `cost`: against reading one object (flowing.py).
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
        """Of the path, in their order."""
        return _variables(self.path)


@cache
def _variables(path: str) -> tuple[str, ...]:
    return tuple(part[1:-1] for part in path.split("/") if part.startswith("{"))
