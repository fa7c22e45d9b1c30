"""Is a letter heeded only between the two incarnations that deal with each other, and does every refusal have a way on?"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from remit.commitment.outcomes import batch_key, decode_batch
from remit.commitment.rulings import peer_scopes
from remit.model.claims import AcceptIncarnation, Apply, Close, Code, DeclareLost, Issue, Refused, Renew, ReturnCapacity
from remit.model.kinds import Region
from remit.model.metadata import Metadata
from tests.properties.authority_world import OPERATOR, USER, Scope, amounts, story
from tests.unit.commitment.authority_fixture import T1, bind, credit, incarnation, meets, move, offer, slice_of, spawned, vouch

R2 = "scope/r2"
GLOBAL = "scope/global"


async def restored(scope: Scope, backup: Any = None) -> str:
    """Set back, by default to where it stands. Answers the incarnation that ended."""
    ended = incarnation(scope)
    await scope.restore(backup or await scope.store.inner.backup())
    await scope.take_over()
    return ended


async def said(scope: Scope, claim: Any) -> str:
    (verdict,) = await scope.ask(scope.actors["budgets"], claim)
    assert isinstance(verdict, Refused)
    return verdict.detail


# -- recognising ------------------------------------------------------------------------------------------------------------


@story
async def test_one_incarnation_replaces_another_and_is_answered_with_how_many_came_before(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    assert await scope.must(budgets, AcceptIncarnation(R2, "one")) == [0]
    assert await scope.must(budgets, AcceptIncarnation(R2, "two", "one")) == [1]
    assert await scope.must(budgets, AcceptIncarnation(R2, "two", "one")) == [1], "to say it again changes nothing"
    assert scope.row("peer/scope/r2")["spec"] == {"incarnation": "two", "former": ["one"]}


@story
async def test_the_audit_says_who_was_recognised(scope: Scope) -> None:
    await meets(scope, R2)
    row = await scope.store.inner.get(batch_key(scope.lead.authority.head.sequence))
    assert row is not None
    assert [(entry.did, entry.subject, entry.actor) for entry in decode_batch(row.value).entries] == [("recognise", R2, "op")]


@story
async def test_of_two_who_replace_one_incarnation_only_the_first_is_heard(scope: Scope) -> None:
    """F10: the second asked its peer before the first was recorded, and may know less."""
    budgets = scope.actors["budgets"]
    await scope.must(budgets, AcceptIncarnation(R2, "one"), AcceptIncarnation(R2, "three", "one"))
    assert await scope.refused(budgets, AcceptIncarnation(R2, "two", "one")) is Code.REVISION
    assert await scope.refused(budgets, AcceptIncarnation(R2, "two")) is Code.REVISION, "nor is it the first contact"
    assert "three" in await said(scope, AcceptIncarnation(R2, "two", "one")), "it tells what is on record"


@story
async def test_who_was_replaced_is_not_recognised_again(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    await scope.must(
        budgets, AcceptIncarnation(R2, "one"), AcceptIncarnation(R2, "two", "one"), AcceptIncarnation(R2, "three", "two")
    )
    for former in ("one", "two"):
        assert await scope.refused(budgets, AcceptIncarnation(R2, former, "three")) is Code.GRANT_VOID
    await scope.take_over()
    assert await scope.refused(budgets, AcceptIncarnation(R2, "one", "three")) is Code.GRANT_VOID, "it is kept in the store"


@story
async def test_only_budgets_and_operators_recognise_and_only_scopes(scope: Scope) -> None:
    assert await scope.refused(USER, AcceptIncarnation(R2, "one")) is Code.ROLE
    for peer, one in (("r2", "one"), ("scope/", "one"), ("scope/R 2", "one"), ("scope/a/b", "one"), (R2, "")):
        assert await scope.refused(OPERATOR, AcceptIncarnation(peer, one)) is Code.INVALID


@story
async def test_the_record_of_a_peer_is_bounded(scope: Scope) -> None:
    last = "i0"
    await meets(scope, R2, last)
    for n in range(1, peer_scopes.FORMER_INCARNATIONS_MAX + 3):
        await meets(scope, R2, f"i{n}", last)
        last = f"i{n}"
    assert len(scope.row("peer/scope/r2")["spec"]["former"]) == peer_scopes.FORMER_INCARNATIONS_MAX


@story
async def test_there_is_a_bound_on_peers(scope: Scope) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_scopes, "PEERS_MAX", 1)
        await meets(scope, R2)
        assert await scope.refused(OPERATOR, AcceptIncarnation("scope/r3", "one")) is Code.LIMIT
        await meets(scope, R2, "two", "one")


# -- letters ----------------------------------------------------------------------------------------------------------------


@story
async def test_nobody_is_trusted_at_first_sight(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    await scope.must(budgets, Issue("s", slice_of("4")))
    for letter in (offer(scope), replace(offer(scope), sender=""), credit(scope, 1, "1"), vouch(scope)):
        assert await scope.refused(budgets, letter) is Code.GRANT_VOID
    await meets(scope, GLOBAL)
    await meets(scope, R2)
    await scope.must(budgets, credit(scope, 1, "1"), vouch(scope), replace(offer(scope), name="held"))


@story
async def test_a_letter_to_another_incarnation_than_this_is_refused_and_says_who_this_is(scope: Scope) -> None:
    """F10: written to the one before the restore."""
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("4")))
    await meets(scope, GLOBAL)
    await meets(scope, R2)
    for letter in (replace(offer(scope), name="held"), credit(scope, 1, "1"), vouch(scope)):
        late = replace(letter, to="another")
        assert await scope.refused(scope.actors["budgets"], late) is Code.GRANT_VOID
        assert incarnation(scope) in await said(scope, late)
        await scope.must(scope.actors["budgets"], letter)


@story
async def test_a_letter_from_another_incarnation_than_is_recognised_is_refused_and_says_which_that_is(scope: Scope) -> None:
    """F10: written by the one before the peer's restore, or by one that is not known here yet."""
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("4")))
    for peer in (GLOBAL, R2):
        await meets(scope, peer)
        await meets(scope, peer, "two", "one")
    for letter in (replace(offer(scope), name="held"), credit(scope, 1, "1"), vouch(scope)):
        for sender in ("one", "three"):
            late = replace(letter, sender=sender)
            assert await scope.refused(scope.actors["budgets"], late) is Code.GRANT_VOID
            assert "accepted here is incarnation two" in await said(scope, late)
        await scope.must(scope.actors["budgets"], replace(letter, sender="two"))


# -- the holder was restored --------------------------------------------------------------------------------------------------


@story
async def test_a_report_of_the_holder_before_its_restore_is_not_counted_once_it_is_offered_anew(scope: Scope) -> None:
    """F10 F43: it had given 3 of 4 back, and has forgotten; all that is written off here is offered to it again."""
    budgets = scope.actors["budgets"]
    await meets(scope, R2)
    await scope.must(budgets, Issue("s", slice_of("4")))
    late = credit(scope, 1, "1")
    await meets(scope, R2, "two", "one")
    await scope.must(budgets, Renew("s"))
    assert await scope.refused(budgets, late) is Code.GRANT_VOID
    assert scope.books.grants[T1].granted_on == {"cpu": 4000}


@story
async def test_the_reports_of_a_restored_holder_count_from_the_first(scope: Scope) -> None:
    """F10: its store has lost how far it had counted; without this it would be ignored until it has counted as far again."""
    budgets = scope.actors["budgets"]
    await meets(scope, R2)
    await scope.must(budgets, Issue("s", slice_of("4")), credit(scope, 9, "3", epoch=9))
    await meets(scope, R2, "two", "one")
    assert scope.books.grants[T1].granted_on == {"cpu": 3000}, "what was given back stays given back"
    await scope.must(budgets, credit(scope, 1, "2", epoch=1, sender="two"))
    assert scope.books.grants[T1].granted_on == {"cpu": 2000}


@story
async def test_a_restored_holder_takes_up_whatever_serial_it_is_offered(scope: Scope) -> None:
    """F10: its issuer may have been restored too, and count from further back."""
    await meets(scope, GLOBAL)
    await scope.must(scope.actors["budgets"], offer(scope, "2", serial=7))
    await restored(scope)
    budgets = scope.actors["budgets"]
    await scope.must(budgets, offer(scope, "1", serial=1))
    assert scope.row("grant/s")["spec"]["amount"] == {"cpu": "1"}
    assert await scope.refused(budgets, offer(scope, "2", serial=1)) is Code.REVISION, "but each once"


@story
async def test_what_a_backup_remembers_as_drawn_is_not_kept_by_closing_what_is_void(scope: Scope) -> None:
    """F10 F43: it may have been released, given back and granted to others since."""
    await meets(scope, GLOBAL)
    (key,) = await spawned(scope, "w")
    await scope.must(scope.actors["budgets"], offer(scope, "2"))
    await bind(scope, key, grant="s")
    await restored(scope)
    budgets = scope.actors["budgets"]
    assert await scope.refused(budgets, Close("s")) is Code.GRANT_VOID
    await move(scope, key, "resume", "remove", "stop", "stopped")
    await scope.must(budgets, Close("s"))
    assert scope.row("grant/s")["spec"]["amount"] == {}, "nothing is drawn any more: it can be closed without a reissue"
    assert await scope.refused(budgets, offer(scope, "2", serial=2)) is Code.GRANT_VOID, "and then the reissue is refused"


@story
async def test_no_more_is_kept_at_the_close_than_was_reissued(scope: Scope) -> None:
    """F10: the backup remembers 2 drawn, of which the issuer still has 1 written off."""
    await meets(scope, GLOBAL)
    keys = await spawned(scope, "w", 2)
    await scope.must(scope.actors["budgets"], offer(scope, "2"))
    for key in keys:
        await bind(scope, key, grant="s")
    await restored(scope)
    await scope.must(scope.actors["budgets"], offer(scope, "1", serial=2), Close("s"))
    assert scope.row("grant/s")["spec"]["amount"] == {"cpu": "1"}


# -- the issuer was restored --------------------------------------------------------------------------------------------------


@story
async def test_an_offer_of_the_issuer_before_its_restore_is_refused_once_the_new_one_is_recognised(scope: Scope) -> None:
    """F10: so what the holder vouches for after that is all that it has."""
    late = offer(scope)
    await meets(scope, GLOBAL)
    await meets(scope, GLOBAL, "two", "one")
    assert await scope.refused(scope.actors["budgets"], late) is Code.GRANT_VOID
    await scope.must(scope.actors["budgets"], replace(late, sender="two"))


@story
async def test_renewals_of_a_restored_issuer_count_from_the_first_and_enlarge_nothing(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    await meets(scope, GLOBAL)
    await scope.must(budgets, offer(scope, "4", serial=7), ReturnCapacity("s", amounts(cpu="3")))
    await meets(scope, GLOBAL, "two", "one")
    await scope.must(budgets, offer(scope, "4", serial=2, sender="two"))
    assert scope.row("grant/s")["spec"]["amount"] == {"cpu": "1"}


@story
async def test_every_scope_that_was_known_must_vouch_to_the_restored_one_itself(scope: Scope) -> None:
    """F10: a declared region, a holder and a mere acquaintance alike. A word to the one before does not count."""
    await scope.must(OPERATOR, Apply(Region(metadata=Metadata(name="r2"))))
    await meets(scope, "scope/r3")
    await meets(scope, R2)
    early = vouch(scope)
    await restored(scope)
    budgets = scope.actors["budgets"]
    assert await scope.refused(budgets, Issue("s", slice_of("1"))) is Code.AWAITING_REPORTS
    assert await scope.refused(budgets, early) is Code.GRANT_VOID
    await scope.must(budgets, vouch(scope))
    for word in ("scope/r3", incarnation(scope), "recognise", "vouch", "declare them lost"):
        assert word in await said(scope, Issue("s", slice_of("1"))), "the refusal says who is missing, and what is to be done"
    await scope.must(budgets, replace(vouch(scope), holder="scope/r3"), Issue("s", slice_of("1")))


@story
async def test_to_be_recognised_is_not_to_have_vouched(scope: Scope) -> None:
    """F10: both were restored."""
    await meets(scope, R2)
    await restored(scope)
    await meets(scope, R2, "two", "one")
    budgets = scope.actors["budgets"]
    assert await scope.refused(budgets, Issue("s", slice_of("1"))) is Code.AWAITING_REPORTS
    await scope.must(budgets, vouch(scope, sender="two"), Issue("s", slice_of("1")))


@story
async def test_a_scope_that_the_backup_did_not_know_may_still_say_what_it_holds(scope: Scope) -> None:
    """F10: nothing waits for it, for nobody knows of it. Once it is met, what it has is written off, and any excess shows."""
    backup = await scope.store.inner.backup()
    await meets(scope, R2)
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("10")))
    await restored(scope, backup)
    await scope.must(scope.actors["budgets"], Issue("t", slice_of("10", "scope/r3")))
    await meets(scope, R2)
    await scope.must(scope.actors["budgets"], vouch(scope, s="10"))
    assert dict(scope.books.excess()) == {T1: "cpu 4"}


@story
async def test_a_voucher_for_what_another_holds_says_who_has_it_and_what_cures_it(scope: Scope) -> None:
    """F10: the backup remembers the name in other hands, which have given it back since."""
    await meets(scope, R2)
    await meets(scope, "scope/r3")
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("4", "scope/r3")))
    await restored(scope)
    budgets = scope.actors["budgets"]
    assert await scope.refused(budgets, vouch(scope, s="2")) is Code.NOT_OWNER
    assert "scope/r3" in await said(scope, vouch(scope, s="2"))
    await scope.must(budgets, credit(scope, 1), Close("s"), vouch(scope, s="2"))
    assert scope.books.grants[T1].granted_on == {"cpu": 2000}


@story
async def test_who_is_declared_lost_is_not_dealt_with_again_until_it_is_another(scope: Scope) -> None:
    """What it held is in other hands; only a restore makes it forget that."""
    await meets(scope, R2)
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("4")))
    await scope.must(OPERATOR, DeclareLost(R2))
    budgets = scope.actors["budgets"]
    assert await scope.refused(budgets, vouch(scope, s="4")) is Code.GRANT_VOID
    assert await scope.refused(budgets, AcceptIncarnation(R2, "one")) is Code.GRANT_VOID
    await meets(scope, R2, "two")
    await scope.must(budgets, vouch(scope, sender="two"), Issue("s", slice_of("4")))
