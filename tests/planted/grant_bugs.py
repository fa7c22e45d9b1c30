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

    def alone(draft: Draft, ledger: GrantLedger) -> Refused | None:
        if not ledger.is_live or not ledger.is_unexpired(draft.time.now_ms):
            return lifeless(draft, ledger)
        return None

    def offer_twice(self: BudgetHolder) -> Iterator[AnyClaim]:
        for claim in offers(self):
            yield claim
            if isinstance(claim, Issue):
                longer = Duration(10 * claim.spec.ttl)
                yield Issue(self.new_name("handed-on"), replace(claim.spec, parent=claim.name, ttl=longer))

    lifeless, offers = placement.check_alive, BudgetHolder._offers
    patch.setattr(BudgetHolder, "_offers", offer_twice)
    patch.setattr(placement, "check_alive", alone)
    patch.setattr(grants, "check_alive", alone)
    patch.setattr(grants, "_capped", lambda draft, deadline, parent: deadline)


@bug(18, 34, scenario="lapsed-grants", expects=GRANT_CHARGE_CHECKS)
def a_grant_is_used_past_its_term(patch: pytest.MonkeyPatch) -> None:
    """An expired grant is drawn on as before."""
    patch.setattr(GrantLedger, "is_unexpired", lambda self, now_ms: True)


@bug(34, scenario="lapsed-grants", seed=2, expects=CROSS_SCOPE_CHECKS)
def an_unreported_grant_is_granted_again(patch: pytest.MonkeyPatch) -> None:
    """A grant that expired in another scope is taken back without its report."""
    close, tend = grants.close, BudgetIssuer._maintain

    def take_back(draft: Draft, operation: Operation, claim: Close) -> int | Refused:
        ledger = draft.ledgers.grant(claim.name)
        if ledger is not None and ledger.granted_to_other_scope and not ledger.is_unexpired(draft.time.now_ms):
            draft.delete(key_of("Grant", claim.name))
            return 0
        return close(draft, operation, claim)

    def impatient(self: BudgetIssuer, grant: Grant, *args: Any) -> Iterator[AnyClaim]:
        yield Close(grant.metadata.name)
        yield from tend(self, grant, *args)

    overrule(patch, Close, take_back)
    patch.setattr(BudgetIssuer, "_maintain", impatient)


@bug(37, scenario="two-scopes", expects=GRANT_RETURN_CHECKS)
def drawn_capacity_is_returned(patch: pytest.MonkeyPatch) -> None:
    """A scope returns part of a grant without checking whether it is drawn."""
    covers = grants._check_amount

    def blindly(draft: Draft, ledger: GrantLedger, amount: Amount, drawing: bool = True) -> Refused | None:
        return covers(draft, ledger, amount) if drawing else None

    patch.setattr(grants, "_check_amount", blindly)


@bug(37, scenario="two-scopes", seed=2, expects=GRANT_RETURN_CHECKS)
def a_drawn_grant_is_closed_as_unused(patch: pytest.MonkeyPatch) -> None:
    """A scope that closes a grant reports that it keeps nothing."""
    close, taken = grants.close, GrantLedger.committed

    def empty(draft: Draft, operation: Operation, claim: Close) -> int | Refused:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(GrantLedger, "committed", lambda self: Amount() if self.grant.spec.issuer else taken(self))
            return close(draft, operation, claim)

    overrule(patch, Close, empty)


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

    def again(draft: Draft, operation: Operation, claim: Accept) -> int | Refused:
        found = draft.lookup(key_of("Grant", claim.name))
        if found is None or claim.serial > found[0].status.serial or not found[0].spec.issuer:
            return accept(draft, operation, claim)
        grant: Grant = found[0]
        draft.put(replace(grant, spec=replace(grant.spec, amount=claim.spec.amount)))
        return claim.serial

    accept = grants.accept
    overrule(patch, Accept, again)


@bug(37, scenario="two-scopes", expects=CROSS_SCOPE_CHECKS)
def returned_capacity_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A holder reports a return, and keeps the capacity."""
    give_back = grants.return_capacity

    def keep(draft: Draft, operation: Operation, claim: ReturnCapacity) -> int | Refused:
        ruled = give_back(draft, operation, claim)
        found = draft.lookup(key_of("Grant", claim.name))
        if isinstance(ruled, int) and found is not None:
            kept = replace(found[0].spec, amount=found[0].spec.amount + claim.amount)
            less[claim.name, ruled] = found[0].spec.amount
            draft.put(replace(found[0], spec=kept))
        return ruled

    def believe(draft: Draft, operation: Operation, claim: Credit) -> int | Refused:
        reported = less.get((claim.name, claim.report), claim.remaining)
        return credit(draft, operation, replace(claim, remaining=reported))

    credit = grants.credit
    less: dict[tuple[str, int], Any] = {}
    overrule(patch, ReturnCapacity, keep)
    overrule(patch, Credit, believe)


@bug(18, 34, scenario="lapsed-policies", expects=("placement_policy_is_recorded_and_in_force",))
def a_policy_is_used_past_its_lease(patch: pytest.MonkeyPatch) -> None:
    """Replicas are placed under a policy whose lease was not renewed in time."""
    patch.setattr(placement, "_is_before", lambda draft, deadline: True)
