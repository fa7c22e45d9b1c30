"""Where does a server describe itself? For programs and for people, without a token; made once, when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.responses import Response

from remit.serve.asked import Asked
from remit.serve.desk import Desk
from remit.serve.docs import page
from remit.serve.openapi import described
from remit.serve.routes import JSON, Answer, Route

HTML = "text/html"
_ALONE = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def routes(table: Callable[[], Sequence[Route]]) -> tuple[Route, ...]:
    """`table` answers with all routes, these among them."""

    @cache
    def document() -> dict[str, Any]:
        return described(table())

    @cache
    def as_json() -> bytes:
        return msgspec.json.encode(document())

    @cache
    def as_html() -> bytes:
        return page(document()).encode()

    async def openapi(asked: Asked, desk: Desk) -> Response:
        return Response(await desk.judging(as_json), media_type=JSON)

    async def docs(asked: Asked, desk: Desk) -> Response:
        headers = {"Content-Security-Policy": _ALONE, "X-Content-Type-Options": "nosniff"}
        return Response(await desk.judging(as_html), headers=headers, media_type=HTML)

    return (
        Route(
            "GET",
            "/openapi.json",
            "getOpenApi",
            "This API, described for programs.",
            openapi,
            "server",
            answers=(Answer(200, "an OpenAPI 3.1 document", dict[str, Any]),),
            open=True,
        ),
        Route(
            "GET",
            "/docs",
            "getDocs",
            "This API, described for people.",
            docs,
            "server",
            answers=(Answer(200, "one page", str, HTML),),
            open=True,
        ),
    )
