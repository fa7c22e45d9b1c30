"""Component RPC service, and order streams for agents.

Their rows on the server's board, once whole and then as they change; no opinions.

Whoever listens hears at least once a beat, so that it knows how old what it knows is, and that somebody is still there.

One door for all: claims, beats, rows, orders and what work reads, by word.

Agents, schedulers and controllers come in here, whatever the way: a link in a simulated network, or HTTP (app.py). Words that
cannot be read are answered, not raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final

import msgspec
from msgspec import Struct

from remit.client.endpoint import Endpoint
from remit.client.remote_store import RangeRequest, WatchRequest, StoreReadService
from remit.client.rpc import EndpointService, EndpointCall, OnVerdicts, UnreadableRequest
from remit.law.timing import Timing
from remit.model.identity import Principal
from remit.model.objects import dec_hook
from remit.model.records import Phase, Replica
from remit.model.wire.agent_messages import SecretMaterialRequest, AssignmentsRequest
from remit.observation.watch_cache import Board
from remit.serve.auth.access_control import check_component_call, forbidden
from remit.serve.auth.secrets import Keyring, SecretDelivery, encode_material
from remit.store.protocol import HEAD, Store
from remit.world.interfaces import Clock

PAUSES_PER_HEARTBEAT: Final = 20
"""A beat has so many of the pauses that an agent is left alone for after a piece of news, when there are swarms of them."""
BUSY_CHANGES: Final = 256
"""So many rows changed since it was last told anything: what is news to it is a small part of much."""


class _OrderRow(Struct, frozen=True):
    """As `model.orders.OrderRow`, with the bytes that are stored."""

    key: str
    revision: int
    replica: msgspec.Raw


class _OrdersMessage(Struct, frozen=True, omit_defaults=True):
    """As `model.orders.Orders`."""

    incarnation: str
    revision: int
    age_ms: int = 0
    whole: bool = False
    replicas: tuple[_OrderRow, ...] = ()
    gone: tuple[str, ...] = ()
    generations: tuple[msgspec.Raw, ...] = ()
    nodes: dict[str, tuple[msgspec.Raw, int]] = {}
    nodes_gone: tuple[str, ...] = ()


_encode = msgspec.json.Encoder().encode


class _ChangedKeys:
    """What has changed for one stream since it was last told."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}
        self._changed = asyncio.Event()

    def changed(self, key: str, old: Any, new: Any) -> None:
        self._keys[key] = None

    def reached(self) -> None:
        if self._keys:
            self._changed.set()

    async def wait(self) -> None:
        await self._changed.wait()

    def take(self) -> list[str]:
        self._changed.clear()
        keys, self._keys = self._keys, {}
        return list(keys)


class OrderFeed:
    """For every agent of a scope, from one board."""

    def __init__(self, watch_cache: Board, store: Store, clock: Clock, timing: Timing) -> None:
        self._watch_cache, self._store, self._clock, self._timing = watch_cache, store, clock, timing
        self.callbacks: dict[str, str] = {}
        """What each node's agent wants to be shown by whoever asks it for something; of those that follow orders here."""

    def _is_busy(self, previous: int) -> bool:
        """Whoever writes one piece for each listener at every commit has no time for anything else."""
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
            yield self._encode_update(nodes, self._all_keys(nodes), sent_generations, whole=True)
            changes = self._watch_cache.changes
            while self._incarnation() == incarnation and self._watch_cache.sober:
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
                if self.callbacks.get(node) == request.callback:  # else another stream has begun meanwhile
                    del self.callbacks[node]

    async def _wait_until_current(self) -> None:
        """Whoever asks may have been told more before than this board shows: by another server, before it was killed."""
        head = await self._store.get(HEAD)
        while not self._watch_cache.sober or (head is not None and self._watch_cache.revision < head.revision):
            await self._clock.sleep_ms(max(1, self._timing.heartbeat_ms // 40))

    def _incarnation(self) -> str:
        return self._watch_cache.head.incarnation if self._watch_cache.head is not None else ""

    def _all_keys(self, nodes: Sequence[str]) -> list[str]:
        return [*(f"node/{node}" for node in nodes), *(row.key for node in nodes for row in self._watch_cache.on(node))]

    def _encode_update(self, nodes: Sequence[str], keys: Sequence[str], sent_generations: dict[str, int], *, complete: bool = False) -> bytes:
        """`known` are the generations that this stream has been told, and at which revision."""
        hosted = frozenset(nodes)
        rows, gone, generations = list[_OrderRow](), list[str](), list[msgspec.Raw]()
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
            replica = None if row is None else row.thing
            if row is None or not isinstance(replica, Replica) or not _is_assigned(replica, hosted):
                gone.append(key)
                continue
            generation = self._watch_cache.rows.get(_generation_key(replica))
            if generation is not None and sent_generations.get(generation.key) != generation.revision:
                sent_generations[generation.key] = generation.revision
                generations.append(msgspec.Raw(generation.value))
            rows.append(_OrderRow(key, row.revision, msgspec.Raw(row.value)))
        update = _OrdersMessage(
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
    """Is it one of these nodes' to act on? What is only reserved is not yet, and what was released is no more."""
    return replica.status.node in nodes and replica.status.phase not in (Phase.RELEASED, Phase.RESERVED)


def _generation_key(replica: Replica) -> str:
    meta, spec = replica.metadata, replica.spec
    return f"generation/{meta.tenant}/{spec.workload}/{spec.generation:08d}"


_call_decoder: msgspec.json.Decoder[EndpointCall | RangeRequest | SecretMaterialRequest] = msgspec.json.Decoder(EndpointCall | RangeRequest | SecretMaterialRequest, dec_hook=dec_hook)
_stream_decoder: msgspec.json.Decoder[AssignmentsRequest | WatchRequest] = msgspec.json.Decoder(AssignmentsRequest | WatchRequest)


class ComponentService:
    """Satisfies `world.promises.Service`. `keyring` opens what work reads."""

    def __init__(self, endpoint: Endpoint, store: Store, assignments: OrderFeed, keyring: Keyring) -> None:
        self.keyring = keyring
        self._endpoint_service = EndpointService(endpoint)
        self._secret_delivery = SecretDelivery(endpoint, store, keyring)
        self._rows = StoreReadService(store)
        self._assignments = assignments

    @property
    def callbacks(self) -> Mapping[str, str]:
        return self._assignments.callbacks

    async def request(self, body: bytes, principal: Principal | None = None, judged: OnVerdicts | None = None, /) -> bytes:
        """`principal` is who asks, where that is known: over a network that is trusted, everybody is believed. `judged` hears
        what became of what was claimed.
        """
        try:
            call = _call_decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return await self._endpoint_service.request(body)  # it says what cannot be read
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
        """Which stream is meant. Raises `UnreadableRequest`, before anything has begun."""
        try:
            return _stream_decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise UnreadableRequest(f"no stream is called this ({error}); ask for orders or rows") from error

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        request = self.parse_stream_request(body)
        pieces = self._assignments.stream(request) if isinstance(request, AssignmentsRequest) else self._rows.events(request)
        async with aclosing(pieces) as items:
            async for item in items:
                yield item
