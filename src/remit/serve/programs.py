"""How do programs propose, and how do Remit's own components speak to a server? Their bytes go to the door and back."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.responses import Response

from remit.model.claims import Operation, Verdict
from remit.model.objects import dec_hook
from remit.model.problems import escaped
from remit.serve.asked import Asked
from remit.serve.bodies import beside, strict
from remit.serve.desk import Desk
from remit.serve.failures import Failure
from remit.serve.reading import encoded
from remit.serve.routes import JSON, MANY_BYTES_MAX, NDJSON, Answer, Body, Route
from remit.serve.streams import Streamed

OPERATIONS_MAX: Final = 10_000


class Operations(Struct, frozen=True, forbid_unknown_fields=True):
    operations: Annotated[tuple[Operation, ...], Meta(max_length=OPERATIONS_MAX)]


class Verdicts(Struct, frozen=True):
    """One for each operation, in their order. Each was answered only once it was durable."""

    verdicts: tuple[Verdict, ...]


_operations: msgspec.json.Decoder[Operations] = msgspec.json.Decoder(Operations, dec_hook=dec_hook)


async def claims(asked: Asked, desk: Desk) -> Response:
    said = await beside(desk, asked.body, lambda: _read(asked.body))
    traced = [one if one.trace else replace(one, trace=asked.trace) for one in said.operations]
    return encoded(Verdicts(tuple(await desk.standby.ask(traced))))


def _read(body: bytes) -> Operations:
    strict(body)
    try:
        return _operations.decode(body)
    except (msgspec.ValidationError, ValueError) as error:
        detail, _, path = escaped(str(error)).partition(" - at ")
        field = path.strip("`").removeprefix("$.")
        raise Failure(422, "invalid", detail, field=field, cure="/openapi.json says what an operation is") from None


async def ask(asked: Asked, desk: Desk) -> Response:
    return Response(await desk.door.request(asked.body), media_type=JSON)


async def follow(asked: Asked, desk: Desk) -> Response:
    desk.door.streamed(asked.body)  # what cannot be read is refused, and not begun
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
        streams=True,
        first=True,
    ),
)
