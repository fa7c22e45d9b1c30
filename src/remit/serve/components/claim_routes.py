"""HTTP routes for claims and component messages.

Their bytes go to the door and back.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.responses import Response

from remit.client.rpc import UNREAD, Call
from remit.model.claims import Apply, Code, Operation, Refused, Verdict
from remit.model.objects import dec_hook
from remit.model.problems import escaped
from remit.model.secrets import Secret
from remit.model.wire.api_types import AuditItem
from remit.serve.auth.access_control import check_asked, check_followed
from remit.serve.http.bodies import beside, strict
from remit.serve.http.replies import STATUSES, Failure, Reply
from remit.serve.http.request_context import Asked
from remit.serve.http.routes import MANY_BYTES_MAX, NDJSON, Answer, Body, Route
from remit.serve.http.streams import Streamed
from remit.serve.objects.reads import encoded
from remit.serve.server_context import Desk

OPERATIONS_MAX: Final = 10_000


class Operations(Struct, frozen=True, forbid_unknown_fields=True):
    operations: Annotated[tuple[Operation, ...], Meta(max_length=OPERATIONS_MAX)]


class Verdicts(Struct, frozen=True):
    """One for each operation, in their order. Each was answered only once it was durable."""

    verdicts: tuple[Verdict, ...]


_operations: msgspec.json.Decoder[Operations] = msgspec.json.Decoder(Operations, dec_hook=dec_hook)


async def claims(asked: Asked, desk: Desk) -> Response:
    said = await beside(desk, asked.body, lambda: _read(asked.body))
    check_asked(asked.principal, Call(said.operations))
    _refuse_secrets(said.operations)
    traced = [one if one.trace else replace(one, trace=asked.trace) for one in said.operations]
    verdicts = tuple(await desk.standby.ask(traced))
    _note_refusals(asked, desk, traced, verdicts)
    return encoded(Verdicts(verdicts))


def _refuse_secrets(operations: Sequence[Operation]) -> None:
    """They are sealed on their way in, and here nothing is changed on its way."""
    for index, one in enumerate(operations):
        if isinstance(one.claim, Apply) and isinstance(one.claim.thing, Secret):
            cure = "send it to its own path under /v1/tenants, or to /v1/apply"
            field = f"operations[{index}].claim.thing"
            raise Failure(422, "invalid", f"{field}: a secret is not applied by a claim", field=field, cure=cure)


def _read(body: bytes) -> Operations:
    strict(body)
    try:
        return _operations.decode(body)
    except (msgspec.ValidationError, ValueError) as error:
        detail, _, path = escaped(str(error)).partition(" - at ")
        field = path.strip("`").removeprefix("$.")
        raise Failure(422, "invalid", detail, field=field, cure="/openapi.json says what an operation is") from None


async def ask(asked: Asked, desk: Desk) -> Response:
    told = await desk.door.request(asked.body, asked.principal, partial(_note_refusals, asked, desk))
    if told.startswith(UNREAD):
        _note(asked, desk, "", Refused(Code.INVALID, told[:1_000].decode(errors="replace")))
    return Reply(told)


def _note_refusals(asked: Asked, desk: Desk, operations: Sequence[Operation], verdicts: Sequence[Verdict]) -> None:
    """A claim is refused in the midst of an answer that is none: it is written down as if it had been asked by itself. Of a
    batch, one of each sort: it may have thousands, and a race that was lost is no deed.
    """
    if not any(type(verdict) is Refused for verdict in verdicts):
        return
    noted = set[Code]()
    for operation, verdict in zip(operations, verdicts, strict=False):
        if isinstance(verdict, Refused) and verdict.code not in noted:
            noted.add(verdict.code)
            _note(asked, desk, f":{operation.claim.__struct_config__.tag}", verdict, operation)


def _note(asked: Asked, desk: Desk, what: str, verdict: Refused, operation: Operation | None = None) -> None:
    asker = asked.principal
    item = AuditItem(
        time=desk.clock.wall(),
        subject=asker.subject,
        token=asker.token,
        role=asker.role,
        action=f"{asked.route.name}{what}",
        target=f"POST {asked.route.path}",
        status=STATUSES.get(verdict.code, 409),
        code=verdict.code.value,
        detail=escaped(verdict.detail),
        operation="" if operation is None else escaped(operation.id[:128]),
        trace=(operation.trace if operation is not None else "") or asked.trace,
    )
    desk.audit.refused(item)


async def follow(asked: Asked, desk: Desk) -> Response:
    # What cannot be read, or is not for this asker, is refused, and not begun.
    check_followed(asked.principal, desk.door.streamed(asked.body))
    return Streamed(_lines(desk.door.stream(asked.body)), desk)


async def _lines(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece + b"\n"


ROUTES: Final = (
    Route(
        "POST",
        "/v1/claims",
        "claim",
        "Propose: ask the authority for verdicts on operations.",
        claims,
        tag="programs",
        body=Body((Operations,), bytes_max=MANY_BYTES_MAX),
        answers=(Answer(200, "a verdict for each", Verdicts),),
        audience=("component",),
        first=True,
    ),
    Route(
        "POST",
        "/v1/ask",
        "ask",
        "The door of Remit's own components: claims, beats and rows, in words that may change with each version.",
        ask,
        tag="programs",
        body=Body((Any,), bytes_max=MANY_BYTES_MAX),
        answers=(Answer(200, "what was asked for", Any),),
        audience=("agent", "component"),
        first=True,
    ),
    Route(
        "POST",
        "/v1/follow",
        "follow",
        "The door of Remit's own components: rows and orders as they change, one a line.",
        follow,
        tag="programs",
        body=Body((Any,), bytes_max=MANY_BYTES_MAX),
        answers=(Answer(200, "what is followed", Any, NDJSON),),
        audience=("agent", "component"),
        streams=True,
        first=True,
    ),
)
