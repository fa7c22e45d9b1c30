"""Property: capacity granted between two scopes is never held by both. Messages are lost, delayed and repeated.

The global scope grants slices of a tenant's quota to a region; the region accepts, draws on, passes on, returns and reports
them. Offers, reports and confirmations are messages: delivered in any order, more than once, or never. Either store may
fail, either authority be replaced, either backup be restored. A restore leaves the messages: those of one incarnation may
reach the other scope, or a later incarnation of it, at any time.

The messages are those of a correct budget controller, written from one read of its own scope: the grant, the scope's own
incarnation, and the accepted one of the peer. Accepting an incarnation is a message to the own scope, which may be late.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from remit.model.claims import (
    Accept,
    AcceptIncarnation,
    Acquire,
    Actor,
    AnyClaim,
    Apply,
    Bind,
    Close,
    Code,
    ConfirmHoldings,
    Credit,
    DeclareLost,
    Issue,
    Move,
    Renew,
    ReturnCapacity,
    Spawn,
)
from remit.model.kinds import Region
from remit.model.metadata import Metadata
from remit.model.records import GrantSpec
from remit.model.resources import Amount, Duration
from remit.simulate.checkers.quota_checks import compare_scopes
from remit.simulate.checkers.reference.rows import of_kind, outstanding, phase_of
from tests.properties.authority_world import (
    HOUR,
    OPERATOR,
    USER,
    FakeClock,
    Scope,
    Violated,
    amounts,
    node,
    populated_scope,
    tenant,
    workload,
)
from tests.properties.commitment.faulty_scope_machine import NUMBER, REACHED, FaultyScopeMachine
from tests.properties.effort import tries

RELEASE_STEPS = {
    "bound": ("remove", "workloads"), "draining": ("stop", ""), "stopping": ("stopped", ""), "unknown": ("resume", ""),
    "released": ("requeue", "repair"),
}  # fmt: skip
"""For each phase the next transition towards release, and the lease of its owner; empty means the node's agent."""

STEPS = st.lists(st.tuples(NUMBER, NUMBER), min_size=4, max_size=16)


class GrantsMachine(FaultyScopeMachine):
    """`r` is the scope that inherited rules (faults, takeovers, retries, restores) act on; it changes sides."""

    def __init__(self) -> None:
        super().__init__()
        self.g: Scope
        self.region: Scope
        self.messages: list[tuple[Scope, AnyClaim]] = []
        self.put_aside: tuple[Any, Any] = ([], None)
        self.rounds = 0

    def scopes(self) -> list[Scope]:
        return [self.g, self.region]

    @initialize(words=STEPS)
    def set_up(self, words: list[tuple[int, int]]) -> None:
        self.do(self._set_up())
        if words[0][0] % 8:
            self.do(self._accept_each_other())
        self.run_ordinary_steps(words)

    async def _set_up(self) -> None:
        clock = FakeClock()
        self.g = await populated_scope("global", clock, nodes=[])
        self.region = self.r = await populated_scope(
            "r1", clock, nodes=[node("n1", "8"), node("n2", "8", "b")], judge=self.g.judged.judge
        )
        await self.g.must(OPERATOR, Apply(Region(metadata=Metadata(name="r1"))), Apply(tenant("t1", "10")))
        await self.region.must(USER, Apply(workload("w", "1", 8)))
        await self.region.must(self.region.actors["workloads"], Spawn("t1", "w", 1, 0, 8))

    async def _accept_each_other(self) -> None:
        await self.g.must(OPERATOR, self.incarnation_claim(self.g, self.region))
        await self.region.must(OPERATOR, self.incarnation_claim(self.region, self.g))

    @rule()
    def switch_scope(self) -> None:
        """Faults, takeovers, retries and restores act on the other scope from now on."""
        self.put_aside, (self.silent, self.backup) = (self.silent, self.backup), self.put_aside
        self.r = self.g if self.r is self.region else self.region

    def slices(self) -> list[str]:
        return [key for key, grant in of_kind(self.g.checker.rows, "grant") if grant["spec"]["holder"] == "scope/r1"]

    def held(self) -> list[str]:
        return [key for key, grant in of_kind(self.region.checker.rows, "grant") if grant["spec"].get("issuer")]

    @rule(words=STEPS)
    def run_ordinary_steps(self, words: list[tuple[int, int]]) -> None:
        actions = [
            self.issue_slice, self.post_offer, self.deliver_message, self.deliver_message,
            self.draw_in_region, self.draw_in_region, self.release_in_region, self.return_capacity,
            self.post_report, self.renew_slice, self.pass_on_grant, self.close_grant,
            self.post_confirmation, self.post_incarnation, self.accept_incarnation,
            self.accept_and_renew, self.round_trip_slice, self.round_trip_slice,
        ]  # fmt: skip
        for n, m in words:
            actions[m % len(actions)](n=n)

    run_more_ordinary_steps = rule(words=STEPS)(lambda self, words: self.run_ordinary_steps(words))

    @rule(words=STEPS, side=st.booleans(), n=NUMBER)
    def restore_scope(self, words: list[tuple[int, int]], side: bool, n: int) -> None:
        """F10: a backup, ordinary steps, then the restore. Then messages arrive, or both scopes accept each other."""
        if side:
            self.switch_scope()
        self.backup = self.do(self._backup())
        self.run_ordinary_steps(words)
        self.do(self._restore())
        self.backup = None
        if n % 4 < 2:
            self.deliver_many_messages(n=n)
        if n % 4:
            self.accept_and_renew(n=n)
        if n % 4 == 2:
            self.deliver_many_messages(n=n)

    # -- the global scope --------------------------------------------------------------------------------------------

    @rule(n=NUMBER)
    def issue_slice(self, n: int) -> None:
        holder = "scope/r9" if n % 16 == 15 else "scope/r1"
        ttl = Duration((100_000, 3_000_000, 3_000_000)[n % 3])
        spec = GrantSpec(holder=holder, amount=amounts(cpu=1 + n % 5), parent="tenant/t1", tenant="t1", ttl=ttl)
        # A region never accepts a closed slice again: few names, so that they recur, and new ones once all are closed.
        self.ask(self.g.actors["budgets"], Issue(f"s{n % 7}-{self.rounds}", spec), scope=self.g)

    @rule(n=NUMBER)
    def renew_slice(self, n: int) -> None:
        if slices := self.slices():
            name = slices[n % len(slices)].removeprefix("grant/")
            self.ask(self.g.actors["budgets"], Renew(name), scope=self.g)
            self.post_offer(n=n)

    @rule(n=NUMBER)
    def post_offer(self, n: int) -> None:
        if slices := self.slices():
            self.messages.append((self.region, self.offer(slices[n % len(slices)], 3_000_000 if n % 2 else 100_000)))

    def offer(self, key: str, ttl: int = 3_000_000) -> Accept:
        """Addressed to the region as the issuer knows it: the outstanding amount, with a term from the request."""
        grant, name = self.g.row(key), key.removeprefix("grant/")
        kept, serial = Amount(outstanding(grant)), grant.get("status", {}).get("serial", 1)
        spec = GrantSpec(holder="scope/r1", issuer="scope/global", amount=kept, tenant="t1", ttl=Duration(ttl))
        return Accept(name, spec, serial, self.g.clock.at_ms, incarnation(self.g), accepted_incarnation(self.g, "scope/r1"))

    @rule()
    def declare_unknown_scope_lost(self) -> None:
        self.ask(OPERATOR, DeclareLost("scope/r9"), scope=self.g)

    # -- accepting incarnations ----------------------------------------------------------------------------------------

    @rule(n=NUMBER)
    def post_incarnation(self, n: int) -> None:
        """The answer may be used late."""
        scope, other = (self.g, self.region) if n % 2 else (self.region, self.g)
        self.messages.append((scope, self.incarnation_claim(scope, other)))

    @rule(n=NUMBER)
    def accept_incarnation(self, n: int) -> None:
        scope, other = (self.g, self.region) if n % 2 else (self.region, self.g)
        self.ask(scope.actors["budgets"], self.incarnation_claim(scope, other), scope=scope)

    @rule(n=NUMBER)
    def accept_and_renew(self, n: int) -> None:
        """As after a restore, without delay, while earlier messages are still in flight."""
        for scope, other in ((self.g, self.region), (self.region, self.g)):
            self.ask(scope.actors["budgets"], self.incarnation_claim(scope, other), scope=scope)
        self.ask(self.g.actors["budgets"], self.confirmation(), scope=self.g)
        for key in self.slices()[n % 2 :]:
            self.ask(self.region.actors["budgets"], self.offer(key), scope=self.region)

    def incarnation_claim(self, scope: Scope, other: Scope) -> AcceptIncarnation:
        """Reads the own record first, then the peer's incarnation."""
        peer = f"scope/{other.name}"
        known = accepted_incarnation(scope, peer)
        return AcceptIncarnation(peer, incarnation(other), known)

    # -- messages ----------------------------------------------------------------------------------------------------

    @rule(n=NUMBER)
    def round_trip_slice(self, n: int) -> None:
        """Messages arrive at once, except every other report; all of them may arrive again."""
        self.issue_slice(n=n)
        if slices := self.slices():
            key = slices[n % len(slices)]
            self.messages.append((self.region, self.offer(key)))
            self.ask(self.region.actors["budgets"], self.messages[-1][1], scope=self.region)
            if n % 2 and key in self.held() and self.region.phase(key) != "void":
                give = ReturnCapacity(key.removeprefix("grant/"), amounts(cpu=n % 3 + 1))
                self.ask(self.region.actors["budgets"], give, scope=self.region)
                self.messages.append((self.g, self.report(key)))
                if n % 4 == 1:
                    self.ask(self.g.actors["budgets"], self.messages[-1][1], scope=self.g)

    @rule(n=NUMBER)
    def deliver_message(self, n: int) -> None:
        """Any message in flight; some are delivered again later."""
        if self.messages:
            at = n % len(self.messages)
            scope, claim = self.messages[at] if n % 3 == 0 else self.messages.pop(at)
            self.ask(scope.actors["budgets"], claim, scope=scope)

    @rule(n=NUMBER)
    def deliver_many_messages(self, n: int) -> None:
        """Outdated messages are the dangerous ones."""
        at = n % (len(self.messages) or 1)
        for scope, claim in [*self.messages[at:], *self.messages[:at]][:16]:
            self.ask(scope.actors["budgets"], claim, scope=scope)

    @rule(n=NUMBER)
    def lose_message(self, n: int) -> None:
        if self.messages:
            self.messages.pop(n % len(self.messages))

    # -- the region --------------------------------------------------------------------------------------------------

    @rule(n=NUMBER)
    def post_report(self, n: int) -> None:
        if known := [key for key in self.held() if self.region.phase(key) != "void"]:
            self.messages.append((self.g, self.report(known[n % len(known)])))

    def report(self, key: str) -> Credit:
        grant, name, epoch = self.region.row(key), key.removeprefix("grant/"), self.region.row("head")["epoch"]
        status, remaining = grant.get("status", {}), Amount.parse(grant["spec"]["amount"])
        own, known = incarnation(self.region), accepted_incarnation(self.region, "scope/global")
        return Credit(name, epoch, status.get("report", 0), remaining, own, known, status.get("phase") == "closed")

    @rule(n=NUMBER)
    def draw_in_region(self, n: int) -> None:
        waiting = [key for key, r in of_kind(self.region.checker.rows, "replica") if phase_of(r) == "pending"]
        names = [key.removeprefix("grant/") for key, _ in of_kind(self.region.checker.rows, "grant")]
        if waiting and names:
            key = waiting[n % len(waiting)]
            claim = Bind(key, self.region.at(key), f"n{n % 2 + 1}", names[n % len(names)])
            self.ask(self.region.actors["scheduler"], claim, scope=self.region)

    @rule(n=NUMBER)
    def release_in_region(self, n: int) -> None:
        """One step towards release, by its owner."""
        going = self.releasing()
        for key in going[n % (len(going) or 1) :][:3]:
            actor, move = self.release_step(key)
            self.ask(actor, move, scope=self.region)

    def releasing(self) -> list[str]:
        return [key for key, r in of_kind(self.region.checker.rows, "replica") if phase_of(r) in RELEASE_STEPS]

    def release_step(self, key: str) -> tuple[Actor, Move]:
        """The next step towards release, and its owner."""
        status = self.region.row(key)["status"]
        transition, lease = RELEASE_STEPS[status["phase"]]
        actor = self.region.actors[lease or f"agent/{status['node']}"]
        result = "ok" if transition == "stopped" else ""
        return actor, Move(key, self.region.at(key), transition, status.get("attempt", 1), result)

    @rule(n=NUMBER)
    def return_capacity(self, n: int) -> None:
        if held := self.held():
            name = held[n % len(held)].removeprefix("grant/")
            self.ask(self.region.actors["budgets"], ReturnCapacity(name, amounts(cpu=n % 3 + 1)), scope=self.region)
            self.post_report(n=n)

    @rule(n=NUMBER)
    def pass_on_grant(self, n: int) -> None:
        if held := self.held():
            parent = held[n % len(held)].removeprefix("grant/")
            spec = GrantSpec(holder="scheduler", amount=amounts(cpu=1), parent=parent, tenant="t1", ttl=Duration(100_000))
            self.ask(self.region.actors["budgets"], Issue(f"x{n % 3}", spec), scope=self.region)

    @rule(n=NUMBER)
    def close_grant(self, n: int) -> None:
        scope = self.g if n % 3 == 0 else self.region
        if grants := [key.removeprefix("grant/") for key, _ in of_kind(scope.checker.rows, "grant")]:
            self.ask(scope.actors["budgets"], Close(grants[n % len(grants)]), scope=scope)

    @rule(n=NUMBER)
    def post_confirmation(self, n: int) -> None:
        """Needed after a restore of the global scope."""
        self.messages.append((self.g, self.confirmation()))

    def confirmation(self) -> ConfirmHoldings:
        """All holdings of the region from the global scope, by its own rows."""
        grants = {}
        for key in self.held():
            grant = self.region.row(key)
            kept = Amount.parse(grant["spec"]["amount"])
            if kept:
                ttl = Duration.parse(grant["spec"]["ttl"])
                spec = GrantSpec(holder="scope/r1", amount=kept, parent="tenant/t1", tenant="t1", ttl=ttl)
                grants[key.removeprefix("grant/")] = spec
        own, known = incarnation(self.region), accepted_incarnation(self.region, "scope/global")
        return ConfirmHoldings("scope/r1", self.region.row("head")["epoch"], grants, own, known)

    # -- liveness ------------------------------------------------------------------------------------------------------

    @rule()
    def stop_faults_and_return_everything(self) -> None:
        """Liveness: without faults, everything is returned in full once both scopes have accepted and confirmed."""
        for scope in self.scopes():
            scope.store.plan.clear()
            scope.store.reads.clear()
            self.do(self._at_work(scope))
        self.do(self._meet())
        self.do(self._return_everything())
        self.do(self._grant_everything())
        REACHED.count("everything returned")

    async def _at_work(self, scope: Scope) -> None:
        await self.ensure_leader(scope)
        for lease, actor in list(scope.actors.items()):
            if not await scope.lead.authority.renew(actor):
                await scope.must(Actor(actor.name, actor.role), Acquire(lease, HOUR))

    async def _meet(self) -> None:
        """Accept incarnations; confirm or declare lost where awaited; renew every slice or offer it again."""
        g, region = self.g, self.region
        await g.must(g.actors["budgets"], self.incarnation_claim(g, region))
        await region.must(region.actors["budgets"], self.incarnation_claim(region, g))
        await g.must(OPERATOR, DeclareLost("scope/r9"))
        if awaited(g, "scope/r1"):
            await g.must(g.actors["budgets"], self.confirmation())
        if awaited(region, "scope/global"):
            nothing = ConfirmHoldings(
                "scope/global", g.row("head")["epoch"], {}, incarnation(g), accepted_incarnation(g, "scope/r1")
            )
            await region.must(region.actors["budgets"], nothing)
        for key in self.slices():
            void = key not in region.checker.rows or region.phase(key) == "void"
            ended = "closed" in (g.phase(key), "" if void else region.phase(key))
            if not ended:
                await g.must(g.actors["budgets"], Renew(key.removeprefix("grant/")))
            if void or not ended:
                await region.must(region.actors["budgets"], self.offer(key))

    async def _return_everything(self) -> None:
        g, region = self.g, self.region
        for _ in range(8):
            for key in self.releasing():
                await region.must(*self.release_step(key))
        children = [key for key, grant in of_kind(region.checker.rows, "grant") if not grant["spec"].get("issuer")]
        for key in [*children, *self.held()]:
            await region.must(region.actors["budgets"], Close(key.removeprefix("grant/")))
        for key in self.slices():
            await g.must(g.actors["budgets"], self.report(key), Close(key.removeprefix("grant/")))
        assert not self.slices() and not g.books.grants["tenant/t1"].granted_on, "capacity was lost"

    async def _grant_everything(self) -> None:
        """Grant the whole quota as one new slice, draw on it, and return it."""
        self.rounds += 1
        g, region, name = self.g, self.region, f"whole{self.rounds}"
        await g.must(g.actors["budgets"], Issue(name, slice_of(10)))
        await region.must(region.actors["budgets"], self.offer(f"grant/{name}"))
        key = next(key for key, r in of_kind(region.checker.rows, "replica") if phase_of(r) == "pending")
        await region.must(region.actors["scheduler"], Bind(key, region.at(key), "n1", name))
        while phase_of(region.row(key)) != "pending":
            await region.must(*self.release_step(key))
        await region.must(region.actors["budgets"], ReturnCapacity(name, amounts(cpu=10)))
        await g.must(g.actors["budgets"], self.report(f"grant/{name}"))
        assert not g.books.grants["tenant/t1"].granted_on
        await region.must(region.actors["budgets"], Close(name))
        await g.must(g.actors["budgets"], self.report(f"grant/{name}"), Close(name))

    # -- invariants ----------------------------------------------------------------------------------------------------

    @invariant()
    def no_capacity_is_held_twice(self) -> None:
        """Invariant 4 between scopes: the holder never has more than its issuer has debited."""
        if not hasattr(self, "g"):
            return
        if awaited(self.g, "scope/r1"):
            return  # restored and not confirmed yet: nothing is granted meanwhile
        for key, why in compare_scopes(self.g.checker.rows, self.region.checker.rows, "r1"):
            both = [scope.judged.judge.story(scope.name, key) for scope in (self.g, self.region)]
            raise Violated("\n".join([why, *both]))


def incarnation(scope: Scope) -> str:
    return str(scope.row("head")["incarnation"])


def accepted_incarnation(scope: Scope, peer: str) -> str:
    """The accepted incarnation of a peer, empty if none."""
    row = scope.checker.rows.get(f"peer/{peer}")
    return "" if row is None else str(row[1]["spec"].get("incarnation", ""))


def awaited(scope: Scope, peer: str) -> bool:
    row = scope.checker.rows.get(f"peer/{peer}")
    return row is not None and row[1]["spec"].get("standing") == "awaited"


def test_capacity_granted_between_scopes_is_never_held_twice() -> None:
    """F01 F10 F15 F20 F43: lost, late and repeated messages, lost answers, takeovers and restores on either side."""
    run_state_machine_as_test(GrantsMachine, settings=tries(60, 150))
    REACHED.write()


def test_pending_reissue_does_not_restore_returned_capacity() -> None:
    """F10 F43: a restored region returns capacity of its backup while the slice is being reissued to it."""

    async def scenario(m: GrantsMachine) -> None:
        issuer, region = m.g, m.region
        await issuer.must(issuer.actors["budgets"], Issue("s", slice_of(4)))
        await region.must(region.actors["budgets"], m.offer("grant/s"))
        await region.restore(await region.store.inner.backup())
        await region.take_over()
        await issuer.must(issuer.actors["budgets"], m.incarnation_claim(issuer, region), Renew("s"))
        reissue = m.offer("grant/s")
        assert await region.refused(region.actors["budgets"], ReturnCapacity("s", amounts(cpu=4))) is Code.GRANT_VOID
        await region.must(region.actors["budgets"], reissue)
        assert Amount.parse(region.row("grant/s")["spec"]["amount"]) == amounts(cpu=4)

    run_scenario(scenario)


def slice_of(cpu: int) -> GrantSpec:
    return GrantSpec(holder="scope/r1", amount=amounts(cpu=cpu), parent="tenant/t1", tenant="t1", ttl=Duration(3_000_000))


def run_scenario(scenario: Callable[[GrantsMachine], Coroutine[Any, Any, None]]) -> None:
    """Run a short scenario of two scopes with the machine's messages; then no capacity may be held twice."""
    machine = GrantsMachine()
    try:
        machine.do(machine._set_up())
        machine.do(machine._accept_each_other())
        machine.do(scenario(machine))
        machine.no_capacity_is_held_twice()
    finally:
        machine.batches.stop()
        for scope in machine.scopes():
            machine.do(scope.close())
        machine.loop.close()


def test_close_from_backup_keeps_no_capacity_already_returned() -> None:
    """F10 F43: drawn at the backup, then released, returned and reported. Found by the soak."""

    async def scenario(m: GrantsMachine) -> None:
        issuer, region, key = m.g, m.region, "replica/t1/w-0"
        await issuer.must(issuer.actors["budgets"], Issue("s", slice_of(2)))
        await region.must(region.actors["budgets"], m.offer("grant/s"))
        await region.must(region.actors["scheduler"], Bind(key, region.at(key), "n1", "s"))
        backup = await region.store.inner.backup()
        while phase_of(region.row(key)) != "pending":
            await region.must(*m.release_step(key))
        await region.must(region.actors["budgets"], ReturnCapacity("s", amounts(cpu=2)))
        await issuer.must(issuer.actors["budgets"], m.report("grant/s"))
        await region.restore(backup)
        await region.take_over()
        assert await region.refused(region.actors["budgets"], Close("s")) is Code.GRANT_VOID
        m.no_capacity_is_held_twice()
        await issuer.must(issuer.actors["budgets"], m.incarnation_claim(issuer, region))
        await region.must(region.actors["budgets"], m.offer("grant/s"), Close("s"))

    run_scenario(scenario)
