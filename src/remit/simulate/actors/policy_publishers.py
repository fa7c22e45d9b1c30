"""Publishes policies in the parent scope; adopts them in a region.

A region holds a policy revision by lease: `ttl` counts from the time the region requested it, on the clock of its own
authority (budget_controllers.py describes how it is read). The steps are in this order so that a revision that was withdrawn
in the parent scope is not extended in the region: read the region's clock; ask the parent scope for its current revision;
wait until the local view of the parent scope has reached it; read the latest policy revision from this view, and adopt it as
requested at that clock reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from remit.client.authority_client import RetriesExhausted
from remit.client.endpoint import AuthorityStatus
from remit.client.lease_holder import LeaseHold
from remit.model.claims import Adopt, AnyClaim, Apply, Role, Rollback
from remit.model.kinds import Policy, PolicySpec
from remit.model.metadata import Metadata
from remit.model.policies import PolicyAllow, PolicyMatch, PolicyRule
from remit.model.records import PolicyRevision
from remit.model.resources import Duration
from remit.observation.watch_cache import Board
from remit.simulate.actors.budget_controllers import ClockReading, RetryingRole, read_clock
from remit.simulate.actors.role import RoleContext

TTL_BEATS: Final = 60
RENEW_BEATS: Final = 20
LAPSE_BEATS: Final = 120
"""Sometimes nothing is renewed for this long, so that the lease expires."""

_REVISION: Final = "policyrevision/"


NARROW_PRIORITY_MAX: Final = 50
"""Maximum priority under a policy that excludes a zone: below the priority of urgent work."""


def latest_policy(view: Board) -> PolicyRevision | None:
    keys = [key for key, _ in view.kind(_REVISION)]
    found: PolicyRevision | None = view.get(max(keys)) if keys else None
    return found


class PolicyPublisher(RetryingRole):
    """Publishes and rolls back policies in the scope that owns them. A policy that excludes places is always followed by one
    that does not.
    """

    role = Role.POLICY

    def __init__(self, seat: RoleContext, *, lease: str = "", region: Board | None = None, mean_beats: int = 40) -> None:
        super().__init__(seat, lease=lease)
        self._region = seat.view if region is None else region
        self._mean_ms = mean_beats * seat.pace.beat_ms
        self._next_ms = 0
        self._narrow = False

    def concerns(self, key: str, old: Any, new: Any) -> bool:
        return key.startswith(_REVISION)

    def wants(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        now, below = latest_policy(self.view), latest_policy(self._region)
        number = 0 if now is None else now.spec.number
        forgotten = now is not None and below is not None and _must_republish(now, below)
        quiet = self.seat.pace.quiet and now is not None and not self._narrow
        if self.view.head is None or ((self.world.clock.now_ms() < self._next_ms or quiet) and not forgotten):
            return
        self._next_ms = self.world.clock.now_ms() + self._mean_ms // 2 + self.chance.uniform_ms(self._mean_ms)
        if number > 1 and not forgotten and not self._narrow and self.chance.below(4) == 0:
            yield from self._roll_back(number)
        else:
            # A policy that excludes a zone is followed by one that allows all zones.
            self._narrow = not self._narrow and bool(self.chance.below(2))
            name = f"simulated-{self.lease.replace('/', '-')}"[:63]
            yield Apply(Policy(metadata=Metadata(name=name), spec=PolicySpec(rules=(self._rule(),))))

    def _roll_back(self, number: int) -> Iterator[AnyClaim]:
        """Roll back to one of the last revisions that excluded nothing."""
        kept = [seen.thing.spec for _, seen in self.view.kind(_REVISION)]
        wide = [
            spec.number for spec in kept if number - 8 <= spec.number < number and not _excludes_places(spec.policies.values())
        ]
        if wide:
            yield Rollback(self.chance.choice(wide))

    def _rule(self) -> PolicyRule:
        zones = self._zones()
        if not self._narrow or len(zones) < 2:
            return PolicyRule(reason="everything goes anywhere", priority_max=1_000_000_000)
        tenants = [seen.thing.metadata.name for _, seen in self.view.kind("tenant/")]
        match = PolicyMatch(tenants=(self.chance.choice(tenants),)) if tenants else PolicyMatch()
        without = self.chance.choice(zones)
        allow = PolicyAllow(zones=tuple(zone for zone in zones if zone != without))
        reason = f"nothing goes to zone {without} for a while, and nobody is pushed aside for it"
        return PolicyRule(match=match, allow=allow, priority_max=NARROW_PRIORITY_MAX, reason=reason)

    def _zones(self) -> list[str]:
        zones = {zone for _, seen in self.view.kind("region/") for zone in seen.thing.spec.zones}
        zones |= {seen.thing.spec.zone for _, seen in self._region.kind("node/")}
        return sorted(zones)


class PolicyAdopter(RetryingRole):
    """In a region with a parent scope: adopts and renews policies, and sometimes lets the lease expire. Otherwise only
    publishes.
    """

    role = Role.POLICY

    def __init__(self, seat: RoleContext, upper: RoleContext | None = None) -> None:
        super().__init__(seat)
        self._upper = upper
        lease = "" if upper is None else f"{Role.POLICY}/{seat.scope}"
        self.publisher = PolicyPublisher(seat if upper is None else upper, lease=lease, region=seat.view)
        self._reading: ClockReading | None = None
        self._next_ms = 0

    async def play(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.publisher.play(), name="publisher")
            if self._upper is not None:
                group.create_task(super().play(), name="policies")

    async def turn(self, tenure: LeaseHold) -> None:
        now_ms = self.world.clock.now_ms()
        if self.seat.pace.quiet:  # the quiet phase ends a deliberate expiry
            self._next_ms = min(self._next_ms, now_ms + RENEW_BEATS * self.seat.pace.beat_ms // 2)
        if self._upper is None or now_ms < self._next_ms:
            self.changes.take()
            return
        self._reading = read_clock(self.view)
        if self._reading is None or not await self._caught_up(self._upper):
            self.changes.take()
            return
        await super().turn(tenure)

    async def _caught_up(self, upper: RoleContext) -> bool:
        """Whether the local view of the parent scope has reached its current state."""
        try:
            status = await self.publisher.client.status(deadline_ms=self.seat.pace.beat_ms)
        except RetriesExhausted:
            return False
        for _ in range(8):
            if _has_reached(upper.view, status):
                return True
            await self.world.clock.sleep_ms(self.seat.pace.beat_ms // 8)
        return False

    def wants(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        above = None if self._upper is None else latest_policy(self._upper.view)
        if above is None or self._reading is None:
            return
        beat_ms = self.seat.pace.beat_ms
        beats = LAPSE_BEATS if self.chance.below(12) == 0 and not self.seat.pace.quiet else RENEW_BEATS
        self._next_ms = self.world.clock.now_ms() + beats * beat_ms // 2 + self.chance.uniform_ms(beats * beat_ms // 2)
        ttl = Duration(TTL_BEATS * beat_ms)
        yield Adopt(above.spec.number, dict(above.spec.policies), ttl, self._reading.at_ms)


def _has_reached(view: Board, status: AuthorityStatus) -> bool:
    head = view.head
    return head is not None and head.incarnation == status.incarnation and head.sequence >= status.sequence


def _must_republish(above: PolicyRevision, below: PolicyRevision) -> bool:
    """Whether the parent scope was restored, so that it must publish a number higher than the one in force in the region."""
    one, other = above.spec, below.spec
    return one.number < other.number or (one.number == other.number and one.policies != other.policies)


def _excludes_places(policies: Iterable[PolicySpec]) -> bool:
    return any(rule.allow != PolicyAllow() for policy in policies for rule in policy.rules)
