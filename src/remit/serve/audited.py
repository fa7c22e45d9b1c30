"""Under which path is it told who did what? The newest first; what is written down is auditing.py's affair."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

from msgspec import Meta
from starlette.responses import Response

from remit.model.answers import AuditItem, ListMeta, ListOf
from remit.serve.asked import Asked
from remit.serve.desk import Desk
from remit.serve.reading import encoded
from remit.serve.routes import Answer, Parameter, Route

LIMIT: Final = 200
LIMIT_MAX: Final = 10_000


async def audit(asked: Asked, desk: Desk) -> Response:
    query = asked.query
    read = partial(
        desk.audit.read,
        limit=query["limit"],
        tenant=asked.tenant or query["tenant"],
        subject=query["subject"],
        action=query["action"],
        since=query["since"],
    )
    items = await desk.judging(read)
    return encoded(ListOf(kind="AuditList", metadata=ListMeta(revision=desk.board.revision), items=items))


ROUTES: Final = (
    Route(
        "GET",
        "/v1/audit",
        "audit",
        "Who did what, and who was refused; the newest first. Somebody of a tenant is told of that one's.",
        audit,
        "why",
        (
            Parameter("limit", Annotated[int, Meta(ge=1, le=LIMIT_MAX)], f"how many at most, 1 to {LIMIT_MAX}", default=LIMIT),
            Parameter("tenant", str, "only of this tenant's people", default=""),
            Parameter("subject", str, "only of this person or program", default=""),
            Parameter("action", str, "only this, such as createWorkload", default=""),
            Parameter("since", str, "nothing before this instant, such as 2027-01-31T12:00:00Z", default=""),
        ),
        answers=(Answer(200, "what was done", ListOf[AuditItem]),),
    ),
)
