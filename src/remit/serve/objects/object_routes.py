"""Routes of every kind.

The same few for every kind, made from their list. No handlers here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, Final

from msgspec import Meta
from starlette.responses import Response

from remit.model.metadata import Natural
from remit.model.objects import DECLARED, KINDS, PLURALS, TENANTED, AnyObject
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
from remit.serve.http.request_context import Asked
from remit.serve.http.routes import (
    JSON,
    LISTED,
    MANY_BYTES_MAX,
    MERGE_PATCH,
    NDJSON,
    Answer,
    Body,
    Handler,
    Parameter,
    Route,
)
from remit.serve.objects.reads import get_list, get_one
from remit.serve.objects.watch_stream import get_watch
from remit.serve.objects.writes import apply_all, create, delete, patch, replace
from remit.serve.server_context import Desk

Of = Callable[[Asked, Desk, str], Awaitable[Response]]

DRY_RUN: Final = Parameter("dryRun", bool, "true: say what would come of it, and write nothing", default=False)
OPERATION: Final = Parameter(
    OPERATION_HEADER, str, "names this intent, the same over retries: the same id gets the same answer", place="header"
)
IF_MATCH: Final = Parameter("If-Match", str, "the ETag that was read, or *: only if it still stands there", place="header")
IF_NONE_MATCH: Final = Parameter("If-None-Match", str, "*: only if there is none yet", place="header")
LABELS: Final = Parameter("labelSelector", str, "app=web, tier!=cache, zone in (a,b), disk notin (hdd), gpu, !old", default="")
FIELDS: Final = Parameter("fieldSelector", str, "status.phase=pending, spec.type!=job", default="")
WATCH: Final = Parameter("watch", bool, "true: not a list, but a line for each change", default=False)
AFTER: Final = Parameter("after", Natural, "a watch tells what happened after this revision; from now on, if left out")
LIST: Final = (
    LABELS,
    FIELDS,
    Parameter(
        "limit", Annotated[int, Meta(ge=1, le=LIST_LIMIT_MAX)], f"how many at most, 1 to {LIST_LIMIT_MAX}", default=LIST_LIMIT
    ),
    Parameter("continue", str, "metadata.continue of the page before", default=""),
    WATCH,
    AFTER,
)


def of_kind(deed: Of, kind: str) -> Handler:
    async def handler(asked: Asked, desk: Desk) -> Response:
        return await deed(asked, desk, kind)

    async def sealing(asked: Asked, desk: Desk) -> Response:
        with desk.keyring.writing():
            return await deed(asked, desk, kind)

    return sealing if kind == "Secret" and deed in (create, replace, patch) else handler


async def list_or_watch(asked: Asked, desk: Desk, kind: str) -> Response:
    return await (get_watch if asked.query["watch"] else get_list)(asked, desk, kind)


def _routes() -> Iterator[Route]:
    for kind in KINDS:
        plural, tenanted = PLURALS[kind], kind in TENANTED
        at = f"/v1/tenants/{{tenant}}/{plural}" if tenanted else f"/v1/{plural}"
        if tenanted:
            yield _list(kind, f"/v1/{plural}", f"listAll{kind}s", f"List or watch the {plural} of all tenants.")
        yield _list(kind, at, f"list{kind}s", f"List or watch {plural}.")
        yield _one(kind, at)
        if kind in DECLARED:
            yield from _writes(kind, at)


def _list(kind: str, path: str, name: str, summary: str) -> Route:
    answers = (
        Answer(200, "a page; or lines, if watched", ListOf[KINDS[kind]]),  # type: ignore[valid-type]
        Answer(200, "one line a change", WatchLine, NDJSON),
    )
    handler = of_kind(list_or_watch, kind)
    return Route("GET", path, name, summary, handler, kind, LIST, answers=answers, kind=kind, streams_if="watch", cost=LISTED)


def _one(kind: str, at: str) -> Route:
    answers = (Answer(200, "as it stands", KINDS[kind], headers=("ETag",)),)
    handler = of_kind(get_one, kind)
    return Route("GET", f"{at}/{{name}}", f"get{kind}", f"Read {an(kind)}.", handler, kind, answers=answers, kind=kind)


def _writes(kind: str, at: str) -> Iterator[Route]:
    cls: Any = KINDS[kind]
    one, body = f"{at}/{{name}}", Body((cls,))
    made = Answer(201, "it was created", cls, headers=("ETag", "Location", OPERATION_HEADER))
    stands = Answer(200, "it was replaced", cls, headers=("ETag", OPERATION_HEADER))
    yield Route(
        "POST",
        at,
        f"create{kind}",
        f"Create {an(kind)}.",
        of_kind(create, kind),
        kind,
        (DRY_RUN, OPERATION),
        body,
        (made, Answer(200, "it would be created: a dry run", cls, headers=("ETag", OPERATION_HEADER))),
        kind=kind,
    )
    yield Route(
        "PUT",
        one,
        f"replace{kind}",
        f"Create or replace {an(kind)}.",
        of_kind(replace, kind),
        kind,
        (DRY_RUN, OPERATION, IF_MATCH, IF_NONE_MATCH),
        body,
        (stands, made),
        kind=kind,
    )
    yield Route(
        "PATCH",
        one,
        f"patch{kind}",
        f"Change some fields of {an(kind)} (RFC 7396).",
        of_kind(patch, kind),
        kind,
        (DRY_RUN, OPERATION, IF_MATCH),
        Body((dict[str, Any],), (MERGE_PATCH,)),
        (stands,),
        kind=kind,
    )
    yield Route(
        "DELETE",
        one,
        f"delete{kind}",
        f"Delete {an(kind)}.",
        of_kind(delete, kind),
        kind,
        (DRY_RUN, OPERATION, IF_MATCH),
        answers=(
            Answer(200, "it is gone", DeleteAnswer, headers=(OPERATION_HEADER,)),
            Answer(202, "it goes once its finalizers and replicas have", DeleteAnswer, headers=(OPERATION_HEADER,)),
        ),
        kind=kind,
    )


MANIFESTS: Final = Body((list[AnyObject],), (JSON, NDJSON), MANY_BYTES_MAX, "manifests: in one array, or one after another")

ROUTES: Final[tuple[Route, ...]] = (
    *_routes(),
    Route(
        "POST",
        "/v1/apply",
        "apply",
        "Create or replace many objects; those that stand so already are left alone.",
        apply_all,
        "many",
        (
            DRY_RUN,
            OPERATION,
            Parameter("ifUnchanged", Natural, "a revision: only if every object still stands as it stood then"),
        ),
        MANIFESTS,
        (Answer(200, "what became of each", ApplyAnswer, headers=(OPERATION_HEADER,)),),
    ),
)
