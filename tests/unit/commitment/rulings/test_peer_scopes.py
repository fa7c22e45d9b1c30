"""Messages between scopes count only between accepted incarnations; refusals name the next step."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from remit.commitment.outcomes import batch_key, decode_batch
from remit.commitment.rulings import peer_scopes
from remit.model.claims import AcceptIncarnation, Apply, Close, Code, DeclareLost, Issue, Refused, Renew, ReturnCapacity
from remit.model.kinds import Region
from remit.model.metadata import Metadata
from tests.properties.authority_world import OPERATOR, USER, Scope, amounts, scope_test
from tests.unit.commitment.authority_fixture import (
    T1,
    accept_peer,
    bind,
    commit_transitions,
    confirm_holdings,
    credit,
    incarnation,
    offer,
    slice_of,
    spawn_replicas,
)

R2 = "scope/r2"
GLOBAL = "scope/global"


async def restore_scope(scope: Scope, backup: Any = None) -> str:
    """Restore from a backup, by default of the present state; return the previous incarnation."""
    ended = incarnation(scope)
    await scope.restore(backup or await scope.store.inner.backup())
    await scope.take_over()
    return ended


async def refusal_detail(scope: Scope, claim: Any) -> str:
    (verdict,) = await scope.ask(scope.actors["budgets"], claim)
    assert isinstance(verdict, Refused)
    return verdict.detail


# -- accepting incarnations -------------------------------------------------------------------------------------------------


@scope_test
async def test_accepted_incarnation_replaces_previous_and_counts_predecessors(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    assert await scope.must(budgets, AcceptIncarnation(R2, "one")) == [0]
    assert await scope.must(budgets, AcceptIncarnation(R2, "two", "one")) == [1]
    assert await scope.must(budgets, AcceptIncarnation(R2, "two", "one")) == [1], "repeating changes nothing"
    assert scope.row("peer/scope/r2")["spec"] == {"incarnation": "two", "former": ["one"]}


@scope_test
async def test_audit_records_accepted_incarnation(scope: Scope) -> None:
    await accept_peer(scope, R2)
    row = await scope.store.inner.get(batch_key(scope.lead.authority.head.sequence))
    assert row is not None
    assert [(entry.did, entry.subject, entry.actor) for entry in decode_batch(row.value).entries] == [("recognise", R2, "op")]


@scope_test
async def test_second_replacement_of_same_incarnation_is_refused(scope: Scope) -> None:
    """F10: the second contacted its peer before the first was recorded, and may know less."""
    budgets = scope.actors["budgets"]
    await scope.must(budgets, AcceptIncarnation(R2, "one"), AcceptIncarnation(R2, "three", "one"))
    assert await scope.refused(budgets, AcceptIncarnation(R2, "two", "one")) is Code.REVISION
    assert await scope.refused(budgets, AcceptIncarnation(R2, "two")) is Code.REVISION, "nor is it the first contact"
    assert "three" in await refusal_detail(scope, AcceptIncarnation(R2, "two", "one")), "names the accepted incarnation"


@scope_test
async def test_replaced_incarnation_is_not_accepted_again(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    await scope.must(
        budgets, AcceptIncarnation(R2, "one"), AcceptIncarnation(R2, "two", "one"), AcceptIncarnation(R2, "three", "two")
    )
    for former in ("one", "two"):
        assert await scope.refused(budgets, AcceptIncarnation(R2, former, "three")) is Code.GRANT_VOID
    await scope.take_over()
    assert await scope.refused(budgets, AcceptIncarnation(R2, "one", "three")) is Code.GRANT_VOID, "also after a takeover"


@scope_test
async def test_only_budgets_and_operators_accept_valid_scope_names(scope: Scope) -> None:
    assert await scope.refused(USER, AcceptIncarnation(R2, "one")) is Code.ROLE
    for peer, one in (("r2", "one"), ("scope/", "one"), ("scope/R 2", "one"), ("scope/a/b", "one"), (R2, "")):
        assert await scope.refused(OPERATOR, AcceptIncarnation(peer, one)) is Code.INVALID


@scope_test
async def test_record_of_former_incarnations_is_bounded(scope: Scope) -> None:
    last = "i0"
    await accept_peer(scope, R2, last)
    for n in range(1, peer_scopes.FORMER_INCARNATIONS_MAX + 3):
        await accept_peer(scope, R2, f"i{n}", last)
        last = f"i{n}"
    assert len(scope.row("peer/scope/r2")["spec"]["former"]) == peer_scopes.FORMER_INCARNATIONS_MAX


@scope_test
async def test_number_of_peers_is_limited(scope: Scope) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_scopes, "PEERS_MAX", 1)
        await accept_peer(scope, R2)
        assert await scope.refused(OPERATOR, AcceptIncarnation("scope/r3", "one")) is Code.LIMIT
        await accept_peer(scope, R2, "two", "one")


# -- messages ---------------------------------------------------------------------------------------------------------------


@scope_test
async def test_message_of_unknown_peer_is_refused(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    await scope.must(budgets, Issue("s", slice_of("4")))
    for message in (offer(scope), replace(offer(scope), sender=""), credit(scope, 1, "1"), confirm_holdings(scope)):
        assert await scope.refused(budgets, message) is Code.GRANT_VOID
    await accept_peer(scope, GLOBAL)
    await accept_peer(scope, R2)
    await scope.must(budgets, credit(scope, 1, "1"), confirm_holdings(scope), replace(offer(scope), name="held"))


@scope_test
async def test_message_to_other_incarnation_is_refused_with_current_one(scope: Scope) -> None:
    """F10: addressed to the incarnation before the restore."""
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("4")))
    await accept_peer(scope, GLOBAL)
    await accept_peer(scope, R2)
    for message in (replace(offer(scope), name="held"), credit(scope, 1, "1"), confirm_holdings(scope)):
        late = replace(message, to="another")
        assert await scope.refused(scope.actors["budgets"], late) is Code.GRANT_VOID
        assert incarnation(scope) in await refusal_detail(scope, late)
        await scope.must(scope.actors["budgets"], message)


@scope_test
async def test_message_from_unaccepted_incarnation_is_refused_with_accepted_one(scope: Scope) -> None:
    """F10: sent by the incarnation before the peer's restore, or by one not accepted yet."""
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("4")))
    for peer in (GLOBAL, R2):
        await accept_peer(scope, peer)
        await accept_peer(scope, peer, "two", "one")
    for message in (replace(offer(scope), name="held"), credit(scope, 1, "1"), confirm_holdings(scope)):
        for sender in ("one", "three"):
            late = replace(message, sender=sender)
            assert await scope.refused(scope.actors["budgets"], late) is Code.GRANT_VOID
            assert "accepted here is incarnation two" in await refusal_detail(scope, late)
        await scope.must(scope.actors["budgets"], replace(message, sender="two"))


# -- the holder was restored --------------------------------------------------------------------------------------------------


@scope_test
async def test_report_from_before_holder_restore_does_not_count(scope: Scope) -> None:
    """F10 F43: the holder returned 3 of 4 and has forgotten it; everything charged here is offered again."""
    budgets = scope.actors["budgets"]
    await accept_peer(scope, R2)
    await scope.must(budgets, Issue("s", slice_of("4")))
    late = credit(scope, 1, "1")
    await accept_peer(scope, R2, "two", "one")
    await scope.must(budgets, Renew("s"))
    assert await scope.refused(budgets, late) is Code.GRANT_VOID
    assert scope.books.grants[T1].granted_on == {"cpu": 4000}


@scope_test
async def test_restored_holder_restarts_report_numbers(scope: Scope) -> None:
    """F10: its store lost the counter; else its reports would be ignored until the counter caught up."""
    budgets = scope.actors["budgets"]
    await accept_peer(scope, R2)
    await scope.must(budgets, Issue("s", slice_of("4")), credit(scope, 9, "3", epoch=9))
    await accept_peer(scope, R2, "two", "one")
    assert scope.books.grants[T1].granted_on == {"cpu": 3000}, "returned capacity stays returned"
    await scope.must(budgets, credit(scope, 1, "2", epoch=1, sender="two"))
    assert scope.books.grants[T1].granted_on == {"cpu": 2000}


@scope_test
async def test_restored_holder_accepts_any_serial_once(scope: Scope) -> None:
    """F10: the issuer may have been restored too, and count from an earlier serial."""
    await accept_peer(scope, GLOBAL)
    await scope.must(scope.actors["budgets"], offer(scope, "2", serial=7))
    await restore_scope(scope)
    budgets = scope.actors["budgets"]
    await scope.must(budgets, offer(scope, "1", serial=1))
    assert scope.row("grant/s")["spec"]["amount"] == {"cpu": "1"}
    assert await scope.refused(budgets, offer(scope, "2", serial=1)) is Code.REVISION, "each serial once"


@scope_test
async def test_void_grant_is_not_closed_while_backup_shows_draws(scope: Scope) -> None:
    """F10 F43: the draws may have been released, returned and granted to others since."""
    await accept_peer(scope, GLOBAL)
    (key,) = await spawn_replicas(scope, "w")
    await scope.must(scope.actors["budgets"], offer(scope, "2"))
    await bind(scope, key, grant="s")
    await restore_scope(scope)
    budgets = scope.actors["budgets"]
    assert await scope.refused(budgets, Close("s")) is Code.GRANT_VOID
    await commit_transitions(scope, key, "resume", "remove", "stop", "stopped")
    await scope.must(budgets, Close("s"))
    assert scope.row("grant/s")["spec"]["amount"] == {}, "without draws it closes without a reissue"
    assert await scope.refused(budgets, offer(scope, "2", serial=2)) is Code.GRANT_VOID, "a later reissue is refused"


@scope_test
async def test_close_keeps_no_more_than_reissued_amount(scope: Scope) -> None:
    """F10: the backup shows 2 drawn, while the issuer still charges 1."""
    await accept_peer(scope, GLOBAL)
    keys = await spawn_replicas(scope, "w", 2)
    await scope.must(scope.actors["budgets"], offer(scope, "2"))
    for key in keys:
        await bind(scope, key, grant="s")
    await restore_scope(scope)
    await scope.must(scope.actors["budgets"], offer(scope, "1", serial=2), Close("s"))
    assert scope.row("grant/s")["spec"]["amount"] == {"cpu": "1"}


# -- the issuer was restored --------------------------------------------------------------------------------------------------


@scope_test
async def test_offer_from_before_issuer_restore_is_refused(scope: Scope) -> None:
    """F10: so later confirmations of the holder are complete."""
    late = offer(scope)
    await accept_peer(scope, GLOBAL)
    await accept_peer(scope, GLOBAL, "two", "one")
    assert await scope.refused(scope.actors["budgets"], late) is Code.GRANT_VOID
    await scope.must(scope.actors["budgets"], replace(late, sender="two"))


@scope_test
async def test_restored_issuer_restarts_serials_without_enlarging_grant(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    await accept_peer(scope, GLOBAL)
    await scope.must(budgets, offer(scope, "4", serial=7), ReturnCapacity("s", amounts(cpu="3")))
    await accept_peer(scope, GLOBAL, "two", "one")
    await scope.must(budgets, offer(scope, "4", serial=2, sender="two"))
    assert scope.row("grant/s")["spec"]["amount"] == {"cpu": "1"}


@scope_test
async def test_every_known_scope_must_confirm_to_restored_issuer(scope: Scope) -> None:
    """F10: declared regions, holders and other peers alike. A confirmation to the previous incarnation does not count."""
    await scope.must(OPERATOR, Apply(Region(metadata=Metadata(name="r2"))))
    await accept_peer(scope, "scope/r3")
    await accept_peer(scope, R2)
    early = confirm_holdings(scope)
    await restore_scope(scope)
    budgets = scope.actors["budgets"]
    assert await scope.refused(budgets, Issue("s", slice_of("1"))) is Code.AWAITING_REPORTS
    assert await scope.refused(budgets, early) is Code.GRANT_VOID
    await scope.must(budgets, confirm_holdings(scope))
    for word in ("scope/r3", incarnation(scope), "recognise", "vouch", "declare them lost"):
        assert word in await refusal_detail(scope, Issue("s", slice_of("1"))), "the refusal names missing scopes and cures"
    await scope.must(budgets, replace(confirm_holdings(scope), holder="scope/r3"), Issue("s", slice_of("1")))


@scope_test
async def test_accepting_incarnation_is_not_confirming_holdings(scope: Scope) -> None:
    """F10: both scopes were restored."""
    await accept_peer(scope, R2)
    await restore_scope(scope)
    await accept_peer(scope, R2, "two", "one")
    budgets = scope.actors["budgets"]
    assert await scope.refused(budgets, Issue("s", slice_of("1"))) is Code.AWAITING_REPORTS
    await scope.must(budgets, confirm_holdings(scope, sender="two"), Issue("s", slice_of("1")))


@scope_test
async def test_scope_unknown_to_backup_may_still_confirm_holdings(scope: Scope) -> None:
    """F10: nothing waits for it. Once accepted, its holdings are charged, and any excess is listed."""
    backup = await scope.store.inner.backup()
    await accept_peer(scope, R2)
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("10")))
    await restore_scope(scope, backup)
    await scope.must(scope.actors["budgets"], Issue("t", slice_of("10", "scope/r3")))
    await accept_peer(scope, R2)
    await scope.must(scope.actors["budgets"], confirm_holdings(scope, s="10"))
    assert dict(scope.books.excess()) == {T1: "cpu 4"}


@scope_test
async def test_confirmation_of_grant_held_by_other_names_holder_and_cure(scope: Scope) -> None:
    """F10: in the backup another scope holds this name, and has returned it since."""
    await accept_peer(scope, R2)
    await accept_peer(scope, "scope/r3")
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("4", "scope/r3")))
    await restore_scope(scope)
    budgets = scope.actors["budgets"]
    assert await scope.refused(budgets, confirm_holdings(scope, s="2")) is Code.NOT_OWNER
    assert "scope/r3" in await refusal_detail(scope, confirm_holdings(scope, s="2"))
    await scope.must(budgets, credit(scope, 1), Close("s"), confirm_holdings(scope, s="2"))
    assert scope.books.grants[T1].granted_on == {"cpu": 2000}


@scope_test
async def test_lost_scope_is_refused_until_new_incarnation(scope: Scope) -> None:
    """Its capacity was granted to others; only after a restore does it forget the old grants."""
    await accept_peer(scope, R2)
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("4")))
    await scope.must(OPERATOR, DeclareLost(R2))
    budgets = scope.actors["budgets"]
    assert await scope.refused(budgets, confirm_holdings(scope, s="4")) is Code.GRANT_VOID
    assert await scope.refused(budgets, AcceptIncarnation(R2, "one")) is Code.GRANT_VOID
    await accept_peer(scope, R2, "two")
    await scope.must(budgets, confirm_holdings(scope, sender="two"), Issue("s", slice_of("4")))
