"""Quota exchange between a region and its parent scope.

Stands in for the budget controllers of the product. `BudgetHolder` acts in the region and `BudgetIssuer` in the parent
scope, both in the controllers process of the region. Each reads its own scope and sends peer messages (offers, reports,
confirmations) to the other side, which are lost, delayed and repeated. A lost message is detected at the next reconcile and
sent again.

The term of a grant counts on the clock of the region's authority, from the time the region requested it. No other process
can read that clock, but every deadline of a grant issued in the region contains one reading of it. So the region keeps a
grant that is never drawn on, named `clock`, and renews it: `deadline - ttl` is an instant that has passed there. The issuer
reads it before it issues or renews a grant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from remit.client.authority_client import RetriesExhausted
from remit.client.lease_holder import LeaseHold
from remit.law.ledgers import SCOPE_PREFIX, outstanding
from remit.model.claims import (
    Accept,
    Accepted,
    AcceptIncarnation,
    AnyClaim,
    Close,
    Code,
    ConfirmHoldings,
    Credit,
    Evidence,
    Issue,
    Operation,
    Refused,
    Renew,
    ReturnCapacity,
    Verdict,
)
from remit.model.kinds import Tenant
from remit.model.records import Grant, GrantPhase, GrantSpec, PeerConfirmation, PeerSpec
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from remit.observation.watch_cache import WatchCache
from remit.simulate.actors.role import RoleContext, SimulatedRole

CLOCK_GRANT: Final = "clock"
_NAIVE_LEASES: Final = "lease/scheduler/guess-"
CLOCK_TTL_MS: Final = 3_600_000
MESSAGES_MAX: Final = 256
REMEMBERED_MAX: Final = 1_000
OFFERS_MAX: Final = 4
SLICES_MAX: Final = 2
_WATCHED_PREFIXES: Final = ("grant/", "peer/", "tenant/")


class ClockReading(NamedTuple):
    """A time that the clock of a scope's authority has already reached, with the boot id of that clock."""

    boot: str
    at_ms: int


def read_clock(view: WatchCache) -> ClockReading | None:
    """The time on the region's clock at the last renewal of its clock grant; None before the first."""
    grant: Grant | None = view.get(f"grant/{CLOCK_GRANT}")
    if grant is None or grant.status.deadline is None:
        return None
    return ClockReading(grant.status.deadline.boot, max(0, grant.status.deadline.at_ms - grant.spec.ttl))


class PeerMessage(NamedTuple):
    claim: AnyClaim
    arrives_ms: int


class RetryingRole(SimulatedRole):
    """A role that keeps operation ids: an unanswered operation is resumed or abandoned before anything new is sent."""

    role = Role.BUDGETS

    def __init__(self, context: RoleContext, *, lease: str = "") -> None:
        super().__init__(context, lease=lease)
        self.resumed = self.abandoned = 0
        """How many unanswered operations were resumed, and how many abandoned."""
        self._unanswered: tuple[Operation, ...] = ()
        self._sent_ms = 0

    async def reconcile(self, lease_hold: LeaseHold) -> None:
        if not await self._resolve_unanswered():
            await self.world.clock.sleep_ms(self.context.timing.heartbeat_ms)
            self.changed_keys.keys.setdefault("mail")
            self.changed_keys.wake()
            return
        await super().reconcile(lease_hold)

    async def send(self, claims: Sequence[AnyClaim], **options: object) -> list[Verdict] | None:
        evidence = Evidence(self.view.revision, self.view.age_ms())
        try:
            verdicts = await self.client.submit_many(claims, evidence=evidence)
        except RetriesExhausted as error:
            self.context.report_abandoned(error)
            if error.outcome_unknown:
                self._unanswered, self._sent_ms = error.operations, error.submitted_ms
            return None
        self.on_verdicts(claims, verdicts)
        return verdicts

    async def _resolve_unanswered(self) -> bool:
        """Resume or abandon unanswered operations. Returns whether all are answered now."""
        try:
            if self._unanswered and self.rng.randrange(3):
                verdicts = await self.client.resume(self._unanswered, submitted_ms=self._sent_ms)
                for operation, verdict in zip(self._unanswered, verdicts, strict=True):
                    self.on_verdict(operation.claim, verdict)
                self._unanswered = ()
                self.resumed += 1
            while self._unanswered:
                self.on_verdict(self._unanswered[0].claim, await self.client.abandon(self._unanswered[0].id))
                self._unanswered = self._unanswered[1:]
                self.abandoned += 1
        except RetriesExhausted as error:
            self.context.report_abandoned(error)
            return False
        return True


class BudgetPeer(RetryingRole):
    """One of the two sides. `other` is None in a region without a parent scope."""

    def __init__(self, context: RoleContext, *, lease: str = "") -> None:
        super().__init__(context, lease=lease)
        self.name = SCOPE_PREFIX + context.scope
        self.other: BudgetPeer | None = None
        self.inbox: list[PeerMessage] = []
        """Messages in transit to this side."""
        self._next_check_ms = 0
        self._next_action_ms: dict[str, int] = {}
        self._sent: dict[tuple[str, str], tuple[int, int]] = {}

    async def reconcile(self, lease_hold: LeaseHold) -> None:
        if self.other is not None and self.view.head is not None:
            await self._check_incarnation(lease_hold, self.other)
        await super().reconcile(lease_hold)

    def is_relevant(self, key: str, old: Any, new: Any) -> bool:
        return key.startswith(_WATCHED_PREFIXES)

    def claims_for(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        if not self.view.is_current:
            return
        yield from self._take_arrived()
        if self.other is not None and self.other.view.head is not None:
            self._confirm_holdings(self.other)
        yield from self.own_claims()

    def own_claims(self) -> Iterable[AnyClaim]:
        raise NotImplementedError

    def on_verdict(self, claim: AnyClaim, verdict: Verdict) -> None:
        if isinstance(verdict, Refused) and verdict.code in (Code.GRANT_VOID, Code.AWAITING_REPORTS):
            self._next_check_ms = 0  # one of the scopes may have been restored: check its incarnation

    # -- incarnation of the other side --------------------------------------------------------------------------------------

    async def _check_incarnation(self, lease_hold: LeaseHold, other: BudgetPeer) -> None:
        """Compare the recorded incarnation of the other scope with its current one, and accept a new one. The record is read
        first, so a late claim is refused instead of overwriting a newer incarnation.
        """
        now_ms, heartbeat_ms = self.world.clock.now_ms(), self.context.timing.heartbeat_ms
        if now_ms < self._next_check_ms:
            return
        self._next_check_ms = now_ms + 5 * heartbeat_ms + self.rng.jitter_ms(5 * heartbeat_ms)
        known = self.peer_record(other.name).incarnation
        try:
            status = await other.client.status()
        except RetriesExhausted:
            return
        if status.incarnation != known:
            claim = AcceptIncarnation(other.name, status.incarnation, known)
            if self.rng.randrange(8) == 0:
                self.send_message(self, claim)
            elif lease_hold.is_valid(self.world.clock.now_ms()) and await self._resolve_unanswered():
                await self.send([claim])

    def peer_record(self, peer: str) -> PeerSpec:
        peer_row = self.view.get(f"peer/{peer}")
        return PeerSpec() if peer_row is None else peer_row.spec

    def incarnations(self, other: BudgetPeer) -> tuple[str, str] | None:
        """The incarnation of this scope and the one it knows of the other; None if it has not accepted one yet."""
        known = self.peer_record(other.name).incarnation
        return (self.view.head.incarnation, known) if self.view.head is not None and known else None

    def _confirm_holdings(self, other: BudgetPeer) -> None:
        """Confirm to a restored scope everything that this scope holds from it."""
        pair = self.incarnations(other)
        if pair is None or self.view.head is None or other.peer_record(self.name).standing is not PeerConfirmation.AWAITED:
            return
        grants = {
            grant.metadata.name: _as_issued(grant)
            for grant in self.grants()
            if grant.spec.issuer == other.name and grant.spec.amount
        }
        if self._should_send("vouch", "", 0):
            self.send_message(other, ConfirmHoldings(self.name, self.view.head.epoch, grants, *pair))

    # -- peer messages ---------------------------------------------------------------------------------------------------

    def send_message(self, to: BudgetPeer, claim: AnyClaim) -> None:
        """Send a message. Most arrive at once; some late, some never."""
        draw, heartbeat_ms = self.rng.randrange(24), self.context.timing.heartbeat_ms
        if draw == 0 or len(to.inbox) >= MESSAGES_MAX:
            return
        delay_ms = self.rng.jitter_ms(20 * heartbeat_ms) if draw < 5 else 0
        to.inbox.append(PeerMessage(claim, self.world.clock.now_ms() + delay_ms))
        to.wake()

    def wake(self) -> None:
        self.changed_keys.keys.setdefault("mail")
        self.changed_keys.wake()

    def _take_arrived(self) -> Iterator[AnyClaim]:
        """Messages that have arrived, in random order; some are delivered again later."""
        now_ms, heartbeat_ms = self.world.clock.now_ms(), self.context.timing.heartbeat_ms
        arrived = [message for message in self.inbox if message.arrives_ms <= now_ms]
        self.inbox = [message for message in self.inbox if message.arrives_ms > now_ms]
        for message in self.rng.shuffled(arrived) if arrived else ():
            if self.rng.randrange(6) == 0:
                self.inbox.append(message._replace(arrives_ms=now_ms + self.rng.jitter_ms(40 * heartbeat_ms)))
            yield message.claim

    def _should_send(self, action: str, name: str, number: int) -> bool:
        """Whether to send a message: it was not sent yet, or so long ago that it may be lost."""
        now_ms = self.world.clock.now_ms()
        last_sent = self._sent.get((action, name))
        if last_sent is not None and last_sent[0] == number and now_ms < last_sent[1] + 4 * self.context.timing.heartbeat_ms:
            return False
        self._sent[action, name] = number, now_ms
        _drop_oldest(self._sent)
        return True

    # -- state -----------------------------------------------------------------------------------------------------------

    def grants(self) -> Iterator[Grant]:
        return (row.obj for _, row in self.view.of_kind("grant/"))

    def grant(self, name: str) -> Grant | None:
        grant: Grant | None = self.view.get(f"grant/{name}")
        return grant

    def is_due(self, action: str, mean_beats: int) -> bool:
        """Whether a periodic action is due, on the clock of this process. All intervals are random, also that before the first
        action. Optional actions are skipped in the quiet phase.
        """
        if self.context.timing.quiet and action.startswith(("offer", "yield", "close")):
            return False
        now_ms, mean_ms = self.world.clock.now_ms(), mean_beats * self.context.timing.heartbeat_ms
        at_ms = self._next_action_ms.setdefault(action, now_ms + self.rng.jitter_ms(mean_ms))
        if now_ms < at_ms:
            return False
        self._next_action_ms[action] = now_ms + mean_ms // 2 + self.rng.jitter_ms(mean_ms)
        _drop_oldest(self._next_action_ms)
        return True

    def ttl(self, heartbeats: int) -> Duration:
        return Duration(heartbeats * self.context.timing.heartbeat_ms)

    def new_name(self, stem: str) -> str:
        return f"{stem[:40]}-{self.world.ids.nonce()[:10]}"


class BudgetIssuer(BudgetPeer):
    """In the parent scope: issues quota slices and budgets to one region, renews them, and accepts reports."""

    def __init__(self, context: RoleContext, region: str) -> None:
        super().__init__(context, lease=f"{Role.BUDGETS}/{region}")
        self.holder = SCOPE_PREFIX + region
        self._readings_in_flight: dict[str, ClockReading] = {}
        self._readings: dict[tuple[str, int], ClockReading] = {}
        self._renewed_ms: dict[str, int] = {}

    async def _acquire(self) -> LeaseHold | None:
        """Acquire the lease only while the holder in this process has its own: messages reach only the other side in the same
        process, and other processes have such pairs too.
        """
        return await super()._acquire() if self._is_paired() else None

    def on_renewed(self, lease_hold: LeaseHold) -> None:
        if not self._is_paired():
            lease_hold.mark_lost()

    def _is_paired(self) -> bool:
        return self.other is not None and self.other.lease_hold is not None

    def own_claims(self) -> Iterable[AnyClaim]:
        region = self.other
        if region is None or region.view.head is None or self.incarnations(region) is None:
            return
        issued = [grant for grant in self.grants() if grant.spec.holder == self.holder and not grant.spec.issuer]
        reading = read_clock(region.view)
        for grant in issued:
            yield from self._maintain(grant, region, reading)
        if reading is None or self.peer_record(region.name).standing is PeerConfirmation.AWAITED:
            return
        live = [grant for grant in issued if grant.status.phase is GrantPhase.LIVE]
        for _, row in self.view.of_kind("tenant/"):
            yield from self._issue_grants(row.obj, live, reading)

    def _issue_grants(self, tenant: Tenant, live: Sequence[Grant], reading: ClockReading) -> Iterator[AnyClaim]:
        """Issue what a tenant lacks in the region, given the live grants there."""
        name = tenant.metadata.name
        slices = [grant for grant in live if (grant.spec.tenant, grant.spec.purpose) == (name, "quota")]
        if not slices or (len(slices) < SLICES_MAX and self.is_due(f"slice {name}", 60)):
            yield from self._issue_slice(tenant, reading)
        if not any(name in grant.spec.shares for grant in live) and self.is_due(f"budget {name}", 60):
            yield from self._issue_budget(tenant, reading)

    def _maintain(self, grant: Grant, region: BudgetPeer, reading: ClockReading | None) -> Iterator[AnyClaim]:
        name, now_ms, holder_copy = grant.metadata.name, self.world.clock.now_ms(), region.grant(name=grant.metadata.name)
        if grant.status.phase is GrantPhase.CLOSED:
            if not outstanding(grant) and self._should_send("close", name, 0):
                yield Close(name)
            elif holder_copy is not None and holder_copy.status.phase is GrantPhase.VOID:
                # The region was restored to before it closed its copy. It accepts the grant again in order to close it; no term
                # is counted.
                self._offer(grant, region, reading)
            return
        if holder_copy is not None and holder_copy.status.phase is GrantPhase.CLOSED:
            return  # the report is in transit
        requested = self._readings.get((name, grant.status.serial))
        age_ms = now_ms - self._renewed_ms.get(name, -(1 << 40))
        lapsed = requested is None or reading is None or requested.boot != reading.boot
        if (
            reading is not None
            and (lapsed or age_ms > grant.spec.ttl // 3)
            and self._should_send("renew", name, grant.status.serial)
        ):
            self._readings_in_flight[name] = reading
            yield Renew(name)
        elif (
            holder_copy is None
            or holder_copy.status.phase is GrantPhase.VOID
            or holder_copy.status.serial < grant.status.serial
        ):
            self._offer(grant, region, requested)

    def _offer(self, grant: Grant, region: BudgetPeer, requested: ClockReading | None) -> None:
        name, pair = grant.metadata.name, self.incarnations(region)
        if requested is None or pair is None or not self._should_send("offer", name, grant.status.serial):
            return
        spec = replace(grant.spec, amount=Amount(outstanding(grant)), issuer=self.name)
        self.send_message(region, Accept(name, spec, grant.status.serial, requested.at_ms, *pair))

    def _issue_slice(self, tenant: Tenant, reading: ClockReading) -> Iterator[AnyClaim]:
        name, amount = tenant.metadata.name, fraction_of(tenant.spec.quota, 3 + self.rng.randrange(4))
        if amount and self._should_send("issue", name, 0):
            spec = GrantSpec(
                holder=self.holder,
                amount=amount,
                parent=f"tenant/{name}",
                tenant=name,
                ttl=self.ttl(60 + self.rng.randrange(120)),
            )
            yield self._issued(self.new_name(name), spec, reading)

    def _issue_budget(self, tenant: Tenant, reading: ClockReading) -> Iterator[AnyClaim]:
        name, amount = tenant.metadata.name, fraction_of(tenant.spec.emergency_quota, 2 + self.rng.randrange(3))
        if amount and self._should_send("budget", name, 0):
            spec = GrantSpec(
                holder=self.holder,
                amount=amount,
                shares={name: amount},
                purpose="budget",
                ttl=self.ttl(60 + self.rng.randrange(120)),
            )
            yield self._issued(self.new_name(f"{name}-budget"), spec, reading)

    def _issued(self, name: str, spec: GrantSpec, reading: ClockReading) -> Issue:
        self._readings_in_flight[name] = reading
        return Issue(name, spec)

    def on_verdict(self, claim: AnyClaim, verdict: Verdict) -> None:
        super().on_verdict(claim, verdict)
        if isinstance(claim, (Issue, Renew)) and isinstance(verdict, Accepted) and claim.name in self._readings_in_flight:
            # The clock was read before the request was sent, so before the issuer can have started the term.
            self._readings[claim.name, verdict.number] = self._readings_in_flight.pop(claim.name)
            self._renewed_ms[claim.name] = self.world.clock.now_ms()
            for entries in (self._readings_in_flight, self._readings, self._renewed_ms):
                _drop_oldest(entries)


class BudgetHolder(BudgetPeer):
    """In the region: accepts offers, returns unused parts, reports, closes grants, and makes short offers to schedulers."""

    def __init__(self, context: RoleContext, parent: RoleContext | None = None) -> None:
        super().__init__(context)
        self.issuer = None if parent is None else BudgetIssuer(parent, context.scope)
        if self.issuer is not None:
            self.other, self.issuer.other = self.issuer, self

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(super().run(), name="budgets")
            if self.issuer is not None:
                group.create_task(self.issuer.run(), name="lender")

    def own_claims(self) -> Iterable[AnyClaim]:
        yield from self._renew_clock()
        if self.issuer is not None and self.issuer.view.head is not None:
            for grant in [grant for grant in self.grants() if grant.spec.issuer == self.issuer.name]:
                yield from self._maintain(grant, self.issuer)
        yield from self._offers()

    def _renew_clock(self) -> Iterator[AnyClaim]:
        """Renew the clock grant. It is never drawn on, because its holder is this role."""
        grant = self.grant(CLOCK_GRANT)
        if grant is None:
            spec = GrantSpec(holder=Role.BUDGETS.value, amount=Amount({"cpu": 1}), purpose="offer", ttl=Duration(CLOCK_TTL_MS))
            if self._should_send("clock", "", 0):
                yield Issue(CLOCK_GRANT, spec)
        elif grant.status.phase is not GrantPhase.LIVE:
            yield Close(CLOCK_GRANT)
        elif self.is_due("clock", 5):
            yield Renew(CLOCK_GRANT)

    def _maintain(self, grant: Grant, issuer: BudgetIssuer) -> Iterator[AnyClaim]:
        name, status = grant.metadata.name, grant.status
        above = issuer.grant(name)
        if status.phase is GrantPhase.VOID:
            if above is None and self._parent_books_are_complete(issuer) and self._should_send("close", name, 0):
                yield Close(name)
            return
        if status.phase is GrantPhase.CLOSED:
            if grant.spec.amount and self.is_due(f"more {name}", 20):
                yield Close(name)  # charges of the time it was closed may have been released since
        elif above is None and self._parent_books_are_complete(issuer):
            if self._should_send("close", name, 0):
                yield Close(name)
        elif above is not None and grant.spec.amount <= fraction_of(above.spec.amount, 3):
            if self.is_due(f"spent {name}", 10):
                yield Close(name)  # too little of it is left to be useful; the issuer will issue a new one
        elif self.is_due(f"close {name}", 400):
            yield Close(name)
        elif self.is_due(f"yield {name}", 40):
            yield ReturnCapacity(name, fraction_of(grant.spec.amount, 4 + self.rng.randrange(8)))
        self._report(grant, above, issuer)

    def _parent_books_are_complete(self, issuer: BudgetIssuer) -> bool:
        """Whether the current incarnation of the parent scope is known here and its books are complete, so that a grant missing
        there does not exist.
        """
        above = issuer.view.head
        return (
            above is not None
            and self.peer_record(issuer.name).incarnation == above.incarnation
            and issuer.peer_record(self.name).standing is not PeerConfirmation.AWAITED
        )

    def _report(self, grant: Grant, above: Grant | None, issuer: BudgetIssuer) -> None:
        status, pair, head = grant.status, self.incarnations(issuer), self.view.head
        final = status.phase is GrantPhase.CLOSED
        if above is None or pair is None or head is None:
            return
        reported = above.status.report >= status.report and (above.status.phase is GrantPhase.CLOSED or not final)
        if not reported and self._should_send("report", grant.metadata.name, status.report):
            self.send_message(issuer, Credit(grant.metadata.name, head.epoch, status.report, grant.spec.amount, *pair, final))

    def _offers(self) -> Iterator[AnyClaim]:
        """Short offers out of a slice, or out of a tenant's quota in its home scope. Some are closed, some expire."""
        offers = [
            g for g in self.grants() if g.spec.purpose == "offer" and not g.spec.issuer and g.metadata.name != CLOCK_GRANT
        ]
        if offers and self.is_due("close offer", 30):
            yield Close(self.rng.choice(offers).metadata.name)
        if len(offers) < OFFERS_MAX and self.is_due("offer", 20):
            parents = [
                (grant.metadata.name, grant.spec.tenant, grant.spec.amount)
                for grant in self.grants()
                if grant.spec.purpose == "quota" and grant.spec.issuer and grant.status.phase is GrantPhase.LIVE
            ]
            parents += [(f"tenant/{t.metadata.name}", t.metadata.name, t.spec.quota) for t in self._tenants()]
            if parents:
                parent, tenant, amount = self.rng.choice(parents)
                amount, ttl = fraction_of(amount, 8), self.ttl(10 + self.rng.randrange(30))
                # Naive schedulers draw on every offer; the real one draws on quota only.
                takers = [key.removeprefix("lease/") for key, _ in self.view.of_kind("lease/") if key.startswith(_NAIVE_LEASES)]
                holder = takers[0] if takers else Role.SCHEDULER.value
                spec = GrantSpec(holder=holder, amount=amount, parent=parent, tenant=tenant, purpose="offer", ttl=ttl)
                if amount:
                    yield Issue(self.new_name("offer"), spec)

    def _tenants(self) -> Iterator[Tenant]:
        return (row.obj for _, row in self.view.of_kind("tenant/"))


def _drop_oldest(entries: dict[Any, Any]) -> None:
    """Bound the memory of past grants. If an entry is dropped too early, a message is sent once more."""
    while len(entries) > REMEMBERED_MAX:
        del entries[next(iter(entries))]


def fraction_of(amount: Amount, times: int) -> Amount:
    return Amount({name: count // times for name, count in amount})


def _as_issued(grant: Grant) -> GrantSpec:
    """The spec that the issuer wrote for this grant. A share was at most the amount that was left of the budget."""
    spec = grant.spec
    shares = {tenant: share - share.excess_over(spec.amount) for tenant, share in spec.shares.items()}
    parent = f"tenant/{spec.tenant}" if spec.purpose == "quota" else ""
    return replace(spec, issuer="", parent=parent, shares=shares)
