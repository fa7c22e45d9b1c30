"""Endpoint interface of an authority, its three failure types, and the in-process endpoint.

Nothing is tried twice here: see client.py.

A verdict is an answer, also a refusal. Everything else is one of three exceptions with one exact meaning each, because the
asker must know whether the deed may have been done:

    Silence      it may have happened, or may happen still
    Turned       nothing happened: this endpoint is not the active authority
    Overloaded   nothing happened: the endpoint did not even begin

An endpoint raises nothing else for what the outside does; any other exception is a bug, or words that the far side refuses to
read. A call may be cancelled at any time, which says the same as `Silence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from remit.model.claims import Actor, Operation, Verdict, decode_operation, encode_operation
from remit.model.wire.agent_messages import Beat, Heard, NodeState


class Status(msgspec.Struct, frozen=True):
    """Where a scope stands. New operation ids carry its `incarnation` and `window`; `leader` is a hint, as in `Turned`.

    `now_ms` is the authority's clock when it answered, on its `boot`: deadlines that it has set are instants of that clock. An
    empty `boot` says nothing of the time.
    """

    scope: str
    incarnation: str
    epoch: int
    sequence: int
    window: int
    window_ms: int
    leader: str = ""
    boot: str = ""
    now_ms: int = 0
    beat_ms: int = 2_000
    """How often agents beat here; every other term of law/timing.py follows from it."""
    listened_ms: int = 0
    """For how long this authority has been one: what it has not heard of in that time is silent for at least so long."""
    silent: dict[str, int] = {}
    """Of each lease that is held, but agents': for how many milliseconds it was not renewed. Who wants one looks here first."""


class Endpoint(Protocol):
    """One place where an authority may be asked: it itself, one that passes on, or the near end of a wire (remote.py)."""

    async def ask(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        """One verdict an operation, in the same order. Each was answered only once it was durable."""
        ...

    async def status(self) -> Status: ...

    async def renew(self, actor: Actor, /) -> bool:
        """True if `actor.lease` is still held at `actor.epoch`, and its term begins anew at the authority.

        No operation, since it is in the authority's memory alone, and repeating it is harmless. The holder counts from when
        it sent this (tenure.py). False is final: an epoch that was lost does not come back.
        """
        ...

    async def beat(self, beats: Sequence[Beat], /) -> Sequence[bool]:
        """Renew many agents' leases at once, each with its node's whole state; one answer each, as of `renew`."""
        ...

    async def heard(self) -> Heard:
        """For how long nothing was heard of each node."""
        ...

    async def states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        """What these nodes last said of themselves; all of them, if none is named."""
        ...


class NoVerdict(Exception):
    """There is no verdict. `why` is what the far side, or the way to it, said about that; empty if nothing."""

    def __init__(self, message: str = "", *, why: str = "") -> None:
        self.why = why
        super().__init__(message)


class Silence(NoVerdict):
    """No answer: what was asked may have happened, or may happen still."""

    def __init__(self, why: str = "") -> None:
        super().__init__(why, why=why)


class Turned(NoVerdict):
    """This endpoint is not the active authority, and nothing happened. `hint` is the name of a better one, if it knows.

    A connection that was refused says the same: nothing was heard there.
    """

    def __init__(self, hint: str = "", why: str = "") -> None:
        self.hint = hint
        super().__init__(f"not the active authority{_because(why)}; ask {hint or 'another'}", why=why)


class Overloaded(NoVerdict):
    """The endpoint cannot take it now, and nothing happened. Come back no sooner than this.

    It has too much to do, or `why` says what else keeps it: a full disk, for one.
    """

    def __init__(self, retry_after_ms: int = 0, why: str = "") -> None:
        self.retry_after_ms = max(0, retry_after_ms)
        super().__init__(f"overloaded{_because(why)}; ask again after {self.retry_after_ms} ms", why=why)


def _because(why: str) -> str:
    return f" ({why})" if why else ""


_actors: msgspec.json.Decoder[Actor] = msgspec.json.Decoder(Actor)
_beats: msgspec.json.Decoder[list[Beat]] = msgspec.json.Decoder(list[Beat])
_heards: msgspec.json.Decoder[Heard] = msgspec.json.Decoder(Heard)
_states: msgspec.json.Decoder[list[NodeState]] = msgspec.json.Decoder(list[NodeState])
_statuses: msgspec.json.Decoder[Status] = msgspec.json.Decoder(Status)
_verdicts: msgspec.json.Decoder[list[Verdict]] = msgspec.json.Decoder(list[Verdict])


class InProcess:
    """An authority in this process, asked over the same bytes as on a wire: nothing is shared by reference.

    What could not travel fails here already, in the first test, and not on the day that the two sides are put on two
    machines. `by_reference` skips the bytes, for speed, where both sides are known to be ours.
    """

    def __init__(self, target: Endpoint, *, by_reference: bool = False) -> None:
        self._target = target
        self._by_reference = by_reference

    async def ask(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        if self._by_reference:
            return await self._target.ask(operations)
        carried = [decode_operation(encode_operation(operation)) for operation in operations]
        return _verdicts.decode(msgspec.json.encode(await self._target.ask(carried)))

    async def status(self) -> Status:
        if self._by_reference:
            return await self._target.status()
        return _statuses.decode(msgspec.json.encode(await self._target.status()))

    async def renew(self, actor: Actor, /) -> bool:
        return await self._target.renew(actor if self._by_reference else _actors.decode(msgspec.json.encode(actor)))

    async def beat(self, beats: Sequence[Beat], /) -> Sequence[bool]:
        return await self._target.beat(beats if self._by_reference else _beats.decode(msgspec.json.encode(list(beats))))

    async def heard(self) -> Heard:
        heard = await self._target.heard()
        return heard if self._by_reference else _heards.decode(msgspec.json.encode(heard))

    async def states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        states = await self._target.states(nodes)
        return states if self._by_reference else _states.decode(msgspec.json.encode(list(states)))
