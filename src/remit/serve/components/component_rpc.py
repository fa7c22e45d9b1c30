"""Component RPC service, and assignment streams for agents.

`ComponentService` serves agents, schedulers and controllers: claims, heartbeats, rows, assignments and secret material. The
transport is HTTP (claim_routes.py) or a simulated network. A message that cannot be decoded gets an error reply; it raises
nothing.

`AssignmentFeed` streams the assignments of an agent's nodes from the watch cache: first the complete state, then changes. Every
stream sends at least one message per heartbeat interval, so that the agent knows how old its state is and that the server is
alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final

import msgspec
from msgspec import Struct

from remit.client.endpoint import Endpoint
from remit.client.remote_store import RangeRequest, StoreReadService, WatchRequest
from remit.client.rpc import EndpointCall, EndpointService, OnVerdicts, UnreadableRequest
from remit.law.timing import Timing
from remit.model.identity import Principal
from remit.model.objects import dec_hook
from remit.model.records import Phase, Replica
from remit.model.wire.agent_messages import AssignmentsRequest, SecretMaterialRequest
from remit.observation.watch_cache import WatchCache
from remit.serve.auth.access_control import check_component_call, forbidden
from remit.serve.auth.secrets import Keyring, SecretDelivery, encode_material
from remit.store.protocol import HEAD, Store
from remit.world.interfaces import Clock

PAUSES_PER_HEARTBEAT: Final = 20
"""When many rows change, an agent gets at most this many messages per heartbeat interval."""
BUSY_CHANGES: Final = 256
"""With more row changes than this since its last message, a stream pauses: most changes concern other agents."""


class _AssignmentRow(Struct, frozen=True):
    """As `model.wire.agent_messages.AssignmentRow`, with the replica as stored bytes."""

    key: str
    revision: int
    replica: msgspec.Raw


class _AssignmentsUpdate(Struct, frozen=True, omit_defaults=True):
    """As `model.wire.agent_messages.AssignmentsUpdate`."""

    incarnation: str
    revision: int
    age_ms: int = 0
    whole: bool = False
    replicas: tuple[_AssignmentRow, ...] = ()
    gone: tuple[str, ...] = ()
    generations: tuple[msgspec.Raw, ...] = ()
    nodes: dict[str, tuple[msgspec.Raw, int]] = {}
    nodes_gone: tuple[str, ...] = ()


_encode = msgspec.json.Encoder().encode


class _ChangedKeys:
    """Keys that changed since the stream last took them."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}
        self._changed = asyncio.Event()

    def on_change(self, key: str, old: Any, new: Any) -> None:
        self._keys[key] = None

    def on_commit(self) -> None:
        if self._keys:
            self._changed.set()

    async def wait(self) -> None:
        await self._changed.wait()

    def take(self) -> list[str]:
        self._changed.clear()
        keys, self._keys = self._keys, {}
        return list(keys)


class AssignmentFeed:
    """Assignment streams of all agents of a scope."""

    def __init__(self, watch_cache: WatchCache, store: Store, clock: Clock, timing: Timing) -> None:
        self._watch_cache, self._store, self._clock, self._timing = watch_cache, store, clock, timing
        self.callbacks: dict[str, str] = {}
        """Callback token of each node's agent, which a caller of that agent must present; of agents that follow their
        assignments here.
        """

    def _is_busy(self, previous: int) -> bool:
        """Return whether many rows changed since `previous`. With many agents, encoding a message for each at every commit
        would use all CPU time.
        """
        return self._watch_cache.changes - previous > BUSY_CHANGES

    async def stream(self, request: AssignmentsRequest) -> AsyncGenerator[bytes, None]:
        nodes = tuple(dict.fromkeys(request.nodes))
        changed = _ChangedKeys()
        for node in nodes:
            self._watch_cache.subscribe(changed, node)
            self.callbacks[node] = request.callback
        try:
            await self._wait_until_current()
            changed.take()
            sent_generations: dict[str, int] = {}
            incarnation = self._incarnation()
            yield self._encode_update(nodes, self._all_keys(nodes), sent_generations, complete=True)
            changes = self._watch_cache.changes
            while self._incarnation() == incarnation and self._watch_cache.is_current:
                with suppress(TimeoutError):
                    async with self._clock.timeout_ms(self._timing.heartbeat_ms):
                        await changed.wait()
                keys = changed.take()
                yield self._encode_update(nodes, keys, sent_generations)
                if self._is_busy(changes):
                    await self._clock.sleep_ms(max(1, self._timing.heartbeat_ms // PAUSES_PER_HEARTBEAT))
                changes = self._watch_cache.changes
        finally:
            for node in nodes:
                self._watch_cache.unsubscribe(changed, node)
                if self.callbacks.get(node) == request.callback:  # otherwise a newer stream has replaced this one
                    del self.callbacks[node]

    async def _wait_until_current(self) -> None:
        """Wait until the watch cache has everything committed so far: the agent may have received more from another server
        before this one.
        """
        head = await self._store.get(HEAD)
        while not self._watch_cache.is_current or (head is not None and self._watch_cache.revision < head.revision):
            await self._clock.sleep_ms(max(1, self._timing.heartbeat_ms // 40))

    def _incarnation(self) -> str:
        return self._watch_cache.head.incarnation if self._watch_cache.head is not None else ""

    def _all_keys(self, nodes: Sequence[str]) -> list[str]:
        return [
            *(f"node/{node}" for node in nodes),
            *(row.key for node in nodes for row in self._watch_cache.replicas_on(node)),
        ]

    def _encode_update(
        self, nodes: Sequence[str], keys: Sequence[str], sent_generations: dict[str, int], *, complete: bool = False
    ) -> bytes:
        """Encode an update. `sent_generations` are the generations sent on this stream, with their revisions."""
        hosted = frozenset(nodes)
        rows, gone, generations = list[_AssignmentRow](), list[str](), list[msgspec.Raw]()
        declared, undeclared = dict[str, tuple[msgspec.Raw, int]](), list[str]()
        for key in keys:
            row = self._watch_cache.rows.get(key)
            if key.startswith("node/"):
                name = key.removeprefix("node/")
                if row is None:
                    undeclared.append(name)
                else:
                    declared[name] = msgspec.Raw(row.value), row.revision
                continue
            replica = None if row is None else row.obj
            if row is None or not isinstance(replica, Replica) or not _is_assigned(replica, hosted):
                gone.append(key)
                continue
            generation = self._watch_cache.rows.get(_generation_key(replica))
            if generation is not None and sent_generations.get(generation.key) != generation.revision:
                sent_generations[generation.key] = generation.revision
                generations.append(msgspec.Raw(generation.value))
            rows.append(_AssignmentRow(key, row.revision, msgspec.Raw(row.value)))
        update = _AssignmentsUpdate(
            incarnation=self._incarnation(),
            revision=self._watch_cache.revision,
            age_ms=self._watch_cache.age_ms(),
            whole=complete,
            replicas=tuple(rows),
            gone=() if complete else tuple(gone),
            generations=tuple(generations),
            nodes=declared,
            nodes_gone=() if complete else tuple(undeclared),
        )
        return _encode(update)


def _is_assigned(replica: Replica, nodes: frozenset[str]) -> bool:
    """Return whether a replica is assigned to one of these nodes. A reservation is not yet an assignment, and a released
    replica no longer is.
    """
    return replica.status.node in nodes and replica.status.phase not in (Phase.RELEASED, Phase.RESERVED)


def _generation_key(replica: Replica) -> str:
    meta, spec = replica.metadata, replica.spec
    return f"generation/{meta.tenant}/{spec.workload}/{spec.generation:08d}"


_call_decoder: msgspec.json.Decoder[EndpointCall | RangeRequest | SecretMaterialRequest] = msgspec.json.Decoder(
    EndpointCall | RangeRequest | SecretMaterialRequest, dec_hook=dec_hook
)
_stream_decoder: msgspec.json.Decoder[AssignmentsRequest | WatchRequest] = msgspec.json.Decoder(
    AssignmentsRequest | WatchRequest
)


class ComponentService:
    """Satisfies `world.interfaces.Service`. `keyring` unseals secrets for delivery."""

    def __init__(self, endpoint: Endpoint, store: Store, assignments: AssignmentFeed, keyring: Keyring) -> None:
        self.keyring = keyring
        self._endpoint_service = EndpointService(endpoint)
        self._secret_delivery = SecretDelivery(endpoint, store, keyring)
        self._rows = StoreReadService(store)
        self._assignments = assignments

    @property
    def callbacks(self) -> Mapping[str, str]:
        return self._assignments.callbacks

    async def request(self, body: bytes, principal: Principal | None = None, judged: OnVerdicts | None = None, /) -> bytes:
        """Answer one message. `principal` is None on a trusted network, where callers are not checked. `judged` is called with
        the verdicts on claims.
        """
        try:
            call = _call_decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return await self._endpoint_service.request(body)  # answers with the decoding error
        if principal is not None:
            check_component_call(principal, call)
        if isinstance(call, RangeRequest):
            return await self._rows.page(call)
        if isinstance(call, SecretMaterialRequest):
            material = await self._secret_delivery.material_for(call)
            if material.failed == "refused" and principal is not None:
                raise forbidden(material.why, material.cure)
            return encode_material(material)
        return await self._endpoint_service.answer(call, judged)

    def parse_stream_request(self, body: bytes) -> AssignmentsRequest | WatchRequest:
        """Decode a stream request. Raises `UnreadableRequest` before anything is streamed."""
        try:
            return _stream_decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise UnreadableRequest(f"unknown stream request ({error}); use type orders or rows") from error

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        request = self.parse_stream_request(body)
        pieces = self._assignments.stream(request) if isinstance(request, AssignmentsRequest) else self._rows.events(request)
        async with aclosing(pieces) as items:
            async for item in items:
                yield item
