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

from remit.client.rpc import UNREADABLE_PREFIX, EndpointCall
from remit.model.claims import Apply, Code, Operation, Refused, Verdict
from remit.model.objects import dec_hook
from remit.model.problems import escaped
from remit.model.secrets import Secret
from remit.model.wire.api_types import AuditItem
from remit.serve.auth.access_control import check_component_call, check_component_stream
from remit.serve.http.bodies import offload_if_large, parse_strict_json
from remit.serve.http.replies import REFUSAL_STATUSES, ApiProblem, BytesResponse
from remit.serve.http.request_context import RequestContext
from remit.serve.http.routes import MANY_BYTES_MAX, NDJSON, ResponseSpec, BodySpec, Route
from remit.serve.http.streams import StreamResponse
from remit.serve.objects.reads import json_response
from remit.serve.server_context import ServerContext

OPERATIONS_MAX: Final = 10_000


class Operations(Struct, frozen=True, forbid_unknown_fields=True):
    operations: Annotated[tuple[Operation, ...], Meta(max_length=OPERATIONS_MAX)]


class Verdicts(Struct, frozen=True):
    """One for each operation, in their order. Each was answered only once it was durable."""

    verdicts: tuple[Verdict, ...]


_operations_decoder: msgspec.json.Decoder[Operations] = msgspec.json.Decoder(Operations, dec_hook=dec_hook)


async def claims(request: RequestContext, server: ServerContext) -> Response:
    body = await offload_if_large(server, request.body, lambda: _decode_operations(request.body))
    check_component_call(request.principal, EndpointCall(body.operations))
    _reject_secrets(body.operations)
    traced = [operation if operation.trace else replace(operation, trace=request.trace) for operation in body.operations]
    verdicts = tuple(await server.standby.submit(traced))
    _audit_refusals(request, server, traced, verdicts)
    return json_response(Verdicts(verdicts))


def _reject_secrets(operations: Sequence[Operation]) -> None:
    """They are sealed on their way in, and here nothing is changed on its way."""
    for index, operation in enumerate(operations):
        if isinstance(operation.claim, Apply) and isinstance(operation.claim.thing, Secret):
            cure = "send it to its own path under /v1/tenants, or to /v1/apply"
            field = f"operations[{index}].claim.thing"
            raise ApiProblem(422, "invalid", f"{field}: a secret is not applied by a claim", field=field, cure=cure)


def _decode_operations(body: bytes) -> Operations:
    parse_strict_json(body)
    try:
        return _operations_decoder.decode(body)
    except (msgspec.ValidationError, ValueError) as error:
        detail, _, path = escaped(str(error)).partition(" - at ")
        field = path.strip("`").removeprefix("$.")
        raise ApiProblem(422, "invalid", detail, field=field, cure="/openapi.json says what an operation is") from None


async def ask(request: RequestContext, server: ServerContext) -> Response:
    reply = await server.component_service.request(request.body, request.principal, partial(_audit_refusals, request, server))
    if reply.startswith(UNREADABLE_PREFIX):
        _audit_refusal(request, server, "", Refused(Code.INVALID, reply[:1_000].decode(errors="replace")))
    return BytesResponse(reply)


def _audit_refusals(request: RequestContext, server: ServerContext, operations: Sequence[Operation], verdicts: Sequence[Verdict]) -> None:
    """A claim is refused in the midst of an answer that is none: it is written down as if it had been asked by itself. Of a
    batch, one of each sort: it may have thousands, and a race that was lost is no deed.
    """
    if not any(type(verdict) is Refused for verdict in verdicts):
        return
    noted = set[Code]()
    for operation, verdict in zip(operations, verdicts, strict=False):
        if isinstance(verdict, Refused) and verdict.code not in noted:
            noted.add(verdict.code)
            _audit_refusal(request, server, f":{operation.claim.__struct_config__.tag}", verdict, operation)


def _audit_refusal(request: RequestContext, server: ServerContext, suffix: str, verdict: Refused, operation: Operation | None = None) -> None:
    asker = request.principal
    item = AuditItem(
        time=server.clock.wall(),
        subject=asker.subject,
        token=asker.token,
        role=asker.role,
        action=f"{request.route.name}{suffix}",
        target=f"POST {request.route.path}",
        status=REFUSAL_STATUSES.get(verdict.code, 409),
        code=verdict.code.value,
        detail=escaped(verdict.detail),
        operation="" if operation is None else escaped(operation.id[:128]),
        trace=(operation.trace if operation is not None else "") or request.trace,
    )
    server.audit.record_refusal(item)


async def follow(request: RequestContext, server: ServerContext) -> Response:
    # What cannot be read, or is not for this asker, is refused, and not begun.
    check_component_stream(request.principal, server.component_service.parse_stream_request(request.body))
    return StreamResponse(_lines(server.component_service.stream(request.body)), server)


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
        body=BodySpec((Operations,), bytes_max=MANY_BYTES_MAX),
        responses=(ResponseSpec(200, "a verdict for each", Verdicts),),
        audience=("component",),
        unqueued=True,
    ),
    Route(
        "POST",
        "/v1/ask",
        "ask",
        "The door of Remit's own components: claims, beats and rows, in words that may change with each version.",
        ask,
        tag="programs",
        body=BodySpec((Any,), bytes_max=MANY_BYTES_MAX),
        responses=(ResponseSpec(200, "what was asked for", Any),),
        audience=("agent", "component"),
        unqueued=True,
    ),
    Route(
        "POST",
        "/v1/follow",
        "follow",
        "The door of Remit's own components: rows and orders as they change, one a line.",
        follow,
        tag="programs",
        body=BodySpec((Any,), bytes_max=MANY_BYTES_MAX),
        responses=(ResponseSpec(200, "what is followed", Any, NDJSON),),
        audience=("agent", "component"),
        streams=True,
        unqueued=True,
    ),
)
