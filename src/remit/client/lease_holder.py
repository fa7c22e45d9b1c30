"""Holder's side of a lease: validity by its own clock, renewal, candidacy.

Validity is counted on the holder's own clock from when it sent the renewal. Leases of other holders are not tracked here.

The authority counts a term from when it received a renewal, the holder from when it sent it. Sending comes first, so the
holder always stops acting before the authority may give the lease to another, without comparing their clocks. Only the clock
rates must agree, and the authority's margin covers their drift (ARCHITECTURE.md, "Time").
"""

from __future__ import annotations

from msgspec.structs import replace

from remit.client.authority_client import AuthorityClient
from remit.model.claims import Accepted, Acquire, Actor, Code, Refused
from remit.model.resources import Duration
from remit.world.interfaces import Clock


class LeaseHold:
    """One lease at one epoch, as known to its holder. `term_ms` is how long one renewal is valid for the holder.

    `revision` is the revision at which the lease was acquired: all writes of a former holder have lower revisions.
    """

    def __init__(self, actor: Actor, term_ms: int, sent_ms: int, revision: int = 0) -> None:
        if not actor.lease or actor.epoch < 1 or term_ms < 1:
            raise ValueError(f"invalid lease hold: lease {actor.lease!r}, epoch {actor.epoch}, term {term_ms} ms")
        self.actor = actor
        self.revision = revision
        self._term_ms = term_ms
        self._valid_until_ms = sent_ms + term_ms
        self._lost = False

    @property
    def valid_until_ms(self) -> int:
        return self._valid_until_ms

    @property
    def is_lost(self) -> bool:
        """Whether the authority has reported the lease as lost. That is final for this epoch."""
        return self._lost

    def is_valid(self, now_ms: int) -> bool:
        return not self._lost and now_ms < self._valid_until_ms

    def on_renewed(self, sent_ms: int) -> None:
        """Record a successful renewal sent at `sent_ms`. Replies may arrive out of order, so the term never shrinks."""
        self._valid_until_ms = max(self._valid_until_ms, sent_ms + self._term_ms)

    def mark_lost(self) -> None:
        self._lost = True

    async def renew(self, client: AuthorityClient, *, deadline_ms: int | None = None) -> bool:
        """Renew once. Raises `RetriesExhausted`, after which the old term runs to its end."""
        renewal = await client.renew(self.actor, deadline_ms=deadline_ms)
        if renewal.held:
            self.on_renewed(renewal.sent_ms)
        else:
            self.mark_lost()
        return renewal.held


class LeaseCandidate:
    """Tries to acquire a lease, for as long as it takes.

    A lease held by another is not requested again before it may have expired: a refusal costs a commit too, and a candidate
    may wait for as long as the holder lives.
    """

    def __init__(self, client: AuthorityClient, clock: Clock, lease: str, ttl: Duration) -> None:
        self._client, self._clock, self._lease, self._ttl = client, clock, lease, ttl
        self._is_held = False

    async def acquire(self) -> LeaseHold | None:
        """Try to acquire the lease; None if that is not possible now. Raises `RetriesExhausted`."""
        if self._is_held and not await self._may_be_free():
            return None
        result = await acquire(self._client, self._clock, self._lease, self._ttl)
        self._is_held = isinstance(result, Refused) and result.code is Code.LEASE_HELD
        return result if isinstance(result, LeaseHold) else None

    async def _may_be_free(self) -> bool:
        """Return whether the lease was released, or was not renewed for a term. A new authority needs to be active for a term
        to know.
        """
        status = await self._client.status()
        return status.silent.get(self._lease, status.listened_ms) > self._ttl


async def acquire(client: AuthorityClient, clock: Clock, lease: str, ttl: Duration) -> LeaseHold | Refused:
    """Acquire `lease`. Raises `RetriesExhausted`; if a resume is accepted later, the term counts from its `submitted_ms`.

    Retries keep the id, and any attempt may be the one that took effect, so the term counts from before the first attempt.
    """
    sent_ms = clock.now_ms()
    match await client.submit(Acquire(lease, ttl)):
        case Accepted(number=epoch, revision=revision):
            return LeaseHold(replace(client.actor, lease=lease, epoch=epoch), int(ttl), sent_ms, revision)
        case Refused() as refused:
            return refused
