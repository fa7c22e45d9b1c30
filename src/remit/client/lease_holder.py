"""Holder's side of a lease: validity by its own clock, renewal, candidacy.

Counted on the holder's own clock from when it sent; what others hold is not known here.

The authority counts a term from when it received a renewal, the holder from when it sent it. Sending comes first, so the
holder always stops believing before the authority may give the lease away, without their clocks ever being compared. Only
their speeds must agree, and the authority's margin covers that (DESIGN section 6).
"""

from __future__ import annotations

from msgspec.structs import replace

from remit.client.authority_client import Client
from remit.model.claims import Accepted, Acquire, Actor, Code, Refused
from remit.model.resources import Duration
from remit.world.interfaces import Clock


class Tenure:
    """One lease at one epoch, as its holder may believe in it. `term_ms` is how long one renewal lasts for the holder; as of
    `revision` it is held: whatever a former holder has done was done before.
    """

    def __init__(self, actor: Actor, term_ms: int, sent_ms: int, revision: int = 0) -> None:
        if not actor.lease or actor.epoch < 1 or term_ms < 1:
            raise ValueError(f"no tenure: lease {actor.lease!r}, epoch {actor.epoch}, term {term_ms} ms")
        self.actor = actor
        self.revision = revision
        self._term_ms = term_ms
        self._held_until_ms = sent_ms + term_ms
        self._lost = False

    @property
    def held_until_ms(self) -> int:
        return self._held_until_ms

    @property
    def lost(self) -> bool:
        """The authority has said that it is over. There is no way back at this epoch."""
        return self._lost

    def may_act(self, now_ms: int) -> bool:
        return not self._lost and now_ms < self._held_until_ms

    def renewed(self, sent_ms: int) -> None:
        """A renewal that was sent at `sent_ms` was answered with yes. Answers may overtake each other: a term never shrinks."""
        self._held_until_ms = max(self._held_until_ms, sent_ms + self._term_ms)

    def end(self) -> None:
        self._lost = True

    async def renew(self, client: Client, *, deadline_ms: int | None = None) -> bool:
        """One renewal. Raises `NoAnswer`, after which the old term runs on to its end."""
        renewal = await client.renew(self.actor, deadline_ms=deadline_ms)
        if renewal.held:
            self.renewed(renewal.sent_ms)
        else:
            self.end()
        return renewal.held


class Candidate:
    """Whoever wants a lease, for as long as it takes. What is held by another is not asked for again before that may be over: a
    refusal is a commit too, and a candidate may wait for as long as the holder lives.
    """

    def __init__(self, client: Client, clock: Clock, lease: str, ttl: Duration) -> None:
        self._client, self._clock, self._lease, self._ttl = client, clock, lease, ttl
        self._is_held = False

    async def acquire(self) -> Tenure | None:
        """None: not now. Raises `NoAnswer`."""
        if self._is_held and not await self._may_be_free():
            return None
        found = await acquire(self._client, self._clock, self._lease, self._ttl)
        self._is_held = isinstance(found, Refused) and found.code is Code.LEASE_HELD
        return found if isinstance(found, Tenure) else None

    async def _may_be_free(self) -> bool:
        """Was it not renewed for a term, or given back? An authority that is new has not listened for long enough to say so."""
        status = await self._client.status()
        return status.silent.get(self._lease, status.listened_ms) > self._ttl


async def acquire(client: Client, clock: Clock, lease: str, ttl: Duration) -> Tenure | Refused:
    """Become the holder of `lease`. Raises `NoAnswer`; if a resume is then accepted, the tenure counts from its `asked_ms`.

    Retries keep the id, and any try may be the one that took effect: the term is counted from before the first.
    """
    sent_ms = clock.now_ms()
    match await client.ask(Acquire(lease, ttl)):
        case Accepted(number=epoch, revision=revision):
            return Tenure(replace(client.actor, lease=lease, epoch=epoch), int(ttl), sent_ms, revision)
        case Refused() as refused:
            return refused
