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
    Role,
    Verdict,
)
from remit.model.kinds import Tenant
from remit.model.records import Grant, GrantPhase, GrantSpec, PeerConfirmation, PeerSpec
from remit.model.resources import Amount, Duration
from remit.observation.watch_cache import Board
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
    """An instant that has passed on the clock of a scope's authority."""

    boot: str
    at_ms: int


def read_clock(view: Board) -> ClockReading | None:
    """The time on the region's clock at the last renewal of its clock grant; None before the first."""
    grant: Grant | None = view.get(f"grant/{CLOCK_GRANT}")
    if grant is None or grant.status.deadline is None:
        return None
    return ClockReading(grant.status.deadline.boot, max(0, grant.status.deadline.at_ms - grant.spec.ttl))


class PeerMessage(NamedTuple):
    claim: AnyClaim
    due_ms: int


class RetryingRole(SimulatedRole):
    """A role that keeps operation ids: an unanswered operation is resumed or abandoned before anything new is sent."""

    role = Role.BUDGETS

    def __init__(self, seat: RoleContext, *, lease: str = "") -> None:
        super().__init__(seat, lease=lease)
        self.resumed = self.abandoned = 0
        """How many unanswered operations were resumed, and how many abandoned."""
        self._unsettled: tuple[Operation, ...] = ()
        self._asked_ms = 0

    async def turn(self, tenure: LeaseHold) -> None:
        if not await self._settle():
            await self.world.clock.sleep_ms(self.seat.pace.beat_ms)
            self.changes.keys.setdefault("mail")
            self.changes.wake()
            return
        await super().turn(tenure)

    async def say(self, claims: Sequence[AnyClaim], **more: object) -> list[Verdict] | None:
        evidence = Evidence(self.view.revision, self.view.age_ms())
        try:
            verdicts = await self.client.submit_many(claims, evidence=evidence)
        except RetriesExhausted as error:
            self.seat.give_up(error)
            if error.outcome_unknown:
                self._unsettled, self._asked_ms = error.operations, error.submitted_ms
            return None
        self.learn(claims, verdicts)
        return verdicts

    async def _settle(self) -> bool:
        """Resume or abandon unanswered operations. Returns whether all are answered now."""
        try:
            if self._unsettled and self.chance.below(3):
                verdicts = await self.client.resume(self._unsettled, submitted_ms=self._asked_ms)
                for operation, verdict in zip(self._unsettled, verdicts, strict=True):
                    self.heard(operation.claim, verdict)
                self._unsettled = ()
                self.resumed += 1
            while self._unsettled:
                self.heard(self._unsettled[0].claim, await self.client.abandon(self._unsettled[0].id))
                self._unsettled = self._unsettled[1:]
                self.abandoned += 1
        except RetriesExhausted as error:
            self.seat.give_up(error)
            return False
        return True


class BudgetPeer(RetryingRole):
    """One of the two sides. `other` is None in a region without a parent scope."""

    def __init__(self, seat: RoleContext, *, lease: str = "") -> None:
        super().__init__(seat, lease=lease)
        self.name = SCOPE_PREFIX + seat.scope
        self.other: BudgetPeer | None = None
        self.mail: list[PeerMessage] = []
        """Messages in transit to this side."""
        self._meet_ms = 0
        self._due_ms: dict[str, int] = {}
        self._written: dict[tuple[str, str], tuple[int, int]] = {}

    async def turn(self, tenure: LeaseHold) -> None:
        if self.other is not None and self.view.head is not None:
            await self._meet(tenure, self.other)
        await super().turn(tenure)

    def concerns(self, key: str, old: Any, new: Any) -> bool:
        return key.startswith(_WATCHED_PREFIXES)

    def wants(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        if not self.view.sober:
            return
        yield from self._deliver()
        if self.other is not None and self.other.view.head is not None:
            self._vouch(self.other)
        yield from self.business()

    def business(self) -> Iterable[AnyClaim]:
        raise NotImplementedError

    def heard(self, claim: AnyClaim, verdict: Verdict) -> None:
        if isinstance(verdict, Refused) and verdict.code in (Code.GRANT_VOID, Code.AWAITING_REPORTS):
            self._meet_ms = 0  # one of the scopes may have been restored: check its incarnation

    # -- incarnation of the other side --------------------------------------------------------------------------------------

    async def _meet(self, tenure: LeaseHold, other: BudgetPeer) -> None:
        """Compare the recorded incarnation of the other scope with its current one, and accept a new one. The record is read
        first, so a late claim is refused instead of overwriting a newer incarnation.
        """
        now_ms, beat_ms = self.world.clock.now_ms(), self.seat.pace.beat_ms
        if now_ms < self._meet_ms:
            return
        self._meet_ms = now_ms + 5 * beat_ms + self.chance.uniform_ms(5 * beat_ms)
        known = self.record(other.name).incarnation
        try:
            status = await other.client.status()
        except RetriesExhausted:
            return
        if status.incarnation != known:
            claim = AcceptIncarnation(other.name, status.incarnation, known)
            if self.chance.below(8) == 0:
                self.post(self, claim)
            elif tenure.is_valid(self.world.clock.now_ms()) and await self._settle():
                await self.say([claim])

    def record(self, peer: str) -> PeerSpec:
        found = self.view.get(f"peer/{peer}")
        return PeerSpec() if found is None else found.spec

    def addresses(self, other: BudgetPeer) -> tuple[str, str] | None:
        """The incarnation of this scope and the one it knows of the other; None if it has not accepted one yet."""
        known = self.record(other.name).incarnation
        return (self.view.head.incarnation, known) if self.view.head is not None and known else None

    def _vouch(self, other: BudgetPeer) -> None:
        """Confirm to a restored scope everything that this scope holds from it."""
        pair = self.addresses(other)
        if pair is None or self.view.head is None or other.record(self.name).standing is not PeerConfirmation.AWAITED:
            return
        grants = {
            grant.metadata.name: _as_issued(grant)
            for grant in self.grants()
            if grant.spec.issuer == other.name and grant.spec.amount
        }
        if self._fresh("vouch", "", 0):
            self.post(other, ConfirmHoldings(self.name, self.view.head.epoch, grants, *pair))

    # -- peer messages ---------------------------------------------------------------------------------------------------

    def post(self, to: BudgetPeer, claim: AnyClaim) -> None:
        """Send a message. Most arrive at once; some late, some never."""
        drawn, beat_ms = self.chance.below(24), self.seat.pace.beat_ms
        if drawn == 0 or len(to.mail) >= MESSAGES_MAX:
            return
        late_ms = self.chance.uniform_ms(20 * beat_ms) if drawn < 5 else 0
        to.mail.append(PeerMessage(claim, self.world.clock.now_ms() + late_ms))
        to.poke()

    def poke(self) -> None:
        self.changes.keys.setdefault("mail")
        self.changes.wake()

    def _deliver(self) -> Iterator[AnyClaim]:
        """Messages that have arrived, in random order; some are delivered again later."""
        now_ms, beat_ms = self.world.clock.now_ms(), self.seat.pace.beat_ms
        come = [letter for letter in self.mail if letter.due_ms <= now_ms]
        self.mail = [letter for letter in self.mail if letter.due_ms > now_ms]
        for letter in self.chance.shuffled(come) if come else ():
            if self.chance.below(6) == 0:
                self.mail.append(letter._replace(due_ms=now_ms + self.chance.uniform_ms(40 * beat_ms)))
            yield letter.claim

    def _fresh(self, what: str, name: str, number: int) -> bool:
        """Whether to send a message: it was not sent yet, or so long ago that it may be lost."""
        now_ms = self.world.clock.now_ms()
        said = self._written.get((what, name))
        if said is not None and said[0] == number and now_ms < said[1] + 4 * self.seat.pace.beat_ms:
            return False
        self._written[what, name] = number, now_ms
        _drop_oldest(self._written)
        return True

    # -- state -----------------------------------------------------------------------------------------------------------

    def grants(self) -> Iterator[Grant]:
        return (seen.thing for _, seen in self.view.kind("grant/"))

    def grant(self, name: str) -> Grant | None:
        found: Grant | None = self.view.get(f"grant/{name}")
        return found

    def due(self, what: str, mean_beats: int) -> bool:
        """Whether a periodic action is due, on the clock of this process. The first time is random too. Optional actions are
        skipped in the quiet phase.
        """
        if self.seat.pace.quiet and what.startswith(("offer", "yield", "close")):
            return False
        now_ms, mean_ms = self.world.clock.now_ms(), mean_beats * self.seat.pace.beat_ms
        at_ms = self._due_ms.setdefault(what, now_ms + self.chance.uniform_ms(mean_ms))
        if now_ms < at_ms:
            return False
        self._due_ms[what] = now_ms + mean_ms // 2 + self.chance.uniform_ms(mean_ms)
        _drop_oldest(self._due_ms)
        return True

    def ttl(self, beats: int) -> Duration:
        return Duration(beats * self.seat.pace.beat_ms)

    def new_name(self, stem: str) -> str:
        return f"{stem[:40]}-{self.world.ids.nonce()[:10]}"


class BudgetIssuer(BudgetPeer):
    """In the parent scope: issues quota slices and budgets to one region, renews them, and accepts reports."""

    def __init__(self, seat: RoleContext, region: str) -> None:
        super().__init__(seat, lease=f"{Role.BUDGETS}/{region}")
        self.holder = SCOPE_PREFIX + region
        self._asking: dict[str, ClockReading] = {}
        self._asked: dict[tuple[str, int], ClockReading] = {}
        self._renewed_ms: dict[str, int] = {}

    async def _acquire(self) -> LeaseHold | None:
        """Acquire the lease only while the holder in this process has its own: messages reach only the other side in the same
        process, and other processes have such pairs too.
        """
        return await super()._acquire() if self._beside() else None

    def renewed(self, tenure: LeaseHold) -> None:
        if not self._beside():
            tenure.mark_lost()

    def _beside(self) -> bool:
        return self.other is not None and self.other.tenure is not None

    def business(self) -> Iterable[AnyClaim]:
        region = self.other
        if region is None or region.view.head is None or self.addresses(region) is None:
            return
        lent = [grant for grant in self.grants() if grant.spec.holder == self.holder and not grant.spec.issuer]
        reading = read_clock(region.view)
        for grant in lent:
            yield from self._tend(grant, region, reading)
        if reading is None or self.record(region.name).standing is PeerConfirmation.AWAITED:
            return
        for _, seen in self.view.kind("tenant/"):
            tenant: Tenant = seen.thing
            name, live = tenant.metadata.name, [grant for grant in lent if grant.status.phase is GrantPhase.LIVE]
            slices = [grant for grant in live if (grant.spec.tenant, grant.spec.purpose) == (name, "quota")]
            if not slices or (len(slices) < SLICES_MAX and self.due(f"slice {name}", 60)):
                yield from self._issue_slice(tenant, reading)
            if not any(name in grant.spec.shares for grant in live) and self.due(f"budget {name}", 60):
                yield from self._issue_budget(tenant, reading)

    def _tend(self, grant: Grant, region: BudgetPeer, reading: ClockReading | None) -> Iterator[AnyClaim]:
        name, now_ms, copy = grant.metadata.name, self.world.clock.now_ms(), region.grant(name=grant.metadata.name)
        if grant.status.phase is GrantPhase.CLOSED:
            if not outstanding(grant) and self._fresh("close", name, 0):
                yield Close(name)
            elif copy is not None and copy.status.phase is GrantPhase.VOID:
                # The region was restored to before it closed its copy. It accepts the grant again in order to close it; no term
                # is counted.
                self._offer(grant, region, reading)
            return
        if copy is not None and copy.status.phase is GrantPhase.CLOSED:
            return  # the report is in transit
        asked = self._asked.get((name, grant.status.serial))
        age_ms = now_ms - self._renewed_ms.get(name, -(1 << 40))
        lapsed = asked is None or reading is None or asked.boot != reading.boot
        if reading is not None and (lapsed or age_ms > grant.spec.ttl // 3) and self._fresh("renew", name, grant.status.serial):
            self._asking[name] = reading
            yield Renew(name)
        elif copy is None or copy.status.phase is GrantPhase.VOID or copy.status.serial < grant.status.serial:
            self._offer(grant, region, asked)

    def _offer(self, grant: Grant, region: BudgetPeer, asked: ClockReading | None) -> None:
        name, pair = grant.metadata.name, self.addresses(region)
        if asked is None or pair is None or not self._fresh("offer", name, grant.status.serial):
            return
        spec = replace(grant.spec, amount=Amount(outstanding(grant)), issuer=self.name)
        self.post(region, Accept(name, spec, grant.status.serial, asked.at_ms, *pair))

    def _issue_slice(self, tenant: Tenant, reading: ClockReading) -> Iterator[AnyClaim]:
        name, part = tenant.metadata.name, fraction_of(tenant.spec.quota, 3 + self.chance.below(4))
        if part and self._fresh("issue", name, 0):
            spec = GrantSpec(
                holder=self.holder, amount=part, parent=f"tenant/{name}", tenant=name, ttl=self.ttl(60 + self.chance.below(120))
            )
            yield self._issued(self.new_name(name), spec, reading)

    def _issue_budget(self, tenant: Tenant, reading: ClockReading) -> Iterator[AnyClaim]:
        name, part = tenant.metadata.name, fraction_of(tenant.spec.emergency_quota, 2 + self.chance.below(3))
        if part and self._fresh("budget", name, 0):
            spec = GrantSpec(
                holder=self.holder,
                amount=part,
                shares={name: part},
                purpose="budget",
                ttl=self.ttl(60 + self.chance.below(120)),
            )
            yield self._issued(self.new_name(f"{name}-budget"), spec, reading)

    def _issued(self, name: str, spec: GrantSpec, reading: ClockReading) -> Issue:
        self._asking[name] = reading
        return Issue(name, spec)

    def heard(self, claim: AnyClaim, verdict: Verdict) -> None:
        super().heard(claim, verdict)
        if isinstance(claim, (Issue, Renew)) and isinstance(verdict, Accepted) and claim.name in self._asking:
            # The clock was read before the request was sent, so before the issuer can have started the term.
            self._asked[claim.name, verdict.number] = self._asking.pop(claim.name)
            self._renewed_ms[claim.name] = self.world.clock.now_ms()
            for kept in (self._asking, self._asked, self._renewed_ms):
                _drop_oldest(kept)


class BudgetHolder(BudgetPeer):
    """In the region: accepts offers, returns unused parts, reports, closes grants, and makes short offers to schedulers."""

    def __init__(self, seat: RoleContext, upper: RoleContext | None = None) -> None:
        super().__init__(seat)
        self.lender = None if upper is None else BudgetIssuer(upper, seat.scope)
        if self.lender is not None:
            self.other, self.lender.other = self.lender, self

    async def play(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(super().play(), name="budgets")
            if self.lender is not None:
                group.create_task(self.lender.play(), name="lender")

    def business(self) -> Iterable[AnyClaim]:
        yield from self._wind_clock()
        if self.lender is not None and self.lender.view.head is not None:
            for grant in [grant for grant in self.grants() if grant.spec.issuer == self.lender.name]:
                yield from self._tend(grant, self.lender)
        yield from self._offers()

    def _wind_clock(self) -> Iterator[AnyClaim]:
        """Renew the clock grant. It is never drawn on, because its holder is this role."""
        grant = self.grant(CLOCK_GRANT)
        if grant is None:
            spec = GrantSpec(holder=Role.BUDGETS.value, amount=Amount({"cpu": 1}), purpose="offer", ttl=Duration(CLOCK_TTL_MS))
            if self._fresh("clock", "", 0):
                yield Issue(CLOCK_GRANT, spec)
        elif grant.status.phase is not GrantPhase.LIVE:
            yield Close(CLOCK_GRANT)
        elif self.due("clock", 5):
            yield Renew(CLOCK_GRANT)

    def _tend(self, grant: Grant, lender: BudgetIssuer) -> Iterator[AnyClaim]:
        name, status = grant.metadata.name, grant.status
        above = lender.grant(name)
        if status.phase is GrantPhase.VOID:
            if above is None and self._forsaken(lender) and self._fresh("close", name, 0):
                yield Close(name)
            return
        if status.phase is GrantPhase.CLOSED:
            if grant.spec.amount and self.due(f"more {name}", 20):
                yield Close(name)  # charges of the time it was closed may have been released since
        elif above is None and self._forsaken(lender):
            if self._fresh("close", name, 0):
                yield Close(name)
        elif above is not None and grant.spec.amount <= fraction_of(above.spec.amount, 3):
            if self.due(f"spent {name}", 10):
                yield Close(name)  # too little of it is left to be useful; the issuer will issue a new one
        elif self.due(f"close {name}", 400):
            yield Close(name)
        elif self.due(f"yield {name}", 40):
            yield ReturnCapacity(name, fraction_of(grant.spec.amount, 4 + self.chance.below(8)))
        self._report(grant, above, lender)

    def _forsaken(self, lender: BudgetIssuer) -> bool:
        """Whether the current incarnation of the parent scope is known here and its books are complete, so that a grant missing
        there does not exist.
        """
        above = lender.view.head
        return (
            above is not None
            and self.record(lender.name).incarnation == above.incarnation
            and lender.record(self.name).standing is not PeerConfirmation.AWAITED
        )

    def _report(self, grant: Grant, above: Grant | None, lender: BudgetIssuer) -> None:
        status, pair, head = grant.status, self.addresses(lender), self.view.head
        final = status.phase is GrantPhase.CLOSED
        if above is None or pair is None or head is None:
            return
        said = above.status.report >= status.report and (above.status.phase is GrantPhase.CLOSED or not final)
        if not said and self._fresh("report", grant.metadata.name, status.report):
            self.post(lender, Credit(grant.metadata.name, head.epoch, status.report, grant.spec.amount, *pair, final))

    def _offers(self) -> Iterator[AnyClaim]:
        """Short offers out of a slice, or out of a tenant's quota in its home scope. Some are closed, some expire."""
        offers = [
            g for g in self.grants() if g.spec.purpose == "offer" and not g.spec.issuer and g.metadata.name != CLOCK_GRANT
        ]
        if offers and self.due("close offer", 30):
            yield Close(self.chance.choice(offers).metadata.name)
        if len(offers) < OFFERS_MAX and self.due("offer", 20):
            parents = [
                (grant.metadata.name, grant.spec.tenant, grant.spec.amount)
                for grant in self.grants()
                if grant.spec.purpose == "quota" and grant.spec.issuer and grant.status.phase is GrantPhase.LIVE
            ]
            parents += [(f"tenant/{t.metadata.name}", t.metadata.name, t.spec.quota) for t in self._tenants()]
            if parents:
                parent, tenant, amount = self.chance.choice(parents)
                part, ttl = fraction_of(amount, 8), self.ttl(10 + self.chance.below(30))
                # Naive schedulers draw on every offer; the real one draws on quota only.
                takers = [key.removeprefix("lease/") for key, _ in self.view.kind("lease/") if key.startswith(_NAIVE_LEASES)]
                holder = takers[0] if takers else Role.SCHEDULER.value
                spec = GrantSpec(holder=holder, amount=part, parent=parent, tenant=tenant, purpose="offer", ttl=ttl)
                if part:
                    yield Issue(self.new_name("offer"), spec)

    def _tenants(self) -> Iterator[Tenant]:
        return (seen.thing for _, seen in self.view.kind("tenant/"))


def _drop_oldest(kept: dict[Any, Any]) -> None:
    """Bound the memory of past grants. If an entry is dropped too early, a message is sent once more."""
    while len(kept) > REMEMBERED_MAX:
        del kept[next(iter(kept))]


def fraction_of(amount: Amount, times: int) -> Amount:
    return Amount({name: count // times for name, count in amount})


def _as_issued(grant: Grant) -> GrantSpec:
    """A grant as its issuer must have written it: a share is at most what is left of the budget."""
    spec = grant.spec
    shares = {tenant: share - share.excess_over(spec.amount) for tenant, share in spec.shares.items()}
    parent = f"tenant/{spec.tenant}" if spec.purpose == "quota" else ""
    return replace(spec, issuer="", parent=parent, shares=shares)
