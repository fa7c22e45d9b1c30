"""Routes of every kind.

Every kind has the same operations, generated from the list of kinds. Handlers are in reads.py, watch_stream.py and
writes.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, Final

from msgspec import Meta
from starlette.responses import Response

from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Natural
from remit.model.objects import DECLARED, KINDS, PLURALS, TENANTED
from remit.model.problems import an
from remit.model.wire.api_types import (
    LIST_LIMIT,
    LIST_LIMIT_MAX,
    OPERATION_HEADER,
    ApplyAnswer,
    DeleteAnswer,
    ListOf,
    WatchLine,
)
from remit.serve.http.media_types import JSON, MERGE_PATCH, NDJSON
from remit.serve.http.routes import LIST_COST, MANY_BYTES_MAX, BodySpec, Handler, Parameter, RequestContext, ResponseSpec, Route
from remit.serve.objects.reads import get_list, get_one
from remit.serve.objects.watch_stream import get_watch
from remit.serve.objects.writes import apply_all, create, delete, patch, replace
from remit.serve.server_context import ServerContext

KindHandler = Callable[[RequestContext, ServerContext, str], Awaitable[Response]]

DRY_RUN: Final = Parameter("dryRun", bool, "true: return what would happen, without writing", default=False)
OPERATION: Final = Parameter(
    OPERATION_HEADER,
    str,
    "idempotency key: retries with the same id get the same answer and take effect once",
    location="header",
)
IF_MATCH: Final = Parameter(
    "If-Match", str, "ETag of the object as read: write only if it is unchanged; *: write only if it exists", location="header"
)
IF_NONE_MATCH: Final = Parameter("If-None-Match", str, "*: write only if the object does not exist", location="header")
LABELS: Final = Parameter(
    "labelSelector", str, "for example app=web, tier!=cache, zone in (a,b), disk notin (hdd), gpu, !old", default=""
)
FIELDS: Final = Parameter("fieldSelector", str, "for example status.phase=pending, spec.type!=job", default="")
WATCH: Final = Parameter("watch", bool, "true: stream changes, one JSON line each, instead of a list", default=False)
AFTER: Final = Parameter("after", Natural, "watch changes after this revision; default: from now on")
LIMIT: Final = Parameter(
    "limit",
    Annotated[int, Meta(ge=1, le=LIST_LIMIT_MAX)],
    f"maximum number of objects, 1 to {LIST_LIMIT_MAX}",
    default=LIST_LIMIT,
)
CONTINUE: Final = Parameter("continue", str, "`metadata.continue` of the previous page", default="")
LIST_PARAMETERS: Final = (LABELS, FIELDS, LIMIT, CONTINUE, WATCH, AFTER)


def for_kind(handle: KindHandler, kind: str) -> Handler:
    async def handler(request: RequestContext, server: ServerContext) -> Response:
        return await handle(request, server, kind)

    async def sealing(request: RequestContext, server: ServerContext) -> Response:
        with server.auth.keyring.track_write():
            return await handle(request, server, kind)

    return sealing if kind == "Secret" and handle in (create, replace, patch) else handler


async def list_or_watch(request: RequestContext, server: ServerContext, kind: str) -> Response:
    return await (get_watch if request.query["watch"] else get_list)(request, server, kind)


def _routes() -> Iterator[Route]:
    for kind in KINDS:
        plural, tenanted = PLURALS[kind], kind in TENANTED
        base = f"/v1/tenants/{{tenant}}/{plural}" if tenanted else f"/v1/{plural}"
        if tenanted:
            yield _list_route(kind, f"/v1/{plural}", f"listAll{kind}s", f"List or watch the {plural} of all tenants.")
        yield _list_route(kind, base, f"list{kind}s", f"List or watch {plural}.")
        yield _get_route(kind, base)
        if kind in DECLARED:
            yield from _write_routes(kind, base)


def _list_route(kind: str, path: str, name: str, summary: str) -> Route:
    answers = (
        ResponseSpec(200, "a page of objects; with watch=true a stream of changes", ListOf[KINDS[kind]]),  # type: ignore[valid-type]
        ResponseSpec(200, "one change per line", WatchLine, NDJSON),
    )
    handler = for_kind(list_or_watch, kind)
    return Route(
        "GET",
        path,
        name,
        summary,
        handler,
        kind,
        LIST_PARAMETERS,
        responses=answers,
        kind=kind,
        streams_if="watch",
        cost=LIST_COST,
    )


def _get_route(kind: str, base: str) -> Route:
    answers = (ResponseSpec(200, "the object", KINDS[kind], headers=("ETag",)),)
    handler = for_kind(get_one, kind)
    return Route("GET", f"{base}/{{name}}", f"get{kind}", f"Read {an(kind)}.", handler, kind, responses=answers, kind=kind)


def _write_routes(kind: str, base: str) -> Iterator[Route]:
    cls: Any = KINDS[kind]
    path, body = f"{base}/{{name}}", BodySpec((cls,))
    created = ResponseSpec(201, "created", cls, headers=("ETag", "Location", OPERATION_HEADER))
    replaced = ResponseSpec(200, "replaced", cls, headers=("ETag", OPERATION_HEADER))
    yield Route(
        "POST",
        base,
        f"create{kind}",
        f"Create {an(kind)}.",
        for_kind(create, kind),
        kind,
        (DRY_RUN, OPERATION),
        body,
        (created, ResponseSpec(200, "dry run: it would be created", cls, headers=("ETag", OPERATION_HEADER))),
        kind=kind,
    )
    yield Route(
        "PUT",
        path,
        f"replace{kind}",
        f"Create or replace {an(kind)}.",
        for_kind(replace, kind),
        kind,
        (DRY_RUN, OPERATION, IF_MATCH, IF_NONE_MATCH),
        body,
        (replaced, created),
        kind=kind,
    )
    yield Route(
        "PATCH",
        path,
        f"patch{kind}",
        f"Change some fields of {an(kind)} by a JSON merge patch (RFC 7396).",
        for_kind(patch, kind),
        kind,
        (DRY_RUN, OPERATION, IF_MATCH),
        BodySpec((dict[str, Any],), (MERGE_PATCH,)),
        (replaced,),
        kind=kind,
    )
    yield Route(
        "DELETE",
        path,
        f"delete{kind}",
        f"Delete {an(kind)}.",
        for_kind(delete, kind),
        kind,
        (DRY_RUN, OPERATION, IF_MATCH),
        responses=(
            ResponseSpec(200, "deleted", DeleteAnswer, headers=(OPERATION_HEADER,)),
            ResponseSpec(
                202,
                "marked for deletion; deleted once its finalizers and replicas are gone",
                DeleteAnswer,
                headers=(OPERATION_HEADER,),
            ),
        ),
        kind=kind,
    )


MANIFESTS_BODY: Final = BodySpec(
    (list[AnyObject],), (JSON, NDJSON), MANY_BYTES_MAX, "manifests, in one array or one after another"
)

ROUTES: Final[tuple[Route, ...]] = (
    *_routes(),
    Route(
        "POST",
        "/v1/apply",
        "apply",
        "Create or replace many objects. Objects that already match are left unchanged.",
        apply_all,
        "batch",
        (
            DRY_RUN,
            OPERATION,
            Parameter("ifUnchanged", Natural, "apply only if every object is unchanged since this revision"),
        ),
        MANIFESTS_BODY,
        (ResponseSpec(200, "the result for each object", ApplyAnswer, headers=(OPERATION_HEADER,)),),
    ),
)
