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
from remit.model.claims import Adopt, AnyClaim, Apply, Rollback
from remit.model.kinds import Policy, PolicyAllow, PolicyMatch, PolicyRule, PolicySpec
from remit.model.metadata import Metadata
from remit.model.records import PolicyRevision
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.observation.watch_cache import WatchCache
from remit.simulate.actors.budget_controllers import ClockReading, RetryingRole, read_clock
from remit.simulate.actors.role import RoleContext

TTL_BEATS: Final = 60
RENEW_BEATS: Final = 20
LAPSE_BEATS: Final = 120
"""Sometimes nothing is renewed for this long, so that the lease expires."""

_REVISION: Final = "policyrevision/"


NARROW_PRIORITY_MAX: Final = 50
"""Maximum priority under a policy that excludes a zone: below the priority of urgent work."""


def latest_policy(view: WatchCache) -> PolicyRevision | None:
    keys = [key for key, _ in view.of_kind(_REVISION)]
    revision: PolicyRevision | None = view.get(max(keys)) if keys else None
    return revision


class PolicyPublisher(RetryingRole):
    """Publishes and rolls back policies in the scope that owns them. A policy that excludes places is always followed by one
    that does not.
    """

    role = Role.POLICY

    def __init__(
        self, context: RoleContext, *, lease: str = "", region: WatchCache | None = None, mean_beats: int = 40
    ) -> None:
        super().__init__(context, lease=lease)
        self._region = context.view if region is None else region
        self._mean_ms = mean_beats * context.timing.heartbeat_ms
        self._next_ms = 0
        self._excluding = False

    def is_relevant(self, key: str, old: Any, new: Any) -> bool:
        return key.startswith(_REVISION)

    def claims_for(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        now, below = latest_policy(self.view), latest_policy(self._region)
        number = 0 if now is None else now.spec.number
        must_republish = now is not None and below is not None and _must_republish(now, below)
        quiet = self.context.timing.quiet and now is not None and not self._excluding
        if self.view.head is None or ((self.world.clock.now_ms() < self._next_ms or quiet) and not must_republish):
            return
        self._next_ms = self.world.clock.now_ms() + self._mean_ms // 2 + self.rng.jitter_ms(self._mean_ms)
        if number > 1 and not must_republish and not self._excluding and self.rng.randrange(4) == 0:
            yield from self._roll_back(number)
        else:
            # A policy that excludes a zone is followed by one that allows all zones.
            self._excluding = not self._excluding and bool(self.rng.randrange(2))
            name = f"simulated-{self.lease.replace('/', '-')}"[:63]
            yield Apply(Policy(metadata=Metadata(name=name), spec=PolicySpec(rules=(self._rule(),))))

    def _roll_back(self, number: int) -> Iterator[AnyClaim]:
        """Roll back to one of the last revisions that excluded nothing."""
        specs = [row.obj.spec for _, row in self.view.of_kind(_REVISION)]
        allowed = [
            spec.number for spec in specs if number - 8 <= spec.number < number and not _excludes_places(spec.policies.values())
        ]
        if allowed:
            yield Rollback(self.rng.choice(allowed))

    def _rule(self) -> PolicyRule:
        zones = self._zones()
        if not self._excluding or len(zones) < 2:
            return PolicyRule(reason="everything goes anywhere", priority_max=1_000_000_000)
        tenants = [row.obj.metadata.name for _, row in self.view.of_kind("tenant/")]
        match = PolicyMatch(tenants=(self.rng.choice(tenants),)) if tenants else PolicyMatch()
        excluded = self.rng.choice(zones)
        allow = PolicyAllow(zones=tuple(zone for zone in zones if zone != excluded))
        reason = f"zone {excluded} is excluded for a while, and priority is limited, so that nothing is preempted because of it"
        return PolicyRule(match=match, allow=allow, priority_max=NARROW_PRIORITY_MAX, reason=reason)

    def _zones(self) -> list[str]:
        zones = {zone for _, row in self.view.of_kind("region/") for zone in row.obj.spec.zones}
        zones |= {row.obj.spec.zone for _, row in self._region.of_kind("node/")}
        return sorted(zones)


class PolicyAdopter(RetryingRole):
    """In a region with a parent scope: adopts and renews policies, and sometimes lets the lease expire. Otherwise only
    publishes.
    """

    role = Role.POLICY

    def __init__(self, context: RoleContext, parent: RoleContext | None = None) -> None:
        super().__init__(context)
        self._parent = parent
        lease = "" if parent is None else f"{Role.POLICY}/{context.scope}"
        self.publisher = PolicyPublisher(context if parent is None else parent, lease=lease, region=context.view)
        self._reading: ClockReading | None = None
        self._next_ms = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.publisher.run(), name="publisher")
            if self._parent is not None:
                group.create_task(super().run(), name="policies")

    async def reconcile(self, lease_hold: LeaseHold) -> None:
        now_ms = self.world.clock.now_ms()
        if self.context.timing.quiet:  # the quiet phase ends a deliberate expiry
            self._next_ms = min(self._next_ms, now_ms + RENEW_BEATS * self.context.timing.heartbeat_ms // 2)
        if self._parent is None or now_ms < self._next_ms:
            self.changed_keys.take()
            return
        self._reading = read_clock(self.view)
        if self._reading is None or not await self._view_is_current(self._parent):
            self.changed_keys.take()
            return
        await super().reconcile(lease_hold)

    async def _view_is_current(self, parent: RoleContext) -> bool:
        """Whether the local view of the parent scope has reached its current state."""
        try:
            status = await self.publisher.client.status(deadline_ms=self.context.timing.heartbeat_ms)
        except RetriesExhausted:
            return False
        for _ in range(8):
            if _has_reached(parent.view, status):
                return True
            await self.world.clock.sleep_ms(self.context.timing.heartbeat_ms // 8)
        return False

    def claims_for(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        above = None if self._parent is None else latest_policy(self._parent.view)
        if above is None or self._reading is None:
            return
        heartbeat_ms = self.context.timing.heartbeat_ms
        heartbeats = LAPSE_BEATS if self.rng.randrange(12) == 0 and not self.context.timing.quiet else RENEW_BEATS
        self._next_ms = (
            self.world.clock.now_ms() + heartbeats * heartbeat_ms // 2 + self.rng.jitter_ms(heartbeats * heartbeat_ms // 2)
        )
        ttl = Duration(TTL_BEATS * heartbeat_ms)
        yield Adopt(above.spec.number, dict(above.spec.policies), ttl, self._reading.at_ms)


def _has_reached(view: WatchCache, status: AuthorityStatus) -> bool:
    head = view.head
    return head is not None and head.incarnation == status.incarnation and head.sequence >= status.sequence


def _must_republish(above: PolicyRevision, below: PolicyRevision) -> bool:
    """Whether the parent scope was restored, so that it must publish a number higher than the one in force in the region."""
    published, in_force = above.spec, below.spec
    if published.number == in_force.number:
        return published.policies != in_force.policies
    return published.number < in_force.number


def _excludes_places(policies: Iterable[PolicySpec]) -> bool:
    return any(rule.allow != PolicyAllow() for policy in policies for rule in policy.rules)
