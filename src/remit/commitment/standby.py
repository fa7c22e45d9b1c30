"""Standby: follows the chain, forwards requests to the leader, takes over when the leader falls silent.

A standby: it follows the chain, forwards claims, and trusts only the store.

The chain is the proof of life: an authority that works advances it, and an idle one beats. A standby that has seen no advance
for a whole term, by its own clock, raises the epoch. Being wrong about that is harmless, since the fenced authority can
write nothing more; it only costs a takeover. Whoever has taken over must first read all there is, which may take longer than a
term: it beats meanwhile too. One that finds its own name in the head need not wait: it was the leader itself,
before it was ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from remit.client.endpoint import Endpoint, Silence, Status, Turned
from remit.commitment.authority import Authority, Deposed
from remit.commitment.metrics import AuthorityCounts
from remit.commitment.operation_queue import BATCH_MAX, BatchMax
from remit.law.timing import Tempo
from remit.model.claims import Actor, Operation, Verdict
from remit.model.wire.agent_messages import Beat, Heard, NodeState
from remit.store import chain
from remit.store.protocol import Compacted, Head, Store, StoreError, Unavailable
from remit.world.interfaces import Clock, Ids

LOOKS: Final = 4
"""At the chain in a term."""

_NOBODY: Final = Head("", 0, 0, "", 0, "")


class Standby:
    """Satisfies `client.endpoint.Endpoint` by passing everything on to whoever leads. `peers`: the others, by name."""

    def __init__(
        self,
        store: Store,
        *,
        scope: str,
        name: str,
        clock: Clock,
        ids: Ids,
        peers: Mapping[str, Endpoint],
        term_ms: int = 6_000,
        batch_max: BatchMax = BATCH_MAX,
        tempo: Tempo = Tempo(),
        place: chain.Place | None = None,
    ) -> None:
        self.store = store
        self.scope = scope
        self.name = name
        self.clock = clock
        self.ids = ids
        self.peers = peers
        self.term_ms = term_ms
        self.batch_max = batch_max
        self.tempo = tempo
        self.leading: Authority | None = None
        self.tally = AuthorityCounts()
        self._place = place
        """Where the epoch was raised already, as by opening a store that one process owns: then nobody else can be leading."""
        self._deposed = False
        self._failed = False
        """Has its own last takeover failed, and nobody led since?"""

    async def ask(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        return await (await self._leader()).ask(operations)

    async def renew(self, actor: Actor, /) -> bool:
        return await (await self._leader()).renew(actor)

    async def beat(self, beats: Sequence[Beat], /) -> Sequence[bool]:
        return await (await self._leader()).beat(beats)

    async def heard(self) -> Heard:
        return await (await self._leader()).heard()

    async def states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        return await (await self._leader()).states(nodes)

    async def status(self) -> Status:
        return await (await self._leader()).status()

    async def _leader(self) -> Endpoint:
        if self.leading is not None:
            return self.leading
        try:
            place = await chain.read_place(self.store)
        except StoreError as error:
            raise Turned(why=str(error)) from error
        holder = "" if place is None else place.head.holder
        leader = self.peers.get(holder)
        if leader is None or holder == self.name:
            raise Turned(holder)
        return leader

    async def wait_for_silence(self) -> None:
        """Returns when the chain has not advanced for a term; at once if there is none yet, or if it was this one's own, since
        then nobody can be leading. A store that cannot be read proves nothing, either way.
        """
        seen, since_ms = await self._head(), self.clock.now_ms()
        looks_ms: deque[int] = deque(maxlen=LOOKS)
        if seen is not None and (seen == _NOBODY or self._led_well(seen)):
            return
        while True:
            await self.clock.sleep_ms(max(1, self.term_ms // LOOKS))
            asked_ms = self.clock.now_ms()
            now = await self._head()
            answered_ms = self.clock.now_ms()
            looks_ms.append(answered_ms - asked_ms)
            if now is None or now != seen:
                seen, since_ms = now, answered_ms
            elif answered_ms - since_ms >= self._silence_ms(max(looks_ms)):
                return

    def _silence_ms(self, look_ms: int) -> int:
        """A term; two for one that has just failed to take over, so that the others have their turn. And twice what a look at
        the chain took of late: a leader needs as long for a beat, and is not to be deposed because the store is slow.
        """
        return self.term_ms * (2 if self._failed else 1) + 2 * look_ms

    def _led_well(self, head: Head) -> bool:
        """Was it this name that led, and wrote rows? One that ends at every takeover must let the others have their turn. And
        one that was deposed waits like anybody: should two live under one name, they would else depose each other for ever.
        """
        return head.holder == self.name and head.count > 0 and not self._deposed

    async def _head(self) -> Head | None:
        """None if the store cannot be read just now. What no waiting cures, as damage, ends the standby and is told."""
        try:
            place = await chain.read_place(self.store)
        except Unavailable:
            return None
        head = _NOBODY if place is None else place.head
        if head.count and head.holder != self.name:
            self._failed = False  # somebody else has had a turn, and leads
        return head

    async def serve(self, *, beat_ms: int) -> None:
        """Wait, lead when the leader falls silent, and wait again when deposed; for ever."""
        while True:
            if self._place is None:
                await self.wait_for_silence()
            try:
                self._failed = True
                self.leading = await self.take_over(beat_ms)
                self.leading.tally = self.tally
                self._failed = False
                await self.leading.run(beat_ms=beat_ms)
            except (Deposed, Silence, Unavailable, Compacted) as error:
                # A store that fails just now must not leave the scope without anybody who waits to lead it; nor must a
                # reading so slow that somebody else has led, and let go of that history, before it came to its end.
                self._deposed = self._deposed or isinstance(error, Deposed)
            finally:
                self.leading = None

    async def take_over(self, beat_ms: int) -> Authority:
        place, self._place = self._place, None
        return await Authority.take_over(
            self.store,
            scope=self.scope,
            holder=self.name,
            clock=self.clock,
            ids=self.ids,
            place=place,
            batch_max=self.batch_max,
            beat_ms=beat_ms,
            tempo=self.tempo,
        )
