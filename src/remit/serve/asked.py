"""What did one request say? Its path, query, headers and body, read and bounded; what it means is the handler's affair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from starlette.datastructures import Headers

from remit.model.claims import Actor, Role
from remit.serve.routes import Route

T = TypeVar("T")


class Asked:
    """`path` and `query` by name; what the query does not say has its default. `body` is whole, and within its bound."""

    __slots__ = ("actor", "body", "headers", "media", "path", "query", "route", "trace")

    def __init__(
        self,
        route: Route,
        path: Mapping[str, str],
        query: Mapping[str, Any],
        headers: Headers,
        trace: str,
        body: bytes = b"",
        media: str = "",
    ) -> None:
        self.route = route
        self.path = path
        self.query = query
        self.headers = headers
        self.trace = trace
        self.body = body
        self.media = media
        """Which of the route's media the body is; empty without one."""
        self.actor = actor_of(headers)

    @property
    def tenant(self) -> str:
        return self.path.get("tenant", "")


def actor_of(headers: Headers) -> Actor:
    """As whom does whoever holds the token act? There is one token, so there is one answer."""
    return Actor("admin", Role.OPERATOR)
