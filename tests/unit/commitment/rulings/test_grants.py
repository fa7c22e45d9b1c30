"""Grants across renewals, takeovers, restores and reports: never held twice, never used past the deadline."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from remit.model.claims import Apply, Bind, Close, Code, DeclareLost, Issue, Renew, Report, ReturnCapacity
from remit.model.kinds import Region
from remit.model.metadata import Metadata
from remit.model.records import GrantSpec, SummarySpec
from remit.model.resources import Amount, Duration
from tests.properties.authority_world import HOUR, OPERATOR, USER, Scope, amounts, scope_test
from tests.unit.commitment.authority_fixture import (
    T1,
    accept_peer,
    bind,
    commit_transitions,
    confirm_holdings,
    credit,
    offer,
    slice_of,
    spawn_replicas,
)

MINUTE = Duration(60_000)


async def accept_grant(scope: Scope, cpu: str = "2", ttl: Duration = MINUTE, serial: int = 1) -> None:
    await accept_peer(scope, "scope/global")
    await scope.must(scope.actors["budgets"], offer(scope, cpu, serial, ttl))


def bind_claim(scope: Scope, key: str, grant: str) -> Bind:
    return Bind(key, scope.at(key), "n1", grant)


@scope_test
async def test_child_grant_deadline_is_capped_by_parent(scope: Scope) -> None:
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


@scope_test
async def test_draw_checks_whole_parent_chain(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    await scope.must(budgets, Issue("parent", slice_of("4", "scheduler", MINUTE)))
    await scope.must(budgets, Issue("child", slice_of("2", "scheduler", MINUTE, "parent")))
    a, b = await spawn_replicas(scope, "w", 2)
    await scope.must(scope.actors["scheduler"], bind_claim(scope, a, "child"))
    await scope.must(budgets, Close("parent"))
    assert await scope.refused(scope.actors["scheduler"], bind_claim(scope, b, "child")) is Code.GRANT_VOID
    assert scope.books.grants["parent"].granted_on, "existing draws stay charged on the whole chain"


@scope_test
async def test_accepted_grant_survives_takeover_on_same_boot(scope: Scope) -> None:
    await accept_grant(scope)
    (key,) = await spawn_replicas(scope, "w")
    scope.clock.at_ms += 59_999
    await scope.take_over()
    await scope.must(scope.actors["scheduler"], bind_claim(scope, key, "s"))
    assert scope.row(key)["status"]["grants"] == ["s"]


@scope_test
async def test_takeover_does_not_extend_accepted_grant(scope: Scope) -> None:
    await accept_grant(scope)
    (key,) = await spawn_replicas(scope, "w")
    scope.clock.at_ms += 59_999
    await scope.take_over()
    scope.clock.at_ms += 1
    assert await scope.refused(scope.actors["scheduler"], bind_claim(scope, key, "s")) is Code.GRANT_EXPIRED


@scope_test
async def test_accepted_grant_expires_on_new_boot_until_renewed(scope: Scope) -> None:
    """F17: times of two boots cannot be compared, so the remaining term is zero."""
    await accept_grant(scope)
    (key,) = await spawn_replicas(scope, "w")
    scope.clock.on = "boot-2"
    await scope.take_over()
    assert await scope.refused(scope.actors["scheduler"], bind_claim(scope, key, "s")) is Code.GRANT_EXPIRED
    await accept_grant(scope, serial=2)
    await scope.must(scope.actors["scheduler"], bind_claim(scope, key, "s"))


@scope_test
async def test_grant_serial_is_accepted_once(scope: Scope) -> None:
    await accept_grant(scope)
    await scope.must(scope.actors["budgets"], ReturnCapacity("s", amounts(cpu="1")))
    with pytest.raises(AssertionError, match="revision"):
        await accept_grant(scope)
    await accept_grant(scope, serial=2)
    assert scope.row("grant/s")["spec"]["amount"] == {"cpu": "1"}, "a renewal extends time, not the returned amount"


@scope_test
async def test_accepted_grants_are_void_after_restore_until_reissued(scope: Scope) -> None:
    """F10"""
    await accept_grant(scope)
    (key,) = await spawn_replicas(scope, "w")
    late = replace(offer(scope), serial=2)
    await scope.restore(await scope.store.inner.backup())
    await scope.take_over()
    scheduler = scope.actors["scheduler"]
    assert await scope.refused(scheduler, bind_claim(scope, key, "s")) is Code.GRANT_VOID
    assert await scope.refused(scope.actors["budgets"], late) is Code.GRANT_VOID, "issued to the previous incarnation"
    await accept_grant(scope, serial=2)
    await scope.must(scheduler, bind_claim(scope, key, "s"))


@scope_test
async def test_restored_issuer_counts_grants_in_full_until_all_holders_confirm(scope: Scope) -> None:
    """F10: grants issued after the backup are unknown to it."""
    budgets = scope.actors["budgets"]
    await scope.must(OPERATOR, Apply(Region(metadata=Metadata(name="r2"))))
    await accept_peer(scope, "scope/r2")
    await scope.must(budgets, Issue("s", slice_of("4")))
    await scope.must(budgets, credit(scope, 1, "1"))
    backup = await scope.store.inner.backup()
    await scope.must(budgets, Issue("unknown", slice_of("3")))
    await scope.restore(backup)
    await scope.take_over()
    budgets = scope.actors["budgets"]
    assert scope.books.grants[T1].granted_on == {"cpu": 4000}, "in full, despite the report before the backup"
    assert await scope.refused(budgets, Issue("more", slice_of("1"))) is Code.AWAITING_REPORTS
    assert await scope.refused(budgets, Issue("here", slice_of("1", "scheduler"))) is Code.AWAITING_REPORTS, "nor locally"
    (key,) = await spawn_replicas(scope, "w")
    assert await scope.refused(scope.actors["scheduler"], bind_claim(scope, key, T1)) is Code.AWAITING_REPORTS
    await scope.must(budgets, confirm_holdings(scope, s="1", unknown="3"))
    assert scope.books.grants[T1].granted_on == {"cpu": 7000}, "unknown and known grants are both charged in full"
    await scope.must(budgets, credit(scope, 1, "1", epoch=7))
    assert scope.books.grants[T1].granted_on == {"cpu": 4000}, "the holder's repeated report returns capacity"
    await scope.must(budgets, Issue("more", slice_of("1")))
    await bind(scope, key)
    assert await scope.refused(budgets, confirm_holdings(scope)) is Code.EXISTS, "each holder confirms once"


@scope_test
async def test_declared_region_without_grants_does_not_block_binding(scope: Scope) -> None:
    """A region without contact holds nothing of this scope; issuing waits for its confirmation all the same."""
    await scope.must(OPERATOR, Apply(Region(metadata=Metadata(name="r2"))))
    (key,) = await spawn_replicas(scope, "w")
    await scope.restore(await scope.store.inner.backup())
    await scope.take_over()
    assert await scope.refused(scope.actors["budgets"], Issue("s", slice_of("1"))) is Code.AWAITING_REPORTS
    await bind(scope, key)


@scope_test
async def test_unrestored_scope_refuses_unknown_or_larger_holdings(scope: Scope) -> None:
    await accept_peer(scope, "scope/r2")
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("2")))
    assert await scope.refused(scope.actors["budgets"], confirm_holdings(scope, new="1")) is Code.NOT_FOUND
    assert await scope.refused(scope.actors["budgets"], confirm_holdings(scope, s="3")) is Code.NOT_FOUND
    await scope.must(scope.actors["budgets"], confirm_holdings(scope, s="2"))
    assert scope.books.grants[T1].granted_on == {"cpu": 2000}


@scope_test
async def test_report_of_negative_remainder_is_refused(scope: Scope) -> None:
    await accept_peer(scope, "scope/r2")
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("2")))
    claim = replace(credit(scope, 1, "1"), remaining=Amount({"cpu": -1000}))
    assert await scope.refused(scope.actors["budgets"], claim) is Code.INVALID


@scope_test
async def test_grant_of_quota_needs_quota_as_parent(scope: Scope) -> None:
    """A draw on an offer or budget is also charged to quota or share; a draw on a slice is charged to nothing else.

    So a slice of an offer or of a budget would create quota that was never granted.
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


@scope_test
async def test_draw_on_offer_is_charged_to_accepted_slice(scope: Scope) -> None:
    """The scope that holds the slice is not the tenant's home, whose local quota may be zero."""
    await accept_grant(scope, "4", ttl=HOUR)
    offered = GrantSpec(holder="scheduler", amount=amounts(cpu=2), tenant="t1", purpose="offer", ttl=HOUR)
    await scope.must(scope.actors["budgets"], Issue("offer", offered))
    a, b = await spawn_replicas(scope, "w", 2)
    await bind(scope, a, grant="offer")
    assert scope.row(a)["status"]["grants"] == ["offer", "s"]
    await scope.must(scope.actors["budgets"], ReturnCapacity("s", amounts(cpu="3")))
    assert await scope.refused(scope.actors["scheduler"], bind_claim(scope, b, "offer")) is Code.OVER_QUOTA


@scope_test
async def test_lost_holder_blocks_issue_until_declared_lost(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(Region(metadata=Metadata(name="r2"))))
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("4")))
    await scope.restore(await scope.store.inner.backup())
    await scope.take_over()
    assert await scope.must(OPERATOR, DeclareLost("scope/r2")) == [1]
    assert not scope.books.grants[T1].granted_on
    await scope.must(scope.actors["budgets"], Issue("more", slice_of("1", "scope/r3")))


@scope_test
async def test_void_grant_is_not_returned_before_reissue(scope: Scope) -> None:
    """F10 F43: the pending reissue would restore what was returned."""
    await accept_grant(scope)
    await scope.restore(await scope.store.inner.backup())
    await scope.take_over()
    budgets = scope.actors["budgets"]
    assert await scope.refused(budgets, ReturnCapacity("s", amounts(cpu="2"))) is Code.GRANT_VOID
    await accept_grant(scope, serial=2)
    await scope.must(budgets, ReturnCapacity("s", amounts(cpu="2")))


@scope_test
async def test_user_cannot_forge_awaited_node_report(scope: Scope) -> None:
    forged = Report("awaited/node/n1", SummarySpec(holder="node/n1", epoch=0, sequence=0))
    assert await scope.refused(USER, forged) is Code.NOT_OWNER


@scope_test
async def test_reports_in_any_order_never_take_back_returned_capacity(scope: Scope) -> None:
    """F43: debit before credit; returned capacity may have been granted again."""
    budgets = scope.actors["budgets"]
    await accept_peer(scope, "scope/r2")
    await scope.must(budgets, Issue("s", slice_of("10")))
    await scope.must(budgets, credit(scope, 2, "2"))
    await scope.must(budgets, credit(scope, 1, "5"))
    assert scope.books.grants[T1].granted_on == {"cpu": 2000}
    await scope.must(budgets, Issue("t", slice_of("14")))
    assert await scope.refused(budgets, credit(scope, 3, "10")) is Code.INVALID


@scope_test
async def test_expired_grant_returns_nothing_without_final_report(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    await scope.must(budgets, Issue("s", slice_of("4", ttl=Duration(1_000))))
    assert await scope.refused(budgets, Close("s")) is Code.NOT_OWNER
    scope.clock.at_ms += 2_000
    assert await scope.refused(budgets, Close("s")) is Code.AWAITING_REPORTS
    assert scope.books.grants[T1].granted_on == {"cpu": 4000}
    await accept_peer(scope, "scope/r2")
    await scope.must(budgets, credit(scope, 1), Close("s"))
    assert not scope.books.grants[T1].granted_on and "grant/s" not in scope.checker.rows


@scope_test
async def test_close_returns_free_part_and_rest_after_release(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    await scope.must(budgets, Issue("offer", slice_of("4", "scheduler")))
    (key,) = await spawn_replicas(scope, "w")
    await bind(scope, key, grant="offer")
    await scope.must(budgets, Close("offer"))
    assert scope.books.grants[T1].granted_on == {"cpu": 1000}
    await commit_transitions(scope, key, "remove", "stop", "stopped")
    await scope.must(budgets, Close("offer"))
    assert not scope.books.grants[T1].granted_on and "grant/offer" not in scope.checker.rows


@scope_test
async def test_repeated_close_of_drawn_grant_writes_nothing(scope: Scope) -> None:
    """F32: each written row wakes every watcher, and repair would retry on it."""
    budgets = scope.actors["budgets"]
    await scope.must(budgets, Issue("offer", slice_of("4", "scheduler")))
    (key,) = await spawn_replicas(scope, "w")
    await bind(scope, key, grant="offer")
    await scope.must(budgets, Close("offer"))
    before = scope.checker.rows["grant/offer"]
    await scope.must(budgets, Close("offer"))
    assert scope.checker.rows["grant/offer"] == before


@scope_test
async def test_budget_caps_tenant_share_and_charges_emergency_quota(scope: Scope) -> None:
    spec = GrantSpec(
        holder="scheduler", amount=amounts(cpu="3"), shares={"t1": amounts(cpu="1")}, purpose="budget", ttl=Duration(60_000)
    )
    await scope.must(scope.actors["budgets"], Issue("recovery", spec))
    assert scope.books.grants["tenant/t1/emergency"].granted_on == {"cpu": 1000}
    a, b = await spawn_replicas(scope, "w", 2)
    await bind(scope, a, grant="recovery")
    assert await scope.refused(scope.actors["scheduler"], bind_claim(scope, b, "recovery")) is Code.GRANT_SHORT
    more = GrantSpec(
        holder="x", amount=amounts(cpu="3"), shares={"t1": amounts(cpu="2")}, purpose="budget", ttl=Duration(60_000)
    )
    assert await scope.refused(scope.actors["budgets"], Issue("more", more)) is Code.GRANT_SHORT


@scope_test
async def test_pending_offer_stays_charged_despite_smaller_confirmation(scope: Scope) -> None:
    """F10: both sides were restored; the holder confirms less than the pending offer."""
    budgets = scope.actors["budgets"]
    await scope.must(OPERATOR, Apply(Region(metadata=Metadata(name="r2"))))
    await scope.must(budgets, Issue("s", slice_of("4")))
    await scope.restore(await scope.store.inner.backup())
    await scope.take_over()
    budgets = scope.actors["budgets"]
    await accept_peer(scope, "scope/r2")
    await scope.must(budgets, confirm_holdings(scope, s="3"))
    assert scope.books.grants[T1].granted_on == {"cpu": 4000}, "the offer of 4 may still be accepted"
