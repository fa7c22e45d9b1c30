"""Standby of a scope: follows the chain, forwards requests to the leader, takes over when the leader falls silent.

The chain shows that the leader is alive: a working authority advances it, and an idle one commits empty batches. A standby
that has seen no advance for a full term, by its own clock, raises the epoch. A wrong guess is safe, because a fenced
authority can write nothing; it only costs a takeover. A new leader first reads all rows, which may take longer than a term,
and advances the chain meanwhile. A standby that finds its own name in the head takes over without waiting: it was itself the
leader before it restarted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from remit.client.endpoint import AuthorityStatus, Endpoint, NotLeader, OutcomeUnknown
from remit.commitment.authority import Authority, LeadershipLost
from remit.commitment.metrics import AuthorityMetrics
from remit.commitment.operation_queue import BATCH_LIMITS, BatchLimits
from remit.law.timing import Timing
from remit.model.claims import Actor, Operation, Verdict
from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeat, NodeState
from remit.store import chain
from remit.store.protocol import Compacted, Head, Store, StoreError, Unavailable
from remit.world.interfaces import Clock, Ids

READS_PER_TERM: Final = 4
"""How often the chain is read in one term."""

_NO_HEAD: Final = Head("", 0, 0, "", 0, "")


class Standby:
    """Satisfies `client.endpoint.Endpoint` by forwarding every call to the leader. `peers` maps server names to their
    endpoints.
    """

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
        batch_limits: BatchLimits = BATCH_LIMITS,
        timing: Timing = Timing(),
        position: chain.ChainPosition | None = None,
    ) -> None:
        self.store = store
        self.scope = scope
        self.name = name
        self.clock = clock
        self.ids = ids
        self.peers = peers
        self.term_ms = term_ms
        self.batch_limits = batch_limits
        self.timing = timing
        self.leading: Authority | None = None
        self.metrics = AuthorityMetrics()
        self._position = position
        """Chain position at which the epoch was already raised, for example by opening a store that this process owns
        exclusively. Then no other leader can exist.
        """
        self._was_deposed = False
        self._takeover_failed = False
        """Whether the last takeover of this server failed, and no other server has led since."""

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        return await (await self._leader()).submit(operations)

    async def renew(self, actor: Actor, /) -> bool:
        return await (await self._leader()).renew(actor)

    async def heartbeat(self, beats: Sequence[NodeHeartbeat], /) -> Sequence[bool]:
        return await (await self._leader()).heartbeat(beats)

    async def heartbeat_ages(self) -> HeartbeatReport:
        return await (await self._leader()).heartbeat_ages()

    async def node_states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        return await (await self._leader()).node_states(nodes)

    async def status(self) -> AuthorityStatus:
        return await (await self._leader()).status()

    async def _leader(self) -> Endpoint:
        if self.leading is not None:
            return self.leading
        try:
            position = await chain.read_position(self.store)
        except StoreError as error:
            raise NotLeader(reason=str(error)) from error
        holder = "" if position is None else position.head.holder
        leader = self.peers.get(holder)
        if leader is None or holder == self.name:
            raise NotLeader(holder)
        return leader

    async def wait_for_silence(self) -> None:
        """Return when the chain has not advanced for a term.

        Return at once if there is no chain yet, or if this server was the last leader, since no other can be leading then. A
        failed read is no evidence either way and restarts the wait.
        """
        head, since_ms = await self._head(), self.clock.now_ms()
        read_times_ms: deque[int] = deque(maxlen=READS_PER_TERM)
        if head is not None and (head == _NO_HEAD or self._led_successfully(head)):
            return
        while True:
            await self.clock.sleep_ms(max(1, self.term_ms // READS_PER_TERM))
            sent_ms = self.clock.now_ms()
            latest = await self._head()
            answered_ms = self.clock.now_ms()
            read_times_ms.append(answered_ms - sent_ms)
            if latest is None or latest != head:
                head, since_ms = latest, answered_ms  # from the answer on: a slow read must not count as silence
            elif answered_ms - since_ms >= self._silence_ms(max(read_times_ms)):
                return

    def _silence_ms(self, read_ms: int) -> int:
        """Return how long the chain must be silent before a takeover.

        One term; two for a server whose own takeover just failed, so that other standbys go first. Plus twice the duration
        of recent reads: the leader's writes are as slow, and a slow store is no reason to depose it.
        """
        return self.term_ms * (2 if self._takeover_failed else 1) + 2 * read_ms

    def _led_successfully(self, head: Head) -> bool:
        """Return whether this server was the last leader and has written rows.

        A server that fails during every takeover writes none, and must wait so that other standbys go first. A server that
        was deposed waits too: two servers started under one name would otherwise depose each other forever.
        """
        return head.holder == self.name and head.count > 0 and not self._was_deposed

    async def _head(self) -> Head | None:
        """Read the head; None if the store is unavailable. Errors that a retry cannot fix, such as corruption, propagate."""
        try:
            position = await chain.read_position(self.store)
        except Unavailable:
            return None
        head = _NO_HEAD if position is None else position.head
        if head.count and head.holder != self.name:
            self._takeover_failed = False  # another server leads
        return head

    async def serve(self, *, heartbeat_ms: int) -> None:
        """Wait for the leader to fall silent, lead, and wait again after losing leadership. Runs until cancelled."""
        while True:
            if self._position is None:
                await self.wait_for_silence()
            try:
                self._takeover_failed = True  # until it has succeeded, however it ends
                self.leading = await self.take_over(heartbeat_ms)
                self.leading.metrics = self.metrics
                self._takeover_failed = False
                await self.leading.run(heartbeat_ms=heartbeat_ms)
            except (LeadershipLost, OutcomeUnknown, Unavailable, Compacted) as error:
                # A temporary store failure must not leave the scope without a standby. Neither must a load so slow that another
                # server took over and compacted the revision being read.
                self._was_deposed = self._was_deposed or isinstance(error, LeadershipLost)
            finally:
                self.leading = None

    async def take_over(self, heartbeat_ms: int) -> Authority:
        position, self._position = self._position, None
        return await Authority.take_over(
            self.store,
            scope=self.scope,
            holder=self.name,
            clock=self.clock,
            ids=self.ids,
            position=position,
            batch_limits=self.batch_limits,
            heartbeat_ms=heartbeat_ms,
            timing=self.timing,
        )
