"""Endpoint interface of an authority, its three failure types, and the in-process endpoint.

Nothing is retried here: see authority_client.py.

A verdict is an answer, also if it is a refusal. Every other outcome is one of three exceptions with one exact meaning each,
because the caller must know whether the operation may have been applied:

    OutcomeUnknown   it may have been applied, or may be applied later
    NotLeader        not applied: this endpoint is not the active authority
    Overloaded       not applied: the endpoint did not start it

An endpoint raises nothing else for external failures. Any other exception is a bug, or a request that the server cannot
decode. A call may be cancelled at any time, which has the same meaning as `OutcomeUnknown`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from remit.model.claims import Actor, Operation, Verdict, decode_operation, encode_operation
from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeat, NodeState


class AuthorityStatus(msgspec.Struct, frozen=True):
    """State of a scope. New operation ids carry its `incarnation` and `window`; `leader` is a hint, as in `NotLeader`.

    `now_ms` is the authority's clock at the time of the answer, on its `boot`; deadlines set by the authority refer to that
    clock. With an empty `boot` the time is unknown.
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
    """Heartbeat interval of agents in this scope; law/timing.py derives all other timeouts from it."""
    listened_ms: int = 0
    """How long this authority has been active. A lease or node without a renewal since then has been silent for at least this
    long.
    """
    silent: dict[str, int] = {}
    """Milliseconds since the last renewal of each held lease, except agents' leases. Candidates check this before they try to
    acquire.
    """


class Endpoint(Protocol):
    """An address at which an authority accepts operations: the authority itself, a standby that forwards, or an RPC stub
    (rpc.py).
    """

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        """Return one verdict per operation, in the same order. A verdict is returned only after it is durable."""
        ...

    async def status(self) -> AuthorityStatus: ...

    async def renew(self, actor: Actor, /) -> bool:
        """Renew `actor.lease`; return whether it is still held at `actor.epoch`.

        A renewal is not an operation: it changes only the authority's memory, and repeating it is harmless. The holder
        counts its term from when it sent the renewal (lease_holder.py). False is final: a lost epoch does not come back.
        """
        ...

    async def heartbeat(self, heartbeats: Sequence[NodeHeartbeat], /) -> Sequence[bool]:
        """Renew the leases of many agents at once, each with its node's complete state; one result each, as in `renew`."""
        ...

    async def heartbeat_ages(self) -> HeartbeatReport:
        """Return the time since each node's last heartbeat."""
        ...

    async def node_states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        """Return the last reported state of these nodes; of all nodes if none is named."""
        ...


class EndpointError(Exception):
    """No verdict was returned. `reason` is what the server or the connection reported; empty if unknown."""

    def __init__(self, message: str = "", *, reason: str = "") -> None:
        self.reason = reason
        super().__init__(message)


class OutcomeUnknown(EndpointError):
    """No answer arrived: the operations may have been applied, or may be applied later."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason, reason=reason)


class NotLeader(EndpointError):
    """This endpoint is not the active authority, and nothing was applied. `hint` names the leader, if known.

    A refused connection is reported the same way: nothing was received.
    """

    def __init__(self, hint: str = "", reason: str = "") -> None:
        self.hint = hint
        super().__init__(f"not the active authority{_in_parentheses(reason)}; try {hint or 'another endpoint'}", reason=reason)


class Overloaded(EndpointError):
    """The endpoint cannot accept the operations now, and nothing was applied. Retry after `retry_after_ms`.

    It has too much to do, or `reason` names another cause, such as a full disk.
    """

    def __init__(self, retry_after_ms: int = 0, reason: str = "") -> None:
        self.retry_after_ms = max(0, retry_after_ms)
        super().__init__(f"overloaded{_in_parentheses(reason)}; retry after {self.retry_after_ms} ms", reason=reason)


def _in_parentheses(reason: str) -> str:
    return f" ({reason})" if reason else ""


_actor_decoder: msgspec.json.Decoder[Actor] = msgspec.json.Decoder(Actor)
_heartbeat_decoder: msgspec.json.Decoder[list[NodeHeartbeat]] = msgspec.json.Decoder(list[NodeHeartbeat])
_heartbeat_ages_decoder: msgspec.json.Decoder[HeartbeatReport] = msgspec.json.Decoder(HeartbeatReport)
_node_states_decoder: msgspec.json.Decoder[list[NodeState]] = msgspec.json.Decoder(list[NodeState])
_status_decoder: msgspec.json.Decoder[AuthorityStatus] = msgspec.json.Decoder(AuthorityStatus)
_verdicts_decoder: msgspec.json.Decoder[list[Verdict]] = msgspec.json.Decoder(list[Verdict])


class InProcessEndpoint:
    """An authority in this process, called through the same encoding as over the network, so that nothing is shared by
    reference.

    A value that cannot be encoded fails in the first test, and not when the two sides are moved to two machines.
    `by_reference` skips the encoding, for speed, where both sides are known to be trusted code.
    """

    def __init__(self, target: Endpoint, *, by_reference: bool = False) -> None:
        self._target = target
        self._by_reference = by_reference

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        if self._by_reference:
            return await self._target.submit(operations)
        carried = [decode_operation(encode_operation(operation)) for operation in operations]
        return _verdicts_decoder.decode(msgspec.json.encode(await self._target.submit(carried)))

    async def status(self) -> AuthorityStatus:
        if self._by_reference:
            return await self._target.status()
        return _status_decoder.decode(msgspec.json.encode(await self._target.status()))

    async def renew(self, actor: Actor, /) -> bool:
        return await self._target.renew(actor if self._by_reference else _actor_decoder.decode(msgspec.json.encode(actor)))

    async def heartbeat(self, heartbeats: Sequence[NodeHeartbeat], /) -> Sequence[bool]:
        return await self._target.heartbeat(
            heartbeats if self._by_reference else _heartbeat_decoder.decode(msgspec.json.encode(list(heartbeats)))
        )

    async def heartbeat_ages(self) -> HeartbeatReport:
        report = await self._target.heartbeat_ages()
        return report if self._by_reference else _heartbeat_ages_decoder.decode(msgspec.json.encode(report))

    async def node_states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        states = await self._target.node_states(nodes)
        return states if self._by_reference else _node_states_decoder.decode(msgspec.json.encode(list(states)))
