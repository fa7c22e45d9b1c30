"""Quota exchange between a region and the scope above.

Two players who write letters; what is true, they never say.

One sits in the region, one in the scope above, both in the region's controllers: `Budgets` and its `lender`. They look at their
own scope and write letters (offers, reports, vouchers) to the other, which the mail loses, delays and repeats. What was lost is
seen to be missing at the next look, and written again.

A term counts on the clock of the region's authority, from when the region asked. That clock is nobody else's to read; but every
deadline of a grant issued in the region shows it as it stood then. So the region keeps a grant that nobody draws on, its
*clock*, and renews it: `deadline - ttl` is an instant that has passed there. The lender reads it before it issues or renews.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from remit.client.authority_client import NoAnswer
from remit.client.lease_holder import Tenure
from remit.law.ledgers import SCOPE, outstanding
from remit.model.claims import (
    Accept,
    Accepted,
    AnyClaim,
    Close,
    Code,
    Credit,
    Evidence,
    Issue,
    Operation,
    Recognise,
    Refused,
    Renew,
    Role,
    Verdict,
    Vouch,
    Yield,
)
from remit.model.kinds import Tenant
from remit.model.records import Grant, GrantPhase, GrantSpec, PeerSpec, Standing
from remit.model.resources import Amount, Duration
from remit.observation.watch_cache import Board
from remit.simulate.actors.role import Player, Seat

CLOCK: Final = "clock"
_GUESSES: Final = "lease/scheduler/guess-"
CLOCK_TTL_MS: Final = 3_600_000
LETTERS_MAX: Final = 256
KEPT_MAX: Final = 1_000
OFFERS_MAX: Final = 4
SLICES_MAX: Final = 2
_LOOKED_AT: Final = ("grant/", "peer/", "tenant/")


class Reading(NamedTuple):
    """An instant that has passed on the clock of a scope's authority."""

    boot: str
    at_ms: int


def read_clock(view: Board) -> Reading | None:
    """What the region's clock showed when it was last renewed; None before it was."""
    grant: Grant | None = view.get(f"grant/{CLOCK}")
    if grant is None or grant.status.deadline is None:
        return None
    return Reading(grant.status.deadline.boot, max(0, grant.status.deadline.at_ms - grant.spec.ttl))


class Letter(NamedTuple):
    claim: AnyClaim
    due_ms: int


class Settler(Player):
    """A player who keeps an intent's id: what went unanswered is asked again or abandoned before anything new is asked."""

    role = Role.BUDGETS

    def __init__(self, seat: Seat, *, lease: str = "") -> None:
        super().__init__(seat, lease=lease)
        self.resumed = self.abandoned = 0
        """How often silence was ended by asking again, and by making sure that nothing happens."""
        self._unsettled: tuple[Operation, ...] = ()
        self._asked_ms = 0

    async def turn(self, tenure: Tenure) -> None:
        if not await self._settle():
            await self.world.clock.sleep_ms(self.seat.pace.beat_ms)
            self.changes.keys.setdefault("mail")
            self.changes.wake()
            return
        await super().turn(tenure)

    async def say(self, claims: Sequence[AnyClaim], **more: object) -> list[Verdict] | None:
        evidence = Evidence(self.view.revision, self.view.age_ms())
        try:
            verdicts = await self.client.ask_many(claims, evidence=evidence)
        except NoAnswer as error:
            self.seat.give_up(error)
            if error.silent:
                self._unsettled, self._asked_ms = error.operations, error.asked_ms
            return None
        self.learn(claims, verdicts)
        return verdicts

    async def _settle(self) -> bool:
        """Is everything answered that was ever asked?"""
        try:
            if self._unsettled and self.chance.below(3):
                verdicts = await self.client.resume(self._unsettled, asked_ms=self._asked_ms)
                for operation, verdict in zip(self._unsettled, verdicts, strict=True):
                    self.heard(operation.claim, verdict)
                self._unsettled = ()
                self.resumed += 1
            while self._unsettled:
                self.heard(self._unsettled[0].claim, await self.client.abandon(self._unsettled[0].id))
                self._unsettled = self._unsettled[1:]
                self.abandoned += 1
        except NoAnswer as error:
            self.seat.give_up(error)
            return False
        return True


class Side(Settler):
    """One of the two. `other` is set once both are there; a region without a scope above has none."""

    def __init__(self, seat: Seat, *, lease: str = "") -> None:
        super().__init__(seat, lease=lease)
        self.name = SCOPE + seat.scope
        self.other: Side | None = None
        self.mail: list[Letter] = []
        """What is under way to this side."""
        self._meet_ms = 0
        self._due_ms: dict[str, int] = {}
        self._written: dict[tuple[str, str], tuple[int, int]] = {}

    async def turn(self, tenure: Tenure) -> None:
        if self.other is not None and self.view.head is not None:
            await self._meet(tenure, self.other)
        await super().turn(tenure)

    def concerns(self, key: str, old: Any, new: Any) -> bool:
        return key.startswith(_LOOKED_AT)

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
            self._meet_ms = 0  # one of the two may have been restored: ask

    # -- who the other is ------------------------------------------------------------------------------------------------

    async def _meet(self, tenure: Tenure, other: Side) -> None:
        """Its own record first, then the other's answer; what follows from it may be late."""
        now_ms, beat_ms = self.world.clock.now_ms(), self.seat.pace.beat_ms
        if now_ms < self._meet_ms:
            return
        self._meet_ms = now_ms + 5 * beat_ms + self.chance.uniform_ms(5 * beat_ms)
        known = self.record(other.name).incarnation
        try:
            status = await other.client.status()
        except NoAnswer:
            return
        if status.incarnation != known:
            claim = Recognise(other.name, status.incarnation, known)
            if self.chance.below(8) == 0:
                self.post(self, claim)
            elif tenure.may_act(self.world.clock.now_ms()) and await self._settle():
                await self.say([claim])

    def record(self, peer: str) -> PeerSpec:
        found = self.view.get(f"peer/{peer}")
        return PeerSpec() if found is None else found.spec

    def addresses(self, other: Side) -> tuple[str, str] | None:
        """Which incarnation this scope is in, and which one of the other it deals with; None if it deals with none yet."""
        known = self.record(other.name).incarnation
        return (self.view.head.incarnation, known) if self.view.head is not None and known else None

    def _vouch(self, other: Side) -> None:
        """Of use after the other was restored: everything that this scope has from it."""
        pair = self.addresses(other)
        if pair is None or self.view.head is None or other.record(self.name).standing is not Standing.AWAITED:
            return
        grants = {
            grant.metadata.name: _as_issued(grant)
            for grant in self.grants()
            if grant.spec.issuer == other.name and grant.spec.amount
        }
        if self._fresh("vouch", "", 0):
            self.post(other, Vouch(self.name, self.view.head.epoch, grants, *pair))

    # -- letters ---------------------------------------------------------------------------------------------------------

    def post(self, to: Side, claim: AnyClaim) -> None:
        """Most go at once; some are late, some lost."""
        drawn, beat_ms = self.chance.below(24), self.seat.pace.beat_ms
        if drawn == 0 or len(to.mail) >= LETTERS_MAX:
            return
        late_ms = self.chance.uniform_ms(20 * beat_ms) if drawn < 5 else 0
        to.mail.append(Letter(claim, self.world.clock.now_ms() + late_ms))
        to.poke()

    def poke(self) -> None:
        self.changes.keys.setdefault("mail")
        self.changes.wake()

    def _deliver(self) -> Iterator[AnyClaim]:
        """What has come; some of it comes again, and in no order."""
        now_ms, beat_ms = self.world.clock.now_ms(), self.seat.pace.beat_ms
        come = [letter for letter in self.mail if letter.due_ms <= now_ms]
        self.mail = [letter for letter in self.mail if letter.due_ms > now_ms]
        for letter in self.chance.shuffled(come) if come else ():
            if self.chance.below(6) == 0:
                self.mail.append(letter._replace(due_ms=now_ms + self.chance.uniform_ms(40 * beat_ms)))
            yield letter.claim

    def _fresh(self, what: str, name: str, number: int) -> bool:
        """Is this worth a letter: not said yet, or said so long ago that it may have been lost?"""
        now_ms = self.world.clock.now_ms()
        said = self._written.get((what, name))
        if said is not None and said[0] == number and now_ms < said[1] + 4 * self.seat.pace.beat_ms:
            return False
        self._written[what, name] = number, now_ms
        _forget_oldest(self._written)
        return True

    # -- looking ---------------------------------------------------------------------------------------------------------

    def grants(self) -> Iterator[Grant]:
        return (seen.thing for _, seen in self.view.kind("grant/"))

    def grant(self, name: str) -> Grant | None:
        found: Grant | None = self.view.get(f"grant/{name}")
        return found

    def due(self, what: str, mean_beats: int) -> bool:
        """Now and then, on the player's own clock. The first time is drawn as well. What need not be waits in quiet times."""
        if self.seat.pace.quiet and what.startswith(("offer", "yield", "close")):
            return False
        now_ms, mean_ms = self.world.clock.now_ms(), mean_beats * self.seat.pace.beat_ms
        at_ms = self._due_ms.setdefault(what, now_ms + self.chance.uniform_ms(mean_ms))
        if now_ms < at_ms:
            return False
        self._due_ms[what] = now_ms + mean_ms // 2 + self.chance.uniform_ms(mean_ms)
        _forget_oldest(self._due_ms)
        return True

    def ttl(self, beats: int) -> Duration:
        return Duration(beats * self.seat.pace.beat_ms)

    def new_name(self, stem: str) -> str:
        return f"{stem[:40]}-{self.world.ids.nonce()[:10]}"


class Lender(Side):
    """In the scope above: issues slices and budgets to one region, renews them, and takes reports."""

    def __init__(self, seat: Seat, region: str) -> None:
        super().__init__(seat, lease=f"{Role.BUDGETS}/{region}")
        self.holder = SCOPE + region
        self._asking: dict[str, Reading] = {}
        self._asked: dict[tuple[str, int], Reading] = {}
        self._renewed_ms: dict[str, int] = {}

    async def _acquire(self) -> Tenure | None:
        """Only beside the one who holds the region's role: there may be other pairs, and letters do not reach those."""
        return await super()._acquire() if self._beside() else None

    def renewed(self, tenure: Tenure) -> None:
        if not self._beside():
            tenure.end()

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
        if reading is None or self.record(region.name).standing is Standing.AWAITED:
            return
        for _, seen in self.view.kind("tenant/"):
            tenant: Tenant = seen.thing
            name, live = tenant.metadata.name, [grant for grant in lent if grant.status.phase is GrantPhase.LIVE]
            slices = [grant for grant in live if (grant.spec.tenant, grant.spec.purpose) == (name, "quota")]
            if not slices or (len(slices) < SLICES_MAX and self.due(f"slice {name}", 60)):
                yield from self._issue_slice(tenant, reading)
            if not any(name in grant.spec.shares for grant in live) and self.due(f"budget {name}", 60):
                yield from self._issue_budget(tenant, reading)

    def _tend(self, grant: Grant, region: Side, reading: Reading | None) -> Iterator[AnyClaim]:
        name, now_ms, copy = grant.metadata.name, self.world.clock.now_ms(), region.grant(name=grant.metadata.name)
        if grant.status.phase is GrantPhase.CLOSED:
            if not outstanding(grant) and self._fresh("close", name, 0):
                yield Close(name)
            elif copy is not None and copy.status.phase is GrantPhase.VOID:
                # Restored to before it closed this. It takes up what it kept, to close it again; nobody counts a term of it.
                self._offer(grant, region, reading)
            return
        if copy is not None and copy.status.phase is GrantPhase.CLOSED:
            return  # its report is on the way
        asked = self._asked.get((name, grant.status.serial))
        age_ms = now_ms - self._renewed_ms.get(name, -(1 << 40))
        lapsed = asked is None or reading is None or asked.boot != reading.boot
        if reading is not None and (lapsed or age_ms > grant.spec.ttl // 3) and self._fresh("renew", name, grant.status.serial):
            self._asking[name] = reading
            yield Renew(name)
        elif copy is None or copy.status.phase is GrantPhase.VOID or copy.status.serial < grant.status.serial:
            self._offer(grant, region, asked)

    def _offer(self, grant: Grant, region: Side, asked: Reading | None) -> None:
        name, pair = grant.metadata.name, self.addresses(region)
        if asked is None or pair is None or not self._fresh("offer", name, grant.status.serial):
            return
        spec = replace(grant.spec, amount=Amount(outstanding(grant)), issuer=self.name)
        self.post(region, Accept(name, spec, grant.status.serial, asked.at_ms, *pair))

    def _issue_slice(self, tenant: Tenant, reading: Reading) -> Iterator[AnyClaim]:
        name, part = tenant.metadata.name, part_of(tenant.spec.quota, 3 + self.chance.below(4))
        if part and self._fresh("issue", name, 0):
            spec = GrantSpec(
                holder=self.holder, amount=part, parent=f"tenant/{name}", tenant=name, ttl=self.ttl(60 + self.chance.below(120))
            )
            yield self._issued(self.new_name(name), spec, reading)

    def _issue_budget(self, tenant: Tenant, reading: Reading) -> Iterator[AnyClaim]:
        name, part = tenant.metadata.name, part_of(tenant.spec.emergency_quota, 2 + self.chance.below(3))
        if part and self._fresh("budget", name, 0):
            spec = GrantSpec(
                holder=self.holder,
                amount=part,
                shares={name: part},
                purpose="budget",
                ttl=self.ttl(60 + self.chance.below(120)),
            )
            yield self._issued(self.new_name(f"{name}-budget"), spec, reading)

    def _issued(self, name: str, spec: GrantSpec, reading: Reading) -> Issue:
        self._asking[name] = reading
        return Issue(name, spec)

    def heard(self, claim: AnyClaim, verdict: Verdict) -> None:
        super().heard(claim, verdict)
        if isinstance(claim, (Issue, Renew)) and isinstance(verdict, Accepted) and claim.name in self._asking:
            # Asked for before it was sent, so before the issuer can have begun to count.
            self._asked[claim.name, verdict.number] = self._asking.pop(claim.name)
            self._renewed_ms[claim.name] = self.world.clock.now_ms()
            for kept in (self._asking, self._asked, self._renewed_ms):
                _forget_oldest(kept)


class Budgets(Side):
    """In the region: takes offers up, gives part back, reports, closes, and hands short offers to the scheduler."""

    def __init__(self, seat: Seat, upper: Seat | None = None) -> None:
        super().__init__(seat)
        self.lender = None if upper is None else Lender(upper, seat.scope)
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
        """No draw on it is ever made: its holder is this role."""
        grant = self.grant(CLOCK)
        if grant is None:
            spec = GrantSpec(holder=Role.BUDGETS.value, amount=Amount({"cpu": 1}), purpose="offer", ttl=Duration(CLOCK_TTL_MS))
            if self._fresh("clock", "", 0):
                yield Issue(CLOCK, spec)
        elif grant.status.phase is not GrantPhase.LIVE:
            yield Close(CLOCK)
        elif self.due("clock", 5):
            yield Renew(CLOCK)

    def _tend(self, grant: Grant, lender: Lender) -> Iterator[AnyClaim]:
        name, status = grant.metadata.name, grant.status
        above = lender.grant(name)
        if status.phase is GrantPhase.VOID:
            if above is None and self._forsaken(lender) and self._fresh("close", name, 0):
                yield Close(name)
            return
        if status.phase is GrantPhase.CLOSED:
            if grant.spec.amount and self.due(f"more {name}", 20):
                yield Close(name)  # what was drawn when it was closed may have been released since
        elif above is None and self._forsaken(lender):
            if self._fresh("close", name, 0):
                yield Close(name)
        elif above is not None and grant.spec.amount <= part_of(above.spec.amount, 3):
            if self.due(f"spent {name}", 10):
                yield Close(name)  # too little is left of it to be of use: a fresh one is issued
        elif self.due(f"close {name}", 400):
            yield Close(name)
        elif self.due(f"yield {name}", 40):
            yield Yield(name, part_of(grant.spec.amount, 4 + self.chance.below(8)))
        self._report(grant, above, lender)

    def _forsaken(self, lender: Lender) -> bool:
        """Does the incarnation above that this scope deals with say that it lent nothing more than its books show?"""
        above = lender.view.head
        return (
            above is not None
            and self.record(lender.name).incarnation == above.incarnation
            and lender.record(self.name).standing is not Standing.AWAITED
        )

    def _report(self, grant: Grant, above: Grant | None, lender: Lender) -> None:
        status, pair, head = grant.status, self.addresses(lender), self.view.head
        final = status.phase is GrantPhase.CLOSED
        if above is None or pair is None or head is None:
            return
        said = above.status.report >= status.report and (above.status.phase is GrantPhase.CLOSED or not final)
        if not said and self._fresh("report", grant.metadata.name, status.report):
            self.post(lender, Credit(grant.metadata.name, head.epoch, status.report, grant.spec.amount, *pair, final))

    def _offers(self) -> Iterator[AnyClaim]:
        """Short ones, out of a slice, or of a tenant's quota where this is its home. Some are closed, some left to run out."""
        offers = [g for g in self.grants() if g.spec.purpose == "offer" and not g.spec.issuer and g.metadata.name != CLOCK]
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
                part, ttl = part_of(amount, 8), self.ttl(10 + self.chance.below(30))
                # Those who guess take whatever they are offered; others draw on quota alone.
                takers = [key.removeprefix("lease/") for key, _ in self.view.kind("lease/") if key.startswith(_GUESSES)]
                holder = takers[0] if takers else Role.SCHEDULER.value
                spec = GrantSpec(holder=holder, amount=part, parent=parent, tenant=tenant, purpose="offer", ttl=ttl)
                if part:
                    yield Issue(self.new_name("offer"), spec)

    def _tenants(self) -> Iterator[Tenant]:
        return (seen.thing for _, seen in self.view.kind("tenant/"))


def _forget_oldest(kept: dict[Any, Any]) -> None:
    """Grants come and go; what is forgotten too early is only said, or asked for, once more."""
    while len(kept) > KEPT_MAX:
        del kept[next(iter(kept))]


def part_of(amount: Amount, times: int) -> Amount:
    return Amount({name: count // times for name, count in amount})


def _as_issued(grant: Grant) -> GrantSpec:
    """What a holder has, as its issuer must have written it: a share is at most what is left of the budget."""
    spec = grant.spec
    shares = {tenant: share - share.over(spec.amount) for tenant, share in spec.shares.items()}
    parent = f"tenant/{spec.tenant}" if spec.purpose == "quota" else ""
    return replace(spec, issuer="", parent=parent, shares=shares)
