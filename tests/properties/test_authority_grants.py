"""Is authority that crosses the border of a scope ever in two hands? Two scopes, and mail that is lost, late or twice.

The global scope grants slices of a tenant's quota to a region; the region takes them up, draws on them, hands them on, gives
them back and reports. Reports and offers travel as letters: they may be delivered in any order, more than once, or never.
Either scope's store may fail, its authority be replaced, or its backup be restored.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from remit.model.claims import (
    Accept,
    Accepted,
    AnyClaim,
    Apply,
    Bind,
    Close,
    Credit,
    DeclareLost,
    Issue,
    Move,
    Renew,
    Spawn,
    Vouch,
    Yield,
)
from remit.model.fields import Metadata
from remit.model.kinds import Region
from remit.model.records import GrantSpec
from remit.model.resources import Amount, Duration
from tests.properties.checker import Violation, across, of_kind, outstanding, phase_of
from tests.properties.machines import OPERATOR, USER, FakeClock, Scope, amounts, furnished, node, run, tenant, workload
from tests.properties.test_authority_machine import NUMBER, REACHED, Asking

__all__ = ["REACHED"]

WORDS = st.lists(st.tuples(NUMBER, NUMBER), min_size=4, max_size=16)


class GrantsMachine(Asking):
    """`r` is the scope that the inherited rules (faults, takeovers, retries, restores) act on; it changes sides."""

    def __init__(self) -> None:
        super().__init__()
        self.g: Scope
        self.region: Scope
        self.mail: list[tuple[str, AnyClaim]] = []
        self.put_aside: tuple[Any, Any] = ([], None)

    def scopes(self) -> list[Scope]:
        return [self.g, self.region]

    @initialize(words=WORDS)
    def furnish(self, words: list[tuple[int, int]]) -> None:
        self.do(self._furnish())
        self.business_goes_on(words)

    async def _furnish(self) -> None:
        clock = FakeClock()
        self.g = await furnished("global", clock, nodes=[])
        self.region = self.r = await furnished("r1", clock, nodes=[node("n1", "8"), node("n2", "8", "b")])
        await self.g.must(OPERATOR, Apply(Region(metadata=Metadata(name="r1"))), Apply(tenant("t1", "10")))
        await self.region.must(USER, Apply(workload("w", "1", 8)))
        await self.region.must(self.region.actors["workloads"], Spawn("t1", "w", 1, 0, 8))

    @rule()
    def the_other_scope_is_looked_at(self) -> None:
        """Faults, takeovers, retries and restores strike the other one from now on."""
        self.put_aside, (self.silent, self.backup) = (self.silent, self.backup), self.put_aside
        self.r = self.g if self.r is self.region else self.region

    def slices(self) -> list[str]:
        return [key for key, grant in of_kind(self.g.checker.rows, "grant") if grant["spec"]["holder"] == "scope/r1"]

    def held(self) -> list[str]:
        return [key for key, grant in of_kind(self.region.checker.rows, "grant") if grant["spec"].get("issuer")]

    @rule(words=WORDS)
    def business_goes_on(self, words: list[tuple[int, int]]) -> None:
        deeds = [
            self.a_slice_is_issued, self.an_offer_is_posted, self.a_letter_is_delivered, self.a_letter_is_delivered,
            self.the_region_draws, self.the_region_draws, self.the_region_frees, self.the_region_gives_back,
            self.a_report_is_posted, self.a_slice_is_renewed, self.the_region_hands_on, self.something_is_closed,
            self.the_region_vouches,
        ]  # fmt: skip
        for n, m in words:
            deeds[m % len(deeds)](n=n)

    more_business_goes_on = rule(words=WORDS)(lambda self, words: self.business_goes_on(words))

    @rule(words=WORDS, side=st.booleans())
    def a_scope_is_set_back(self, words: list[tuple[int, int]], side: bool) -> None:
        """F10: a backup, then business, then the backup in the store's place."""
        if side:
            self.the_other_scope_is_looked_at()
        self.backup = self.do(self._backup())
        self.business_goes_on(words)
        self.do(self._restore())
        self.backup = None

    # -- the global side ---------------------------------------------------------------------------------------------

    @rule(n=NUMBER)
    def a_slice_is_issued(self, n: int) -> None:
        holder = "scope/r9" if n % 16 == 15 else "scope/r1"
        ttl = Duration((100_000, 3_000_000, 3_000_000)[n % 3])
        spec = GrantSpec(holder=holder, amount=amounts(cpu=1 + n % 5), parent="tenant/t1", tenant="t1", ttl=ttl)
        self.ask(self.g.actors["budgets"], Issue(f"s{n % 5}", spec), scope=self.g)

    @rule(n=NUMBER)
    def a_slice_is_renewed(self, n: int) -> None:
        if slices := self.slices():
            name = slices[n % len(slices)].removeprefix("grant/")
            self.ask(self.g.actors["budgets"], Renew(name), scope=self.g)
            self.an_offer_is_posted(n=n)

    @rule(n=NUMBER)
    def an_offer_is_posted(self, n: int) -> None:
        """Made out to the region as it is now: what the slice still is, and how long it lasts from when it was asked for."""
        if slices := self.slices():
            key = slices[n % len(slices)]
            grant = self.g.row(key)
            spec = GrantSpec(
                holder="scope/r1",
                issuer="scope/global",
                amount=Amount(outstanding(grant)),
                tenant="t1",
                ttl=Duration(3_000_000 if n % 2 else 100_000),
            )
            serial, incarnation = grant.get("status", {}).get("serial", 1), self.region.row("head")["incarnation"]
            offer = Accept(key.removeprefix("grant/"), spec, serial, self.g.clock.at_ms, incarnation)
            self.mail.append(("region", offer))

    @rule()
    def a_scope_that_never_was_is_declared_lost(self) -> None:
        self.ask(OPERATOR, DeclareLost("scope/r9"), scope=self.g)

    # -- letters -----------------------------------------------------------------------------------------------------

    @rule(n=NUMBER)
    def a_letter_is_delivered(self, n: int) -> None:
        """Any of those under way; some stay in the bag and come again."""
        if self.mail:
            at = n % len(self.mail)
            to, claim = self.mail[at] if n % 3 == 0 else self.mail.pop(at)
            scope = self.g if to == "global" else self.region
            self.ask(scope.actors["budgets"], claim, scope=scope)

    @rule(n=NUMBER)
    def a_letter_is_lost(self, n: int) -> None:
        if self.mail:
            self.mail.pop(n % len(self.mail))

    # -- the region's side -------------------------------------------------------------------------------------------

    @rule(n=NUMBER)
    def a_report_is_posted(self, n: int) -> None:
        if held := self.held():
            key = held[n % len(held)]
            grant = self.region.row(key)
            status = grant.get("status", {})
            if status.get("phase") == "void":
                return
            remaining, closed = Amount.parse(grant["spec"]["amount"]), status.get("phase") == "closed"
            epoch = self.region.row("head")["epoch"]
            credit = Credit(key.removeprefix("grant/"), epoch, status.get("report", 0), remaining, closed)
            self.mail.append(("global", credit))

    @rule(n=NUMBER)
    def the_region_draws(self, n: int) -> None:
        waiting = [key for key, r in of_kind(self.region.checker.rows, "replica") if phase_of(r) == "pending"]
        names = [key.removeprefix("grant/") for key, _ in of_kind(self.region.checker.rows, "grant")]
        if waiting and names:
            key = waiting[n % len(waiting)]
            claim = Bind(key, self.region.at(key), f"n{n % 2 + 1}", names[n % len(names)])
            self.ask(self.region.actors["scheduler"], claim, scope=self.region)

    @rule(n=NUMBER)
    def the_region_frees(self, n: int) -> None:
        """One step on the way out, whoever owns it."""
        on = {"bound": ("remove", "workloads"), "draining": ("stop", ""), "stopping": ("stopped", "")}
        on |= {"unknown": ("resume", ""), "released": ("requeue", "repair")}
        rows = self.region.checker.rows
        going = [key for key, r in of_kind(rows, "replica") if phase_of(r) in on]
        for key in going[n % (len(going) or 1) :][:3]:
            status = self.region.row(key)["status"]
            transition, lease = on[status["phase"]]
            actor = self.region.actors[lease or f"agent/{status['node']}"]
            result = "ok" if transition == "stopped" else ""
            move = Move(key, self.region.at(key), transition, status.get("attempt", 1), result)
            self.ask(actor, move, scope=self.region)

    @rule(n=NUMBER)
    def the_region_gives_back(self, n: int) -> None:
        if held := self.held():
            name = held[n % len(held)].removeprefix("grant/")
            self.ask(self.region.actors["budgets"], Yield(name, amounts(cpu=n % 3 + 1)), scope=self.region)
            self.a_report_is_posted(n=n)

    @rule(n=NUMBER)
    def the_region_hands_on(self, n: int) -> None:
        if held := self.held():
            parent = held[n % len(held)].removeprefix("grant/")
            spec = GrantSpec(holder="scheduler", amount=amounts(cpu=1), parent=parent, tenant="t1", ttl=Duration(100_000))
            self.ask(self.region.actors["budgets"], Issue(f"x{n % 3}", spec), scope=self.region)

    @rule(n=NUMBER)
    def something_is_closed(self, n: int) -> None:
        scope = self.g if n % 3 == 0 else self.region
        if grants := [key.removeprefix("grant/") for key, _ in of_kind(scope.checker.rows, "grant")]:
            self.ask(scope.actors["budgets"], Close(grants[n % len(grants)]), scope=scope)

    @rule(n=NUMBER)
    def the_region_vouches(self, n: int) -> None:
        """After the global scope was restored: everything that the region has from it. At other times it is refused."""
        grants = {}
        for key in self.held():
            grant = self.region.row(key)
            kept = Amount.parse(grant["spec"]["amount"])
            if kept:
                ttl = Duration.parse(grant["spec"]["ttl"])
                spec = GrantSpec(holder="scope/r1", amount=kept, parent="tenant/t1", tenant="t1", ttl=ttl)
                grants[key.removeprefix("grant/")] = spec
        epoch = self.region.row("head")["epoch"]
        self.ask(self.g.actors["budgets"], Vouch("scope/r1", epoch, grants), scope=self.g)

    async def _restore(self) -> None:
        # A letter is an answer to the scope that it was addressed to: a restore cuts every connection.
        self.mail.clear()
        await super()._restore()

    # -- what must hold ------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_in_two_hands(self) -> None:
        """Invariant 4 across the border: what the holder has is never more than what its issuer has debited."""
        if not hasattr(self, "g"):
            return
        if any(key.startswith("summary/awaited/") for key in self.g.checker.rows):
            return  # restored, and not all have vouched yet: nothing is granted away meanwhile
        for key, why in across(self.g.checker.rows, self.region.checker.rows, "r1"):
            raise Violation(f"{why}\n{self.g.checker.story(key)}\nin the region: {self.region.checker.story(key)}")


def test_authority_that_crosses_a_border_is_never_in_two_hands() -> None:
    """F01 F10 F15 F20 F43: letters lost, late, twice; lost answers; takeovers and restores on either side."""
    run_state_machine_as_test(GrantsMachine, settings=settings())
    REACHED.write()


def test_a_reissue_that_is_under_way_does_not_bring_again_what_was_given_back() -> None:
    """F10 F43: a restored region gives back from memory, while its slice is being made out to it anew."""

    async def tell() -> None:
        clock = FakeClock()
        issuer = await furnished("global", clock, nodes=[])
        region = await furnished("r1", clock, nodes=[])
        spec = GrantSpec(holder="scope/r1", amount=amounts(cpu=4), parent="tenant/t1", tenant="t1", ttl=Duration(3_000_000))
        copy = GrantSpec(holder="scope/r1", amount=amounts(cpu=4), issuer="scope/global", tenant="t1", ttl=Duration(3_000_000))
        await issuer.must(issuer.actors["budgets"], Issue("s", spec))
        first = Accept("s", copy, 1, clock.at_ms, region.row("head")["incarnation"])
        await region.must(region.actors["budgets"], first)
        await region.restore(await region.store.inner.backup())
        await region.take_over()
        (serial,) = await issuer.must(issuer.actors["budgets"], Renew("s"))
        reissue = Accept("s", copy, serial, clock.at_ms, region.row("head")["incarnation"])
        (verdict,) = await region.ask(region.actors["budgets"], Yield("s", amounts(cpu=4)))
        if isinstance(verdict, Accepted):
            credit = Credit("s", region.row("head")["epoch"], verdict.number, Amount())
            await issuer.must(issuer.actors["budgets"], credit)
        await region.must(region.actors["budgets"], reissue)
        assert not list(across(issuer.checker.rows, region.checker.rows, "r1"))
        await issuer.close()
        await region.close()

    run(tell())
