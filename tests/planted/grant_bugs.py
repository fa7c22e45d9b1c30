"""Planted bugs of grants within a scope, between scopes, and of leased policies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from remit.commitment import recovery
from remit.commitment.draft import Draft
from remit.commitment.rulings import grants, peer_scopes, placement
from remit.law.ledgers import GrantLedger
from remit.model.claims import Accept, AnyClaim, Close, Credit, Issue, Operation, Refused, ReturnCapacity
from remit.model.objects import key_of
from remit.model.records import Grant
from remit.model.resources import Amount, Duration
from remit.simulate.actors.budget_controllers import BudgetHolder, BudgetIssuer
from tests.planted.planted_bug import bug, overrule

CROSS_SCOPE_CHECKS = ("held_grants_are_debited_by_issuer",)
GRANT_CHARGE_CHECKS = ("charges_are_on_live_grants",)
GRANT_RETURN_CHECKS = ("charged_capacity_is_not_returned",)
QUOTA_CHECKS = ("ledger_charges_never_rise_above_amount", "tenant_usage_stays_within_quota")


@bug(34, scenario="guesses", expects=GRANT_CHARGE_CHECKS)
def a_grant_outlives_its_parent(patch: pytest.MonkeyPatch) -> None:
    """A child grant is still drawn on after its parent expired."""

    def buggy_check_alive(draft: Draft, ledger: GrantLedger) -> Refused | None:
        if not ledger.is_live or not ledger.is_unexpired(draft.time.now_ms):
            return original_check_alive(draft, ledger)
        return None

    def buggy_offers(self: BudgetHolder) -> Iterator[AnyClaim]:
        for claim in original_offers(self):
            yield claim
            if isinstance(claim, Issue):
                longer = Duration(10 * claim.spec.ttl)
                yield Issue(self.new_name("handed-on"), replace(claim.spec, parent=claim.name, ttl=longer))

    original_check_alive, original_offers = placement.check_alive, BudgetHolder._offers
    patch.setattr(BudgetHolder, "_offers", buggy_offers)
    patch.setattr(placement, "check_alive", buggy_check_alive)
    patch.setattr(grants, "check_alive", buggy_check_alive)
    patch.setattr(grants, "_capped", lambda draft, deadline, parent: deadline)


@bug(18, 34, scenario="lapsed-grants", expects=GRANT_CHARGE_CHECKS)
def a_grant_is_used_past_its_term(patch: pytest.MonkeyPatch) -> None:
    """An expired grant is drawn on as before."""
    patch.setattr(GrantLedger, "is_unexpired", lambda self, now_ms: True)


@bug(34, scenario="lapsed-grants", seed=2, expects=CROSS_SCOPE_CHECKS)
def an_unreported_grant_is_granted_again(patch: pytest.MonkeyPatch) -> None:
    """A grant that expired in another scope is taken back without its report."""
    original_close, original_maintain = grants.close, BudgetIssuer._maintain

    def buggy_close(draft: Draft, operation: Operation, claim: Close) -> int | Refused:
        ledger = draft.ledgers.grant(claim.name)
        if ledger is not None and ledger.granted_to_other_scope and not ledger.is_unexpired(draft.time.now_ms):
            draft.delete(key_of("Grant", claim.name))
            return 0
        return original_close(draft, operation, claim)

    def buggy_maintain(self: BudgetIssuer, grant: Grant, *args: Any) -> Iterator[AnyClaim]:
        yield Close(grant.metadata.name)
        yield from original_maintain(self, grant, *args)

    overrule(patch, Close, buggy_close)
    patch.setattr(BudgetIssuer, "_maintain", buggy_maintain)


@bug(37, scenario="two-scopes", expects=GRANT_RETURN_CHECKS)
def drawn_capacity_is_returned(patch: pytest.MonkeyPatch) -> None:
    """A scope returns part of a grant without checking whether it is drawn."""
    original_check_amount = grants._check_amount

    def buggy_check_amount(draft: Draft, ledger: GrantLedger, amount: Amount, drawing: bool = True) -> Refused | None:
        return original_check_amount(draft, ledger, amount) if drawing else None

    patch.setattr(grants, "_check_amount", buggy_check_amount)


@bug(37, scenario="two-scopes", seed=2, expects=GRANT_RETURN_CHECKS)
def a_drawn_grant_is_closed_as_unused(patch: pytest.MonkeyPatch) -> None:
    """A scope that closes a grant reports that it keeps nothing."""
    original_close, original_committed = grants.close, GrantLedger.committed

    def buggy_close(draft: Draft, operation: Operation, claim: Close) -> int | Refused:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(
                GrantLedger, "committed", lambda self: Amount() if self.grant.spec.issuer else original_committed(self)
            )
            return original_close(draft, operation, claim)

    overrule(patch, Close, buggy_close)


@bug(10, scenario="two-scopes-restored", seed=4, expects=(*CROSS_SCOPE_CHECKS, *QUOTA_CHECKS))
def a_grant_is_resurrected_by_a_restore(patch: pytest.MonkeyPatch) -> None:
    """A restored scope goes on using the grants in its backup."""
    patch.setattr(recovery, "void_grants", lambda *args, **more: None)


@bug(10, 37, scenario="two-scopes-restored", seed=4, expects=(*CROSS_SCOPE_CHECKS, *QUOTA_CHECKS))
def messages_to_other_incarnations_are_accepted(patch: pytest.MonkeyPatch) -> None:
    """A message between scopes counts whatever incarnations it names."""
    for room in (grants, peer_scopes):
        patch.setattr(room, "check_incarnations", lambda draft, peer, message: None)


@bug(37, scenario="two-scopes", seed=3, expects=CROSS_SCOPE_CHECKS)
def an_offer_is_accepted_twice(patch: pytest.MonkeyPatch) -> None:
    """A repeated offer adds its amount again."""

    def buggy_accept(draft: Draft, operation: Operation, claim: Accept) -> int | Refused:
        found = draft.lookup(key_of("Grant", claim.name))
        if found is None or claim.serial > found[0].status.serial or not found[0].spec.issuer:
            return original_accept(draft, operation, claim)
        grant: Grant = found[0]
        draft.put(replace(grant, spec=replace(grant.spec, amount=claim.spec.amount)))
        return claim.serial

    original_accept = grants.accept
    overrule(patch, Accept, buggy_accept)


@bug(37, scenario="two-scopes", expects=CROSS_SCOPE_CHECKS)
def returned_capacity_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A holder reports a return, and keeps the capacity."""
    original_return_capacity = grants.return_capacity

    def buggy_return_capacity(draft: Draft, operation: Operation, claim: ReturnCapacity) -> int | Refused:
        ruled = original_return_capacity(draft, operation, claim)
        found = draft.lookup(key_of("Grant", claim.name))
        if isinstance(ruled, int) and found is not None:
            kept = replace(found[0].spec, amount=found[0].spec.amount + claim.amount)
            less[claim.name, ruled] = found[0].spec.amount
            draft.put(replace(found[0], spec=kept))
        return ruled

    def buggy_credit(draft: Draft, operation: Operation, claim: Credit) -> int | Refused:
        reported = less.get((claim.name, claim.report), claim.remaining)
        return original_credit(draft, operation, replace(claim, remaining=reported))

    original_credit = grants.credit
    less: dict[tuple[str, int], Any] = {}
    overrule(patch, ReturnCapacity, buggy_return_capacity)
    overrule(patch, Credit, buggy_credit)


@bug(18, 34, scenario="lapsed-policies", expects=("placement_policy_is_recorded_and_in_force",))
def a_policy_is_used_past_its_lease(patch: pytest.MonkeyPatch) -> None:
    """Replicas are placed under a policy whose lease was not renewed in time."""
    patch.setattr(placement, "_is_before", lambda draft, deadline: True)
