"""Who takes over when the authority falls silent? A standby: it follows the chain, forwards claims, and trusts only the store.

The chain is the proof of life: an authority that works advances it, and an idle one beats. A standby that has seen no advance
for a whole term, by its own clock, raises the epoch. Being wrong about that is harmless, since the fenced authority can
write nothing more; it only costs a takeover. One that finds its own name in the head need not wait: it was the leader itself,
before it was ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from remit.client.endpoint import Endpoint, Silence, Status, Turned
from remit.commitment.authority import Authority, Deposed
from remit.commitment.queueing import BATCH_MAX, BatchMax
from remit.model.claims import Actor, Operation, Verdict
from remit.store import chain
from remit.store.protocol import Compacted, Head, Store, StoreError, Unavailable
from remit.world.promises import Clock, Ids

PATIENCE_MAX: Final = 64
FAILED_MAX: Final = 3
"""So often in a row a standby tries again after one term, when its own takeover has failed."""

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
    ) -> None:
        self.store = store
        self.scope = scope
        self.name = name
        self.clock = clock
        self.ids = ids
        self.peers = peers
        self.term_ms = term_ms
        self.batch_max = batch_max
        self.leading: Authority | None = None
        self._patience = 1
        self._deposed = False
        self._failed = 0
        """How many takeovers of its own have failed in a row."""
        self._known: Head | None = None

    async def ask(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        return await (await self._leader()).ask(operations)

    async def renew(self, actor: Actor, /) -> bool:
        return await (await self._leader()).renew(actor)

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
        if seen is not None and (seen == _NOBODY or self._led_well(seen)):
            return
        while True:
            await self.clock.sleep_ms(max(1, self.term_ms // 4))
            now = await self._head()
            if now is None or now != seen:
                seen, since_ms = now, self.clock.now_ms()
            elif self.clock.now_ms() - since_ms >= self.term_ms * self._terms(now):
                return

    def _terms(self, head: Head) -> int:
        """How long to be patient. A takeover of its own that failed needs no patience: nobody is reading. But not again and
        again, or nobody else would have a turn.
        """
        return 1 if head.holder == self.name and 0 < self._failed <= FAILED_MAX else self._patience

    def _led_well(self, head: Head) -> bool:
        """Was it this name that led, and wrote rows? One that ends at every takeover must let the others have their turn. And
        one that was deposed waits like anybody: should two live under one name, they would else depose each other for ever.
        """
        return head.holder == self.name and head.count > 0 and not self._deposed

    def _learn(self, before: Head, now: Head) -> None:
        """A new leader must first read all there is, which may take longer than a term: with every takeover that no batch has
        followed yet, wait twice as long for the next. Else standbys could depose each other for ever. It counts from the head
        that was last known, however long ago: a standby's own takeover is one of these, and so is the one that ended it.
        """
        takeovers = now.epoch - before.epoch
        batches = now.sequence - before.sequence - takeovers
        if takeovers <= 0:
            self._patience = 1
        elif batches:
            self._patience = 2  # somebody led since; the last takeover may be the one that nothing has followed yet
        else:
            self._patience = min(self._patience << min(takeovers, PATIENCE_MAX), PATIENCE_MAX)

    async def _head(self) -> Head | None:
        """None if the store cannot be read just now. What no waiting cures, as damage, ends the standby and is told."""
        try:
            place = await chain.read_place(self.store)
        except Unavailable:
            return None
        head = _NOBODY if place is None else place.head
        if self._known is not None and head != self._known:
            self._learn(self._known, head)
        self._known = head
        return head

    async def serve(self, *, beat_ms: int) -> None:
        """Wait, lead when the leader falls silent, and wait again when deposed; for ever."""
        while True:
            await self.wait_for_silence()
            try:
                self._failed += 1
                self.leading = await self.take_over()
                self._failed = 0
                await self.leading.run(beat_ms=beat_ms)
            except (Deposed, Silence, Unavailable, Compacted) as error:
                # A store that fails just now must not leave the scope without anybody who waits to lead it; nor must a
                # reading so slow that somebody else has led, and let go of that history, before it came to its end.
                self._deposed = self._deposed or isinstance(error, Deposed)
            finally:
                self.leading = None

    async def take_over(self) -> Authority:
        return await Authority.take_over(
            self.store, scope=self.scope, holder=self.name, clock=self.clock, ids=self.ids, batch_max=self.batch_max
        )
