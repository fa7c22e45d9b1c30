"""HTTP routes for claims and component messages.

Message bodies are passed to the component service and back. Refused claims are audited (refusal_audit.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.responses import Response

from remit.client.rpc import UNREADABLE_PREFIX, EndpointCall
from remit.model.claims import Apply, Code, Operation, Refused, Verdict
from remit.model.kinds import Secret
from remit.model.objects import dec_hook
from remit.model.problems import escaped
from remit.model.wire.api_types import AuditItem
from remit.serve.auth.access_control import check_component_call, check_component_stream
from remit.serve.components.refusal_audit import audit_refusal, audit_refusals
from remit.serve.http.bodies import offload_if_large, parse_strict_json
from remit.serve.http.media_types import NDJSON
from remit.serve.http.replies import ApiProblem, BytesResponse
from remit.serve.http.routes import MANY_BYTES_MAX, BodySpec, RequestContext, ResponseSpec, Route
from remit.serve.http.streams import StreamResponse
from remit.serve.objects.reads import json_response
from remit.serve.server_context import ServerContext

OPERATIONS_MAX: Final = 10_000


class Operations(Struct, frozen=True, forbid_unknown_fields=True):
    operations: Annotated[tuple[Operation, ...], Meta(max_length=OPERATIONS_MAX)]


class Verdicts(Struct, frozen=True):
    """One verdict per operation, in the same order. A verdict is sent only after it is durable."""

    verdicts: tuple[Verdict, ...]


_operations_decoder: msgspec.json.Decoder[Operations] = msgspec.json.Decoder(Operations, dec_hook=dec_hook)


async def claims(request: RequestContext, server: ServerContext) -> Response:
    body = await offload_if_large(server, request.body, lambda: _decode_operations(request.body))
    check_component_call(request.principal, EndpointCall(body.operations))
    _reject_secrets(body.operations)
    traced = [operation if operation.trace else replace(operation, trace=request.trace) for operation in body.operations]
    verdicts = tuple(await server.authority.standby.submit(traced))
    audit_refusals(server.audit, _audited_call(request, server), traced, verdicts)
    return json_response(Verdicts(verdicts))


def _reject_secrets(operations: Sequence[Operation]) -> None:
    """Reject claims that apply a secret: secrets are sealed on their way in, and claims are passed on unchanged."""
    for index, operation in enumerate(operations):
        if isinstance(operation.claim, Apply) and isinstance(operation.claim.thing, Secret):
            cure = "send the secret to its path under /v1/tenants, or to /v1/apply"
            field = f"operations[{index}].claim.thing"
            raise ApiProblem(422, "invalid", f"{field}: a claim cannot apply a secret", field=field, cure=cure)


def _decode_operations(body: bytes) -> Operations:
    parse_strict_json(body)
    try:
        return _operations_decoder.decode(body)
    except (msgspec.ValidationError, ValueError) as error:
        detail, _, path = escaped(str(error)).partition(" - at ")
        field = path.strip("`").removeprefix("$.")
        raise ApiProblem(422, "invalid", detail, field=field, cure="see /openapi.json for the fields of an operation") from None


async def ask(request: RequestContext, server: ServerContext) -> Response:
    def audit_verdicts(operations: Sequence[Operation], verdicts: Sequence[Verdict]) -> None:
        audit_refusals(server.audit, _audited_call(request, server), operations, verdicts)

    reply = await server.component_service.request(request.body, request.principal, audit_verdicts)
    if reply.startswith(UNREADABLE_PREFIX):
        refused = Refused(Code.INVALID, reply[:1_000].decode(errors="replace"))
        audit_refusal(server.audit, _audited_call(request, server), refused)
    return BytesResponse(reply)


def _audited_call(request: RequestContext, server: ServerContext) -> AuditItem:
    principal = request.principal
    return AuditItem(
        time=server.clock.wall(),
        subject=principal.subject,
        token=principal.token,
        role=principal.role,
        action=request.route.name,
        target=f"POST {request.route.path}",
        trace=request.trace,
    )


async def follow(request: RequestContext, server: ServerContext) -> Response:
    # Reject a request that is unreadable or not permitted before the stream starts.
    check_component_stream(request.principal, server.component_service.parse_stream_request(request.body))
    return StreamResponse(_lines(server.component_service.stream(request.body)), server.streams)


async def _lines(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece + b"\n"


ROUTES: Final = (
    Route(
        "POST",
        "/v1/claims",
        "claim",
        "Submit operations to the authority and return its verdicts.",
        claims,
        tag="components",
        body=BodySpec((Operations,), bytes_max=MANY_BYTES_MAX),
        responses=(ResponseSpec(200, "one verdict per operation", Verdicts),),
        audience=("component",),
        unqueued=True,
    ),
    Route(
        "POST",
        "/v1/ask",
        "ask",
        "Internal RPC of agents, schedulers and controllers: claims, heartbeats, rows. Messages may change with every version.",
        ask,
        tag="components",
        body=BodySpec((Any,), bytes_max=MANY_BYTES_MAX),
        responses=(ResponseSpec(200, "the reply to the message", Any),),
        audience=("agent", "component"),
        unqueued=True,
    ),
    Route(
        "POST",
        "/v1/follow",
        "follow",
        "Internal stream of rows or assignments as they change, one message per line. Messages may change with every version.",
        follow,
        tag="components",
        body=BodySpec((Any,), bytes_max=MANY_BYTES_MAX),
        responses=(ResponseSpec(200, "one message per line", Any, NDJSON),),
        audience=("agent", "component"),
        streams=True,
        unqueued=True,
    ),
)
