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
from remit.client.remote_store import RangeOf, RowsFrom, RowsService
from remit.client.rpc import Answering, Call, Judged, Unread
from remit.law.timing import Tempo
from remit.model.identity import Principal
from remit.model.objects import dec_hook
from remit.model.records import Phase, Replica
from remit.model.wire.agent_messages import MaterialOf, OrdersOf
from remit.observation.watch_cache import Board
from remit.serve.auth.access_control import check_asked, forbidden
from remit.serve.auth.secrets import Keyring, Materials, encode
from remit.store.protocol import HEAD, Store
from remit.world.interfaces import Clock

GATHER: Final = 20
"""A beat has so many of the pauses that an agent is left alone for after a piece of news, when there are swarms of them."""
SWARM: Final = 256
"""So many rows changed since it was last told anything: what is news to it is a small part of much."""


class _Row(Struct, frozen=True):
    """As `model.orders.OrderRow`, with the bytes that are stored."""

    key: str
    revision: int
    replica: msgspec.Raw


class _Told(Struct, frozen=True, omit_defaults=True):
    """As `model.orders.Orders`."""

    incarnation: str
    revision: int
    age_ms: int = 0
    whole: bool = False
    replicas: tuple[_Row, ...] = ()
    gone: tuple[str, ...] = ()
    generations: tuple[msgspec.Raw, ...] = ()
    nodes: dict[str, tuple[msgspec.Raw, int]] = {}
    nodes_gone: tuple[str, ...] = ()


_encode = msgspec.json.Encoder().encode


class _Listening:
    """What has changed for one stream since it was last told."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}
        self._came = asyncio.Event()

    def changed(self, key: str, old: Any, new: Any) -> None:
        self._keys[key] = None

    def reached(self) -> None:
        if self._keys:
            self._came.set()

    async def wait(self) -> None:
        await self._came.wait()

    def take(self) -> list[str]:
        self._came.clear()
        keys, self._keys = self._keys, {}
        return list(keys)


class OrderFeed:
    """For every agent of a scope, from one board."""

    def __init__(self, board: Board, store: Store, clock: Clock, tempo: Tempo) -> None:
        self._board, self._store, self._clock, self._tempo = board, store, clock, tempo
        self.callbacks: dict[str, str] = {}
        """What each node's agent wants to be shown by whoever asks it for something; of those that follow orders here."""

    def _swarm(self, before: int) -> bool:
        """Whoever writes one piece for each listener at every commit has no time for anything else."""
        return self._board.changes - before > SWARM

    async def stream(self, asked: OrdersOf) -> AsyncGenerator[bytes, None]:
        nodes = tuple(dict.fromkeys(asked.nodes))
        listening = _Listening()
        for node in nodes:
            self._board.subscribe(listening, node)
            self.callbacks[node] = asked.callback
        try:
            await self._catch_up()
            listening.take()
            known: dict[str, int] = {}
            incarnation = self._incarnation()
            yield self._told(nodes, self._all_keys(nodes), known, whole=True)
            changes = self._board.changes
            while self._incarnation() == incarnation and self._board.sober:
                with suppress(TimeoutError):
                    async with self._clock.timeout_ms(self._tempo.beat_ms):
                        await listening.wait()
                keys = listening.take()
                yield self._told(nodes, keys, known)
                if self._swarm(changes):
                    await self._clock.sleep_ms(max(1, self._tempo.beat_ms // GATHER))
                changes = self._board.changes
        finally:
            for node in nodes:
                self._board.unsubscribe(listening, node)
                if self.callbacks.get(node) == asked.callback:  # else another stream has begun meanwhile
                    del self.callbacks[node]

    async def _catch_up(self) -> None:
        """Whoever asks may have been told more before than this board shows: by another server, before it was killed."""
        head = await self._store.get(HEAD)
        while not self._board.sober or (head is not None and self._board.revision < head.revision):
            await self._clock.sleep_ms(max(1, self._tempo.beat_ms // 40))

    def _incarnation(self) -> str:
        return self._board.head.incarnation if self._board.head is not None else ""

    def _all_keys(self, nodes: Sequence[str]) -> list[str]:
        return [*(f"node/{node}" for node in nodes), *(kept.key for node in nodes for kept in self._board.on(node))]

    def _told(self, nodes: Sequence[str], keys: Sequence[str], known: dict[str, int], *, whole: bool = False) -> bytes:
        """`known` are the generations that this stream has been told, and at which revision."""
        here = frozenset(nodes)
        rows, gone, generations = list[_Row](), list[str](), list[msgspec.Raw]()
        declared, undeclared = dict[str, tuple[msgspec.Raw, int]](), list[str]()
        for key in keys:
            kept = self._board.rows.get(key)
            if key.startswith("node/"):
                name = key.removeprefix("node/")
                if kept is None:
                    undeclared.append(name)
                else:
                    declared[name] = msgspec.Raw(kept.value), kept.revision
                continue
            replica = None if kept is None else kept.thing
            if kept is None or not isinstance(replica, Replica) or not _ordered(replica, here):
                gone.append(key)
                continue
            generation = self._board.rows.get(_generation_key(replica))
            if generation is not None and known.get(generation.key) != generation.revision:
                known[generation.key] = generation.revision
                generations.append(msgspec.Raw(generation.value))
            rows.append(_Row(key, kept.revision, msgspec.Raw(kept.value)))
        told = _Told(
            incarnation=self._incarnation(),
            revision=self._board.revision,
            age_ms=self._board.age_ms(),
            whole=whole,
            replicas=tuple(rows),
            gone=() if whole else tuple(gone),
            generations=tuple(generations),
            nodes=declared,
            nodes_gone=() if whole else tuple(undeclared),
        )
        return _encode(told)


def _ordered(replica: Replica, nodes: frozenset[str]) -> bool:
    """Is it one of these nodes' to act on? What is only reserved is not yet, and what was released is no more."""
    return replica.status.node in nodes and replica.status.phase not in (Phase.RELEASED, Phase.RESERVED)


def _generation_key(replica: Replica) -> str:
    meta, spec = replica.metadata, replica.spec
    return f"generation/{meta.tenant}/{spec.workload}/{spec.generation:08d}"


_asked: msgspec.json.Decoder[Call | RangeOf | MaterialOf] = msgspec.json.Decoder(Call | RangeOf | MaterialOf, dec_hook=dec_hook)
_streamed: msgspec.json.Decoder[OrdersOf | RowsFrom] = msgspec.json.Decoder(OrdersOf | RowsFrom)


class Door:
    """Satisfies `world.promises.Service`. `keyring` opens what work reads."""

    def __init__(self, endpoint: Endpoint, store: Store, orders: OrderFeed, keyring: Keyring) -> None:
        self.keyring = keyring
        self._answering = Answering(endpoint)
        self._materials = Materials(endpoint, store, keyring)
        self._rows = RowsService(store)
        self._orders = orders

    @property
    def callbacks(self) -> Mapping[str, str]:
        return self._orders.callbacks

    async def request(self, body: bytes, principal: Principal | None = None, judged: Judged | None = None, /) -> bytes:
        """`principal` is who asks, where that is known: over a network that is trusted, everybody is believed. `judged` hears
        what became of what was claimed.
        """
        try:
            asked = _asked.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return await self._answering.request(body)  # it says what cannot be read
        if principal is not None:
            check_asked(principal, asked)
        if isinstance(asked, RangeOf):
            return await self._rows.page(asked)
        if isinstance(asked, MaterialOf):
            material = await self._materials.of(asked)
            if material.failed == "refused" and principal is not None:
                raise forbidden(material.why, material.cure)
            return encode(material)
        return await self._answering.answer(asked, judged)

    def streamed(self, body: bytes) -> OrdersOf | RowsFrom:
        """Which stream is meant. Raises `Unread`, before anything has begun."""
        try:
            return _streamed.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise Unread(f"no stream is called this ({error}); ask for orders or rows") from error

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        asked = self.streamed(body)
        told = self._orders.stream(asked) if isinstance(asked, OrdersOf) else self._rows.events(asked)
        async with aclosing(told) as items:
            async for item in items:
                yield item
