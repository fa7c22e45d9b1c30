"""RPC over a link: endpoint stub and service, order feed, secret material.

Its words as bytes, both ways; how bytes travel is the world's, retrying is client.py's.

`Remote` is the near end, over a link; `Answering` the far end, a service over the endpoint that really answers. Each failure
keeps its exact meaning on the way: what was never heard is `Turned`, what was heard but not answered is `Silence`, and what
the far endpoint itself says travels in the reply.

Asks one of a scope's servers; one that fails is not asked first again.

A stream from one of a scope's servers; after it ends, another from the next.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final, Literal

import msgspec

from remit.client.endpoint import Endpoint, NoVerdict, Overloaded, Silence, Status, Turned
from remit.model.claims import Actor, Operation, Verdict
from remit.model.objects import dec_hook, enc_hook
from remit.model.wire.agent_messages import (
    Beat,
    Heard,
    Material,
    MaterialOf,
    NodeState,
    Orders,
    OrdersOf,
    decode_material,
    decode_orders,
)
from remit.world.interfaces import Clock, Link, LinkError, Unheard, Unreached


class Unread(Exception):
    """The far side cannot read what was said to it, and nothing happened. It would not help to say it again."""


class ToldToWait(Unreached):
    """The far side has not begun, and says when to come back."""

    def __init__(self, cause: str, cure: str, retry_after_ms: int = 0) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__(cause, cure)


class Call(msgspec.Struct, omit_defaults=True, gc=False, tag="call"):
    """What is said: `operations` to ask, an actor to `renew`, `beats` of nodes, what was `heard` of them, the `states` of some
    (of all, if none is named); or nothing of all this, for the status.
    """

    operations: tuple[Operation, ...] | None = None
    renew: Actor | None = None
    beats: tuple[Beat, ...] | None = None
    heard: bool = False
    states: tuple[str, ...] | None = None


class Reply(msgspec.Struct, omit_defaults=True, gc=False):
    """What comes back: what was asked for, or how it `failed`."""

    verdicts: tuple[Verdict, ...] | None = None
    status: Status | None = None
    held: tuple[bool, ...] | None = None
    heard: Heard | None = None
    states: tuple[NodeState, ...] | None = None
    failed: Literal["", "silence", "turned", "overloaded", "unread"] = ""
    why: str = ""
    hint: str = ""
    retry_after_ms: int = 0


Judged = Callable[[Sequence[Operation], Sequence[Verdict]], None]
"""Hears operations with their verdicts."""

_encoder = msgspec.json.Encoder(enc_hook=enc_hook)
_calls: msgspec.json.Decoder[Call] = msgspec.json.Decoder(Call, dec_hook=dec_hook)
_replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply, dec_hook=dec_hook)
_STATUS = _encoder.encode(Call())
_HEARD = _encoder.encode(Call(heard=True))

UNREAD = b'{"failed":"unread"'
"""How an answer begins that says: what you said cannot be read."""

_MALFORMED = (msgspec.DecodeError, ValueError, RecursionError)
"""What a decoder raises on hostile bytes: a wrong shape, text that is no UTF-8, and brackets without end."""


class Remote:
    """The endpoint `to`, over a link. Satisfies `client.endpoint.Endpoint`."""

    __slots__ = ("_link", "_to")

    def __init__(self, link: Link, to: str) -> None:
        self._link = link
        self._to = to

    async def ask(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        verdicts = (await self._call(_encoder.encode(Call(tuple(operations))))).verdicts
        if verdicts is None:
            raise Silence("an answer to something else")
        return verdicts

    async def status(self) -> Status:
        status = (await self._call(_STATUS)).status
        if status is None:
            raise Silence("an answer to something else")
        return status

    async def renew(self, actor: Actor, /) -> bool:
        held = (await self._call(_encoder.encode(Call(renew=actor)))).held
        if held is None or len(held) != 1:
            raise Silence("an answer to something else")
        return held[0]

    async def beat(self, beats: Sequence[Beat], /) -> Sequence[bool]:
        held = (await self._call(_encoder.encode(Call(beats=tuple(beats))))).held
        if held is None or len(held) != len(beats):
            raise Silence("an answer to something else")
        return held

    async def heard(self) -> Heard:
        heard = (await self._call(_HEARD)).heard
        if heard is None:
            raise Silence("an answer to something else")
        return heard

    async def states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        states = (await self._call(_encoder.encode(Call(states=tuple(nodes))))).states
        if states is None:
            raise Silence("an answer to something else")
        return states

    async def _call(self, body: bytes) -> Reply:
        try:
            answer = await self._link.request(self._to, body)
        except ToldToWait as error:
            raise Overloaded(error.retry_after_ms, error.cause) from error
        except Unreached as error:
            raise Turned(why=error.cause) from error
        except Unheard as error:
            raise Silence(error.cause) from error
        try:
            reply = _replies.decode(answer)
        except _MALFORMED as error:
            # Somebody heard it and said something: what they did is not known.
            raise Silence(f"an answer that cannot be read ({error})") from error
        if reply.failed:
            raise _failure(reply)
        return reply


class Answering:
    """Answers what a `Remote` says with what `endpoint` does. Satisfies `world.promises.Service`.

    An exception that is no `NoVerdict` is a bug of ours: it goes on to the link, which breaks off that one call.
    """

    __slots__ = ("_endpoint",)

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def request(self, body: bytes, /) -> bytes:
        try:
            call = _calls.decode(body)
        except _MALFORMED as error:
            return _encoder.encode(Reply(failed="unread", why=str(error)))
        return await self.answer(call)

    async def answer(self, call: Call, judged: Judged | None = None) -> bytes:
        """`judged` hears what became of operations, before that is answered."""
        try:
            reply = await self._answer(call)
        except NoVerdict as error:
            reply = _told(error)
        if judged is not None and reply.verdicts is not None:
            judged(call.operations or (), reply.verdicts)
        return _encoder.encode(reply)

    async def _answer(self, call: Call) -> Reply:
        if call.operations is not None:
            return Reply(verdicts=tuple(await self._endpoint.ask(call.operations)))
        if call.renew is not None:
            return Reply(held=(await self._endpoint.renew(call.renew),))
        if call.beats is not None:
            return Reply(held=tuple(await self._endpoint.beat(call.beats)))
        if call.heard:
            return Reply(heard=await self._endpoint.heard())
        if call.states is not None:
            return Reply(states=tuple(await self._endpoint.states(call.states)))
        return Reply(status=await self._endpoint.status())

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        raise Unread("an endpoint answers requests, and has nothing to stream; send a request")
        yield body  # type: ignore[unreachable]  # it makes this a generator, as a service's stream is


def _told(error: NoVerdict) -> Reply:
    match error:
        case Turned():
            return Reply(failed="turned", why=error.why, hint=error.hint)
        case Overloaded():
            return Reply(failed="overloaded", why=error.why, retry_after_ms=error.retry_after_ms)
        case _:
            return Reply(failed="silence", why=error.why)


def _failure(reply: Reply) -> NoVerdict | Unread:
    match reply.failed:
        case "turned":
            return Turned(reply.hint, reply.why)
        case "overloaded":
            return Overloaded(reply.retry_after_ms, reply.why)
        case "unread":
            return Unread(f"the far side cannot read this: {reply.why}; do both run the same version?")
        case _:
            return Silence(reply.why)


TRY_MS: Final = 10_000
"""Of one question. What is lost on the way is never answered, and whoever waited for it would wait for ever."""

Source = Callable[[MaterialOf], Awaitable[Material]]


def material_source(link: Link, servers: Sequence[str], clock: Clock) -> Source:
    """Raises `LinkError`."""
    turn = 0

    async def ask(asked: MaterialOf) -> Material:
        nonlocal turn
        name = servers[turn % len(servers)]
        try:
            async with clock.timeout_ms(TRY_MS):
                return decode_material(await link.request(name, msgspec.json.encode(asked)))
        except TimeoutError:
            turn += 1
            raise Unheard(f"{name} has not answered for {TRY_MS // 1000} s", "nothing to do: it is asked again") from None
        except msgspec.DecodeError as error:
            turn += 1
            raise Unheard(f"{name} answered what cannot be read ({error})", "do both run the same version?") from None
        except LinkError:
            turn += 1
            raise

    return ask


def order_feed(
    link: Link, servers: Sequence[str], callback: str = ""
) -> Callable[[Sequence[str]], AsyncGenerator[Orders, None]]:
    """Each call is one stream; a server that failed is not asked first again. Raises `LinkError`."""
    turn = 0

    async def feed(nodes: Sequence[str]) -> AsyncGenerator[Orders, None]:
        nonlocal turn
        name = servers[turn % len(servers)]
        try:
            async with aclosing(link.stream(name, msgspec.json.encode(OrdersOf(tuple(nodes), callback)))) as lines:
                async for line in lines:
                    yield decode_orders(line)
        except (msgspec.DecodeError, ValueError) as error:
            turn += 1
            raise Unheard(f"{name} told orders that cannot be read ({error})", "do both run the same version?") from error
        except LinkError:
            turn += 1
            raise
        turn += 1

    return feed
