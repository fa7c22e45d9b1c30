"""What does a request say, and who asks? Its path, query, headers and body, read and bounded; the meaning is the handler's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from starlette.types import Receive

from remit.law.access import actor_of
from remit.model.claims import Actor
from remit.model.identity import Principal
from remit.serve.heads import Headers
from remit.serve.routes import Route

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
