"""RPC over a link: endpoint stub and service, stream of assignments, delivery of secret material.

Encodes calls and replies. The world's `Link` transports the bytes; authority_client.py retries.

`EndpointStub` is the client side; `EndpointService` is the server side, which calls the real endpoint. Each failure keeps
its meaning over the network: a call that was never received is `NotLeader`, one that was received but not answered is
`OutcomeUnknown`, and failures that the endpoint itself reports are encoded in the reply.

The assignment stream and the material source use one of a scope's servers and switch to the next after a failure.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final, Literal

import msgspec

from remit.client.endpoint import AuthorityStatus, Endpoint, EndpointError, NotLeader, OutcomeUnknown, Overloaded
from remit.client.retry_loop import ServerRotation
from remit.model.claims import Actor, Operation, Verdict
from remit.model.objects import dec_hook, enc_hook
from remit.model.wire.agent_messages import (
    AssignmentsRequest,
    AssignmentsUpdate,
    HeartbeatReport,
    NodeHeartbeat,
    NodeState,
    SecretMaterial,
    SecretMaterialRequest,
    decode_assignments,
    decode_material,
)
from remit.world.interfaces import Clock, Link, LinkError, NotSent, ReplyLost


class UnreadableRequest(Exception):
    """The server cannot decode the request, and nothing was applied. Repeating the request would not help."""


class RetryLater(NotSent):
    """The server did not start the request and asks to retry later."""

    def __init__(self, cause: str, cure: str, retry_after_ms: int = 0) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__(cause, cure)


class EndpointCall(msgspec.Struct, omit_defaults=True, gc=False, tag="call"):
    """A call: `operations` to submit, an actor to `renew`, `beats` of nodes, a request for the `heard` ages, or for the
    `states` of some nodes (of all, if none is named). A call without any of these asks for the status.
    """

    operations: tuple[Operation, ...] | None = None
    renew: Actor | None = None
    beats: tuple[NodeHeartbeat, ...] | None = None
    heard: bool = False
    states: tuple[str, ...] | None = None


class EndpointReply(msgspec.Struct, omit_defaults=True, gc=False):
    """The reply to an `EndpointCall`: the result, or how the call `failed`."""

    verdicts: tuple[Verdict, ...] | None = None
    status: AuthorityStatus | None = None
    held: tuple[bool, ...] | None = None
    heard: HeartbeatReport | None = None
    states: tuple[NodeState, ...] | None = None
    failed: Literal["", "silence", "turned", "overloaded", "unread"] = ""
    why: str = ""
    hint: str = ""
    retry_after_ms: int = 0


OnVerdicts = Callable[[Sequence[Operation], Sequence[Verdict]], None]
"""Called with operations and their verdicts."""

_encoder = msgspec.json.Encoder(enc_hook=enc_hook)
_call_decoder: msgspec.json.Decoder[EndpointCall] = msgspec.json.Decoder(EndpointCall, dec_hook=dec_hook)
_reply_decoder: msgspec.json.Decoder[EndpointReply] = msgspec.json.Decoder(EndpointReply, dec_hook=dec_hook)
_STATUS_CALL = _encoder.encode(EndpointCall())
_HEARTBEAT_AGES_CALL = _encoder.encode(EndpointCall(heard=True))

UNREADABLE_PREFIX = b'{"failed":"unread"'
"""Prefix of a reply which reports that the request could not be decoded."""

_DECODE_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)
"""Exceptions that a decoder raises on malformed input: a wrong structure, invalid UTF-8, or too deep nesting."""


class EndpointStub:
    """The endpoint named `to`, over a link. Implements `client.endpoint.Endpoint`."""

    __slots__ = ("_link", "_to")

    def __init__(self, link: Link, to: str) -> None:
        self._link = link
        self._to = to

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        verdicts = (await self._call(_encoder.encode(EndpointCall(tuple(operations))))).verdicts
        if verdicts is None:
            raise OutcomeUnknown("the reply belongs to another kind of call")
        return verdicts

    async def status(self) -> AuthorityStatus:
        status = (await self._call(_STATUS_CALL)).status
        if status is None:
            raise OutcomeUnknown("the reply belongs to another kind of call")
        return status

    async def renew(self, actor: Actor, /) -> bool:
        held = (await self._call(_encoder.encode(EndpointCall(renew=actor)))).held
        if held is None or len(held) != 1:
            raise OutcomeUnknown("the reply belongs to another kind of call")
        return held[0]

    async def heartbeat(self, heartbeats: Sequence[NodeHeartbeat], /) -> Sequence[bool]:
        held = (await self._call(_encoder.encode(EndpointCall(beats=tuple(heartbeats))))).held
        if held is None or len(held) != len(heartbeats):
            raise OutcomeUnknown("the reply belongs to another kind of call")
        return held

    async def heartbeat_ages(self) -> HeartbeatReport:
        report = (await self._call(_HEARTBEAT_AGES_CALL)).heard
        if report is None:
            raise OutcomeUnknown("the reply belongs to another kind of call")
        return report

    async def node_states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        states = (await self._call(_encoder.encode(EndpointCall(states=tuple(nodes))))).states
        if states is None:
            raise OutcomeUnknown("the reply belongs to another kind of call")
        return states

    async def _call(self, body: bytes) -> EndpointReply:
        try:
            answer = await self._link.request(self._to, body)
        except RetryLater as error:
            raise Overloaded(error.retry_after_ms, error.cause) from error
        except NotSent as error:
            raise NotLeader(reason=error.cause) from error
        except ReplyLost as error:
            raise OutcomeUnknown(error.cause) from error
        try:
            reply = _reply_decoder.decode(answer)
        except _DECODE_ERRORS as error:
            # The server received the call and replied, so the operations may have been applied.
            raise OutcomeUnknown(f"the reply cannot be decoded ({error})") from error
        if reply.failed:
            raise _error_from(reply)
        return reply


class EndpointService:
    """Server side of `EndpointStub`: decodes calls and forwards them to `endpoint`. Implements `world.interfaces.Service`.

    Any exception other than `EndpointError` is a bug. It propagates to the link, which aborts that one call.
    """

    __slots__ = ("_endpoint",)

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def request(self, body: bytes, /) -> bytes:
        try:
            call = _call_decoder.decode(body)
        except _DECODE_ERRORS as error:
            return _encoder.encode(EndpointReply(failed="unread", why=str(error)))
        return await self.answer(call)

    async def answer(self, call: EndpointCall, on_verdicts: OnVerdicts | None = None) -> bytes:
        """Answer a decoded call. `on_verdicts` receives operations with their verdicts before the reply is encoded."""
        try:
            reply = await self._answer(call)
        except EndpointError as error:
            reply = _reply_for(error)
        if on_verdicts is not None and reply.verdicts is not None:
            on_verdicts(call.operations or (), reply.verdicts)
        return _encoder.encode(reply)

    async def _answer(self, call: EndpointCall) -> EndpointReply:
        if call.operations is not None:
            return EndpointReply(verdicts=tuple(await self._endpoint.submit(call.operations)))
        if call.renew is not None:
            return EndpointReply(held=(await self._endpoint.renew(call.renew),))
        if call.beats is not None:
            return EndpointReply(held=tuple(await self._endpoint.heartbeat(call.beats)))
        if call.heard:
            return EndpointReply(heard=await self._endpoint.heartbeat_ages())
        if call.states is not None:
            return EndpointReply(states=tuple(await self._endpoint.node_states(call.states)))
        return EndpointReply(status=await self._endpoint.status())

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        raise UnreadableRequest("an endpoint supports requests only, not streams; send a request")
        yield body  # type: ignore[unreachable] # the yield makes this a generator, as the interface requires


def _reply_for(error: EndpointError) -> EndpointReply:
    match error:
        case NotLeader():
            return EndpointReply(failed="turned", why=error.reason, hint=error.hint)
        case Overloaded():
            return EndpointReply(failed="overloaded", why=error.reason, retry_after_ms=error.retry_after_ms)
        case _:
            return EndpointReply(failed="silence", why=error.reason)


def _error_from(reply: EndpointReply) -> EndpointError | UnreadableRequest:
    match reply.failed:
        case "turned":
            return NotLeader(reply.hint, reply.why)
        case "overloaded":
            return Overloaded(reply.retry_after_ms, reply.why)
        case "unread":
            return UnreadableRequest(
                f"the server cannot decode the request: {reply.why}; check that both sides run the same version"
            )
        case _:
            return OutcomeUnknown(reply.why)


MATERIAL_TIMEOUT_MS: Final = 10_000
"""Timeout of one request. A lost request is never answered, so the caller would otherwise wait for ever."""

MaterialSource = Callable[[SecretMaterialRequest], Awaitable[SecretMaterial]]


def material_source(link: Link, servers: Sequence[str], clock: Clock) -> MaterialSource:
    """Return a function that fetches secret material from the servers, switching to the next after a failure. It raises
    `LinkError`.
    """
    rotation = ServerRotation(servers)

    async def fetch(request: SecretMaterialRequest) -> SecretMaterial:
        name = rotation.current
        try:
            async with clock.timeout_ms(MATERIAL_TIMEOUT_MS):
                return decode_material(await link.request(name, msgspec.json.encode(request)))
        except TimeoutError:
            rotation.switch_from(name)
            raise ReplyLost(
                f"{name} has not answered for {MATERIAL_TIMEOUT_MS // 1000} s", "no action needed: the request is retried"
            ) from None
        except msgspec.DecodeError as error:
            rotation.switch_from(name)
            raise ReplyLost(
                f"{name} sent a reply that cannot be decoded ({error})", "check that both sides run the same version"
            ) from None
        except LinkError:
            rotation.switch_from(name)
            raise

    return fetch


def assignment_source(
    link: Link, servers: Sequence[str], callback: str = ""
) -> Callable[[Sequence[str]], AsyncGenerator[AssignmentsUpdate, None]]:
    """Return a function that streams the assignments of nodes. Each call opens one stream; after its end the next call uses
    the next server. It raises `LinkError`.
    """
    rotation = ServerRotation(servers)

    async def feed(nodes: Sequence[str]) -> AsyncGenerator[AssignmentsUpdate, None]:
        name = rotation.current
        try:
            async with aclosing(link.stream(name, msgspec.json.encode(AssignmentsRequest(tuple(nodes), callback)))) as lines:
                async for line in lines:
                    yield decode_assignments(line)
        except (msgspec.DecodeError, ValueError) as error:
            rotation.switch_from(name)
            raise ReplyLost(
                f"{name} sent assignments that cannot be decoded ({error})", "check that both sides run the same version"
            ) from error
        except LinkError:
            rotation.switch_from(name)
            raise
        rotation.switch_from(name)

    return feed
