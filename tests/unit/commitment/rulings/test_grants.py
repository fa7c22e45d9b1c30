"""Is what was granted ever in two hands, or past its time in any? Terms, takeovers, restores, reports."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from remit.model.claims import Apply, Bind, Close, Code, DeclareLost, Issue, Renew, Report, ReturnCapacity
from remit.model.kinds import Region
from remit.model.metadata import Metadata
from remit.model.records import GrantSpec, SummarySpec
from remit.model.resources import Amount, Duration
from tests.properties.authority_world import HOUR, OPERATOR, USER, Scope, amounts, story
from tests.unit.commitment.authority_fixture import T1, bind, credit, meets, move, offer, slice_of, spawned, vouch

MINUTE = Duration(60_000)


async def accepted(scope: Scope, cpu: str = "2", ttl: Duration = MINUTE, serial: int = 1) -> None:
    await meets(scope, "scope/global")
    await scope.must(scope.actors["budgets"], offer(scope, cpu, serial, ttl))


def drawing(scope: Scope, key: str, grant: str) -> Bind:
    return Bind(key, scope.at(key), "n1", grant)


@story
async def test_a_child_is_issued_and_renewed_no_longer_than_its_parent_lasts(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    await scope.must(budgets, Issue("parent", slice_of("4", "scheduler", Duration(100_000))))
    await scope.must(budgets, Issue("child", slice_of("2", "scheduler", Duration(900_000), "parent")))
    assert scope.row("grant/child")["status"]["deadline"] == scope.row("grant/parent")["status"]["deadline"]
    scope.clock.at_ms += 50_000
    await scope.must(budgets, Renew("child"))
    assert scope.row("grant/child")["status"]["deadline"] == scope.row("grant/parent")["status"]["deadline"]
    scope.clock.at_ms += 50_000
    assert await scope.refused(budgets, Renew("child")) is Code.GRANT_EXPIRED
    await scope.must(budgets, Renew("parent"), Renew("child"))


@story
async def test_a_draw_looks_up_the_whole_chain(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    await scope.must(budgets, Issue("parent", slice_of("4", "scheduler", MINUTE)))
    await scope.must(budgets, Issue("child", slice_of("2", "scheduler", MINUTE, "parent")))
    a, b = await spawned(scope, "w", 2)
    await scope.must(scope.actors["scheduler"], drawing(scope, a, "child"))
    await scope.must(budgets, Close("parent"))
    assert await scope.refused(scope.actors["scheduler"], drawing(scope, b, "child")) is Code.GRANT_VOID
    assert scope.books.grants["parent"].granted_on, "what was drawn stays charged, up the whole chain"


@story
async def test_a_held_grant_goes_on_through_a_takeover_on_the_same_boot(scope: Scope) -> None:
    await accepted(scope)
    (key,) = await spawned(scope, "w")
    scope.clock.at_ms += 59_999
    await scope.take_over()
    await scope.must(scope.actors["scheduler"], drawing(scope, key, "s"))


@story
async def test_a_held_grant_keeps_its_instant_through_a_takeover_and_gets_no_new_term(scope: Scope) -> None:
    await accepted(scope)
    (key,) = await spawned(scope, "w")
    scope.clock.at_ms += 59_999
    await scope.take_over()
    scope.clock.at_ms += 1
    assert await scope.refused(scope.actors["scheduler"], drawing(scope, key, "s")) is Code.GRANT_EXPIRED


@story
async def test_a_held_grant_has_lapsed_on_another_boot_until_it_is_renewed(scope: Scope) -> None:
    """F17: instants of two boots cannot be compared, so nothing is left of it."""
    await accepted(scope)
    (key,) = await spawned(scope, "w")
    scope.clock.on = "boot-2"
    await scope.take_over()
    assert await scope.refused(scope.actors["scheduler"], drawing(scope, key, "s")) is Code.GRANT_EXPIRED
    await accepted(scope, serial=2)
    await scope.must(scope.actors["scheduler"], drawing(scope, key, "s"))


@story
async def test_a_serial_is_taken_up_once(scope: Scope) -> None:
    await accepted(scope)
    await scope.must(scope.actors["budgets"], ReturnCapacity("s", amounts(cpu="1")))
    with pytest.raises(AssertionError, match="revision"):
        await accepted(scope)
    await accepted(scope, serial=2)
    assert scope.row("grant/s")["spec"]["amount"] == {"cpu": "1"}, "a renewal brings time, not what was given back"


@story
async def test_held_grants_are_void_after_a_restore_until_they_are_reissued_to_the_new_incarnation(scope: Scope) -> None:
    """F10"""
    await accepted(scope)
    (key,) = await spawned(scope, "w")
    late = replace(offer(scope), serial=2)
    await scope.restore(await scope.store.inner.backup())
    await scope.take_over()
    scheduler = scope.actors["scheduler"]
    assert await scope.refused(scheduler, drawing(scope, key, "s")) is Code.GRANT_VOID
    assert await scope.refused(scope.actors["budgets"], late) is Code.GRANT_VOID, "made out to the incarnation that ended"
    await accepted(scope, serial=2)
    await scope.must(scheduler, drawing(scope, key, "s"))


@story
async def test_what_was_lent_counts_as_used_after_a_restore_and_nothing_more_is_lent_until_all_have_said(scope: Scope) -> None:
    """F10: there may be grants that the backup does not even know."""
    budgets = scope.actors["budgets"]
    await scope.must(OPERATOR, Apply(Region(metadata=Metadata(name="r2"))))
    await meets(scope, "scope/r2")
    await scope.must(budgets, Issue("s", slice_of("4")))
    await scope.must(budgets, credit(scope, 1, "1"))
    backup = await scope.store.inner.backup()
    await scope.must(budgets, Issue("unknown", slice_of("3")))
    await scope.restore(backup)
    await scope.take_over()
    budgets = scope.actors["budgets"]
    assert scope.books.grants[T1].granted_on == {"cpu": 4000}, "in full, whatever was reported before"
    assert await scope.refused(budgets, Issue("more", slice_of("1"))) is Code.AWAITING_REPORTS
    assert await scope.refused(budgets, Issue("here", slice_of("1", "scheduler"))) is Code.AWAITING_REPORTS, "nor here"
    (key,) = await spawned(scope, "w")
    assert await scope.refused(scope.actors["scheduler"], drawing(scope, key, T1)) is Code.AWAITING_REPORTS
    await scope.must(budgets, vouch(scope, s="1", unknown="3"))
    assert scope.books.grants[T1].granted_on == {"cpu": 7000}, (
        "what was unknown is written off; what was known still is, in full"
    )
    await scope.must(budgets, credit(scope, 1, "1", epoch=7))
    assert scope.books.grants[T1].granted_on == {"cpu": 4000}, "it comes back by the holder's report, sent again"
    await scope.must(budgets, Issue("more", slice_of("1")))
    await bind(scope, key)
    assert await scope.refused(budgets, vouch(scope)) is Code.EXISTS, "each vouches once"


@story
async def test_who_was_only_declared_holds_up_no_work_here(scope: Scope) -> None:
    """A region that this scope has never dealt with holds nothing of it; lending waits for its word all the same."""
    await scope.must(OPERATOR, Apply(Region(metadata=Metadata(name="r2"))))
    (key,) = await spawned(scope, "w")
    await scope.restore(await scope.store.inner.backup())
    await scope.take_over()
    assert await scope.refused(scope.actors["budgets"], Issue("s", slice_of("1"))) is Code.AWAITING_REPORTS
    await bind(scope, key)


@story
async def test_a_scope_that_was_never_restored_knows_what_it_has_lent(scope: Scope) -> None:
    await meets(scope, "scope/r2")
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("2")))
    assert await scope.refused(scope.actors["budgets"], vouch(scope, new="1")) is Code.NOT_FOUND
    assert await scope.refused(scope.actors["budgets"], vouch(scope, s="3")) is Code.NOT_FOUND
    await scope.must(scope.actors["budgets"], vouch(scope, s="2"))
    assert scope.books.grants[T1].granted_on == {"cpu": 2000}


@story
async def test_nobody_has_less_than_nothing_left(scope: Scope) -> None:
    await meets(scope, "scope/r2")
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("2")))
    claim = replace(credit(scope, 1, "1"), remaining=Amount({"cpu": -1000}))
    assert await scope.refused(scope.actors["budgets"], claim) is Code.INVALID


@story
async def test_quota_is_carved_out_of_quota_alone(scope: Scope) -> None:
    """Draws on an offer are charged to the tenant's quota as well, and those on a budget to its share; on a slice to nothing
    else. So a slice of an offer or a budget would be quota that nobody has granted.
    """
    budgets, scheduler = scope.actors["budgets"], scope.actors["scheduler"]
    offered = GrantSpec(holder="scheduler", amount=amounts(cpu=100), tenant="t1", purpose="offer", ttl=HOUR)
    share = {"t1": amounts(cpu=1)}
    budget = GrantSpec(holder="scheduler", amount=amounts(cpu=100), tenant="t1", purpose="budget", shares=share, ttl=HOUR)
    await scope.must(budgets, Issue("offer", offered), Issue("budget", budget), Issue("slice", slice_of("4", "scheduler")))
    for actor, parent in ((scheduler, "offer"), (budgets, "budget")):
        code = await scope.refused(actor, Issue("quota", slice_of("20", "scheduler", parent=parent)))
        assert code is Code.INVALID, parent
    emergency = slice_of("1", "scheduler", parent="tenant/t1/emergency")
    assert await scope.refused(budgets, Issue("quota", emergency)) is Code.NOT_FOUND
    await scope.must(scheduler, Issue("quota", slice_of("2", "scheduler", parent="slice")))


@story
async def test_a_draw_on_an_offer_is_charged_to_the_slice_that_is_held_here(scope: Scope) -> None:
    """Where a slice is held is not the tenant's home: the quota that stands there is for declaring work, and may be nothing."""
    await accepted(scope, "4", ttl=HOUR)
    offered = GrantSpec(holder="scheduler", amount=amounts(cpu=2), tenant="t1", purpose="offer", ttl=HOUR)
    await scope.must(scope.actors["budgets"], Issue("offer", offered))
    a, b = await spawned(scope, "w", 2)
    await bind(scope, a, grant="offer")
    assert scope.row(a)["status"]["grants"] == ["offer", "s"]
    await scope.must(scope.actors["budgets"], ReturnCapacity("s", amounts(cpu="3")))
    assert await scope.refused(scope.actors["scheduler"], drawing(scope, b, "offer")) is Code.OVER_QUOTA


@story
async def test_a_lost_holder_is_waited_for_until_an_operator_declares_it_lost(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(Region(metadata=Metadata(name="r2"))))
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("4")))
    await scope.restore(await scope.store.inner.backup())
    await scope.take_over()
    assert await scope.must(OPERATOR, DeclareLost("scope/r2")) == [1]
    assert not scope.books.grants[T1].granted_on
    await scope.must(scope.actors["budgets"], Issue("more", slice_of("1", "scope/r3")))


@story
async def test_what_is_void_is_not_given_back_before_it_is_known_again(scope: Scope) -> None:
    """F10 F43: else the reissue that is under way would bring again what was just given back."""
    await accepted(scope)
    await scope.restore(await scope.store.inner.backup())
    await scope.take_over()
    budgets = scope.actors["budgets"]
    assert await scope.refused(budgets, ReturnCapacity("s", amounts(cpu="2"))) is Code.GRANT_VOID
    await accepted(scope, serial=2)
    await scope.must(budgets, ReturnCapacity("s", amounts(cpu="2")))


@story
async def test_nobody_forges_the_record_of_who_is_awaited(scope: Scope) -> None:
    forged = Report("awaited/node/n1", SummarySpec(holder="node/n1", epoch=0, sequence=0))
    assert await scope.refused(USER, forged) is Code.NOT_OWNER


@story
async def test_reports_count_in_any_order_and_none_takes_back_what_was_given(scope: Scope) -> None:
    """F43: debit before credit; what came back may have been granted on since."""
    budgets = scope.actors["budgets"]
    await meets(scope, "scope/r2")
    await scope.must(budgets, Issue("s", slice_of("10")))
    await scope.must(budgets, credit(scope, 2, "2"))
    await scope.must(budgets, credit(scope, 1, "5"))
    assert scope.books.grants[T1].granted_on == {"cpu": 2000}
    await scope.must(budgets, Issue("t", slice_of("14")))
    assert await scope.refused(budgets, credit(scope, 3, "10")) is Code.INVALID


@story
async def test_silence_and_expiry_give_nothing_back(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    await scope.must(budgets, Issue("s", slice_of("4", ttl=Duration(1_000))))
    assert await scope.refused(budgets, Close("s")) is Code.NOT_OWNER
    scope.clock.at_ms += 2_000
    assert await scope.refused(budgets, Close("s")) is Code.AWAITING_REPORTS
    assert scope.books.grants[T1].granted_on == {"cpu": 4000}
    await meets(scope, "scope/r2")
    await scope.must(budgets, credit(scope, 1), Close("s"))
    assert not scope.books.grants[T1].granted_on and "grant/s" not in scope.checker.rows


@story
async def test_closing_returns_what_is_not_drawn_and_the_rest_once_it_is_released(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    await scope.must(budgets, Issue("offer", slice_of("4", "scheduler")))
    (key,) = await spawned(scope, "w")
    await bind(scope, key, grant="offer")
    await scope.must(budgets, Close("offer"))
    assert scope.books.grants[T1].granted_on == {"cpu": 1000}
    await move(scope, key, "remove", "stop", "stopped")
    await scope.must(budgets, Close("offer"))
    assert not scope.books.grants[T1].granted_on and "grant/offer" not in scope.checker.rows


@story
async def test_closing_again_what_is_still_drawn_on_writes_nothing(scope: Scope) -> None:
    """F32: each row written is news to every watcher, and news is what repair asks again upon."""
    budgets = scope.actors["budgets"]
    await scope.must(budgets, Issue("offer", slice_of("4", "scheduler")))
    (key,) = await spawned(scope, "w")
    await bind(scope, key, grant="offer")
    await scope.must(budgets, Close("offer"))
    before = scope.checker.rows["grant/offer"]
    await scope.must(budgets, Close("offer"))
    assert scope.checker.rows["grant/offer"] == before


@story
async def test_a_budget_caps_each_tenant_inside_it_and_charges_its_emergency_quota(scope: Scope) -> None:
    spec = GrantSpec(
        holder="scheduler", amount=amounts(cpu="3"), shares={"t1": amounts(cpu="1")}, purpose="budget", ttl=Duration(60_000)
    )
    await scope.must(scope.actors["budgets"], Issue("recovery", spec))
    assert scope.books.grants["tenant/t1/emergency"].granted_on == {"cpu": 1000}
    a, b = await spawned(scope, "w", 2)
    await bind(scope, a, grant="recovery")
    assert await scope.refused(scope.actors["scheduler"], drawing(scope, b, "recovery")) is Code.GRANT_SHORT
    more = GrantSpec(
        holder="x", amount=amounts(cpu="3"), shares={"t1": amounts(cpu="2")}, purpose="budget", ttl=Duration(60_000)
    )
    assert await scope.refused(scope.actors["budgets"], Issue("more", more)) is Code.GRANT_SHORT


@story
async def test_an_offer_on_its_way_is_not_undercut_by_what_its_holder_vouches_for(scope: Scope) -> None:
    """F10: both sides were restored; the holder remembers less than it is being offered anew."""
    budgets = scope.actors["budgets"]
    await scope.must(OPERATOR, Apply(Region(metadata=Metadata(name="r2"))))
    await scope.must(budgets, Issue("s", slice_of("4")))
    await scope.restore(await scope.store.inner.backup())
    await scope.take_over()
    budgets = scope.actors["budgets"]
    await meets(scope, "scope/r2")
    await scope.must(budgets, vouch(scope, s="3"))
    assert scope.books.grants[T1].granted_on == {"cpu": 4000}, "the offer of 4 may still be taken up"
